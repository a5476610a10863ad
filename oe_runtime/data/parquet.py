"""Parquet files of rows, by pyarrow, with their columns in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from oe_runtime.data.columns import check_types, convert_columns
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import Piece
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

_BATCH_ROWS = 8192


class ParquetRows:
    """An open Parquet file."""

    unit = "row"

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self.first = 1
        try:
            self._raw = remote_files.open_input(path)
            self._file = pq.ParquetFile(self._raw)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
        try:
            found = self._file.schema_arrow
            self._columns = [found.names[place] for place in schema.places(str(path), found.names)]
            check_types(path, schema, [found.field(column).type for column in self._columns])
        except BaseException:
            self.close()
            raise
        self._size = path.stat().st_size
        self._total = self._file.metadata.num_rows
        self._groups = range(self._file.metadata.num_row_groups)  # the row groups to read
        self._passed = 0  # skipped rows of the first one

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return rows of consecutive row groups that together have at least `target_bytes`."""
        found, start, stop, size = [], 0, 0, 0
        for group in self._groups:
            stop += self._rows_of(group)
            size += self._file.metadata.row_group(group).total_byte_size
            if size >= target_bytes or group == self._groups[-1]:
                found.append((start, stop))
                start, size = stop, 0
        return found

    def doubts(self) -> dict[str, str]:
        """Return nothing: values have types."""
        return {}

    def narrow(self, start: int, stop: int) -> None:
        """Read only the row groups that begin in these rows."""
        begins = list(itertools.accumulate((self._rows_of(group) for group in self._groups), initial=0))
        within = [group for group in self._groups if start <= begins[group] < stop]
        self._groups = range(within[0], within[-1] + 1) if within else range(0)
        self.first = 1 + begins[self._groups.start]

    def skip(self, count: int) -> int:
        """Skip `count` rows: row groups by their numbers of rows, which the file's end has."""
        left = count
        while self._groups and left >= self._rows_of(self._groups[0]):
            left -= self._rows_of(self._groups[0])
            self._groups = self._groups[1:]
        if not self._groups:
            return count - left
        self._passed = left
        return count

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield batches of a few thousand rows."""
        before = sum(self._rows_of(group) for group in range(self._groups.start))
        passed = self._passed
        groups = list(self._groups)
        try:
            for table in self._file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=self._columns):
                before += table.num_rows
                rest = table.slice(min(passed, table.num_rows))
                passed -= table.num_rows - rest.num_rows
                if rest.num_rows:
                    read = self._size * before // self._total
                    yield functools.partial(self._convert, rest, read)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"cannot read {self._path}: {remote_files.reason(error)}") from error

    def _rows_of(self, group: int) -> int:
        rows: int = self._file.metadata.row_group(group).num_rows
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()

    def _convert(self, table: pa.RecordBatch, read: int) -> Piece:
        columns = [table.column(name) for name in self._columns]
        return convert_columns(columns, self._schema, read)
