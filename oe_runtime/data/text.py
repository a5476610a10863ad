"""Text files of rows: fields between tabs, commas or another byte; plain, .gz .zst; with a header or not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import oe_runtime._core as _core
from oe_runtime.data.batch import Batch
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.rows import Piece, RowFile, reading, scaled
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

# Large enough for vectorised work, small enough to stay in a core's cache.
BLOCK_BYTES = 2 << 20
CODECS = {".gz": "gzip", ".zst": "zstd"}
_DOUBTED_BYTES = 64 << 10  # at the beginning of a file
QUOTED = re.compile(rb'"([^"]|"")*"')
# What pandas, Spark and others write of integers beside missing values, and of booleans; and of integers.
_TYPED = re.compile(rb"-?[0-9]+\.0+|-?[0-9](\.[0-9]+)?[eE]\+?[0-9]+|[Tt]rue|TRUE|[Ff]alse|FALSE")
_TYPED_OR_INTEGER = re.compile(rb"-?[0-9]+|" + _TYPED.pattern)
BOM = b"\xef\xbb\xbf"
_ENCODINGS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
# First bytes of files that are sometimes named as text.
_OTHERS = (
    (b"PK\x03\x04", "a zip or Excel file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"PAR1\x15", "a Parquet file"),
    (b"ARROW1\0\0", "an Arrow file"),
)


class TextFile(RowFile):
    """An open text file; rows are its lines after the header. Lines end in LF or CRLF."""

    unit = "line"

    def __init__(self, path: Path, schema: Schema, commas: bool, pipe: Any = None) -> None:
        """`pipe` is read instead of the file if it is given: an object with `read`, `tell` and `close`."""
        self._path = path
        self.is_pipe = pipe is not None
        with reading(path):
            self._raw, self._stream = open_text(path) if pipe is None else (pipe, pipe)
        try:
            self._stop: int | None = None  # the byte after which no line begins
            self._ended = False  # whether that was reached
            head = self._read()
            while b"\n" not in head and 0 < len(head) < BLOCK_BYTES and (more := self._read()):
                head += more  # a pipe gives a part of a line
            check_encoding(path, head)
            self._head = head.removeprefix(BOM)
            line = self._head[: _core.MAX_LINE_BYTES].split(b"\n", 1)[0].rstrip(b"\r")
            self._form = _begin(path, line, commas, schema) if head else _NO_LINES
        except BaseException:
            self.close()
            raise
        self._begin = len(head) - len(self._head)  # of the lines that are rows
        if self._form.header:
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

    def doubts(self) -> dict[str, str]:
        """See RowFile."""
        head = self._head
        if self.is_pipe and b"\n" in head:
            head = head[: head.rfind(b"\n")]  # what has come may end within a value
        return _doubts(self._form, head)

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
        return functools.partial(_parse, self._form.layout, lines, self._raw.tell())

    def _take(self) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return self._read()

    def _read(self) -> bytes:
        with reading(self._path):
            if self._stop is None:
                data: bytes = self._stream.read(BLOCK_BYTES)
                return data
            return self._read_until(self._stop)

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


def open_text(path: Path) -> tuple[pa.NativeFile, pa.NativeFile]:
    """Return an open file, and its text: the file itself if it is not compressed. Raises OSError."""
    raw = remote_files.open_input(path)
    codec = CODECS.get(path.suffix.lower())
    return raw, pa.CompressedInputStream(raw, codec) if codec else raw


def check_encoding(path: Path, head: bytes) -> None:
    """Raise DataError for bytes that begin a file of another kind than lines of UTF-8 that end in LF."""
    if what := next((what for magic, what in _OTHERS if head.startswith(magic)), ""):
        raise DataError(f"{path} is {what}, not a text file; name it so, or save it as CSV")
    encoding = next((name for mark, name in _ENCODINGS if head.startswith(mark)), "")
    if not encoding and head[:64].count(0) >= len(head[:64]) // 4 > 0:  # without a mark
        encoding = "UTF-16"
    if encoding:
        raise DataError(
            f"{path} is text in {encoding}, expected UTF-8; save it as UTF-8, or convert it: "
            f"iconv -f {encoding} -t UTF-8"
        )
    if b"\n" not in head and b"\r" in head.rstrip(b"\r"):
        raise DataError(
            f"{path}: its lines end in CR alone, expected LF or CRLF; convert it: tr '\\r' '\\n' <FILE >NEW"
        )


def _parse(layout: _core.TextLayout, lines: bytes, read: int) -> Piece:
    labels, dense, ids, weights, broken = layout.parse(lines)
    return Piece(Batch(dense, ids, labels, weights), broken, read)


class _Form(NamedTuple):
    """How a file's lines are divided."""

    layout: _core.TextLayout
    header: bool  # whether the first line is one
    unquoted: bool  # whether double quotes are part of values, and nobody has said so
    missing: frozenset[bytes]  # words, and nothing
    unsaid: Mapping[str, int]  # places of the categories of which nobody has said whether they are integers


_NO_LINES = _Form(_core.TextLayout("\t", False, 1, 0, [], []), False, False, frozenset(), {})


def _doubts(form: _Form, text: bytes) -> dict[str, str]:
    """See RowFile; the text begins with the first row."""
    lines = text[:_DOUBTED_BYTES].split(b"\n")
    if len(text) > _DOUBTED_BYTES:
        lines.pop()  # a part of a line
    rows = [form.layout.split(line.rstrip(b"\r")) for line in lines]
    found = {}
    if form.unquoted and (
        quoted := next((one for row in rows for one in row if QUOTED.fullmatch(one)), None)
    ):
        found[""] = (
            f"fields such as {quoted.decode('utf-8', 'replace'):.20} stand in quotes, which are read as part "
            "of them; set quotes: true in the schema, or quotes: false if they are meant"
        )
    for name, place in form.unsaid.items():
        fields = (row[place] for row in rows if len(row) > place)
        if odd := typed_value(one for one in fields if one not in form.missing):
            found[name] = (
                f"the category {name} has values such as {odd.decode()}, and other formats would have "
                f"{_typed_text(odd)}, which has another id; set whole: true for it in the schema, "
                "or whole: false to keep these ids"
            )
    return found


def guessed_separator(line: bytes, commas: bool) -> str:
    """Return what is between fields if no schema says it; `commas`: the file's name says commas."""
    # Many .csv files are tab-separated.
    return "," if commas and not (b"\t" in line and b"," not in line) else "\t"


def has_quotes(separator: str) -> bool:
    """Return whether fields may stand in double quotes if no schema says it."""
    return separator in (",", ";")


def typed_value(values: Iterator[bytes]) -> bytes:
    """Return the first value that other formats would have otherwise; none if some value is a text."""
    found = b""
    for value in values:
        if not _TYPED_OR_INTEGER.fullmatch(value):
            return b""
        found = found or (value if _typed_text(value) else b"")
    return found


def _typed_text(value: bytes) -> str:
    """Return the text of the integer or boolean that a value may have been; none if it is written so."""
    number = _core.parse_number(value) if _TYPED.fullmatch(value) else None
    if number is None or not number.is_integer() or abs(number) >= 2**63:
        return ""
    return str(int(number))


def _begin(path: Path, line: bytes, commas: bool, schema: Schema) -> _Form:
    """Return the form of lines of which this is the first."""
    return _layout(path, line, schema.separator or guessed_separator(line, commas), schema)


def _layout(path: Path, line: bytes, delimiter: str, schema: Schema) -> _Form:
    quotes = has_quotes(delimiter) if schema.quotes is None else schema.quotes
    plain = _core.TextLayout(delimiter, quotes, 1, 0, [], [])
    names = [field.decode("utf-8", "replace").strip() for field in plain.split(line)]
    header = schema.header
    if header is None:
        known = {name.lower() for name in schema.names}
        found = len(known & {name.lower() for name in names})
        header = not schema.columns or found >= len(known) // 2
    if not header:
        names = list(schema.columns)
    elif not line:
        raise DataError(f"{path}: its first line is empty, expected a header")
    places = schema.places(f"the header of {path}", names)
    numbers = [
        (place, one.name, one.whole, *one.factors, float(scaled(np.array([one.missing]), one)[0]))
        for place, one in zip(places[1:], schema.numbers, strict=False)
    ]
    categories = [
        (
            place,
            one.name,
            one.cardinality,
            one.separator,
            one.length,
            one.padding == "before",
            one.keep == "last",
            bool(one.whole),
        )
        for place, one in zip(places[1 + len(numbers) :], schema.categories, strict=False)
    ]
    weight = places[-1] if schema.weight else None
    words = schema.positive, schema.missing
    layout = _core.TextLayout(delimiter, quotes, len(names), places[0], numbers, categories, weight, *words)
    unsaid = {
        one.name: place
        for place, one in zip(places[1 + len(numbers) :], schema.categories, strict=False)
        if one.whole is None and not one.several
    }
    missing = frozenset((b"", *(word.encode() for word in schema.missing)))
    return _Form(layout, header, not quotes and schema.quotes is None, missing, unsaid)
