"""A JSON Schema of the inventory for editors; ``inventory/schema.json`` is its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from provision.cluster import settings
from provision.cluster.setting_types import Settings
from provision.cluster.training_settings import TrainingSettings, trainer_defaults

# A value may always be an Ansible template instead.
_TEMPLATE = {"type": "string", "pattern": r"\{\{.*\}\}"}


def inventory_schema(models: Sequence[type[Settings]] = settings.MODELS) -> dict[str, Any]:
    """JSON Schema (draft 7) of a YAML inventory with oeprov's variables."""
    known = {model.prefix + name: item for model in models for name, item in shown(model).items()}
    prefixes = "^(" + "|".join(model.prefix.rstrip("_") for model in models) + ")_"
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "oeprov inventory",
        "description": "An Ansible YAML inventory; variables of oeprov begin with "
        + ", ".join(model.prefix for model in models),
        "type": "object",
        "additionalProperties": {"$ref": "#/definitions/group"},
        "definitions": {
            "variables": {
                "type": ["object", "null"],
                "properties": {name: _or_template(item) for name, item in known.items()},
                "propertyNames": {"anyOf": [{"enum": list(known)}, {"not": {"pattern": prefixes}}]},
            },
            "group": {
                "type": ["object", "null"],
                "additionalProperties": False,
                "properties": {
                    "vars": {"$ref": "#/definitions/variables"},
                    "hosts": {
                        "type": ["object", "null"],
                        "additionalProperties": {"$ref": "#/definitions/variables"},
                    },
                    "children": {
                        "type": ["object", "null"],
                        "additionalProperties": {"$ref": "#/definitions/group"},
                    },
                },
            },
        },
    }


def _or_template(item: dict[str, Any]) -> dict[str, Any]:
    said = ("description", "default")
    kinds = [{key: value for key, value in item.items() if key not in said}, _TEMPLATE]
    return {**{key: item[key] for key in said if key in item}, "anyOf": kinds}


def shown(model: type[Settings]) -> dict[str, dict[str, Any]]:
    """``described``, with the trainer's default where it decides."""
    defaults = trainer_defaults() if issubclass(model, TrainingSettings) else {}
    return {
        name: {"default": defaults[name], **item} if name in defaults else item
        for name, item in described(model).items()
    }


def described(
    model: type[Settings], mode: Literal["validation", "serialization"] = "validation"
) -> dict[str, dict[str, Any]]:
    """The JSON Schema of each field, with its description."""
    document = model.model_json_schema(mode=mode)
    found = {}
    for name, value in document["properties"].items():
        item = {key: part for key, part in value.items() if key != "title"}
        choices = [part for part in item.get("anyOf", ()) if part != {"type": "null"}]
        if len(choices) == 1:  # may be unset
            item = {**choices[0], **{key: part for key, part in item.items() if key != "anyOf"}}
        if reference := item.pop("$ref", ""):
            item["enum"] = document["$defs"][reference.rsplit("/", 1)[-1]]["enum"]
        if item.get("default", "") is None:
            del item["default"]
        found[name] = item
    return found
