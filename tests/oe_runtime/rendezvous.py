"""A stand-in for horovodrun: its rendezvous server, and what it tells its processes."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator


class _Handler(http.server.BaseHTTPRequestHandler):
    values: dict[str, bytes]

    def do_PUT(self) -> None:
        self.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        value = self.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def rendezvous(size: int) -> Iterator[list[dict[str, str]]]:
    """A server for so many processes, and the environment variables of each."""
    handler = type("Handler", (_Handler,), {"values": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_SIZE": str(size)}
        where["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(server.server_port)
        try:
            yield [{**where, "HOROVOD_RANK": str(rank)} for rank in range(size)]
        finally:
            server.shutdown()
