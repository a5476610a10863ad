"""Flags of the trainer that are settings of an inventory too (``training_*``).

``setting_flags.json`` says their types, bounds and meaning; ``make generate`` writes it from the settings.
The trainer says what it decides, above all the default, where it adds the flag.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, field
from pathlib import Path
from typing import Any

from oe_runtime.support.argument_types import count, number

_SETTINGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def flag_field(group: str, default: Any = None, **own: Any) -> Any:
    """Return a field of a dataclass that is a flag too: of a setting, as in `add`, or with its own `help`."""
    own = own if default is None else own | {"default": default}
    return field(metadata={"group": group, "own": own})


def add_flags(groups: Mapping[str, argparse._ActionsContainer], options: Iterable[Field[Any]]) -> None:
    """Add the flag of each field, once."""
    for one in {option.name: option for option in options if option.metadata}.values():
        group, own = groups[one.metadata["group"]], one.metadata["own"]
        if "help" in own:
            group.add_argument("--" + one.name.replace("_", "-"), **own)
        else:
            add(group, one.name, **own)


def add(
    group: argparse._ActionsContainer, name: str, default: Any = None, *, more: str = "", **own: Any
) -> None:
    """Add the flag of a setting; ``more`` is said after its description, ``own`` goes to ``add_argument``."""
    setting = _SETTINGS[name]
    kind = setting["type"]
    said: dict[str, Any] = {"default": setting.get("default", default)}
    if "enum" in setting:
        said["choices"] = setting["enum"]
    elif kind == "integer":
        said |= {"type": count(setting["minimum"]), "metavar": "N"}
    elif kind == "number":
        bounds = setting.get("minimum"), setting.get("maximum")
        said["type"] = number(*bounds, above=setting.get("exclusiveMinimum"))
    elif kind == "boolean":
        said["action"] = argparse.BooleanOptionalAction
    said |= own
    action = group.add_argument("--" + name.replace("_", "-"), **said)
    action.help = " ".join(part for part in (setting["description"], more, _default(said["default"])) if part)


def scoped(scope: str) -> tuple[str, ...]:
    """Return the settings of a scope: "model", which scripts decide, or "rows", which job.batches uses."""
    return tuple(name for name, setting in _SETTINGS.items() if setting.get("scope") == scope)


def _default(value: Any) -> str:
    if isinstance(value, bool):
        value = "on" if value else "off"
    elif isinstance(value, (tuple, list)):
        value = ",".join(map(str, value))
    return "" if value in (None, "") else f"(default {value})"
