"""Parquet files of rows, by pyarrow: the columns label, I1 … I13 and C1 … C26, in any order among others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oe_runtime.data.errors import DataError
from oe_runtime.data.rows import Piece, category_ids
from oe_runtime.data.schema import CATEGORIES, COLUMNS, INTEGERS, Batch, column_places, normalise

_BATCH_ROWS = 8192


class ParquetRows:
    """An open Parquet file. Categories that are integers are hashed as their decimal text."""

    unit = "row"
    first = 1

    def __init__(self, path: Path, cardinalities: Sequence[int]) -> None:
        self._path = path
        self._cardinalities = cardinalities
        try:
            self._file = pq.ParquetFile(str(path))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        schema = self._file.schema_arrow
        self._columns = [schema.names[place] for place in column_places(str(path), schema.names)]
        try:
            for name, column in zip(COLUMNS, self._columns, strict=True):
                _check_type(path, name, schema.field(column).type)
        except BaseException:
            self.close()
            raise
        self._size = path.stat().st_size
        self._total = self._file.metadata.num_rows
        self._group = 0  # the row group that is read next
        self._passed = 0  # rows of it that were passed over

    def skip(self, count: int) -> int:
        """Pass over `count` rows: row groups by their numbers of rows, which the file's end has."""
        groups = self._file.metadata
        left = count
        while self._group < groups.num_row_groups and left >= groups.row_group(self._group).num_rows:
            left -= groups.row_group(self._group).num_rows
            self._group += 1
        if self._group == groups.num_row_groups:
            return count - left
        self._passed = left
        return count

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Batches of a few thousand rows."""
        groups = range(self._group, self._file.metadata.num_row_groups)
        before = sum(self._file.metadata.row_group(g).num_rows for g in range(self._group))
        passed = self._passed
        try:
            for table in self._file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=self._columns):
                before += table.num_rows
                rest = table.slice(min(passed, table.num_rows))
                passed -= table.num_rows - rest.num_rows
                if rest.num_rows:
                    read = self._size * before // self._total
                    yield functools.partial(self._convert, rest, read)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _convert(self, table: pa.RecordBatch, read: int) -> Piece:
        columns = [table.column(name) for name in self._columns]
        return convert_columns(columns, self._cardinalities, read)


def convert_columns(columns: Sequence[pa.Array], cardinalities: Sequence[int], read: int) -> Piece:
    """Arrow columns in Criteo's order as a piece: numbers for label and integers, numbers or text for categories."""
    rows = len(columns[0])
    problems: dict[int, str] = {}
    labels, missing, odd = _whole(columns[0])
    for row in np.flatnonzero(missing | odd | (labels < 0) | (labels > 1)).tolist():
        problems[row] = f"the label is '{_shown(columns[0], row)}', expected 0 or 1"
    integers = np.empty((rows, len(INTEGERS)), np.int64)
    for i, name in enumerate(INTEGERS):
        integers[:, i], _, odd = _whole(columns[1 + i])
        for row in np.flatnonzero(odd).tolist():
            shown = _shown(columns[1 + i], row)
            problems.setdefault(row, f"{name} is '{shown}', expected an integer or nothing")
    ids = np.empty((rows, len(CATEGORIES)), np.int64, order="F")
    for i, cardinality in enumerate(cardinalities):
        ids[:, i] = category_ids(*_texts(columns[1 + len(INTEGERS) + i]), cardinality)
    batch = Batch(normalise(integers), ids, labels.astype(np.float32))
    if problems:
        good = np.ones(rows, np.bool_)
        good[list(problems)] = False
        batch = batch.take(good)
    return Piece(batch, sorted(problems.items()), read)


def _check_type(path: Path, name: str, kind: pa.DataType) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    number = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if name in CATEGORIES:
        texts = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
        good, expected = number or any(is_text(kind) for is_text in texts), "text, bytes or integers"
    else:
        good, expected = number or pa.types.is_floating(kind), "integers"
    if not good:
        raise DataError(f"{path}: column {name} has the type {kind}, expected {expected}")


def _whole(
    column: pa.Array,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The values as integers, 0 where there is none; which are missing; which are no integers.

    Floats are taken where they are whole, as pandas has them in columns that miss some, with NaN for missing.
    """
    missing = np.zeros(len(column), np.bool_)
    if column.null_count:
        missing = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        floats = column.to_numpy(zero_copy_only=False).astype(np.float64)
        missing = missing | np.isnan(floats)
        floats[missing] = 0
        odd = (np.abs(floats) >= 2.0**63) | (floats != np.trunc(floats))
        floats[odd] = 0
        return floats.astype(np.int64), missing, odd
    if pa.types.is_unsigned_integer(column.type):
        column = column.cast(pa.uint64())
        values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
        return values.astype(np.int64), missing, values >= np.uint64(2**63)
    column = column.cast(pa.int64())
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    return values, missing, np.zeros(len(column), np.bool_)


def _texts(column: pa.Array) -> tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets and bytes; empty where a value is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        column = column.cast(pa.int64()).cast(pa.string())
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(b"").cast(column.type))
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if large else np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    return offsets, data


def _shown(column: pa.Array, row: int) -> str:
    value = column[row].as_py()
    return "" if value is None else str(value)[:20]
