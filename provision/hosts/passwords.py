"""The passwords of hosts: their sources and their tries.

A wrong password counts towards a lock-out, and with central accounts all hosts count towards the same one. So
each password is tried on one host first, and on no other one until a host has taken it; on each host once.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from provision.cluster.errors import ConvergeError, HostError
from provision.cluster.inventory import Host

LOGIN, BECOME = "OEPROV_PASSWORD", "OEPROV_BECOME_PASSWORD"
PROMPT = "the prompt"
_Result = TypeVar("_Result")


class PasswordRefused(HostError):
    """A host refused a password."""


def refused(host: Host, where: str, user: str) -> PasswordRefused:
    """The error for a wrong password of a login."""
    hint = ""
    if user == "root":
        hint = ", or its sshd takes no passwords from root (PermitRootLogin): log in as another user"
    return PasswordRefused(
        host.name, f"{where} refused the password of {user}: it is wrong{hint}; nothing was changed there"
    )


def no_passwords(where: str, allowed: str) -> str:
    """Why a password is of no use."""
    methods = re.sub(r",\s*", ", ", allowed) or "nothing"
    return (
        f"{where} lets nobody in with a password (it takes {methods}); put your key there by the console, or "
        "by the cloud's own way"
    )


@dataclass
class Password:
    """One password for one user; ``source`` says where it is from."""

    source: str
    user: str
    value: str = field(repr=False)
    refused_by: str = ""
    is_proven: bool = False  # a host took it
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def is_mistyped(self) -> bool:
        """It was asked for, and no host has taken it."""
        return self.source == PROMPT and bool(self.refused_by) and not self.is_proven

    def attempt(self, host: Host, use: Callable[[str], _Result]) -> _Result:
        """The result of ``use(value)``; HostError where another host has refused this password first."""
        with self._lock:
            if not self.is_proven:
                return self._first_attempt(host, use)
        return use(self.value)

    def prove(self, host: Host, use: Callable[[str], object]) -> None:
        """Try it with ``use`` if no host has taken it yet; HostError as of ``attempt``."""
        with self._lock:
            if not self.is_proven:
                self._first_attempt(host, use)

    def _first_attempt(self, host: Host, use: Callable[[str], _Result]) -> _Result:
        if self.refused_by:
            raise HostError(
                host.name,
                f"was not asked: {self.refused_by} refused the password of {self.user} from {self.source}, "
                "and another try could lock the account; correct it and run the command again",
            )
        try:
            found = use(self.value)
        except PasswordRefused:
            self.refused_by = host.name
            raise
        self.is_proven = True
        return found


class Passwords:
    """Finds the password for each host: the inventory's, the environment's, or one that is asked for.

    Asks once per user, from the main thread only.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Password] = {}
        self._asked: dict[tuple[str, str], str] = {}

    def login(self, host: Host, user: str) -> Password:
        """The password to log in with."""
        return self._get(
            "login", user, host.first_login.password, "ansible_password", LOGIN, f"Password of {user}: "
        )

    def standing(self, host: Host, user: str, inherited: str) -> Password:
        """The password of a host that takes no keys; it is not asked for. HostError where none is known."""
        given = host.first_login.password
        value = given or os.environ.get(LOGIN) or self._asked.get(("login", user)) or inherited
        if not value:
            raise HostError(
                host.name,
                f"no password of {user} is known for oeprov_connection: password: set {LOGIN} in the "
                "environment, or ansible_password, vaulted, in the inventory",
            )
        return self._keep("login", user, "ansible_password" if given else LOGIN, value)

    def forget(self, password: Password | None) -> None:
        """Ask for a login's password again."""
        if password is not None:
            self._asked.pop(("login", password.user), None)

    def become(self, host: Host, user: str, login: Password | None) -> Password:
        """The password to become root with; sudo asks for the user's own, as the login does."""
        given = host.first_login.become_password
        if host.first_login.become_method == "su":
            return self._get(
                "su", "root", given, "ansible_become_password", BECOME, "Password of root for su: "
            )
        if not given and not os.environ.get(BECOME):
            if login is not None:
                return self._get("sudo", user, login.value, login.source, "", "")
            if host.first_login.password or os.environ.get(LOGIN):
                return self._get("sudo", user, host.first_login.password, "ansible_password", LOGIN, "")
        return self._get(
            "sudo", user, given, "ansible_become_password", BECOME, f"Password of {user} for sudo: "
        )

    def _get(self, use: str, user: str, given: str, key: str, variable: str, prompt: str) -> Password:
        source, value = key, given
        if not value and os.environ.get(variable):
            source, value = variable, os.environ[variable]
        if not value:
            source = PROMPT
            if (use, user) not in self._asked:
                self._asked[use, user] = _ask(prompt, key, variable)
            value = self._asked[use, user]
        return self._keep(use, user, source, value)

    def _keep(self, use: str, user: str, source: str, value: str) -> Password:
        if "\n" in value:
            raise ConvergeError(f"the password of {user} from {source} has more than one line; correct it")
        return self._known.setdefault((use, user, value), Password(source, user, value))


SHARED = Passwords()
"""Of this process, so that a password that one host refused is tried nowhere else."""


def _ask(prompt: str, key: str, variable: str) -> str:
    what = prompt.partition(":")[0].lower()
    if not sys.stdin.isatty():
        raise ConvergeError(
            f"{what}: no terminal to ask at; set {variable} in the environment, or {key}, vaulted, in the "
            "inventory"
        )
    found = getpass.getpass(prompt)
    if not found:
        raise ConvergeError(f"{what}: none was given")
    return found
