"""What the columns of rows are: label, numbers, categories, weight. The one model of it, and its YAML file.

A schema is `criteo`, `deeprec` or `avazu`, a YAML file, or the same as JSON in one word:

    label: click
    positive: "yes"                                # of the label; all others are 0. Unset: it is 0 or 1
    missing: [NA, '\\N']                           # what counts as no value, besides nothing
    numbers:
      price: log1p                                 # log1p, none, min-max or standard
      age: {scale: min-max, min: 18, max: 90}
    categories:
      site: 50000                                  # ids are hashed into so many
      user: hash64                                 # or into 64 bits, for tables that grow
      tags: {cardinality: 1000, separator: "|", length: 10}
      shop: {cardinality: 900, whole: true}        # integers: in text, 7.0 is 7 and true is 1
    weight: importance
    ignored: [id]                                  # or "*": all columns that are not named
    columns: [id, click, …]                        # their order, for text files without a header
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import oe_runtime._core as _core
from oe_runtime.data.criteo import CARDINALITIES, CATEGORIES, COLUMNS, INTEGERS
from oe_runtime.errors import DataError

SCALES = ("log1p", "none", "min-max", "standard")
_FACTORS = {"min-max": ("min", "max"), "standard": ("mean", "deviation")}  # the keys of a scale
POOLINGS = ("mean", "sum")
HASH64 = "hash64"
SEPARATOR = "|"  # of several values
_MOST_LENGTH = 4096


@dataclass(frozen=True)
class Number:
    """A column of numbers. `missing` is what an absent one counts as, before it is scaled."""

    name: str
    scale: str = "log1p"  # log1p: sign(x)·log1p(|x|)
    min: float = 0.0  # min-max: 0
    max: float = 1.0  # min-max: 1
    mean: float = 0.0  # standard: 0
    deviation: float = 1.0  # standard: 1
    missing: float = 0.0
    whole: bool = False  # whether a fraction is an error

    @property
    def factors(self) -> tuple[bool, float, float]:
        """Whether it is a logarithm; else x becomes (x - first) / second."""
        return {
            "log1p": (True, 0.0, 1.0),
            "none": (False, 0.0, 1.0),
            "min-max": (False, self.min, self.max - self.min),
            "standard": (False, self.mean, self.deviation),
        }[self.scale]


@dataclass(frozen=True)
class Category:
    """A column of categories; with a `separator`, of several values, of which a row has `length` ids."""

    name: str
    cardinality: int = _core.MOST_IDS  # ids are 1 up to it; 0 is a missing value
    separator: str = ""
    length: int = 1
    padding: str = "after"  # where a row has fewer values: zeros before or after them
    keep: str = "first"  # where it has more: the first or the last ones
    pooling: str = "mean"  # of the values' embeddings
    # True: values are integers, so in text 7.0 is 7 and true is 1. False: text is meant as it is.
    whole: bool | None = None

    @property
    def rows(self) -> int:
        """The rows of an embedding: the cardinality and one for 'missing'."""
        return self.cardinality + 1

    @property
    def hashed(self) -> bool:
        """Whether ids are 64-bit hashes, so that its table has rows only for ids that came."""
        return self.cardinality == _core.MOST_IDS

    @property
    def several(self) -> bool:
        """Whether a row has several values."""
        return bool(self.separator)


@dataclass(frozen=True)
class Schema:
    """The columns that a model takes, and how files have them."""

    label: str
    numbers: tuple[Number, ...] = ()
    categories: tuple[Category, ...] = ()
    weight: str = ""
    ignored: tuple[str, ...] | None = ()  # None: all that are not named
    columns: tuple[str, ...] = ()  # the order in text files without a header
    header: bool | None = None  # None: text files may have one
    separator: str = ""  # of text files' fields; none: as the file's name and first line say
    quotes: bool | None = None  # whether fields may stand in double quotes; None: between commas, semicolons
    positive: str = ""  # the label of a positive row, all others being 0; none: labels are 0 and 1
    missing: tuple[str, ...] = ()  # values that count as missing, besides none
    name: str = dataclasses.field(default="", compare=False)  # of a built-in one, or the file

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns that are read: label, numbers, categories, weight."""
        read = (self.label, *(n.name for n in self.numbers), *(c.name for c in self.categories))
        return (*read, self.weight) if self.weight else read

    @property
    def ids(self) -> int:
        """The number of ids of a row."""
        return sum(category.length for category in self.categories)

    @property
    def shown(self) -> str:
        """The columns that are read, for messages."""
        if self.columns == COLUMNS:
            return "label, I1 … I13 and C1 … C26"
        return ", ".join(self.names[:10]) + (" …" if len(self.names) > 10 else "")

    def describe(self) -> str:
        """Return a short text that differs between different schemas."""
        if BUILT_IN.get(self.name) == self:
            return self.name
        digest = hashlib.blake2b(json.dumps(self.to_value(), sort_keys=True).encode(), digest_size=4)
        counts = f"{len(self.numbers)} numbers, {len(self.categories)} categories"
        return f"label {self.label}, {counts} ({digest.hexdigest()})"

    def limited(self, most: int) -> Schema:
        """Return it with at most so many distinct ids per category; 0: no limit."""
        if most <= 0:
            return self
        capped = tuple(replace(one, cardinality=min(one.cardinality, most)) for one in self.categories)
        return replace(self, categories=capped)

    def places(self, what: str, names: Sequence[str]) -> list[int]:
        """Return the positions of this schema's `names` in a file's: the very names, else in any case.

        DataError names missing columns with the most similar ones, columns that the file has several times,
        and columns that nobody named.
        """
        names = column_names(names)
        exact, alike = _positions(names), _positions([name.lower() for name in names])
        found = {name: exact.get(name) or alike.get(name.lower(), []) for name in self.names}
        missing = [name for name in self.names if not found[name]]
        if missing:
            raise DataError(
                f"{what} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                f"{self._expected(missing, names)}"
            )
        for name, places in found.items():
            if len(places) > 1:
                shown = ", ".join(f"{names[place]} (column {place + 1})" for place in places)
                raise DataError(f"{what} has the column {name} {len(places)} times: {shown}; leave one")
        if self.ignored is not None:
            known = {name.lower() for name in (*self.names, *self.ignored)}
            others = [name for name in names if name.lower() not in known]
            if others:
                raise DataError(
                    f"{what} has columns that the schema does not name: {', '.join(others[:10])}; "
                    'use them, or name them in its `ignored` (ignored: "*" is all of them)'
                )
        return [found[name][0] for name in self.names]

    def _expected(self, missing: Sequence[str], names: Sequence[str]) -> str:
        if self.columns == COLUMNS:
            return f"expected {self.shown}"
        near = {one: difflib.get_close_matches(one, names, 3) for one in missing[:3]}
        guesses = [f"for {one}: {', '.join(close)}" for one, close in near.items() if close]
        if guesses:
            return f"did you mean {'; '.join(guesses)}?"
        return f"it has {', '.join(names[:40])}" + (" …" if len(names) > 40 else "")

    def to_value(self) -> dict[str, Any]:
        """Return it as plain values, as `parse` takes them."""
        value = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "name"}
        value["numbers"] = {one.name: _number_value(one) for one in self.numbers}
        value["categories"] = {one.name: _category_value(one) for one in self.categories}
        value["ignored"] = "*" if self.ignored is None else self.ignored
        return {
            key: list(one) if isinstance(one, tuple) else one
            for key, one in value.items()
            if one not in ("", (), {}, None)
        }


def column_names(names: Sequence[str]) -> list[str]:
    """Return a file's columns without spaces around their names; without a name, as pandas calls them."""
    return [name.strip() or f"Unnamed: {place}" for place, name in enumerate(names)]


def load(text: str) -> Schema:
    """Return the schema of a built-in name, a YAML file or JSON in one word. DataError says what is wrong."""
    if text in BUILT_IN:
        return BUILT_IN[text]
    if text.lstrip().startswith("{"):
        try:
            return parse(json.loads(text), "the schema")
        except ValueError as error:
            raise DataError(f"the schema is no JSON: {error}") from error
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        near = difflib.get_close_matches(text, BUILT_IN, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; a schema is a file or {', '.join(BUILT_IN)}"
        raise DataError(f"cannot read the schema {text}: {reason}{hint}") from error
    import yaml  # here, because hosts get JSON

    try:
        value = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise DataError(f"{text}{line}: {getattr(error, 'problem', None) or 'it is no YAML'}") from error
    return parse(value, text)


def parse(value: Any, what: str) -> Schema:
    """Return the schema of plain values, from the file `what`. DataError names the key."""
    of_rows = ("label", "positive", "missing", "numbers", "categories", "weight")
    of_files = ("ignored", "columns", "header", "separator", "quotes")
    given = _mapping(value, what, (*of_rows, *of_files))
    if "label" not in given:
        raise DataError(f"{what} names no label")
    ignored = given.get("ignored", ())
    schema = Schema(
        _name(given["label"], f"{what}: label"),
        tuple(_number(n, v, f"{what}: numbers.{n}") for n, v in _columns(given, "numbers", "log1p", what)),
        tuple(
            _category(n, v, f"{what}: categories.{n}") for n, v in _columns(given, "categories", HASH64, what)
        ),
        _name(given["weight"], f"{what}: weight") if "weight" in given else "",
        None if ignored == "*" else _names(ignored, f"{what}: ignored"),
        _names(given.get("columns", ()), f"{what}: columns"),
        _bool(given["header"], f"{what}: header") if given.get("header") is not None else None,
        _byte(given.get("separator", ""), f"{what}: separator"),
        _bool(given["quotes"], f"{what}: quotes") if given.get("quotes") is not None else None,
        _value(given["positive"], f"{what}: positive") if "positive" in given else "",
        _values(given.get("missing", ()), f"{what}: missing"),
        what,
    )
    check(schema, what)
    return schema


def check(schema: Schema, what: str) -> None:
    """Raise DataError for a schema that contradicts itself."""
    seen: dict[str, str] = {}
    for name in (*schema.names, *(schema.ignored or ())):
        if name.lower() in seen:
            raise DataError(f"{what} names the column {name} twice (names are the same in any case)")
        seen[name.lower()] = name
    number = _core.parse_number(schema.positive)
    if schema.positive in schema.missing or number in {
        _core.parse_number(word) for word in schema.missing
    } - {None}:
        raise DataError(f"{what}: positive is {schema.positive}, which counts as missing")
    if not schema.categories and not schema.numbers:
        raise DataError(f"{what} names neither numbers nor categories")
    if schema.columns:
        schema.places(f"{what}: columns", schema.columns)
    elif schema.header is False:
        raise DataError(f"{what}: without a header, `columns` must name the columns in their order")


def chosen(schema: str | None, label: str | None, categories: str | None, numbers: str | None) -> Schema:
    """Return the schema that these flags name; each is None if it was not given."""
    given = None if schema is None else load(schema)
    if label is None and categories is None and numbers is None:
        return given or CRITEO
    lists = [
        None if text is None else [one.strip() for one in text.split(",") if one.strip()]
        for text in (categories, numbers)
    ]
    if lists == [None, None]:
        given = given or CRITEO
    return from_flags(given, label, *lists)


def from_flags(
    schema: Schema | None, label: str | None, categories: Sequence[str] | None, numbers: Sequence[str] | None
) -> Schema:
    """Return a schema with these columns instead of its own; without one, all other columns are ignored.

    A category is NAME[:CARDINALITY], a number NAME[:SCALE], min-max:MIN:MAX or standard:MEAN:DEVIATION.
    """
    base = schema or Schema(label or "label", ignored=None)
    if schema is not None and (categories is not None or numbers is not None):
        base = replace(base, ignored=None, name="")
    found = replace(
        base,
        label=label or base.label,
        columns=tuple(label if label and name == base.label else name for name in base.columns),
        categories=base.categories if categories is None else tuple(map(_category_flag, categories)),
        numbers=base.numbers if numbers is None else tuple(map(_number_flag, numbers)),
    )
    check(found, "the schema of --label, --categories and --numbers")
    return found


def _category_flag(text: str) -> Category:
    name, _, size = text.partition(":")
    value = int(size) if size.isdecimal() else size or HASH64
    return _category(_name(name, "--categories"), value, f"--categories {name}")


def _number_flag(text: str) -> Number:
    name, *words = text.split(":")
    keys = _FACTORS.get(words[0] if words else "", ())
    if words[1:] and len(words) != 1 + len(keys):
        raise DataError(f"--numbers {text}: expected NAME:SCALE, min-max:MIN:MAX or standard:MEAN:DEVIATION")
    value: dict[str, Any] = {"scale": words[0] if words else "log1p"}
    for key, word in zip(keys, words[1:], strict=False):
        try:
            value[key] = float(word)
        except ValueError:
            raise DataError(f"--numbers {text}: '{word}' is no number") from None
    return _number(_name(name, "--numbers"), value, f"--numbers {name}")


def _number(name: str, value: Any, what: str) -> Number:
    keys = ("scale", "min", "max", "mean", "deviation", "missing", "whole")
    given = _mapping({"scale": value} if isinstance(value, str) else value, what, keys)
    scale = given.get("scale", "log1p")
    _expect(scale, f"{what}.scale", f"one of {', '.join(SCALES)}", lambda v: v in SCALES)
    own = _FACTORS.get(scale, ())
    for key in ("min", "max", "mean", "deviation"):
        if key in own and key not in given:
            raise DataError(f"{what}: the scale {scale} needs {' and '.join(own)}")
        if key in given and key not in own:
            raise DataError(f"{what}: {key} does not go with the scale {scale}")
    floats = {
        key: float(_expect(given[key], f"{what}.{key}", "a number", _is_number))
        for key in (*own, "missing")
        if key in given
    }
    whole = _bool(given.get("whole", False), f"{what}.whole")
    if scale == "min-max" and not floats["max"] > floats["min"]:
        raise DataError(f"{what}: max is {floats['max']:g}, which is not above min, {floats['min']:g}")
    if scale == "standard" and not floats["deviation"] > 0:
        raise DataError(f"{what}.deviation is {floats['deviation']:g}, expected a number above 0")
    if "mean" in floats:
        floats.setdefault("missing", floats["mean"])
    return Number(name, scale, whole=whole, **floats)


def _category(name: str, value: Any, what: str) -> Category:
    plain = isinstance(value, (int, str))
    keys = ("cardinality", "separator", "length", "padding", "keep", "pooling", "whole")
    given = _mapping({"cardinality": value} if plain else value, what, keys)
    size = given.get("cardinality", HASH64)
    good = f"a number of ids from 1, or {HASH64}"
    _expect(size, f"{what}.cardinality", good, lambda v: v == HASH64 or _is_count(v, _core.MOST_IDS))
    length = _expect(
        given.get("length", 1), f"{what}.length", f"1 to {_MOST_LENGTH}", lambda v: _is_count(v, _MOST_LENGTH)
    )
    separator = _byte(given.get("separator", ""), f"{what}.separator")
    if separator and "length" not in given:
        raise DataError(f"{what}: a column of several values needs their number at most, length")
    if length > 1 and not separator:
        separator = SEPARATOR
    words = {"padding": ("before", "after"), "keep": ("first", "last"), "pooling": POOLINGS}
    chosen: dict[str, Any] = {}
    if "whole" in given:
        chosen["whole"] = _bool(given["whole"], f"{what}.whole")
    for key, allowed in words.items():
        if key in given:
            if not separator:
                raise DataError(f"{what}: {key} goes with a column of several values, with length")
            chosen[key] = _expect(given[key], f"{what}.{key}", " or ".join(allowed), allowed.__contains__)
    return Category(name, _core.MOST_IDS if size == HASH64 else size, separator, length, **chosen)


def _number_value(one: Number) -> Any:
    value = {"scale": one.scale, **{key: getattr(one, key) for key in _FACTORS.get(one.scale, ())}}
    if one.missing != (one.mean if one.scale == "standard" else 0):
        value["missing"] = one.missing
    if one.whole:
        value["whole"] = True
    return one.scale if len(value) == 1 else value


def _category_value(one: Category) -> Any:
    size = HASH64 if one.hashed else one.cardinality
    value: dict[str, Any] = {"cardinality": size}
    if one.several:
        value |= {"separator": one.separator, "length": one.length}
    default = Category("")
    for key in ("padding", "keep", "pooling", "whole"):
        if getattr(one, key) != getattr(default, key):
            value[key] = getattr(one, key)
    return value if len(value) > 1 else size


def _mapping(value: Any, what: str, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{what} is {value!r:.40}, expected keys of {', '.join(keys)}")
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(keys)}"
            raise DataError(f"{what} has the unknown key {key}; {hint}")
    return value


def _columns(given: Mapping[str, Any], key: str, default: str, what: str) -> list[tuple[str, Any]]:
    """Return the columns of a key: a mapping, or a list of names."""
    value = given.get(key) or {}
    if isinstance(value, list):
        value = dict.fromkeys(_names(value, f"{what}: {key}"), default)
    if not isinstance(value, dict):
        raise DataError(f"{what}: {key} is {value!r:.40}, expected columns and what they are")
    return [(_name(name, f"{what}: {key}"), one) for name, one in value.items()]


def _expect(value: Any, what: str, expected: str, holds: Callable[[Any], bool]) -> Any:
    if not holds(value):
        raise DataError(f"{what} is {value!r:.40}, expected {expected}")
    return value


def _name(value: Any, what: str) -> str:
    value = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    found: str = _expect(
        value, what, "a column's name", lambda v: isinstance(v, str) and v == v.strip() != ""
    )
    return found


def _names(value: Any, what: str) -> tuple[str, ...]:
    _expect(value, what, "a list of columns", lambda v: isinstance(v, (list, tuple)))
    return tuple(_name(one, what) for one in value)


def _value(value: Any, what: str) -> str:
    """Return a value of a field. YAML has other types for yes, no, null and 1.0, whose text is lost."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    expected = 'a text or a whole number; write others in quotes, such as "yes"'
    found: str = _expect(text, what, expected, lambda v: isinstance(v, str) and v != "")
    return found


def _values(value: Any, what: str) -> tuple[str, ...]:
    _expect(value, what, "a list of values", lambda v: isinstance(v, (list, tuple)))
    return tuple(_value(one, what) for one in value)


def _positions(names: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        found.setdefault(name, []).append(place)
    return found


def _byte(value: Any, what: str) -> str:
    found: str = _expect(
        value,
        what,
        "one ASCII character",
        lambda v: isinstance(v, str) and (v == "" or (len(v) == 1 and 0 < ord(v) < 128 and v not in '"\r\n')),
    )
    return found


def _bool(value: Any, what: str) -> bool:
    found: bool = _expect(value, what, "true or false", lambda v: isinstance(v, bool))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


CRITEO = Schema(
    "label",
    tuple(Number(name, whole=True) for name in INTEGERS),
    tuple(Category(*one) for one in zip(CATEGORIES, CARDINALITIES, strict=True)),
    ignored=None,
    columns=COLUMNS,
    name="criteo",
)

# Ranges of the numbers and sizes of the tables in modelzoo/wide_and_deep/train.py of DeepRec,
# https://github.com/DeepRec-AI/DeepRec.
_DEEPREC_RANGES = (1539, 22069, 65535, 561, 2655388, 233523, 26297, 5106, 24376, 9, 181, 1807, 6879)
_DEEPREC_BUCKETS = (
    2500, 2000, 300000, 250000, 1000, 100, 20000, 4000, 20, 100000, 10000, 250000, 40000,
    100, 100, 200000, 50, 10000, 4000, 20, 250000, 100, 100, 250000, 400, 100000,
)  # fmt: skip
DEEPREC = Schema(
    "label",
    tuple(
        Number(name, "min-max", min=low, max=low + size)
        for name, size, low in zip(INTEGERS, _DEEPREC_RANGES, (0, -3, *[0] * 11), strict=True)
    ),
    tuple(Category(*one) for one in zip(CATEGORIES, _DEEPREC_BUCKETS, strict=True)),
    ignored=None,
    columns=COLUMNS,
    name="deeprec",
)

# Distinct values in train.csv of https://www.kaggle.com/c/avazu-ctr-prediction, rounded up; device_id and
# device_ip have millions, most of which come once.
_AVAZU = {
    "hour": 250, "C1": 10, "banner_pos": 10, "site_id": 5000, "site_domain": 8000, "site_category": 30,
    "app_id": 9000, "app_domain": 600, "app_category": 40, "device_id": 2700000, "device_ip": 6800000,
    "device_model": 8500, "device_type": 10, "device_conn_type": 10, "C14": 2700, "C15": 10, "C16": 10,
    "C17": 450, "C18": 10, "C19": 70, "C20": 180, "C21": 70,
}  # fmt: skip
AVAZU = Schema(
    "click",
    (),
    tuple(Category(*one) for one in _AVAZU.items()),
    ignored=("id",),
    columns=("id", "click", *_AVAZU),
    name="avazu",
)
BUILT_IN = {schema.name: schema for schema in (CRITEO, DEEPREC, AVAZU)}
