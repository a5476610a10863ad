"""The errors that are meant for the person at the terminal: one line, what was found, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


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
    def of(cls, problems: list[str]) -> InventoryError:
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


_EXPECTED = {  # type of pydantic's error → what is allowed
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "text that matches {pattern}",
    "list_type": "a list",
    "dict_type": "`key: value` lines",
    "too_short": "at least {min_length} item(s)",
}
_CHOICES = re.compile(r"(?:.* )?is not one of (.*?)\.?")  # of Typer


def did_you_mean(found: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``; did you mean NAME?`` for the known name that is nearest; empty when none is near."""
    close = difflib.get_close_matches(found, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def explain_wrong_value(item: Mapping[str, Any]) -> str:
    """One pydantic error in our words: what was found, what is allowed, what was probably meant.

    Inventory variables, flags and files share it; the caller puts the variable, flag or key in front.
    """
    kind, context, message = item["type"], item.get("ctx") or {}, str(item["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "json_invalid":
        return f"is not JSON: {context['error']}"
    found = item.get("input")
    message = message.removeprefix("Value error, ")
    chosen = _CHOICES.fullmatch(message)
    if chosen or kind in ("enum", "literal_error"):
        choices = chosen[1] if chosen else context["expected"].replace(" or ", ", ")
        allowed = [word.strip().strip("'") for word in choices.split(",")]
        return f"found {found!r}; allowed: {', '.join(allowed)}{did_you_mean(str(found), allowed)}"
    if kind in _EXPECTED:
        numbers = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
        return f"found {found!r}; expected {_EXPECTED[kind].format_map(numbers)}"
    message = message.removeprefix("Input ")
    return f"found {found!r}; {message[:1].lower()}{message[1:]}"
