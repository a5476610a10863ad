"""gRPC's own services: grpc.health.v1.Health, and reflection, by which clients find the others.

They are answered here rather than by grpcio-health-checking and grpcio-reflection. Those are packages that
TensorFlow does not bring, describe other messages than the server's (messages.py), and do not end their
streams: a server whose health is watched would take all of --drain-seconds to end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from oe_runtime.serving.messages import METHODS, POOL, message
from oe_runtime.serving.versions import NotFound, Versions

_LOOKS = 0.2  # seconds between two looks at what is watched


class Health:
    """Tells whether requests are answered: of the server ("" or a service), or of its model by name."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._known = {"", versions.name, *METHODS}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[Any] = set()  # contexts of streams whose request has not come

    def check(self, request: Any) -> Any:
        """Answer Check. Raises NotFound."""
        if request.service not in self._known:
            raise NotFound(f"service {request.service[:80]!r}")
        return self._answer(request)

    def watch(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Answer Watch: at once, and whenever it changes."""
        with self._lock:
            if self._ended.is_set():
                return
            self._waiting.add(context)
        try:
            request, before = next(requests, None), None
        finally:
            with self._lock:
                self._waiting.discard(context)
        if request is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the stream has no request")
        while True:
            ends = self._ended.is_set()
            answer = self._answer(request)
            if before != answer:
                yield answer
            before = answer
            if ends or not context.is_active():
                return
            self._ended.wait(_LOOKS)

    def end(self) -> None:
        """End the streams of `watch`, with a last answer."""
        with self._lock:
            self._ended.set()
            waiting = list(self._waiting)
        for context in waiting:
            context.cancel()

    def _answer(self, request: Any) -> Any:
        status = "NOT_SERVING" if self._versions.unavailable or self._ended.is_set() else "SERVING"
        known = request.service in self._known
        return message("HealthCheckResponse")(status=status if known else "SERVICE_UNKNOWN")


class Reflection:
    """Describes services and messages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Any] = set()
        self._is_ended = False

    def answer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Answer ServerReflectionInfo."""
        with self._lock:
            self._open.add(context)
            if self._is_ended:
                return
        try:
            for request in requests:
                reply = message("ServerReflectionResponse")(valid_host=request.host, original_request=request)
                _describe(request, reply)
                yield reply
        finally:
            with self._lock:
                self._open.discard(context)

    def end(self) -> None:
        """End the streams."""
        with self._lock:
            self._is_ended = True
            contexts = list(self._open)
        for context in contexts:
            context.cancel()


def _describe(request: Any, reply: Any) -> None:
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        for name in METHODS:
            reply.list_services_response.service.add(name=name)
        return
    try:
        if asked == "file_by_filename":
            found = POOL.FindFileByName(request.file_by_filename)
        elif asked == "file_containing_symbol":
            found = POOL.FindFileContainingSymbol(request.file_containing_symbol)
        else:
            raise KeyError(asked)
    except KeyError:
        reply.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
        said = f"there is no such file, symbol or extension: {request}"
        reply.error_response.error_message = said.strip()[:300]
        return
    files: dict[str, bytes] = {}
    _add_files(found, files)
    reply.file_descriptor_response.file_descriptor_proto.extend(reversed(files.values()))


def _add_files(file: Any, files: dict[str, bytes]) -> None:
    """Add what a file needs, and the file after it."""
    for needed in file.dependencies:
        _add_files(needed, files)
    files.setdefault(file.name, file.serialized_pb)
