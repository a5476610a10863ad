"""The Open Inference Protocol, KServe's v2: its requests and replies as plain values.

REST and gRPC share them. https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import InputError, OeError
from oe_runtime.model_description import Signature, Tensor
from oe_runtime.serving import requests
from oe_runtime.serving.model import MAX_DIMENSIONS, as_array
from oe_runtime.serving.versions import Asked, Versions

# Names of dtypes. A bfloat16 is read as the float32 of its value, because NumPy has none.
_DATATYPES = {"bool": "BOOL", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}
_INTEGERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_DATATYPES |= {name: name.upper() for name in _INTEGERS.split()} | {"string": "BYTES"}
DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()} | {"BF16": "float32"}
_LENGTH = 4  # bytes of a text's length


@dataclass(frozen=True)
class Inference:
    """A request for an inference."""

    id: str
    signature: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Sequence[tuple[str, bool]]  # names, and whether the reply has the values as bytes


def parse_request(
    request: Any, signatures: Mapping[str, Signature], binary: bytes | None = None
) -> Inference:
    """Return a request from its JSON values and the `binary` part behind them.

    Over gRPC `binary` is None, and data may be arrays or bytes. Raises InputError.
    """
    _check_fields(request, "the request", {"id", "parameters", "inputs", "outputs"})
    over_http = binary is not None
    asked = _parameters(
        request, "the request", {"signature_name": str} | ({"binary_data_output": bool} if over_http else {})
    )
    signature = requests.find_signature(asked.get("signature_name", ""), signatures)
    inputs: dict[str, NDArray[Any]] = {}
    at = 0
    for name, one in _named(request.get("inputs"), "inputs", {"shape", "datatype", "data"}):
        what = f"input {name!r}"
        parameters = _parameters(one, what, {"binary_data_size": int} if over_http else {})
        if binary is not None and "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            if "data" in one:
                raise InputError(f"{what} has data and binary_data_size")
            if not 0 <= size <= len(binary) - at:
                raise InputError(f"{what}: its binary_data_size is {size}; {len(binary) - at} bytes are left")
            one = {**one, "data": binary[at : at + size]}
            at += size
        inputs[name] = _read_tensor(name, one)
    if binary is not None and at < len(binary):
        raise InputError(f"the body has {len(binary) - at} bytes more than its JSON and binary_data_size say")
    has = [tensor.name for tensor in signatures[signature].outputs]
    outputs = []
    as_bytes = asked.get("binary_data_output", False)
    for name, one in _named(request.get("outputs") or [], "outputs", set()):
        if name not in has:
            raise InputError(f"the model has no output {name!r}; it has {', '.join(has)}")
        known = {"binary_data": bool} if over_http else {}
        outputs.append((name, _parameters(one, f"output {name!r}", known).get("binary_data", as_bytes)))
    identifier = "" if request.get("id") is None else request["id"]  # some clients write null for none
    if not isinstance(identifier, str):
        raise InputError("the request's id must be a text")
    return Inference(identifier, signature, inputs, outputs or [(name, as_bytes) for name in has])


def make_reply(
    name: str, model_version: int, asked: Inference, outputs: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, Any], bytes]:
    """Return the reply's JSON values, and the values that come as bytes behind them.

    Raises InputError or OeError for values that JSON has not.
    """
    parts: list[bytes] = []
    described = []
    for output, as_bytes in asked.outputs:
        array = outputs[output]
        one = describe_output(output, array)
        if as_bytes:
            parts.append(to_bytes(array))
            one["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            one["data"] = _to_json(output, array, asked.inputs)
        described.append(one)
    reply: dict[str, Any] = {"model_name": name, "model_version": str(model_version)}
    if asked.id:
        reply["id"] = asked.id
    return {**reply, "outputs": described}, b"".join(parts)


def describe_output(name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Return an output's name, datatype and shape. Raises OeError for types that the protocol lacks."""
    dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
    if dtype not in _DATATYPES:
        raise OeError(f"output {name!r} is {dtype}, for which this protocol has no datatype")
    return {"name": name, "datatype": _DATATYPES[dtype], "shape": list(array.shape)}


def to_bytes(array: NDArray[Any]) -> bytes:
    """Return the values of an array in its binary form: texts with their length before each."""
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    return b"".join(len(one).to_bytes(_LENGTH, "little") + one for one in to_texts(array))


def to_texts(array: NDArray[Any]) -> list[bytes]:
    """Return the texts of an array, one after the other, as bytes."""
    return [one.encode() if isinstance(one, str) else one for one in array.reshape(-1).tolist()]


def find_version(asked: str, versions: Versions) -> Asked:
    """Return the asked version; "" is any. Raises NotFound for one that is not served."""
    is_number = asked.isascii() and asked.isdecimal() and len(asked) <= requests.LONGEST_VERSION
    if asked and not is_number:
        raise versions.not_found(f"version {asked[:40]!r} of {versions.name}")
    found = Asked(int(asked) if asked else None)
    versions.find(found)
    return found


def server_metadata() -> dict[str, Any]:
    """Return the reply to GET /v2."""
    return {"name": "oe_runtime", "version": _version(), "extensions": ["binary_tensor_data"]}


@cache
def _version() -> str:
    """Read from disk."""
    return version("oeprov")


def model_metadata(versions: Versions) -> dict[str, Any]:
    """Return the reply to GET /v2/models/NAME."""
    model = versions.main
    inputs = {}
    for tensor in model.inputs:
        inputs[tensor.name] = _tensor_metadata(tensor)
        if tensor.lengths is not None:  # the elements of all lists, and how many each has
            inputs[tensor.name]["shape"] = [-1]
            inputs[tensor.lengths] = _tensor_metadata(Tensor(tensor.lengths, "int64", [None]))
    return {
        "name": versions.name,
        "versions": [str(version) for version in versions.models],
        "platform": model.platform,
        "inputs": list(inputs.values()),
        "outputs": [_tensor_metadata(tensor) for tensor in model.outputs],
    }


def _tensor_metadata(tensor: Tensor) -> dict[str, Any]:
    shape = [None] if tensor.shape is None else tensor.shape
    return {
        "name": tensor.name,
        "datatype": _DATATYPES.get(tensor.dtype, tensor.dtype.upper()),
        "shape": [-1 if size is None else size for size in shape],
    }


def _check_fields(found: Any, what: str, known: set[str]) -> None:
    if not isinstance(found, dict):
        raise InputError(f"{what} is not a JSON object")
    if unknown := found.keys() - known:
        raise InputError(f"{what} has an unknown field {sorted(unknown)[0]!r}")


def _named(found: Any, where: str, known: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a list by their names, which differ."""
    if not isinstance(found, list):
        raise InputError(f"the request's {where!r} must be a list of tensors")
    names = set()
    for i, one in enumerate(found):
        _check_fields(one, f"{where}[{i}]", known | {"name", "parameters"})
        name = one.get("name")
        if not isinstance(name, str):
            raise InputError(f"{where}[{i}] has no name")
        if name in names:
            raise InputError(f"the request has {where[:-1]} {name!r} twice")
        names.add(name)
        yield name, one


def _parameters(holder: Mapping[str, Any], what: str, known: Mapping[str, type]) -> dict[str, Any]:
    """Return its parameters. Raises InputError naming one that is not known, and may change the answer."""
    found = {} if holder.get("parameters") is None else holder["parameters"]
    if not isinstance(found, dict):
        raise InputError(f"{what}: its parameters are not a JSON object")
    for name, value in found.items():
        if name not in known:
            raise InputError(f"{what} has the parameter {name!r}, which is not known here; leave it out")
        if type(value) is not known[name]:
            raise InputError(f"{what}: the parameter {name!r} must be {known[name].__name__}")
    return found


def _read_tensor(name: str, one: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of an input, whose data is a list, flat or as its shape, an array, or bytes."""
    shape, datatype = one.get("shape"), one.get("datatype")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**63 for size in shape)
    ):
        raise InputError(
            f"input {name!r}: its shape must be a list of at most {MAX_DIMENSIONS} sizes, which are integers "
            "from 0 on"
        )
    if not isinstance(datatype, str) or datatype not in DTYPES:
        raise InputError(f"input {name!r}: there is no datatype {datatype!r}; there are {', '.join(DTYPES)}")
    count, data = math.prod(shape), one.get("data")
    if isinstance(data, bytes):
        return _reshape(name, _from_bytes(name, datatype, data, shape), shape)
    if not isinstance(data, (list, np.ndarray)):
        raise InputError(f"input {name!r}: its data must be a list")
    array = as_array(Tensor(name, DTYPES[datatype], None), data)
    if array.shape not in ((count,), tuple(shape)):
        raise InputError(f"input {name!r} has data of the shape {list(array.shape)}; its shape is {shape}")
    return _reshape(name, array, shape)


def _reshape(name: str, array: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    try:
        return array.reshape(shape)
    except ValueError:  # without values, other sizes may still be beyond NumPy's
        raise InputError(f"input {name!r}: its shape is {list(shape)}, which is too large") from None


def _from_bytes(name: str, datatype: str, data: bytes, shape: Sequence[int]) -> NDArray[Any]:
    count = math.prod(shape)
    if datatype == "BYTES":
        texts = list(_split_texts(name, data))
        size, wanted, what = len(texts), count, "texts"
    else:
        itemsize = 2 if datatype == "BF16" else np.dtype(DTYPES[datatype]).itemsize
        size, wanted, what = len(data), count * itemsize, "bytes"
    if size != wanted:
        raise InputError(
            f"input {name!r} has {size} {what}; {datatype} of the shape {list(shape)} has {wanted}"
        )
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = texts
        return array
    if datatype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if datatype == "BOOL" and max(data, default=0) > 1:
        raise InputError(f"input {name!r}: a byte of BOOL is neither 0 nor 1")
    return np.frombuffer(data, DTYPES[datatype]).copy()  # PyTorch warns of arrays that cannot be written


def _split_texts(name: str, data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        begin = at + _LENGTH
        at = begin + int.from_bytes(data[at:begin], "little")
        if begin > len(data) or at > len(data):
            raise InputError(f"input {name!r}: a text has fewer bytes than the length before it")
        yield data[begin:at]


def _to_json(name: str, array: NDArray[Any], inputs: Mapping[str, Any]) -> list[Any]:
    """Return the values one after the other."""
    if array.dtype.kind not in "OSU":
        return list(requests.to_finite(name, array, inputs).reshape(-1).tolist())
    texts = array.reshape(-1).tolist()
    try:
        return [one.decode() if isinstance(one, bytes) else str(one) for one in texts]
    except UnicodeDecodeError:
        raise OeError(
            f"output {name!r} has bytes that are no text, which JSON has not: ask for it with the parameter "
            "binary_data, or over gRPC"
        ) from None
