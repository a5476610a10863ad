"""TFRecord files of tf.train.Example, by TensorFlow: features label, I1 … I13 and C1 … C26, plain or .gz.

An absent or empty feature is a missing value. Integers may be int64 or float. Categories may be bytes, or
int64, which is hashed as decimal text.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from oe_runtime.data.columns import convert_columns
from oe_runtime.data.rows import Piece
from oe_runtime.data.schema import CATEGORIES, COLUMNS, column_places
from oe_runtime.errors import DataError
from oe_runtime.support.tensorflow_noise import without_noise

_BATCH_RECORDS = 4096
_LOOKED_AT = 1000  # first records, in which each column must occur, to know its type
_FRAME_BYTES = 16  # length and checksums of a record
# TensorFlow's additions to an error message.
_AROUND = re.compile(r"^\{\{.*?\}\}|\[Op:\w+\].*$", re.DOTALL)


class RecordFile:
    """An open TFRecord file."""

    unit = "record"
    first = 1

    def __init__(self, path: Path, cardinalities: Sequence[int]) -> None:
        check_opens(path)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        try:
            with without_noise():
                import tensorflow as tf
        except ImportError:
            raise DataError(
                f"{path} is a TFRecord file, which TensorFlow reads: pip install tensorflow"
            ) from None
        self._tf = tf
        self._path = path
        self._cardinalities = cardinalities
        kind = "GZIP" if path.suffix == ".gz" else ""
        self._records = tf.data.TFRecordDataset(str(path), compression_type=kind, buffer_size=1 << 20)
        self._size = path.stat().st_size
        self._read = 0
        # Name of the feature and its type, by column.
        self._features = _features(path, itertools.islice(self._drawn(self._records), _LOOKED_AT), tf)

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
        spec = {
            name: tf.io.FixedLenSequenceFeature(
                [], kind, allow_missing=True, default_value=_MISSING[kind.name]
            )
            for name, kind in self._features
        }
        try:
            parsed = tf.io.parse_example(records, spec)
            if any(parsed[name].shape[1] > 1 for name, _ in self._features):
                raise ValueError("a feature with several values")
        except (tf.errors.OpError, UnicodeDecodeError, ValueError):
            return self._one_by_one(records, read)
        columns = []
        for name, kind in self._features:
            values = parsed[name].numpy()
            column = (
                values[:, 0] if values.shape[1] else np.full(len(values), _MISSING[kind.name], values.dtype)
            )
            columns.append(_column(column, kind.name))
        return convert_columns(columns, self._cardinalities, read)

    def _one_by_one(self, records: Any, read: int) -> Piece:
        """Parse a batch with broken records: the good ones as usual, the others by number and problem."""
        good, broken = [], []
        for number, record in enumerate(records.numpy()):
            problem = _problem(record, self._features, self._tf)
            if problem is None:
                good.append(number)
            else:
                broken.append((number, problem))
        if not broken:
            raise DataError(f"cannot read {self._path}: TensorFlow cannot parse its records")
        rest = self._tf.gather(records, good)
        piece = self._convert(rest, read)
        found = [(good[row], problem) for row, problem in piece.broken]
        return piece._replace(broken=sorted(broken + found))


def check_opens(path: Path) -> None:
    """Raise DataError for a file that cannot be opened or has another compression. Needs no TensorFlow."""
    if path.suffix == ".zst":
        raise DataError(f"cannot read {path}: TFRecord files may be plain or .gz")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


# Stand-ins for a missing value. No count is the least int64.
_MISSING: dict[str, Any] = {"int64": -(2**63), "float32": float("nan"), "string": b""}


def _column(values: Any, kind: str) -> pa.Array:
    if kind == "string":
        return pa.array(values, pa.binary())
    if kind == "int64":
        return pa.array(values, mask=values == _MISSING["int64"])
    return pa.array(values)


def _kind(feature: Any) -> str | None:
    """Return int64_list, float_list or bytes_list; None for a feature without a value."""
    kind: str | None = feature.WhichOneof("kind")
    return kind if kind and len(getattr(feature, kind).value) else None


def _features(path: Path, records: Iterator[Any], tf: Any) -> list[tuple[str, Any]]:
    types = {"int64_list": tf.int64, "float_list": tf.float32, "bytes_list": tf.string}
    kinds: dict[str, Any] = {}
    drawn = 0
    for record in records:
        drawn += 1
        try:
            example = tf.train.Example.FromString(record.numpy())
        except Exception:  # noqa: S112 - protobuf's error class depends on its version; the record is broken
            continue
        for name, feature in example.features.feature.items():
            if kind := _kind(feature):
                kinds.setdefault(name, types[kind])
            else:
                kinds.setdefault(name, None)
        if len(kinds) >= len(COLUMNS) and None not in kinds.values():
            break
    names = list(kinds)
    if not drawn:
        return []
    if not names:
        raise DataError(f"{path}: its records are no tf.train.Example")
    features = []
    for column, place in zip(COLUMNS, column_places(str(path), names), strict=True):
        kind = kinds[names[place]] or (tf.string if column in CATEGORIES else tf.int64)
        if kind == (tf.float32 if column in CATEGORIES else tf.string):
            expected = "bytes or integers" if column in CATEGORIES else "integers"
            raise DataError(f"{path}: feature {column} has the type {kind.name}, expected {expected}")
        features.append((names[place], kind))
    return features


def _problem(record: bytes, features: list[tuple[str, Any]], tf: Any) -> str | None:
    try:
        found = tf.train.Example.FromString(record).features.feature
    except Exception:
        return "it is no tf.train.Example"
    lists = {"int64": "int64_list", "float32": "float_list", "string": "bytes_list"}
    for name, kind in features:
        if name not in found or (has := _kind(found[name])) is None:
            continue
        if has != lists[kind.name]:
            return f"{name} is a {has}, expected a {lists[kind.name]} as in the file's first records"
        count = len(getattr(found[name], has).value)
        if count > 1:
            return f"{name} has {count} values, expected one"
    return None
