"""Runs one command on one host through OpenSSH's client, and explains every failure in words.

It uses the same client, configuration, agents, jump hosts and known_hosts as Ansible. A host with
``oeprov_connection: password`` is logged in to with a password, which is tried on one host first.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO

from provision.cluster.errors import HostError, HostKeyUnknown, LoginRefused
from provision.cluster.inventory import Host
from provision.hosts import askpass, passwords
from provision.hosts.fanout import Cut
from provision.hosts.passwords import Password
from provision.hosts.stop_request import TICK, StopRequest

CONNECT_TIMEOUT = 10
MOST_OUTPUT = 64 << 20  # bytes that one command may print
_BEGUN = re.compile(rb"OEPROV-BEGUN ?(.*)\n")  # what a payload prints first, on its standard error
_SILENT = 10.0  # seconds until a payload that announces nothing gets all its forms; its errors may be lost
CONFIG = Path(__file__).with_name("ssh_config")
# Runs a command ($0) with no input in a session of its own, and ends all of it when our end of the connection
# has gone: without a terminal, sshd leaves what it started running.
_TETHER = """\
exec 3<&0
setsid sh -c "$0" </dev/null & child=$!
( while read -r line; do :; done <&3; kill -s TERM -- "-$child" ) 2>/dev/null & watch=$!
wait "$child"; code=$?
kill "$watch" 2>/dev/null
exit "$code"
"""


def argv(host: Host, connect_timeout: int = CONNECT_TIMEOUT) -> list[str]:
    """The ``ssh`` command line without the remote command; it never prompts."""
    own = ("-oBatchMode=yes", f"-oConnectTimeout={connect_timeout}")
    ssh = str(askpass.SSH) if host.login == "password" else "ssh"
    return [ssh, "-F", str(CONFIG), "-T", *own, *host.ssh_arguments, "--", host.address]


@cache
def _settings(arguments: tuple[str, ...], address: str) -> tuple[int, str, str]:
    line = ["ssh", "-G", "-F", str(CONFIG), *arguments, "--", address]
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return done.returncode, done.stdout, done.stderr


def settings(host: Host) -> str:
    """What ``ssh -G`` says of a host, a setting per line; HostError where ssh does not take its options."""
    code, out, err = _settings(host.ssh_arguments, host.address)
    if code:
        raise failure(host, err, CONNECT_TIMEOUT)
    return out


def _values(host: Host) -> dict[str, str]:
    return dict(reversed([line.partition(" ")[::2] for line in settings(host).splitlines()]))


def user(host: Host) -> str:
    """The user that ssh logs in as; HostError where ssh does not take its options."""
    return _values(host)["user"]


def password(host: Host) -> Password:
    """The password of a host that takes no keys, which ssh has then; HostError where none is known."""
    values = _values(host)
    who = f"{values['user']}@{values.get('hostkeyalias') or values['hostname']}"
    found = passwords.SHARED.standing(host, values["user"], askpass.known(who))
    askpass.add(host.name, who, found.value)
    return found


def has_password(host: Host) -> bool:
    """Whether the password of a host that takes no keys is known."""
    try:
        password(host)
    except HostError:
        return False
    return True


def environment(host: Host) -> dict[str, str]:
    """What ``argv`` needs beside our own environment; HostError where the password is unknown or wrong.

    A password that no host has taken yet is tried here first.
    """
    if host.login != "password":
        return {}
    given, more = password(host), askpass.environment()
    if not given.is_proven:
        given.prove(host, lambda _: _run(host, "true", b"", CONNECT_TIMEOUT, 3 * CONNECT_TIMEOUT, more))
    return more


def elevated(host: Host, command: str) -> str:
    """The shell command, with sudo if ``ansible_become`` is set."""
    return f"sudo -n {command}" if host.become else command


def run(
    host: Host,
    command: str,
    given: str | bytes | Callable[[str], bytes],
    connect_timeout: int,
    timeout: int,
    *,
    apart: bool = False,
    stop: StopRequest | None = None,
    cut: Cut | None = None,
) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of ``command`` with ``given`` as its standard input.

    ``command`` is for the login shell of the host. ``given`` may be a function, which gets the version of
    Python that a payload announces there, or nothing if it announces none for a while. Times are in seconds,
    ``timeout`` for all of it. Raises HostError when the host cannot be reached, refuses the login, or has
    another host key. ``apart``: Ctrl-C at the terminal does not end it. ``stop``: a request ends ssh, and
    HostError says so. So does ``cut``.
    """
    given = given.encode() if isinstance(given, str) else given
    more = environment(host)
    return _run(host, command, given, connect_timeout, timeout, more, apart=apart, stop=stop, cut=cut)


def _run(
    host: Host,
    command: str,
    given: bytes | Callable[[str], bytes],
    connect_timeout: int,
    timeout: int,
    more: Mapping[str, str],
    *,
    apart: bool = False,
    stop: StopRequest | None = None,
    cut: Cut | None = None,
) -> tuple[int, str, str]:
    line = [*argv(host, connect_timeout), command]
    process = _start(host, line, more, stderr=subprocess.PIPE, apart=apart)
    cut = cut or Cut()
    try:
        cut.add(process)
        out, err = _exchange(host, process, given, timeout, stop, cut)
        code = process.wait()
    finally:
        cut.remove(process)
        if process.returncode is None:
            _end(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    said = error_text(err)
    if cut.why:
        raise HostError(host.name, cut.why + _stage(out, err))
    if code == 255:
        raise failure(host, said, connect_timeout)
    return code, out.decode("utf-8", "replace"), said


def _exchange(
    host: Host,
    process: subprocess.Popen[bytes],
    given: bytes | Callable[[str], bytes],
    timeout: float,
    stop: StopRequest | None,
    cut: Cut,
) -> tuple[bytes, bytes]:
    """Feed ``given`` to ssh and read both of its outputs to their ends; HostError after ``timeout``."""
    assert process.stdin is not None  # noqa: S101 - all are pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    begun = time.monotonic()
    deadline, silent = begun + timeout, begun + _SILENT
    read: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    errors = process.stderr.fileno()
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.PollSelector() as selector:
        for number in read:
            selector.register(number, selectors.EVENT_READ)
        left = memoryview(b"" if callable(given) else given)
        if not callable(given):
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        while any(number in read for number in selector.get_map()):
            if stop is not None and stop.count:
                raise HostError(host.name, "was not waited for: a stop request")
            if cut.why:  # ssh was killed; a jump host's ssh may still hold the pipe of errors
                break
            now = time.monotonic()
            if callable(given):
                announced = _BEGUN.search(read[errors])
                if announced or now >= silent:
                    given = given(announced[1].decode("ascii", "replace") if announced else "")
                    left = memoryview(given)
                    selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
            if now >= deadline:
                how_far = _stage(*map(bytes, read.values()))
                raise HostError(host.name, f"did not answer within {timeout:g} s{how_far}")
            remains = (min(deadline, silent) if callable(given) else deadline) - now
            for key, _ in selector.select(remains if stop is None else min(remains, TICK)):
                if key.fd in read:
                    piece = os.read(key.fd, 1 << 16)
                    read[key.fd] += piece
                    if not piece:
                        selector.unregister(key.fd)
                    if len(read[key.fd]) > MOST_OUTPUT and not cut.why:
                        raise HostError(
                            host.name,
                            f"sent more than {MOST_OUTPUT >> 20} MiB; what prints there at a login?",
                        )
                    continue
                try:
                    left = left[os.write(key.fd, left) :]
                except BrokenPipeError:  # ssh ended, or the command reads no more
                    left = left[:0]
                if not left:
                    selector.unregister(key.fd)
                    with contextlib.suppress(OSError):
                        process.stdin.close()
    return bytes(read[process.stdout.fileno()]), bytes(read[process.stderr.fileno()])


def _stage(out: bytes, err: bytes) -> str:
    """How far a host came before it hung, by what it printed."""
    if _BEGUN.search(err):
        return "; the login worked, and then a command hung on the host"
    return "; it printed something, but Python did not start" if out.strip() else ""


def error_text(err: bytes) -> str:
    """What ssh and the command printed as errors."""
    return _BEGUN.sub(b"", err).decode("utf-8", "replace")


@contextlib.contextmanager
def stream(host: Host, command: str) -> Iterator[Iterator[str]]:
    """The lines that ``command`` prints, live; leaving the context ends the command on the host too.

    HostError when the connection fails or the command ends with an error.
    """
    wrapped = f"sh -c {shlex.quote(_TETHER)} {shlex.quote(command)}"
    with tempfile.TemporaryFile() as errors:
        process = _start(host, [*argv(host), elevated(host, wrapped)], environment(host), stderr=errors)
        try:
            yield _lines(host, process, errors)
        finally:
            _end(process)


@contextlib.contextmanager
def pipe(host: Host, command: str, given: bytes) -> Iterator[IO[bytes]]:
    """The standard output of ``command``, which reads ``given`` first; leaving the context ends it here.

    HostError when the connection fails or the command ends with an error; it replaces the reader's own error
    about a cut stream.
    """
    with tempfile.TemporaryFile() as errors:
        process = _start(host, [*argv(host), command], environment(host), stderr=errors)
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
            try:
                yield process.stdout
            except Exception:
                if process.stdout.read(1) == b"":  # it has ended: report why, which says more
                    _check(host, process, errors)
                raise
            process.stdout.read()  # to its end
            _check(host, process, errors)
        finally:
            _end(process)


def _lines(host: Host, process: subprocess.Popen[bytes], errors: IO[bytes]) -> Iterator[str]:
    for line in process.stdout or ():
        yield line.decode("utf-8", "replace").rstrip("\n")
    _check(host, process, errors)


def _check(host: Host, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Raise HostError when the command failed."""
    code = process.wait()
    errors.seek(0)
    said = error_text(errors.read())
    if code == 255:
        raise failure(host, said, CONNECT_TIMEOUT)
    if code:
        raise HostError(host.name, f"the command ended with {last_line(said) or f'exit status {code}'}")


def _start(
    host: Host, command: list[str], more: Mapping[str, str], stderr: int | IO[bytes], *, apart: bool = False
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=apart,
            env={**os.environ, **more} if more else None,
        )
    except FileNotFoundError:
        raise HostError(
            host.name, "there is no ssh on this machine; install OpenSSH's client (openssh-client)"
        ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ssh. Closing its input ends a tethered command on the host."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    for signal_number in (0, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
            break
    if process.stderr is not None:
        process.stderr.close()


_CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
_UNKNOWN = "Host key verification failed"
_NO_FILE = re.compile(r"^(?:no such identity|Load key|Identity file).*", re.MULTILINE)
_DENIED = re.compile(
    r"^(?:(\S+)@(\S+): )?Permission denied \((.*)\)|Too many authentication failures", re.MULTILINE
)
_CONNECT = re.compile(r"^ssh: connect to host (\S+) port (\d+): (.*)", re.MULTILINE)
_RESOLVE = re.compile(r"^ssh: Could not resolve hostname (\S+): ", re.MULTILINE)
_OPTION = re.compile(
    r"^(?:command-line|\S*config\S*):? line \d+: .*|^\S+: Bad configuration option.*|.*unknown option.*|"
    r".*terminating, \d+ bad configuration options",
    re.MULTILINE,
)
_BROKE = re.compile(
    r"^(?:Connection to \S+ closed by remote host|client_loop: .*|Timeout, server \S+ not responding)",
    re.MULTILINE,
)


def failure(host: Host, said: str, connect_timeout: int) -> HostError:
    """Why ssh ended with 255, from its standard error, and what to do; one line."""
    why = _reason(host, said, connect_timeout)
    denied = _DENIED.search(said)
    if _CHANGED in said:
        return HostError(host.name, why)
    if _UNKNOWN in said:
        return HostKeyUnknown(host.name, why)
    if denied and denied[3] and _is_of_host(host, denied):
        methods = tuple(denied[3].split(","))
        if host.login == "password":
            return _refused_password(host, denied[1] or host.user, methods)
        return LoginRefused(host.name, why, methods)
    return HostError(host.name, why)


def _refused_password(host: Host, user: str, methods: tuple[str, ...]) -> HostError:
    """Why a host refused the password; ``methods``: what its sshd takes."""
    where = f"{host.address} port {host.port}"
    if "password" in methods:
        return passwords.refused(host, where, user)
    if "keyboard-interactive" in methods:
        cure = "takes passwords by keyboard-interactive only: set PasswordAuthentication yes for its sshd"
    else:
        cure = f"takes no passwords (it takes {', '.join(methods)}): remove oeprov_connection: password"
    return HostError(host.name, f"{where} {cure}")


def _is_of_host(host: Host, denied: re.Match[str]) -> bool:
    """Whether the host itself refused the login, not a jump host; ssh says HostName of its configuration."""
    if not denied[2] or denied[2] == host.address:
        return True
    return f"hostname {denied[2]}" in _settings(host.ssh_arguments, host.address)[1].splitlines()


def _reason(host: Host, said: str, connect_timeout: int) -> str:
    where = f"{host.address} port {host.port}"
    if _CHANGED in said:
        return (
            f"{where} has another host key than known_hosts says: it was reinstalled, or someone intercepts "
            f"the connection; if it was reinstalled, `ssh-keygen -R {_known_as(host)}`"
        )
    if _UNKNOWN in said:
        return (
            f"{where} has a host key that is not in known_hosts; check it and connect once with "
            f"`ssh -p {host.port} {host.address}`, or record it with `{adopt(host)}`"
        )
    denied = _DENIED.search(said)
    if denied:
        return _denied(host, where, said, denied)
    resolve = _RESOLVE.search(said)
    if resolve:
        return f"the name {resolve[1]} cannot be resolved; set ansible_host to its address"
    if re.search(r"timed out", said):
        return f"{where} does not answer within {connect_timeout} s; is it up, is a firewall between?"
    connect = _CONNECT.search(said)
    if connect:
        there, why = f"{connect[1]} port {connect[2]}", connect[3].strip()
        via = "" if there == where else f" (on the way to {where})"
        if "refused" in why:
            return f"{there} refuses connections{via}; is sshd running there, and is ansible_port right?"
        return f"the connection to {there} failed{via}: {why}; is it up, is the network between in order?"
    option = _OPTION.search(said)
    if option:
        return (
            f"ssh does not take its options: {option[0].strip()}; see ansible_ssh_common_args, ~/.ssh/config"
        )
    if not said.strip() or _BROKE.search(said):
        return f"the connection to {where} broke before the command ended"
    return f"SSH to {where} failed: {last_line(said)}"


def _denied(host: Host, where: str, said: str, denied: re.Match[str]) -> str:
    who, there = host.user or "this user", where
    if denied[2]:
        who = denied[1]
        there = where if _is_of_host(host, denied) else f"{denied[2]} (on the way to {where})"
    file = _NO_FILE.search(said)
    why = file[0].strip().rstrip(".") if file else denied[3] or "too many keys were tried"
    if "UNPROTECTED PRIVATE KEY FILE" in said:
        why = f"others may read the key file {host.private_key}, so it is not used: chmod 600"
    cure = "set ansible_user and ansible_ssh_private_key_file, or load the key into ssh-agent"
    if there == where and denied[3] and "publickey" not in denied[3]:
        cure = "it takes no keys: set oeprov_connection: password, and ansible_password, vaulted"
    elif there == where and re.search(r"password|keyboard-interactive", denied[3] or ""):
        cure += f"; if only a password is known, `{adopt(host)}` installs your key with it"
    return f"{there} refuses to let {who} in ({why}); {cure}"


def adopt(host: Host) -> str:
    """The command that sets up a first login on a host."""
    return f"oeprov adopt -i INVENTORY --limit {shlex.quote(host.name)}"


def _known_as(host: Host) -> str:
    """The host's name in known_hosts."""
    return host.address if host.port == 22 else shlex.quote(f"[{host.address}]:{host.port}")


def last_line(text: str) -> str:
    """The last line of a text that is not blank, or nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
