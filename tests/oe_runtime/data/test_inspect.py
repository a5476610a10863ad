"""What a file's columns seem to be, as a schema that reads the file."""

import csv as csv_module
import datetime
import random
import re
import tempfile
from decimal import Decimal
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import random_frames
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings

from oe_runtime.data import inspect, open_source, row_schema, sample
from oe_runtime.data.batch import concatenate

RNG_ROWS = 3000


def table() -> pa.Table:
    rng = random.Random(3)  # noqa: S311
    rows = range(RNG_ROWS)
    return pa.table(
        {
            "key": [f"k{row}" for row in rows],
            "age": [rng.randrange(18, 80) for _ in rows],
            "clicked": [int(rng.random() < 0.25) for _ in rows],
            "spent": [round(rng.expovariate(1) ** 4, 2) if rng.random() > 0.1 else None for _ in rows],
            "site": [f"s{rng.randrange(40)}" for _ in rows],
            "tags": ["|".join({f"t{rng.randrange(12)}" for _ in range(1 + row % 5)}) for row in rows],
        }
    )


def csv(path: Path) -> None:
    pyarrow.csv.write_csv(table(), path)


def semicolons(path: Path) -> None:
    pyarrow.csv.write_csv(table(), path, pyarrow.csv.WriteOptions(delimiter=";"))


def parquet(path: Path) -> None:
    pq.write_table(table(), path)


def arrow(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table().schema) as file:
        file.write_table(table(), max_chunksize=1000)


@pytest.mark.parametrize("write", [csv, semicolons, parquet, arrow], ids=lambda one: one.__name__)
def test_the_proposal_reads_the_file(tmp_path: Path, write, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / {"parquet": "rows.parquet", "arrow": "rows.arrow"}.get(write.__name__, "rows.csv")
    write(path)
    assert inspect.main([str(path)]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    schema = row_schema.parse(yaml.safe_load(text), "proposal")
    assert schema.label == "clicked"
    assert [(one.name, one.scale) for one in schema.numbers] == [("age", "standard"), ("spent", "log1p")]
    site, tags = schema.categories
    assert (site.name, site.cardinality, site.several) == ("site", 48, False)
    assert (tags.name, tags.separator, tags.length) == ("tags", "|", 5)
    assert schema.ignored == ("key",)
    assert f"# {path.name}: 3,000 rows.\n" in text
    assert text.splitlines()[1].endswith("% of the rows")
    (spent,) = [line for line in text.splitlines() if line.startswith("  spent: ")]
    assert spent.endswith("% missing")
    assert "table by --dim 9: 3.38 KiB" in text
    assert sum(batch.rows for batch in open_source(str(path), schema=schema).blocks()) == RNG_ROWS


def test_criteos_columns_are_known_without_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([str(Path(__file__).with_name("criteo_200.tsv"))]) == 0
    schema = row_schema.parse(yaml.safe_load(capsys.readouterr().out), "proposal")
    assert schema.header is False
    assert schema.columns == row_schema.CRITEO.columns
    assert {one.name for one in schema.categories} <= {f"C{n}" for n in range(1, 27)}


@pytest.mark.parametrize(
    ("content", "label", "said"),
    [
        ("a,b\n2,x\n3,y\n", None, "has no column of 0 and 1, which could be the label; name it with --label"),
        ("a,b\n2,x\n3,y\n", "c", "has no column c; it has a, b"),
        ("a,b\n2,x\n3,y\n4,y\n", "a", "column a has the values '2', '3', '4'; a label has two"),
        ("", None, "is empty: it has no row"),
        ("a,b\n", None, "no row of the sample has 2 columns"),
        ("click,a,a\n1,x,y\n0,x,y\n", None, "click; a: rows.csv has 2 columns of this name, in any case"),
        (
            "click,a,A\n1,x,y\n0,x,y\n",
            "a",
            "column a cannot be the label: rows.csv has 2 columns of this name",
        ),
        ("click,a\n1,x\n,y\n0,z\n", None, "line 3: the label is '', expected 0 or 1"),
        ("click,a\n1,x\n0\n0,z\n", None, "line 3: found 1 columns, expected 2"),
    ],
)
def test_what_is_no_data_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, label: str | None, said: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    assert inspect.main([str(path), *(["--label", label] if label else [])]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}")
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_constant_label_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("click,site\n" + "0,a\n0,b\n" * 20)
    assert inspect.main([str(path)]) == 0
    assert "it is 0 in all 40 rows: there is nothing to learn from it" in capsys.readouterr().out


def test_other_labels_and_words_for_missing_values_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("click,price,site\n" + "no,NA,NA\nyes,2.5,a\nno,3,b\n" * 20)
    assert inspect.main([str(path)]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    assert "label: click  # yes in 33.33% of the rows" in text
    assert 'positive: "yes"  # no is 0' in text
    schema = row_schema.parse(yaml.safe_load(text), "proposal")
    assert (schema.positive, schema.missing) == ("yes", ("NA",))
    assert [one.name for one in schema.numbers] == ["price"]


@pytest.mark.parametrize(("zero", "one"), [("-1", "1"), ("0.0", "1.0"), ("1", "2")])
def test_two_numbers_may_be_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], zero: str, one: str
) -> None:
    """The schema names the positive one: the higher, but 1 of 1 and 2."""
    path = tmp_path / "rows.csv"
    path.write_text("click,site\n" + f"{one},a\n{one},b\n{zero},b\n" * 20)
    assert inspect.main([str(path)]) == 0
    schema = row_schema.parse(yaml.safe_load(capsys.readouterr().out), "proposal")
    assert schema.positive == (zero if one == "2" else one)
    (rows,) = open_source(str(path), schema=schema).blocks()
    assert rows.labels.sum() == (20 if one == "2" else 40)


def test_columns_of_other_types_are_ignored_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What pandas and Spark write: whole floats beside missing ids, decimals, lists of one length, times."""
    rows = range(200)
    path = tmp_path / "rows.parquet"
    columns = {
        "click": pa.array([row % 2 for row in rows]),
        "user_id": pa.array([float(row % 9) if row % 5 else None for row in rows]),
        "paid": pa.array([Decimal(row % 7) / 4 for row in rows]),
        "items": pa.array([[row % 11, row % 3] for row in rows], pa.list_(pa.int64(), 2)),
        "seen": pa.array([datetime.datetime(2026, 11, 1 + row % 20) for row in rows]),
        "vector": pa.array([[0.5, row / 7] for row in rows]),
    }
    pq.write_table(pa.table(columns), path)
    assert inspect.main([str(path)]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    assert "  - seen  # its type, timestamp[us], is not read\n" in text
    schema = row_schema.parse(yaml.safe_load(text), "proposal")
    assert [one.name for one in schema.numbers] == ["paid"]
    assert [(one.name, one.length) for one in schema.categories] == [("user_id", 1), ("items", 2)]
    assert schema.ignored == ("seen", "vector")
    assert sum(batch.rows for batch in open_source(str(path), schema=schema).blocks()) == 200


def excel(frame: pd.DataFrame, path: Path) -> None:
    """As Excel exports CSV where lists have semicolons: a mark, quotes, CRLF."""
    text = random_frames.with_joined_lists(frame).to_csv(
        index=False, sep=";", quoting=csv_module.QUOTE_ALL, lineterminator="\r\n"
    )
    path.write_bytes(text.encode("utf-8-sig"))


def tabs_of_excel(frame: pd.DataFrame, path: Path) -> None:
    random_frames.with_joined_lists(frame).to_csv(path, index=False, sep="\t", lineterminator="\r\n")


def with_index(frame: pd.DataFrame, path: Path) -> None:
    random_frames.with_joined_lists(frame).to_csv(path)


def without_header(frame: pd.DataFrame, path: Path) -> None:
    random_frames.with_joined_lists(frame).to_csv(path, index=False, header=False)


def pipes(frame: pd.DataFrame, path: Path) -> None:
    """Lists stand in quotes, since what is between their values is between fields, too."""
    random_frames.with_joined_lists(frame).to_csv(path, index=False, sep="|")


def tabs(frame: pd.DataFrame, path: Path) -> None:
    random_frames.with_joined_lists(frame).to_csv(path, index=False, sep="\t", compression="gzip")


def spark(frame: pd.DataFrame, path: Path) -> None:
    """A directory of parts, the first without a byte, another with a header alone."""
    path.mkdir()
    (path / "_SUCCESS").touch()
    (path / "part-00000.csv").touch()
    rows = random_frames.with_joined_lists(frame)
    for number, part in enumerate((rows[:0], rows[:1], rows[1:]), start=1):
        part.to_csv(path / f"part-0000{number}.csv", index=False)


def spark_parquet(frame: pd.DataFrame, path: Path) -> None:
    path.mkdir()
    table = random_frames.table_of(frame)
    for number, part in enumerate((table[:0], table[:1], table[1:])):
        pq.write_table(part, path / f"part-0000{number}.snappy.parquet")


def of_table(frame: pd.DataFrame, path: Path) -> None:
    table = random_frames.table_of(frame)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table)


WRITERS = {
    "pandas.csv": random_frames.csv,
    "index.csv": with_index,
    "bare.csv": without_header,
    "excel.csv": excel,
    "excel.txt": tabs_of_excel,
    "pipes.txt": pipes,
    "rows.tsv.gz": tabs,
    "arrow.csv": random_frames.csv_of_arrow,
    "spark": spark,
    "pandas.parquet": lambda frame, path: pq.write_table(random_frames.table_of(frame), path),
    "spark.parquet": spark_parquet,
    "rows.arrow": of_table,
    "rows.tfrecord": random_frames.tfrecord,
}


@pytest.mark.parametrize("name", WRITERS)
@given(frame=random_frames.odd_frames())
@settings(
    max_examples=20,
    deadline=None,  # the machine may be busy
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_inspect_prints_trains(
    name: str, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it says in a sentence why nothing does; columns of good types are never ignored."""
    kinds = frame.attrs.pop("kinds")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        try:
            WRITERS[name](frame, path)
        except (pa.ArrowException, csv_module.Error, TypeError, ValueError):
            assume(False)  # no file of such values
        status = inspect.main(["--label", "c1" if name == "bare.csv" else "y", str(path)])
        text, said = capsys.readouterr()
        if status:
            assert text == ""
            assert said.count("\n") == 1
            assert str(path) in said
            values = [value for column in frame for value in frame[column] if isinstance(value, str)]
            has_line_ends = name in TEXTS and any("\n" in value for value in values)
            nothing = "has no column to train on besides the label"
            assert ("a field in quotes goes on in the next line" if has_line_ends else nothing) in said
            ignored = {}
            used = set()
        else:
            schema = row_schema.parse(yaml.safe_load(text), "proposal")
            rows = concatenate(list(open_source(str(path), schema=schema).blocks()))
            assert "; set " not in said  # the trainer has no doubts
            first = int((frame["y"] == frame["y"][0]).sum())
            assert rows.rows == len(frame)
            assert rows.labels.sum() in (first, len(frame) - first)
            listed = [line.partition("  # ") for line in text.partition("ignored:\n")[2].splitlines()]
            reasons = [one[2] for one in listed if one[0].startswith("  - ")]
            assert len(reasons) == len(schema.ignored or ())
            assert all(reasons)
            ignored = dict(zip(map(str.lower, schema.ignored or ()), reasons, strict=True))
            used = set(schema.names)
        if name == "bare.csv" or (status and has_line_ends):
            return
        good = random_frames.CATEGORIES | random_frames.NUMBERS
        for column in {one.strip() for one, kind in kinds.items() if kind in good} - used - {""}:
            reason = ignored.get(column.lower(), "")
            assert re.search("columns of this name|it has no value", reason) or status, (column, text)


TEXTS = [name for name in WRITERS if re.search("csv|txt|tsv|spark$|hive", name)]


def proposal(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[row_schema.Schema, str]:
    """What inspect prints of files, which their reader takes without a word."""
    assert inspect.main([*flags, str(path)]) == 0
    text, said = capsys.readouterr()
    assert said == ""
    schema = row_schema.parse(yaml.safe_load(text), "proposal")
    source = open_source(str(path), schema=schema)
    source.check()
    assert concatenate(list(source.blocks())).rows
    assert capsys.readouterr().err == ""
    return schema, text


def test_values_that_text_files_have_otherwise_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids are those of the same frame as Parquet, and the trainer has no doubts."""
    frame = pd.DataFrame(
        {
            "click": [0, 1] * 20,
            "user_id": [7.0, None, 12.0, 7.0] * 10,
            "device_type": [True, False, True, True] * 10,
            "site": ['a "b"', "c\td", "e", "007"] * 10,
        }
    )
    frame.to_csv(tmp_path / "rows.tsv", sep="\t", index=False)
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    schema, _ = proposal(tmp_path / "rows.tsv", capsys)
    assert (schema.quotes, schema.separator) == (True, "")
    assert {one.name: one.whole for one in schema.categories} == {
        "user_id": True,
        "device_type": True,
        "site": None,
    }
    ids = [
        concatenate(list(open_source(str(tmp_path / name), schema=schema).blocks())).ids.tolist()
        for name in ("rows.tsv", "rows.parquet")
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("content", "separator", "header", "names"),
    [
        ("0,0,a\n1,1,b\n0,1,a\n", "", False, ["c1", "c2", "c3"]),
        ("nan,0,2.5\n3,1,1\n4,0,7.5\n1,1,8\n", "", False, ["c1", "c2", "c3"]),  # a word above numbers
        ("0,1,2\n1,5.5,a\n0,2.5,b\n", "", True, ["0", "1", "2"]),  # of pandas, for columns without names
        (",click,site\n0,1,a\n1,0,b\n2,0,a\n", "", True, ["Unnamed: 0", "click", "site"]),
        ("click;price;tags\n0;1,5;a,b\n1;2,5;a\n", ";", True, ["click", "price", "tags"]),
        ('click|"a|b"|c d\n0|x y|2\n1|"x|z"|3\n', "|", True, ["click", "a|b", "c d"]),
        ("click|a, b|c\n0|x, y|2\n1|z, w|3\n", "|", True, ["click", "a, b", "c"]),
        ('click;site\n0;"a;b"\n1;c\n', ";", True, ["click", "site"]),
        ('click,size\n0,5" pipe\n1,"\n0,"a\n', "", True, ["click", "size"]),  # quotes that are none
        ("click site\n0 a\n1 b\n", " ", True, ["click", "site"]),
        ("click\x01site\n0\x01a\n1\x01b\n", "\x01", True, ["click", "site"]),  # Hive's
    ],
)
def test_separators_and_headers_are_guessed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    separator: str,
    header: bool,
    names: list[str],
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    schema, _ = proposal(path, capsys)
    assert schema.separator == separator
    assert (schema.header is None) == header
    assert {*schema.names, *(schema.ignored or ())} == set(names)


def test_parts_without_headers_are_guessed_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row, which could be a header, quotes that only the last part needs, and parts without rows."""
    path = tmp_path / "rows"
    path.mkdir()
    for part, content in enumerate(["yes\t4\tx\n", "", "no\t5\ty\nyes\t4\tx\n", 'no\t5\t"a\tb"\n']):
        (path / f"part-{part}.txt").write_text(content)
    assert inspect.main([str(path), "--label", "c1"]) == 0
    text, said = capsys.readouterr()
    assert said == f"warning: {path}: 1 of 4 files have no rows, such as {path}/part-1.txt\n"
    schema = row_schema.parse(yaml.safe_load(text), "proposal")
    assert (schema.header, schema.columns, schema.quotes) == (False, ("c1", "c2", "c3"), True)
    assert concatenate(list(open_source(str(path), schema=schema).blocks())).labels.tolist() == [1, 0, 1, 0]


def test_columns_that_some_files_have_otherwise_are_ignored_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are outside the sample, too."""
    path = tmp_path / "rows"
    path.mkdir()
    for part in range(150):
        text = "click,price,age,site\n0,1.5,20,a\n1,2.5,30,b\n0,1.5,40,a\n"
        if part == 121:
            text = "click,age,site,Price\n0,4,a,cheap\n1,5,b,2.5\n"
        if part == 137:
            text = "click,price,site,more\n0,1.5,a,x\n"
        (path / f"part-{part:03}.csv").write_text(text)
    schema, text = proposal(path, capsys, "--rows", "100")
    assert [one.name for one in schema.categories] == ["price", "site"]
    assert "  - age  # part-137.csv lacks it\n" in text
    assert "  - more  # part-000.csv lacks it\n" in text


@pytest.mark.parametrize(
    "rows", ['click,note\n0,"a\nb"\n1,c\n', 'click;x\n0;c\n1;"a\r\nb"\n', 'click,"a\nb"\n0,c\n1,d\n']
)
def test_line_ends_within_quotes_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(rows, newline="")
    assert inspect.main([str(path)]) == 1
    text, said = capsys.readouterr()
    assert text == ""
    line = 1 + rows[: rows.index('"')].count("\n")
    assert said == (
        f"error: {path} line {line}: a field in quotes goes on in the next line, which is not read; "
        "replace the line ends in fields, or store the rows as Parquet\n"
    )


@pytest.mark.parametrize(
    ("columns", "label"),
    [
        ({"weekend": [0, 0, 0], "bought_it": [1, 0, 1]}, "bought_it"),  # not the constant one
        ({"old": [0, 1, None], "fresh": [0.0, 1.0, 1.0]}, "fresh"),  # not the one with gaps
        ({"paid": [True, False, True], "click": ["no", "yes", "no"]}, "click"),  # the name counts
        ({"label": [0, 0, 0], "click": [0, 1, 0]}, "click"),
    ],
)
def test_the_label_has_two_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: dict[str, list[object]], label: str
) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame(columns | {"site": ["a", "b", "a"]}).to_csv(path, index=False)
    schema, _ = proposal(path, capsys)
    assert schema.label == label
    pd.DataFrame(columns | {"site": ["a", "b", "a"]}).to_parquet(tmp_path / "rows.parquet")
    schema, _ = proposal(tmp_path / "rows.parquet", capsys)
    assert schema.label == label


def test_names_with_any_characters_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a\x85b", "c\x1bd", "e\u2028f", "#g", "h: i", "ü😀", "k\x00l", "yes", "1.5", "m\ufffen"]
    path = tmp_path / "rows.parquet"
    columns = {name: pa.array([1.5, 2.5, 3.5]) for name in names[:-1]}
    times = pa.array([datetime.datetime(2026, 1, 1)] * 3)
    pq.write_table(pa.table({"click": [0, 1, 0], **columns, names[-1]: times, "\x07": times}), path)
    schema, _ = proposal(path, capsys)
    assert [one.name for one in schema.numbers] == names[:-1]
    assert schema.ignored == (names[-1], "\x07")


def test_broken_rows_are_allowed_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("click,price,site\n" + "0,1.5,a\n1,2.5,b\n" * 20 + '1,2\n0,"a\nb",c\n,1,a\n')
    assert inspect.main(["--max-bad-rows", "3", str(path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {path} line 45: the label is '', expected 0 or 1; mend it, or allow broken rows with "
        "--max-bad-rows\n"
    )
    assert inspect.main(["--max-bad-rows", "4", str(path)]) == 0
    schema = row_schema.parse(yaml.safe_load(capsys.readouterr().out), "proposal")
    source = open_source(str(path), max_bad_rows=4, schema=schema)
    assert concatenate(list(source.blocks())).rows == 40
    assert [one.name for one in schema.numbers] == ["price"]


def test_texts_of_typed_files_need_not_be_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    site = pa.array([b"a", b"\xff\xfe", None, b"a"]).view(pa.string())
    pq.write_table(pa.table({"click": [0, 1, 0, 1], "site": site}), path)
    schema, _ = proposal(path, capsys)
    assert [one.name for one in schema.categories] == ["site"]


@pytest.mark.parametrize("write", [csv, parquet, arrow], ids=lambda one: one.__name__)
def test_of_wide_rows_fewer_are_looked_at(
    tmp_path: Path, write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / {"parquet": "rows.parquet", "arrow": "rows.arrow"}.get(write.__name__, "rows.csv")
    write(path)
    whole = proposal(path, capsys)[1]
    assert f": {RNG_ROWS:,} rows.\n" in whole
    monkeypatch.setattr(sample, "_MOST_BYTES", 40_000)
    monkeypatch.setattr(sample, "_BLOCK_BYTES", 10_000)
    monkeypatch.setattr(sample, "_BATCH_ROWS", 500)
    schema, text = proposal(path, capsys)
    rows = int(re.search(r": ([0-9,]+) rows, from the beginning\.", text)[1].replace(",", ""))
    assert 500 <= rows <= RNG_ROWS // 2
    assert concatenate(list(open_source(str(path), max_bad_rows=0, schema=schema).blocks())).rows == RNG_ROWS


def test_a_line_that_does_not_end_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_MOST_BYTES", 40_000)
    monkeypatch.setattr(sample, "_BLOCK_BYTES", 10_000)
    path = tmp_path / "rows.csv"
    path.write_text("1," * 30_000)
    assert inspect.main([str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path}: its first line has more than 40,000 bytes\n"


@pytest.mark.parametrize(("flag", "value", "least"), [("--rows", "0", 1), ("--max-bad-rows", "-1", 0)])
def test_numbers_out_of_range_are_refused(
    flag: str, value: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        inspect.main([flag, value, "rows.csv"])
    assert ended.value.code == 2
    assert f"argument {flag}: {value} is less than {least}" in capsys.readouterr().err
