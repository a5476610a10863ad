"""Real parameter servers on free ports of loopback, for tests."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_HELD: deque[socket.socket] = deque()  # bound and not listening: the kernel gives their ports to nobody else


def held_port() -> int:
    """A port of loopback for a program that this process starts, and starts again.

    No other test gets it meanwhile. The program sets SO_REUSEADDR, as ours, gRPC's and PyTorch's do.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _HELD.append(one)
    if len(_HELD) > 200:  # of tests that are over
        _HELD.popleft().close()
    return int(one.getsockname()[1])


def free_endpoints(count: int) -> str:
    """For --workers, at ports that are held."""
    return ",".join(f"127.0.0.1:{held_port()}" for _ in range(count))


class Server:
    """One `python -m oe_runtime.server`."""

    def __init__(
        self, directory: Path, *flags: str, index: int = 0, count: int = 1, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: the command that starts it, such as prlimit."""
        directory.mkdir(parents=True, exist_ok=True)
        self.ready_file = directory / f"ready-{index}.json"
        self.metrics_file = directory / f"metrics-{index}.json"
        self.errors = directory / f"stderr-{index}"
        command = [*prefix, sys.executable, "-m", "oe_runtime.server"]
        command += ["--index", str(index), "--count", str(count)]
        command += ["--ready-file", str(self.ready_file), "--metrics-file", str(self.metrics_file)]
        command += [] if "--port" in flags else ["--port", str(held_port())]
        command += ["--exit-with-parent", "--threads", "2", *flags]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors)

    def ready(self) -> dict[str, Any]:
        """What the ready file says, once it is there."""
        deadline = time.monotonic() + 60
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return json.loads(self.ready_file.read_text())

    @property
    def endpoint(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.ready()['port']}"

    def wait(self) -> tuple[int, str]:
        """Exit status and standard error."""
        return self.process.wait(60), self.errors.read_text()

    def end(self) -> None:
        """End it, however it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        if self.process.stdin:
            self.process.stdin.close()


# So small that most tests' rows do not fit.
CACHES = {"dram_pmem": 1 << 20, "dram_ssd": 128 << 10}


class Servers:
    """Several servers that share the keys."""

    def __init__(self, directory: Path, count: int, *flags: str, storage: str = "dram") -> None:
        self.servers = []
        for index in range(count):
            of_storage = ["--storage", storage]
            if storage != "dram":
                of_storage += ["--storage-path", str(directory / f"pool-{index}")]
            if cache := CACHES.get(storage):
                of_storage += ["--storage-cache", str(cache)]
            self.servers.append(Server(directory, *of_storage, *flags, index=index, count=count))

    @property
    def endpoints(self) -> list[str]:
        """One host:port a server, in the order of their index."""
        return [server.endpoint for server in self.servers]

    def end(self) -> None:
        """End all of them."""
        for server in self.servers:
            server.end()


class Relay:
    """Passes connections on to a server, and tells what clients ask for before it goes on.

    Once the server is gone it takes none, as the server. An OSError of `on_request` ends that connection at
    the server. `change` has what goes back to clients.
    """

    def __init__(
        self,
        endpoint: str,
        on_request: Callable[[int], None] = lambda op: None,
        change: Callable[[bytes], bytes] = bytes,
    ) -> None:
        host, port = endpoint.split(":")
        self._server = (host, int(port))
        self._on_request = on_request
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those there are end with their peers."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError), self._listener:
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._replies, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            while header := stream.read(24):
                op, length = struct.unpack_from("<6xH8xQ", header)
                # To the end: what comes after a shutdown is answered by a reset, where an end is meant.
                body = stream.read(length)
                self._on_request(op)
                server.sendall(header + body)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()

    def _replies(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(self._change(data))
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


class CuttingProxy:
    """Passes connections on to a server, and resets them when a test says so, as a firewall does."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self._left: int | None = None  # bytes
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut_after(self, size: int) -> None:
        """Reset the connection that passes the last of so many more bytes, either way."""
        self._left = size

    def close(self) -> None:
        """End all connections."""
        self._ends = True
        self._thread.join()
        self._selector.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select(0.02):
                if key.data is None:
                    self._accept()
                elif key.fileobj in self._selector.get_map():  # its connection is still there
                    self._pass(key.fileobj, key.data)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._server)
        self._selector.register(client, selectors.EVENT_READ, server)
        self._selector.register(server, selectors.EVENT_READ, client)

    def _pass(self, source: Any, to: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            cut = self._left is not None and self._left < len(data)
            to.sendall(data[: self._left] if cut else data)
        except OSError:
            data, cut = b"", False
        if self._left is not None:
            self._left = None if cut else self._left - len(data)
        if data and not cut:
            return
        self.cuts += cut
        for end in (source, to):
            self._selector.unregister(end)
            if cut:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
