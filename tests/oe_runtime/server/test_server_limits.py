"""A server that is full: silent peers, few open files, more clients than it takes."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_processes import Server

from oe_runtime import Client, TableSpec, TooManyConnections

DIM = 16
TOKEN = "a token that is long enough"


@pytest.fixture
def few_files() -> Iterator[tuple[str, ...]]:
    """Servers that start meanwhile may open 256 files, and this process more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield ("prlimit", "--nofile=256:256")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _train(client: Client, table: int, first: int) -> None:
    ids = np.arange(first, first + 20_000)
    pulled = client.pull([ids], [(table, 0)])
    client.push(pulled, [np.ones((ids.size, DIM), np.float32)], 0.1)


class _Flood:
    """Silent connections, each opened again when the server closes it."""

    def __init__(self, endpoint: str, count: int) -> None:
        host, port = endpoint.split(":")
        self._address = (host, int(port))
        self._sockets = [socket.create_connection(self._address) for _ in range(count)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._reopen)
        self._thread.start()

    def _reopen(self) -> None:
        while not self._stop.wait(0.02):
            for i, one in enumerate(self._sockets):
                one.setblocking(False)
                try:
                    while one.recv(4096):
                        pass
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                one.close()
                self._sockets[i] = socket.create_connection(self._address)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for one in self._sockets:
            one.close()


def test_silent_peers_shut_nobody_out(tmp_path: Path, few_files: tuple[str, ...]) -> None:
    flags = ("--storage", "pmem_libpmem", "--storage-path", str(tmp_path / "pool"))
    server = Server(tmp_path, *flags, prefix=few_files)
    try:
        with Client([server.endpoint], timeout=30) as client:
            table = client.create_table(TableSpec(name="t", dim=DIM))
            _train(client, table, 0)
            begin, flood = time.monotonic(), _Flood(server.endpoint, 400)
            try:
                for step in range(1, 6):
                    _train(client, table, 20_000 * step)  # the pool grows
                    with Client([server.endpoint], timeout=30) as another:
                        assert another.create_table(TableSpec(name="t", dim=DIM)) == table
                client.checkpoint(1, wait=True)
                (tmp_path / "saved").mkdir()
                client.save(tmp_path / "saved")
                connections = client.stats()["servers"][0]["connections"]
            finally:
                flood.end()
            seconds = time.monotonic() - begin
        assert connections["refused"]["connections"] > 0
        assert connections["before_hello"] < 60
        said = server.errors.read_text()
    finally:
        server.end()
    assert f"this server takes {connections['limit']} clients instead of 1024" in said
    assert "note: the limit of open files (ulimit -n) is 256" in said
    # A line every ten seconds at most, not one for each.
    assert 1 <= said.count("too many connections") <= 2 + seconds / 10
    assert "refused 127.0.0.1 port " in said


def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip("the hard limit of open files is low")
    server = Server(tmp_path, prefix=("prlimit", "--nofile=256:"))
    try:
        with Client([server.endpoint]) as client:
            assert client.stats()["servers"][0]["connections"]["limit"] == 1024
            pid = server.ready()["pid"]
            limits = Path(f"/proc/{pid}/limits").read_text()
            soft = next(line.split()[3] for line in limits.splitlines() if line.startswith("Max open files"))
            assert int(soft) > 1024
    finally:
        server.end()


def test_no_room_for_connections_at_all(tmp_path: Path) -> None:
    server = Server(tmp_path, prefix=("prlimit", "--nofile=64:64"))
    status, said = server.wait()
    server.end()
    assert status == 1
    assert "the limit of open files (ulimit -n) is 64, which leaves no room for connections" in said


@pytest.mark.parametrize("tls", ["off", "on"])
def test_more_clients_than_the_server_takes(tmp_path: Path, tls: str) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    server = Server(tmp_path, "--max-connections", "2", "--token-file", str(file), "--tls", tls)
    try:
        connect = lambda: Client([server.endpoint], token=TOKEN, tls=tls, timeout=30)  # noqa: E731
        with connect(), connect() as second:
            with pytest.raises(TooManyConnections) as refusal:
                connect()
            assert str(refusal.value) == (
                "too many connections: the server has its limit of 2; end clients that are not needed, or "
                f"start it with more --max-connections (server {server.endpoint})"
            )
            # It tried more than once, in case somebody ends meanwhile.
            assert second.stats()["servers"][0]["connections"]["refused"]["connections"] > 1
        deadline = time.monotonic() + 60
        while json.loads(server.metrics_file.read_text())["connections"]["open"] > 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        connect().close()
    finally:
        server.end()


class _PushingOut:
    """A listener that closes connections as a server does that needs their places for newer ones."""

    def __init__(self, tls: str, times: int, server: str = "") -> None:
        """The first `times` connections are closed; later ones are passed on to `server`."""
        text = b"too many connections that do not say hello"
        error = b"OEP\n" + (5).to_bytes(2, "little") + bytes(2 + 8) + (len(text) + 4).to_bytes(8, "little")
        error += (14).to_bytes(4, "little") + text
        self._said = error if tls == "off" else bytes([21, 3, 3, 0, 2, 2, 49])  # a fatal alert
        self._times = times
        self._server = server
        self.tries = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.tries += 1
                if self.tries > self._times:
                    host, port = self._server.split(":")
                    server = socket.create_connection((host, int(port)))
                    threading.Thread(target=self._copy, args=(client, server), daemon=True).start()
                    threading.Thread(target=self._copy, args=(server, client), daemon=True).start()
                    continue
                client.recv(1 << 16)
                client.sendall(self._said)
                client.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_connection_closed_for_others_gets_the_reason(tls: str) -> None:
    """A server whose place for connections before the hello is needed says so, and closes them."""
    listener = _PushingOut(tls, times=100)
    with pytest.raises(TooManyConnections, match=r"too many connections.*" + listener.endpoint):
        Client([listener.endpoint], token=TOKEN, tls=tls, timeout=30)
    assert listener.tries > 1
    listener.end()


@pytest.mark.parametrize("tls", ["off", "on"])
def test_a_client_whose_connection_was_closed_for_others_retries(tmp_path: Path, tls: str) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    server = Server(tmp_path, "--token-file", str(file), "--tls", tls)
    try:
        listener = _PushingOut(tls, times=2, server=server.endpoint)
        with Client([listener.endpoint], token=TOKEN, tls=tls, timeout=30) as client:
            _train(client, client.create_table(TableSpec(name="t", dim=DIM)), 0)
        assert listener.tries == 3
        listener.end()
    finally:
        server.end()


def test_a_connection_that_is_closed_without_a_word() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def close() -> None:
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(Exception, match="it may have too many connections"):
        Client([f"127.0.0.1:{listener.getsockname()[1]}"], timeout=30)
    thread.join()
    listener.close()
