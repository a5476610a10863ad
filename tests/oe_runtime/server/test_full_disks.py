"""Disks and pools that are too small: the error names them, and what was durable before stays readable."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from training_runs import DATA, SMALL, events

from oe_runtime import CheckpointError, Client, StorageError, StorageSpec, TableSpec, checkpoint

MIB = 1 << 20
SPEC = TableSpec("t", 16, optimizer={"name": "adagrad"})


def push(client: Client, keys: range) -> None:
    ids = np.array(keys, np.int64)
    pulled = client.pull([ids], [(0, 0)])
    client.push(pulled, [np.ones((len(ids), SPEC.dim), np.float32)], 0.1)


def push_many(client: Client) -> None:
    for begin in range(0, 200_000, 5_000):
        push(client, range(begin, begin + 5_000))


def rows(client: Client) -> dict[int, bytes]:
    keys, weights = client.export_rows(0)
    return {int(key): row.tobytes() for key, row in zip(keys, weights, strict=True)}


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(disk: Path) -> None:
    directory = disk / "checkpoints"
    with Client.in_process() as client:
        client.create_table(SPEC)
        push(client, range(10_000))
        wanted = rows(client)

        def save(path: Path) -> dict[str, object]:
            return {"tables": client.save(path)}

        first = checkpoint.publish(directory, 1, save)
        push(client, range(40_000))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.publish(directory, 2, save)
        assert str(directory) in str(caught.value)
        assert "0-of-1.t.oet" in str(caught.value), "which file"
        assert "No space left on device" in str(caught.value)
        assert [path.name for path in directory.iterdir()] == [first.name], "nothing is left of it"
        checkpoint.verify(first)
        push(client, range(100))  # training could go on
        client.restore(first)
        assert rows(client) == wanted


# A table in dram_ssd does not fit on the small disk: it takes 16 MiB at least.
@pytest.mark.parametrize(
    ("kind", "small"),
    [*itertools.product(["pmem_libpmem", "dram_pmem"], ["disk", "size"]), ("dram_ssd", "size")],
)
def test_a_pool_that_cannot_grow(disk: Path, kind: str, small: str) -> None:
    storage = StorageSpec(
        kind,
        str(disk / "pool"),
        capacity_bytes=4 * MIB if small == "size" else 0,
        recover=True,
        cache_bytes=0 if kind == "pmem_libpmem" else MIB,
    )
    with Client.in_process(storage) as client:
        client.create_table(SPEC)
        push(client, range(5_000))
        wanted = rows(client)
        client.checkpoint(1, wait=True)
        with pytest.raises(StorageError) as caught:
            push_many(client)
        said = str(caught.value)
        assert str(disk / "pool") in said
        assert "'t'" in said
        if kind == "dram_ssd":
            assert "raise the storage size of the servers, free space on the drive, or use more" in said
        elif small == "disk":
            assert "No space left on device; free space there" in said
        else:
            assert "of 4.0 MiB are in use; raise the storage size of the servers or use more servers" in said
        assert client.checkpoints() == [1]
        assert client.recover() == 1
        assert rows(client) == wanted
        push(client, range(5_000))
    with Client.in_process(storage) as client:
        client.create_table(SPEC)
        assert client.recover() == 1
        assert rows(client) == wanted


def test_a_full_disk_at_one_checkpoint_is_no_end(disk: Path, tmp_path: Path) -> None:
    """Training says so, goes on, and writes the next one when there is room again, or again the last one."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    filler = disk / "filler"
    command = [sys.executable, "-m", "oe_runtime.train", "--in-process", "--run-dir", str(run), *SMALL, *DATA]
    command += ["--checkpoint-steps", "3", "--no-eval", "--epochs", "4", "--keep-checkpoints", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("checkpoint") and not filler.exists():
                with suppress(OSError):
                    filler.write_bytes(bytes(8 * MIB))
            if line.startswith("warning: no checkpoint") and (said.count("warning:") == 1 or "again" in line):
                filler.unlink(missing_ok=True)
        assert process.wait(120) == 0, said
    assert "No space left on device; training goes on, and the next one is tried at step " in said
    assert "warning: no checkpoint of step 36: " in said
    assert "No space left on device; trying again" in said
    missed = {e["step"] for e in events(run, "no_checkpoint")}
    written = [e["step"] for e in events(run, "checkpoint")]
    assert len(written) >= 3
    assert written[-1] == 36
    assert missed & set(written) <= {36}
    checkpoint.verify(checkpoint.published(disk)[-1])
    assert "checkpoints not written" in (run / "report.html").read_text()


def test_a_run_directory_without_room_is_named(disk: Path) -> None:
    (disk / "run").mkdir()
    with suppress(OSError):
        (disk / "filler").write_bytes(bytes(8 * MIB))
    command = [sys.executable, "-m", "oe_runtime.train", "--in-process", "--run-dir", str(disk / "run")]
    done = subprocess.run([*command, *SMALL, *DATA], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{disk / 'run'}" in done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("room", [0, 200_000])  # for the files, and for some of them
def test_an_export_without_room_says_so(disk: Path, tmp_path: Path, room: int) -> None:
    """TensorFlow has one kind of error for full disks and full memory."""
    with suppress(OSError):
        (disk / "filler").write_bytes(bytes(6 * MIB - room))
    command = [sys.executable, "-m", "oe_runtime.train", "--in-process", "--run-dir", str(tmp_path / "run")]
    command += ["--export", str(disk / "export"), "--no-eval", *SMALL, *DATA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"error: cannot export to {disk / 'export'}: ")
    assert said.endswith("No space left on device; free space there")
    assert not [path.name for path in disk.iterdir() if path.name != "filler"], "half an export"
    assert events(tmp_path / "run", "error")[0]["message"] in said
