"""The errors that are meant for the person at the terminal: one line, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

_MOST_NAMED = 5  # jobs or runs in a message


class OeprovError(Exception):
    """Base of all errors that a command prints as ``error: …`` (exit 1) instead of a traceback."""


class InventoryError(OeprovError):
    """The inventory cannot be used; the message names file, host or group, and key.

    ``problems`` lists all that was found, the message only the first.
    """

    def __init__(self, message: str, problems: list[str] | None = None) -> None:
        super().__init__(message)
        self.problems = problems or [message]

    @classmethod
    def from_list(cls, problems: list[str]) -> InventoryError:
        """One error for a list that is not empty."""
        more = len(problems) - 1
        hint = f" (and {more} more; `oeprov inventory check` lists them)" if more else ""
        return cls(problems[0] + hint, problems)


class HostError(OeprovError):
    """A host could not be observed or changed; ``host`` is its inventory name, ``reason`` why."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


class LoginRefused(HostError):
    """A host itself, not a jump host before it, refused our keys; ``methods``: what its sshd takes."""

    def __init__(self, host: str, reason: str, methods: tuple[str, ...]) -> None:
        super().__init__(host, reason)
        self.methods = methods

    @property
    def takes_passwords(self) -> bool:
        """Whether its sshd lets users log in with a password."""
        return bool({"password", "keyboard-interactive"} & set(self.methods))


class HostKeyUnknown(HostError):
    """A host has a key that is not in known_hosts."""


class ConvergeError(OeprovError):
    """A change was refused or failed half-way; the message says which host and step, and how to go on."""


class TrainingError(OeprovError):
    """A training job could not be started, found or stopped."""


class Interrupted(TrainingError):
    """The user stopped the command before training began (exit 130)."""


class LabError(OeprovError):
    """The lab's virtual machines cannot be made, started or reached; the message says what to do."""


class WheelError(OeprovError):
    """The runtime's wheel for a kind of host cannot be had; the message says why and where the log is."""


def did_you_mean(found: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean NAME?`` for the known name that is nearest; empty when none is near."""
    close = difflib.get_close_matches(found, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def why_not_one(
    what: str, name: str, meant: Sequence[str], known: Sequence[str], place: Path, words: Iterable[str] = ()
) -> str:
    """Why a name means several of the ``known`` ids of a place, or none; ``words``: all that it might be."""

    def listed(ids: Sequence[str]) -> str:
        more = len(ids) - _MOST_NAMED
        return ", ".join(ids[-_MOST_NAMED:]) + (f" and {more} older" if more > 0 else "")

    if meant:
        return f"{name} is {len(meant)} {what}s: {listed(meant)}; give more letters of its id"
    hint = did_you_mean(name, words or known)
    return f"no {what} {name} in {place}{hint} (last {what}s: {listed(known)})"
