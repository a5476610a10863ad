"""Checkpoints appear whole or not at all, and a damaged one is found out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oe_runtime import checkpoint
from oe_runtime.errors import CheckpointError


def write_rows(text: str):
    def write(path: Path):
        (path / "rows").write_text(text)
        (path / "dense").mkdir()
        (path / "dense" / "weights").write_bytes(b"\0" * 1000)
        return {"training": {"note": text}}

    return write


def test_publish_then_latest_and_verify(tmp_path):
    path = checkpoint.publish(tmp_path / "checkpoints", 7, write_rows("seven"))
    found = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.path, found.step) == (path, 7)
    assert found.manifest["training"] == {"note": "seven"}
    assert set(found.manifest["files"]) == {"rows", "dense/weights"}
    assert checkpoint.verify(path) == found


def test_latest_of_nothing(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None


def test_keeps_the_newest(tmp_path):
    for step in (5, 10, 900, 1000):
        checkpoint.publish(tmp_path, step, write_rows(str(step)), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000900", "step-0000001000"]


def test_keeps_a_pinned_one_with_its_base_until_it_is_unpinned(tmp_path):
    run, step_file = tmp_path / "checkpoints", tmp_path / "step"
    base = checkpoint.publish(run, 1, write_rows("1"))
    pinned = checkpoint.publish(run, 2, write_rows("2"), base=base)
    step_file.write_text("2\n")
    checkpoint.pin(pinned, step_file)
    for step in (3, 4, 5):
        checkpoint.publish(run, step, write_rows(str(step)), keep=1)
    assert [path.name[-1] for path in checkpoint.published(run)] == ["1", "2", "5"]
    assert checkpoint.verify(pinned).step == 2
    step_file.write_text("5\n")
    checkpoint.publish(run, 6, write_rows("6"), keep=1)
    assert [path.name[-1] for path in checkpoint.published(run)] == ["6"]


def test_keeps_each_that_a_step_file_or_a_process_pins(tmp_path):
    run, step_file = tmp_path / "checkpoints", tmp_path / "step"
    step_file.write_text("newest 2 03\n")
    for step in (1, 2, 3, 4):
        path = checkpoint.publish(run, step, write_rows(str(step)))
        checkpoint.pin(path, step_file)
        if step in (1, 4):
            checkpoint.pin(path)
    gone = run / "step-0000000004" / "pinned-until"
    os.utime(gone, (time.time() - 601,) * 2)  # of a process that ended
    for step in (5, 6):
        checkpoint.publish(run, step, write_rows(str(step)), keep=1)
    assert [path.name[-1] for path in checkpoint.published(run)] == ["1", "2", "3", "6"]


def test_the_same_step_again_is_newer(tmp_path):
    for n in range(12):
        checkpoint.publish(tmp_path, 5, write_rows(f"{n}"), keep=20)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, (found.path / "rows").read_text()) == (5, "11")


def test_a_writer_that_fails_publishes_nothing(tmp_path):
    checkpoint.publish(tmp_path, 1, write_rows("one"))

    def fail(path: Path):
        (path / "rows").write_text("half")
        raise CheckpointError("server lost")

    with pytest.raises(CheckpointError, match="server lost"):
        checkpoint.publish(tmp_path, 2, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001"]


@pytest.mark.parametrize("call", ["mkdir", "write", "begun", "rest", "fsync", "rename"])
def test_killed_at_any_moment_the_previous_one_stays_the_latest(tmp_path, call):
    checkpoint.publish(tmp_path, 1, write_rows("one"))
    # A process that dies of SIGKILL at the named moment of writing checkpoint 2.
    script = f"""
import os, signal, sys
from pathlib import Path
from oe_runtime import checkpoint
def die(*a, **k): os.kill(os.getpid(), signal.SIGKILL)
def write(path):
    (path / "rows").write_text("half")
    if {call!r} == "write": die()
    def rest():
        if {call!r} == "rest": die()
        return {{}}
    return rest
if {call!r} == "mkdir": Path.mkdir = lambda self, **k: "partial" in self.name and die()
if {call!r} == "fsync": os.fsync = die
if {call!r} == "rename": Path.rename = die
end = checkpoint.begin(Path(sys.argv[1]), 2, write)
if {call!r} == "begun": die()
end()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert checkpoint.verify(found.path).step == 1
    # and the next one clears what was left behind
    checkpoint.publish(tmp_path, 3, write_rows("three"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000001", "step-0000000003"]


def test_what_is_begun_has_the_directory_until_its_end(tmp_path):
    """And what the second half writes is flushed, whoever says that the core has synced it."""
    end = checkpoint.begin(tmp_path, 1, lambda path: lambda: write_rows("one")(path))
    with pytest.raises(CheckpointError, match="another process is writing"):
        checkpoint.publish(tmp_path, 2, write_rows("two"))
    child = os.fork()  # which has the lock, too
    if child == 0:
        signal.pause()
    assert end().name == "step-0000000001"
    checkpoint.publish(tmp_path, 2, write_rows("two"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_checkpoint_has_its_name_after_all_its_bytes_are_durable(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        done.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)

    def write(path: Path):
        (path / "table.oet").write_text("the core has synced it")

        def rest():
            (path / "held.oet").write_text("the core has held it")
            tables = [{"file": "table.oet"}, {"file": "held.oet"}]
            return {**write_rows("one")(path), "tables": tables}

        return rest

    path = checkpoint.publish(tmp_path, 1, write)
    partial = tmp_path / f".partial-{path.name}"
    names = ("rows", "dense", "dense/weights", "held.oet", "manifest.json")
    assert sorted(done[:-2]) == sorted([partial, *(partial / name for name in names)])
    assert done[-2:] == [path, tmp_path]


def test_killed_while_removing_old_ones_nothing_half_removed_is_found(tmp_path):
    checkpoint.publish(tmp_path, 1, write_rows("one"))
    script = """
import os, shutil, signal, sys
from pathlib import Path
from oe_runtime import checkpoint
def die(path):
    (path / "rows").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = die
checkpoint.publish(Path(sys.argv[1]), 2, lambda path: {}, keep=1)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-0000000002"]
    checkpoint.publish(tmp_path, 3, write_rows("three"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000002", "step-0000000003"]


def test_two_writers_at_once(tmp_path):
    def write(path: Path):
        with pytest.raises(CheckpointError, match="another process"):
            checkpoint.publish(tmp_path, 2, write_rows("two"))
        return {}

    checkpoint.publish(tmp_path, 1, write)
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001"]


def test_the_manifest_keeps_its_own_fields(tmp_path):
    with pytest.raises(ValueError, match="step"):
        checkpoint.publish(tmp_path, 1, lambda path: {"step": 5})
    assert checkpoint.latest(tmp_path) is None


def damage_flip(path: Path):
    data = bytearray((path / "dense" / "weights").read_bytes())
    data[500] ^= 1
    (path / "dense" / "weights").write_bytes(data)


def damage_truncate(path: Path):
    os.truncate(path / "dense" / "weights", 10)


def damage_remove(path: Path):
    (path / "dense" / "weights").unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_remove])
def test_verify_names_the_damaged_file(tmp_path, damage):
    path = checkpoint.publish(tmp_path, 1, write_rows("one"))
    damage(path)
    with pytest.raises(CheckpointError, match="dense/weights"):
        checkpoint.verify(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "lists no files"),
        (json.dumps({"format": 99, "step": 1, "files": {}}), "format is 99"),
        (json.dumps({"format": 1, "step": "x", "files": {}}), "step is 'x'"),
        (json.dumps({"format": 1, "step": 1, "files": {"a": 3}}), "files: a: bytes is missing"),
        (json.dumps({"format": 1, "step": 1, "files": {"a": {"bytes": 3}}}), "files: a: sha256 is missing"),
        (json.dumps({"format": 1, "step": 1, "files": {"../a": {}}}), "files: ../a lies elsewhere"),
        (json.dumps({"format": 1, "step": 1, "files": {}, "base": {"name": "/", "sha256": ""}}), "base is"),
    ],
)
def test_a_manifest_that_is_not_one(tmp_path, text, message):
    path = checkpoint.publish(tmp_path, 1, write_rows("one"))
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.latest(tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file"):
        checkpoint.publish(tmp_path / "file" / "checkpoints", 1, write_rows("one"))


def test_a_chain_is_followed_only_to_what_is_known_of_it(tmp_path, monkeypatch):
    paths: list[Path] = []
    for step in range(6):
        base = paths[-1] if paths else None
        paths.append(checkpoint.publish(tmp_path, step, write_rows(str(step)), base=base))
    known = checkpoint.links(paths[3])
    everything = checkpoint.links(paths[5])
    assert [path for path, _ in everything] == paths
    looked: list[Path] = []
    stamp = checkpoint.store.stamp
    monkeypatch.setattr(checkpoint.store, "stamp", lambda path: looked.append(path.parent) or stamp(path))
    assert checkpoint.links(paths[5], known) == everything
    assert {*looked} == {*paths[3:]}
    # A base of the same name that is another one now is not what is known.
    replaced = [*known[:-1], (known[-1][0], "0" * 64)]
    assert checkpoint.links(paths[5], replaced) == everything
