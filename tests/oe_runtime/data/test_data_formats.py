"""Every format reads as the same rows, from any row on; what is wrong with a file is said."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from oe_runtime.data import (
    DataError,
    check,
    holdout_batches,
    make_split,
    open_source,
    row_schema,
    training_batches,
)
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.criteo import CATEGORIES, COLUMNS
from oe_runtime.data.files import DataFiles
from oe_runtime.data.row_schema import CRITEO
from oe_runtime.data.rows import BrokenRows
from oe_runtime.data.text import TextFile

EXCERPT = Path(__file__).with_name("criteo_200.tsv")
FIELDS = [line.decode().split("\t") for line in EXCERPT.read_bytes().splitlines()]
HEADER = ",".join(COLUMNS)


def everything(path: Path, start: int = 0) -> Batch:
    return concatenate(list(DataFiles(str(path)).blocks(start)))


WHOLE = everything(EXCERPT)


def assert_equal(first: Batch, second: Batch) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def comma_separated(path: Path) -> None:
    path.write_text("\n".join(",".join(row) for row in FIELDS))


def with_header(path: Path) -> None:
    path.write_text("\ufeff" + HEADER + "\r\n" + "".join(",".join(row) + "\r\n" for row in FIELDS))


def reordered(path: Path) -> None:
    rows = [[*map(str.upper, reversed(COLUMNS)), "id"]] + [[*reversed(row), "7"] for row in FIELDS]
    path.write_text("".join(",".join(f'"{field}"' for field in row) + "\n" for row in rows))


def tabs_with_header(path: Path) -> None:
    path.write_text("\t".join(COLUMNS) + "\n" + "".join("\t".join(row) + "\n" for row in FIELDS))


def members(path: Path) -> None:
    text = EXCERPT.read_bytes()
    half = len(text) // 2
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    else:
        path.write_bytes(pa.compress(text[:half], "zstd", True) + pa.compress(text[half:], "zstd", True))


def table(floats: bool = False) -> pa.Table:
    columns: dict[str, pa.Array] = {"more": pa.array(range(len(FIELDS)))}
    for place in reversed(range(len(COLUMNS))):
        texts = [row[place] for row in FIELDS]
        if COLUMNS[place] in CATEGORIES:
            columns[COLUMNS[place]] = pa.array([t or None for t in texts])
        else:
            values = [int(t) if t else None for t in texts]
            columns[COLUMNS[place]] = pa.array(values, pa.float64() if floats else pa.int64())
    return pa.table(columns)


def parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=70, use_dictionary=False)


def parquet_of_pandas(path: Path) -> None:
    rows = table(floats=True)
    for name in ("I2", "I5"):  # NaN instead of null
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, name, pa.array(rows[name].to_numpy()))
    place = rows.schema.get_field_index("C3")
    rows = rows.set_column(place, "C3", rows["C3"].dictionary_encode())
    rows = rows.set_column(rows.schema.get_field_index("C4"), "C4", rows["C4"].cast(pa.large_binary()))
    pq.write_table(rows, path, row_group_size=64)


def tfrecord(path: Path) -> None:
    tf = pytest.importorskip("tensorflow")

    def feature(name: str, text: str) -> object:
        if name in CATEGORIES:
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()] if text else []))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(text)] if text else []))

    options = tf.io.TFRecordOptions(compression_type="GZIP" if path.suffix == ".gz" else "")
    with tf.io.TFRecordWriter(str(path), options) as out:
        for number, row in enumerate(FIELDS):
            pairs = zip(COLUMNS, row, strict=True)
            # Missing values are absent in some records, and empty lists in others.
            features = {name: feature(name, text) for name, text in pairs if text or number % 2}
            out.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


FORMATS: list[tuple[str, Callable[[Path], None]]] = [
    ("rows.csv", comma_separated),
    ("rows.csv", with_header),
    ("rows.csv", reordered),
    ("rows.csv", tabs_with_header),
    ("rows.txt", tabs_with_header),
    ("rows.tsv.gz", members),
    ("day_0.zst", members),
    ("rows.parquet", parquet),
    ("rows.parquet", parquet_of_pandas),
    ("rows.tfrecord", tfrecord),
    ("rows.tfrecord-00001-of-00002.gz", tfrecord),
]


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=lambda v: getattr(v, "__name__", v))
def test_every_format_has_the_same_rows(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / name
    write(path)
    source = DataFiles(str(tmp_path))
    assert_equal(concatenate(list(source.blocks())), WHOLE)
    assert source.total_rows() == 200
    for start in (1, 70, 199):
        assert_equal(everything(path, start), WHOLE.slice(start, 200))
    assert list(source.blocks(200)) == []
    # Where broken rows may be left out, rows are passed over in another way.
    tolerant = DataFiles(str(path), broken=BrokenRows(1))
    for start in (0, 1, 70, 199):
        assert_equal(concatenate(list(tolerant.blocks(start))), WHOLE.slice(start, 200))
    assert tolerant.broken.count == 0


def test_a_directory_of_several_formats(tmp_path: Path) -> None:
    parquet(tmp_path / "b.parquet")
    with_header(tmp_path / "a.csv")
    members(tmp_path / "c.gz")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".hidden.tsv").write_text("no data")
    source = DataFiles(str(tmp_path))
    rows = concatenate(list(source.blocks()))
    assert_equal(rows, concatenate([WHOLE, WHOLE, WHOLE]))
    for start in (199, 200, 270, 401):
        assert_equal(everything(tmp_path, start), rows.slice(start, 600))


def test_integer_categories_are_hashed_as_their_text(tmp_path: Path) -> None:
    rows = table().set_column(0, "more", pa.array(range(200)))
    place = rows.schema.get_field_index("C7")
    pq.write_table(rows.set_column(place, "C7", pa.array(range(1000, 1200), pa.uint16())), tmp_path / "a.pq")
    lines = [[*row[:20], str(1000 + number), *row[21:]] for number, row in enumerate(FIELDS)]
    (tmp_path / "b.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
    assert_equal(everything(tmp_path / "a.pq"), everything(tmp_path / "b.tsv"))


def without(*names: str) -> pa.Table:
    return table().drop_columns(list(names))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.parquet",
            without("C7"),
            "rows.parquet lacks the column C7; expected label, I1 … I13 and C1 … C26",
        ),
        ("rows.parquet", without("label", "I3"), "lacks the columns label, I3"),
        (
            "rows.parquet",
            without("I3").append_column("I3", pa.array(["x"] * 200)),
            "column I3 has the type string, expected integers",
        ),
        (
            "rows.parquet",
            without("C3").append_column("C3", pa.array([0.5] * 200)),
            "row 1: C3 is '0.5', expected a text or an integer",
        ),
        ("rows.parquet", table().slice(0, 0), "rows.parquet is empty"),
        ("rows.parquet", b"PAR1 and so on", "cannot read"),
        ("rows.csv", HEADER.replace("C9,", "").encode() + b"\n", "the header of .* lacks the column C9"),
        ("rows.csv", HEADER.encode() + b"\n", "rows.csv is empty"),
        ("rows.csv", b"", "rows.csv is empty"),
        ("rows.tsv.gz", b"", "rows.tsv.gz is empty"),
        (
            "rows.tsv.zst",
            pa.compress(EXCERPT.read_bytes(), "zstd", True)[:-100],
            "cannot read .*rows.tsv.zst",
        ),
        ("rows.tfrecord.zst", b"", "TFRecord files may be plain or .gz"),
    ],
)
def test_files_that_are_wrong_as_a_whole(
    tmp_path: Path, name: str, content: bytes | pa.Table, message: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    with pytest.raises(DataError, match=message):
        everything(path)


def test_broken_rows_of_parquet(tmp_path: Path) -> None:
    rows = table(floats=True)
    labels, integers = rows["label"].to_pylist(), rows["I4"].to_pylist()
    labels[3], labels[100], integers[120] = 2.0, None, 0.5
    rows = rows.set_column(rows.schema.get_field_index("label"), "label", pa.array(labels))
    rows = rows.set_column(rows.schema.get_field_index("I4"), "I4", pa.array(integers))
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=64)
    with pytest.raises(DataError, match=r"a\.parquet row 4: the label is '2\.0', expected 0 or 1"):
        everything(tmp_path / "a.parquet")
    said: list[str] = []
    source = DataFiles(str(tmp_path), broken=BrokenRows(3, said.append))
    good = np.delete(np.arange(200), [3, 100, 120])
    np.testing.assert_array_equal(concatenate(list(source.blocks())).ids, WHOLE.ids[good])
    assert [text.split("a.parquet ")[1] for text in said] == [
        "row 4: the label is '2.0', expected 0 or 1",
        "row 101: the label is '', expected 0 or 1",
        "row 121: I4 is '0.5', expected an integer or nothing",
    ]
    np.testing.assert_array_equal(concatenate(list(source.blocks(110))).ids, WHOLE.ids[good[110:]])
    assert (source.broken.count, len(said)) == (3, 3)


def test_broken_records(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / "a.tfrecord"
    tfrecord(path)
    records = [record.numpy() for record in tf.data.TFRecordDataset(str(path))]
    several = tf.train.Example.FromString(records[5])
    several.features.feature["C1"].bytes_list.value.append(b"two")
    other = tf.train.Example.FromString(records[9])
    other.features.feature["I1"].float_list.value.append(0.5)
    labels = tf.train.Example.FromString(records[10])
    labels.features.feature["label"].int64_list.value[0] = 7
    records[5], records[9] = several.SerializeToString(), other.SerializeToString()
    records[7], records[10] = b"\xff\xff", labels.SerializeToString()
    with tf.io.TFRecordWriter(str(path)) as out:
        for record in records:
            out.write(record)
    with pytest.raises(DataError, match=r"a\.tfrecord record 6: C1 has 2 values, expected one"):
        everything(path)
    said: list[str] = []
    source = DataFiles(str(path), broken=BrokenRows(4, said.append))
    good = np.delete(np.arange(200), [5, 7, 9, 10])
    assert_equal(concatenate(list(source.blocks())), WHOLE.take(np.isin(np.arange(200), good)))
    assert [text.split("a.tfrecord ")[1].split(",")[0] for text in said] == [
        "record 6: C1 has 2 values",
        "record 8: it is no tf.train.Example",
        "record 10: I1 is a float_list",
        "record 11: the label is '7'",
    ]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"cannot read .*a\.tfrecord: [^{\[]*$"):
        everything(path)


def test_broken_lines_up_to_a_limit(tmp_path: Path) -> None:
    lines = [line + b"\n" for line in EXCERPT.read_bytes().splitlines()] * 60
    wrong = {17: b"\n", 4000: b"0\tshort\n", 9000: b"x" * (5 << 20) + b"\n", 11999: b"7" + lines[11999][1:]}
    for number, line in wrong.items():
        lines[number] = line
    path = tmp_path / "long.tsv"
    path.write_bytes(b"".join(lines))
    good = np.delete(np.arange(12000), list(wrong))
    whole = concatenate([WHOLE] * 60)
    said: list[str] = []
    source = DataFiles(str(path), broken=BrokenRows(4, said.append))
    np.testing.assert_array_equal(concatenate(list(source.blocks())).ids, whole.ids[good])
    assert source.total_rows() == 11996
    assert [text.split("long.tsv ")[1] for text in said] == [
        "line 18: found 0 columns, expected 40",
        "line 4001: found 2 columns, expected 40",
        "line 9001: the line has more than 1048576 bytes",
        "line 12000: the label is '7', expected 0 or 1",
    ]
    # Rows are numbered without the broken ones, and another pass says nothing new.
    for start in (17, 3999, 4000, 8999, 11995):
        rows = concatenate(list(source.blocks(start)))
        np.testing.assert_array_equal(rows.ids, whole.ids[good[start:]])
    assert (source.broken.count, len(said)) == (4, 4)
    message = r"line 12000: the label is '7', expected 0 or 1; this is broken row 4, --max-bad-rows allows 3"
    with pytest.raises(DataError, match=message):
        list(DataFiles(str(path), broken=BrokenRows(3, said.append)).blocks())


def test_nothing_but_broken_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"a\n" * 30)
    with pytest.raises(DataError, match="has no row that is not broken"):
        list(DataFiles(str(path), broken=BrokenRows(30)).blocks())
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 11  # ten, and that there are more
    assert shown[9].endswith("rows.tsv line 10: found 1 columns, expected 40; are the columns tab-separated?")


def test_closing_the_blocks_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "long.tsv"
    path.write_bytes(EXCERPT.read_bytes() * 200)
    blocks = DataFiles(str(path)).blocks()
    assert next(blocks).rows > 0
    blocks.close()
    path.unlink()


@pytest.mark.parametrize(
    "name", ["b.tsv", "b.csv", "b.tsv.gz", "b.csv.zst", "b.parquet", "b.arrow", "b.tfrecord"]
)
def test_every_file_is_looked_at_before_training(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file is right, the second one is not: empty, another format, or one column too few."""
    (tmp_path / "a.tsv").write_bytes(EXCERPT.read_bytes())
    wrong = tmp_path / name

    def said() -> str:
        assert check.main([str(tmp_path)]) == 1
        words = capsys.readouterr().err
        assert words.count("\n") == 1
        assert words.startswith("error: ")
        return words

    wrong.touch()
    if name in ("b.tsv", "b.csv", "b.tfrecord"):  # a part without rows; of other formats, a broken file
        assert check.main([str(tmp_path)]) == 0
        assert f"warning: {tmp_path}: 1 of 2 files have no rows, such as {wrong}" in capsys.readouterr().err
    else:
        assert f"{wrong} is empty: it has no row of label, I1 … I13 and C1 … C26" in said()
    narrow = b"\n".join(line.rpartition(b"\t")[0] for line in EXCERPT.read_bytes().splitlines())
    wrong.write_bytes(narrow)
    found = said()
    assert str(wrong) in found
    if name in ("b.tsv", "b.csv"):
        assert "line 1: found 39 columns, expected 40" in found
    elif name != "b.tfrecord":  # such a file has nothing by which it is known
        assert "file, as its name says: it begins with b'0\\t1" in found
    if name == "b.arrow":
        table = pa.table({"label": [1, 0]})
        with pa.OSFile(str(wrong), "wb") as out, pa.ipc.new_stream(out, table.schema) as file:
            file.write_table(table)
        assert f"{wrong} has Arrow's streaming format, which must be read from its start; write it" in said()
    if name == "b.parquet":
        table = pa.table({column: [1, 2] for column in ("label", "I1")})
        pq.write_table(table, wrong)
        assert "b.parquet lacks the columns I2, I3" in said()
    if name.endswith(".gz"):
        wrong.write_bytes(gzip.compress(narrow))
        assert "line 1: found 39 columns, expected 40" in said()


def test_a_file_of_broken_rows_alone_is_refused(tmp_path: Path) -> None:
    rows = EXCERPT.read_bytes().splitlines()
    (tmp_path / "a.tsv").write_bytes(b"\n".join([*rows, b"broken", b"broken"]) + b"\n")
    (tmp_path / "b.tsv").write_bytes(b"broken\n" * 5)
    assert check.main(["--max-bad-rows", "100", str(tmp_path / "a.tsv")]) == 0
    assert check.main(["--max-bad-rows", "1", str(tmp_path / "a.tsv")]) == 1
    assert check.main(["--max-bad-rows", "100", str(tmp_path)]) == 1


def test_the_evaluation_of_deeprecs_data_is_kept_apart(tmp_path: Path) -> None:
    lines = EXCERPT.read_bytes().replace(b"\t", b",").splitlines(keepends=True)
    (tmp_path / "train.csv").write_bytes(b"".join(lines[:150]))
    (tmp_path / "eval.csv").write_bytes(b"".join(lines[150:]))
    source = open_source(str(tmp_path))
    split = make_split(source, 0.1)
    assert sum(batch.rows for batch in training_batches(source, split, 32)) == 150
    assert sum(batch.rows for batch in holdout_batches(source, split, 32)) == 50
    assert [part.file for part in source.ranges()] == [str(tmp_path / "train.csv")]
    assert [file.name for file in source.identity()] == ["train.csv", "eval.csv"]
    with pytest.raises(
        DataError, match=r"--eval-data 0.2: .* has rows for the evaluation, .*eval.csv; leave"
    ):
        open_source(str(tmp_path), eval_data="0.2")
    assert check.main(["--eval-data", "0.2", str(tmp_path)]) == 1
    (tmp_path / "eval.csv").write_bytes(b"1,2\n")
    assert check.main([str(tmp_path)]) == 1
    (tmp_path / "train.csv").rename(tmp_path / "day.csv")
    (tmp_path / "eval.csv").write_bytes(b"".join(lines[150:]))
    source = open_source(str(tmp_path))  # any other directory: all files are rows to train on
    assert sum(batch.rows for batch in training_batches(source, make_split(source, 0.0), 32)) == 200


def test_rows_for_the_evaluation_are_never_trained_on(tmp_path: Path) -> None:
    lines = EXCERPT.read_bytes().splitlines(keepends=True)
    for name, part in (("a", lines[:100]), ("b", lines[100:150]), ("c", lines[150:])):
        (tmp_path / f"{name}.tsv").write_bytes(b"".join(part))
    source = open_source(str(tmp_path / "[ab].tsv"), eval_data=str(tmp_path / "c.tsv"))
    split = make_split(source, 0.1)
    assert sum(batch.rows for batch in training_batches(source, split, 32)) == 150
    assert_equal(concatenate(list(holdout_batches(source, split, 32))), WHOLE.slice(150, 200))
    assert [file.name for file in source.identity()] == ["a.tsv", "b.tsv", "c.tsv"]
    (tmp_path / "link.tsv").symlink_to(tmp_path / "b.tsv")
    (tmp_path / "hard.tsv").hardlink_to(tmp_path / "b.tsv")
    for apart in ("b.tsv", "link.tsv", "hard.tsv", "[bc].tsv"):
        with pytest.raises(DataError, match=r"/(b|link|hard).tsv is in --data too"):
            open_source(str(tmp_path / "[ab].tsv"), eval_data=str(tmp_path / apart))
    with pytest.raises(DataError, match="only its own rows can be held out; give a share"):
        open_source("generate:100", eval_data=str(tmp_path / "c.tsv"))
    (tmp_path / "c.tsv").write_bytes(b"1\t2\n")
    words = ["--eval-data", str(tmp_path / "c.tsv"), str(tmp_path / "a.tsv")]
    assert check.main(words) == 1
    assert check.main(["--eval-data", "0.2", str(tmp_path / "a.tsv")]) == 0


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        (
            "\ufeffa,b\n".encode("utf-16-le"),
            "is text in UTF-16, expected UTF-8; save it as UTF-8, or convert it: iconv",
        ),
        ("a,b\n1,2\n".encode("utf-16"), "is text in UTF-16"),
        ("a,b\n1,2\n".encode("utf-16-be"), "is text in UTF-16"),
        ("a,b\n1,2\n".encode("utf-32"), "is text in UTF-32"),
        (b"a,b\r1,2\r3,4\r", r"its lines end in CR alone, expected LF or CRLF; convert it: tr '\\r' '\\n'"),
        (gzip.compress(b"a,b\n1,2\n"), "is a gzip file, not a text file; name it so"),
        (b"PK\x03\x04\x14\x00\x06\x00", "is a zip or Excel file, not a text file"),
    ],
    ids=["UTF-16-LE with mark", "UTF-16", "UTF-16-BE", "UTF-32", "CR", "gzip", "zip"],
)
def test_text_that_is_none_is_called_what_it_is(tmp_path: Path, encoded: bytes, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(encoded)
    with pytest.raises(DataError, match=f"rows.csv:? {said}"):
        everything(path)
    with pytest.raises(DataError, match=f"rows.csv:? {said}"):
        TextFile(path, CRITEO, True, pipe=io.BytesIO(encoded))


@pytest.mark.parametrize("name", ["ROWS.CSV", "Rows.TSV.GZ", "ROWS.Parquet", "ROWS.PQ"])
def test_names_tell_formats_in_any_case(tmp_path: Path, name: str) -> None:
    write = {"csv": with_header, "gz": members, "parquet": parquet, "pq": parquet}[
        name.lower().rpartition(".")[2]
    ]
    if name == "Rows.TSV.GZ":
        (tmp_path / name).write_bytes(gzip.compress(EXCERPT.read_bytes()))
    else:
        write(tmp_path / name)
    assert_equal(everything(tmp_path / name), WHOLE)
    assert_equal(everything(tmp_path), WHOLE)


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet", "arrow", "tfrecord"])
def test_a_part_without_rows(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As Spark writes one for each partition without rows: without a byte, or with a header alone."""
    table = pa.table({"y": [1, 0, 1], "c": ["a", "b", "c"]})
    wanted = row_schema.parse({"label": "y", "categories": ["c"]}, "schema")
    for number, rows in enumerate((table[:0], table[:2], table[:0], table[2:])):
        path = tmp_path / f"part-{number}.{ending}"
        if ending == "parquet":
            pq.write_table(rows, path)
        elif ending == "arrow":
            with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, rows.schema) as file:
                file.write_table(rows)
        elif ending == "tfrecord":
            tf = pytest.importorskip("tensorflow")
            with tf.io.TFRecordWriter(str(path)) as out:
                for y, c in zip(*rows.to_pydict().values(), strict=True):
                    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[y]))
                    text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[c.encode()]))
                    both = tf.train.Features(feature={"y": label, "c": text})
                    out.write(tf.train.Example(features=both).SerializeToString())
        else:
            between = "\t" if ending == "tsv" else ","
            lines = [["y", "c"], *([str(y), c] for y, c in zip(*rows.to_pydict().values(), strict=True))]
            content = "".join(between.join(line) + "\n" for line in lines).encode()
            if not number and ending != "csv.gz":
                content = b""
            path.write_bytes(gzip.compress(content) if ending == "csv.gz" else content)
    (tmp_path / "_SUCCESS").touch()
    source = open_source(str(tmp_path), schema=wanted)
    source.check()
    said = capsys.readouterr().err
    assert f"warning: {tmp_path}: 2 of 4 files have no rows, such as {tmp_path / 'part-0'}" in said
    whole = concatenate(list(source.blocks()))
    assert whole.labels.tolist() == [1, 0, 1]
    parts = concatenate([batch for part in source.ranges() for batch in source.read(part)])
    assert_equal(parts, whole)
    for start in range(3):
        assert_equal(concatenate(list(source.blocks(start))), whole.slice(start, 3))
    assert check.main(["--without-tensorflow", "--label", "y", "--categories", "c", str(tmp_path)]) == 0
    (tmp_path / f"part-1.{ending}").unlink()
    (tmp_path / f"part-3.{ending}").unlink()
    with pytest.raises(DataError, match=f"part-0.{ending} is empty: it has no row of y, c"):
        open_source(str(tmp_path), schema=wanted).check()
