"""Generated rows: pure in the seed, skewed as stated, with a signal that can be found again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oe_runtime.data import DataError, field_rows, open_source
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.batch import concatenate
from oe_runtime.data.criteo import CARDINALITIES
from oe_runtime.data.generate import BLOCK_ROWS, Generator, best_auc, main, tables
from oe_runtime.data.write import write_rows


def test_rows_are_a_function_of_the_seed() -> None:
    first, again, other = (concatenate(list(Generator(40000, s).blocks())) for s in (5, 5, 6))
    assert first.rows == 40000
    np.testing.assert_array_equal(first.ids, again.ids)
    np.testing.assert_array_equal(first.dense, again.dense)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert (first.ids != other.ids).mean() > 0.5
    assert first.dense.dtype == np.float32
    assert first.labels.dtype == np.float32


def test_start_in_any_block_gives_the_same_rows() -> None:
    generator = Generator(BLOCK_ROWS + 100, 1)
    whole = concatenate(list(generator.blocks()))
    for start in (1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 99):
        part = concatenate(list(generator.blocks(start)))
        np.testing.assert_array_equal(part.ids, whole.ids[start:])


def test_ids_are_skewed_and_in_range() -> None:
    rows = concatenate(list(Generator(4 * BLOCK_ROWS).blocks()))
    assert (rows.ids.max(axis=0) < np.array(field_rows())).all()
    assert (rows.ids.min(axis=0) >= 0).all()
    # Every third field misses one value in twenty, the others none.
    missing = (rows.ids == 0).mean(axis=0)
    assert missing[0] == 0
    assert abs(missing[2] - 0.05) < 0.01
    # The largest field: 0.05 % of its ids take about 86 % of the accesses.
    column = rows.ids[:, 2][rows.ids[:, 2] > 0]
    counts = np.sort(np.unique(column, return_counts=True)[1])[::-1]
    assert abs(counts[: CARDINALITIES[2] // 2000].sum() / len(column) - 0.86) < 0.02
    # Popular ids are scattered, not the lowest ones.
    values, counts = np.unique(column, return_counts=True)
    popular = values[np.argsort(-counts)[:100]]
    assert popular.max() > CARDINALITIES[2] // 2


def test_small_fields_reach_all_their_ids() -> None:
    rows = next(Generator(BLOCK_ROWS, max_cardinality=50).blocks())
    assert set(np.unique(rows.ids[:, 8])) <= {0, 1, 2, 3}  # C9 has 3 values
    assert set(np.unique(rows.ids[:, 0])) == set(range(1, 51))


def test_the_signal_is_planted() -> None:
    raw = Generator(BLOCK_ROWS, 2).raw_block(0)
    assert 0.2 < raw.labels.mean() < 0.35
    auc = StreamingAuc()
    auc.update(raw.labels, 1 / (1 + np.exp(-raw.logits)))
    assert 0.75 < auc.result() < 0.85
    assert auc.result() == best_auc(2)
    # The labels are drawn with the stated probabilities.
    probabilities = 1 / (1 + np.exp(-raw.logits))
    for low, high in ((0.1, 0.2), (0.4, 0.5), (0.7, 0.8)):
        within = (probabilities > low) & (probabilities < high)
        assert abs(raw.labels[within].mean() - probabilities[within].mean()) < 0.03


@pytest.mark.parametrize(
    "name", ["generate:", "generate:0", "generate:x", "generate:10:y", "generate:1:2:3", "generate:-1"]
)
def test_malformed_generate_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"is not generate:ROWS\[:SEED\]"):
        open_source(name)


@pytest.mark.parametrize(
    "name",
    [
        "rows.tsv",
        "rows.tsv.gz",
        "rows.tsv.zst",
        "rows.csv",
        "rows.csv.gz",
        "rows.parquet",
        "rows.tfrecord.gz",
    ],
)
def test_written_files_read_back(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    assert main(["--rows", "1500", "--seed", "4", "--out", str(path)]) == 0
    assert "1,500 rows" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    read = concatenate(list(open_source(str(path)).blocks()))
    made = concatenate(list(open_source("generate:1500:4").blocks()))
    np.testing.assert_array_equal(read.dense, made.dense)
    np.testing.assert_array_equal(read.labels, made.labels)
    np.testing.assert_array_equal(read.ids == 0, made.ids == 0)
    # Hashing renames ids but keeps equal ones equal: a large field keeps nearly all its distinct ids.
    assert abs(len(np.unique(read.ids[:, 2])) - len(np.unique(made.ids[:, 2]))) <= 2


def test_the_command_runs_without_a_word_on_stderr(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "oe_runtime.data.generate",
        "--rows",
        "10",
        "--out",
        str(tmp_path / "f.tsv"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len((tmp_path / "f.tsv").read_text().splitlines()) == 10


def test_an_unwritable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rows", "10", "--out", str(tmp_path / "no" / "rows.tsv")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write")
    assert len(error.splitlines()) == 1


def test_written_values_are_those_of_the_rows(tmp_path: Path) -> None:
    generator = Generator(BLOCK_ROWS + 7, 3)
    write_rows(tmp_path / "rows.tsv", tables(generator))
    lines = (tmp_path / "rows.tsv").read_text().splitlines()
    assert len(lines) == generator.rows
    for number in (0, 1, BLOCK_ROWS, BLOCK_ROWS + 6):
        raw, row = generator.raw_block(number // BLOCK_ROWS), number % BLOCK_ROWS
        label, *fields = lines[number].split("\t")
        assert float(label) == raw.labels[row]
        integers = zip(raw.integers[row].tolist(), raw.missing[row].tolist(), strict=True)
        assert fields[:13] == ["" if missing else str(value) for value, missing in integers]
        ids = raw.ids[row].tolist()
        assert fields[13:] == ["" if i == 0 else f"{i * 2654435761 % 2**32:08x}" for i in ids]
