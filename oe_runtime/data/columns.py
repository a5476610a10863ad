"""Rows from the Arrow columns of Parquet and TFRecord files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oe_runtime.data.rows import Piece, category_ids
from oe_runtime.data.schema import CATEGORIES, INTEGERS, Batch, normalise


def convert_columns(columns: Sequence[pa.Array], cardinalities: Sequence[int], read: int) -> Piece:
    """Return columns in Criteo's order as a piece; integer categories are hashed as decimal text."""
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


def _whole(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the values as integers (0 where missing), which are missing, and which are no integers.

    Whole floats are accepted, as pandas stores columns with missing values, with NaN for missing.
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
    """Return offsets and bytes; empty where a value is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        column = column.cast(pa.int64()).cast(pa.string())
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(b"").cast(column.type))
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offset_buffer, data_buffer = column.buffers()
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    part = slice(column.offset, column.offset + len(column) + 1)
    if large:
        return np.frombuffer(offset_buffer, np.int64)[part], data
    return np.frombuffer(offset_buffer, np.int32)[part], data


def _shown(column: pa.Array, row: int) -> str:
    value = column[row].as_py()
    return "" if value is None else str(value)[:20]
