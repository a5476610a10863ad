"""Logs in to a host with a password, by Paramiko: OpenSSH's client takes passwords from terminals only.

For ``oeprov adopt`` alone. It has no policy for host keys: the caller compares ``Connection.key``, and only
then authenticates.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Any

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import remote
from provision.hosts.host_keys import Route
from provision.hosts.passwords import Password, refused

_AUTHENTICATION_TIMEOUT = 20  # seconds; after a wrong password hosts wait on purpose
_RSA = ["rsa-sha2-512", "rsa-sha2-256"]  # how hosts prove keys of type ssh-rsa


class Connection:
    """An encrypted connection to a host's sshd; a context manager. ``key`` is the host key that it proved.

    ``known``: (type, key) of host keys that are known, which the host is asked to prove first.
    """

    def __init__(self, host: Host, route: Route, known: Iterable[tuple[str, str]] = ()) -> None:
        import paramiko  # slow to import

        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what it would log is in our errors
        self.host, self.route = host, route
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - close closes it
        self._proxy: subprocess.Popen[bytes] | None = None
        self._transport: Any = None
        try:
            self._transport = paramiko.Transport(self._socket())
            options = self._transport.get_security_options()
            types = [name for kind, _ in known for name in (_RSA if kind == "ssh-rsa" else [kind])]
            first = [name for name in options.key_types if name in types]
            options.key_types = first + [name for name in options.key_types if name not in types]
            self._transport.auth_timeout = _AUTHENTICATION_TIMEOUT
            self._transport.start_client(timeout=remote.CONNECT_TIMEOUT)
            self.key: paramiko.PKey = self._transport.get_remote_server_key()
        except (paramiko.SSHException, EOFError, OSError) as error:
            why = self._why(error)
            self.close()
            raise HostError(host.name, why) from None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _socket(self) -> socket.socket:
        route = self.route
        if not route.proxy:
            return socket.create_connection((route.address, route.port), timeout=remote.CONNECT_TIMEOUT)
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            self._proxy = subprocess.Popen(route.proxy, stdin=end, stdout=end, stderr=self._errors)
        return ours

    def _why(self, error: BaseException) -> str:
        """Why there is no connection, in one sentence."""
        if self._proxy is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._proxy.wait(timeout=2)
            self._errors.seek(0)
            said = remote.last_line(self._errors.read().decode(errors="replace"))
            via = " ".join(self.route.proxy[-1:])
            return (
                f"{self.route.where} cannot be reached through {via}: {said.rstrip('.') or error}; the way "
                "there must work with keys"
            )
        return f"the connection to {self.route.where} failed: {error}; is it up, is the network in order?"

    def log_in(self, password: Password) -> None:
        """Authenticate with a password, in one try; HostError says why that failed."""
        password.attempt(self.host, self._authenticate)

    def _authenticate(self, value: str) -> None:
        import paramiko

        where, user, name = self.route.where, self.route.user, self.host.name
        try:
            left = self._transport.auth_password(user, value)
        except paramiko.BadAuthenticationType as error:
            allowed = ", ".join(error.allowed_types)
            raise HostError(name, no_passwords(where, allowed)) from None
        except paramiko.AuthenticationException as error:
            if "timeout" in str(error).lower():
                raise HostError(name, f"{where} did not answer to the password in time; try again") from None
            raise refused(self.host, where, user) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise HostError(name, f"the connection to {where} broke during the login: {error}") from None
        if left:
            raise HostError(
                name,
                f"{where} asks for more than a password ({', '.join(left)}), which oeprov cannot give; put "
                "your key there by hand",
            )

    def run(self, command: str, given: str, timeout: int) -> tuple[int, str, str]:
        """(exit status, standard output, standard error) of a command; ``given`` is its standard input."""
        import paramiko

        errors: list[bytes] = []
        try:
            channel = self._transport.open_session(timeout=remote.CONNECT_TIMEOUT)
            channel.settimeout(timeout)
            channel.exec_command(command)
            reader = threading.Thread(
                target=lambda: errors.extend(iter(lambda: _receive(channel.recv_stderr), b"")), daemon=True
            )
            reader.start()
            with contextlib.suppress(OSError):  # a command may end before it has read all
                channel.sendall(given.encode())
                channel.shutdown_write()
            out = b"".join(iter(lambda: channel.recv(65536), b""))
            reader.join(timeout)
            code = channel.recv_exit_status()
        except TimeoutError:
            raise HostError(self.host.name, f"did not answer within {timeout} s") from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise HostError(
                self.host.name,
                f"the connection to {self.route.where} broke before the command ended: {error}",
            ) from None
        said = b"".join(errors).decode("utf-8", "replace")
        return code, out.decode("utf-8", "replace"), said

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()
        self._errors.close()


def _receive(receive: Any) -> bytes:
    try:
        found: bytes = receive(65536)
        return found
    except OSError:
        return b""


def no_passwords(where: str, allowed: str) -> str:
    """Why a password is of no use."""
    methods = re.sub(r",\s*", ", ", allowed) or "nothing"
    return (
        f"{where} lets nobody in with a password (it takes {methods}); put your key there by the console, or "
        "by the cloud's own way"
    )
