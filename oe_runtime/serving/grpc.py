"""A model over gRPC: TensorFlow Serving's PredictionService and ModelService."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from oe_runtime.errors import InputError, ServingError
from oe_runtime.model_description import SIGNATURE
from oe_runtime.serving import requests
from oe_runtime.serving.access import Access
from oe_runtime.serving.messages import message, read_tensor, tensor_proto
from oe_runtime.serving.metrics import Calls
from oe_runtime.serving.model import Model

_THREADS = 16


class GrpcServer:
    """Listens from its creation; `start` begins to answer."""

    def __init__(
        self,
        name: str,
        model: Model,
        host: str,
        port: int,
        *,
        max_body_bytes: int,
        access: Access = Access(),  # noqa: B008 - it does not change
    ) -> None:
        """Raises ServingError for an unavailable address. Without a certificate it never encrypts."""
        self._access = access
        self.calls = Calls()
        service = _Service(name, model, max_body_bytes, self.calls)

        def method(answer: Callable[[Any], Any], name: str) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                lambda sent, context: service.answer(context, lambda: answer(_parse(f"{name}Request", sent))),
                response_serializer=lambda reply: reply.SerializeToString(),
            )

        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, "oe-serving-grpc"),
            interceptors=[_Guard(self)],
            options=[("grpc.max_receive_message_length", max_body_bytes), ("grpc.so_reuseport", 0)],
        )
        for one, methods in {
            "PredictionService": {"Predict": service.predict, "GetModelMetadata": service.metadata},
            "ModelService": {"GetModelStatus": service.status},
        }.items():
            handlers = {name: method(answer, name) for name, answer in methods.items()}
            whole = f"tensorflow.serving.{one}"
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(whole, handlers)])
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if access.certificate:
                self.port = int(self._server.add_secure_port(address, self._credentials()))
            else:
                self.port = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise ServingError(f"cannot listen on {address} for gRPC: {error}") from error

    @property
    def access(self) -> Access:
        """What requests need."""
        return self._access

    def use_access(self, access: Access) -> None:
        """Let later connections and requests need this."""
        self._access = access

    def _credentials(self) -> grpc.ServerCredentials:
        used = [self._access]

        def pair() -> Any:
            return grpc.ssl_server_certificate_configuration(
                [(used[0].key.encode(), used[0].certificate.encode())]
            )

        def fetch() -> Any:  # for each connection; None: as before
            if self._access is used[0]:
                return None
            used[0] = self._access
            return pair()

        return grpc.dynamic_ssl_server_credentials(pair(), fetch)

    def start(self) -> None:
        """Start answering requests."""
        self._server.start()

    def stop(self, seconds: float = 0) -> None:
        """Stop accepting requests; those in progress have `seconds`."""
        self._server.stop(seconds).wait()


class _Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses requests without the token before they are read, and counts all."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        given = [value for name, value in details.invocation_metadata if name == "authorization"]
        refusal = self._server.access.refusal(str(given[0]) if given else None)
        handler = None if refusal else continuation(details)
        name = details.method.rpartition("/")[2] if handler else "none"
        status, said = grpc.StatusCode.UNIMPLEMENTED, f"there is no method {details.method}"
        if refusal:
            status, said = grpc.StatusCode.UNAUTHENTICATED, refusal
        inner = handler.unary_unary if handler else lambda _, context: context.abort(status, said)

        def answer(request: Any, context: Any) -> Any:
            began = time.perf_counter()
            self._server.calls.begin()
            try:
                return inner(request, context)
            finally:
                code = context.code()
                code = "OK" if code is None else code.name
                self._server.calls.end(name, code, time.perf_counter() - began)

        serializer = handler.response_serializer if handler else None
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=serializer)


def _parse(name: str, sent: bytes) -> Any:
    try:
        return message(name).FromString(sent)
    except DecodeError:
        raise InputError(f"the request is not a {name}") from None


class _Service:
    def __init__(self, name: str, model: Model, max_body_bytes: int, calls: Calls) -> None:
        self._calls = calls
        self._name = name
        self._model = model
        self._most = max_body_bytes

    def answer(self, context: Any, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            kind, message = requests.describe_error(error)
        context.abort(grpc.StatusCode[kind], message)
        return None

    def predict(self, request: Any) -> Any:
        self._check(request.model_spec)
        inputs = {name: self._array(name, tensor) for name, tensor in request.inputs.items()}
        signature = requests.find_signature(request.model_spec.signature_name, self._model.signatures)
        outputs, version = self._model.predict_versioned(inputs, signature)
        self._check(request.model_spec, version)
        unknown = set(request.output_filter) - outputs.keys()
        if unknown:
            raise InputError(f"the model has no output {sorted(unknown)[0]!r}; it has {', '.join(outputs)}")
        reply = message("PredictResponse")()
        self._describe(reply.model_spec, version, signature)
        for name in request.output_filter or outputs:
            reply.outputs[name].CopyFrom(tensor_proto(outputs[name]))
        self._calls.add_examples(requests.count_examples(outputs))
        return reply

    def metadata(self, request: Any) -> Any:
        self._check(request.model_spec)
        if list(request.metadata_field) != ["signature_def"]:
            raise InputError("metadata_field must be 'signature_def'")
        found = requests.metadata(self._name, self._model)["metadata"]["signature_def"]["signature_def"]
        signatures = json_format.ParseDict({"signature_def": found}, message("SignatureDefMap")())
        reply = message("GetModelMetadataResponse")()
        self._describe(reply.model_spec, self._model.version)
        reply.metadata["signature_def"].Pack(signatures)
        return reply

    def status(self, request: Any) -> Any:
        self._check(request.model_spec)
        return json_format.ParseDict(requests.status(self._model), message("GetModelStatusResponse")())

    def _check(self, spec: Any, version: int | None = None) -> None:
        requests.check_name(spec.name, self._name)
        requests.find_signature(spec.signature_name, self._model.signatures)
        if spec.HasField("version_label"):
            requests.refuse_label(spec.version_label, self._model.version)
        asked = spec.version.value if spec.HasField("version") else None
        requests.check_version(asked, self._name, self._model.version if version is None else version)

    def _describe(self, spec: Any, version: int, signature: str = SIGNATURE) -> None:
        spec.name = self._name
        spec.signature_name = signature
        spec.version.value = version

    def _array(self, name: str, tensor: Any) -> Any:
        try:
            return read_tensor(tensor, self._most)
        except InputError as error:
            raise InputError(f"input {name!r}: {error}") from error
