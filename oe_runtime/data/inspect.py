"""Propose a schema for a file: what its columns seem to be, from a sample of its rows.

    python -m oe_runtime.data.inspect [--label COLUMN] [--rows N] FILE

Prints YAML with a comment per column: distinct values, missing share, range, what a table takes. Edit it and
give it to --schema. FILE may be a directory or a glob; its first file is read.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from oe_runtime.data import open_source, row_schema
from oe_runtime.data.columns import can_be_read
from oe_runtime.data.criteo import file_kind, find_files
from oe_runtime.data.schema import COLUMNS
from oe_runtime.data.text import CODECS
from oe_runtime.errors import DataError, OeError
from oe_runtime.support import interrupt, remote_files

ROWS = 100_000
WIDTHS = (9, 16, 64, 128)
_MOST_BYTES = 256 << 20
_SEPARATORS = "\t,;|\x01 "
_LABELS = ("label", "click", "clicked", "target", "y", "is_click", "converted", "conversion", "bought")
_CATEGORY = re.compile(
    r"^c\d+$|(^|_)(id|ids|ip|type|cat|category|code|zip|hash|hour|day|weekday|pos|model|domain|site|device)($|_)",
    re.I,
)
_ABSENT = ("NA", "N/A", "n/a", "NaN", "nan", "\\N", "NULL", "null", "None", "?", "-")  # among numbers
_YES = ("1", "yes", "y", "true", "t", "click", "clicked", "positive", "+")
_STATES = 2  # a row and adagrad's state of it


@dataclass
class Sample:
    """The first rows of a file as texts; several values of a field are a list."""

    names: list[str]
    rows: list[Sequence[Any]]
    separator: str = ""  # of text files
    header: bool = True
    more: bool = False  # whether the file has more rows
    unread: Mapping[str, str] = field(default_factory=dict)  # types that no schema reads, by column


@dataclass
class Column:
    """What a column of the sample has."""

    name: str
    values: Counter[str]
    rows: int
    missing: int
    separator: str = ""  # of several values
    length: int = 1

    @property
    def floats(self) -> list[float] | None:
        """The distinct values as numbers, if all are."""
        try:
            found = [float(value) for value in self.values]
        except ValueError:
            return None
        return found if found and all(map(math.isfinite, found)) else None

    @property
    def estimate(self) -> int:
        """Distinct values of the whole: those seen and, by Chao's estimator, those not yet seen."""
        seen = len(self.values)
        once = sum(count == 1 for count in self.values.values())
        twice = sum(count == 2 for count in self.values.values())
        return seen + once * (once - 1) // (2 * (twice + 1))

    @property
    def cardinality(self) -> int:
        """A size for its table: a fifth above the estimate, with two leading digits."""
        wanted = max(10, math.ceil(self.estimate * 1.2))
        step: int = 10 ** (len(str(wanted)) - 2)
        return -(-wanted // step) * step


def read_sample(path: Path, most: int) -> Sample:
    """Return up to `most` rows. Raises DataError."""
    kind = file_kind(path) or "tabs"
    if kind in ("parquet", "arrow"):
        return _of_arrow(path, kind, most)
    if kind == "tfrecord":
        return _of_records(path, most)
    return _of_text(path, most)


def _of_text(path: Path, most: int) -> Sample:
    try:
        codec = CODECS.get(path.suffix.lower())
        with remote_files.open_input(path) as raw:
            stream = pa.CompressedInputStream(raw, codec) if codec else raw
            text = stream.read(_MOST_BYTES)
            more = bool(stream.read(1))
    except OSError as error:
        raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
    lines = io.StringIO(text.decode("utf-8", "replace").removeprefix("\ufeff"), newline="")
    first = lines.readline().rstrip("\r\n")
    if not first:
        raise DataError(f"{path} is empty: it has no row")
    lines.seek(0)
    separator = max(_SEPARATORS, key=lambda one: (first.count(one), -_SEPARATORS.index(one)))
    quoted = csv.reader(lines, delimiter=separator)
    plain = csv.reader(lines, delimiter=separator, quoting=csv.QUOTE_NONE)
    try:
        rows: list[Sequence[Any]] = list(itertools.islice(quoted if separator in ",;" else plain, most + 2))
    except csv.Error as error:
        raise DataError(f"{path}: {error}") from error
    head = [name.strip() for name in rows[0]]
    header = not any(_is_number(name) or not name for name in head)
    if twice := [name for name, count in Counter(head).items() if header and count > 1]:
        raise DataError(f"{path}: its first line has {twice[0]} twice; give each column a name of its own")
    names = head if header else list(COLUMNS)
    if not header and len(head) != len(COLUMNS):
        names = [f"c{place}" for place in range(1, len(head) + 1)]
    rows = [row for row in rows[header : header + most] if len(row) == len(names)]
    return Sample(names, rows, separator, header, more or len(rows) == most)


def _of_arrow(path: Path, kind: str, most: int) -> Sample:
    import pyarrow.parquet as pq

    try:
        if kind == "parquet":
            with remote_files.open_input(path) as raw, pq.ParquetFile(raw) as file:
                batches = list(itertools.islice(file.iter_batches(most), 1))
                total, schema = file.metadata.num_rows, file.schema_arrow
        else:
            with remote_files.open_input(path) as raw:
                read = pa.ipc.open_file(raw)
                batches, total, schema = [], 0, read.schema
                for number in range(read.num_record_batches):
                    if total <= most:
                        batches.append(read.get_batch(number))
                        total += batches[-1].num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read {path}: {remote_files.reason(error)}") from error
    table = pa.Table.from_batches(batches, schema).slice(0, most)
    columns = [map(_text, column.to_pylist()) for column in table.columns]
    unread = {one.name: str(one.type) for one in table.schema if not can_be_read(one.type)}
    rows: list[Sequence[Any]] = list(zip(*columns, strict=True))
    return Sample(table.column_names, rows, more=total > table.num_rows, unread=unread)


def _of_records(path: Path, most: int) -> Sample:
    from oe_runtime.support.tensorflow_noise import without_noise

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with without_noise():
            import tensorflow as tf
    except ImportError:
        raise DataError(
            f"{path} is a TFRecord file, which TensorFlow reads: pip install tensorflow"
        ) from None
    records = tf.data.TFRecordDataset(
        str(path), compression_type="GZIP" if path.suffix.lower() == ".gz" else ""
    )
    found = []
    try:
        for record in records.take(min(most, 10_000)):
            features = tf.train.Example.FromString(record.numpy()).features.feature
            row = {}
            for name, feature in features.items():
                kind = feature.WhichOneof("kind")
                values = list(getattr(feature, kind).value) if kind else []
                row[name] = _text(values if len(values) > 1 else (values or [None])[0])
            found.append(row)
    except Exception as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]:.200}") from error
    names = list(dict.fromkeys(name for row in found for name in row))
    return Sample(names, [[row.get(name, "") for name in names] for row in found], more=len(found) >= most)


def _text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_text(one) for one in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, (bool, float)) and value == int(value) else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def examine(name: str, fields: Sequence[Any]) -> Column:
    """Return what a column has; fields of several values count each."""
    missing = sum(not field for field in fields)
    there = [field for field in fields if field]
    separator, pieces = _divided(there)
    if pieces is None:
        return Column(name, Counter(there), len(fields), missing)
    longest = sorted(map(len, pieces))[len(pieces) * 99 // 100]
    values = Counter(itertools.chain.from_iterable(pieces))
    return Column(name, values, len(fields), missing, separator, max(2, longest))


def _divided(fields: Sequence[Any]) -> tuple[str, list[list[str]] | None]:
    """Return the separator and pieces of a column of several values, whose pieces come again and again."""
    if any(isinstance(field, list) for field in fields):
        return row_schema.SEPARATOR, [one if isinstance(one, list) else [one] for one in fields]
    distinct = len(set(fields))
    for separator in "|;, ":
        pieces = [[one for one in field.split(separator) if one] for field in fields]
        count = sum(map(len, pieces))
        if count > 1.2 * len(fields) and len({one for row in pieces for one in row}) < max(2, distinct // 2):
            return separator, pieces
    return "", None


def propose(path: Path, sample: Sample, label: str | None) -> str:
    """Return the schema as YAML with comments. Raises DataError without a label."""
    if not sample.rows:
        raise DataError(
            f"{path}: no row of the sample has {len(sample.names)} columns, as the first line has"
        )
    fields = list(zip(*sample.rows, strict=True))
    absent = sorted({word for values in fields for word in _absent(values)})
    if absent:
        fields = [tuple("" if value in absent else value for value in values) for values in fields]
    columns = {name: examine(name, list(values)) for name, values in zip(sample.names, fields, strict=True)}
    chosen = _label(path, columns, label)
    rest = [one for one in columns.values() if one is not chosen and one.name not in sample.unread]
    ignored = [one for one in rest if _is_key(one)]
    numbers = [one for one in rest if one not in ignored and _is_amount(one)]
    categories = [one for one in rest if one not in ignored and one not in numbers]
    lines = [
        f"# {path.name}: {len(sample.rows):,} rows" + (" of its beginning." if sample.more else "."),
        f"label: {_word(chosen.name)}  # {_rate(chosen)}",
    ]
    if not set(chosen.values) <= {"0", "1"}:
        positive = _positive(chosen)
        others = ", ".join(value for value in chosen.values if value != positive)
        lines.append(f"positive: {_quoted(positive)}  # {others} is 0")
    if absent:
        lines.append(f"missing: [{', '.join(map(_quoted, absent))}]")
    for title, part, describe in (
        ("numbers", numbers, _number_line),
        ("categories", categories, _category_line),
    ):
        if part:
            lines += [f"{title}:", *map(describe, part)]
    if ignored or sample.unread:
        lines.append("ignored:")
        lines += [f"  - {_word(one.name)}  # as many values as rows: a key?" for one in ignored]
        lines += [
            f"  - {_word(name)}  # its type, {kind}, is not read" for name, kind in sample.unread.items()
        ]
    if not sample.header:
        lines.append("header: false")
        names = ", ".join(map(_word, sample.names))
        lines.append(f"columns: [{names}]  # in their order")
    usual = "\t" if file_kind(path) in (None, "tabs") else ","
    if sample.separator and sample.separator not in (usual, "\t"):
        lines.append(f"separator: {_word(sample.separator)}")
    if categories:
        rows = sum(one.cardinality + 1 for one in categories)
        sizes = ", ".join(f"{width}: {_size(rows * width)}" for width in WIDTHS)
        lines.append(f"# All tables have {rows:,} rows; with adagrad's state they take, by --dim, {sizes}.")
    return "\n".join(lines) + "\n"


def _label(path: Path, columns: dict[str, Column], name: str | None) -> Column:
    if name is not None:
        found = {one.lower(): column for one, column in columns.items()}.get(name.lower())
        if found is None:
            near = ", ".join(columns)
            raise DataError(f"{path} has no column {name}; it has {near:.400}")
        if not _is_label(found):
            shown = ", ".join(f"'{value:.20}'" for value in list(found.values)[:3])
            raise DataError(f"{path}: column {found.name} has the values {shown}; a label has two")
        return found
    named = [columns[one] for one in columns if one.lower() in _LABELS]
    fitting = [one for one in (*named, *columns.values()) if one.values and set(one.values) <= {"0", "1"}]
    fitting = fitting or [one for one in named if _is_label(one)]
    if not fitting:
        raise DataError(f"{path} has no column of 0 and 1, which could be the label; name it with --label")
    return fitting[0]


def _is_label(column: Column) -> bool:
    """Whether its values are 0 and 1, or two others."""
    return not column.separator and (set(column.values) <= {"0", "1"} or len(column.values) == 2)


def _positive(label: Column) -> str:
    """Return the value that means 1: by its word, or the rarer one."""
    if set(label.values) <= {"0", "1"}:
        return "1"
    by_word = [value for value in label.values if value.lower() in _YES]
    if not by_word and (numbers := label.floats):
        return max(label.values, key=float) if len(set(numbers)) > 1 else next(iter(label.values))
    return by_word[0] if len(by_word) == 1 else min(label.values, key=lambda one: (label.values[one], one))


def _absent(values: Sequence[Any]) -> set[str]:
    """Return the words for missing values in a column whose other values are numbers."""
    found = {value for value in values if isinstance(value, str) and value}
    words = found.intersection(_ABSENT)
    return words if words and found != words and all(map(_is_finite, found - words)) else set()


def _is_finite(text: str) -> bool:
    return _is_number(text) and math.isfinite(float(text))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # which is YAML


def _rate(label: Column) -> str:
    ones = label.values[_positive(label)]
    if len(label.values) == 1:
        return (
            f"it is {next(iter(label.values))} in all {label.rows:,} rows: there is nothing to learn from it"
        )
    return f"{_positive(label)} in {ones / label.rows:.2%} of the rows" + (
        f", {_missing(label)}" if label.missing else ""
    )


def _is_key(one: Column) -> bool:
    """Whether each row has a value of its own."""
    floats = one.floats
    fractions = floats is not None and any(value != int(value) for value in floats)
    return not one.separator and not fractions and len(one.values) == one.rows > 100


def _is_amount(one: Column) -> bool:
    if one.separator or (floats := one.floats) is None:
        return False
    return any(value != int(value) for value in floats) or not _CATEGORY.search(one.name)


def _number_line(one: Column) -> str:
    counts = list(one.values.items())
    total = sum(count for _, count in counts)
    mean = sum(float(value) * count for value, count in counts) / total
    variance = sum((float(value) - mean) ** 2 * count for value, count in counts) / total
    low, high = min(one.floats or [0.0]), max(one.floats or [0.0])
    if low >= 0 and high <= 1:
        scale = "none"
    elif (low >= 0 and high > 20 * mean) or variance == 0:
        scale = "log1p"
    else:
        scale = f"{{scale: standard, mean: {mean:.6g}, deviation: {math.sqrt(variance):.6g}}}"
    return f"  {_word(one.name)}: {scale}  # {low:g} to {high:g}, mean {mean:.4g}, {_missing(one)}"


def _category_line(one: Column) -> str:
    value: Any = one.cardinality
    if one.separator:
        separator = _word(one.separator)
        value = f"{{cardinality: {one.cardinality}, separator: {separator}, length: {one.length}}}"
    seen = f"{len(one.values):,} distinct"
    if one.estimate > 1.05 * len(one.values):
        seen += f", about {one.estimate:,} in all"
    size = ", ".join(f"{width}: {_size(one.cardinality * width)}" for width in WIDTHS)
    return f"  {_word(one.name)}: {value}  # {seen}, {_missing(one)}; table by --dim {size}"


def _missing(one: Column) -> str:
    return f"{one.missing / one.rows:.2%} missing" if one.missing else "none missing"


def _size(floats: int) -> str:
    size = float(floats * 4 * _STATES)
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB"


def _word(text: str) -> str:
    """Return a text as YAML has it, in flow style too."""
    found: str = yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=10**6)
    return found.strip()[1:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the proposal; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.data.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--label", metavar="COLUMN", help="the label, if it is not found")
    parser.add_argument(
        "--rows", type=int, default=ROWS, metavar="N", help=f"rows to read (default {ROWS:,})"
    )
    parser.add_argument("data", metavar="FILE")
    given = parser.parse_args(argv)
    try:
        path = find_files(given.data)[0]
        text = propose(path, read_sample(path, max(1, given.rows)), given.label)
        print(text, end="")
        schema = row_schema.parse(yaml.safe_load(text), "the proposal")
        open_source(str(path), max_bad_rows=0, schema=schema).check()
    except OeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
