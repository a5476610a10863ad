"""The dashboard's HTTP server: read-only, on loopback, for users with the token."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

from provision.cluster.errors import OeprovError

_PAGE = Path(__file__).with_name("page")
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
DATA = "data.json"
ADDRESS = "127.0.0.1"
# Allowed Host headers, from this machine or through a tunnel. Another site can point its own name at this
# address (DNS rebinding), but not these names.
_NAMES = (ADDRESS, "localhost", "::1")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_REQUEST_SECONDS = 10  # at most, to send one request


class DashboardServer(ThreadingHTTPServer):
    """Serves the page and ``document(seen)``, a JSON text, below a path that starts with a secret token."""

    daemon_threads = True

    def __init__(self, document: Callable[[float | None], bytes], port: int = 0) -> None:
        self.document = document
        self.token = secrets.token_urlsafe(24)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise OeprovError(f"port {port} of {ADDRESS}: {error.strerror}; choose another --port") from None

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The page's address, with the token."""
        return f"http://{ADDRESS}:{self.port}/{self.token}/"


def _seen(query: str) -> float | None:
    """The time of the hosts that the page has, from ``hosts=TIME``."""
    try:
        return float(parse_qs(query)["hosts"][0])
    except (KeyError, ValueError):
        return None


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server_version = "oeprov"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(*self._found())

    def do_HEAD(self) -> None:
        self.do_GET()

    def _found(self) -> tuple[HTTPStatus, str, bytes]:
        server = cast(DashboardServer, self.server)
        plain = "text/plain; charset=utf-8"
        try:
            name = urlsplit("//" + self.headers.get("Host", "")).hostname
        except ValueError:
            name = None
        if name not in _NAMES:
            return HTTPStatus.FORBIDDEN, plain, b"this page is served as 127.0.0.1 and localhost only\n"
        asked = urlsplit(self.path)
        token, _, rest = asked.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), server.token.encode()):
            return HTTPStatus.NOT_FOUND, plain, b"open the address that `oeprov dashboard` printed\n"
        if rest == DATA:
            return HTTPStatus.OK, "application/json", server.document(_seen(asked.query))
        if rest in _FILES:
            file, kind = _FILES[rest]
            return HTTPStatus.OK, kind, (_PAGE / file).read_bytes()
        return HTTPStatus.NOT_FOUND, plain, b"there is no such page\n"

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: every line would contain the token."""
