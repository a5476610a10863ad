"""Rows from the Arrow columns of Parquet, Arrow and TFRecord files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import oe_runtime._core as _core
from oe_runtime.data.batch import Batch, normalise
from oe_runtime.data.row_schema import Category, Number, Schema
from oe_runtime.data.rows import Piece, scaled
from oe_runtime.errors import DataError

_Integers = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]
# Extension types whose values are those of their storage, or have a text that everybody writes.
_EXTENSIONS = ("arrow.bool8", "arrow.json", "arrow.uuid")
_FLOAT32_WHOLE = 1 << 24  # float32 rounds larger integers
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")  # as columns of integers are written


def _is_one_of(*names: str) -> Callable[[pa.DataType], bool]:
    """Return whether a type is one of those that pyarrow.types.is_NAME knows; it may be too old for some."""
    checks = [getattr(pa.types, f"is_{name}") for name in names if hasattr(pa.types, f"is_{name}")]
    return lambda kind: any(check(kind) for check in checks)


_is_text = _is_one_of(
    "string", "binary", "large_string", "large_binary", "string_view", "binary_view", "fixed_size_binary"
)
_is_list = _is_one_of("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
_is_whole = _is_one_of("integer", "boolean", "null")
_is_fraction = _is_one_of("floating", "decimal")
_is_date = _is_one_of("date")


def convert_columns(columns: Sequence[pa.Array], schema: Schema, read: int) -> Piece:
    """Return columns in the schema's order as a piece. Categories are hashed as the text of their values.

    That of integers is decimal, of whole floats and decimals that of the integer, of booleans 1 or 0, and of
    dates 2026-11-28: what text files have in those columns.
    """
    columns = [_plain(column) for column in columns]
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
        several = _several if category.several else _single
        column = next(rest)
        ids[:, at : at + category.length], wrong = several(column, category, schema.missing)
        expected = "an integer or nothing" if category.whole else "a text or an integer"
        if pa.types.is_float32(column.type):
            expected += f"; float32 rounds integers beyond {_FLOAT32_WHOLE}: store integers or text"
        for row, value in wrong:
            problems.setdefault(row, f"{category.name} is '{value}', expected {expected}")
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
    for name, given in zip(schema.names, kinds, strict=True):
        kind = _plain_type(given)
        is_list = name in several and _is_list(kind)
        if is_list:
            kind = _plain_type(kind.value_type)
        if name in texts:
            good = _is_whole(kind) or _is_text(kind) or _is_date(kind)
            expected = "text, bytes, integers or dates"
            if name in several:
                expected += f", in lists or with '{several[name].separator}' between them"
            else:  # whole ones, as pandas stores integers beside missing values
                good = good or _is_fraction(kind)
        elif name == schema.label and schema.positive:
            good = _is_whole(kind) or _is_fraction(kind)
            if good:
                check_positive(path, schema)
            good = good or _is_text(kind) or _is_date(kind)
            expected = "text or numbers"
        else:
            good = _is_whole(kind) or _is_fraction(kind)
            expected = "integers" if name in whole else "numbers"
        if not good:
            raise DataError(f"{path}: column {name} has the type {given}, expected {expected}")


def check_positive(path: Path, schema: Schema) -> None:
    """Raise DataError if labels are numbers and that of a positive row is none: no row would be positive."""
    if schema.positive and _core.parse_number(schema.positive) is None:
        raise DataError(
            f"{path}: the labels of column {schema.label} are numbers, and positive is {schema.positive!r}; "
            "set positive to a number, or leave it out where labels are 0 and 1"
        )


def hashed_texts(column: pa.Array) -> list[Any]:
    """Return a column's values as the texts that are hashed, "" where missing; those of lists as lists."""
    column = _plain(column)
    if _is_list(column.type):
        flat = hashed_texts(column.flatten())
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False))
        return [flat[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    if _is_text(column.type):
        # As bytes: text that is not UTF-8 is read too.
        values = column.cast(pa.large_binary()).to_pylist()
        return [(value or b"").decode("utf-8", "replace") for value in values]
    return ["" if value is None or value != value else _number_text(value) for value in column.to_pylist()]


def _number_text(value: Any) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)


def can_be(kind: pa.DataType) -> tuple[bool, bool]:
    """Return whether columns of this type can be numbers, and whether they can be categories."""
    kind = _plain_type(kind)
    if _is_list(kind):
        kind = _plain_type(kind.value_type)
        return False, _is_whole(kind) or _is_text(kind) or _is_date(kind)
    number = _is_whole(kind) or _is_fraction(kind)
    return number, number or _is_text(kind) or _is_date(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values, however they are stored."""
    while True:
        if isinstance(kind, pa.BaseExtensionType) and kind.extension_name in _EXTENSIONS:
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def _plain(column: pa.Array) -> pa.Array:
    """Return a column's values as text, bytes, integers, floats, decimals, or lists."""
    while True:
        kind = column.type
        if isinstance(kind, pa.BaseExtensionType):
            column = _uuid_texts(column) if kind.extension_name == "arrow.uuid" else column.storage
        elif pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
        elif pa.types.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        else:
            break
    wanted = None
    if pa.types.is_boolean(kind):
        wanted = pa.uint8()
    elif pa.types.is_null(kind):
        wanted = pa.int64()
    elif pa.types.is_float16(kind):
        wanted = pa.float32()
    elif pa.types.is_date64(kind):
        column, wanted = column.cast(pa.date32(), safe=False), pa.string()  # perhaps with a time of day
    elif pa.types.is_date(kind) or _is_one_of("string_view")(kind):
        wanted = pa.string()
    elif pa.types.is_fixed_size_binary(kind) or _is_one_of("binary_view")(kind):
        wanted = pa.binary()
    elif pa.types.is_fixed_size_list(kind):
        wanted = pa.list_(kind.value_type)
    return column if wanted is None else column.cast(wanted)


def _uuid_texts(column: pa.Array) -> pa.Array:
    """Return UUIDs as 36 characters, which text files have."""
    data = b"".join(column.storage.fill_null(bytes(16)).to_pylist())
    digits = np.frombuffer(data.hex().encode(), np.uint8).reshape(-1, 32)
    text = np.insert(digits, (8, 12, 16, 20), ord("-"), axis=1).tobytes()
    found = pa.Array.from_buffers(pa.binary(36), len(column), [None, pa.py_buffer(text)])
    return pc.if_else(column.is_valid(), found, pa.scalar(None, found.type))


def _labels(column: pa.Array, schema: Schema) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the labels, and which are none."""
    column = _as_floats(column)
    if not schema.positive:
        labels, missing, odd = _whole(column)
        return labels, missing | odd | (labels < 0) | (labels > 1)
    column = _present(column, (*schema.missing, ""))
    number = _core.parse_number(schema.positive)
    if not _is_text(column.type):
        values = _floats(column)
        return (values == number).astype(np.int64), np.isnan(values)
    words = column.dictionary_encode()
    numbers = {_core.parse_number(word) for word in schema.missing} - {None}
    positive, none = [], []
    for given in words.dictionary.to_pylist():
        word = given if isinstance(given, bytes) else given.encode()
        value = _core.parse_number(word)
        positive.append(word == schema.positive.encode() or (number is not None and value == number))
        none.append(value in numbers)
    places = words.indices.fill_null(len(none)).to_numpy(zero_copy_only=False)
    return np.array([*positive, False], np.int64)[places], np.array([*none, True], np.bool_)[places]


def _present(column: pa.Array, missing: Sequence[str], *, exact: bool = False) -> pa.Array:
    """Return a column without the values that count as missing.

    Numbers are compared as numbers; `exact`: integers as their text.
    """
    kind = column.type
    if not missing or _is_list(kind):
        return column
    if _is_text(kind):
        words = pa.array([word.encode() for word in missing], pa.binary()).cast(kind)
    elif pa.types.is_floating(kind) or pa.types.is_integer(kind):
        words = pa.array(_values_of_type(kind, missing, exact), kind)
        if pa.types.is_floating(kind):
            column = pc.add(column, pa.scalar(0.0, kind))  # is_in tells -0.0 from 0.0
    else:
        return column
    return pc.if_else(pc.is_in(column, words), pa.scalar(None, kind), column)


def _values_of_type(kind: pa.DataType, words: Sequence[str], exact: bool) -> list[Any]:
    """Return those words that are numbers of this type."""
    found = []
    for word in words:
        number: Any = int(word) if _INTEGER.fullmatch(word) else None if exact else _core.parse_number(word)
        if number is None or (pa.types.is_integer(kind) and number != int(number)):
            continue
        try:
            number = float(number) + 0.0 if pa.types.is_floating(kind) else int(number)
            found.append(pa.scalar(number, kind).as_py())
        except (OverflowError, pa.ArrowInvalid):
            continue  # no value of the column is equal to it
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
        _as_floats(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64
    )
    return found


_Ids = tuple[NDArray[np.int64], list[tuple[int, str]]]


def _single(column: pa.Array, category: Category, missing: Sequence[str]) -> _Ids:
    """Return the ids of a column, (B, 1); rows and values that are no category."""
    values = column
    odd = np.zeros(len(column), np.bool_)
    whole = bool(category.whole) and _is_text(column.type)
    if pa.types.is_decimal(column.type):
        values, whole = column.cast(pa.string()), True
    elif pa.types.is_floating(column.type):
        values, odd = _whole_texts(_present(column, missing))
    else:
        values = _present(column, missing, exact=not category.whole)
    ids, wrong = _core.category_ids(*_texts(values), category.cardinality, whole, missing)
    return ids[:, None], [(row, _shown(column, row)) for row in np.flatnonzero(odd | wrong).tolist()]


def _several(column: pa.Array, category: Category, missing: Sequence[str]) -> _Ids:
    """Return the ids of a column of several values, (B, length); rows and values that are no category."""
    if not _is_list(column.type):
        offsets, data = _texts(_present(column, missing, exact=True))
        texts = pa.Array.from_buffers(
            pa.large_binary(), len(column), [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data)]
        )
        column = pc.split_pattern(texts, category.separator)
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = _plain(column.flatten())
    whole = bool(category.whole) and _is_text(flat.type)
    values = _texts(_present(flat, missing, exact=not category.whole))
    ids, odd = _core.category_ids(*values, category.cardinality, whole, missing)
    rows = np.repeat(np.arange(len(column)), counts)
    wrong = [(int(rows[at]), _shown(flat, at)) for at in np.flatnonzero(odd).tolist()]
    there = ids > 0  # empty values are left out, as in text files
    rows, ids = rows[there], ids[there]
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
    return found, wrong


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
    # By their text: the cast of a decimal to a float is not always the nearest one.
    return column.cast(pa.string()).cast(pa.float64()) if pa.types.is_decimal(column.type) else column


def _whole_texts(column: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return whole floats as decimal text, none where missing, and which values are no integers."""
    values, missing, odd = _whole(column)
    if pa.types.is_float32(column.type):
        odd |= np.abs(values) > _FLOAT32_WHOLE
    return pa.array(values, mask=missing | odd).cast(pa.string()), odd


def _texts(column: pa.Array) -> tuple[NDArray[np.int32] | NDArray[np.int64], NDArray[np.uint8]]:
    """Return offsets and bytes; empty where a value is missing."""
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
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    return "" if value is None else str(value)[:20]
