"""Logs in to a host with a password, by Fabric: OpenSSH's client takes passwords from terminals only.

For ``oeprov adopt`` alone. Slow to import.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import subprocess
import tempfile
from collections.abc import Collection
from typing import IO, Any

import fabric
import paramiko
from invoke.exceptions import CommandTimedOut, ThreadException

from provision.cluster.errors import HostError
from provision.cluster.inventory import Host
from provision.hosts import host_keys, remote
from provision.hosts.host_keys import Route
from provision.hosts.passwords import Password, no_passwords, refused

_AUTHENTICATION_TIMEOUT = 20  # seconds; after a wrong password hosts wait on purpose
_RSA = ["rsa-sha2-512", "rsa-sha2-256"]  # how hosts prove keys of type ssh-rsa


class HostKeyRefused(HostError):
    """A host proved a key that is not known; ``found`` is its fingerprint."""

    found = ""


class _NotYet:
    """The login of Fabric's ``open``: none, since ``Connection.log_in`` follows. No key or agent is tried."""

    def __init__(self, **_: object) -> None:
        pass

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Authenticate nothing."""


class _Remote(fabric.runners.Remote):  # type: ignore[misc]
    """Sends all input at once; Invoke sends a character per 10 ms."""

    def handle_stdin(self, input_: IO[str], output: IO[str], echo: bool = False) -> None:
        """Send the command's input."""
        with contextlib.suppress(OSError):  # a command may end before it has read all
            self.channel.sendall(input_.read().encode())
            self.channel.shutdown_write()


class Connection(contextlib.ExitStack):
    """An encrypted connection to a host's sshd; a context manager. ``key`` is the host key that it proved.

    ``known``: (type, key) of the accepted host keys, which the host is asked to prove first; None: any, for a
    caller who compares ``key``. Raises HostKeyRefused.
    """

    key: paramiko.PKey

    def __init__(self, host: Host, route: Route, known: Collection[tuple[str, str]] | None = None) -> None:
        super().__init__()
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what it would log is in our errors
        self.host, self.route, self._known = host, route, known
        self._errors: IO[bytes] = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._proxy: subprocess.Popen[bytes] | None = None
        config = fabric.Config(
            lazy=True,  # reads no files of Fabric or Invoke
            ssh_config=paramiko.SSHConfig(),  # nor of ssh, which has told the route
            overrides={"authentication": {"strategy_class": _NotYet}, "runners": {"remote": _Remote}},
        )
        # Its name is of no use, since the socket leads to the host.
        self._fabric = fabric.Connection(
            "host", route.user, route.port, config, connect_timeout=remote.CONNECT_TIMEOUT
        )
        self._fabric.client.set_missing_host_key_policy(self)  # Fabric's accepts all
        try:
            self._fabric.connect_kwargs = {
                "sock": self._socket(),
                "transport_factory": self._transport,
                "auth_timeout": _AUTHENTICATION_TIMEOUT,
                "channel_timeout": remote.CONNECT_TIMEOUT,
            }
            self.callback(self._fabric.client.close)  # Fabric's own leaves what it could not open
            self._fabric.open()
        except (paramiko.SSHException, EOFError, OSError) as error:
            why = self._why(error)
            self.close()
            raise HostError(host.name, why) from None
        except HostKeyRefused:
            self.close()
            raise

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Check the host's key, as Paramiko's policy: its client has no host keys, so that all come here."""
        self.key = key
        if self._known is not None and host_keys.entry(key) not in self._known:
            found = host_keys.fingerprint(key)
            error = HostKeyRefused(
                self.host.name,
                f"{self.route.where} proved a host key ({found}) that known_hosts has not, so it got no "
                "password: another machine answers, or its key is known by a certificate only; install your "
                "key with ssh-copy-id",
            )
            error.found = found
            raise error

    def _transport(self, sock: socket.socket, **options: Any) -> paramiko.Transport:
        """A transport that asks for known keys first; Paramiko's client would ask for one type of them."""
        transport = paramiko.Transport(sock, **options)
        security = transport.get_security_options()
        types = [name for kind, _ in self._known or () for name in (_RSA if kind == "ssh-rsa" else [kind])]
        security.key_types = sorted(security.key_types, key=lambda name: name not in types)
        return transport

    def _socket(self) -> socket.socket:
        route = self.route
        if not route.proxy:
            return socket.create_connection((route.address, route.port), timeout=remote.CONNECT_TIMEOUT)
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            self._proxy = self.enter_context(
                subprocess.Popen(route.proxy, stdin=end, stdout=end, stderr=self._errors)
            )
            self.callback(self._proxy.terminate)
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
        where, user, name = self.route.where, self.route.user, self.host.name
        try:
            left = self._fabric.transport.auth_password(user, value)
        except paramiko.BadAuthenticationType as error:
            raise HostError(name, no_passwords(where, ", ".join(error.allowed_types))) from None
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
        try:
            done = self._fabric.run(
                command, in_stream=io.StringIO(given), hide=True, warn=True, timeout=timeout, encoding="utf-8"
            )
        except CommandTimedOut:
            raise HostError(self.host.name, f"did not answer within {timeout} s") from None
        except (ThreadException, paramiko.SSHException, EOFError, OSError) as error:
            why = error.exceptions[0].value if isinstance(error, ThreadException) else error
            raise HostError(
                self.host.name, f"the connection to {self.route.where} broke before the command ended: {why}"
            ) from None
        return done.exited, done.stdout, done.stderr
