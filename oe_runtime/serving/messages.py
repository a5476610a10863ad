"""The messages of TensorFlow Serving's gRPC services that this server reads and writes.

Made here, from the numbers, names and types in TensorFlow's and TensorFlow Serving's .proto files, so that
neither is needed to answer. The classes have a pool of their own: TensorFlow's may be loaded beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf import any_pb2, descriptor_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from oe_runtime.errors import InputError, OeError

# Fields of messages: number, name and type. `*` is before the type of a repeated field, `{` before that of
# a map's values, `?` before those of which a message has one.
_TENSORS = {
    "TensorShapeProto": "2 dim *Dim, 3 unknown_rank bool",
    "TensorShapeProto.Dim": "1 size int64, 2 name string",
    "TensorProto": (
        "1 dtype DataType, 2 tensor_shape TensorShapeProto, 4 tensor_content bytes, 13 half_val *int32, "
        "5 float_val *float, 6 double_val *double, 7 int_val *int32, 8 string_val *bytes, "
        "9 scomplex_val *float, 10 int64_val *int64, 11 bool_val *bool, 12 dcomplex_val *double, "
        "16 uint32_val *uint32, 17 uint64_val *uint64"
    ),
    "TensorInfo": "1 name string, 2 dtype DataType, 3 tensor_shape TensorShapeProto",
    "SignatureDef": (
        "1 inputs {TensorInfo, 2 outputs {TensorInfo, 3 method_name string, 4 defaults {TensorProto"
    ),
}
_SERVICES = {
    "ModelSpec": "1 name string, 2 version ?Int64Value, 4 version_label ?string, 3 signature_name string",
    "PredictRequest": "1 model_spec ModelSpec, 2 inputs {TensorProto, 3 output_filter *string",
    "PredictResponse": "2 model_spec ModelSpec, 1 outputs {TensorProto",
    "SignatureDefMap": "1 signature_def {SignatureDef",
    "GetModelMetadataRequest": "1 model_spec ModelSpec, 2 metadata_field *string",
    "GetModelMetadataResponse": "1 model_spec ModelSpec, 2 metadata {Any",
    "StatusProto": "1 error_code Code, 2 error_message string",
    "ModelVersionStatus": "1 version int64, 2 state State, 3 status StatusProto",
    "GetModelStatusRequest": "1 model_spec ModelSpec",
    "GetModelStatusResponse": "1 model_version_status *ModelVersionStatus",
}
_ENUMS = {
    "Code": "0 OK, 14 UNAVAILABLE",
    "State": "0 UNKNOWN, 20 LOADING, 30 AVAILABLE, 40 UNLOADING",
    "DataType": (
        "0 DT_INVALID, 1 DT_FLOAT, 2 DT_DOUBLE, 3 DT_INT32, 4 DT_UINT8, 5 DT_INT16, 6 DT_INT8, 7 DT_STRING, "
        "8 DT_COMPLEX64, 9 DT_INT64, 10 DT_BOOL, 14 DT_BFLOAT16, 17 DT_UINT16, 18 DT_COMPLEX128, 19 DT_HALF, "
        "22 DT_UINT32, 23 DT_UINT64"
    ),
}
# NumPy's type, the enum's name, and the field of the values and their type there (TensorFlow's AsProtoField).
_TYPES = [
    ("float16", "DT_HALF", "half_val", "uint16"),
    ("bfloat16", "DT_BFLOAT16", "half_val", "uint16"),
    ("float32", "DT_FLOAT", "float_val", "float32"),
    ("float64", "DT_DOUBLE", "double_val", "float64"),
    ("complex64", "DT_COMPLEX64", "scomplex_val", "float32"),
    ("complex128", "DT_COMPLEX128", "dcomplex_val", "float64"),
    ("bool", "DT_BOOL", "bool_val", "bool"),
    *((one, f"DT_{one.upper()}", f"{one}_val", one) for one in ("int64", "uint32", "uint64")),
    *((one, f"DT_{one.upper()}", "int_val", one) for one in ("int8", "int16", "int32", "uint8", "uint16")),
]
_PACKAGES = {"tensorflow": _TENSORS, "tensorflow.serving": _SERVICES}
_KNOWN = {"Int64Value": "google.protobuf.Int64Value", "Any": "google.protobuf.Any"}


def _types() -> dict[str, tuple[str, str]]:
    """Return the kind and the full name of every message and enum by the name that fields have."""
    found = {name: ("MESSAGE", whole) for name, whole in _KNOWN.items()}
    found |= {name: ("ENUM", f"tensorflow.{name}") for name in _ENUMS}
    for package, messages in _PACKAGES.items():
        found |= {name.rpartition(".")[2]: ("MESSAGE", f"{package}.{name}") for name in messages}
    return found


_NAMED = _types()


def _add_message(into: Any, name: str, fields: str) -> None:
    message = into.add(name=name)
    proto = descriptor_pb2.FieldDescriptorProto
    for text in fields.split(", "):
        number, field, kind = text.split()
        mark, kind = (kind[0], kind[1:]) if kind[0] in "*{?" else ("", kind)
        added = message.field.add(name=field, number=int(number))
        added.label = proto.LABEL_REPEATED if mark in ("*", "{") else proto.LABEL_OPTIONAL
        if mark == "?":  # one of these
            if not message.oneof_decl:
                message.oneof_decl.add(name="version_choice")
            added.oneof_index = 0
        if mark == "{":  # by name
            entry = f"{''.join(part.capitalize() for part in field.split('_'))}Entry"
            _add_message(message.nested_type, entry, f"1 key string, 2 value {kind}")
            message.nested_type[-1].options.map_entry = True
            added.type, added.type_name = proto.TYPE_MESSAGE, entry
        elif kind in _NAMED:
            added.type = getattr(proto, f"TYPE_{_NAMED[kind][0]}")
            added.type_name = f".{_NAMED[kind][1]}"
        else:
            added.type = getattr(proto, f"TYPE_{kind.upper()}")


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for known in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    before = [any_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name]
    for package, messages in _PACKAGES.items():
        file = descriptor_pb2.FileDescriptorProto(
            name=f"oe_runtime/{package}.proto", package=package, syntax="proto3", dependency=before
        )
        for name, values in _ENUMS.items() if package == "tensorflow" else ():
            enum = file.enum_type.add(name=name)
            for text in values.split(", "):
                number, value = text.split()
                enum.value.add(name=value, number=int(number))
        for name, fields in messages.items():
            outer, _, inner = name.rpartition(".")
            places = {one.name: one.nested_type for one in file.message_type} | {"": file.message_type}
            _add_message(places[outer], inner, fields)
        pool.AddSerializedFile(file.SerializeToString())
        before = [*before, file.name]
    return pool


_POOL = _pool()
_NUMBERS = _POOL.FindEnumTypeByName("tensorflow.DataType").values_by_name
_STRING = _NUMBERS["DT_STRING"].number
_FROM_NUMPY = {name: (_NUMBERS[enum].number, field, kind) for name, enum, field, kind in _TYPES}
_FROM_NUMBER = {number: (name, field, kind) for name, (number, field, kind) in _FROM_NUMPY.items()}


def message(name: str) -> Any:
    """Return the class of a message, such as "PredictRequest"."""
    return GetMessageClass(_POOL.FindMessageTypeByName(_NAMED[name][1]))


def tensor_proto(array: Any) -> Any:
    """Return a TensorProto in TensorFlow Serving's form: values in float_val and similar fields.

    Clients written for TensorFlow Serving do not read tensor_content, into which TensorFlow packs two or more
    values. Raises OeError for a type that no field holds.
    """
    array = np.asarray(array)
    proto = message("TensorProto")()
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if array.dtype.kind in "OSU":
        proto.dtype = _STRING
        texts: Iterable[Any] = array.reshape(-1).tolist()
        proto.string_val.extend(one.encode() if isinstance(one, str) else one for one in texts)
        return proto
    if array.dtype.name not in _FROM_NUMPY:
        raise OeError(f"an output is {array.dtype.name}, which gRPC's messages cannot hold: ask by REST")
    proto.dtype, field, kind = _FROM_NUMPY[array.dtype.name]
    getattr(proto, field).extend(array.reshape(-1).view(kind).tolist())
    return proto


def read_tensor(proto: Any, most: int) -> NDArray[Any]:
    """Return the array of a TensorProto of up to `most` values, wherever its values are.

    Of fewer values than the shape has, the last one fills it; without any, all are zero. Raises InputError.
    """
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if any(size < 0 for size in shape) or (count := math.prod(shape)) > most:
        raise InputError(f"it has the shape {shape}")
    try:
        values = _values(proto)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"it is not a tensor: {error}") from error
    if len(values) > count or (proto.tensor_content and len(values) < count):
        raise InputError(f"it is not a tensor: it has {len(values)} values for the shape {shape}")
    if 0 < len(values) < count:
        values = np.concatenate([values, np.repeat(values[-1:], count - len(values))])
    elif not len(values):
        values = np.full(count, b"", object) if proto.dtype == _STRING else np.zeros(count, values.dtype)
    return values.reshape(shape)


def _values(proto: Any) -> NDArray[Any]:
    """Return the values that a TensorProto has."""
    if proto.dtype == _STRING and not proto.tensor_content:
        texts = np.empty(len(proto.string_val), object)
        texts[:] = list(proto.string_val)
        return texts
    if proto.dtype not in _FROM_NUMBER:
        raise TypeError(f"type {proto.dtype} of tensorflow.DataType is not read here")
    name, field, kind = _FROM_NUMBER[proto.dtype]
    dtype = np.dtype(name)  # bfloat16 is known where ml_dtypes has been imported, as by TensorFlow
    if proto.tensor_content:
        return np.frombuffer(proto.tensor_content, dtype).copy()
    return np.fromiter(getattr(proto, field), kind).view(dtype)
