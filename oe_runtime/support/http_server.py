"""The standard library's HTTP server, with a limit of connections and without a lookup of names."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_RETURN = 6  # BPF_RET | BPF_K: pass on so many bytes of each packet


class BoundedHttpServer(ThreadingHTTPServer):
    """Listens from its creation; `start` begins to answer, in threads, at most some connections at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], most_connections: int
    ) -> None:
        """Raises OSError and OverflowError for an unavailable address."""
        self._most = most_connections
        self._open = 0  # connections
        self._changed = threading.Condition()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def start(self, name: str) -> None:
        """Start answering requests, in a thread of this name."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop accepting connections; those that have been made are accepted before."""
        self.shutdown()
        with contextlib.suppress(OSError):
            # New ones would be made, and reset, between the last accept and the end: drop their packets.
            instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
            program = struct.pack("HL", 1, ctypes.addressof(instruction))
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                connection, address = self.get_request()
                connection.setblocking(True)
                self.process_request(connection, address)
        self.server_close()

    def wait_until_closed(self, seconds: float) -> bool:
        """Wait until no connection is open; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, seconds)

    def _claim(self, seconds: float) -> bool:
        with self._changed:
            if found := self._changed.wait_for(lambda: self._open < self._most, seconds):
                self._open += 1
            return found

    def _release(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def server_bind(self) -> None:
        """Bind as TCPServer does; HTTPServer would look up the host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def make_room(self) -> bool:
        """Make room for a connection over the limit; return whether there is some."""
        return False

    def refuse(self, request: Any) -> None:
        """Answer a connection over the limit, before it is closed."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread if there is room for it."""
        if self._claim(0) or (self.make_room() and self._claim(1)):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread will free the place
                self._release()
                raise
            return
        self.refuse(request)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release()
