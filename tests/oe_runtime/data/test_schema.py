"""Rows of any columns: what a schema says, the same rows from every format, and what does not fit."""

import gzip
import json
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import oe_runtime._core as _core
from oe_runtime.data import DataError, open_source, row_schema
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.row_schema import AVAZU, BUILT_IN, CRITEO, DEEPREC, Schema

TEXT = """
label: bought
numbers:
  price: log1p
  age: {scale: min-max, min: 18, max: 98, missing: 38}
  score: {scale: standard, mean: 2, deviation: 4}
  plain: none
categories:
  site: 50
  user: hash64
  tags: {cardinality: 20, separator: "|", length: 3}
  visits: {cardinality: 20, separator: " ", length: 2, padding: before, keep: last}
weight: importance
ignored: [id]
"""
HEADER = ["id", "site", "bought", "price", "age", "score", "plain", "user", "tags", "visits", "importance"]
ROWS = [
    ["0", "a.com", "1", "2.5", "58", "10", "-1.5", "u1", "x|y", "p q r", "0.5"],
    ["1", "", "0", "", "", "", "", "", "", "", "1"],
    ["2", "b.com", "0", "-7", "18", "2", "1e3", "u2", "||z|w|x|y", "p", "2"],
]


def schema(text: str = TEXT) -> Schema:
    return row_schema.parse(yaml.safe_load(text), "schema.yml")


def ident(text: str, cardinality: int) -> int:
    digest = _core.hash_strings(np.array([0, len(text)], np.int32), np.frombuffer(text.encode(), np.uint8))
    return 1 + int(digest[0]) % cardinality


def everything(path: Path, wanted: Schema, start: int = 0) -> Batch:
    return concatenate(list(open_source(str(path), schema=wanted).blocks(start)))


def text_file(path: Path) -> None:
    path.write_text("\n".join(",".join(row) for row in [HEADER, *ROWS]))


def semicolons(path: Path) -> None:
    path.write_bytes(gzip.compress("\n".join("\t".join(row) for row in [HEADER, *ROWS]).encode()))


def table(lists: bool) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for place, name in enumerate(HEADER):
        texts = [row[place] for row in ROWS]
        if name in ("price", "age", "score", "plain", "importance"):
            columns[name] = pa.array([float(t) if t else None for t in texts])
        elif name == "bought":
            columns[name] = pa.array([int(t) for t in texts])
        elif lists and name in ("tags", "visits"):
            split = [t.split("|" if name == "tags" else " ") if t else None for t in texts]
            columns[name] = pa.array(split)
        else:
            columns[name] = pa.array([t or None for t in texts])
    return pa.table(columns)


def parquet(path: Path) -> None:
    pq.write_table(table(lists=True), path, row_group_size=2)


def parquet_of_texts(path: Path) -> None:
    pq.write_table(table(lists=False), path)


def arrow(path: Path) -> None:
    rows = table(lists=True)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, rows.schema) as file:
        file.write_table(rows, max_chunksize=2)


def tfrecord(path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    with tf.io.TFRecordWriter(str(path)) as out:
        for row in ROWS:
            features = {}
            for name, text in zip(HEADER, row, strict=True):
                if name in ("tags", "visits"):
                    values = [v.encode() for v in text.split("|" if name == "tags" else " ") if v]
                    features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
                elif name in ("id", "bought"):
                    features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(text)]))
                elif name in ("site", "user"):
                    values = [text.encode()] if text else []
                    features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
                else:
                    values = [float(text)] if text else []
                    features[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
            out.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


FORMATS: list[tuple[str, Callable[[Path], None]]] = [
    ("rows.csv", text_file),
    ("rows.tsv.gz", semicolons),
    ("rows.parquet", parquet),
    ("rows.pq", parquet_of_texts),
    ("rows.arrow", arrow),
    ("rows.tfrecord", tfrecord),
]


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=lambda v: getattr(v, "__name__", v))
def test_every_format_has_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / name
    write(path)
    rows = everything(path, schema())
    assert rows.labels.tolist() == [1, 0, 0]
    assert rows.weights is not None
    assert rows.weights.tolist() == [0.5, 1, 2]
    log = [np.log1p(2.5), 0, -np.log1p(7)]
    expected = np.array([log, [0.5, 0.25, 0], [2, 0, 0], [-1.5, 0, 1000]], np.float32).T
    np.testing.assert_array_equal(rows.dense, expected)
    t, most = (lambda text: ident(text, 20)), _core.MOST_IDS
    assert rows.ids.tolist() == [
        [ident("a.com", 50), ident("u1", most), t("x"), t("y"), 0, t("q"), t("r")],
        [0] * 7,
        [ident("b.com", 50), ident("u2", most), t("z"), t("w"), t("x"), 0, t("p")],
    ]
    for start in (1, 2):
        rest = everything(path, schema(), start)
        np.testing.assert_array_equal(rest.ids, rows.ids[start:])
        np.testing.assert_array_equal(rest.weights, rows.weights[start:])
    source = open_source(str(path), schema=schema())
    parts = [batch for part in source.ranges() for batch in source.read(part)]
    np.testing.assert_array_equal(concatenate(parts).ids, rows.ids)
    source.check()


def test_a_schema_survives_its_way_to_the_workers() -> None:
    for one in (schema(), *BUILT_IN.values()):
        again = row_schema.load(json.dumps(one.to_value()))
        assert again == one
        assert (
            row_schema.parse(yaml.safe_load(yaml.safe_dump(one.to_value(), sort_keys=False)), "again") == one
        )


def test_built_in_schemas(tmp_path: Path) -> None:
    assert [s.ids for s in (CRITEO, DEEPREC, AVAZU)] == [26, 26, 22]
    numbers = dict(zip((n.name for n in DEEPREC.numbers), DEEPREC.numbers, strict=True))
    assert (numbers["I2"].min, numbers["I2"].max) == (-3, 22066)
    path = tmp_path / "train.csv"
    header = ",".join(AVAZU.columns)
    row = "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,"
    row += "a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79"
    for text in (f"{header}\n{row}\n", f"{row}\n"):
        path.write_text(text)
        rows = everything(path, AVAZU)
        assert rows.dense.shape == (1, 0)
        assert rows.ids[0, 0] == ident("14102100", 250)
        assert rows.ids[0, -1] == ident("79", 70)
    assert AVAZU.limited(100).categories[3].cardinality == 100


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("label: y", "schema.yml names neither numbers nor categories"),
        ("numbers: [a]", "schema.yml names no label"),
        ("label: y\nnumber: [a]", "schema.yml has the unknown key number; did you mean numbers?"),
        ("label: y\nnumbers: {a: log}", "numbers.a.scale is 'log', expected one of log1p, none, min-max"),
        ("label: y\nnumbers: {a: min-max}", "numbers.a: the scale min-max needs min and max"),
        ("label: y\nnumbers: {a: {scale: min-max, min: 2, max: 1}}", "max is 1, which is not above min, 2"),
        ("label: y\nnumbers: {a: {mean: 1}}", "numbers.a: mean does not go with the scale log1p"),
        ("label: y\ncategories: {a: 0}", "categories.a.cardinality is 0, expected a number of ids from 1"),
        ("label: y\ncategories: {a: {separator: '|'}}", "needs their number at most, length"),
        ("label: y\ncategories: {a: {pooling: sum}}", "pooling goes with a column of several values"),
        ("label: y\ncategories: {a: 1, Y: 1}", "names the column Y twice"),
        ("label: y\ncategories: [a]\ncolumns: [y, b]", "columns lacks the column a"),
        ("label: y\ncategories: [a]\nheader: false", "without a header, `columns` must name"),
        ("label: y\ncategories: [a]\nseparator: '::'", "separator is '::', expected one ASCII character"),
        (
            "label: y\npositive: yes\nnumbers: [a]",
            "positive is True, expected a text or a whole number",
        ),
        ("label: y\nmissing: [null]\nnumbers: [a]", "missing is None, expected a text or a whole number"),
        ("label: y\nmissing: NA\nnumbers: [a]", "missing is 'NA', expected a list of values"),
        ("label: y\nmissing: [NA]\npositive: NA\nnumbers: [a]", "positive is NA, which counts as missing"),
        ("label: y\nmissing: [1]\npositive: '1.0'\nnumbers: [a]", "positive is 1.0, which counts as missing"),
        ("[y]", "schema.yml is ['y'], expected keys of label"),
    ],
)
def test_a_wrong_schema_is_refused_by_its_key(text: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        schema(text)
    assert said in str(error.value)


def test_a_schema_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "schema.yml"
    path.write_text("label: y\n  numbers: [")
    for given, said in (
        (str(path), f"{path} line 2: "),
        ("criteoo", "did you mean criteo?"),
        (
            str(tmp_path / "none.yml"),
            "No such file or directory; a schema is a file or criteo, deeprec, avazu",
        ),
        ("{", "the schema is no JSON"),
    ):
        with pytest.raises(DataError, match="schema") as error:
            row_schema.load(given)
        assert said in str(error.value)


def test_a_file_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"

    def said(content: str, text: str) -> str:
        path.write_text(content)
        with pytest.raises(DataError) as error:
            everything(path, schema(text))
        return str(error.value)

    few = "label: y\nnumbers: [price]\ncategories: [site]"
    assert said("y,price,site\n1,2,a\n0,abc,b\n", few) == (
        f"{path} line 3: price is 'abc', expected a number or nothing"
    )
    assert said("y,prise,site\n1,2,a\n", few) == (
        f"the header of {path} lacks the column price; did you mean for price: prise?"
    )
    assert said("y,price,site,extra\n1,2,a,b\n", few).startswith(
        f"the header of {path} has columns that the schema does not name: extra; use them, or name them"
    )
    assert said("1,2,a\n", few).startswith(
        f"the header of {path} lacks the columns y, price, site; it has 1, 2"
    )
    pq.write_table(pa.table({"y": [1], "price": ["x"], "site": ["a"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="column price has the type string, expected numbers"):
        everything(tmp_path / "rows.parquet", schema(few))
    with pytest.raises(DataError, match="makes rows of Criteo's columns, not of another schema"):
        open_source("generate:10", schema=AVAZU)


def test_columns_by_flags() -> None:
    found = row_schema.from_flags(None, "y", ["site:50", "user"], ["price", "age:min-max:18:98"])
    assert (found.label, found.names) == ("y", ("y", "price", "age", "site", "user"))
    assert [c.cardinality for c in found.categories] == [50, _core.MOST_IDS]
    assert found.numbers[1].factors == (False, 18, 80)
    assert found.places("rows", ["other", "user", "site", "age", "price", "y"]) == [5, 4, 3, 2, 1]
    assert row_schema.from_flags(CRITEO, "clicked", None, None).categories == CRITEO.categories
    for wrong, said in (
        (["price:min-max:1"], "expected NAME:SCALE, min-max:MIN:MAX"),
        (["price:standard:a:b"], "'a' is no number"),
        (["price:log2"], "expected one of log1p"),
    ):
        with pytest.raises(DataError, match=said):
            row_schema.from_flags(None, "y", None, wrong)


def test_no_schema_breaks_the_parser() -> None:
    """Any change of a value ends in a schema or in a sentence."""
    rng = random.Random(7)  # noqa: S311
    values = [
        None,
        True,
        0,
        -1,
        10**30,
        float("nan"),
        "",
        " ",
        "\n",
        "é",
        [],
        {},
        ["a", "a"],
        {"a": None},
        "a",
    ]
    whole = yaml.safe_load(TEXT)
    for _ in range(2000):
        changed = json.loads(json.dumps(whole))
        place = changed
        while True:
            key = rng.choice(list(place))
            if isinstance(place[key], dict) and rng.random() < 0.7:
                place = place[key]
                continue
            place[key] = rng.choice(values)
            break
        try:
            found = row_schema.parse(changed, "schema.yml")
        except DataError as error:
            refused = str(error)
        else:
            refused = "" if row_schema.parse(found.to_value(), "again") == found else "differs"
        assert not refused or refused.startswith("schema.yml"), changed


def test_a_constant_label_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    few = schema("label: y\ncategories: [site]")
    for ones, said in ((0, f"warning: {path}: the label y is 0 in the first 1,500 rows"), (1, "")):
        path.write_text("y,site\n" + "0,a\n" * (1500 - ones) + "1,a\n" * ones)
        open_source(str(path), schema=few).check()
        found = capsys.readouterr().err
        assert found.startswith(said)
        assert bool(found) == bool(said)


WORDS: dict[str, Any] = {
    "label": "bought",
    "positive": "yes",
    "missing": ["NA", -1],
    "numbers": {"price": {"scale": "none", "missing": 7}},
    "categories": {"site": 50, "tags": {"cardinality": 20, "separator": "|", "length": 2}},
}


def words_as_text(path: Path) -> None:
    path.write_text("bought,price,site,tags\nyes,-1,NA,NA|x|-1\nno,2.5,NAN,NA\nmaybe,,a,x|y\n")


def words_as_columns(path: Path) -> None:
    columns = {"bought": ["yes", "no", "maybe"], "price": [-1.0, 2.5, None], "site": ["NA", "NAN", "a"]}
    tags = [["NA", "x", "-1"], [], ["x", "y"]]
    pq.write_table(pa.table(columns | {"tags": tags}), path)


def words_as_records(path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    tags = ["NA|x|-1", "NA", "x|y"]
    rows = zip(["yes", "no", "maybe"], [[-1.0], [2.5], []], ["NA", "NAN", "a"], tags, strict=True)
    with tf.io.TFRecordWriter(str(path)) as out:
        for label, price, site, tag in rows:
            features = {
                name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
                for name, text in (("bought", label), ("site", site), ("tags", tag))
            }
            features["price"] = tf.train.Feature(float_list=tf.train.FloatList(value=price))
            out.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


@pytest.mark.parametrize(
    ("name", "write"),
    [("rows.csv", words_as_text), ("rows.parquet", words_as_columns), ("rows.tfrecord", words_as_records)],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_other_labels_and_words_for_missing_values(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    words = schema(json.dumps(WORDS))
    assert row_schema.parse(words.to_value(), "again") == words
    rows = everything(tmp_path / name, words)
    assert rows.labels.tolist() == [1, 0, 0]
    assert rows.dense[:, 0].tolist() == [7, 2.5, 7]
    x, y = ident("x", 20), ident("y", 20)
    assert rows.ids.tolist() == [[0, x, 0], [ident("NAN", 50), 0, 0], [ident("a", 50), x, y]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_label_without_a_value_is_broken(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    columns = {"bought": ["yes", "NA"], "price": [1.0, 2.0], "site": ["a", "b"], "tags": ["x", "y"]}
    if kind == "csv":
        path.write_text("bought,price,site,tags\nyes,1,a,x\nNA,2,b,y\n")
    else:
        pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match="the label is 'NA', which is no value"):
        everything(path, schema(json.dumps(WORDS)))


def test_whole_numbers_may_be_labels(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"y": [2, 1, 2], "a": [1, -1, 3]}), path)
    found = schema('{"label": "y", "positive": 2, "missing": [-1], "numbers": {"a": "none"}}')
    rows = everything(path, found)
    assert rows.labels.tolist() == [1, 0, 1]
    assert rows.dense[:, 0].tolist() == [1, 0, 3]


SMALL = row_schema.parse(
    {"label": "click", "numbers": {"age": "none"}, "categories": {"größe": 50}, "ignored": "*"}, "small.yml"
)


def named(path: Path, names: list[str]) -> None:
    """Write a file of one row with these columns, in the format of its ending."""
    values = ["0", *map(str, range(1, len(names)))]
    if path.suffix == ".csv":
        path.write_text(f"{','.join(names)}\n{','.join(values)}\n", encoding="utf-8")
        return
    numbers = [pa.array([int(value)]) for value in values]
    pq.write_table(pa.table(numbers, names), path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("names", "age"), [(["click", "AGE", "age", "größe"], 2), (["click", "Age", "größe"], 1)]
)
def test_a_column_of_the_very_name_goes_before_one_in_another_case(
    ending: str, names: list[str], age: int, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{ending}"
    named(path, names)
    found = everything(path, SMALL)
    assert found.dense.tolist() == [[age]]
    assert found.ids.tolist() == [[ident(str(len(names) - 1), 50)]]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("names", [["click", "age", "age", "größe"], ["click", "Age", "AGE", "größe"]])
def test_a_column_that_a_file_has_twice_is_refused(ending: str, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / f"rows.{ending}"
    named(path, names)
    shown = f"the column age 2 times: {names[1]} .column 2., {names[2]} .column 3."
    with pytest.raises(DataError, match=shown):
        everything(path, SMALL)


def test_unsigned_ids_are_read_as_text_files_have_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    large = 2**64 - 5
    pq.write_table(pa.table({"click": [0], "age": [1.0], "größe": pa.array([large], pa.uint64())}), path)
    assert everything(path, SMALL).ids.tolist() == [[ident(str(large), 50)]]


@pytest.mark.parametrize("column", ["age", "weight"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_number_that_models_would_have_as_infinite_is_a_broken_row(
    ending: str, column: str, tmp_path: Path
) -> None:
    wanted = row_schema.parse(
        {"label": "click", "numbers": {"age": "none"}, "weight": "weight", "ignored": "*"}, "small.yml"
    )
    values = {"click": [1, 1], "age": [1.0, 2.0], "weight": [1.0, 2.0]} | {column: [1.0, 1e39]}
    path = tmp_path / f"rows.{ending}"
    if ending == "csv":
        path.write_text(
            "\n".join(
                [",".join(values), *(",".join(map(str, r)) for r in zip(*values.values(), strict=True))]
            )
        )
    else:
        pq.write_table(pa.table(values), path)
    with pytest.raises(DataError, match=f"{column} is '1e.39', expected a number"):
        everything(path, wanted)


def test_whole_floats_are_categories_as_their_integers(tmp_path: Path) -> None:
    """pandas stores ids as floats where some are missing; a fraction is no id."""
    path = tmp_path / "rows.parquet"
    values = [7.0, None, float("nan"), 0.0, 3e9, 2.5, float("inf")]
    pq.write_table(pa.table({"y": [1, 0, 1, 0, 1, 0, 1], "user": values}), path)
    few = schema("label: y\ncategories: {user: 50}\nmissing: ['0']")
    source = open_source(str(path), max_bad_rows=2, schema=few)
    (rows,) = source.blocks()
    assert rows.ids[:, 0].tolist() == [ident("7", 50), 0, 0, 0, ident("3000000000", 50)]
    with pytest.raises(DataError, match=r"row 6: user is '2\.5', expected a text or an integer"):
        everything(path, few)


def test_decimals_and_lists_of_one_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    lists = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    prices = pa.array([Decimal("2.5"), None, Decimal("-1.0")])
    pq.write_table(pa.table({"y": [1, 0, 1], "price": prices, "items": lists}), path)
    text = (
        "label: y\nnumbers: {price: none}\ncategories: {items: {cardinality: 50, length: 3}}\nmissing: ['-1']"
    )
    rows = everything(path, schema(text))
    assert rows.dense[:, 0].tolist() == [2.5, 0, 0]
    one, two, three, four = (ident(text, 50) for text in "1234")
    assert rows.ids.tolist() == [[one, two, 0], [0, 0, 0], [three, four, 0]]
