"""What a click model is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from oe_runtime.data import row_schema
from oe_runtime.data.row_schema import CRITEO, Schema


@dataclass(frozen=True)
class ModelOptions:
    """The columns, the layers, the tables' rules and the optimizer of a click model.

    The names are those of the trainer's flags, which say the meaning of each, and of a run's config.json.
    """

    schema: Schema
    model: str
    dim: int
    hidden: tuple[int, ...]
    cin: tuple[int, ...]
    bottom: tuple[int, ...]
    interaction: str
    precision: str
    row_precision: str
    state_precision: str
    exchange_precision: str
    index: str
    admission: dict[str, Any] | None
    eviction: list[dict[str, Any]]
    optimizer: str
    learning_rate: float
    seed: int
    max_cardinality: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> ModelOptions:
        """Return them from the content of a run's config.json, which is at `where`.

        Raises DataError for its schema, and KeyError for what is missing.
        """
        # Of runs of earlier versions.
        config = {"state_precision": "float32", "exchange_precision": "float32", **config}
        values = {one.name: config[one.name] for one in fields(cls) if one.name != "schema"}
        schema = CRITEO  # of theirs
        if "schema" in config:
            schema = row_schema.parse(config["schema"], f"{where}: schema")
        return cls(schema, **values)
