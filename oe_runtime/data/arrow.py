"""Arrow files (IPC, also called Feather 2) and tables of rows, with their columns in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from oe_runtime.data.columns import check_types, convert_columns
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import Piece
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

_TABLE_ROWS = 8192  # of a table, at a time


class ArrowRows:
    """An open Arrow file."""

    unit = "row"

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self.first = 1
        try:
            remote = remote_files.is_remote(path)
            self._raw = remote_files.open_input(path) if remote else pa.memory_map(str(path))
        except OSError as error:
            raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
        try:
            self._file = pa.ipc.open_file(self._raw)
            found = self._file.schema
            self._places = schema.places(str(path), found.names)
            check_types(path, schema, [found.field(place).type for place in self._places])
        except (OSError, pa.ArrowInvalid) as error:
            self.close()
            raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
        except BaseException:
            self.close()
            raise
        self._size = self._raw.size()
        self._count = self._file.num_record_batches
        self._batches = range(self._count)  # to read
        self._passed = 0  # skipped rows of the first one

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return ranges of record batches of about `target_bytes`."""
        count = len(self._batches)
        step = max(1, count * target_bytes // max(1, self._size))
        return [(start, min(count, start + step)) for start in range(0, count, step)]

    def doubts(self) -> dict[str, str]:
        """Return nothing: values have types."""
        return {}

    def narrow(self, start: int, stop: int) -> None:
        """Read only these record batches."""
        self.first = 1 + sum(self._rows_of(batch) for batch in range(start))
        self._batches = range(start, stop)

    def skip(self, count: int) -> int:
        """Skip `count` rows; return how many there were."""
        left = count
        while self._batches and left >= self._rows_of(self._batches[0]):
            left -= self._rows_of(self._batches[0])
            self._batches = self._batches[1:]
        if not self._batches:
            return count - left
        self._passed = left
        return count

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield the record batches."""
        passed = itertools.chain([self._passed], itertools.repeat(0))
        for number, skipped in zip(list(self._batches), passed, strict=False):
            rows = self._batch(number)
            if rows.num_rows > skipped:
                read = self._size * (number + 1) // self._count
                yield functools.partial(self._convert, rows.slice(skipped), read)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _rows_of(self, number: int) -> int:
        rows: int = self._batch(number).num_rows
        return rows

    def _batch(self, number: int) -> pa.RecordBatch:
        try:
            return self._file.get_batch(number)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {self._path}: {remote_files.reason(error)}") from error

    def _convert(self, rows: pa.RecordBatch, read: int) -> Piece:
        return convert_columns([rows.column(place) for place in self._places], self._schema, read)


class TableRows(ArrowRows):
    """A table in memory."""

    def __init__(self, table: pa.Table, schema: Schema, name: str) -> None:
        """`name` is what messages call it."""
        self._path = Path(name)
        self._schema = schema
        self.first = 1
        self._places = schema.places(name, table.column_names)
        check_types(self._path, schema, [table.schema.field(place).type for place in self._places])
        self._parts = table.to_batches(max_chunksize=_TABLE_ROWS)
        self._size = table.nbytes
        self._count = len(self._parts)
        self._batches = range(self._count)
        self._passed = 0

    def close(self) -> None:
        """Do nothing."""

    def _batch(self, number: int) -> pa.RecordBatch:
        return self._parts[number]
