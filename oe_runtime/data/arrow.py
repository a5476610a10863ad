"""Parquet files, Arrow files (IPC, also called Feather 2) and tables of rows; columns in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from oe_runtime.data.columns import check_types, convert_columns
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import Piece, RowFile, reading
from oe_runtime.support import remote_files

_BATCH_ROWS = 8192  # of a table and of Parquet, at a time


class _ChunkedRows(RowFile):
    """An open file of chunks with known numbers of rows: Parquet's row groups, Arrow's record batches."""

    unit = "row"

    def _begin(self, path: Path, schema: Schema, found: pa.Schema, chunks: int) -> None:
        """Take the columns that the file has, and the number of its chunks. Raises DataError."""
        self._path = path
        self._schema = schema
        self._places = schema.places(str(path), found.names)
        check_types(path, schema, [found.field(place).type for place in self._places])
        self._count = chunks
        self._chunks = range(chunks)  # to read
        self._passed = 0  # skipped rows of the first one

    def _rows_in(self, chunk: int) -> int:
        raise NotImplementedError

    def skip(self, count: int) -> int:
        """Skip `count` rows, by the chunks' numbers of rows; return how many there were."""
        left = count
        while self._chunks and left >= self._rows_in(self._chunks[0]):
            left -= self._rows_in(self._chunks[0])
            self._chunks = self._chunks[1:]
        if not self._chunks:
            return count - left
        self._passed = left
        return count

    def _piece(self, columns: Sequence[pa.Array], read: int) -> Callable[[], Piece]:
        return functools.partial(convert_columns, columns, self._schema, read)


class ParquetRows(_ChunkedRows):
    """An open Parquet file."""

    def __init__(self, path: Path, schema: Schema) -> None:
        import pyarrow.parquet as pq  # here, because others do without

        with reading(path):
            self._raw = remote_files.open_input(path)
            self._file = pq.ParquetFile(self._raw)
        try:
            found, metadata = self._file.schema_arrow, self._file.metadata
            self._begin(path, schema, found, metadata.num_row_groups)
        except BaseException:
            self.close()
            raise
        self._columns = [found.names[place] for place in self._places]
        self._size = path.stat().st_size
        self._total = metadata.num_rows

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return rows of consecutive row groups that together have at least `target_bytes`."""
        found, start, stop, size = [], 0, 0, 0
        for group in self._chunks:
            stop += self._rows_in(group)
            size += self._file.metadata.row_group(group).total_byte_size
            if size >= target_bytes or group == self._chunks[-1]:
                found.append((start, stop))
                start, size = stop, 0
        return found

    def narrow(self, start: int, stop: int) -> None:
        """Read only the row groups that begin in these rows."""
        begins = list(itertools.accumulate(map(self._rows_in, self._chunks), initial=0))
        within = [group for group in self._chunks if start <= begins[group] < stop]
        self._chunks = range(within[0], within[-1] + 1) if within else range(0)
        self.first = 1 + begins[self._chunks.start]

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield batches of a few thousand rows."""
        before = sum(map(self._rows_in, range(self._chunks.start)))
        passed = self._passed
        groups = list(self._chunks)
        with reading(self._path):
            for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=self._columns):
                before += batch.num_rows
                rest = batch.slice(min(passed, batch.num_rows))
                passed -= batch.num_rows - rest.num_rows
                if rest.num_rows:
                    columns = [rest.column(name) for name in self._columns]
                    yield self._piece(columns, self._size * before // self._total)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()

    def _rows_in(self, chunk: int) -> int:
        rows: int = self._file.metadata.row_group(chunk).num_rows
        return rows


class ArrowRows(_ChunkedRows):
    """An open Arrow file."""

    def __init__(self, path: Path, schema: Schema) -> None:
        with reading(path):
            remote = remote_files.is_remote(path)
            self._raw = remote_files.open_input(path) if remote else pa.memory_map(str(path))
        try:
            with reading(path):
                self._file = pa.ipc.open_file(self._raw)
            self._begin(path, schema, self._file.schema, self._file.num_record_batches)
        except BaseException:
            self.close()
            raise
        self._size = self._raw.size()

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return ranges of record batches of about `target_bytes`."""
        count = len(self._chunks)
        step = max(1, count * target_bytes // max(1, self._size))
        return [(start, min(count, start + step)) for start in range(0, count, step)]

    def narrow(self, start: int, stop: int) -> None:
        """Read only these record batches."""
        self.first = 1 + sum(map(self._rows_in, range(start)))
        self._chunks = range(start, stop)

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield the record batches."""
        passed = itertools.chain([self._passed], itertools.repeat(0))
        for number, skipped in zip(list(self._chunks), passed, strict=False):
            rows = self._batch(number)
            if rows.num_rows > skipped:
                rest = rows.slice(skipped)
                columns = [rest.column(place) for place in self._places]
                yield self._piece(columns, self._size * (number + 1) // self._count)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _rows_in(self, chunk: int) -> int:
        rows: int = self._batch(chunk).num_rows
        return rows

    def _batch(self, number: int) -> pa.RecordBatch:
        with reading(self._path):
            return self._file.get_batch(number)


class TableRows(ArrowRows):
    """A table in memory."""

    def __init__(self, table: pa.Table, schema: Schema, name: str) -> None:
        """`name` is what messages call it."""
        self._parts = table.to_batches(max_chunksize=_BATCH_ROWS)
        self._begin(Path(name), schema, table.schema, len(self._parts))
        self._size = table.nbytes

    def close(self) -> None:
        """Do nothing."""

    def _batch(self, number: int) -> pa.RecordBatch:
        return self._parts[number]
