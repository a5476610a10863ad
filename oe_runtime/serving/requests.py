"""TensorFlow Serving's REST requests and replies, as plain JSON values.

https://www.tensorflow.org/tfx/serving/api_rest
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import InputError, OeError, ServerLost, ServingError
from oe_runtime.model_description import SIGNATURE, Signature, Tensor
from oe_runtime.serving.checkpoints import NotKept
from oe_runtime.serving.model import Model, NotServed
from oe_runtime.serving.versions import ENDING, Asked, NotFound, Versions

# TensorFlow's names of dtypes.
_DTYPES = {"float16": "DT_HALF", "float32": "DT_FLOAT", "float64": "DT_DOUBLE"}
_SAME_NAMES = "bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool string"
_DTYPES |= {name: f"DT_{name.upper()}" for name in _SAME_NAMES.split()}
LONGEST_VERSION = 19  # digits
LONGEST_LABEL = 256  # characters of a version label: of its 64 KiB, an HTTP head needs 12 for one character


def parse_inputs(request: Any, signatures: Mapping[str, Signature]) -> tuple[str, dict[str, Any], bool]:
    """Return a predict request's signature, its inputs by name, and whether they come by row ("instances").

    Raises InputError.
    """
    if not isinstance(request, dict):
        raise InputError("the body is not a JSON object")
    if unknown := request.keys() - {"signature_name", "instances", "inputs"}:
        raise InputError(f"the request has an unknown field {sorted(unknown)[0]!r}")
    name = find_signature(request.get("signature_name", ""), signatures)
    tensors = signatures[name].inputs
    if ("instances" in request) == ("inputs" in request):
        raise InputError("the request must have one of 'instances' and 'inputs'")
    if "inputs" in request:
        inputs = request["inputs"]
        if not isinstance(inputs, dict):
            inputs = {_only(tensors): inputs}
        return name, _without_base64(inputs, tensors), False
    rows = request["instances"]
    if not isinstance(rows, list) or not rows:
        raise InputError("'instances' must be a list of at least one example")
    named = [isinstance(row, dict) and row.keys() != {"b64"} for row in rows]
    if not any(named):
        return name, _without_base64({_only(tensors): rows}, tensors), True
    first = rows[0].keys() if named[0] else set()
    for i, row in enumerate(rows):
        if not named[i] or row.keys() != first:
            raise InputError(f"'instances': example {i} has other inputs than the first")
    return name, _without_base64({one: [row[one] for row in rows] for one in first}, tensors), True


def check_name(asked: str, name: str) -> None:
    """Raise NotFound for a request of another model than `name`."""
    if asked != name:
        raise NotFound(f"model {asked!r}; this is {name!r}")


def check_new_label(label: str) -> None:
    """Raise InputError for a version label that no request could name."""
    why = ""
    if not label:
        why = "it is empty"
    elif label in (".", ".."):
        why = "clients take it out of a URL"
    elif len(label) > LONGEST_LABEL:
        why = f"it has {len(label)} characters, and at most {LONGEST_LABEL} are read"
    elif any("\ud800" <= character <= "\udfff" for character in label):  # also bytes of a command line
        why = "it is not valid Unicode"
    if why:
        raise InputError(f"no request could name the version label {label[:40]!r}: {why}")


def find_signature(name: Any, signatures: Mapping[str, Signature]) -> str:
    """Return the asked signature's name. Raises InputError for one that the model lacks."""
    if name == "":
        return SIGNATURE
    if not isinstance(name, str) or name not in signatures:
        has = ", ".join(repr(one) for one in signatures)
        raise InputError(f"the model has no signature {name!r}; it has {has}")
    return name


def _only(tensors: Sequence[Tensor]) -> str:
    if len(tensors) != 1:
        names = ", ".join(tensor.name for tensor in tensors)
        raise InputError(f"the model has {len(tensors)} inputs ({names}): name each")
    return tensors[0].name


def _without_base64(inputs: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Decode texts given as {"b64": …}."""
    texts = {tensor.name for tensor in tensors if tensor.dtype == "string"}
    return {name: _decoded(name, value) if name in texts else value for name, value in inputs.items()}


def _decoded(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(name, item) for item in value]
    if isinstance(value, str) or (isinstance(value, dict) and value.keys() == {"b64"}):
        return decode_text(f"input {name!r}", value)
    return value


def decode_text(what: str, value: Any) -> bytes:
    """Return the bytes of a text, or of {"b64": …}. Raises InputError saying `what` is neither."""
    try:
        if isinstance(value, str):
            return value.encode()
        if value.keys() == {"b64"}:
            return base64.b64decode(value["b64"], validate=True)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise InputError(f"{what}: {value[:40]!r} is not valid Unicode") from None
    except (binascii.Error, TypeError, ValueError):
        raise InputError(f"{what}: 'b64' is not text in base64") from None
    raise InputError(f'{what} is neither a text nor {{"b64": …}}')


def make_reply(
    outputs: Mapping[str, NDArray[Any]], inputs: Mapping[str, Any] | None = None, *, by_row: bool
) -> dict[str, Any]:
    """Return the reply to a predict request of `inputs`.

    Raises for values without a JSON number InputError if they come from such a value of an input, else
    OeError.
    """
    values = {name: _json(name, array, inputs or {}) for name, array in outputs.items()}
    if not by_row:
        return {"outputs": next(iter(values.values())) if len(values) == 1 else values}
    if len(values) == 1:
        return {"predictions": next(iter(values.values()))}
    rows = zip(*values.values(), strict=True)
    return {"predictions": [dict(zip(values, row, strict=True)) for row in rows]}


def _json(name: str, array: NDArray[Any], inputs: Mapping[str, Any]) -> Any:
    if array.dtype.kind in "SO":
        texts = np.empty(array.shape, object)
        for place, item in np.ndenumerate(array):
            texts[place] = _text(item, as_bytes=name.endswith("_bytes"))
        return texts.tolist()
    return to_finite(name, array, inputs).tolist()


def to_finite(name: str, array: NDArray[Any], inputs: Mapping[str, Any]) -> NDArray[Any]:
    """Return an output of numbers for JSON.

    Raises InputError or OeError, as its cause is an input or not, for NaN and infinity, which JSON lacks.
    """
    if array.dtype.kind not in "iufb":  # bfloat16
        array = array.astype(np.float32)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        place = np.argwhere(~np.isfinite(array))[0]
        where = f" of example {place[0]}" if len(place) else ""
        said = f"output {name!r}{where} is {array[tuple(place)]}, for which JSON has no number"
        if cause := _not_finite(inputs, place[0] if len(place) else None):
            raise InputError(f"{cause}: {said}; send a number (gRPC answers it as it is)")
        raise OeError(f"{said}: the model, or its input, is broken (gRPC answers it as it is)")
    return array


def _text(item: Any, *, as_bytes: bool) -> Any:
    """Return bytes as text, or as {"b64": …} where they are none, or always, as TensorFlow Serving does."""
    if not isinstance(item, bytes):
        return str(item)
    if not as_bytes:
        with contextlib.suppress(UnicodeDecodeError):
            return item.decode()
    return {"b64": base64.b64encode(item).decode()}


def _not_finite(inputs: Mapping[str, Any], example: int | None) -> str:
    """Describe an input that is not finite in this example, or in any without a number; "" if all are."""
    for name, value in inputs.items():
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.asarray(value, object)
        if array.dtype.kind != "f":
            continue
        of_example = array.ndim and example is not None and example < len(array)
        found = array[example] if of_example else array
        if not np.isfinite(found).all():
            where = f" of example {example}" if of_example else ""
            return f"input {name!r}{where} is {found[~np.isfinite(found)].flat[0]}"
    return ""


def count_examples(outputs: Mapping[str, NDArray[Any]]) -> int:
    """Return how many examples an answer has."""
    return max((len(array) for array in outputs.values() if array.ndim), default=1)


def describe_error(error: Exception) -> tuple[str, str]:
    """Return gRPC's name of an error's status, and the message for the client."""
    if isinstance(error, (NotFound, NotKept)):
        return "NOT_FOUND", str(error)
    if isinstance(error, InputError):
        return "INVALID_ARGUMENT", str(error)
    if isinstance(error, NotServed):
        return "FAILED_PRECONDITION", str(error)
    if isinstance(error, (ServerLost, ServingError)):
        return "UNAVAILABLE", str(error)
    if isinstance(error, OeError):
        return "INTERNAL", str(error)
    traceback.print_exception(error)
    return "INTERNAL", f"internal error ({type(error).__name__}); the server's log has more"


def status(versions: Versions, asked: Asked) -> dict[str, Any]:
    """Return the reply to GET /v1/models/NAME: the state of the asked version, or of each."""
    if asked == Asked():
        found = versions.models
    else:
        model, number = versions.find(asked)
        found = {number: model}
    states = [_state(version, model, is_ending=versions.is_ending) for version, model in found.items()]
    if asked == Asked():
        begun = {"state": "LOADING", "status": {"error_code": "OK", "error_message": ""}}
        states += [{"version": str(version), **begun} for version in versions.loading]
    return {"model_version_status": states}


def _state(version: int, model: Model, *, is_ending: bool) -> dict[str, Any]:
    problem = ENDING if is_ending else model.unavailable
    return {
        "version": str(version),
        "state": "UNLOADING" if is_ending else "LOADING" if problem else "AVAILABLE",
        "status": {
            "error_code": "UNAVAILABLE" if problem else "OK",
            "error_message": problem or model.sources or model.slowness,
        },
    }


def metadata(name: str, model: Model, version: int) -> dict[str, Any]:
    """Return the reply to GET /v1/models/NAME/metadata."""
    signatures = {
        one: {
            "inputs": {tensor.name: _tensor_info(tensor) for tensor in signature.inputs},
            "outputs": {tensor.name: _tensor_info(tensor) for tensor in signature.outputs},
            "method_name": "tensorflow/serving/predict",
            "defaults": {},
        }
        for one, signature in model.signatures.items()
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def _tensor_info(tensor: Tensor) -> dict[str, Any]:
    sizes = tensor.shape or []
    return {
        "dtype": _DTYPES.get(tensor.dtype, "DT_INVALID"),
        "tensor_shape": {
            "dim": [{"size": str(-1 if size is None else size), "name": ""} for size in sizes],
            "unknown_rank": tensor.shape is None,
        },
        "name": tensor.name,
    }
