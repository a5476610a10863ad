"""TFRecord files of tf.train.Example, by TensorFlow: a feature per column, plain or .gz.

An absent or empty feature is a missing value. Numbers may be int64 or float. Categories may be bytes, or
int64, which is hashed as decimal text; a column of several values has them in the feature's list, or in one
text, alone in its list, with the schema's separator between them.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oe_runtime.data.columns import check_positive, convert_columns
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import Piece, RowFile, reading
from oe_runtime.errors import DataError
from oe_runtime.support.tensorflow_noise import without_noise

_BATCH_RECORDS = 4096
_LOOKED_AT = 1000  # first records, in which each column must occur, to know its type
_FRAME_BYTES = 16  # length and checksums of a record
# TensorFlow's additions to an error message.
_AROUND = re.compile(r"^\{\{.*?\}\}|\[Op:\w+\].*$", re.DOTALL)


class RecordFile(RowFile):
    """An open TFRecord file."""

    unit = "record"

    def __init__(self, path: Path, schema: Schema) -> None:
        check_opens(path)
        self._tf = tf = import_tensorflow(path)
        self._path = path
        self._schema = schema
        kind = "GZIP" if path.suffix.lower() == ".gz" else ""
        self._records = tf.data.TFRecordDataset(str(path), compression_type=kind, buffer_size=1 << 20)
        self._size = path.stat().st_size
        self._read = 0
        # Name of the feature and its type, by column.
        self._features = _features(path, itertools.islice(self._drawn(self._records), _LOOKED_AT), schema, tf)
        # The separator, by feature of several values.
        several = {one.name.lower(): one.separator for one in schema.categories if one.several}
        self._several = {name: several[name.lower()] for name, _ in self._features if name.lower() in several}

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return the whole file, which can only be read from its start."""
        return [(0, self._size)]

    def narrow(self, start: int, stop: int) -> None:
        """Do nothing: the whole file is the only part."""

    def skip(self, count: int) -> int:
        """Skip `count` records; return how many there were."""
        if count == 0:
            return 0
        # Read without parsing: their number and the file's integrity are not known otherwise.
        passed = 0
        for records in self._drawn(self._records.take(count).batch(_BATCH_RECORDS)):
            passed += len(records)
            self._count(records)
        self._records = self._records.skip(passed)
        return passed

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield batches of a few thousand records."""
        for records in self._drawn(self._records.batch(_BATCH_RECORDS)):
            self._count(records)
            yield functools.partial(self._convert, records, min(self._read, self._size))

    def close(self) -> None:
        """Drop the data set; TensorFlow then closes the file."""
        del self._records

    def _count(self, records: Any) -> None:
        lengths = self._tf.strings.length(records)
        self._read += int(self._tf.reduce_sum(lengths)) + _FRAME_BYTES * len(records)

    def _drawn(self, dataset: Any) -> Iterator[Any]:
        try:
            yield from dataset
        except self._tf.errors.OpError as error:
            said = _AROUND.sub("", error.message).strip()
            raise DataError(f"cannot read {self._path}: {said}") from error

    def _convert(self, records: Any, read: int) -> Piece:
        tf = self._tf
        spec = {name: tf.io.RaggedFeature(kind, row_splits_dtype=tf.int64) for name, kind in self._features}
        try:
            parsed = tf.io.parse_example(records, spec)
            # Values of all records, and how many each has.
            found = {
                name: (one.values.numpy(), np.diff(one.row_splits.numpy())) for name, one in parsed.items()
            }
            if any((counts > 1).any() for name, (_, counts) in found.items() if name not in self._several):
                raise ValueError("a feature with several values")
        except (tf.errors.OpError, UnicodeDecodeError, ValueError):
            return self._one_by_one(records, read)
        columns = []
        for name, kind in self._features:
            values, counts = found[name]
            if (counts > 1).any():
                columns.append(_lists(values, counts, self._several[name]))
                continue
            there = counts > 0
            if not there.all():
                all_values = np.zeros(len(counts), values.dtype)
                all_values[there] = values
                values = all_values
            columns.append(pa.array(values, pa.binary() if kind == tf.string else None, mask=~there))
        return convert_columns(columns, self._schema, read)

    def _one_by_one(self, records: Any, read: int) -> Piece:
        """Parse a batch with broken records: the good ones as usual, the others by number and problem."""
        good, broken = [], []
        for number, record in enumerate(records.numpy()):
            problem = _problem(record, self._features, self._several, self._tf)
            if problem is None:
                good.append(number)
            else:
                broken.append((number, problem))
        if not broken:
            raise DataError(f"cannot read {self._path}: TensorFlow cannot parse its records")
        rest = self._tf.gather(records, np.array(good, np.int64))
        piece = self._convert(rest, read)
        found = [(good[row], problem) for row, problem in piece.broken]
        return piece._replace(broken=sorted(broken + found))


def check_opens(path: Path) -> None:
    """Raise DataError for a file that cannot be opened or has another compression. Needs no TensorFlow."""
    if path.suffix.lower() == ".zst":
        raise DataError(f"cannot read {path}: TFRecord files may be plain or .gz")
    with reading(path), path.open("rb"):
        pass


def import_tensorflow(path: Path) -> Any:
    """Return TensorFlow, which reads the file. Raises DataError if it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with without_noise():
            import tensorflow as tf
    except ImportError:
        raise DataError(
            f"{path} is a TFRecord file, which TensorFlow reads: pip install tensorflow"
        ) from None
    return tf


def _lists(values: NDArray[Any], counts: NDArray[np.int64], separator: str) -> pa.Array:
    """Return the values of records as lists; one text alone may have several values, as in text files."""
    ends = np.cumsum(counts)
    flat = pa.array(values, pa.binary() if values.dtype == object else None)
    if pa.types.is_binary(flat.type):
        alone = flat.take(pa.array((ends - 1)[counts == 1]))
        if pc.any(pc.match_substring(alone, separator)).as_py():
            texts, byte = flat.to_pylist(), separator.encode()
            rows = [texts[end - count : end] for end, count in zip(ends, counts, strict=True)]
            return pa.array(
                [row[0].split(byte) if len(row) == 1 else row for row in rows], pa.list_(flat.type)
            )
    return pa.LargeListArray.from_arrays(pa.array(np.concatenate(([0], ends))), flat)


def _kind(feature: Any) -> str | None:
    """Return int64_list, float_list or bytes_list; None for a feature without a value."""
    kind: str | None = feature.WhichOneof("kind")
    return kind if kind and len(getattr(feature, kind).value) else None


def _features(path: Path, records: Iterator[Any], schema: Schema, tf: Any) -> list[tuple[str, Any]]:
    types = {"int64_list": tf.int64, "float_list": tf.float32, "bytes_list": tf.string}
    kinds: dict[str, Any] = {}
    unknown = {name.lower() for name in schema.names}
    drawn = 0
    for record in records:
        drawn += 1
        try:
            example = tf.train.Example.FromString(record.numpy())
        except Exception:  # noqa: S112 - protobuf's error class depends on its version; the record is broken
            continue
        for name, feature in example.features.feature.items():
            kind = _kind(feature)
            kinds[name] = kinds.get(name) or (types[kind] if kind else None)
        unknown -= {name.lower() for name, kind in kinds.items() if kind}
        if not unknown:
            break
    names = list(kinds)
    if not drawn:
        return []
    if not names:
        raise DataError(f"{path}: its records are no tf.train.Example")
    features = []
    categories = {one.name for one in schema.categories}
    texts = categories | ({schema.label} if schema.positive else set())
    whole = {schema.label, *(one.name for one in schema.numbers if one.whole)}
    for column, place in zip(schema.names, schema.places(str(path), names), strict=True):
        kind = kinds[names[place]] or (tf.string if column in texts else tf.int64)
        if column == schema.label and kind != tf.string:
            check_positive(path, schema)
        # float32 has no integers of more than 24 bits, so it is no type of ids.
        if (kind == tf.float32 and column in categories) or (kind == tf.string and column not in texts):
            expected = "integers" if column in whole else "numbers"
            expected = "bytes or integers" if column in categories else expected
            raise DataError(f"{path}: feature {column} has the type {kind.name}, expected {expected}")
        features.append((names[place], kind))
    return features


def _problem(
    record: bytes, features: list[tuple[str, Any]], several: Mapping[str, str], tf: Any
) -> str | None:
    try:
        found = tf.train.Example.FromString(record).features.feature
    except Exception:
        return "it is no tf.train.Example"
    lists = {"int64": "int64_list", "float32": "float_list", "string": "bytes_list"}
    for name, kind in features:
        if name not in found or (has := found[name].WhichOneof("kind")) is None:
            continue
        if has != lists[kind.name]:
            return f"{name} is a {has}, expected a {lists[kind.name]} as in the file's first records"
        count = len(getattr(found[name], has).value)
        if count > 1 and name not in several:
            return f"{name} has {count} values, expected one"
    return None
