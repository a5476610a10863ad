"""An S3 server on loopback (moto's) that can be told to fail: for tests, and benchmarks/object_stores.py.

    python tests/oe_runtime/object_store.py [--errors EVERY] [--stall EVERY:SECONDS]

prints its URL and serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from oe_runtime.support import remote_files

KEY, SECRET = "AKIAOEPROVTEST000001", "the+secret/of+the+test+0123456789abcdefgh"
BUCKET = "test-bucket"

# A request's method, path with query, and range → what to do instead; None: answer it.
Fault = Callable[[str, str, str], "Answer | Stall | Cut | None"]


class Answer:
    """An error in the form of S3."""

    def __init__(self, status: str, code: str, message: str = "injected by the test") -> None:
        self.status, self.code, self.message = status, code, message


class Stall:
    """Wait before the answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Cut:
    """Answer, but close the connection after half of the body."""


SLOW_DOWN = Answer("503 Slow Down", "SlowDown", "Please reduce your request rate.")
DENIED = Answer("403 Forbidden", "AccessDenied", "Access Denied")
WRONG_KEY = Answer("403 Forbidden", "InvalidAccessKeyId", f"The AWS Access Key Id {KEY} does not exist.")


class ObjectStore:
    """The server; `fault` may be replaced at any time. `requests` are those that it has got."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str, str]] = []
        self._ended = threading.Event()
        # Here, because importing them takes a second, also from tests without a store.
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from moto.s3.models import s3_backends
        from werkzeug.serving import make_server

        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._application = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server(address, 0, self._answer, threaded=True)
        self.url = f"http://{address}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a client's environment needs for this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str = BUCKET) -> None:
        """Make an empty bucket, in place of one that has the name."""
        if name in self._backend.buckets:
            self._backend.buckets[name].keys.clear()
            self._backend.buckets[name].multiparts.clear()
        else:
            self._backend.create_bucket(name, "us-east-1")

    def objects(self, bucket: str = BUCKET) -> dict[str, bytes]:
        """The content of all objects by key."""
        keys = self._backend.buckets[bucket].keys
        return {name: keys[name].value for name in sorted(keys)}

    def put(self, key: str, content: bytes, bucket: str = BUCKET) -> None:
        """Make an object."""
        self._backend.put_object(bucket, key, content)

    def stop(self) -> None:
        """End it, with requests that wait."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        path = environ.get("PATH_INFO", "") + (f"?{query}" if query else "")
        request = (environ["REQUEST_METHOD"], path, environ.get("HTTP_RANGE", ""))
        self.requests.append(request)
        fault = self.fault(*request) if self.fault else None
        if isinstance(fault, Stall):
            self._ended.wait(fault.seconds)
        elif isinstance(fault, Answer):
            left = int(environ.get("CONTENT_LENGTH") or 0)
            while left > 0 and (block := environ["wsgi.input"].read(min(left, 1 << 16))):
                left -= len(block)  # else the client sees a reset
            body = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>".encode()
            start(fault.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [b"" if request[0] == "HEAD" else body]
        answer: Iterable[bytes] = self._application(environ, start)
        if isinstance(fault, Cut):
            whole = b"".join(answer)
            return [whole[: len(whole) // 2]]
        return answer


@pytest.fixture(scope="session")
def object_store_server() -> Iterator[ObjectStore]:
    """The one server of this process's tests."""
    server = ObjectStore()
    yield server
    server.stop()


@pytest.fixture
def object_store(
    object_store_server: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> ObjectStore:
    """An empty bucket, and an environment with which clients find it and nothing else."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "OSS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in object_store_server.environment.items():
        monkeypatch.setenv(name, value)
    object_store_server.fault = None
    object_store_server.make_bucket()
    object_store_server.requests.clear()
    remote_files._system.cache_clear()
    return object_store_server


def main() -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", type=int, default=0, help="answer each Nth request with 503")
    parser.add_argument("--stall", default="", help="EVERY:SECONDS, without an answer")
    given = parser.parse_args()
    store = ObjectStore()
    store.make_bucket()
    numbers = itertools.count(1)
    every, seconds = (float(part) for part in (given.stall or "0:0").split(":"))

    def fault(*_: str) -> Answer | Stall | None:
        number = next(numbers)
        if given.errors and number % given.errors == 0:
            return SLOW_DOWN
        return Stall(seconds) if every and number % every == 0 else None

    store.fault = fault
    print(store.url, flush=True)
    sys.stdin.read()
    store.stop()


if __name__ == "__main__":
    main()
