"""The passwords that ``oeprov adopt`` logs in and becomes root with: their sources and their tries.

A wrong password counts towards a lock-out, and with central accounts all hosts count towards the same one. So
each password is tried once per host, one host after the other, and not on further hosts once one host refused
it.
"""

from __future__ import annotations

import getpass
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from provision.cluster.errors import ConvergeError, HostError
from provision.cluster.inventory import Host

LOGIN, BECOME = "OEPROV_PASSWORD", "OEPROV_BECOME_PASSWORD"
_Result = TypeVar("_Result")


class PasswordRefused(HostError):
    """A host refused a password."""


@dataclass
class Password:
    """One password for one user; ``source`` says where it is from."""

    source: str
    user: str
    value: str = field(repr=False)
    refused_by: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def attempt(self, host: Host, use: Callable[[str], _Result]) -> _Result:
        """The result of ``use(value)``; HostError where another host has refused this password."""
        with self._lock:
            if self.refused_by:
                raise HostError(
                    host.name,
                    f"was not asked: {self.refused_by} refused the password of {self.user} from "
                    f"{self.source}, and another try could lock the account; correct it and run the command "
                    "again",
                )
            try:
                return use(self.value)
            except PasswordRefused:
                self.refused_by = host.name
                raise


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
            source = "the prompt"
            if (use, user) not in self._asked:
                self._asked[use, user] = _ask(prompt, key, variable)
            value = self._asked[use, user]
        if "\n" in value:
            raise ConvergeError(f"the password of {user} from {source} has more than one line; correct it")
        return self._known.setdefault((use, user, value), Password(source, user, value))


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
