"""Writes rows in Criteo's shape: TSV, CSV with a header (both also .gz and .zst), Parquet, TFRecord."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from oe_runtime.data.criteo import CATEGORIES, COLUMNS, INTEGERS
from oe_runtime.data.files import file_kind
from oe_runtime.data.text import CODECS
from oe_runtime.errors import DataError

SCHEMA = pa.schema(
    [
        ("label", pa.int8()),
        *((name, pa.int64()) for name in INTEGERS),
        *((c, pa.string()) for c in CATEGORIES),
    ]
)


def write_rows(path: Path, tables: Iterable[pa.RecordBatch]) -> None:
    """Write tables of SCHEMA in the format of the name; the file appears complete or not at all."""
    partial = path.with_name(f".{path.name}.part")
    kind = file_kind(path) or "tabs"
    codec = CODECS.get(path.suffix.lower())
    try:
        if kind == "tfrecord":
            _write_records(path, partial, codec, tables)
        elif kind == "parquet":
            with pq.ParquetWriter(str(partial), SCHEMA) as file:
                for table in tables:
                    file.write_batch(table)
        else:
            # Arrow would pick the codec from the name, and the partial file's name has another ending.
            with pa.output_stream(str(partial), compression=codec) as out:
                if kind == "commas":
                    out.write((",".join(COLUMNS) + "\n").encode())
                options = csv.WriteOptions(
                    include_header=False,
                    delimiter="," if kind == "commas" else "\t",
                    quoting_style="needed" if kind == "commas" else "none",
                )
                for table in tables:
                    csv.write_csv(table, out, options)
        partial.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _write_records(path: Path, partial: Path, codec: str | None, tables: Iterable[pa.RecordBatch]) -> None:
    if codec == "zstd":
        raise DataError(f"cannot write {path}: TFRecord files may be plain or .gz")
    try:
        import tensorflow as tf
    except ImportError:
        raise DataError(f"writing {path} needs TensorFlow: pip install tensorflow") from None
    partial.touch()  # TensorFlow's own error would be a C++ one
    options = tf.io.TFRecordOptions(compression_type="GZIP" if codec else "")
    with contextlib.closing(tf.io.TFRecordWriter(str(partial), options)) as out:
        for table in tables:
            for record in _examples(table, tf.train):
                out.write(record)


def _examples(table: pa.RecordBatch, train: Any) -> Iterator[bytes]:
    columns = [table.column(name).to_pylist() for name in COLUMNS]
    for row in zip(*columns, strict=True):
        features = {}
        for name, value in zip(COLUMNS, row, strict=True):
            if isinstance(value, str):
                features[name] = train.Feature(bytes_list=train.BytesList(value=[value.encode()]))
            elif value is not None:
                features[name] = train.Feature(int64_list=train.Int64List(value=[value]))
        record: bytes = train.Example(features=train.Features(feature=features)).SerializeToString()
        yield record
