"""What a file's columns seem to be, as a schema that reads the file."""

import datetime
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml

from oe_runtime.data import inspect, open_source, row_schema

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
        ("click,a,a\n1,x,y\n0,x,y\n", None, "its first line has a twice; give each column a name"),
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
