"""The reader on real rows, on broken files, and where it goes on after a skip."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from oe_runtime import _core
from oe_runtime.data import (
    DataError,
    Split,
    field_cardinalities,
    holdout_batches,
    open_source,
    training_batches,
)
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.batches import Source
from oe_runtime.data.files import DataFiles, find_files

EXCERPT = Path(__file__).with_name("criteo_200.tsv")
LINES = EXCERPT.read_bytes().splitlines()


def everything(source: Source, start: int = 0) -> Batch:
    return concatenate(list(source.blocks(start)))


def write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def assert_equal(first: Batch, second: Batch) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def expected_id(text: bytes, cardinality: int) -> int:
    if not text:
        return 0
    hashed = _core.hash_strings(np.array([0, len(text)], np.int32), np.frombuffer(text, np.uint8), 0)
    return 1 + int(hashed[0]) % cardinality


@pytest.mark.parametrize("cap", [0, 100])
def test_values_are_those_of_the_file(cap: int) -> None:
    rows = everything(DataFiles(str(EXCERPT), cap))
    assert rows.dense.dtype == np.float32
    assert rows.dense.shape == (200, 13)
    assert rows.ids.dtype == np.int64
    assert rows.ids.shape == (200, 26)
    assert rows.labels.dtype == np.float32
    for number in (0, 3, 199):
        label, *values = LINES[number].split(b"\t")
        assert rows.labels[number] == float(label)
        integers = np.array([int(v or 0) for v in values[:13]], np.float64)
        expected = np.sign(integers) * np.log1p(np.abs(integers))
        np.testing.assert_allclose(rows.dense[number], expected, rtol=1e-6)
        ids = [expected_id(v, c) for v, c in zip(values[13:], field_cardinalities(cap), strict=True)]
        assert rows.ids[number].tolist() == ids
    assert (rows.dense < 0).any(), "the excerpt has negative integers"
    assert (rows.ids == 0).any(), "the excerpt has missing categories"
    assert (rows.ids >= 0).all()
    assert (rows.ids <= np.array(field_cardinalities(cap))).all()


def test_hash_is_xxh3_of_the_text() -> None:
    # XXH3_64bits of an empty input and of "abc" with seed 0, from the algorithm's specification.
    offsets = np.array([0, 0, 3], np.int32)
    hashes = _core.hash_strings(offsets, np.frombuffer(b"abc", np.uint8), 0)
    assert [f"{h:016x}" for h in hashes] == ["2d06800538d394c2", "78af5f94892f3950"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_read_the_same(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.tsv{suffix}"
    with pa.output_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}[suffix]) as out:
        out.write(EXCERPT.read_bytes())
    assert_equal(everything(DataFiles(str(path))), everything(DataFiles(str(EXCERPT))))


def test_directories_and_globs_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "part-2.tsv", LINES[120:])
    write(tmp_path / "part-1.tsv", LINES[:120])
    (tmp_path / "part-1.md").write_text("not data")
    whole = everything(DataFiles(str(EXCERPT)))
    assert_equal(everything(DataFiles(str(tmp_path))), whole)
    source = DataFiles(str(tmp_path / "part-*.tsv"))
    assert_equal(everything(source), whole)
    assert source.total_rows() == 200
    # A start inside the first file, on the border and inside the second file.
    for start in (0, 1, 119, 120, 121, 199):
        assert_equal(everything(source, start), whole.slice(start, 200))
    assert list(source.blocks(200)) == []


def test_a_last_line_without_newline_and_windows_line_ends(tmp_path: Path) -> None:
    whole = everything(DataFiles(str(EXCERPT)))
    unix, windows = tmp_path / "a.tsv", tmp_path / "b.tsv"
    unix.write_bytes(b"\n".join(LINES))
    windows.write_bytes(b"\r\n".join(LINES) + b"\r\n")
    for path in (unix, windows):
        source = DataFiles(str(path))
        assert_equal(everything(source), whole)
        assert_equal(everything(source, 199), whole.slice(199, 200))


def test_skipping_across_blocks(tmp_path: Path) -> None:
    # Longer than one block of the reader, so that a start falls into the middle of a later block.
    path = write(tmp_path / "long.tsv", LINES * 60)
    whole = everything(DataFiles(path))
    assert whole.rows == 12000
    for start in (5000, 11999):
        assert_equal(everything(DataFiles(path), start), whole.slice(start, 12000))


@pytest.mark.parametrize("holdout", [0, 0.1, 0.25, 0.3])
def test_training_and_held_out_rows_are_disjoint_and_whole(holdout: float) -> None:
    source, split = DataFiles(str(EXCERPT)), Split(holdout)
    whole = everything(source)
    held = [row for row in range(200) if int((row + 1) * holdout + 1e-9) > int(row * holdout + 1e-9)]
    kept = [row for row in range(200) if row not in held]
    training = list(training_batches(source, split, 32))
    assert [b.rows for b in training[:-1]] == [32] * (len(training) - 1)
    trained = concatenate(training)
    np.testing.assert_array_equal(trained.ids, whole.ids[kept])
    np.testing.assert_array_equal(trained.dense, whole.dense[kept])
    evaluated = list(holdout_batches(source, split, 7))
    assert sum(b.rows for b in evaluated) == len(held)
    if held:
        np.testing.assert_array_equal(concatenate(evaluated).labels, whole.labels[held])


def test_a_share_below_a_thousandth_holds_out_its_rows() -> None:
    assert Split(0.0002).held_before(1_000_000) == 200
    assert Split(0.05).held_before(1_000_000) == 50_000
    assert Split(0.0).held_before(1_000_000) == 0


@pytest.mark.parametrize("data", [str(EXCERPT), "generate:70000:3"])
def test_skipped_batches_are_those_of_the_whole_pass(data: str) -> None:
    source, split = open_source(data), Split(0.1)
    size = 17 if data == str(EXCERPT) else 1000
    whole = list(training_batches(source, split, size))
    for skip in (0, 1, len(whole) // 2, len(whole) - 1):
        rest = list(training_batches(source, split, size, skip))
        assert len(rest) == len(whole) - skip
        for one, other in zip(rest, whole[skip:], strict=True):
            assert_equal(one, other)
    assert list(training_batches(source, split, size, len(whole))) == []


def broken(line: int, text: bytes) -> list[bytes]:
    return [*LINES[: line - 1], text, *LINES[line:]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (broken(150, LINES[149].rsplit(b"\t", 1)[0]), "line 150: found 39 columns, expected 40"),
        (broken(1, LINES[0] + b"\t"), "line 1: found 41 columns, expected 40"),
        (broken(7, b""), "line 7: found 0 columns, expected 40"),
        (broken(9, b"2" + LINES[8][1:]), "line 9: the label is '2', expected 0 or 1"),
        (broken(9, b"yes" + LINES[8][1:]), "line 9: the label is 'yes', expected 0 or 1"),
        (broken(9, LINES[8][1:]), "line 9: the label is '', expected 0 or 1"),
        (
            broken(200, b"1\t2.5\t" + LINES[199].split(b"\t", 2)[2]),
            "line 200: I1 is '2.5', expected an integer",
        ),
        (
            [x.replace(b"\t", b",") for x in LINES],
            "line 1: found 1 columns, expected 40; are the columns tab-sep",
        ),
        ([], "is empty"),
    ],
)
def test_broken_files_name_file_and_line(tmp_path: Path, lines: list[bytes], message: str) -> None:
    path = write(tmp_path / "broken.tsv", lines)
    with pytest.raises(DataError, match=r"broken\.tsv") as raised:
        everything(DataFiles(path))
    assert message in str(raised.value)


def test_line_numbers_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    lines = LINES * 60
    lines[11000] = b"0\tshort"
    with pytest.raises(DataError, match="line 11001: found 2 columns"):
        everything(DataFiles(write(tmp_path / "long.tsv", lines)), 9000)


def test_a_broken_archive(tmp_path: Path) -> None:
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(EXCERPT.read_bytes())[:-500])
    with pytest.raises(DataError, match=r"cannot read .*cut\.tsv\.gz"):
        everything(DataFiles(str(path)))
    path.write_bytes(EXCERPT.read_bytes())
    with pytest.raises(DataError, match=r"cut\.tsv\.gz is not a gzip file, as its name says: it begins with"):
        everything(DataFiles(str(path)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.tsv", "there is no file or directory"),
        ("nothing-*.tsv", "no file matches"),
        ("empty", "a directory without data files"),
    ],
)
def test_no_such_data(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        find_files(str(tmp_path / name))


def test_reading_does_not_import_tensorflow() -> None:
    code = (
        "import sys, oe_runtime.programs.click; "
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
