"""A JSON Schema of the inventory for editors; ``inventory/schema.json`` is its output."""

from __future__ import annotations

from typing import Any

from provision.cluster import settings

# A value may always be an Ansible template instead.
_TEMPLATE = {"type": "string", "pattern": r"\{\{.*\}\}"}
_PREFIXES = "^(" + "|".join(prefix.rstrip("_") for prefix in settings.PREFIXES) + ")_"


def inventory_schema() -> dict[str, Any]:
    """JSON Schema (draft 7) of a YAML inventory with oeprov's variables."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "oeprov inventory",
        "description": "An Ansible YAML inventory; variables of oeprov begin with "
        + ", ".join(settings.PREFIXES),
        "type": "object",
        "additionalProperties": {"$ref": "#/definitions/group"},
        "definitions": {
            "variables": {
                "type": ["object", "null"],
                "properties": _variables(),
                "propertyNames": {"anyOf": [{"enum": list(settings.KNOWN)}, {"not": {"pattern": _PREFIXES}}]},
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


def _variables() -> dict[str, Any]:
    found = {}
    for model in settings.MODELS:
        document = model.model_json_schema()
        for name, value in document["properties"].items():
            described = {key: item for key, item in value.items() if key not in ("title", "description")}
            reference = described.pop("$ref", "")
            if reference:
                target = document["$defs"][reference.rsplit("/", 1)[-1]]
                described["enum"] = target["enum"]
            default = {"default": described.pop("default")} if "default" in described else {}
            found[model.prefix + name] = {
                "description": value["description"],
                **default,
                "anyOf": [described, _TEMPLATE],
            }
    return found
