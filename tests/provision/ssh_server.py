"""A real SSH server on loopback for tests: Paramiko's, which runs commands on this machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko


class _Session(paramiko.ServerInterface):
    def __init__(self, server: SshServer) -> None:
        self.server = server

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if key.get_base64() == self.server.client_key.get_base64():
            return paramiko.AUTH_SUCCESSFUL
        return paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.server.commands.append(command.decode())
        threading.Thread(target=self._run, args=(channel, command.decode()), daemon=True).start()
        return True

    def _run(self, channel: paramiko.Channel, command: str) -> None:
        with subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            channel.sendall(self.server.banner)
            tasks = [
                (channel.recv, process.stdin.write, process.stdin.close),
                (process.stdout.read1, channel.sendall, lambda: None),
                (process.stderr.read1, channel.sendall_stderr, lambda: None),
            ]
            threads = [threading.Thread(target=_copy, args=task, daemon=True) for task in tasks]
            for thread in threads:
                thread.start()
            for thread in threads[1:]:
                thread.join()
            channel.send_exit_status(process.wait())
            channel.close()
            threads[0].join()


def _copy(read: Callable[[int], bytes], write: Callable[[bytes], object], end: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):  # the other end may close first
        while piece := read(65536):
            write(piece)
    with contextlib.suppress(OSError):
        end()


class SshServer:
    """Listens on a free port of 127.0.0.1; knows one client key and remembers the commands it ran."""

    def __init__(self, directory: Path) -> None:
        self.host_key = paramiko.ECDSAKey.generate()
        self.client_key = paramiko.ECDSAKey.generate()
        self.key_file = directory / "id_test"
        self.client_key.write_private_key_file(str(self.key_file))
        self.commands: list[str] = []
        self.banner = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def known_hosts_line(self, key: paramiko.PKey | None = None) -> str:
        key = key or self.host_key
        return f"[127.0.0.1]:{self.port} {key.get_name()} {key.get_base64()}\n"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            transport = paramiko.Transport(client)
            transport.add_server_key(self.host_key)
            self._transports.append(transport)
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.start_server(event=threading.Event(), server=_Session(self))

    def close(self) -> None:
        # shutdown wakes the thread that waits in accept; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for transport in self._transports:
            transport.close()


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[SshServer]:
    server = SshServer(directory)
    try:
        yield server
    finally:
        server.close()
