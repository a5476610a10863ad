"""What ``oeprov adopt`` runs on a host: plain shell, as the user who is logged in or as root.

Scripts and a password for sudo or su go over standard input; command lines carry neither.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from provision.cluster.errors import HostError
from provision.cluster.inventory import DEFAULT_PYTHON, Host
from provision.hosts import remote
from provision.hosts.observe import SYSTEM_PROBE, bare_system
from provision.hosts.passwords import Password, PasswordRefused
from provision.node.ansible_python import CARRIERS
from provision.node.state import OsInfo

_SCRIPT = Path(__file__).with_name("first_login.sh")
_TIMEOUT = 60
_INSTALL_TIMEOUT = 900
LOCK_PATIENCE = 120  # seconds that a package manager's lock is waited for
_MARK = "oeprov:"
_PYTHON = "python "
_BEGUN = f"{_MARK}begin=yes"
# The first line of the input is the password; the rest is the script, which has no secrets. printf is a part
# of the shell, so that no process shows the password among its arguments.
_BECOME = 'IFS= read -r word; script=$(cat); printf "%s\\n" "$word" | LC_ALL=C {} "$script"'
_SUDO, _SU = 'sudo -k -S -p "" sh -c', "su root -s /bin/sh -c"
_WRONG = ("try again", "incorrect password", "Authentication failure", "no password was provided")


class Session(Protocol):
    """A login on a host: (exit status, standard output, standard error) of a command with that input."""

    def run(self, command: str, given: str, timeout: int) -> tuple[int, str, str]:
        """Run one command."""


@dataclass(frozen=True)
class KeySession:
    """A login by OpenSSH with keys."""

    host: Host

    def run(self, command: str, given: str, timeout: int) -> tuple[int, str, str]:
        """Run one command."""
        return remote.run(self.host, command, given, remote.CONNECT_TIMEOUT, timeout)


class Facts(NamedTuple):
    """A host and the user who is logged in; ``sudo``: works, missing, or what it says without a password."""

    uid: int
    user: str
    hostname: str
    machine: str
    boot: str
    sudo: str
    manager: str
    os: OsInfo = OsInfo()
    pythons: Mapping[str, str] = MappingProxyType({})  # program → version; empty if it does not start
    broken: str = ""  # "LINK -> TARGET" of a Python that is a link to nothing

    @property
    def identity(self) -> tuple[str, str, str]:
        """Tells machines apart; containers of one machine share all but the name."""
        return self.machine, self.boot, self.hostname

    @property
    def has_root(self) -> bool:
        """The user is root, or becomes root without a password."""
        return self.uid == 0 or self.sudo == "works"


def observe(host: Host, session: Session) -> Facts:
    """The facts of a host; HostError where it runs nothing."""
    wanted = CARRIERS if host.python == DEFAULT_PYTHON else (host.python,)
    script = f"{_script('observe', *wanted)}{SYSTEM_PROBE}\n"
    code, out, err = session.run("sh -s", script, _TIMEOUT)
    found = parse(out)
    if "end" not in found:
        said = remote.last_line(err) or remote.last_line(out) or f"exit status {code}"
        raise HostError(
            host.name, f"lets the user in but runs nothing: {said}; log in by hand once and settle that"
        )
    return facts(found, bare_system(out))


def facts(found: dict[str, str], os: OsInfo = OsInfo()) -> Facts:  # noqa: B008 - it cannot be changed
    """Facts from the script's answers."""
    get = found.get
    return Facts(
        uid=int(get("uid", "-1")),
        user=get("user", ""),
        hostname=get("hostname", ""),
        machine=get("machine", ""),
        boot=get("boot", ""),
        sudo=get("sudo", ""),
        manager=get("manager", ""),
        os=os,
        pythons={key[len(_PYTHON) :]: value for key, value in found.items() if key.startswith(_PYTHON)},
        broken=get("broken", ""),
    )


def parse(text: str) -> dict[str, str]:
    """The answers of the script among a host's other output."""
    pairs = [line[len(_MARK) :].partition("=") for line in text.splitlines() if line.startswith(_MARK)]
    return {key: value.strip() for key, _, value in pairs}


def call_as_user(host: Host, session: Session, *words: str) -> None:
    """Call a function of the script as the user; HostError says why it failed."""
    code, out, err = session.run("sh -s", _script(*words), _TIMEOUT)
    _check(host, code, out, err)


def check_root(host: Host, session: Session, now: Facts, become: Password) -> None:
    """Become root with a password and do nothing; HostError says why that is refused."""
    become.attempt(host, lambda _: call_as_root(host, session, now, become, "true"))


def call_as_root(host: Host, session: Session, now: Facts, become: Password | None, *words: str) -> None:
    """Call a function of the script as root; HostError says why it failed.

    ``become``: the password for sudo or su, which ``check_root`` has proven; None where none is needed.
    """
    script = _script(*words)
    if now.uid == 0 or become is None:
        line = "sh -s" if now.uid == 0 else "sudo -n sh -s"
        _check(host, *session.run(line, script, _INSTALL_TIMEOUT))
        return
    method = host.first_login.become_method
    line = "sh -c " + shlex.quote(_BECOME.format(_SU if method == "su" else _SUDO))
    code, out, err = session.run(line, f"{become.value}\n{script}", _INSTALL_TIMEOUT)
    if _BEGUN not in out:
        said = remote.last_line(err).removeprefix("Password: ") or f"exit status {code}"
        if any(piece in err for piece in _WRONG):
            raise PasswordRefused(
                host.name,
                f"{method} refused the password of {become.user} from {become.source} ({said}); nothing was "
                "changed there",
            )
        raise HostError(host.name, f"{method} refused ({said}); {_cure(err, method)}")
    _check(host, code, out, err)


def _cure(said: str, method: str) -> str:
    if "tty" in said or "terminal" in said:
        return f"{method} there wants a terminal: remove requiretty from its sudoers, or log in as root once"
    other = "ansible_become_method: su with root's password" if method == "sudo" else "sudo"
    return f"let the user become root there, log in as root once (ansible_user: root), or use {other}"


def _script(*words: str) -> str:
    text = _SCRIPT.read_text(encoding="utf-8")
    return f"{text}\necho {shlex.quote(_BEGUN)}\n{shlex.join(words)}\n"


def _check(host: Host, code: int, out: str, err: str) -> None:
    if code:
        raise HostError(host.name, remote.last_line(err) or remote.last_line(out) or f"exit status {code}")
