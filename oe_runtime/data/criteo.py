"""Streams Criteo TSV files: label, 13 integers, 26 categories, tab-separated, empty = missing.

A file, a directory or a glob; plain, .gz or .zst. Files are read in the order of their names, so the row
order, and with it the hold-out and a resumed position, is the same each time.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
from numpy.typing import NDArray

from oe_runtime import _core
from oe_runtime.data.errors import DataError
from oe_runtime.data.schema import (
    CATEGORIES,
    COLUMNS,
    INTEGERS,
    MISSING_ID,
    Batch,
    field_cardinalities,
    normalise,
)

# Large enough for vectorised work, small enough that the second core parses ahead without filling caches.
_BLOCK_BYTES = 2 << 20
_HASH_SEED = 0
_SUFFIXES = (".tsv", ".txt", ".csv", ".gz", ".zst")
_TYPES = {
    "label": pa.int8(),
    **dict.fromkeys(INTEGERS, pa.int64()),
    **dict.fromkeys(CATEGORIES, pa.binary()),
}


class CriteoFiles:
    """The rows of some Criteo files as one table; ids are hashed into `max_cardinality`-capped fields."""

    def __init__(self, name: str, max_cardinality: int = 0) -> None:
        self._name = name
        self._files = find_files(name)
        self._cardinalities = [np.uint64(c) for c in field_cardinalities(max_cardinality)]
        # Known once a pass has reached the end; before that a guess from the share of bytes read.
        self._total: int | None = None

    def describe(self) -> str:
        """How the data was named on the command line."""
        return self._name

    def check(self) -> None:
        """Read the first rows, so that a wrong file is refused before anything starts."""
        next(self.blocks())

    def total_rows(self) -> int | None:
        """Rows of one epoch: exact after a whole pass, else judged from the bytes read; None before any."""
        return self._total

    def blocks(self, start_row: int = 0) -> Iterator[Batch]:
        """All rows from `start_row` on, in order. DataError names the file and line of a broken row."""
        sizes = [f.stat().st_size for f in self._files]
        before = 0  # rows in the files that were passed
        for number, path in enumerate(self._files):
            with _open(path) as (raw, stream):
                skipped, rest = _skip_lines(path, stream, max(0, start_row - before))
                rows = skipped
                if rest is not None:
                    for table in _tables(path, rest, skipped):
                        rows += table.num_rows
                        read = sum(sizes[:number]) + raw.tell()
                        self._guess(before + rows, read, sum(sizes))
                        yield self._convert(path, table, rows - table.num_rows)
            if rows == 0:
                raise DataError(f"{path} is empty: a Criteo row has {len(COLUMNS)} tab-separated columns")
            before += rows
        self._total = before

    def _guess(self, rows: int, read: int, size: int) -> None:
        if read:
            self._total = max(rows, rows * size // read)

    def _convert(self, path: Path, table: pa.RecordBatch, row: int) -> Batch:
        rows = table.num_rows
        label = table.column(0)
        labels = label.fill_null(-1).to_numpy(zero_copy_only=False)
        if labels.min() < 0 or labels.max() > 1:
            raise _broken(path, row)
        integers = np.empty((rows, len(INTEGERS)), np.int64)
        for i in range(len(INTEGERS)):
            integers[:, i] = table.column(1 + i).fill_null(0).to_numpy(zero_copy_only=False)
        ids = np.empty((rows, len(CATEGORIES)), np.int64, order="F")
        for i, cardinality in enumerate(self._cardinalities):
            ids[:, i] = category_ids(table.column(1 + len(INTEGERS) + i), cardinality)
        return Batch(normalise(integers), ids, labels.astype(np.float32))


def category_ids(column: pa.BinaryArray, cardinality: np.uint64) -> NDArray[np.int64]:
    """1 + XXH3(text) modulo `cardinality` for each value, MISSING_ID for empty ones; shape (n,)."""
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    ids = (_core.hash_strings(offsets, data, _HASH_SEED) % cardinality).astype(np.int64)
    ids += 1
    ids[offsets[1:] == offsets[:-1]] = MISSING_ID
    return ids


def find_files(name: str) -> list[Path]:
    """The files that `name` (file, directory or glob) stands for, sorted; DataError when there are none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix in _SUFFIXES)
        if not files:
            raise DataError(f"{name} is a directory without data files ({', '.join(_SUFFIXES)})")
        return files
    files = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
    if not files:
        what = "no file matches" if glob.has_magic(name) else "there is no file or directory"
        raise DataError(
            f"{what} {name}; --data takes a Criteo TSV file, a directory, a glob or generate:ROWS"
        )
    return files


class _open:
    """The file's own stream (for its position) and the decompressed one, closed together."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[pa.NativeFile, pa.NativeFile]:
        try:
            self._raw = pa.OSFile(str(self._path))
            codec = {".gz": "gzip", ".zst": "zstd"}.get(self._path.suffix)
            self._stream = pa.CompressedInputStream(self._raw, codec) if codec else self._raw
        except OSError as error:
            raise DataError(f"cannot read {self._path}: {error.strerror or error}") from error
        return self._raw, self._stream

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()


class _Rest(io.RawIOBase):
    """Some bytes already read, then the rest of a stream."""

    def __init__(self, head: bytes, stream: pa.NativeFile) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        data: bytes = self._stream.read(size if size >= 0 else None)
        return data


def _skip_lines(path: Path, stream: pa.NativeFile, count: int) -> tuple[int, _Rest | None]:
    """Pass over `count` lines: how many there were, and what follows (None at the end of the file).

    Counts newlines only, ten times as fast as parsing; rows before a checkpoint were parsed before.
    """
    passed = 0
    ended = True  # whether the last line passed had its newline
    while True:
        data = _read(path, stream, _BLOCK_BYTES)
        if not data:
            return passed + (not ended), None
        newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) if passed < count else ()
        if passed + len(newlines) >= count:
            cut = int(newlines[count - passed - 1]) + 1 if passed < count else 0
            if cut < len(data):
                return count, _Rest(data[cut:], stream)
            following = _read(path, stream, _BLOCK_BYTES)
            return count, _Rest(following, stream) if following else None
        passed += len(newlines)
        ended = data.endswith(b"\n")


def _read(path: Path, stream: pa.NativeFile, size: int) -> bytes:
    try:
        data: bytes = stream.read(size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return data


def _tables(path: Path, stream: _Rest, row: int) -> Iterator[pa.RecordBatch]:
    """Parsed blocks; `row` is the number of the file's lines before the stream."""
    try:
        with csv.open_csv(
            stream,
            read_options=csv.ReadOptions(column_names=list(COLUMNS), block_size=_BLOCK_BYTES),
            # Empty lines stay, so that rows count as lines do.
            parse_options=csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=csv.ConvertOptions(column_types=_TYPES, null_values=[""]),
        ) as reader:
            for table in reader:
                yield table
                row += table.num_rows
    except pa.ArrowInvalid as error:
        raise _broken(path, row) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _broken(path: Path, row: int) -> DataError:
    """What is wrong with the first broken line at or after `row` lines; the file is read again for it."""
    with (
        _open(path) as (_, stream),
        io.TextIOWrapper(io.BufferedReader(stream), "latin-1", newline="\n") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if number > row and (problem := _problem(line.rstrip("\r\n"))):
                return DataError(f"{path} line {number}: {problem}")
    return DataError(f"{path}: cannot be parsed after line {row}")


def _problem(line: str) -> str | None:
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        hint = "; are the columns tab-separated?" if "\t" not in line and line else ""
        return f"found {len(fields) if line else 0} columns, expected {len(COLUMNS)}{hint}"
    if fields[0] not in ("0", "1"):
        return f"the label is '{fields[0][:20]}', expected 0 or 1"
    for name, value in zip(INTEGERS, fields[1:], strict=False):
        digits = value[1:] if value[:1] == "-" else value
        if value and not (digits.isascii() and digits.isdigit() and abs(int(value)) < 2**63):
            return f"{name} is '{value[:20]}', expected an integer or nothing"
    return None
