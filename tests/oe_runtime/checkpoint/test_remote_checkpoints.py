"""Checkpoints in an object store: published whole or not at all, pruned, fetched and verified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import BUCKET, DENIED, SLOW_DOWN, ObjectStore

from oe_runtime import Client, TableSpec, checkpoint
from oe_runtime.checkpoint import cli, remote
from oe_runtime.checkpoint.remote import RemoteCheckpoints, locate
from oe_runtime.checkpoint.store import FORMAT
from oe_runtime.errors import CheckpointError
from oe_runtime.serving.checkpoints import ServedCheckpoints
from oe_runtime.support import remote_files
from oe_runtime.support.remote_files import RemotePath

ROOT = RemotePath(f"s3://{BUCKET}/run/checkpoints")


@pytest.fixture
def store(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(remote_files, "_ATTEMPTS", 1)
    return object_store


def local(directory: Path, step: int, base: Path | None = None) -> Path:
    def write(path: Path) -> Mapping[str, Any]:
        (path / "rows").write_bytes(b"rows of %d" % step)
        (path / "more").mkdir()
        (path / "more" / "weights").write_bytes(b"weights of %d" % step)
        return {"training": {"step": step}}

    return checkpoint.publish(directory, step, write, base=base, keep=99)


def names(store: ObjectStore) -> list[str]:
    return sorted({key.split("/")[2] for key in store.objects() if not key.endswith("/")})


def test_a_checkpoint_goes_there_and_comes_back(store: ObjectStore, tmp_path: Path) -> None:
    path = local(tmp_path / "here", 7)
    there = RemoteCheckpoints(ROOT)
    assert not there.has(path)
    there.upload(path)
    assert there.has(path)
    assert there.list() == (["step-0000000007"], [])
    back = there.fetch(path.name, tmp_path / "back")
    assert checkpoint.verify(back).step == 7
    assert (back / "more/weights").read_bytes() == b"weights of 7"


def test_the_manifest_is_written_last(store: ObjectStore, tmp_path: Path) -> None:
    RemoteCheckpoints(ROOT).upload(local(tmp_path, 7))
    written = [path.split("?")[0] for method, path, _ in store.requests if method in ("PUT", "POST")]
    of_manifest = [path.endswith("manifest.json") for path in written]
    assert any(of_manifest)
    assert of_manifest == sorted(of_manifest)


@pytest.mark.parametrize("part", ["rows", "weights", "manifest.json"])
def test_a_failed_upload_publishes_nothing(store: ObjectStore, tmp_path: Path, part: str) -> None:
    there = RemoteCheckpoints(ROOT)
    there.upload(local(tmp_path, 7))
    second = local(tmp_path, 8)
    store.fault = lambda method, path, _: SLOW_DOWN if method != "GET" and part in path else None
    with pytest.raises(OSError, match="overloaded"):
        there.upload(second)
    store.fault = None
    assert there.list()[0] == ["step-0000000007"]
    there.upload(second)
    assert there.list() == (["step-0000000007", "step-0000000008"], [])


def test_the_next_upload_removes_what_a_killed_one_left(store: ObjectStore, tmp_path: Path) -> None:
    store.put("run/checkpoints/step-0000000003/rows", b"half")
    store.put("run/checkpoints/notes.txt", b"of the user")
    there = RemoteCheckpoints(ROOT)
    assert there.list() == ([], ["step-0000000003"])
    there.upload(local(tmp_path, 7))
    assert names(store) == ["notes.txt", "step-0000000007"]


def test_another_checkpoint_of_the_same_name_is_replaced(store: ObjectStore, tmp_path: Path) -> None:
    there = RemoteCheckpoints(ROOT)
    there.upload(local(tmp_path / "one", 7))
    other = local(tmp_path / "two", 7, None)
    (other / "manifest.json").write_text((other / "manifest.json").read_text() + "\n")
    assert not there.has(other)
    there.upload(other)
    assert there.has(other)


def test_an_increment_is_not_published_without_its_base(store: ObjectStore, tmp_path: Path) -> None:
    there = RemoteCheckpoints(ROOT)
    base = local(tmp_path, 1)
    increment = local(tmp_path, 2, base=base)
    with pytest.raises(CheckpointError, match=f"an increment on {ROOT}/{base.name}, which is not there"):
        there.upload(increment)
    there.upload(local(tmp_path / "other", 1))
    changed = tmp_path / "other" / base.name
    (changed / "manifest.json").write_text((changed / "manifest.json").read_text() + "\n")
    there.upload(changed)
    with pytest.raises(CheckpointError, match="an increment on another step-0000000001"):
        there.upload(increment)
    there.upload(base)
    there.upload(increment)
    assert there.list()[0] == [base.name, increment.name]


def test_pruning_keeps_the_newest_and_their_bases(store: ObjectStore, tmp_path: Path) -> None:
    there = RemoteCheckpoints(ROOT)
    paths = [local(tmp_path, 1), local(tmp_path, 2)]
    paths.append(local(tmp_path, 3, base=paths[1]))
    for path in paths:
        there.upload(path)
    there.prune(1)
    assert there.list() == (["step-0000000002", "step-0000000003"], [])
    back = there.fetch("step-0000000003", tmp_path / "back")
    assert [path.name for path in checkpoint.chain(back)] == ["step-0000000002", "step-0000000003"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"rows", "it has 4 bytes, the manifest says 9"), (b"rows of 8", "its SHA-256 is not the manifest's")],
)
def test_a_damaged_object_is_not_fetched(
    store: ObjectStore, tmp_path: Path, content: bytes, words: str
) -> None:
    RemoteCheckpoints(ROOT).upload(local(tmp_path, 7))
    store.put("run/checkpoints/step-0000000007/rows", content)
    with pytest.raises(CheckpointError, match=f"{ROOT}/step-0000000007/rows is damaged: {words}"):
        RemoteCheckpoints(ROOT).fetch("step-0000000007", tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_increments_on_each_other_are_damage(store: ObjectStore, tmp_path: Path) -> None:
    for step, base in ((1, 2), (2, 1)):
        manifest = {"format": FORMAT, "step": step, "files": {}}
        manifest["base"] = {"name": f"step-{base:010}", "sha256": ""}
        store.put(f"run/checkpoints/step-{step:010}/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="step-0000000002 is damaged: it is an increment on itself"):
        RemoteCheckpoints(ROOT).fetch("step-0000000002", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_local_file_is_not_published(store: ObjectStore, tmp_path: Path) -> None:
    path = local(tmp_path, 7)
    (path / "rows").write_bytes(b"rows of 8")
    with pytest.raises(CheckpointError, match="rows is damaged"):
        RemoteCheckpoints(ROOT).upload(path)
    assert RemoteCheckpoints(ROOT).list()[0] == []


def test_what_is_there_already_is_not_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    there = RemoteCheckpoints(ROOT)
    path = local(tmp_path, 7)
    there.upload(path)
    store.requests.clear()
    assert there.fetch(path.name, tmp_path) == path
    assert not [path for _, path, _ in store.requests if path.endswith("rows")]
    (path / "rows").write_bytes(b"x")
    there.fetch(path.name, tmp_path)
    assert (path / "rows").read_bytes() == b"rows of 7"


def test_a_full_disk_is_named(store: ObjectStore, tmp_path: Path, disk: Path) -> None:
    def write(path: Path) -> Mapping[str, Any]:
        (path / "rows").write_bytes(bytes(12 << 20))
        return {}

    RemoteCheckpoints(ROOT).upload(checkpoint.publish(tmp_path / "here", 1, write))
    with pytest.raises(CheckpointError, match=f"cannot fetch {ROOT}/step-.* to {disk}: .*No space left"):
        RemoteCheckpoints(ROOT).fetch("step-0000000001", disk)
    assert list(disk.iterdir()) == []


def test_a_run_its_checkpoints_and_one_of_them(store: ObjectStore, tmp_path: Path) -> None:
    for step in (1, 2):
        RemoteCheckpoints(ROOT).upload(local(tmp_path, step))
    both = ["step-0000000001", "step-0000000002"]
    assert locate(ROOT.parent)[1] == both
    assert locate(ROOT)[1] == both
    assert locate(ROOT / both[0])[1] == both[:1]
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        locate(ROOT / "step-0000000009")
    with pytest.raises(CheckpointError, match="cannot read s3://no-such-bucket/run: there is no bucket"):
        locate(RemotePath("s3://no-such-bucket/run"))


def table(rows: int) -> Client:
    client = Client.in_process()
    client.create_table(TableSpec("C1", 4, optimizer={"name": "adagrad"}))
    more(client, rows)
    return client


def more(client: Client, rows: int) -> None:
    pulled = client.pull([np.arange(rows)], [(0, 0)])
    client.push(pulled, [np.ones((rows, 4), np.float32)], 0.1)


@pytest.fixture(params=["files", "packs"])
def run(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """The local copy of two uploaded checkpoints with rows, the second an increment, which may be a pack."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "run/checkpoints"
    with table(9) as client:
        first = checkpoint.publish(directory, 1, lambda path: {"tables": client.save(path)})
        more(client, 3)

        def write(path: Path) -> Mapping[str, Any]:
            contents: dict[str, bytes] = {}
            held = contents if request.param == "packs" else None
            tables = client.save(path, since=first, contents=held)
            for name, content in contents.items():
                (path / name).write_bytes(content)
            return {"tables": tables}

        second = checkpoint.publish(directory, 2, write, base=first)
    for path in (first, second):
        RemoteCheckpoints(ROOT).upload(path)
    return directory.parent


def command(capsys: pytest.CaptureFixture[str], *words: object, expect: int = 0) -> str:
    assert cli.main([str(word) for word in words]) == expect
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("name", ["", "/checkpoints", "/checkpoints/step-0000000002"])
def test_commands_say_of_a_url_what_they_say_of_a_directory(
    run: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    url = f"{ROOT.parent}{name}"
    for words in (["inspect"], ["inspect", "--json"], ["verify"]):
        here = command(capsys, *words, f"{run}{name or '/checkpoints'}")
        there = command(capsys, *words, url)
        shown = here.replace(str(run), str(ROOT.parent))
        assert there == (shown.replace(f"{ROOT}:", f"{url}:") if words == ["verify"] else shown)
    assert "no difference" in command(capsys, "diff", url, run)


def test_inspect_fetches_headers_alone(
    store: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with table(40_000) as client:
        path = checkpoint.publish(tmp_path / "big", 1, lambda path: {"tables": client.save(path)})
    RemoteCheckpoints(ROOT).upload(path)
    (file,) = path.glob("*.oet")
    size = file.stat().st_size
    assert size > 4 * remote._HEAD
    store.requests.clear()
    assert "40000" in command(capsys, "inspect", ROOT)
    ranges = [asked for _, url, asked in store.requests if ".oet" in url and asked]
    bounds = [asked.removeprefix("bytes=").split("-") for asked in ranges]
    assert bounds
    assert sum(int(last) - int(first) + 1 for first, last in bounds) < size / 4
    key = next(key for key in store.objects() if key.endswith(".oet"))
    store.put(key, store.objects()[key][:-1])
    said = command(capsys, "inspect", ROOT, expect=1)
    assert f"s3://{BUCKET}/{key} is damaged: it has {size - 1} bytes, the manifest says {size}" in said


def test_verify_finds_each_damage_by_url(
    store: ObjectStore, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = next(key for key in store.objects() if "step-0000000001/" in key and key.endswith(".oet"))
    store.put(key, store.objects()[key][:-1] + b"\0")
    said = command(capsys, "verify", ROOT, expect=1)
    assert f"s3://{BUCKET}/{key} is damaged: its SHA-256 is not the manifest's" in said
    assert "cache" not in said
    assert "is damaged" in command(capsys, "inspect", ROOT, expect=1)


def test_resharding_what_was_fetched(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reshard", ROOT, "--servers", "2")
    assert "name one with --output" in command(capsys, *words, expect=1)
    assert "name one with --output" in command(capsys, *words, "--output", ROOT, expect=1)
    command(capsys, *words, "--output", tmp_path / "two")
    assert "no difference" in command(capsys, "diff", ROOT, tmp_path / "two")


def test_commands_name_what_is_wrong_with_a_url(
    store: ObjectStore, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no checkpoint" in command(capsys, "inspect", f"s3://{BUCKET}/none", expect=1)
    store.fault = lambda *_: DENIED
    said = command(capsys, "verify", ROOT, expect=1)
    assert said.startswith(f"error: cannot read {ROOT}: the store refuses these credentials")
    with pytest.raises(SystemExit):
        cli.main(["inspect", "s3://a:secret-key@b/c"])
    said = capsys.readouterr().err
    assert "has credentials in it" in said
    assert "secret-key" not in said


def test_serving_takes_the_newest_of_a_url(store: ObjectStore, run: Path) -> None:
    serving = ServedCheckpoints(str(ROOT.parent))
    place = serving.newest()
    assert [path.name for path in place.chain] == ["step-0000000001", "step-0000000002"]
    store.requests.clear()
    assert serving.newest() == place
    assert not [path for _, path, _ in store.requests if ".oet" in path]
    with table(5) as client:
        third = checkpoint.publish(run / "checkpoints", 3, lambda path: {"tables": client.save(path)})
    RemoteCheckpoints(ROOT).upload(third)
    assert [path.name for path in serving.newest().chain] == ["step-0000000003"]
    assert [path.name for path in checkpoint.published(serving.directory)] == ["step-0000000003"]
