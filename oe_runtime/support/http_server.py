"""The standard library's HTTP server, with a limit of connections and without a lookup of names."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class BoundedHttpServer(ThreadingHTTPServer):
    """Listens from its creation; `start` begins to answer, in threads, at most some connections at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], most_connections: int
    ) -> None:
        """Raises OSError and OverflowError for an unavailable address."""
        self._places = threading.Semaphore(most_connections)
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
        """Stop accepting connections."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind as TCPServer does; HTTPServer would look up the host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread if there is room for it; close it otherwise."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread will free the place
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()
