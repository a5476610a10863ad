"""Random data frames, and the formats that they are written in."""

from __future__ import annotations

import datetime
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pytest

from oe_runtime.data.row_schema import Category, Number, Schema

INT64 = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-(2**63), 2**63 - 1, 0, -1, 7])
# Without line ends, which text files have no form for, NUL, and what stands between the values of a list.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n|"), max_size=6) | st.sampled_from(
    ["007", "7.0", "True", "NaN", 'a "b"', '"', "a,b", "a\tb", "a;b", " a ", "ü", "1e5"]
)
WHOLE_FLOATS = st.integers(-(2**40), 2**40).map(float) | st.sampled_from([0.0, -0.0, 1e16, 1e18, 7.0])
DATES = st.dates(datetime.date(1678, 1, 1), datetime.date(2261, 1, 1))
DECIMALS = st.integers(-(10**12), 10**12).map(lambda value: Decimal(value).scaleb(-2))


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


# By the kind of a column: its values, its type in pandas, and whether the schema says that it is of integers.
CATEGORIES: dict[str, tuple[st.SearchStrategy[Any], str, bool | None]] = {
    "text": (optional(TEXTS), "object", None),
    "integer": (INT64, "int64", None),
    "small": (st.integers(0, 255), "uint8", None),
    "unsigned": (st.integers(0, 2**64 - 1), "uint64", None),
    "nullable": (optional(INT64), "Int64", None),
    "beside_missing": (optional(WHOLE_FLOATS), "float64", True),
    "single_beside_missing": (optional(st.integers(-(2**24), 2**24).map(float)), "float32", True),
    "uuid": (optional(st.uuids()), "object", None),
    "boolean": (st.booleans(), "bool", True),
    "nullable_boolean": (optional(st.booleans()), "boolean", True),
    "decimal": (
        optional(st.integers(-(10**12), 10**12).map(lambda v: Decimal(v) * Decimal("1.00"))),
        "object",
        True,
    ),
    "date": (optional(DATES), "object", None),
    "category": (optional(TEXTS.filter(bool)), "category", None),
    "category_of_integers": (optional(st.integers(-5, 5)), "category", True),
    "texts": (optional(st.lists(TEXTS.filter(bool), max_size=4)), "object", None),
    "integers": (optional(st.lists(INT64, max_size=4)), "object", None),
}
NUMBERS: dict[str, tuple[st.SearchStrategy[Any], str, bool | None]] = {
    "number": (optional(st.floats(-(2.0**100), 2.0**100, allow_subnormal=False)), "float64", None),
    "count": (INT64, "int64", None),
    "nullable_count": (optional(INT64), "Int64", None),
    "flag": (st.booleans(), "bool", None),
    "paid": (optional(DECIMALS), "object", None),
    "single": (optional(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)), "float32", None),
}
LABELS: dict[str, tuple[st.SearchStrategy[Any], str, bool | None]] = {
    "integer": (st.integers(0, 1), "int8", None),
    "boolean": (st.booleans(), "bool", None),
    "float": (st.integers(0, 1).map(float), "float64", None),
}
# Columns that no schema reads, or only some: of these `inspect` must say so.
DATETIMES = st.datetimes(datetime.datetime(1678, 1, 1), datetime.datetime(2261, 1, 1))
FLOATS = st.floats(allow_subnormal=False)
ODD: dict[str, tuple[st.SearchStrategy[Any], str, bool | None]] = {
    "seen": (optional(DATETIMES), "datetime64[ns]", None),
    "time": (optional(st.times()), "object", None),
    "duration": (
        optional(st.timedeltas(datetime.timedelta(0), datetime.timedelta(9))),
        "timedelta64[ns]",
        None,
    ),
    "struct": (optional(st.fixed_dictionaries({"a": st.integers(0, 9)})), "object", None),
    "vector": (optional(st.lists(st.floats(0, 1), max_size=3)), "object", None),
    "any_float": (FLOATS, "float64", None),
    "tiny": (st.floats(-1e-300, 1e-300, allow_subnormal=False), "float64", None),
    "nothing": (st.none(), "object", None),
    "fraction_code": (st.sampled_from([0.5, 2.0, 3.25]), "float64", None),
    "words_and_numbers": (
        st.sampled_from(["NA", "-", "?", "1", "2.5", "+3", "1_0", " 4", "nan", "inf"]),
        "object",
        None,
    ),
    "comma_points": (st.sampled_from(["1,5", "2,25", "3"]), "object", None),
    "lines": (st.sampled_from(["a\nb", "c"]), "object", None),
    "many_words": (st.sampled_from(["a b c", "b c", "c a b", "a"]), "object", None),
}
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r\n"), min_size=1, max_size=8
) | st.sampled_from(
    [
        "user id",
        "price, usd",
        "a;b",
        "x|y",
        "yes",
        "null",
        "1.5",
        "2024",
        "#a",
        "a: b",
        '"q"',
        " a ",
        "A",
        "a",
        "",
        "-",
    ]
)
LISTS = ("texts", "integers")


@st.composite
def frames(draw: st.DrawFn, most_rows: int = 12) -> pd.DataFrame:
    """A frame with a label `y` and some of the columns above."""
    rows = draw(st.integers(1, most_rows))
    label = LABELS[draw(st.sampled_from(list(LABELS)))]
    some = st.sets(st.sampled_from([*CATEGORIES, *NUMBERS]), min_size=1, max_size=6)
    chosen = {"y": label} | {name: (CATEGORIES | NUMBERS)[name] for name in sorted(draw(some))}
    columns = {}
    for name, (values, kind, _) in chosen.items():
        drawn = draw(st.lists(values, min_size=rows, max_size=rows))
        columns[name] = pd.Series(drawn, dtype=kind)
    return pd.DataFrame(columns)


@st.composite
def odd_frames(draw: st.DrawFn, most_rows: int = 60) -> pd.DataFrame:
    """A frame with a label `y` of two values, and columns of any type with any names: `attrs["kinds"]`."""
    rows = draw(st.integers(2, most_rows))
    first, second = draw(st.sampled_from([(0, 1), (1, 0), (0.0, 1.0), (False, True), ("no", "yes"), (2, 1)]))
    kinds = CATEGORIES | NUMBERS | ODD
    columns = {
        "y": pd.Series([first, second][:rows] + draw(_several(st.sampled_from([first, second]), rows - 2)))
    }
    chosen = draw(st.lists(st.tuples(NAMES, st.sampled_from(list(kinds))), min_size=1, max_size=8))
    chosen = [(name, kind) for name, kind in chosen if name.strip().lower() != "y"]
    for name, kind in chosen:
        values, dtype, _ = kinds[kind]
        columns.setdefault(name, pd.Series(draw(_several(values, rows)), dtype=dtype))  # type: ignore[call-overload]
    frame = pd.DataFrame(columns)
    frame.attrs["kinds"] = {name: kind for name, kind in reversed(chosen) if name in columns}
    return frame


def _several(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[list[Any]]:
    """Some values, again and again: few draws make many rows."""
    if not count:
        return st.just([])
    few = st.lists(values, min_size=1, max_size=6)
    return few.map(lambda some: [some[(row * 7) % len(some)] for row in range(count)])


def schema_of(frame: pd.DataFrame) -> Schema:
    """The schema of all columns, with cardinalities of 63 bits, so that other ids are other values."""
    categories = []
    for name in frame.columns:
        if name in CATEGORIES:
            several = {"separator": "|", "length": 3} if name in LISTS else {}
            categories.append(Category(name, whole=CATEGORIES[name][2], **several))  # type: ignore[arg-type]
    numbers = tuple(Number(name, "none") for name in frame.columns if name in NUMBERS)
    return Schema("y", numbers, tuple(categories), quotes=True)


def with_joined_lists(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text files have it."""
    joined = frame.copy()
    for name in joined.columns:
        if any(isinstance(value, list) for value in frame[name]):
            texts = ["|".join(map(str, value)) if isinstance(value, list) else None for value in frame[name]]
            joined[name] = pd.Series(texts, dtype="object")
        elif any(isinstance(value, uuid.UUID) for value in frame[name]):  # Arrow's writer of CSV knows none
            joined[name] = joined[name].map(str, na_action="ignore")
    return joined


def table_of(frame: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False)


def csv(frame: pd.DataFrame, path: Path) -> None:
    with_joined_lists(frame).to_csv(path, index=False)


def tsv(frame: pd.DataFrame, path: Path) -> None:
    with_joined_lists(frame).to_csv(path, index=False, sep="\t")


def csv_of_arrow(frame: pd.DataFrame, path: Path) -> None:
    pyarrow.csv.write_csv(table_of(with_joined_lists(frame)), path)


def parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False)


def arrow(frame: pd.DataFrame, path: Path) -> None:
    table = table_of(frame)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table, max_chunksize=5)


def feather(frame: pd.DataFrame, path: Path) -> None:
    pyarrow.feather.write_feather(frame, path)


def tfrecord(frame: pd.DataFrame, path: Path) -> None:
    """Bytes of texts, dates and large integers, int64 of integers and booleans, float of others."""
    tf = pytest.importorskip("tensorflow")
    with tf.io.TFRecordWriter(str(path)) as out:
        for row in frame.to_dict("records"):
            features = {name: _feature(name, value, tf.train) for name, value in row.items()}
            out.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def _feature(name: str, value: Any, train: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    values = [one for one in values if not is_absent(one)]
    if not values:
        return train.Feature()
    if name in CATEGORIES and name not in LISTS and CATEGORIES[name][2]:
        values = [int(one) for one in values]
    if name in ("date", "unsigned", "uuid"):
        values = [str(one) for one in values]
    if any(isinstance(one, str) for one in values):
        return train.Feature(bytes_list=train.BytesList(value=[one.encode() for one in values]))
    if all(isinstance(one, (int, bool)) for one in values):
        return train.Feature(int64_list=train.Int64List(value=list(map(int, values))))
    return train.Feature(float_list=train.FloatList(value=[float(one) for one in values]))


FORMATS: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "rows.csv": csv,
    "rows.tsv": tsv,
    "arrow.csv": csv_of_arrow,
    "rows.parquet": parquet,
    "rows.arrow": arrow,
    "rows.feather": feather,
    "rows.tfrecord": tfrecord,
}


def is_absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
