"""SavedModels of a tf-keras model that include the rows of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oe_runtime.keras.export import publish, with_rows_inside
from oe_runtime.keras.served import Table


def save_as_original_model(
    model: Any, tables: Mapping[str, Table], path: Path, *, overwrite: bool, rows: str | None = None
) -> Path:
    """Write `model` with the rows of its `tables` as a SavedModel; see the method of `WithTables`."""
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{type(model).__name__} has no graph: a model to export must be functional or Sequential"
        )

    def write(place: Path) -> None:
        original = with_rows_inside(model, tables, rows)
        original.save(place, save_format="tf", include_optimizer=False)

    return publish(path, write, overwrite)
