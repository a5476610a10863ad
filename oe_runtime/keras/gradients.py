"""The gradients of a batch's rows between the tape and the push: regularizers and clipping.

Both concern rows, each once, while the tape has one gradient per id of a lookup. Without them the client sums
those, faster; with them the compiled step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from oe_runtime.keras.translate import clip_tables, clips


@dataclass(frozen=True)
class RowGroup:
    """The rows of all trained tables of one dim in a batch, as tensors of a step's function.

    Rows of several tables are in no order.
    """

    rows: Any  # (rows, dim), each once
    inverse: Any  # (ids,): the row of each id of all lookups, one lookup after the other
    sizes: Any  # (lookups,): ids of each
    layers: Sequence[Any]  # the layer of each lookup
    lookups: Sequence[Any]  # the gathered rows of each lookup, (ids, dim)
    together: Any  # the same side by side, (examples, lookups, dim); None where they differ in length

    def join_lookups(self, of_lookups: Sequence[Any], of_together: Any) -> Any:
        """Join the gradients of `lookups` and `together` into one of all ids; None without either.

        Its shape is (ids, dim), or (examples, lookups, dim).
        """
        if all(g is None for g in of_lookups):
            return of_together
        parts = [tf.zeros_like(r) if g is None else g for r, g in zip(self.lookups, of_lookups, strict=True)]
        return tf.concat(parts, 0) if of_together is None else tf.stack(parts, 1) + of_together

    def tables(self) -> list[Any]:
        """Return the layers, each once: one per table."""
        return list(dict.fromkeys(self.layers))

    def sum(self, gradients: Any) -> Any:
        """Sum gradients per id (`of_ids`) to one per row."""
        if gradients.shape.rank == 3:
            gradients = tf.reshape(tf.transpose(gradients, [1, 0, 2]), [-1, gradients.shape[2]])
        return tf.math.unsorted_segment_sum(gradients, self.inverse, tf.shape(self.rows)[0])

    def split(self, values: Any) -> list[Any]:
        """Split (rows, …) into the parts of each of `tables`."""
        tables = self.tables()
        return [values] if len(tables) == 1 else tf.dynamic_partition(values, self._table_of(), len(tables))

    def join(self, parts: Sequence[Any]) -> Any:
        """Return the inverse of `split`."""
        if len(parts) == 1:
            return parts[0]
        return tf.dynamic_stitch(self.split(tf.range(tf.shape(self.rows)[0])), parts)

    def _table_of(self) -> Any:
        tables = self.tables()
        of_lookup = tf.constant([tables.index(layer) for layer in self.layers], tf.int32)
        of_id = tf.repeat(of_lookup, self.sizes)
        return tf.math.unsorted_segment_max(of_id, self.inverse, tf.shape(self.rows)[0])


def each_row_once(gradient: Any) -> Any:
    """Sum by row the gradient of an embedding in the worker, as several workers sum theirs.

    The tape has it per id, and Keras would square each for Adam and Adagrad.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, inverse = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, inverse, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)


def regularization(groups: Sequence[RowGroup]) -> list[Any]:
    """Return the regularizers' losses of the rows of a batch."""
    return [
        layer.embeddings_regularizer(rows)
        for group in groups
        if any(layer.embeddings_regularizer is not None for layer in group.layers)
        for layer, rows in zip(group.tables(), group.split(group.rows), strict=True)
        if layer.embeddings_regularizer is not None
    ]


def clip(
    optimizer: Any, dense: Sequence[Any], groups: Sequence[RowGroup], sums: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Apply `translate.clip_tables` to the summed gradients of groups of tables."""
    if not clips(optimizer):
        return dense, sums
    parts = [group.split(s) for group, s in zip(groups, sums, strict=True)]
    dense, tables = clip_tables(optimizer, dense, [part for group in parts for part in group])
    clipped = iter(tables)
    joined = [
        group.join([next(clipped) for _ in group_parts])
        for group, group_parts in zip(groups, parts, strict=True)
    ]
    return dense, joined
