"""State directories without room, and tools that end with oeprov."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_processes import make_job

from oe_runtime import Client, TableSpec, checkpoint

OEPROV = [sys.executable, "-m", "provision.cli"]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system that has a job, and no room for anything else."""
    path = tmp_path / "full"
    path.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True
        ).returncode
    ):
        pytest.skip("no file system can be mounted here")
    make_job(path / "state")
    with open(path / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_resume_names_the_file_that_has_no_room(full: Path) -> None:
    """The job's directory is on it: one sentence, and the job is as it was."""
    state = full / "state"
    before = {file: file.read_bytes() for file in state.rglob("*.json")}
    done = subprocess.run(
        [*OEPROV, "resume", "--state-dir", str(state)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: state directory {state}: cannot be written: No space left on device; "
    )
    assert "Traceback" not in done.stderr
    assert {file: file.read_bytes() for file in state.rglob("*.json")} == before


def test_a_killed_oeprov_leaves_no_tool_running(tmp_path: Path) -> None:
    with Client.in_process() as client:
        client.create_table(TableSpec("t", 4))
        found = checkpoint.publish(tmp_path / "checkpoints", 1, lambda path: {"tables": client.save(path)})
    lock = os.open(found.parent, os.O_RDONLY)  # reshard waits for who publishes there
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = subprocess.Popen([*OEPROV, "reshard", str(found), "--servers", "2"])
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 120
        while not (tools := [pid for pid in children.read_text().split() if _is_tool(pid)]):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while any(_is_tool(pid) for pid in tools):
            assert time.monotonic() < deadline, "it runs on alone"
            time.sleep(0.05)
    finally:
        os.close(lock)


def _is_tool(pid: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"oe_runtime.checkpoint" in words
