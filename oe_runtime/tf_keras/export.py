"""SavedModels of a model of tf-keras with the rows of its tables inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras

from oe_runtime.keras.embedding import Table
from oe_runtime.keras.export import fill, publish, search, sorted_rows
from oe_runtime.tf_keras.clone import clone
from oe_runtime.tf_keras.embedding import Embedding


def save_as_original_model(model: Any, tables: Mapping[str, Table], path: Path, *, overwrite: bool) -> Path:
    """Writes `model` with the rows of its `tables` as a SavedModel; see `WithTables`'s method."""
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"{type(model).__name__} has no graph: a model to export must be functional or Sequential"
        )

    def write(place: Path) -> None:
        original_model(model, tables).save(place, save_format="tf", include_optimizer=False)

    return publish(path, write, overwrite)


def original_model(model: Any, tables: Mapping[str, Table]) -> Any:
    """A plain model of tf-keras equal to `model`, with the rows in its layers."""
    by_layer = {id(layer): tables[name] for name, layer in model._table_layers.items()}
    filled: list[tuple[Any, Table]] = []

    def replace(layer: Any) -> Any:
        if not isinstance(layer, Embedding):
            return None
        table = by_layer[id(layer)]
        shared = {"name": layer.name, "dtype": layer.dtype_policy.name, "mask_zero": layer.mask_zero}
        if table.spec.index == "array":
            new = tf_keras.layers.Embedding(layer.input_dim, layer.output_dim, "zeros", **shared)
            filled.append((new, table))
            return new
        return _SortedRows(table, **shared)

    inputs, outputs = clone(model, replace)
    for layer, table in filled:
        fill(layer.embeddings, table)
    return tf_keras.Model(inputs, outputs, name=model.name)


class _SortedRows(tf_keras.layers.Layer):  # type: ignore[misc]
    """The rows of a table for any 64-bit id in TensorFlow only: a binary search among the sorted keys."""

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
        """ids → rows, the default for unknown ids."""
        return tf.cast(search(inputs, self.keys, self.rows, self._default), self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """False where the id is 0, if wanted."""
        return tf.not_equal(inputs, 0) if self.mask_zero else None

    def get_config(self) -> dict[str, Any]:
        """What tf-keras notes about the layer; the rows are its variables."""
        return {**super().get_config(), "mask_zero": self.mask_zero}
