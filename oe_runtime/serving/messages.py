"""The messages of the gRPC services that this server answers.

Made here, from the numbers, names and types in the .proto files of TensorFlow, TensorFlow Serving, the Open
Inference Protocol and gRPC, so that none of these is needed to answer. The classes have a pool of their own:
TensorFlow's may be loaded beside them, and clients may ask for the services by reflection.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf import any_pb2, descriptor_pb2, wrappers_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from oe_runtime.errors import InputError, OeError
from oe_runtime.serving.model import MAX_DIMENSIONS

# Fields of messages: number, name and type. `*` is before the type of a repeated field, `{` before that of
# a map's values, `NAME?` before those of which a message has one, by that name.
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
    "Example": "1 features Features",
    "Features": "1 feature {Feature",
    "Feature": "1 bytes_list kind?BytesList, 2 float_list kind?FloatList, 3 int64_list kind?Int64List",
    "BytesList": "1 value *bytes",
    "FloatList": "1 value *float",
    "Int64List": "1 value *int64",
}
_SERVICES = {
    "ModelSpec": (
        "1 name string, 2 version version_choice?Int64Value, 4 version_label version_choice?string, "
        "3 signature_name string"
    ),
    "PredictRequest": "1 model_spec ModelSpec, 2 inputs {TensorProto, 3 output_filter *string",
    "PredictResponse": "2 model_spec ModelSpec, 1 outputs {TensorProto",
    "Input": "1 example_list kind?ExampleList, 2 example_list_with_context kind?ExampleListWithContext",
    "ExampleList": "1 examples *Example",
    "ExampleListWithContext": "1 examples *Example, 2 context Example",
    "ClassificationRequest": "1 model_spec ModelSpec, 2 input Input",
    "ClassificationResponse": "1 result ClassificationResult, 2 model_spec ModelSpec",
    "ClassificationResult": "1 classifications *Classifications",
    "Classifications": "1 classes *Class",
    "Class": "1 label string, 2 score float",
    "RegressionRequest": "1 model_spec ModelSpec, 2 input Input",
    "RegressionResponse": "1 result RegressionResult, 2 model_spec ModelSpec",
    "RegressionResult": "1 regressions *Regression",
    "Regression": "1 value float",
    "SignatureDefMap": "1 signature_def {SignatureDef",
    "GetModelMetadataRequest": "1 model_spec ModelSpec, 2 metadata_field *string",
    "GetModelMetadataResponse": "1 model_spec ModelSpec, 2 metadata {Any",
    "StatusProto": "1 error_code Code, 2 error_message string",
    "ModelVersionStatus": "1 version int64, 2 state State, 3 status StatusProto",
    "GetModelStatusRequest": "1 model_spec ModelSpec",
    "GetModelStatusResponse": "1 model_version_status *ModelVersionStatus",
    "FileSystemStoragePathSourceConfig": "",
    "FileSystemStoragePathSourceConfig.ServableVersionPolicy": (
        "100 latest policy_choice?Latest, 101 all policy_choice?All, 102 specific policy_choice?Specific"
    ),
    "FileSystemStoragePathSourceConfig.ServableVersionPolicy.Latest": "1 num_versions uint32",
    "FileSystemStoragePathSourceConfig.ServableVersionPolicy.All": "",
    "FileSystemStoragePathSourceConfig.ServableVersionPolicy.Specific": "1 versions *int64",
    "LoggingConfig": "",
    "ModelConfig": (
        "1 name string, 2 base_path string, 3 model_type ModelType, 4 model_platform string, "
        "7 model_version_policy ServableVersionPolicy, 8 version_labels {int64, "
        "6 logging_config LoggingConfig"
    ),
    "ModelConfigList": "1 config *ModelConfig",
    "ModelServerConfig": "1 model_config_list config?ModelConfigList, 2 custom_model_config config?Any",
    "ReloadConfigRequest": "1 config ModelServerConfig, 2 metric_names *string",
    "ReloadConfigResponse": "1 status StatusProto",
}
_INFERENCE = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions *string",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse": (
        "1 name string, 2 versions *string, 3 platform string, 4 inputs *TensorMetadata, "
        "5 outputs *TensorMetadata"
    ),
    "ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3 shape *int64",
    "InferParameter": (
        "1 bool_param parameter_choice?bool, 2 int64_param parameter_choice?int64, "
        "3 string_param parameter_choice?string, 4 double_param parameter_choice?double, "
        "5 uint64_param parameter_choice?uint64"
    ),
    "InferTensorContents": (
        "1 bool_contents *bool, 2 int_contents *int32, 3 int64_contents *int64, 4 uint_contents *uint32, "
        "5 uint64_contents *uint64, 6 fp32_contents *float, 7 fp64_contents *double, 8 bytes_contents *bytes"
    ),
    "ModelInferRequest": (
        "1 model_name string, 2 model_version string, 3 id string, 4 parameters {InferParameter, "
        "5 inputs *InferInputTensor, 6 outputs *InferRequestedOutputTensor, 7 raw_input_contents *bytes"
    ),
    "ModelInferRequest.InferInputTensor": (
        "1 name string, 2 datatype string, 3 shape *int64, 4 parameters {InferParameter, "
        "5 contents InferTensorContents"
    ),
    "ModelInferRequest.InferRequestedOutputTensor": "1 name string, 2 parameters {InferParameter",
    "ModelInferResponse": (
        "1 model_name string, 2 model_version string, 3 id string, 4 parameters {InferParameter, "
        "5 outputs *InferOutputTensor, 6 raw_output_contents *bytes"
    ),
    "ModelInferResponse.InferOutputTensor": (
        "1 name string, 2 datatype string, 3 shape *int64, 4 parameters {InferParameter, "
        "5 contents InferTensorContents"
    ),
}
_HEALTH = {"HealthCheckRequest": "1 service string", "HealthCheckResponse": "1 status ServingStatus"}
# Those of v1alpha are the same.
_REFLECTION = {
    "ServerReflectionRequest": (
        "1 host string, 3 file_by_filename message_request?string, "
        "4 file_containing_symbol message_request?string, "
        "5 file_containing_extension message_request?ExtensionRequest, "
        "6 all_extension_numbers_of_type message_request?string, 7 list_services message_request?string"
    ),
    "ExtensionRequest": "1 containing_type string, 2 extension_number int32",
    "ServerReflectionResponse": (
        "1 valid_host string, 2 original_request ServerReflectionRequest, "
        "4 file_descriptor_response message_response?FileDescriptorResponse, "
        "5 all_extension_numbers_response message_response?ExtensionNumberResponse, "
        "6 list_services_response message_response?ListServiceResponse, "
        "7 error_response message_response?ErrorResponse"
    ),
    "FileDescriptorResponse": "1 file_descriptor_proto *bytes",
    "ExtensionNumberResponse": "1 base_type_name string, 2 extension_number *int32",
    "ListServiceResponse": "1 service *ServiceResponse",
    "ServiceResponse": "1 name string",
    "ErrorResponse": "1 error_code int32, 2 error_message string",
}
_ENUMS = {
    "tensorflow": {
        "Code": "0 OK, 14 UNAVAILABLE",
        "State": "0 UNKNOWN, 20 LOADING, 30 AVAILABLE, 40 UNLOADING",
        "DataType": (
            "0 DT_INVALID, 1 DT_FLOAT, 2 DT_DOUBLE, 3 DT_INT32, 4 DT_UINT8, 5 DT_INT16, 6 DT_INT8, "
            "7 DT_STRING, 8 DT_COMPLEX64, 9 DT_INT64, 10 DT_BOOL, 14 DT_BFLOAT16, 17 DT_UINT16, "
            "18 DT_COMPLEX128, 19 DT_HALF, 22 DT_UINT32, 23 DT_UINT64"
        ),
    },
    "tensorflow.serving": {"ModelType": "0 MODEL_TYPE_UNSPECIFIED, 1 TENSORFLOW, 2 OTHER"},
    "grpc.health.v1": {"ServingStatus": "0 UNKNOWN, 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN"},
}
# Methods of services: name, and the beginning of the names of its request and response. `*` is before a
# stream of responses, `**` before one of both.
METHODS = {
    "tensorflow.serving.PredictionService": (
        "Predict Predict, Classify Classification, Regress Regression, GetModelMetadata GetModelMetadata"
    ),
    "tensorflow.serving.ModelService": (
        "GetModelStatus GetModelStatus, HandleReloadConfigRequest ReloadConfig"
    ),
    "inference.GRPCInferenceService": (
        "ServerLive ServerLive, ServerReady ServerReady, ModelReady ModelReady, "
        "ServerMetadata ServerMetadata, ModelMetadata ModelMetadata, ModelInfer ModelInfer"
    ),
    "grpc.health.v1.Health": "Check HealthCheck, Watch *HealthCheck",
    "grpc.reflection.v1.ServerReflection": "ServerReflectionInfo **ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection": "ServerReflectionInfo **ServerReflection",
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
_PACKAGES = {
    "tensorflow": _TENSORS,
    "tensorflow.serving": _SERVICES,
    "inference": _INFERENCE,
    "grpc.health.v1": _HEALTH,
    "grpc.reflection.v1": _REFLECTION,
    "grpc.reflection.v1alpha": {},
}
_KNOWN = {"Int64Value": "google.protobuf.Int64Value", "Any": "google.protobuf.Any"}
_KIND = re.compile(r"(?:(\w+)\?|([*{]))?(\w+)")


def _types() -> dict[str, tuple[str, str]]:
    """Return the kind and the full name of every message and enum by the name that fields have."""
    found = {name: ("MESSAGE", whole) for name, whole in _KNOWN.items()}
    for package, enums in _ENUMS.items():
        found |= {name: ("ENUM", f"{package}.{name}") for name in enums}
    for package, messages in _PACKAGES.items():
        found |= {name.rpartition(".")[2]: ("MESSAGE", f"{package}.{name}") for name in messages}
    return found


_NAMED = _types()


def _add_message(into: Any, name: str, fields: str) -> None:
    message = into.add(name=name)
    proto = descriptor_pb2.FieldDescriptorProto
    for text in fields.split(", ") if fields else ():
        number, field, marked = text.split()
        found = _KIND.fullmatch(marked)
        assert found is not None, text  # noqa: S101 - the tables above
        choice, mark, kind = found.groups()
        added = message.field.add(name=field, number=int(number))
        added.label = proto.LABEL_REPEATED if mark else proto.LABEL_OPTIONAL
        if choice:
            if not message.oneof_decl:
                message.oneof_decl.add(name=choice)
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


def _add_service(into: Any, name: str, methods: str) -> None:
    service = into.add(name=name)
    for text in methods.split(", "):
        method, messages = text.split()
        begin = messages.lstrip("*")
        service.method.add(
            name=method,
            input_type=f".{_NAMED[f'{begin}Request'][1]}",
            output_type=f".{_NAMED[f'{begin}Response'][1]}",
            client_streaming=messages.startswith("**"),
            server_streaming=messages.startswith("*"),
        )


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    for known in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    before = [any_pb2.DESCRIPTOR.name, wrappers_pb2.DESCRIPTOR.name]
    for package, messages in _PACKAGES.items():
        file = descriptor_pb2.FileDescriptorProto(
            name=f"oe_runtime/{package}.proto", package=package, syntax="proto3", dependency=before
        )
        for name, values in _ENUMS.get(package, {}).items():
            enum = file.enum_type.add(name=name)
            for text in values.split(", "):
                number, value = text.split()
                enum.value.add(name=value, number=int(number))
        places = {"": file.message_type}
        for name, fields in messages.items():
            outer, _, inner = name.rpartition(".")
            _add_message(places[outer], inner, fields)
            places[name] = places[outer][-1].nested_type
        for name, methods in METHODS.items():
            whole, _, own = name.rpartition(".")
            if whole == package:
                _add_service(file.service, own, methods)
        pool.AddSerializedFile(file.SerializeToString())
        before = [*before, file.name]
    return pool


POOL = _pool()
_NUMBERS = POOL.FindEnumTypeByName("tensorflow.DataType").values_by_name
_STRING = _NUMBERS["DT_STRING"].number
_FROM_NUMPY = {name: (_NUMBERS[enum].number, field, kind) for name, enum, field, kind in _TYPES}
_FROM_NUMBER = {number: (name, field, kind) for name, (number, field, kind) in _FROM_NUMPY.items()}


def message(name: str) -> Any:
    """Return the class of a message, such as "PredictRequest"."""
    return GetMessageClass(POOL.FindMessageTypeByName(_NAMED[name][1]))


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
    if len(shape) > MAX_DIMENSIONS:
        raise InputError(f"it has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
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
    try:
        return values.reshape(shape)
    except ValueError:  # without values, other sizes may still be beyond NumPy's
        raise InputError(f"it has the shape {shape}") from None


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
