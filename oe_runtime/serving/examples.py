"""Classification and regression of examples, as TensorFlow Serving does them by a SavedModel's signatures.

Such a signature takes tf.train.Example as texts, by the name `inputs`. It gives `classes` or `scores` or
both, each of the shape (examples, classes), or `outputs`, a number per example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import InputError, OeError
from oe_runtime.model_description import Signature
from oe_runtime.serving import requests
from oe_runtime.serving.versions import Asked, Versions

CLASSIFY, REGRESS = "classify", "regress"
_OUTPUTS = {CLASSIFY: ("classes", "scores"), REGRESS: ("outputs",)}
_INPUT = "inputs"
_MOST = 64 << 20  # bytes of the context in all examples


def find_signature(asked: Any, method: str, signatures: Mapping[str, Signature]) -> str:
    """Return the asked signature's name. Raises InputError if it is not for this method."""
    name = requests.find_signature(asked, signatures)
    takes = [(tensor.name, tensor.dtype) for tensor in signatures[name].inputs]
    gives = [tensor.name for tensor in signatures[name].outputs]
    if takes != [(_INPUT, "string")] or not gives or set(gives) - set(_OUTPUTS[method]):
        raise InputError(
            f"signature {name!r} cannot {method}, which needs tf.train.Example as {_INPUT!r}, and "
            f"{' or '.join(_OUTPUTS[method])}: it takes {', '.join(one for one, _ in takes)} and gives "
            f"{', '.join(gives)}; use predict"
        )
    return name


def parse_examples(request: Any, method: str, signatures: Mapping[str, Signature]) -> tuple[str, list[bytes]]:
    """Return the signature and the serialized examples of a request over REST. Raises InputError."""
    if not isinstance(request, dict):
        raise InputError("the body is not a JSON object")
    if unknown := request.keys() - {"signature_name", "context", "examples"}:
        raise InputError(f"the request has an unknown field {sorted(unknown)[0]!r}")
    signature = find_signature(request.get("signature_name", ""), method, signatures)
    rows = request.get("examples")
    if not isinstance(rows, list) or not rows:
        raise InputError("'examples' must be a list of at least one example")
    context = _serialize("context", request.get("context", {}))
    _check_size(context, rows)
    return signature, [context + _serialize(f"example {i}", row) for i, row in enumerate(rows)]


def serialize_input(sent: Any) -> list[bytes]:
    """Return the serialized examples of an Input of gRPC. Raises InputError."""
    context = b""
    if sent.WhichOneof("kind") == "example_list_with_context":
        # Messages one behind the other are merged; of a feature in both, the last one counts.
        context = sent.example_list_with_context.context.SerializeToString()
    examples = getattr(sent, sent.WhichOneof("kind") or "example_list").examples
    if not examples:
        raise InputError("the request has no example")
    _check_size(context, examples)
    return [context + one.SerializeToString() for one in examples]


def compute(
    versions: Versions, asked: Asked, method: str, signature: str, examples: Sequence[bytes]
) -> tuple[list[Any], int]:
    """Return the result for each example, and the version that answered.

    It is the list of (label, score) of each class, or a number. Raises InputError, and OeError for outputs of
    other shapes.
    """
    texts = np.empty(len(examples), object)
    texts[:] = examples
    outputs, version = versions.predict(asked, {_INPUT: texts}, signature)
    shapes = {array.shape for array in outputs.values()}
    shape = next(iter(shapes))
    is_right = len(shapes) == 1 and shape[:1] == (len(examples),)
    if method == REGRESS and is_right and shape[1:] in ((), (1,)):
        return list(outputs["outputs"].reshape(-1).tolist()), version
    if method == REGRESS or not is_right or len(shape) != 2:
        found = ", ".join(f"{name!r} of the shape {array.shape}" for name, array in outputs.items())
        raise OeError(f"signature {signature!r} gives {found}, so that it cannot {method}")
    labels = outputs.get("classes", np.full(shape, "", object)).tolist()
    scores = outputs.get("scores", np.zeros(shape, np.float32)).tolist()
    try:
        return [
            [(_decode(a), b) for a, b in zip(*row, strict=True)] for row in zip(labels, scores, strict=True)
        ], version
    except UnicodeDecodeError:
        raise OeError(f"signature {signature!r} gives a label that is no text") from None


def numbers(method: str, result: Sequence[Any]) -> tuple[str, NDArray[Any]]:
    """Return the name and the values of the numbers of a result."""
    rows = result if method == REGRESS else [[score for _, score in pairs] for pairs in result]
    return _OUTPUTS[method][-1], np.array(rows)


def _check_size(context: bytes, examples: Sequence[Any]) -> None:
    if len(context) * len(examples) > _MOST:
        raise InputError(
            f"the context has {len(context)} bytes, which {len(examples)} examples would repeat; at most "
            f"{_MOST} bytes: send fewer examples at a time"
        )


def _decode(label: Any) -> str:
    return label.decode() if isinstance(label, bytes) else str(label)


def _serialize(what: str, features: Any) -> bytes:
    """Return the tf.train.Example of JSON values by name. Raises InputError."""
    from oe_runtime.serving.messages import message  # needs protobuf, which TensorFlow brings

    if not isinstance(features, dict):
        raise InputError(f"{what} is not a JSON object of features")
    example = message("Example")()
    for name, value in features.items():
        requests.decode_text(f"{what}: a feature's name", name)
        values = value if isinstance(value, list) else [value]
        where = f"{what}: feature {name!r}"
        kinds = {type(one) for one in values}
        if kinds <= {str, dict}:
            found = [requests.decode_text(where, one) for one in values]
            example.features.feature[name].bytes_list.value.extend(found)
        elif kinds == {int}:
            if not all(-(2**63) <= one < 2**63 for one in values):
                raise InputError(f"{where} has a number outside of int64")
            example.features.feature[name].int64_list.value.extend(values)
        elif kinds == {float}:
            if any(abs(one) > np.finfo(np.float32).max and np.isfinite(one) for one in values):
                raise InputError(f"{where} has a number outside of float32")
            example.features.feature[name].float_list.value.extend(values)
        else:
            raise InputError(
                f"{where} must have texts, integers, or numbers with a point, of one of these kinds"
            )
    serialized: bytes = example.SerializeToString()
    return serialized
