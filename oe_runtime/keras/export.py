"""A SavedModel with the embeddings inside, from a model whose rows are on parameter servers."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from oe_runtime.keras.clone import clone
from oe_runtime.keras.embedding import Embedding, Table
from oe_runtime.keras.translate import expected_row_value

# Rows are read in pieces of about this many bytes.
_PIECE = 64 << 20


def save_as_original_model(model: Any, tables: Mapping[str, Table], path: Path, *, overwrite: bool) -> Path:
    """Writes `model` with the rows of its `tables` as a SavedModel; see `Distributed`'s method."""
    replaces = overwrite and (path / "saved_model.pb").is_file()
    if os.path.lexists(path) and not replaces:
        raise FileExistsError(f"{path} exists already; choose another path or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that one rename publishes it.
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        original_model(model, tables).export(temporary / "model", verbose=False)
        if replaces:
            os.rename(path, temporary / "old")
        if os.path.lexists(path):
            raise FileExistsError(f"{path} was made by someone else in the meantime")
        os.rename(temporary / "model", path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def original_model(model: Any, tables: Mapping[str, Table]) -> Any:
    """A plain Keras model equal to `model`, with the rows in its layers."""
    by_layer = {id(layer): tables[name] for name, layer in model._table_layers.items()}
    filled: list[tuple[Any, Table]] = []

    def replace(layer: Any) -> Any:
        if not isinstance(layer, Embedding):
            return None
        table = by_layer[id(layer)]
        shared = {"name": layer.name, "dtype": layer.dtype_policy, "mask_zero": layer.mask_zero}
        if table.spec.index == "array":
            new = keras.layers.Embedding(layer.input_dim, layer.output_dim, "zeros", **shared)
            filled.append((new, table))
            return new
        return _SortedRows(table, **shared)

    inputs, outputs = clone(model, replace)
    for layer, table in filled:
        _fill(layer, table)
    return keras.Model(inputs, outputs, name=model.name)


def _fill(layer: Any, table: Table) -> None:
    rows = layer.embeddings.value
    step = max(1, _PIECE // (4 * table.spec.dim))
    for begin in range(0, table.spec.input_dim, step):
        keys = np.arange(begin, min(begin + step, table.spec.input_dim), dtype=np.int64)
        rows[begin : begin + len(keys)].assign(tf.cast(table.rows(keys), rows.dtype))


class _SortedRows(keras.layers.Layer):  # type: ignore[misc]
    """The rows of a table for any 64-bit id in TensorFlow only: a binary search among the sorted keys."""

    def __init__(self, table: Table, *, mask_zero: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.autocast = False
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        admission = table.spec.admission
        self._default = (
            expected_row_value(table.spec.initializer)
            if admission is None
            else float(admission.get("default_value", 0.0))
        )
        self._dim = table.spec.dim
        keys, rows = table.client.export_rows(table.number)
        keys = np.asarray(keys).view(np.int64)
        order = np.argsort(keys)
        keys, rows = keys[order], np.asarray(rows)[order]
        if not len(keys):  # a search needs something to search in
            keys, rows = np.zeros(1, np.int64), np.full((1, self._dim), self._default, rows.dtype)
        self.keys = self.add_weight(
            shape=keys.shape, dtype="int64", initializer="zeros", trainable=False, name="keys"
        )
        self.rows = self.add_weight(
            shape=rows.shape,
            dtype=rows.dtype.name,
            initializer="zeros",
            trainable=False,
            autocast=False,
            name="rows",
        )
        self.keys.assign(keys)
        self.rows.assign(rows)
        self.built = True

    def build(self, input_shape: Any = None) -> None:
        """Everything is built already."""

    def call(self, inputs: Any) -> Any:
        """ids → rows, the default for unknown ids."""
        ids = tf.convert_to_tensor(inputs)
        ids = tf.bitcast(ids, tf.int64) if ids.dtype == tf.uint64 else tf.cast(ids, tf.int64)
        keys = self.keys.value
        flat = tf.reshape(ids, [-1])
        places = tf.minimum(tf.searchsorted(keys, flat), tf.size(keys) - 1)
        known = tf.equal(tf.gather(keys, places), flat)
        rows = tf.where(known[:, None], tf.gather(self.rows.value, places), self._default)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self._dim]], 0))
        rows.set_shape((*ids.shape, self._dim))
        return tf.cast(rows, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """False where the id is 0, if wanted."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The ids' shape + (dim,)."""
        return (*input_shape, self._dim)
