"""A model over gRPC: the services of messages.METHODS, of which TensorFlow Serving's are answered here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from oe_runtime.errors import InputError, ServingError
from oe_runtime.model_description import SIGNATURE, Signature
from oe_runtime.serving import examples, requests
from oe_runtime.serving.access import Access
from oe_runtime.serving.grpc_health import Health, Reflection
from oe_runtime.serving.grpc_inference import InferenceService
from oe_runtime.serving.grpc_reload import Reload
from oe_runtime.serving.messages import METHODS, message, read_tensor, tensor_proto
from oe_runtime.serving.metrics import Calls
from oe_runtime.serving.model import Model
from oe_runtime.serving.versions import Asked, Versions, wrap

_THREADS = 16
_PROBES = 4  # threads for what needs no token
_LONGEST = 600  # characters of a message, of up to 12 bytes each: clients refuse 8 KiB of metadata
_STREAMS = 64  # at a time, each in a thread of its own
# As over HTTP, these need no token.
_OPEN = {
    "/grpc.health.v1.Health/Check",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
}


class GrpcServer:
    """Listens from its creation; `start` begins to answer."""

    def __init__(
        self,
        name: str,
        model: Model | Versions,
        host: str,
        port: int,
        *,
        max_body_bytes: int,
        access: Access = Access(),  # noqa: B008 - it does not change
    ) -> None:
        """Raises ServingError for an unavailable address. Without a certificate it never encrypts."""
        self._access = access
        self.calls = Calls()
        versions = wrap(name, model)
        self._health, self._reflection = Health(versions), Reflection()
        service = _Service(versions, max_body_bytes, self.calls)
        answers = {
            **service.answers,
            **InferenceService(versions, self.calls).answers,
            "Check": self._health.check,
        }
        streams = {"Watch": self._health.watch, "ServerReflectionInfo": self._reflection.answer}

        def handler(method: str, messages: str) -> Any:
            def parse(sent: bytes) -> Any:
                return _parse(f"{messages.lstrip('*')}Request", sent)

            if method not in streams:
                return grpc.unary_unary_rpc_method_handler(
                    lambda sent, context: service.answer(context, lambda: answers[method](parse(sent))),
                    response_serializer=_serialize,
                )

            def stream(sent: Iterator[bytes], context: Any) -> Iterator[Any]:
                try:
                    yield from streams[method](map(parse, sent), context)
                except InputError as error:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

            # Watch too: gRPC would wait for its request before _Guard counts it.
            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=_serialize)

        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, "oe-serving-grpc"),
            interceptors=[_Guard(self)],
            options=[("grpc.max_receive_message_length", max_body_bytes), ("grpc.so_reuseport", 0)],
        )
        for whole, methods in METHODS.items():
            handlers = {name: handler(name, kinds) for name, kinds in map(str.split, methods.split(", "))}
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
        """Stop accepting requests; those in progress have `seconds`. Streams end at once."""
        ended = self._server.stop(seconds)
        self._health.end()
        self._reflection.end()
        ended.wait()


class _Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses requests without the token before they are read, and counts all."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self._free = threading.Semaphore(_STREAMS)
        self._threads = ThreadPoolExecutor(_STREAMS + 1, "oe-serving-stream")  # one refuses others
        self._probes = ThreadPoolExecutor(_PROBES, "oe-serving-probe")

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        given = [value for name, value in details.invocation_metadata if name == "authorization"]
        refusal = ""
        if details.method not in _OPEN:
            refusal = self._server.access.refusal(str(given[0]) if given else None)
        handler = None if refusal else continuation(details)
        name = details.method.rpartition("/")[2] if handler else "none"
        if handler and handler.response_streaming:
            return self._stream(name, handler)
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

        if handler is None:  # as a stream, of which nothing is read: a thread would wait for the request
            return grpc.stream_stream_rpc_method_handler(answer)
        if details.method in _OPEN:
            answer.experimental_thread_pool = self._probes  # type: ignore[attr-defined]
        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    def _stream(self, name: str, handler: Any) -> Any:
        """Let a stream have a thread of its own, so that it holds none of those that answer requests."""
        inner = handler.stream_stream

        def answer(request: Any, context: Any) -> Iterator[Any]:
            has_place = self._free.acquire(blocking=False)
            self._server.calls.count(name, "OK" if has_place else "RESOURCE_EXHAUSTED")
            if not has_place:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"there are {_STREAMS} streams already")
            try:
                yield from inner(request, context)
            finally:
                self._free.release()

        answer.experimental_thread_pool = self._threads  # type: ignore[attr-defined] # of grpc._server
        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


def _serialize(reply: Any) -> bytes:
    serialized: bytes = reply.SerializeToString()
    return serialized


def _parse(name: str, sent: bytes) -> Any:
    try:
        return message(name).FromString(sent)
    except DecodeError:
        raise InputError(f"the request is not a {name}") from None


class _Service:
    def __init__(self, versions: Versions, max_body_bytes: int, calls: Calls) -> None:
        self._calls = calls
        self._versions = versions
        self._most = max_body_bytes
        self.answers: dict[str, Callable[[Any], Any]] = {
            "Predict": self.predict,
            "Classify": self.classify,
            "Regress": self.regress,
            "GetModelMetadata": self.metadata,
            "GetModelStatus": self.status,
            "HandleReloadConfigRequest": Reload(versions).answer,
        }

    def answer(self, context: Any, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            kind, message = requests.describe_error(error)
        context.abort(grpc.StatusCode[kind], message[:_LONGEST])
        return None

    def predict(self, request: Any) -> Any:
        asked = self._find(request.model_spec)
        inputs, left = {}, self._most
        for name, tensor in request.inputs.items():
            inputs[name] = self._array(name, tensor, left)
            left -= inputs[name].size
        signature = requests.find_signature(request.model_spec.signature_name, self._signatures)
        outputs, version = self._versions.predict(asked, inputs, signature)
        unknown = set(request.output_filter) - outputs.keys()
        if unknown:
            raise InputError(f"the model has no output {sorted(unknown)[0]!r}; it has {', '.join(outputs)}")
        reply = message("PredictResponse")()
        self._describe(reply.model_spec, version, signature)
        for name in request.output_filter or outputs:
            reply.outputs[name].CopyFrom(tensor_proto(outputs[name]))
        self._calls.add_examples(requests.count_examples(outputs))
        return reply

    def classify(self, request: Any) -> Any:
        reply = message("ClassificationResponse")()
        for pairs in self._compute(request, examples.CLASSIFY, reply):
            classes = reply.result.classifications.add().classes
            for label, score in pairs:
                classes.add(label=label, score=score)
        return reply

    def regress(self, request: Any) -> Any:
        reply = message("RegressionResponse")()
        for value in self._compute(request, examples.REGRESS, reply):
            reply.result.regressions.add(value=value)
        return reply

    def _compute(self, request: Any, method: str, reply: Any) -> list[Any]:
        """Return the result for each example, and describe the model in `reply`."""
        asked, named = self._find(request.model_spec), request.model_spec.signature_name
        signature = examples.find_signature(named, method, self._signatures)
        sent = examples.serialize_input(request.input)
        result, version = examples.compute(self._versions, asked, method, signature, sent)
        self._describe(reply.model_spec, version, signature)
        self._calls.add_examples(len(sent))
        return result

    def metadata(self, request: Any) -> Any:
        model, version = self._versions.find(self._find(request.model_spec))
        if list(request.metadata_field) != ["signature_def"]:
            raise InputError("metadata_field must be 'signature_def'")
        found = requests.metadata(self._versions.name, model, version)["metadata"]["signature_def"]
        signatures = json_format.ParseDict(found, message("SignatureDefMap")())
        reply = message("GetModelMetadataResponse")()
        self._describe(reply.model_spec, version)
        reply.metadata["signature_def"].Pack(signatures)
        return reply

    def status(self, request: Any) -> Any:
        found = requests.status(self._versions, self._find(request.model_spec))
        return json_format.ParseDict(found, message("GetModelStatusResponse")())

    @property
    def _signatures(self) -> dict[str, Signature]:
        return self._versions.main.signatures

    def _find(self, spec: Any) -> Asked:
        """Return the asked version of a known model."""
        requests.check_name(spec.name, self._versions.name)
        requests.find_signature(spec.signature_name, self._signatures)
        number = spec.version.value if spec.HasField("version") else None
        label = spec.version_label if spec.HasField("version_label") else None
        asked = Asked(number, label)
        self._versions.find(asked)  # before the rest of the request is read
        return asked

    def _describe(self, spec: Any, version: int, signature: str = SIGNATURE) -> None:
        spec.name = self._versions.name
        spec.signature_name = signature
        spec.version.value = version

    def _array(self, name: str, tensor: Any, most: int) -> Any:
        try:
            return read_tensor(tensor, most)
        except InputError as error:
            raise InputError(f"input {name!r}: {error}") from error
