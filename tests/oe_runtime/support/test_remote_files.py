"""Files by URL, against moto's S3 server on loopback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from object_store import (
    BUCKET,
    DENIED,
    KEY,
    SECRET,
    SLOW_DOWN,
    WRONG_KEY,
    Answer,
    Cut,
    ObjectStore,
    Stall,
)

from oe_runtime.support import remote_files
from oe_runtime.support.remote_files import PART, Bandwidth, InvalidUrl, RemotePath

ROOT = f"s3://{BUCKET}"
LONG = bytes(range(256)) * (3 * PART // 256) + b"the end"


@pytest.fixture
def store(object_store: ObjectStore) -> ObjectStore:
    return object_store


def test_names() -> None:
    path = RemotePath(f"{ROOT}/day/train.csv.gz")
    assert (path.bucket, path.key) == (BUCKET, "day/train.csv.gz")
    assert (path.name, path.suffix, path.stem) == ("train.csv.gz", ".gz", "train.csv")
    assert path.parent == RemotePath(f"{ROOT}/day")
    assert path.parent / "x" == RemotePath(f"{ROOT}/day/x")
    assert path.relative_to(RemotePath(ROOT)) == "day/train.csv.gz"
    with pytest.raises(TypeError, match="not a local file"):
        Path(path)  # type: ignore[arg-type]


def test_local_names() -> None:
    assert remote_files.path("file:///data/x") == Path("/data/x")
    assert remote_files.path("~/x") == Path.home() / "x"
    assert not remote_files.is_remote("s3/train.csv")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://KEYID:hidden@bucket/x", "s3://bucket/x: the URL has credentials in it"),
        ("s3://KEYID:hid/den@bucket/x", "s3://bucket/x: the URL has credentials in it"),
        ("s3://KEYID:hidden/x", "s3://…: the URL has credentials in it"),
        ("ftp://host/x", "ftp:// is not one of s3://, oss://, gs://, hdfs://, file://"),
        ("s3:///x", "it names no bucket"),
        ("hdfs:///x", "it names no host"),
    ],
)
def test_a_url_that_cannot_be_opened(url: str, words: str) -> None:
    with pytest.raises(InvalidUrl) as error:
        remote_files.path(url)
    assert words in str(error.value)
    assert "hidden" not in str(error.value)
    assert "KEYID" not in str(error.value)


@pytest.mark.parametrize(("url", "words"), [("hdfs://host/x", "JAVA_HOME"), ("oss://bucket/x", "OSS_REGION")])
def test_a_store_that_is_not_set_up(store: ObjectStore, url: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        remote_files.path(url).read_bytes()


def test_writing_and_reading(store: ObjectStore) -> None:
    path = RemotePath(f"{ROOT}/a/x.gz")
    path.write_bytes(b"as it is")  # nothing is compressed by its name
    assert store.objects() == {"a/x.gz": b"as it is"}
    assert path.read_bytes() == b"as it is"
    assert path.is_file()
    assert path.parent.is_dir()
    assert not (path / "y").exists()
    assert path.stat().st_size == 8
    first = path.etag()
    path.write_bytes(b"as it was")
    assert first
    assert path.etag() != first


def test_listing(store: ObjectStore) -> None:
    for key in ("a/1.tsv", "a/2.tsv", "a/b/3.tsv", "c/4.tsv"):
        store.put(key, b"x")
    root = RemotePath(ROOT)
    assert [path.name for path in (root / "a").iterdir()] == ["1.tsv", "2.tsv", "b"]
    assert [path.key for path in root.files()] == ["a/1.tsv", "a/2.tsv", "a/b/3.tsv", "c/4.tsv"]
    assert [path.key for path in remote_files.match(f"{ROOT}/*/*.tsv")] == ["a/1.tsv", "a/2.tsv", "c/4.tsv"]
    assert [path.key for path in remote_files.match(f"{ROOT}/a/[2-9]*")] == ["a/2.tsv"]
    assert remote_files.match(f"{ROOT}/none/*") == []
    (root / "a").remove()
    assert [path.key for path in root.files()] == ["c/4.tsv"]


def test_reading_ahead_and_jumping(store: ObjectStore) -> None:
    store.put("long", LONG)
    with remote_files.open_input(RemotePath(f"{ROOT}/long")) as file:
        assert file.size() == len(LONG)
        assert b"".join(iter(lambda: file.read(1_000_003), b"")) == LONG
        file.seek(len(LONG) - 7)
        assert file.read() == b"the end"
        file.seek(PART - 2)
        assert file.read(4) == LONG[PART - 2 : PART + 2]
    ranges = [request[2] for request in store.requests if request[2]]
    assert len(ranges) <= 3 + 3 + 2  # the first read, the parts, and the jumps


def test_an_answer_that_is_cut_short_is_asked_for_again(store: ObjectStore) -> None:
    store.put("long", LONG)
    cut: list[str] = []

    def fault(method: str, _: str, ranges: str) -> Cut | None:
        if method != "GET" or len(cut) >= 2:
            return None
        cut.append(ranges)
        return Cut()

    store.fault = fault
    assert RemotePath(f"{ROOT}/long").read_bytes() == LONG
    assert len(cut) == 2


def test_a_busy_store_is_asked_again(store: ObjectStore) -> None:
    before: set[tuple[str, str, str]] = set()

    def fault(*request: str) -> Answer | None:
        """Refuse each request once."""
        first = request not in before
        before.add(request)  # type: ignore[arg-type]
        return SLOW_DOWN if first else None

    store.fault = fault
    path = RemotePath(f"{ROOT}/x")
    path.write_bytes(b"1" * 100)
    assert path.read_bytes() == b"1" * 100


def test_a_silent_answer_is_asked_for_again(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "_SILENT_SECONDS", 1)
    store.put("x", b"12")
    stalls = [Stall(60)]
    store.fault = lambda *_: stalls.pop() if stalls else None
    assert RemotePath(f"{ROOT}/x").read_bytes() == b"12"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (DENIED, "the store refuses these credentials; use AWS_ACCESS_KEY_ID"),
        (WRONG_KEY, "the store refuses these credentials; use AWS_ACCESS_KEY_ID"),
        (SLOW_DOWN, "the store is overloaded (2 attempts failed); try again later"),
    ],
)
def test_errors_are_one_sentence(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, answer: Answer, words: str
) -> None:
    monkeypatch.setattr(remote_files, "_ATTEMPTS", 2)
    store.put("a/x", b"12")
    store.fault = lambda *_: answer
    path = RemotePath(f"{ROOT}/a/x")
    for what in (path.read_bytes, lambda: path.write_bytes(b"1"), path.files, path.etag):
        with pytest.raises(OSError, match="store") as error:
            what()
        assert words in error.value.strerror
        assert error.value.filename == path.url
        assert KEY not in str(error.value)
        assert SECRET not in str(error.value)


def test_a_missing_bucket(store: ObjectStore) -> None:
    path = RemotePath("s3://no-such-bucket/x")
    with pytest.raises(FileNotFoundError, match="there is no bucket s3://no-such-bucket at http"):
        path.write_bytes(b"1")
    with pytest.raises(FileNotFoundError, match="there is no bucket s3://no-such-bucket at http"):
        path.iterdir()


def test_an_endpoint_of_the_profile(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in store.environment:
        monkeypatch.delenv(name)
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(f"[profile mine]\nregion = us-east-1\nendpoint_url = {store.url}\n")
    (folder / "credentials").write_text(
        f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "mine")
    store.put("x", b"12")
    assert RemotePath(f"{ROOT}/x").read_bytes() == b"12"


def test_uploads_and_downloads(store: ObjectStore, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(LONG)
    path = RemotePath(f"{ROOT}/long")
    digest = path.upload(source)
    assert store.objects()["long"] == LONG
    assert path.download(target) == (len(LONG), digest)
    assert target.read_bytes() == LONG


def test_a_failed_upload_leaves_no_object(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_files, "_ATTEMPTS", 1)
    (tmp_path / "source").write_bytes(LONG)
    store.fault = lambda _, path, __: SLOW_DOWN if "partNumber=2" in path else None
    with pytest.raises(OSError, match="overloaded"):
        RemotePath(f"{ROOT}/long").upload(tmp_path / "source")
    assert store.objects() == {}


def test_a_full_disk_names_the_local_file(store: ObjectStore, disk: Path) -> None:
    store.put("long", LONG)
    with pytest.raises(OSError, match="No space left on device") as error:
        RemotePath(f"{ROOT}/long").download(disk / "long")
    assert error.value.filename == str(disk / "long")
    assert list(disk.iterdir()) == []


def test_bandwidth_is_shared_by_what_it_is_given_to(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    limit = Bandwidth(1000)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(limit._cancelled, "wait", slept.append)
    for _ in range(3):
        limit.spend(500)
    assert slept == [0.0, 0.5, 1.0]
