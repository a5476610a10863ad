"""The reader for programs of your own: `oe_runtime.data.dataset`, a tf.data.Dataset for `fit`.

from oe_runtime.data import dataset
model.fit(dataset("schema.yml", "day_*.csv", 4096), epochs=2)

A table, such as a pandas DataFrame, may stand for the files; `features` gives its rows for `predict`. Values
have the same ids there as in files.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oe_runtime.data import row_schema
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.batches import Split, holdout_batches, make_split, training_batches
from oe_runtime.data.files import DataFiles, Pass, file_rows
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import BrokenRows, RowFile
from oe_runtime.data.source import Source
from oe_runtime.errors import DataError

Features = dict[str, NDArray[Any]]
_Name = str | os.PathLike[str]
_TABLE = "the table"  # in messages


class TableSource(Source):
    """The rows of a table in memory."""

    name = _TABLE
    indivisible = "is in the memory of this process"

    def __init__(self, table: pa.Table, schema: Schema, broken: BrokenRows) -> None:
        self._table = table
        self._schema = schema
        self._broken = broken

    def check(self, *, tensorflow: bool = True) -> None:
        """See Source."""
        if not self._table.num_rows:
            raise DataError(f"{_TABLE} is empty: it has no row of {self._schema.shown}")
        self._rows()

    def total_rows(self) -> int:
        """See Source."""
        rows: int = self._table.num_rows
        return rows

    def blocks(self, start_row: int = 0) -> Iterator[Batch]:
        """See Source."""
        self._broken.start()
        pass_ = Pass(start_row)
        for batch in file_rows(Path(_TABLE), self._rows(), pass_, self._broken):
            if batch.rows:
                yield batch
        if self._table.num_rows and not pass_.rows:
            raise DataError(f"{_TABLE} has no row that is not broken")

    def _rows(self) -> RowFile:
        from oe_runtime.data.arrow import TableRows  # here, because files of text do without

        return TableRows(self._table, self._schema, _TABLE)


class Rows:
    """Batches of the rows of files or of a table, in the same order in each pass.

    They begin with any batch, and may be the part of one of several workers.
    `holdout` is the share of the rows that training does not get; `held` gives those rows instead.
    """

    def __init__(
        self,
        schema: Schema | str,
        paths: _Name | Sequence[_Name] | Any,
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
        broken = BrokenRows(max_bad_rows)
        self._source: Source
        if (table := _table(paths)) is not None:
            self._source = TableSource(table, self.schema, broken)
        else:
            names = (
                [os.fspath(paths)] if isinstance(paths, (str, os.PathLike)) else list(map(os.fspath, paths))
            )
            if not names:
                raise DataError("there is nothing to read: paths is empty")
            self._source = DataFiles(names, broken=broken, schema=self.schema)
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
        return by_column(batch, self.schema, grouped=self._grouped)

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


def features(
    schema: Schema | str, table: Any, *, max_cardinality: int = 0, grouped: bool = False
) -> Features:
    """Return the features of all rows of a table, as batches of `Rows` have them: for `predict` and serving.

    `table` is a DataFrame of pandas or Polars, a pyarrow.Table, or a dict of lists by column. It may lack the
    label and the weight, and have other columns. Raises DataError for a row that would be broken.
    """
    known = (row_schema.load(schema) if isinstance(schema, str) else schema).limited(max_cardinality)
    rows = _table(table)
    if rows is None:
        raise TypeError(f"table is a {type(table).__name__}, expected a DataFrame, a pyarrow.Table or a dict")
    places = [at for at, name in enumerate(rows.column_names) if name.lower() != known.label.lower()]
    rows = rows.select(places).append_column(known.label, pa.array(np.ones(rows.num_rows, np.int8)))
    unlabelled = dataclasses.replace(known, positive="", weight="", ignored=None)
    found = list(TableSource(rows, unlabelled, BrokenRows()).blocks())
    if not found:
        raise DataError(f"{_TABLE} has no row")
    return _features(concatenate(found), known, grouped)


def _table(rows: Any) -> pa.Table | None:
    """Return a table in memory as Arrow has it; None for what is none. Raises DataError."""
    try:
        if isinstance(rows, dict):
            return pa.table(rows)
        if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
            return pa.Table.from_pandas(rows, preserve_index=False)  # an index is no column
        if isinstance(rows, pa.Table) or hasattr(rows, "__arrow_c_stream__"):
            return pa.table(rows)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"cannot convert {_TABLE} to Arrow: {' '.join(map(str, error.args))}") from error
    return None


def by_column(batch: Batch, schema: Schema, *, grouped: bool = False) -> tuple[Any, ...]:
    """Return (features, labels) or (features, labels, weights) of a batch, as `Rows` has them."""
    labels, found = batch.labels[:, None], _features(batch, schema, grouped)
    return (found, labels) if batch.weights is None else (found, labels, batch.weights)


def _features(batch: Batch, schema: Schema, grouped: bool) -> Features:
    if grouped:
        return {"numbers": batch.dense, "ids": np.ascontiguousarray(batch.ids)}
    found: Features = {one.name: batch.dense[:, at : at + 1] for at, one in enumerate(schema.numbers)}
    at = 0
    for category in schema.categories:
        found[category.name] = batch.ids[:, at : at + category.length]
        at += category.length
    return found


def dataset(
    schema: Schema | str,
    paths: _Name | Sequence[_Name] | Any,
    batch_size: int,
    *,
    start: int = 0,
    **options: Any,
) -> Any:
    """Return a tf.data.Dataset of (features, labels[, weights]) for `fit`; each iteration is one pass.

    `schema` is a Schema, a name (criteo, deeprec, avazu) or a YAML file; `paths` a file, directory or glob,
    or a list of them; or a table: a DataFrame of pandas or Polars, a pyarrow.Table, a dict of lists. Features
    are a dict by column: numbers (B, 1), ids of categories (B, length), 0 where missing. With
    ``grouped=True`` they are {"numbers": (B, n), "ids": (B, n)}, which is faster for many
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
