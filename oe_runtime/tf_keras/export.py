"""SavedModels of a tf-keras model that include the rows of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras

from oe_runtime.keras.export import publish, search, sorted_rows, with_rows_inside
from oe_runtime.keras.served import Table


def save_as_original_model(model: Any, tables: Mapping[str, Table], path: Path, *, overwrite: bool) -> Path:
    """Write `model` with the rows of its `tables` as a SavedModel; see the method of `WithTables`."""
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{type(model).__name__} has no graph: a model to export must be functional or Sequential"
        )

    def write(place: Path) -> None:
        original = with_rows_inside(model, tables, _SortedRows)
        original.save(place, save_format="tf", include_optimizer=False)

    return publish(path, write, overwrite)


class _SortedRows(tf_keras.layers.Layer):  # type: ignore[misc]
    """The rows of a table of any id in pure TensorFlow: a binary search among the sorted keys."""

    def __init__(self, table: Table, *, mask_zero: bool, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        keys, rows, self._default = sorted_rows(table)
        self.keys = self._constant("keys", keys)
        self.rows = self._constant("rows", rows)

    def _constant(self, name: str, values: Any) -> Any:
        variable = self.add_weight(
            name, values.shape, values.dtype.name, "zeros", trainable=False, experimental_autocast=False
        )
        variable.assign(values)
        return variable

    def call(self, inputs: Any) -> Any:
        return tf.cast(search(inputs, self.keys, self.rows, self._default), self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return tf.not_equal(inputs, 0) if self.mask_zero else None

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mask_zero": self.mask_zero}
