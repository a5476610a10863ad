"""Types of inventory variables (sizes, shares, texts, ports, switches), their base and their errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from provision.cluster.errors import did_you_mean

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB)?", re.ASCII)
_SHARE = re.compile(r"^([1-9]\d?|100)%$", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE_HELP = "a size such as 512M, 64G or 1.5T (powers of 1024), or a number of bytes"


def parse_size(value: Any) -> int:
    """Bytes of ``64G``, ``1.5TiB``, ``1048576``; ValueError for anything else (``64GB`` is ambiguous)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected {SIZE_HELP}")
    return int(float(match[1]) * _UNITS[match[2]])


def _share(value: Any) -> Any:
    """A number of hosts or a percentage of them, as Ansible's ``serial`` takes them."""
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not number and not (isinstance(value, str) and _SHARE.fullmatch(value)):
        raise ValueError("expected a number of hosts from 1 on, or a percentage from '1%' to '100%'")
    return value


def _text(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # The value is not repeated as the text to write: 5.10 is read as 5.1.
        raise ValueError("YAML reads it as a number: put it in quotes, just as you wrote it")
    return value


def _switch(value: Any) -> Any:
    """YAML reads ``on`` and ``off`` without quotes as true and false."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str)]
Share = Annotated[
    int | str,
    BeforeValidator(
        _share,
        json_schema_input_type=Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=_SHARE.pattern)],
    ),
]
Text = Annotated[str, BeforeValidator(_text)]
Port = Annotated[int, Field(ge=0, le=65535)]
_Switch = Literal["auto", "on", "off"]
Switch = Annotated[_Switch, BeforeValidator(_switch, json_schema_input_type=_Switch | bool)]


@dataclass(frozen=True)
class Flag:
    """Marks a setting that is a flag of ``launch-training`` too."""

    name: str = ""  # default: the field's
    allowed: tuple[str, ...] = ()  # default: the field's


@dataclass(frozen=True)
class ProcessFlag:
    """Marks a setting that its process gets as the flag of the same name, wherever it runs, unless unset."""


@dataclass(frozen=True)
class Scope:
    """Marks a setting of the training that is of built-in models, and not of every run."""

    of: Literal["model", "rows"]


_BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
_EXPECTED = {
    "bool": "true or false",
    "dict": "`key: value` lines",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "string": "text",
}  # by how pydantic's types of errors begin


def explain(item: Mapping[str, Any]) -> str:
    """One of pydantic's errors in our words: what was found, what is allowed, what was probably meant."""
    found, context, kind = item.get("input"), item.get("ctx") or {}, str(item["type"])
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "json_invalid":
        return f"is not JSON: {context['error']}"
    if kind == "string_too_long":
        return f"found a text of {len(str(found))} letters; allowed: at most {context['max_length']}"
    text = f"found {found!r}"
    if kind in ("enum", "literal_error"):
        allowed = [word.strip().strip("'") for word in context["expected"].replace(" or ", ", ").split(",")]
        return f"{text}; allowed: {', '.join(allowed)}{did_you_mean(str(found), allowed)}"
    if kind == "string_pattern_mismatch":
        return f"{text}; it must match {context['pattern']}"
    if kind == "too_short":
        return f"{text}; allowed: at least {context['min_length']} item(s)"
    for name, words in _BOUNDS.items():
        if name in context:
            bound = context[name]
            size = bound if isinstance(bound, int) else 0
            shown = f"{size >> 20}M" if size and size % (1 << 20) == 0 else f"{bound:.15g}"
            return f"{text}; allowed: {words.format(shown)}"
    if expected := _EXPECTED.get(kind.split("_")[0]):
        return f"{text}; expected {expected}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{text}; {message.replace(f'{found!r} is not one of', 'allowed:')}"


class Settings(BaseModel):
    """Variables with one prefix; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    prefix: ClassVar[str] = ""

    @classmethod
    def variables(cls) -> list[str]:
        """Names of the inventory variables that this model reads."""
        return [cls.prefix + name for name in cls.model_fields]

    @classmethod
    def flags(cls) -> dict[str, tuple[str, Flag]]:
        """Name of a flag, as Python has it → the field and what its mark says."""
        marks = [
            (name, mark)
            for name, field in cls.model_fields.items()
            for mark in field.metadata
            if isinstance(mark, Flag)
        ]
        return {mark.name or name: (name, mark) for name, mark in marks}

    @classmethod
    def marked(cls, mark: Scope | ProcessFlag) -> tuple[str, ...]:
        """The fields that are marked so."""
        return tuple(name for name, field in cls.model_fields.items() if mark in field.metadata)

    def process_options(self) -> dict[str, Any]:
        """Those of them that are set, and their values."""
        values = {name: getattr(self, name) for name in self.marked(ProcessFlag())}
        return {name: value for name, value in values.items() if value is not None}

    def flat(self) -> dict[str, Any]:
        """Variable name → value, JSON types only; what Ansible gets as variables."""
        return {self.prefix + name: value for name, value in self.model_dump(mode="json").items()}
