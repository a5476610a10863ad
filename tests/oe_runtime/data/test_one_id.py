"""A value has one id in every format, and in tables in memory: random frames, and what each type becomes."""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import random_frames
from hypothesis import HealthCheck, given, settings

import oe_runtime._core as _core
from oe_runtime.data import DataError, Rows, check, features, open_source, row_schema
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.files import DataFiles
from oe_runtime.data.row_schema import Category, Schema
from oe_runtime.data.rows import BrokenRows

EXAMPLES = settings(
    max_examples=60,
    deadline=None,  # the machine may be busy
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def everything(path: Path, schema: Schema) -> Batch:
    return concatenate(list(open_source(str(path), schema=schema).blocks()))


@pytest.mark.parametrize("name", random_frames.FORMATS)
@given(frame=random_frames.frames())
@EXAMPLES
def test_the_same_frame_has_the_same_ids_in_every_format(
    tmp_path: Path, name: str, frame: pd.DataFrame
) -> None:
    schema = random_frames.schema_of(frame)
    ((expected, labels),) = Rows(schema, frame, 100, grouped=True)
    path = tmp_path / name
    random_frames.FORMATS[name](frame, path)
    rows = everything(path, schema)
    np.testing.assert_array_equal(rows.ids, expected["ids"])
    np.testing.assert_array_equal(rows.labels, labels[:, 0])
    # TFRecord has floats of 32 bits, and so have columns of them.
    exact = not name.endswith(".tfrecord") and "single" not in frame
    np.testing.assert_allclose(rows.dense, expected["numbers"], rtol=0 if exact else 1e-6)


def ident(text: str) -> int:
    data = np.frombuffer(text.encode(), np.uint8)
    digest = _core.hash_strings(np.array([0, len(data)], np.int32), data)
    return 1 + int(digest[0]) % _core.MOST_IDS


# What docs/guides/your-own-columns.md says that values of a type become.
BECOMES: list[tuple[str, pa.Array, list[str]]] = [
    ("texts", pa.array(["a", "7.0", " b ", None, ""]), ["a", "7.0", " b ", "", ""]),
    ("bytes", pa.array([b"a", "ü".encode(), None]), ["a", "ü", ""]),
    ("views", pa.array(["a", None], pa.string_view()), ["a", ""]),
    ("views of bytes", pa.array([b"a", None], pa.binary_view()), ["a", ""]),
    ("fixed", pa.array([b"ab", None], pa.binary(2)), ["ab", ""]),
    ("integers", pa.array([7, -(2**63), None]), ["7", str(-(2**63)), ""]),
    ("unsigned", pa.array([2**64 - 1, 0], pa.uint64()), [str(2**64 - 1), "0"]),
    ("floats", pa.array([7.0, -0.0, 1e18, None, float("nan")]), ["7", "0", str(10**18), "", ""]),
    ("half", pa.array([np.float16(7), None], pa.float16()), ["7", ""]),
    ("decimals", pa.array([Decimal("7.00"), None, Decimal("-10.00")]), ["7", "", "-10"]),
    ("long decimals", pa.array([Decimal(10**30)], pa.decimal128(38, 0)), [str(10**30)]),
    ("booleans", pa.array([True, False, None]), ["1", "0", ""]),
    ("dates", pa.array([datetime.date(2026, 11, 28), None]), ["2026-11-28", ""]),
    ("dates of 64 bits", pa.array([datetime.date(2026, 11, 28)], pa.date64()), ["2026-11-28"]),
    ("categories", pa.array(["a", None, "a"]).dictionary_encode(), ["a", "", "a"]),
    ("whole categories", pa.array([7.0, None]).dictionary_encode(), ["7", ""]),
    ("categories of dates", pa.array([datetime.date(2026, 1, 2)]).dictionary_encode(), ["2026-01-02"]),
    ("uuids", pa.array([uuid.UUID(int=7), None], pa.uuid()), [str(uuid.UUID(int=7)), ""]),
    ("singles", pa.array([2.0**24, -(2.0**24), None], pa.float32()), [str(2**24), str(-(2**24)), ""]),
    ("dates with a time", pa.array([86400001], pa.date64()), ["1970-01-02"]),
    ("runs", pa.RunEndEncodedArray.from_arrays([2, 3], [7, None]), ["7", "7", ""]),
    ("nothing", pa.nulls(2), ["", ""]),
]


@pytest.mark.parametrize(("values", "texts"), [row[1:] for row in BECOMES], ids=[row[0] for row in BECOMES])
def test_what_each_type_becomes(values: pa.Array, texts: list[str]) -> None:
    table = pa.table({"y": [0] * len(values), "c": values})
    are_integers = all(text.lstrip("-").isdigit() for text in texts if text)
    for whole in (None, True) if are_integers else (None,):
        found = features(Schema("y", categories=(Category("c", whole=whole),)), table)["c"][:, 0].tolist()
        assert found == [ident(text) if text else 0 for text in texts]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([0.5]), "the table row 1: c is '0.5', expected a text or an integer"),
        (pa.array([Decimal("0.50")]), "the table row 1: c is '0.50', expected a text or an integer"),
        (pa.array([0.5]).dictionary_encode(), "the table row 1: c is '0.5', expected a text or an integer"),
        (
            pa.array([2.0**24 + 2], pa.float32()),
            "row 1: c is '16777218.0', expected .*; float32 rounds integers beyond 16777216: store integers",
        ),
        (pd.array([pd.Period("2026-01")]), "c has the type extension<pandas.period.*, expected text"),
        (pa.array([1e19]), "row 1: c is '1e[+]19', expected a text or an integer"),
        (
            pa.array([datetime.datetime(2026, 11, 28)]),
            "c has the type timestamp.us., expected text, bytes, int",
        ),
        (pa.array([datetime.time(7)]), "c has the type time64.us., expected text, bytes, integers or dates"),
        (pa.array([{"a": 1}]), "c has the type struct<a: int64>, expected text, bytes, integers or dates"),
        (pa.array([[1]]), "c has the type list<.*>, expected text, bytes, integers or dates"),
    ],
    ids=str,
)
def test_values_that_are_no_category_are_refused_by_name(values: pa.Array, said: str) -> None:
    with pytest.raises(DataError, match=said):
        features(Schema("y", categories=(Category("c"),)), pa.table({"c": values}))


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("7", "7"),
        ("7.0", "7"),
        ("007", "7"),
        ("-0", "0"),
        ("-00.0", "0"),
        ("-07", "-7"),
        ("1e+16", str(10**16)),
        ("True", "1"),
        ("true", "1"),
        ("FALSE", "0"),
        (str(2**64 - 1), str(2**64 - 1)),
        (str(-(2**63)), str(-(2**63))),
    ],
)
@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_text_of_a_whole_category(tmp_path: Path, name: str, text: str, becomes: str) -> None:
    frame = pd.DataFrame({"y": [1, 0, 1], "c": [text, "", "NA"], "many": [f"{text}|5", "NA|5", ""]})
    random_frames.FORMATS[name](frame, tmp_path / name)
    many = Category("many", separator="|", length=2, whole=True)
    schema = Schema("y", categories=(Category("c", whole=True), many), missing=("NA", "5.0"))
    rows = everything(tmp_path / name, schema)
    assert rows.ids.tolist() == [[ident(becomes), ident(becomes), 0], [0] * 3, [0] * 3]


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
@pytest.mark.parametrize("text", ["a", "0.5", "1e19", "-", ".", "+7", "7.0.0", "truE", "0x7"])
def test_text_that_is_no_integer_of_a_whole_category_is_a_broken_row(
    tmp_path: Path, name: str, text: str
) -> None:
    random_frames.FORMATS[name](pd.DataFrame({"y": [1, 0], "c": ["7", text]}), tmp_path / name)
    shown = text.replace(".", "[.]").replace("+", "[+]")
    with pytest.raises(DataError, match=f"c is '{shown}', expected an integer or nothing"):
        everything(tmp_path / name, Schema("y", categories=(Category("c", whole=True),)))
    random_frames.FORMATS[name](pd.DataFrame({"y": [1, 0], "m": ["7", f"7|8|{text}"]}), tmp_path / name)
    with pytest.raises(DataError, match=f"m is '{shown}', expected an integer or nothing"):
        everything(
            tmp_path / name, Schema("y", categories=(Category("m", separator="|", length=2, whole=True),))
        )


@pytest.mark.parametrize("name", random_frames.FORMATS)
@pytest.mark.parametrize(
    ("labels", "positive", "expected"),
    [
        ([True, False], "", [1, 0]),
        ([1.0, 0.0], "", [1, 0]),
        ([True, False], "True", [1, 0]),
        ([True, False], "false", [0, 1]),
        ([True, False], "1", [1, 0]),
        ([2, 1], "2.0", [1, 0]),
        ([2.0, -1.0], "2", [1, 0]),
        (["yes", "no"], "yes", [1, 0]),
    ],
)
def test_labels_are_compared_as_numbers_where_both_are(
    tmp_path: Path, name: str, labels: list[Any], positive: str, expected: list[int]
) -> None:
    frame = pd.DataFrame({"y": labels, "text": ["a", "b"]})
    random_frames.FORMATS[name](frame, tmp_path / name)
    schema = Schema("y", categories=(Category("text"),), positive=positive)
    assert everything(tmp_path / name, schema).labels.tolist() == expected


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.tfrecord"])
def test_a_word_is_no_positive_label_of_numbers(tmp_path: Path, name: str) -> None:
    random_frames.FORMATS[name](pd.DataFrame({"y": [1, 0], "text": ["a", "b"]}), tmp_path / name)
    with pytest.raises(
        DataError, match=f"{name}: the labels of column y are numbers, and positive is 'yes'; set"
    ):
        everything(tmp_path / name, Schema("y", categories=(Category("text"),), positive="yes"))


@pytest.mark.parametrize("name", random_frames.FORMATS)
def test_missing_numbers_are_compared_as_numbers(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame(
        {
            "y": [1, 0, 1, 1],
            "number": [-1.0, 2.5, np.nan, -0.0],
            "beside_missing": [-1.0, 2.0, np.nan, -0.0],
        }
    )
    random_frames.FORMATS[name](frame, tmp_path / name)
    schema = row_schema.parse(
        {
            "label": "y",
            "missing": ["-1", "0"],
            "numbers": {"number": {"scale": "none", "missing": 9}},
            "categories": {"beside_missing": {"cardinality": "hash64", "whole": True}},
        },
        "schema",
    )
    rows = everything(tmp_path / name, schema)
    assert rows.dense[:, 0].tolist() == [9, 2.5, 9, 9]
    assert rows.ids[:, 0].tolist() == [0, ident("2"), 0, 0]


@pytest.mark.parametrize("name", random_frames.FORMATS)
@pytest.mark.parametrize("weights", [[True, False], [2, 0], [0.5, 0.0], [Decimal("0.50"), Decimal("0.00")]])
def test_weights_of_every_type(tmp_path: Path, name: str, weights: list[Any]) -> None:
    frame = pd.DataFrame({"y": [1, 0], "text": ["a", "b"], "w": weights})
    random_frames.FORMATS[name](frame, tmp_path / name)
    rows = everything(tmp_path / name, Schema("y", categories=(Category("text"),), weight="w"))
    assert rows.weights is not None
    assert rows.weights.tolist() == [float(one) for one in weights]


@pytest.mark.parametrize(
    "kind",
    [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)],
    ids=["list", "large_list", "list_view", "large_list_view", "fixed_size_list"],
)
def test_every_type_of_list(kind: Any) -> None:
    values = pa.array([["a", "b"], None, ["c", ""]], kind(pa.string()))
    schema = Schema("y", categories=(Category("c", separator="|", length=2),))
    a, b, c = map(ident, "abc")
    for start, expected in ((0, [[a, b], [0, 0], [c, 0]]), (1, [[0, 0], [c, 0]])):
        assert features(schema, {"c": values[start:]})["c"].tolist() == expected


def test_one_text_of_a_record_has_several_values_whatever_others_have(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / "rows.tfrecord"
    schema = Schema("y", categories=(Category("texts", separator="|", length=3),))

    def ids(*records: list[bytes]) -> list[list[int]]:
        with tf.io.TFRecordWriter(str(path)) as out:
            for values in records:
                label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
                texts = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
                example = tf.train.Example(features=tf.train.Features(feature={"y": label, "texts": texts}))
                out.write(example.SerializeToString())
        return everything(path, schema).ids.tolist()  # type: ignore[no-any-return]

    a, b, both = ident("a"), ident("b"), ident("a|b")
    assert ids([b"a|b"], []) == [[a, b, 0], [0, 0, 0]]
    assert ids([b"a|b"], [b"a|b", b"a"]) == [[a, b, 0], [both, a, 0]]


def test_a_feature_that_the_first_records_lack(tmp_path: Path) -> None:
    """Beside others that the schema ignores; and a batch of which every record is broken."""
    path = tmp_path / "rows.tfrecord"
    schema = Schema("y", categories=(Category("text"),), ignored=None)
    frame = pd.DataFrame({"y": [1, 0], "text": [None, "b"], "other": [1, 2], "another": [1, 2]})
    random_frames.tfrecord(frame, path)
    tf = pytest.importorskip("tensorflow")
    first, second = (record.numpy() for record in tf.data.TFRecordDataset(str(path)))
    example = tf.train.Example.FromString(first)
    del example.features.feature["text"]
    with tf.io.TFRecordWriter(str(path)) as out:
        for record in (example.SerializeToString(), second, *[b"\xff"] * 4094, *[b"\xff"] * 4096, second):
            out.write(record)
    broken = BrokenRows(8190, lambda text: None)
    rows = concatenate(list(DataFiles(str(path), broken=broken, schema=schema).blocks()))
    assert rows.ids[:, 0].tolist() == [0, ident("b"), ident("b")]
    assert broken.count == 8190


def test_the_least_integer_is_a_value_in_tfrecord(tmp_path: Path) -> None:
    least = -(2**63)
    frame = pd.DataFrame({"y": [1, 0], "integer": [least, 5], "integers": [[least, 5], []]})
    random_frames.tfrecord(frame, tmp_path / "rows.tfrecord")
    rows = everything(tmp_path / "rows.tfrecord", random_frames.schema_of(frame))
    assert rows.ids[:, 0].tolist() == [ident(str(least)), ident("5")]
    assert rows.ids[:, 1:3].tolist() == [[ident(str(least)), ident("5")], [0, 0]]


def test_text_that_other_formats_would_read_otherwise_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.DataFrame(
        {"y": [1, 0], "u": [7.0, None], "b": [True, False], "v": ["1.0", "a"], "t": ['"', "a"]}
    )
    path = tmp_path / "rows.tsv"
    frame.to_csv(path, sep="\t", index=False)

    def said(**options: Any) -> list[str]:
        whole = options.pop("whole", None)
        schema = Schema(
            "y", categories=tuple(Category(c, whole=whole) for c in "ub"), ignored=None, **options
        )
        before = everything(path, Schema("y", categories=(Category("u"), Category("b")), ignored=None))
        open_source(str(path), schema=schema).check()
        assert before.ids[0].tolist() == [ident("7.0"), ident("True")]  # of models that have learned
        return capsys.readouterr().err.splitlines()

    first, second, third = said()
    assert first.startswith(
        f'warning: {path}: fields such as """" stand in quotes, which are read as part of them'
    )
    assert (
        "the category u has values such as 7.0, and other formats would have 7, which has another id"
        in second
    )
    assert "the category b has values such as True, and other formats would have 1" in third
    assert said(whole=True, quotes=True) == said(whole=False, quotes=False) == []
    assert check.main(["--label", "y", "--categories", "u,v", str(path)]) == 0
    assert capsys.readouterr().err.count("the category ") == 1  # v has texts


def test_a_column_of_many_files_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Spark writes doubles; the last line needs no end, and a long number is none."""
    for number in range(3):
        (tmp_path / f"{number}.csv").write_text(f"y,c,d,e\n1,{number + 1}.2345678E7,-0.0,9E999\n0,7,,1.25E1")
    schema = Schema("y", categories=tuple(Category(c) for c in "cde"))
    open_source(str(tmp_path), schema=schema).check()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        f"warning: {tmp_path}/0.csv: the category c has values such as 1.2345678E7, and other formats would "
        "have 12345678, which"
    )
    assert "the category d has values such as -0.0, and other formats would have 0, which" in second


def test_a_table_in_place_of_files(tmp_path: Path) -> None:
    frame = pd.DataFrame({"y": [1, 0, 1, 0], "text": list("abca"), "number": [1.0, 2, 3, None]})
    schema = random_frames.schema_of(frame)
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    files = list(Rows(schema, tmp_path / "rows.parquet", 2, holdout=0.25))
    for table in (frame, frame[frame.index >= 0], pa.table(frame.to_dict("list")), frame.to_dict("list")):
        found = list(Rows(schema, table, 2, holdout=0.25))
        assert len(found) == len(files) == 2
        for (x, labels), (expected, others) in zip(found, files, strict=True):
            np.testing.assert_array_equal(x["text"], expected["text"])
            np.testing.assert_array_equal(x["number"], expected["number"])
            np.testing.assert_array_equal(labels, others)
    served = features(schema, frame.drop(columns="y").assign(other=1)[1:], grouped=True)
    assert served["ids"][:, 0].tolist() == [ident("b"), ident("c"), ident("a")]
    with pytest.raises(DataError, match="the table lacks the column text"):
        features(schema, {"number": [1]})
    with pytest.raises(DataError, match="the table row 2: the label is '7', expected 0 or 1"):
        list(Rows(schema, frame.assign(y=[1, 7, 1, 1]), 2))
    with pytest.raises(DataError, match="the table has no row that is not broken"):
        list(Rows(schema, frame.assign(y=7), 2, max_bad_rows=4))
    with pytest.raises(DataError, match="the table is empty"):
        Rows(schema, frame[:0], 2)
    with pytest.raises(DataError, match=r"cannot convert the table to Arrow: .*text"):
        Rows(schema, frame.assign(text=[1, "a", "b", "c"]), 2)
    with pytest.raises(DataError, match=r"cannot convert the table to Arrow: .*too large"):
        Rows(schema, frame.assign(text=[2**70, 1, 2, 3]), 2)
    with pytest.raises(DataError, match=r"cannot convert the table to Arrow: .*expected length 1 but got"):
        features(schema, {"number": [1], "text": ["a", "b"]})
    with pytest.raises(TypeError, match="table is a int, expected a DataFrame"):
        features(schema, 7)
