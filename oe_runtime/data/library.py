"""The reader for programs of your own: `oe_runtime.data.dataset`, a tf.data.Dataset for `fit`.

from oe_runtime.data import dataset
model.fit(dataset("schema.yml", "day_*.csv", 4096), epochs=2)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.data import row_schema
from oe_runtime.data.batches import Split, holdout_batches, make_split, training_batches
from oe_runtime.data.criteo import CriteoFiles
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import BrokenRows
from oe_runtime.data.schema import Batch
from oe_runtime.errors import DataError

Features = dict[str, NDArray[Any]]


class Rows:
    """Batches of files' rows, in the same order in each pass: from any batch on, for one of several workers.

    `holdout` is the share of the rows that training does not get; `held` gives those rows instead.
    """

    def __init__(
        self,
        schema: Schema | str,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        *,
        rank: int = 0,
        workers: int = 1,
        holdout: float = 0.0,
        held: bool = False,
        max_cardinality: int = 0,
        max_bad_rows: int = 0,
        grouped: bool = False,
    ) -> None:
        """`batch_size` rows are a batch of all `workers`, of which this one gets its part. See `dataset`."""
        if batch_size < workers:
            raise ValueError(
                f"batch_size is {batch_size}, expected at least a row for each of {workers} workers"
            )
        if not 0 <= rank < workers:
            raise ValueError(f"rank is {rank}, expected 0 up to {workers - 1}")
        if held and not holdout:
            raise ValueError("held=True gives the rows of holdout, which is 0")
        self.schema = (row_schema.load(schema) if isinstance(schema, str) else schema).limited(
            max_cardinality
        )
        names = [os.fspath(paths)] if isinstance(paths, (str, os.PathLike)) else [os.fspath(p) for p in paths]
        if not names:
            raise DataError("there is nothing to read: paths is empty")
        self._source = CriteoFiles(names, broken=BrokenRows(max_bad_rows), schema=self.schema)
        self._source.check()
        self._split = make_split(self._source, holdout) if not held else Split(holdout)
        self._size, self._rank, self._workers = batch_size, rank, workers
        self._held, self._grouped = held, grouped

    def batches(self, start: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield (features, labels) or (features, labels, weights) from batch `start` of a pass on."""
        if self._held:
            found = holdout_batches(self._source, self._split, self._size)
            for _ in range(start):
                next(found, None)
        else:
            found = training_batches(self._source, self._split, self._size, start)
        for batch in found:
            # A last batch may be too small for each worker to have a row of it; fit could not compute it.
            if batch.rows >= self._workers:
                yield self._made(batch.part(self._rank, self._workers))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self.batches()

    def _made(self, batch: Batch) -> tuple[Any, ...]:
        labels = batch.labels[:, None]
        features = self._features(batch)
        return (features, labels) if batch.weights is None else (features, labels, batch.weights)

    def _features(self, batch: Batch) -> Features:
        if self._grouped:
            return {"numbers": batch.dense, "ids": np.ascontiguousarray(batch.ids)}
        found: Features = {
            one.name: batch.dense[:, at : at + 1] for at, one in enumerate(self.schema.numbers)
        }
        at = 0
        for category in self.schema.categories:
            found[category.name] = batch.ids[:, at : at + category.length]
            at += category.length
        return found

    def signature(self, tf: Any) -> tuple[Any, ...]:
        """Return the tf.TensorSpec of a batch's arrays."""
        float32, int64 = tf.float32, tf.int64
        if self._grouped:
            widths = [("numbers", len(self.schema.numbers), float32), ("ids", self.schema.ids, int64)]
        else:
            widths = [(one.name, 1, float32) for one in self.schema.numbers]
            widths += [(one.name, one.length, int64) for one in self.schema.categories]
        features = {name: tf.TensorSpec((None, width), kind) for name, width, kind in widths}
        labels = tf.TensorSpec((None, 1), float32)
        weights = (tf.TensorSpec((None,), float32),) if self.schema.weight else ()
        return (features, labels, *weights)


def dataset(
    schema: Schema | str,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    batch_size: int,
    *,
    start: int = 0,
    **options: Any,
) -> Any:
    """Return a tf.data.Dataset of (features, labels[, weights]) for `fit`; each iteration is one pass.

    `schema` is a Schema, a name (criteo, deeprec, avazu) or a YAML file; `paths` a file, directory or glob,
    or a list of them. Features are a dict by column: numbers (B, 1), ids of categories (B, length), 0 where
    missing. With ``grouped=True`` they are {"numbers": (B, n), "ids": (B, n)}, which is faster for many
    columns. Each of `workers` gets the part of its `rank` of every batch; a last batch with fewer rows than
    workers is left out. Each iteration begins after
    `start` batches, which are passed over without parsing: to resume, concatenate the rest of a pass with
    whole ones. In a job, leave it out: JobCallback begins at the right batch. `holdout`, `held`,
    `max_cardinality`, `max_bad_rows`: see `Rows`, which gives NumPy arrays.

    Raises DataError for files that do not fit; in the middle of them, `fit` ends with its text.
    """
    rows = Rows(schema, paths, batch_size, **options)
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(lambda: rows.batches(start), output_signature=rows.signature(tf))
    data = data.prefetch(2)
    # For oe_runtime.job: a pass without its first batches, and without tf.data, whose generators take as long
    # as the reading.
    data.batches_after = lambda batches: _tensors(rows.batches(start + batches), tf)
    return data


def _tensors(batches: Iterator[tuple[Any, ...]], tf: Any) -> Iterator[Any]:
    for batch in batches:
        yield tf.nest.map_structure(tf.convert_to_tensor, batch)
