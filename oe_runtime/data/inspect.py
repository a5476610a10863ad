"""Propose a schema for files: what their columns seem to be, from a sample of their rows.

    python -m oe_runtime.data.inspect [--label COLUMN] [--rows N] FILE

Prints YAML with a comment per column: distinct values, missing share, range, what a table takes. Edit it and
give it to --schema. FILE may be a directory or a glob; the rows are of several of its files.

The trainer's reader has read the sample, and the first rows of each file, with what is printed. A column that
it cannot read is listed under `ignored`, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

import oe_runtime._core as _core
from oe_runtime.data import open_source, row_schema
from oe_runtime.data.files import DataFiles, file_kind, open_file
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.sample import ABSENT, Sample, is_number, read_sample
from oe_runtime.data.text import has_quotes, typed_value
from oe_runtime.errors import DataError, OeError
from oe_runtime.support import interrupt, remote_files
from oe_runtime.support.argument_types import count

ROWS = 100_000
WIDTHS = (9, 16, 64, 128)
_LABELS = ("label", "click", "clicked", "target", "y", "is_click", "converted", "conversion", "bought")
_CATEGORY = re.compile(
    r"^c\d+$|(^|_)(id|ids|ip|type|cat|category|code|zip|hash|hour|day|weekday|pos|model|domain|site|device)($|_)",
    re.I,
)
_YES = ("1", "yes", "y", "true", "t", "click", "clicked", "positive", "+")
_STATES = 2  # a row and adagrad's state of it
_MOST_LENGTH = 4096  # values of a row
_MOST_SCALED = 1e15  # numbers beyond it are taken as logarithms
_MOST_KEY = 1000  # characters of a name in YAML
_REFUSALS = 8  # files outside the sample that change the proposal
_READERS = 8  # files read at the same time


@dataclass
class Column:
    """What a column of the sample has."""

    name: str
    values: Counter[str]
    rows: int
    missing: int
    separator: str = ""  # of several values
    length: int = 1
    number: bool = True  # whether its type can be a number's
    category: bool = True  # or a category's
    whole: bool = False  # whether its text must be read as integers, as that of other formats is

    @property
    def floats(self) -> list[float] | None:
        """The distinct values as numbers, if all are."""
        found = [_core.parse_number(value) for value in self.values]
        return [one for one in found if one is not None] if found and None not in found else None

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


def examine(name: str, fields: Sequence[Any]) -> Column:
    """Return what a column has; fields of several values count each."""
    missing = sum(not field for field in fields)
    there = [field for field in fields if field]
    separator, pieces = _divided(there)
    if pieces is None:
        return Column(name, Counter(there), len(fields), missing)
    longest = sorted(map(len, pieces))[len(pieces) * 99 // 100]
    values = Counter(itertools.chain.from_iterable(pieces))
    length = min(max(2, longest), _MOST_LENGTH)
    return Column(name, values, len(fields), missing, separator, length, number=False)


def _divided(fields: Sequence[Any]) -> tuple[str, list[list[str]] | None]:
    """Return the separator and pieces of a column of several values, whose pieces come again and again."""
    if any(isinstance(field, list) for field in fields):
        lists = [one if isinstance(one, list) else [one] for one in fields]
        return row_schema.SEPARATOR, [[value for value in one if value] for one in lists]
    distinct = set(fields)
    for separator in "|;, ":
        if not any(separator in field for field in distinct):
            continue
        pieces = [[one for one in field.split(separator) if one] for field in fields]
        count = sum(map(len, pieces))
        if count > 1.2 * len(fields) and len({one for row in pieces for one in row}) < max(
            2, len(distinct) // 2
        ):
            return separator, pieces
    return "", None


def propose(
    data: str, most: int = ROWS, label: str | None = None, max_bad_rows: int = 0
) -> tuple[str, Schema]:
    """Return a schema of the files `data`, as YAML with comments and as it is read.

    Raises DataError if there is no row, or no schema that reads all files but for `max_bad_rows` rows.
    """
    files = DataFiles(data).files
    wanted: list[Path] = []
    while True:
        sample = read_sample(files, most, label, wanted, max_bad_rows)
        found = _propose(data, sample, label, max_bad_rows)
        text = found.text()
        schema = row_schema.parse(yaml.safe_load(text), "the proposal")
        try:
            open_source(data, max_bad_rows=max_bad_rows, schema=schema).check()
        except DataError:
            # A file outside the sample has other columns or values: look at it, too.
            refusing = [
                path for path in files if path not in wanted and _problem(path, schema, 1, max_bad_rows)
            ]
            if not refusing or len(wanted) == _REFUSALS:
                raise
            wanted.append(refusing[0])
        else:
            return text, schema


def _propose(data: str, sample: Sample, label: str | None, max_bad_rows: int) -> _Proposal:
    fields = sample.columns
    for name in fields:
        if len(_word(name)) > _MOST_KEY:
            sample.unread[name] = "its name is too long for a schema"
    for name, reason in sample.unread.items():
        if label is not None and name.lower() == label.strip().lower():
            raise DataError(f"{data}: column {name} cannot be the label: {reason}")
    columns = {name: _column(sample, name) for name in fields if name not in sample.unread}
    chosen = _label(data, columns, label)
    words = (_absent(fields[name]) for name, one in columns.items() if one.number and one is not chosen)
    absent = sorted(set().union(*words) - chosen.values.keys())
    if absent:
        columns |= {name: _column(sample, name, absent) for name in columns if name != chosen.name}
    found = _Proposal(data, sample, chosen, absent, columns, max_bad_rows)
    if found.problem(found.schema()) is not None:
        found.try_each()
    return found


def _column(sample: Sample, name: str, absent: Sequence[str] = ()) -> Column:
    """Return what a column of the sample has, without the words for missing values."""
    fields = sample.columns[name]
    if absent:
        fields = [_present(value, absent) for value in fields]
    one = examine(name, fields)
    number, one.category = sample.can_be[name]
    one.number &= number
    one.whole = bool(sample.separator) and bool(typed_value(value.encode() for value in one.values))
    return one


def _present(value: Any, absent: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [one for one in value if one not in absent]
    return "" if value in absent else value


def _problem(path: Path, schema: Schema, rows: int, max_bad_rows: int) -> str | None:
    """Return why the trainer's reader does not read the first rows of a file: without its name."""
    try:
        with contextlib.closing(open_file(path, schema)) as file:
            read = broken = 0
            for task in file.pieces():
                piece = task()
                broken += len(piece.broken)
                if broken > max_bad_rows:
                    row, problem = piece.broken[max_bad_rows - broken]
                    return f"{file.unit} {file.first + read + row}: {problem}"
                read += piece.batch.rows + len(piece.broken)
                if read >= rows:
                    break
    except DataError as error:
        return re.sub(rf"{re.escape(str(path))}:? ", "", str(error), count=1)
    except pa.ArrowException as error:  # of a type that pyarrow does not read yet
        return remote_files.reason(error)
    return None


class _Proposal:
    """What each column of a sample is, as the trainer's reader can read it."""

    def __init__(
        self,
        data: str,
        sample: Sample,
        label: Column,
        absent: list[str],
        columns: Mapping[str, Column],
        max_bad_rows: int,
    ) -> None:
        self._data, self._sample, self._label, self._absent = data, sample, label, absent
        self._max_bad_rows = max_bad_rows
        self._ignored = dict(sample.unread)
        self._numbers: list[Column] = []
        self._categories: list[Column] = []
        keys = []
        for one in columns.values():
            if one is label:
                continue
            if not one.values:
                self._ignored[one.name] = "it has no value"
            elif _has_comma_points(one):
                self._ignored[one.name] = "its numbers have commas as points, which are not read"
            elif _is_key(one):
                keys.append(one)
            else:
                self._take(one)
        if not (self._numbers or self._categories):  # keys are better than nothing
            for one in keys:
                self._take(one)
        else:
            self._ignored |= {one.name: "as many values as rows: a key?" for one in keys}

    def _take(self, one: Column) -> None:
        is_number = one.number and (not one.category or _is_amount(one))
        (self._numbers if is_number else self._categories).append(one)

    def schema(self) -> Schema:
        """Return the schema, with all other columns ignored. Raises DataError."""
        return replace(row_schema.parse(yaml.safe_load(self.text()), "the proposal"), ignored=None)

    def problem(self, schema: Schema) -> str | None:
        """Return why the trainer's reader does not read the sample with a schema."""
        files = self._sample.files
        with ThreadPoolExecutor(_READERS, "inspect") as threads:
            repeated = itertools.repeat(schema), files.values(), itertools.repeat(self._max_bad_rows)
            problems = threads.map(_problem, files, *repeated)
            for path, problem in zip(files, problems, strict=True):
                if problem is not None:
                    return problem if str(path) == self._data else f"{path.name} {problem}"
        return None

    def try_each(self) -> None:
        """Make each column that cannot be read as it is another one, or ignore it, with the reason."""
        whole = self.schema()
        alone = replace(whole, numbers=(), categories=())
        if (problem := self.problem(alone)) is not None:
            raise DataError(f"{self._data} {problem}; mend it, or allow broken rows with --max-bad-rows")
        for one, number in zip(list(self._numbers), whole.numbers, strict=True):
            if (reason := self.problem(replace(alone, numbers=(number,)))) is not None:
                self._numbers.remove(one)
                if one.category:
                    self._categories.append(one)
                else:
                    self._ignored[one.name] = reason
        for one in list(self._categories):
            category = row_schema.parse(
                {"label": self._label.name, "categories": {one.name: _category_value(one)}}, "the proposal"
            ).categories
            if (reason := self.problem(replace(alone, categories=category))) is not None:
                self._categories.remove(one)
                self._ignored[one.name] = reason
        if (problem := self.problem(self.schema())) is not None:
            raise DataError(f"{self._data} {problem}")

    def text(self) -> str:
        """Return it as YAML with comments. Raises DataError if there is no column to train on."""
        if not (self._numbers or self._categories):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._ignored.items())
            raise DataError(
                f"{self._data} has no column to train on besides the label {self._label.name}"
                + (f"; {reasons:.400}" if reasons else "")
            )
        label, sample, ignored = self._label, self._sample, self._ignored
        lines = [
            _line("", f"{Path(self._data).name}: {_looked_at(sample)}"),
            _line(f"label: {_word(label.name)}", _rate(label)),
        ]
        if not (
            label.number
            and (set(label.values) <= {"0", "1"} or (_is_binary(label) and len(label.values) == 1))
        ):
            positive = _positive(label)
            others = ", ".join(value for value in label.values if value != positive)
            lines.append(_line(f"positive: {_quoted(positive)}", f"{others} is 0" if others else ""))
        if self._absent:
            lines.append(f"missing: [{', '.join(map(_quoted, self._absent))}]")
        for title, part, describe in (
            ("numbers", self._numbers, _number_line),
            ("categories", self._categories, _category_line),
        ):
            if part:
                lines += [f"{title}:", *map(describe, part)]
        if ignored:
            lines += ["ignored:", *(_line(f"  - {_word(name)}", reason) for name, reason in ignored.items())]
        lines += _form_lines(sample)
        if self._categories:
            rows = sum(one.cardinality + 1 for one in self._categories)
            sizes = ", ".join(f"{width}: {_size(rows * width)}" for width in WIDTHS)
            lines.append(
                f"# All tables have {rows:,} rows; with adagrad's state they take, by --dim, {sizes}."
            )
        return "\n".join(lines) + "\n"


def _line(text: str, comment: str) -> str:
    """Return a line of YAML with a comment, whatever characters that has."""
    words = " ".join(comment.split())
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in words)
    return "  ".join(part for part in (text, f"# {shown}" if shown else "") if part)


def _looked_at(sample: Sample) -> str:
    """Return how many rows there are, or of how many the sample is."""
    files = f", of {len(sample.files)} files" if len(sample.files) > 1 else ""
    return f"{sample.rows:,} rows{files}" + (", from the beginning." if sample.more else ".")


def _form_lines(sample: Sample) -> list[str]:
    """Return what a schema says of how the lines of text files are divided."""
    lines = []
    if not sample.header:
        lines.append("header: false")
        names = ", ".join(map(_word, sample.columns | dict.fromkeys(sample.unread)))
        lines.append(f"columns: [{names}]  # in their order")
    if sample.separator:
        usual = {"," if file_kind(path) == "commas" else "\t" for path in sample.files}
        if usual != {sample.separator}:
            lines.append(f"separator: {_quoted(sample.separator)}")
        if sample.quotes != has_quotes(sample.separator):
            lines.append(f"quotes: {str(sample.quotes).lower()}")
    return lines


def _label(data: str, columns: dict[str, Column], name: str | None) -> Column:
    if name is not None:
        found = {one.lower(): column for one, column in columns.items()}.get(name.strip().lower())
        if found is None:
            near = ", ".join(columns)
            raise DataError(f"{data} has no column {name}; it has {near:.400}")
        if not _is_label(found):
            shown = ", ".join(f"'{value:.20}'" for value in list(found.values)[:3])
            raise DataError(f"{data}: column {found.name} has the values {shown}; a label has two")
        return _checked(data, found)
    named = [one for one in columns.values() if one.name.lower() in _LABELS and _is_label(one)]
    others = [
        one for one in columns.values() if not one.separator and _is_binary(one) and len(one.values) > 1
    ]
    # Columns with both values before constant ones, 0 and 1 before other values, columns without gaps first.
    fitting = sorted(named, key=lambda one: (len(one.values) < 2, not _is_binary(one), one.missing > 0))
    fitting += sorted(others, key=lambda one: one.missing > 0)
    if not fitting:
        raise DataError(f"{data} has no column of 0 and 1, which could be the label; name it with --label")
    return _checked(data, fitting[0])


def _checked(data: str, label: Column) -> Column:
    """Return the label. Raises DataError if one of its values cannot stand in a schema."""
    if any("\ufffd" in value for value in label.values):
        raise DataError(f"{data}: the label {label.name} has values that are not UTF-8")
    return label


def _is_label(column: Column) -> bool:
    """Whether its values are 0 and 1, or two others."""
    return not column.separator and len(column.values) > 0 and (_is_binary(column) or len(column.values) == 2)


def _is_binary(one: Column) -> bool:
    """Whether its values are 0 or 1, as the trainer reads labels."""
    return set(one.floats or [math.nan]) <= {0, 1}


def _positive(label: Column) -> str:
    """Return the value that means 1: by its word, or the rarer one."""
    by_word = [value for value in label.values if value.lower() in _YES]
    if not by_word and (numbers := label.floats):
        return max(label.values, key=_value) if len(set(numbers)) > 1 else next(iter(label.values))
    return by_word[0] if len(by_word) == 1 else min(label.values, key=lambda one: (label.values[one], one))


def _value(text: str) -> float:
    """Return the number of a text; 0 if it is none."""
    return _core.parse_number(text) or 0.0


def _absent(values: Sequence[Any]) -> set[str]:
    """Return the words for missing values in a column whose other values are numbers."""
    found = {value for value in values if isinstance(value, str) and value}
    words = found.intersection(ABSENT)
    return words if words and found != words and all(map(is_number, found - words)) else set()


def _quoted(text: str) -> str:
    found: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=10**6)
    return found.strip()


def _rate(label: Column) -> str:
    if len(label.values) == 1:
        (value,) = label.values
        return f"it is {value} in all {label.rows:,} rows: there is nothing to learn from it"
    positive = _positive(label)
    missing = f", {_missing(label)}" if label.missing else ""
    return f"{positive} in {label.values[positive] / label.rows:.2%} of the rows{missing}"


def _is_key(one: Column) -> bool:
    """Whether each row has a value of its own."""
    floats = one.floats
    fractions = floats is not None and any(value != int(value) for value in floats)
    return not one.separator and not fractions and len(one.values) == one.rows > 100


def _has_comma_points(one: Column) -> bool:
    """Whether its values are numbers with commas as points."""
    return (
        one.number
        and any("," in value for value in one.values)
        and all(value.count(",") < 2 and is_number(value.replace(",", ".")) for value in one.values)
    )


def _is_amount(one: Column) -> bool:
    if one.separator or (floats := one.floats) is None:
        return False
    return any(value != int(value) for value in floats) or not _CATEGORY.search(one.name)


def _number_line(one: Column) -> str:
    counts = [(_value(value), count) for value, count in one.values.items()]
    low, high = min(value for value, _ in counts), max(value for value, _ in counts)
    total = sum(count for _, count in counts)
    mean, variance = math.nan, 0.0
    if max(-low, high) <= _MOST_SCALED:
        mean = sum(value * count for value, count in counts) / total
        variance = sum((value - mean) ** 2 * count for value, count in counts) / total
    deviation = float(f"{math.sqrt(variance):.6g}")
    if low >= 0 and high <= 1:
        scale = "none"
    elif (low >= 0 and high > 20 * mean) or deviation == 0:
        scale = "log1p"
    else:
        middle = float(f"{mean:.6g}")
        scale = f"{{scale: standard, mean: {_float(middle)}, deviation: {_float(deviation)}}}"
    described = f"{low:g} to {high:g}" + ("" if math.isnan(mean) else f", mean {mean:.4g}")
    return _line(f"  {_word(one.name)}: {scale}", f"{described}, {_missing(one)}")


def _category_value(one: Column) -> Any:
    value: dict[str, Any] = {"cardinality": one.cardinality}
    if one.separator:
        value |= {"separator": one.separator, "length": one.length}
    if one.whole:
        value["whole"] = True
    return value if len(value) > 1 else one.cardinality


def _category_line(one: Column) -> str:
    value = _category_value(one)
    if isinstance(value, dict):
        value = "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
    seen = f"{len(one.values):,} distinct"
    if one.estimate > 1.05 * len(one.values):
        seen += f", about {one.estimate:,} in all"
    size = ", ".join(f"{width}: {_size(one.cardinality * width)}" for width in WIDTHS)
    return _line(f"  {_word(one.name)}: {value}", f"{seen}, {_missing(one)}; table by --dim {size}")


def _inline(value: Any) -> str:
    return _word(value) if isinstance(value, str) else json.dumps(value)


def _float(value: float) -> str:
    """Return a number as YAML has it: 1.0e-05, while 1e-05 is a text there."""
    found: str = yaml.safe_dump(value)
    return found.split("\n", 1)[0] if value != int(value) else str(int(value))


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
    if not text.isprintable():
        return _quoted(text)
    found: str = yaml.safe_dump([text], default_flow_style=True, allow_unicode=True, width=10**6)
    return found.strip()[1:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the proposal; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m oe_runtime.data.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--label",
        metavar="COLUMN",
        help="the label, if it is not found; c1 is the first column without a header",
    )
    parser.add_argument(
        "--rows", type=count(1), default=ROWS, metavar="N", help=f"rows to read (default {ROWS:,})"
    )
    parser.add_argument(
        "--max-bad-rows", type=count(0), default=0, metavar="N", help="broken rows to skip, as in training"
    )
    parser.add_argument("data", metavar="FILE")
    given = parser.parse_args(argv)
    try:
        text, _ = propose(given.data, given.rows, given.label, given.max_bad_rows)
        print(text, end="")
    except OeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(interrupt.run(main))
