"""Text files of rows: tab- or comma-separated, with or without a header, plain, .gz or .zst."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

import oe_runtime._core as _core
from oe_runtime.data.rows import Piece
from oe_runtime.data.schema import COLUMNS, Batch, column_places
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

# Large enough for vectorised work, small enough to stay in a core's cache.
BLOCK_BYTES = 2 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BOM = b"\xef\xbb\xbf"


class TextFile:
    """An open text file; rows are its lines after the header. Lines end in LF or CRLF."""

    unit = "line"

    def __init__(self, path: Path, cardinalities: Sequence[int], commas: bool) -> None:
        self._path = path
        try:
            self._raw = remote_files.open_input(path)
            codec = _CODECS.get(path.suffix)
            self._stream = pa.CompressedInputStream(self._raw, codec) if codec else self._raw
        except OSError as error:
            raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
        try:
            self._stop: int | None = None  # the byte after which no line begins
            self._ended = False  # whether that was reached
            head = self._read()
            self._head = head.removeprefix(_BOM)
            line = self._head[: _core.MAX_LINE_BYTES].split(b"\n", 1)[0].rstrip(b"\r")
            # Many .csv files are tab-separated.
            delimiter = "," if commas and not (b"\t" in line and b"," not in line) else "\t"
            self._layout, header = _layout(path, line, delimiter, cardinalities)
        except BaseException:
            self.close()
            raise
        self._begin = len(head) - len(self._head)  # of the lines that are rows
        self.first = 1
        if header:
            self.skip(1)
            self._begin = len(head) - len(self._head)
            self.first = 2

    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return byte ranges of a plain file; a compressed one is one part."""
        size = self._raw.size()
        step = target_bytes if self._stream is self._raw else max(1, size)
        return [(start, min(size, start + step)) for start in range(0, size, step)]

    def narrow(self, start: int, stop: int) -> None:
        """Read only the lines that begin in these bytes; messages count from there."""
        if self._stream is not self._raw:
            return
        self._head = b""
        self._stop = stop
        self._ended = stop <= self._begin
        if start <= self._begin:
            self._raw.seek(self._begin)
        else:
            self._raw.seek(start - 1)
            self.skip(1)  # the rest of the previous part's last line; nothing if that ends here
            self.unit, self.first = f"after byte {start}, line", 1

    def skip(self, count: int) -> int:
        """Skip `count` lines by their ends, ten times as fast as parsing them."""
        passed = 0
        ended = True  # whether the last skipped line was complete
        while passed < count and (data := self._take()):
            newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            if passed + len(newlines) >= count:
                self._head = data[int(newlines[count - passed - 1]) + 1 :]
                return count
            passed += len(newlines)
            ended = data.endswith(b"\n")
        return passed + (not ended)

    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield blocks of whole lines."""
        rest: list[bytes | memoryview] = []  # the start of a line
        length = 0
        while data := self._take():
            cut = data.rfind(b"\n") + 1
            if cut:
                yield self._piece(b"".join((*rest, memoryview(data)[:cut])))
                rest, length = [], 0
            # Keep only enough of an endless line for the parser to see that it is too long.
            if length <= _core.MAX_LINE_BYTES:
                rest.append(memoryview(data)[cut:])
                length += len(data) - cut
        if length:
            yield self._piece(b"".join(rest))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()

    def _piece(self, lines: bytes) -> Callable[[], Piece]:
        return functools.partial(_parse, self._layout, lines, self._raw.tell())

    def _take(self) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._read()

    def _read(self) -> bytes:
        try:
            if self._stop is None:
                data: bytes = self._stream.read(BLOCK_BYTES)
                return data
            return self._read_until(self._stop)
        except OSError as error:
            raise DataError(f"cannot read {self._path}: {remote_files.reason(error)}") from error

    def _read_until(self, stop: int) -> bytes:
        """Return the next block; the last one ends with the line that contains the byte before `stop`."""
        left = stop - self._raw.tell()
        if self._ended:
            return b""
        data: bytes = self._raw.read(min(left, BLOCK_BYTES) if left > 0 else BLOCK_BYTES)
        if left > 0:
            self._ended = left <= BLOCK_BYTES and data.endswith(b"\n")
        elif end := data.find(b"\n") + 1:
            self._ended = True
            data = data[:end]
        return data


def _parse(layout: _core.CriteoLayout, lines: bytes, read: int) -> Piece:
    labels, dense, ids, broken = layout.parse(lines)
    return Piece(Batch(dense, ids, labels), broken, read)


def _layout(
    path: Path, line: bytes, delimiter: str, cardinalities: Sequence[int]
) -> tuple[_core.CriteoLayout, bool]:
    """Return the layout of the file's lines, and whether the first one is a header."""
    quotes = delimiter == ","
    plain = _core.CriteoLayout(delimiter, quotes, len(COLUMNS), range(len(COLUMNS)), cardinalities)
    names = [field.decode("latin-1").strip() for field in plain.split(line)]
    known = {name.lower() for name in COLUMNS}
    if sum(name.lower() in known for name in names) < len(COLUMNS) // 2:
        return plain, False
    places = column_places(f"the header of {path}", names)
    return _core.CriteoLayout(delimiter, quotes, len(names), places, cardinalities), True
