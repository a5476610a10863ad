"""A model over HTTP, on the standard library's server."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from oe_runtime.errors import ServingError
from oe_runtime.serving import requests
from oe_runtime.serving.model import Model
from oe_runtime.support.http_server import BoundedHttpServer

_STATUS = {
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "INTERNAL": HTTPStatus.INTERNAL_SERVER_ERROR,
}
_PATH = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
    r"(?P<verb>:\w+|/metadata)?"
)
MAX_BODY_BYTES = 16 << 20
_LONGEST_NUMBER = 19  # digits of a version or a length
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_GRACE = 1.0  # seconds that an ending server accepts connections, unless none is open
_IDLE = 60.0  # seconds between requests of a connection
_HEAD = 10.0  # seconds for the headers of a request; for its body, in addition to size / _SLOWEST
_SLOWEST = 1 << 20  # bytes per second of a body
_SMALL = 64 << 10  # bytes of a body that does not wait for others
_PATIENCE = 10.0  # seconds that a larger one waits
_LINGER = 5.0  # seconds for a client with an unread body to receive an error


class RestServer(BoundedHttpServer):
    """A model's server; of connections over the limit, the one that has waited longest is closed."""

    request_queue_size = 1024

    def __init__(
        self,
        name: str,
        model: Model,
        host: str,
        port: int,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int = 1024,
    ) -> None:
        """Raises ServingError for an unavailable address.

        Requests above 64 KiB that are read and computed at a time share `max_body_bytes`, as each takes about
        forty times its size in memory. Others wait for seconds and are then refused.
        """
        self.name = name
        self.model = model
        self.max_body_bytes = max_body_bytes
        self._lock = threading.Lock()
        self._waiting: dict[_Handler, tuple[float, float]] = {}  # (deadline, start) of waits for clients
        self.is_ending = False
        self._body_bytes = 0
        self._body_is_done = threading.Condition()
        try:
            super().__init__(host, port, _Handler, max_connections)
        except (OSError, OverflowError) as error:
            raise ServingError(f"cannot listen on {host}:{port}: {error}") from error

    def start(self, name: str = "oe-serving-rest") -> None:
        """Start answering requests, in a thread."""
        super().start(name)

    def stop(self, seconds: float = 0) -> None:
        """End in order: answer requests that were sent, for at most `seconds`, and end their connections.

        Others are accepted for a moment, because clients learn the end from the last answer.
        """
        self.is_ending = True
        if seconds:
            self.wait_until_closed(min(seconds, _GRACE))
        super().stop()
        if not seconds:
            return
        with self._lock:
            idle = [handler for handler in self._waiting if handler.is_idle]
        for handler in idle:  # what has arrived is read still
            with suppress(OSError):
                handler.connection.shutdown(socket.SHUT_RD)
        self.wait_until_closed(seconds)

    def refuse(self, request: Any) -> None:
        """Answer a connection for which there is no room."""
        with suppress(OSError):
            request.settimeout(1)
            request.sendall(_FULL)

    def service_actions(self) -> None:
        """Close connections over their time limit; called twice per second."""
        now = time.monotonic()
        with self._lock:
            late = [handler for handler, (until, _) in self._waiting.items() if until < now]
            for handler in late:
                self._close(handler)

    def make_room(self) -> bool:
        """Close the connection that has waited longest for its client, if there is one."""
        with self._lock:
            if not self._waiting:
                return False
            self._close(min(self._waiting, key=lambda handler: self._waiting[handler][1]))
            return True

    def _close(self, handler: _Handler) -> None:
        """Shut the connection down, which its reading thread notices; call it under the lock."""
        del self._waiting[handler]
        with suppress(OSError):
            handler.connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def waiting(self, handler: _Handler, seconds: float) -> Iterator[None]:
        """Allow `handler` to wait for its client for at most `seconds`."""
        now = time.monotonic()
        with self._lock:
            self._waiting[handler] = now + seconds, now
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(handler, None)

    @contextmanager
    def room_for(self, handler: _Handler, size: int) -> Iterator[None]:
        """Reserve a share of the bytes of all bodies. Raises _Refusal where there is none for long."""
        if size <= _SMALL:
            yield
            return
        with self._body_is_done:
            if not self._body_is_done.wait_for(
                lambda: self._body_bytes + size <= self.max_body_bytes, _PATIENCE
            ):
                handler.body_is_unread()
                raise _Refusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"the server is busy with {self._body_bytes} bytes of other requests; send smaller ones, "
                    "or retry later",
                )
            self._body_bytes += size
        try:
            yield
        finally:
            with self._body_is_done:
                self._body_bytes -= size
                self._body_is_done.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore ended connections; print other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class _Refusal(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RestServer
    protocol_version = "HTTP/1.1"
    server_version = "oe_runtime"
    sys_version = ""
    timeout = _IDLE
    disable_nagle_algorithm = True  # head and body are two writes
    _body_is_unread = False
    is_idle = False  # whether no request has begun

    def handle_one_request(self) -> None:
        self.is_idle = True
        with self.server.waiting(self, _IDLE):
            super().handle_one_request()

    def parse_request(self) -> bool:
        self.is_idle = False
        with self.server.waiting(self, _HEAD):
            return super().parse_request()

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer http.server's own refusals as JSON."""
        self.close_connection = True
        self._reply(code, {"error": message or HTTPStatus(code).phrase})

    def _answer(self, work: Any) -> None:
        try:
            status, reply = HTTPStatus.OK, work()
        except _Refusal as refusal:
            status, reply = refusal.status, {"error": str(refusal)}
        except OSError:  # the connection
            self.close_connection = True
            return
        except Exception as error:
            kind, message = requests.describe_error(error)
            status, reply = _STATUS[kind], {"error": message}
        self._reply(status, reply)
        if self._body_is_unread:
            self._discard()

    def body_is_unread(self) -> None:
        """Note that the answer is an error, and the last on this connection."""
        self.close_connection = self._body_is_unread = True

    def _discard(self) -> None:
        """Read what the client still sends for a while, because TCP would drop the answer with it."""
        with self.server.waiting(self, _LINGER):
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(1 << 16):
                pass

    def _reply(self, status: int, reply: Any) -> None:
        self.close_connection |= self.server.is_ending
        body = json.dumps(reply, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _target(self) -> tuple[str | None, int | None]:
        """Return the verb and the version of the request."""
        match = _PATH.fullmatch(self.path.partition("?")[0])
        if match is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"there is nothing at {self.path}; see /v1/models/NAME")
        requests.check_name(match["name"], self.server.name)
        version = match["version"]
        if match["label"] is not None:
            requests.refuse_label(unquote(match["label"]), self.server.model.version)
        if version is not None and len(version) > _LONGEST_NUMBER:
            raise requests.NotFound(f"a version of {len(version)} digits; it is {self.server.model.version}")
        return match["verb"], None if version is None else int(version)

    def _get(self) -> Any:
        if self.path in ("/v2/health/live", "/v2/health/ready"):  # of KServe's protocol
            if self.path.endswith("ready") and (problem := self.server.model.unavailable):
                raise _Refusal(HTTPStatus.SERVICE_UNAVAILABLE, problem)
            return {self.path.rpartition("/")[2]: True}
        verb, version = self._target()
        model = self.server.model
        requests.check_version(version, self.server.name, model.version)
        if verb is None:
            return requests.status(model)
        if verb == "/metadata":
            return requests.metadata(self.server.name, model)
        raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{verb[1:]} takes POST")

    def _post(self) -> Any:
        length = self._length()
        with self.server.room_for(self, length):
            return self._predict(self._body(length))

    def _predict(self, body: bytes) -> Any:
        verb, version = self._target()
        if verb != ":predict":
            raise _Refusal(HTTPStatus.NOT_FOUND, f"{self.path}: of a model only :predict takes POST")
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
        model = self.server.model
        inputs, by_row = requests.parse_inputs(request, model.inputs)
        outputs, answered = model.predict_versioned(inputs)
        requests.check_version(version, self.server.name, answered)
        return requests.make_reply(outputs, inputs, by_row=by_row)

    def _length(self) -> int:
        """Return the length of the body."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]+", length):
            self.body_is_unread()
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
        if len(length) > _LONGEST_NUMBER or int(length) > self.server.max_body_bytes:
            self.body_is_unread()
            size = length if len(length) <= _LONGEST_NUMBER else f"a number of {len(length)} digits of"
            raise _Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {size} bytes; this server takes {self.server.max_body_bytes}: send fewer "
                "examples at a time, or start it with a larger --max-body-bytes",
            )
        return int(length)

    def _body(self, length: int) -> bytes:
        with self.server.waiting(self, _HEAD + length / _SLOWEST):
            body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client has left")
        return body
