"""A model over gRPC: TensorFlow Serving's PredictionService and ModelService, by tensorflow-serving-api."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oe_runtime.errors import InputError, ServingError
from oe_runtime.serving import requests
from oe_runtime.serving.model import Model

_THREADS = 16


# Field and type of values in TensorFlow's Tensor::AsProtoField; all other integers go into int_val.
_VALUES = {
    "float32": ("float_val", "float32"),
    "float64": ("double_val", "float64"),
    "float16": ("half_val", "uint16"),
    "bfloat16": ("half_val", "uint16"),
    "int64": ("int64_val", "int64"),
    "uint64": ("uint64_val", "uint64"),
    "uint32": ("uint32_val", "uint32"),
    "bool": ("bool_val", "bool"),
    "complex64": ("scomplex_val", "float32"),
    "complex128": ("dcomplex_val", "float64"),
    **{name: ("int_val", name) for name in ("int8", "int16", "int32", "uint8", "uint16")},
}


def tensor_proto(array: Any) -> Any:
    """Return a TensorProto in TensorFlow Serving's form: values in float_val and similar fields.

    ``tf.make_tensor_proto`` packs two or more values into tensor_content, which clients written for
    TensorFlow Serving do not read.
    """
    import tensorflow as tf

    proto = tf.make_tensor_proto(array)
    if proto.tensor_content:
        values = tf.make_ndarray(proto)
        if values.dtype.name not in _VALUES:
            return proto  # TensorFlow has no field for it either
        field, kind = _VALUES[values.dtype.name]
        proto.ClearField("tensor_content")
        getattr(proto, field).extend(values.reshape(-1).view(kind).tolist())
    return proto


class GrpcServer:
    """Listens from its creation; `start` begins to answer."""

    def __init__(self, name: str, model: Model, host: str, port: int, *, max_body_bytes: int) -> None:
        """Raises ServingError for an unavailable address, or without the packages that it needs."""
        try:
            import grpc
            from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc
        except ImportError as error:
            raise ServingError(
                f"gRPC needs tensorflow-serving-api ({error}): pip install --no-deps tensorflow-serving-api"
            ) from error
        service = _Service(name, model, max_body_bytes)

        class Prediction(prediction_service_pb2_grpc.PredictionServiceServicer):  # type: ignore[misc]
            def Predict(self, request: Any, context: Any) -> Any:
                return service.answer(context, lambda: service.predict(request))

            def GetModelMetadata(self, request: Any, context: Any) -> Any:
                return service.answer(context, lambda: service.metadata(request))

        class Status(model_service_pb2_grpc.ModelServiceServicer):  # type: ignore[misc]
            def GetModelStatus(self, request: Any, context: Any) -> Any:
                return service.answer(context, lambda: service.status(request))

        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, "oe-serving-grpc"),
            options=[("grpc.max_receive_message_length", max_body_bytes), ("grpc.so_reuseport", 0)],
        )
        prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Prediction(), self._server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(Status(), self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise ServingError(f"cannot listen on {address} for gRPC: {error}") from error

    def start(self) -> None:
        """Start answering requests."""
        self._server.start()

    def stop(self, seconds: float = 0) -> None:
        """Stop accepting requests; those in progress have `seconds`."""
        self._server.stop(seconds).wait()


class _Service:
    def __init__(self, name: str, model: Model, max_body_bytes: int) -> None:
        self._name = name
        self._model = model
        self._most = max_body_bytes

    def answer(self, context: Any, work: Callable[[], Any]) -> Any:
        import grpc

        try:
            return work()
        except Exception as error:
            kind, message = requests.describe_error(error)
        context.abort(grpc.StatusCode[kind], message)
        return None

    def predict(self, request: Any) -> Any:
        from tensorflow_serving.apis import predict_pb2

        self._check(request.model_spec)
        inputs = {name: self._array(name, tensor) for name, tensor in request.inputs.items()}
        outputs, version = self._model.predict_versioned(inputs)
        self._check(request.model_spec, version)
        unknown = set(request.output_filter) - outputs.keys()
        if unknown:
            raise InputError(f"the model has no output {sorted(unknown)[0]!r}; it has {', '.join(outputs)}")
        reply = predict_pb2.PredictResponse()
        self._describe(reply.model_spec, version)
        for name in request.output_filter or outputs:
            reply.outputs[name].CopyFrom(tensor_proto(outputs[name]))
        return reply

    def metadata(self, request: Any) -> Any:
        from google.protobuf import json_format
        from tensorflow_serving.apis import get_model_metadata_pb2

        self._check(request.model_spec)
        if list(request.metadata_field) != ["signature_def"]:
            raise InputError("metadata_field must be 'signature_def'")
        found = requests.metadata(self._name, self._model)["metadata"]["signature_def"]["signature_def"]
        signatures = get_model_metadata_pb2.SignatureDefMap()
        json_format.ParseDict({"signature_def": found}, signatures)
        reply = get_model_metadata_pb2.GetModelMetadataResponse()
        self._describe(reply.model_spec, self._model.version)
        reply.metadata["signature_def"].Pack(signatures)
        return reply

    def status(self, request: Any) -> Any:
        from tensorflow.core.protobuf import error_codes_pb2
        from tensorflow_serving.apis import get_model_status_pb2

        self._check(request.model_spec)
        reply = get_model_status_pb2.GetModelStatusResponse()
        found = requests.status(self._model)["model_version_status"][0]
        entry = reply.model_version_status.add()
        entry.version = int(found["version"])
        entry.state = get_model_status_pb2.ModelVersionStatus.State.Value(found["state"])
        entry.status.error_code = error_codes_pb2.Code.Value(found["status"]["error_code"])
        entry.status.error_message = found["status"]["error_message"]
        return reply

    def _check(self, spec: Any, version: int | None = None) -> None:
        requests.check_name(spec.name, self._name)
        requests.check_signature(spec.signature_name)
        if spec.HasField("version_label"):
            requests.refuse_label(spec.version_label, self._model.version)
        asked = spec.version.value if spec.HasField("version") else None
        requests.check_version(asked, self._name, self._model.version if version is None else version)

    def _describe(self, spec: Any, version: int) -> None:
        spec.name = self._name
        spec.signature_name = requests.SIGNATURE
        spec.version.value = version

    def _array(self, name: str, tensor: Any) -> Any:
        import tensorflow as tf

        # A proto may say that one value fills a shape of any size.
        sizes = [dim.size for dim in tensor.tensor_shape.dim]
        if any(size < 0 for size in sizes) or math.prod(sizes) > self._most:
            raise InputError(f"input {name!r} has the shape {sizes}")
        try:
            return tf.make_ndarray(tensor)
        except (TypeError, ValueError) as error:
            raise InputError(f"input {name!r} is not a tensor: {error}") from error
