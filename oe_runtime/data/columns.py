"""Rows from the Arrow columns of Parquet, Arrow and TFRecord files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oe_runtime.data.row_schema import Category, Number, Schema
from oe_runtime.data.rows import Piece, category_ids, scaled
from oe_runtime.data.schema import Batch, normalise
from oe_runtime.errors import DataError

_TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_Integers = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]


def convert_columns(columns: Sequence[pa.Array], schema: Schema, read: int) -> Piece:
    """Return columns in the schema's order as a piece; integer categories are hashed as decimal text."""
    rows = len(columns[0])
    problems: dict[int, str] = {}
    labels, odd = _labels(columns[0], schema)
    for row in np.flatnonzero(odd).tolist():
        shown = f"the label is '{_shown(columns[0], row)}'"
        problems[row] = f"{shown}, {'which is no value' if schema.positive else 'expected 0 or 1'}"
    dense = np.empty((rows, len(schema.numbers)), np.float32)
    rest = iter(columns[1:])
    for i, number in enumerate(schema.numbers):
        column = _present(_as_floats(next(rest)), schema.missing)
        dense[:, i], odd = _numbers(column, number)
        expected = "an integer" if number.whole else "a number"
        for row in np.flatnonzero(odd).tolist():
            shown = _shown(column, row)
            problems.setdefault(row, f"{number.name} is '{shown}', expected {expected} or nothing")
    ids = np.empty((rows, schema.ids), np.int64, order="F")
    at = 0
    for category in schema.categories:
        given = next(rest)
        if category.several:
            ids[:, at : at + category.length] = _several(given, category, schema.missing)
        else:
            column = _present(given, schema.missing)
            if pa.types.is_floating(column.type):
                column, odd = _whole_texts(column)
                for row in np.flatnonzero(odd).tolist():
                    shown = _shown(given, row)
                    problems.setdefault(row, f"{category.name} is '{shown}', expected a text or an integer")
            ids[:, at] = category_ids(*_texts(column), category.cardinality)
        at += category.length
    weights = None
    if schema.weight:
        column = next(rest)
        with np.errstate(over="ignore"):  # of numbers that are infinite as float32
            weights = _floats(column).astype(np.float32)
        for row in np.flatnonzero(~(np.isfinite(weights) & (weights >= 0))).tolist():
            problems.setdefault(row, f"the weight is '{_shown(column, row)}', expected a number from 0")
    batch = Batch(dense, ids, labels.astype(np.float32), weights)
    if problems:
        good = np.ones(rows, np.bool_)
        good[list(problems)] = False
        batch = batch.take(good)
    return Piece(batch, sorted(problems.items()), read)


def check_types(path: Path, schema: Schema, kinds: Sequence[pa.DataType]) -> None:
    """Raise DataError for a column whose type does not fit; `kinds` are in the schema's order."""
    several = {category.name: category for category in schema.categories if category.several}
    whole = {schema.label, *(number.name for number in schema.numbers if number.whole)}
    texts = {category.name for category in schema.categories}
    if schema.positive:
        texts.add(schema.label)
    for name, given in zip(schema.names, kinds, strict=True):
        kind = given
        if name in several and any(is_list(kind) for is_list in _LISTS):
            kind = kind.value_type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        number = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
        if name in texts:
            good, expected = number or any(is_text(kind) for is_text in _TEXTS), "text, bytes or integers"
            if name in several:
                expected += f", in lists or with '{several[name].separator}' between them"
            elif name != schema.label:  # whole floats, as pandas stores integers beside missing values
                good = good or pa.types.is_floating(kind)
        else:
            good = number or pa.types.is_floating(kind)
            good = good or (name not in whole and pa.types.is_decimal(kind))
            expected = "integers" if name in whole else "numbers"
        if not good:
            raise DataError(f"{path}: column {name} has the type {given}, expected {expected}")


def can_be_read(kind: pa.DataType) -> bool:
    """Return whether some schema reads columns of this type."""
    several = any(is_list(kind) for is_list in _LISTS)
    if several:
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    whole = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    fractions = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return whole or any(is_text(kind) for is_text in _TEXTS) or (fractions and not several)


def _labels(column: pa.Array, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the labels, and which are none."""
    if not schema.positive:
        labels, missing, odd = _whole(column)
        return labels, missing | odd | (labels < 0) | (labels > 1)
    column = _present(column, (*schema.missing, ""))
    texts = column.cast(pa.string() if column.type != pa.large_string() else column.type)
    positive = pc.fill_null(pc.equal(texts, schema.positive), False)
    return positive.to_numpy(zero_copy_only=False).astype(np.int64), column.is_null().to_numpy(
        zero_copy_only=False
    )


def _present(column: pa.Array, missing: Sequence[str]) -> pa.Array:
    """Return a column without the values that count as missing."""
    if not missing:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if any(is_text(column.type) for is_text in _TEXTS):
        words = pa.array([word.encode() for word in missing], pa.binary()).cast(column.type)
    elif pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        words = pa.array(_of_type(column.type, missing), column.type)
    else:
        return column
    return pc.if_else(pc.is_in(column, words), pa.scalar(None, column.type), column)


def _of_type(kind: pa.DataType, words: Sequence[str]) -> list[Any]:
    """Return those words that are numbers of this type."""
    found = []
    for word in words:
        with contextlib.suppress(ValueError, OverflowError, pa.ArrowInvalid):
            number = float(word) if pa.types.is_floating(kind) else int(word)
            found.append(pa.scalar(number, kind).as_py())
    return found


def _numbers(column: pa.Array, number: Number) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return numbers as models take them, and which values are none."""
    if number.whole:
        values, missing, odd = _whole(column)
        if number.scale == "log1p":
            found = normalise(values)
            if number.missing:
                found[missing] = scaled(np.array([number.missing]), number)
            return found, odd
        floats = values.astype(np.float64)
    else:
        floats = _floats(column)
        missing = np.isnan(floats)
        odd = np.isinf(floats)
    floats[missing] = number.missing
    floats[odd] = 0
    found = scaled(floats, number)
    return found, odd | np.isinf(found)


def _floats(column: pa.Array) -> NDArray[np.float64]:
    """Return the values, NaN where missing."""
    found: NDArray[np.float64] = np.array(
        column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )
    return found


def _several(column: pa.Array, category: Category, missing: Sequence[str]) -> NDArray[np.int64]:
    """Return the ids of a column of several values, (B, length)."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        offsets, data = _texts(_present(column, missing))
        texts = pa.Array.from_buffers(
            pa.large_binary(), len(column), [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data)]
        )
        column = pc.split_pattern(texts, category.separator)
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets, data = _texts(_present(column.flatten(), missing))
    there = np.diff(offsets) > 0  # empty values are left out, as in text files
    rows = np.repeat(np.arange(len(column)), counts)[there]
    ids = category_ids(offsets, data, category.cardinality)[there]
    counts = np.bincount(rows, minlength=len(column))
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.minimum(counts, category.length)
    if category.keep == "last":
        nth -= (counts - kept)[rows]
    fits = (nth >= 0) & (nth < category.length)
    rows, nth, ids = rows[fits], nth[fits], ids[fits]
    if category.padding == "before":
        nth += (category.length - kept)[rows]
    found = np.zeros((len(column), category.length), np.int64)
    found[rows, nth] = ids
    return found


def _whole(column: pa.Array) -> _Integers:
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


def _as_floats(column: pa.Array) -> pa.Array:
    """Return decimals as floats, other columns as they are."""
    return column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _whole_texts(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return whole floats as decimal text, none where missing, and which values are no integers."""
    values, missing, odd = _whole(column)
    return pa.array(values, mask=missing | odd).cast(pa.string()), odd


def _texts(column: pa.Array) -> tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.uint8]]:
    """Return offsets and bytes; empty where a value is missing."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type) or pa.types.is_boolean(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
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
