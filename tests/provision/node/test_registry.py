"""Asking a registry for an image, against a small one on loopback that wants a token, as Docker's does."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from provision.node import deeprec, registry
from provision.node.command import System
from provision.node.registry import Reference


class Registry(http.server.BaseHTTPRequestHandler):
    """Has ``team/deeprec:py36``; ``broken`` answers with an error of its own, ``secret`` is for others."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"token": "for-all"}' if "scope=pull" in self.path else b"{}")

    def do_HEAD(self) -> None:
        port = self.server.server_address[1]
        code = {"/v2/team/deeprec/manifests/py36": 200, "/v2/broken/manifests/latest": 503}.get(
            self.path, 404
        )
        if self.headers.get("Authorization") != "Bearer for-all" or "secret" in self.path:
            code = 401
        self.send_response(code)
        realm = f'Bearer realm="http://127.0.0.1:{port}/token",service="x",scope="pull"'
        self.send_header("WWW-Authenticate", realm)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("ubuntu", Reference("registry-1.docker.io", "library/ubuntu", "latest")),
        ("docker.io/team/x:1", Reference("registry-1.docker.io", "team/x", "1")),
        ("localhost:5000/x", Reference("localhost:5000", "x", "latest")),
        ("site.example/a/b:py36-cpu", Reference("site.example", "a/b", "py36-cpu")),
        ("site.example/a@sha256:12", Reference("site.example", "a", "sha256:12")),
    ],
)
def test_names_are_read_as_engines_read_them(image: str, expected: Reference) -> None:
    assert registry.parse(image) == expected


def test_what_a_registry_says(there: str) -> None:
    assert registry.missing(f"{there}/team/deeprec:py36") == ""
    assert registry.missing(f"{there}/team/deeprec:py311") == f"{there} has no team/deeprec:py311"
    assert "requires a login for secret, or does not have it" in registry.missing(f"{there}/secret")
    # What is wrong with the registry, or with the way there, says nothing of the image.
    assert registry.missing(f"{there}/broken") == ""
    assert registry.missing("127.0.0.1:1/x") == ""


def test_a_host_without_docker_asks_the_registry_itself(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "which", lambda self, name: "")
    assert deeprec.missing_image(System(), f"{there}/none") == f"{there} has no none:latest"
