"""Gives passwords to OpenSSH's client, for hosts with ``oeprov_connection: password``: by SSH_ASKPASS.

They lie in a file in memory, which only this user's processes can open, and only while this process lives.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from functools import cache
from pathlib import Path

from provision.cluster.errors import HostError

SSH = Path(__file__).with_name("ssh_with_password.sh")
_FILE = "OEPROV_PASSWORDS"  # the environment variable that names the file
_OLDEST = (8, 4)  # of OpenSSH, with SSH_ASKPASS_REQUIRE


class _Table:
    """Passwords by USER@HOST, as ssh asks for them; the parent process may leave some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.file = os.memfd_create("oeprov")
        os.fchmod(self.file, 0o600)
        self.known: dict[str, str] = {}
        inherited = Path(os.environ.get(_FILE, ""))
        lines = os.fsdecode(inherited.read_bytes()).split("\n") if inherited.is_file() else []
        for who, value in zip(lines[::2], lines[1::2], strict=False):  # the last line has an end
            self.add(who, value)

    def add(self, who: str, value: str) -> bool:
        """Whether it is known now; False where another one is."""
        with self._lock:
            if who not in self.known:
                os.write(self.file, os.fsencode(f"{who}\n{value}\n"))
                self.known[who] = value
            return self.known[who] == value


@cache
def _table() -> _Table:
    return _Table()


def known(who: str) -> str:
    """The password of USER@HOST; empty if none is known."""
    return _table().known.get(who, "")


def add(host: str, who: str, value: str) -> None:
    """Let ssh have the password of USER@HOST; HostError where ssh is too old, or cannot tell two apart."""
    version = _ssh_version()
    if version < _OLDEST:
        raise HostError(
            host,
            f"oeprov_connection: password needs OpenSSH {_dotted(_OLDEST)} or newer on this machine: "
            f"found {_dotted(version)}; update openssh-client",
        )
    if not _table().add(who, value):
        raise HostError(
            host,
            f"{who} has another password on another port, and ssh asks for both in the same words: set "
            "-o HostKeyAlias=NAME in ansible_ssh_common_args of one of them",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@cache
def _ssh_version() -> tuple[int, ...]:
    said = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"OpenSSH\D*(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else _OLDEST


def environment() -> dict[str, str]:
    """By what ``SSH`` finds the passwords."""
    return {_FILE: f"/proc/{os.getpid()}/fd/{_table().file}"}


def for_child() -> tuple[dict[str, str], tuple[int, ...]]:
    """Environment and open file by which another oeprov, which outlives this one, has the passwords too."""
    return {_FILE: f"/proc/self/fd/{_table().file}"}, (_table().file,)
