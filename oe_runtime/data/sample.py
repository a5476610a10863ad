"""A sample of the rows of files, as texts, and how text files divide their lines: what `inspect` looks at.

It is not how training reads files: the form of text files, which a schema gives there, is guessed here.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import oe_runtime._core as _core
from oe_runtime.data.columns import can_be, hashed_texts
from oe_runtime.data.criteo import COLUMNS
from oe_runtime.data.files import file_kind
from oe_runtime.data.row_schema import column_names
from oe_runtime.data.rows import reading
from oe_runtime.data.text import BOM, QUOTED, check_encoding, guessed_separator, has_quotes, open_text
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

ABSENT = ("NA", "N/A", "n/a", "NaN", "nan", "\\N", "NULL", "null", "None", "?", "-")  # among numbers
_MOST_FILES = 100
_SPREAD = 8  # files, from the first to the last one, that share the rows
_MOST_BYTES = 64 << 20  # of all files together; as texts they take 20 to 30 times as much
_BLOCK_BYTES = 4 << 20
_MOST_RECORDS = 10_000
_SEPARATORS = "\t,;|\x01 "
_GUESSED_LINES = 2000  # from which separators and headers are guessed
_LONE_COMMA = re.compile(rb"(?<![0-9]),|,(?![0-9])")
_BATCH_ROWS = 1024


@dataclass
class Sample:
    """Rows of some files as texts; several values of a field are a list."""

    columns: dict[str, list[Any]]  # fields by column; "" where missing
    files: dict[Path, int]  # rows by file
    more: bool  # whether there are other rows
    separator: str = ""  # of text files
    quotes: bool = False  # of text files
    header: bool = True
    # Whether columns can be numbers, and categories, by their type.
    can_be: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)  # why columns are not read, by name

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(self.files.values())


class _Part(NamedTuple):
    """Rows of one file."""

    path: Path
    names: list[str]
    columns: Sequence[Sequence[Any]]
    rows: int
    more: bool
    kinds: Sequence[str | tuple[bool, bool]]  # what each column can be; a type that is not read


def is_number(text: str) -> bool:
    """Return whether the trainer reads a text as a number."""
    return _core.parse_number(text) is not None


def read_sample(
    files: Sequence[Path],
    most: int,
    label: str | None = None,
    wanted: Sequence[Path] = (),
    max_bad_rows: int = 0,
) -> Sample:
    """Return about `most` rows: of some files, from the first to the last one, and of each of the `wanted`.

    A first line of text with `label` in it has names. Raises DataError.
    """
    parts: list[_Part] = []
    texts: list[_Lines] = []
    left, seen = most, 0  # rows, and files with rows
    order = [*wanted, *(path for path in _spread(files) if path not in wanted)][:_MOST_FILES]
    most_bytes = _MOST_BYTES // min(_SPREAD, len(order))
    for number, path in enumerate(order):
        share = max(1, left // max(1, min(_SPREAD - seen, len(order) - number)))
        kind = file_kind(path) or "tabs"
        if kind in ("tabs", "commas"):
            text = _first_lines(path, share, most_bytes)
            texts += [text] if text.lines else []
            rows = len(text.lines) - 1
        else:
            parts.append(
                _sample_records(path, share)
                if kind == "tfrecord"
                else _sample_columns(path, kind, share, most_bytes)
            )
            rows = parts[-1].rows
        seen += rows > 0
        left -= max(0, rows)
        if left <= 0 and number + 1 >= len(wanted):
            break
    form = _LineForm()
    if texts:
        form, divided = _divide(texts, label, max_bad_rows)
        parts += divided
    found = sorted((part for part in parts if part.rows), key=lambda part: files.index(part.path))
    if not found and texts:
        raise DataError(
            f"{texts[0].path}: no row of the sample has {len(parts[-1].names)} columns, as the first line has"
        )
    if not found:
        raise DataError(f"{order[0]} is empty: it has no row")
    columns, can, unread = _merged(found)
    more = any(part.more for part in found) or len(order) < len(files)
    rows_of = {part.path: part.rows for part in found}
    return Sample(columns, rows_of, more, form.separator, form.quotes, form.header, can, unread)


def _spread(files: Sequence[Path]) -> list[Path]:
    """Return the files, beginning with some from the first to the last one."""
    last = len(files) - 1
    first = [files[last * place // (_SPREAD - 1)] for place in range(_SPREAD)]
    return list(dict.fromkeys((*first, *files)))


def _merged(
    parts: Sequence[_Part],
) -> tuple[dict[str, list[Any]], dict[str, tuple[bool, bool]], dict[str, str]]:
    """Return the columns of all parts, by name in any case; what each can be; why some are not read."""
    names: dict[str, str] = {}
    for name in itertools.chain.from_iterable(part.names for part in parts):
        names.setdefault(name.lower(), name)
    columns: dict[str, list[Any]] = {name: [] for name in names.values()}
    can = dict.fromkeys(columns, (True, True))
    unread: dict[str, str] = {}
    for part in parts:
        places: dict[str, list[int]] = {}
        for place, name in enumerate(part.names):
            places.setdefault(name.lower(), []).append(place)
        for key, name in names.items():
            mine = places.get(key, [])
            if len(mine) != 1:
                has = f"has {len(mine)} columns of this name, in any case" if mine else "lacks it"
                unread.setdefault(name, f"{part.path.name} {has}")
                continue
            kind = part.kinds[mine[0]]
            if isinstance(kind, str):
                unread.setdefault(name, f"its type, {kind}, is not read")
                continue
            can[name] = can[name][0] and kind[0], can[name][1] and kind[1]
            columns[name] += part.columns[mine[0]]
    return {name: values for name, values in columns.items() if name not in unread}, can, unread


# ---- text


class _Lines(NamedTuple):
    """The first lines of a text file."""

    path: Path
    lines: list[bytes]  # without their ends; one more than rows, for a header
    more: bool


class _LineForm(NamedTuple):
    """How text files divide their lines."""

    separator: str = ""
    quotes: bool = False
    header: bool = True


def _first_lines(path: Path, rows: int, most_bytes: int) -> _Lines:
    blocks: list[bytes] = []
    size = ends = 0
    with reading(path):
        raw, stream = open_text(path)
        with raw:
            while size < most_bytes and ends < rows + 2 and (block := stream.read(_BLOCK_BYTES)):
                blocks.append(block)
                size += len(block)
                ends += block.count(b"\n")
            more = bool(stream.read(1))
    check_encoding(path, blocks[0] if blocks else b"")
    text = b"".join(blocks).removeprefix(BOM)
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n", rows + 1)]
    more |= len(lines) > rows + 1 and bool(lines[-1])
    if more or not lines[-1]:  # nothing after the last line end, a part of a line, or other lines
        lines.pop()
    if more and not lines:
        raise DataError(f"{path}: its first line has more than {size:,} bytes")
    return _Lines(path, lines, more)


def _divide(texts: Sequence[_Lines], label: str | None, max_bad_rows: int) -> tuple[_LineForm, list[_Part]]:
    """Return the form that text files have together, and their rows. Raises DataError."""
    usual = guessed_separator(texts[0].lines[0], commas=file_kind(texts[0].path) == "commas")
    separator, quotes = _separator(texts, usual)
    split = _splitter(separator, quotes)
    divided = [[split(line) for line in text.lines] for text in texts]
    count = len(divided[0][0])
    if sum(len(fields) != count for rows in divided for fields in rows) > max_bad_rows:
        for text in texts:
            _check_line_ends(text, separator)
    fields = [[[one.decode("utf-8", "replace") for one in row] for row in rows] for rows in divided]
    header = _has_header(fields, label)
    parts = []
    for text, rows in zip(texts, fields, strict=True):
        names = column_names(rows[0])
        if header:
            rows = rows[1:]
        else:
            rows = rows[: len(rows) - text.more]
            names = _default_names(count)
        good = [row for row in rows if len(row) == len(names)]
        columns: list[Sequence[Any]] = list(zip(*good, strict=True))
        parts.append(_Part(text.path, names, columns, len(good), text.more, [(True, True)] * len(names)))
    return _LineForm(separator, quotes, header), parts


def _default_names(count: int) -> list[str]:
    """Return names of columns without any: Criteo's, or c1 and so on."""
    return list(COLUMNS) if count == len(COLUMNS) else [f"c{place}" for place in range(1, count + 1)]


def _splitter(separator: str, quotes: bool) -> Callable[[bytes], list[bytes]]:
    """Return the trainer's function of a line; it returns nothing where a quote is not closed."""
    return _core.TextLayout(separator, quotes, 1, 0, [], []).split


class _Division(NamedTuple):
    """How well a separator divides lines: the best of several is the largest."""

    same: int  # lines of as many fields as the first one has
    fields: int
    is_usual: bool
    order: int  # of separators, from the last one
    separator: str
    quotes: bool


def _separator(texts: Sequence[_Lines], usual: str) -> tuple[str, bool]:
    """Return what is between the fields of lines, and whether those may stand in quotes."""
    each = max(20, _GUESSED_LINES // len(texts))
    lines = [line for text in texts for line in text.lines[:each]]
    with_quotes = (line for text in texts for line in text.lines[each:] if b'"' in line)
    lines += itertools.islice(with_quotes, _GUESSED_LINES)
    found = [
        _division(lines, separator, separator == usual, -order) for order, separator in enumerate(_SEPARATORS)
    ]
    best = [one for one in found if one.fields > 1] or [found[_SEPARATORS.index(usual)]]
    most = max(one.same for one in best)
    best = [one for one in best if one.same == most]
    # Numbers may have commas as points: 1,5;2,5.
    if {",", ";"} <= {one.separator for one in best} and not any(map(_LONE_COMMA.search, lines)):
        best = [one for one in best if one.separator != ","]
    return max(best)[-2:]


def _division(lines: Sequence[bytes], separator: str, is_usual: bool, order: int) -> _Division:
    quotes = has_quotes(separator)
    plain = [_splitter(separator, False)(line) for line in lines]
    same = sum(len(fields) == len(plain[0]) for fields in plain)
    found = _Division(same, len(plain[0]), is_usual, order, separator, quotes)
    if not any(b'"' in line for line in lines):
        return found
    rows = [_splitter(separator, True)(line) for line in lines]
    same_quoted = sum(len(fields) == len(rows[0]) for fields in rows)
    # Read without quotes, fields in quotes would have these in their values.
    needed = quotes or any(QUOTED.fullmatch(field) for fields in plain for field in fields)
    if not rows[0] or (same_quoted, needed) < (same, True):
        return found._replace(quotes=False)
    return found._replace(same=same_quoted, fields=len(rows[0]), quotes=True)


def _check_line_ends(text: _Lines, separator: str) -> None:
    """Raise DataError for a field in quotes that goes on in the next line: the trainer reads none."""
    if not any(b'"' in line for line in text.lines):
        return
    for delimiter in dict.fromkeys((separator, *_SEPARATORS)):
        lines = (line.decode("latin-1") + "\n" for line in text.lines)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        count = before = 0
        with contextlib.suppress(csv.Error):
            for row in reader:
                count = count or len(row)
                if len(row) == count > 1 and reader.line_num > before + 1:
                    raise DataError(
                        f"{text.path} line {before + 1}: a field in quotes goes on in the next line, which "
                        "is not read; replace the line ends in fields, or store the rows as Parquet"
                    )
                before = reader.line_num


def _has_header(files: Sequence[Sequence[Sequence[str]]], label: str | None) -> bool:
    """Return whether the first lines of files have names; `files` are their lines as fields."""
    longest = max(files, key=len)
    head = longest[0]
    if label is not None and label.strip().lower() in (name.lower() for name in column_names(head)):
        return True
    if label in _default_names(len(head)):
        return False
    # First lines of other files are names, too, if they have most of these.
    others = [rows[0] for rows in files if 2 * len(set(rows[0]) & set(head)) < len(set(head))]
    rest = (rows[1:_GUESSED_LINES] for rows in files)
    below = [row for rows in (others, *rest) for row in rows if len(row) == len(head)]
    return _is_header(head, list(zip(*below, strict=True)) if below else [()] * len(head))


def _is_header(head: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    """Return whether a line has names: words above numbers, or none of the values below them."""
    if len(head) > 2 and all(name == str(place) for place, name in enumerate(head)):
        return True  # pandas numbers columns without names
    columns = [(name.strip(), set(values) - {""}) for name, values in zip(head, below, strict=True)]
    if any(name in values and is_number(name) for name, values in columns):
        return False
    for name, values in columns:
        is_word = bool(name) and not is_number(name) and name not in ABSENT
        if is_word and values and all(is_number(value) or value in ABSENT for value in values):
            return True
    if any(name and name in values for name, values in columns):
        return False
    return any(head) and not any(is_number(name) for name in head)


# ---- files with types


def _sample_columns(path: Path, kind: str, most: int, most_bytes: int) -> _Part:
    import pyarrow.parquet as pq

    batches: list[pa.RecordBatch] = []
    rows = size = 0
    try:
        with remote_files.open_input(path) as raw:
            file = pq.ParquetFile(raw) if kind == "parquet" else pa.ipc.open_file(raw)
            schema: pa.Schema = file.schema_arrow if kind == "parquet" else file.schema
            kinds = [_column_kind(one.type) for one in schema]
            counts = Counter(schema.names)
            read = [
                name
                for name, one in zip(schema.names, kinds, strict=True)
                if counts[name] == 1 and not isinstance(one, str)
            ]
            found: Iterable[pa.RecordBatch] = (
                file.iter_batches(min(most, _BATCH_ROWS), columns=read)
                if kind == "parquet"
                else (file.get_batch(number) for number in range(file.num_record_batches))
            )
            for batch in found:
                batches.append(batch.select(read))
                rows += batch.num_rows
                size += batches[-1].nbytes
                if rows > most or size > most_bytes:
                    break
            more = rows > most or size > most_bytes
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
    columns = [
        [text for batch in batches for text in hashed_texts(batch.column(name))][:most]
        if name in read
        else []
        for name in schema.names
    ]
    return _Part(path, column_names(schema.names), columns, min(rows, most), more, kinds)


def _column_kind(kind: pa.DataType) -> str | tuple[bool, bool]:
    can = can_be(kind)
    return can if any(can) else str(kind)


def _sample_records(path: Path, most: int) -> _Part:
    from oe_runtime.data.tfrecord import import_tensorflow

    tf = import_tensorflow(path)
    zipped = path.suffix.lower() == ".gz"
    records = tf.data.TFRecordDataset(str(path), compression_type="GZIP" if zipped else "")
    most = min(most, _MOST_RECORDS)
    # float32 has no integers of more than 24 bits, and bytes are no numbers.
    allowed = {"float_list": (True, False), "bytes_list": (False, True)}
    found = []
    can: dict[str, tuple[bool, bool]] = {}
    try:
        for record in records.take(most + 1):
            features = tf.train.Example.FromString(record.numpy()).features.feature
            row = {}
            for name, feature in features.items():
                kind = feature.WhichOneof("kind")
                values = list(getattr(feature, kind).value) if kind else []
                if values:
                    can.setdefault(name, allowed.get(kind, (True, True)))
                texts = hashed_texts(pa.array(values))
                row[name] = texts if len(texts) > 1 else (texts or [""])[0]
            found.append(row)
    except Exception as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]:.200}") from error
    more, found = len(found) > most, found[:most]
    names = list(dict.fromkeys(name for row in found for name in row))
    columns = [[row.get(name, "") for row in found] for name in names]
    return _Part(
        path, column_names(names), columns, len(found), more, [can.get(name, (True, True)) for name in names]
    )
