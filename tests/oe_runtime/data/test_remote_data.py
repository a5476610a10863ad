"""Training data in an object store: the same rows, positions and checks as of local files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from object_store import BUCKET, DENIED, Answer, ObjectStore, Stall
from pyarrow import feather

from oe_runtime.data import generate, inspect, open_source
from oe_runtime.data.batch import Batch, concatenate
from oe_runtime.data.batches import Source
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

ROOT = f"s3://{BUCKET}"
ENDINGS = (".tsv", ".csv", ".tsv.gz", ".tsv.zst", ".parquet", ".arrow")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the same 3,000 rows in every format."""
    directory = tmp_path_factory.mktemp("rows")
    for ending in ENDINGS[:-1]:
        path = directory / f"rows{ending}"
        generate.main(["--rows", "3000", "--seed", "7", "--out", str(path)])
    feather.write_feather(pq.read_table(path), directory / "rows.arrow", "uncompressed", chunksize=800)
    return directory


@pytest.fixture
def store(object_store: ObjectStore, files: Path) -> ObjectStore:
    for path in files.iterdir():
        object_store.put(f"all/{path.name}", path.read_bytes())
    return object_store


def rows(source: Source, start: int = 0) -> Batch:
    return concatenate(list(source.blocks(start)))


def equal(one: Batch, other: Batch) -> bool:
    parts = ((one.dense, other.dense), (one.ids, other.ids), (one.labels, other.labels))
    return all(np.array_equal(a, b) for a, b in parts)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_rows_of_each_format(store: ObjectStore, files: Path, ending: str) -> None:
    remote = open_source(f"{ROOT}/all/rows{ending}")
    local = open_source(str(files / f"rows{ending}"))
    remote.check()
    assert equal(rows(remote), rows(local))
    assert remote.total_rows() == 3000
    assert equal(rows(remote, 1234), rows(local, 1234))


@pytest.mark.parametrize("ending", [".tsv", ".parquet", ".arrow"])
def test_ranges_of_a_work_queue(store: ObjectStore, files: Path, ending: str) -> None:
    source = open_source(f"{ROOT}/all/rows{ending}")
    parts = source.ranges(100_000)  # type: ignore[call-arg]
    assert len(parts) > 1 or ending == ".parquet"
    read = concatenate([batch for part in parts for batch in source.read(part)])
    assert equal(read, rows(open_source(str(files / f"rows{ending}"))))


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz", ".parquet", ".arrow"])
def test_inspect_reads_a_url(
    store: ObjectStore, files: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect.main([str(files / f"rows{ending}")]) == 0
    expected = capsys.readouterr()
    assert inspect.main([f"{ROOT}/all/rows{ending}"]) == 0
    assert capsys.readouterr() == expected
    store.fault = lambda *_: DENIED
    assert inspect.main([f"{ROOT}/all/rows{ending}"]) == 1
    said = capsys.readouterr().err
    assert "the store refuses these credentials" in said
    assert said.count("\n") == 1


def test_directories_and_patterns(store: ObjectStore, files: Path) -> None:
    for name in ("day_0.tsv", "day_1.tsv", "_temporary.tsv", "notes.md"):
        store.put(f"days/{name}", (files / "rows.tsv").read_bytes())
    assert sum(batch.rows for batch in open_source(f"{ROOT}/days").blocks()) == 6000
    assert sum(batch.rows for batch in open_source(f"{ROOT}/days/").blocks()) == 6000
    assert sum(batch.rows for batch in open_source(f"{ROOT}/days/day_[1-9].tsv").blocks()) == 3000
    names = [file.name for file in open_source(f"{ROOT}/days/day_*.tsv").identity()]
    assert names == ["day_0.tsv", "day_1.tsv"]


def test_train_and_eval_of_a_directory(store: ObjectStore, files: Path) -> None:
    for name in ("train.csv", "eval.csv"):
        store.put(f"deeprec/{name}", (files / "rows.csv").read_bytes())
    source = open_source(f"{ROOT}/deeprec")
    assert sum(batch.rows for batch in source.blocks()) == 3000
    assert source.evaluation() is not None


def test_a_directory_that_grows_in_a_missing_bucket(store: ObjectStore) -> None:
    name = "s3://no-such-bucket/inbox"
    with pytest.raises(DataError, match=f"^--data: {name}: there is no bucket s3://no-such-bucket at "):
        open_source(name, follow=True)


def test_another_content_is_another_identity(store: ObjectStore, files: Path) -> None:
    name = f"{ROOT}/all/rows.tsv"
    first, again = open_source(name).identity(), open_source(name).identity()
    assert first == again
    content = bytearray((files / "rows.tsv").read_bytes())
    content[-2] ^= 1  # the same size
    store.put("all/rows.tsv", bytes(content))
    changed = open_source(name).identity()
    assert changed[0].size == first[0].size
    assert changed[0].digest != first[0].digest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{ROOT}/none.tsv", f"there is no file or directory {ROOT}/none.tsv"),
        (f"{ROOT}/none/*.tsv", f"no file matches {ROOT}/none/\\*.tsv"),
        (
            "s3://no-such-bucket/days/*.tsv",
            "there is no bucket s3://no-such-bucket at .*; make it, or correct",
        ),
        ("s3://no-such-bucket/rows.tsv", "there is no bucket s3://no-such-bucket at .*; make it, or correct"),
        ("s3://no-such-bucket", "there is no bucket s3://no-such-bucket at .*; make it, or correct"),
        (f"{ROOT}/all/rows.tfrecord", "TFRecord files are read from local disks only; copy it"),
        ("s3://me:hidden@bucket/x.tsv", "s3://bucket/x.tsv: the URL has credentials in it"),
        ("http://host/x.tsv", "^http://host/x.tsv: http:// is not one of s3://"),
    ],
)
def test_names_that_are_refused(store: ObjectStore, name: str, words: str) -> None:
    store.put("all/rows.tfrecord", b"12")
    with pytest.raises(DataError, match=words) as error:
        open_source(name)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("ending", [".tsv.gz", ".tsv.zst", ".parquet"])
def test_a_truncated_object(store: ObjectStore, files: Path, ending: str) -> None:
    content = (files / f"rows{ending}").read_bytes()
    store.put(f"cut{ending}", content[: len(content) * 2 // 3])
    source = open_source(f"{ROOT}/cut{ending}")
    with pytest.raises(DataError, match=f"cannot read {ROOT}/cut{ending}: |is not a Parquet file"):
        rows(source)


def test_refused_credentials(store: ObjectStore) -> None:
    store.fault = lambda *_: DENIED
    with pytest.raises(DataError, match=f"cannot read {ROOT}/all/rows.tsv: the store refuses these cred"):
        open_source(f"{ROOT}/all/rows.tsv")


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz", ".parquet"])
def test_a_store_that_fails_in_the_middle(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(remote_files, "_ATTEMPTS", 1)
    source = open_source(f"{ROOT}/all/rows{ending}")
    source.check()
    store.fault = lambda method, _, ranges: DENIED if method == "GET" and ranges else None
    with pytest.raises(DataError, match=r"cannot read s3://.*: the store refuses these credentials") as error:
        rows(source)
    assert "\n" not in str(error.value)


def test_slow_answers_change_nothing(store: ObjectStore, files: Path) -> None:
    pauses = [Stall(0.3), None, Stall(0.1)]

    def fault(*_: str) -> Answer | Stall | None:
        return pauses.pop() if pauses else None

    store.fault = fault
    assert equal(rows(open_source(f"{ROOT}/all/rows.tsv")), rows(open_source(str(files / "rows.tsv"))))
