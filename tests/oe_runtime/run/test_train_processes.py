"""The trainer with real server processes on loopback: equal losses, and ends that nobody planned."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_train import keep_determinism, train  # noqa: F401
from training_runs import SMALL, ServerProcess, events, losses, wait_for

from oe_runtime.checkpoint import published

pytestmark = pytest.mark.process

# Hours of steps, none held out: such a run ends only because the test ends it.
ENDLESS = ["--data", "generate:100000000:1", "--holdout", "0"]


def start(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "oe_runtime.train",
        *ENDLESS,
        *SMALL,
        "--run-dir",
        str(run_dir),
        *arguments,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_one_and_three_servers_have_the_losses_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "local", "--steps", "8", data=ENDLESS) == 0
    expected = losses(tmp_path / "local")
    assert len(expected) == 8
    for count in (1, 3):
        servers = [ServerProcess(tmp_path / f"server-{count}-{i}", i, count) for i in range(count)]
        run_dir = tmp_path / f"run-{count}"
        where = ("--servers", ",".join(s.endpoint for s in servers))
        try:
            assert train(run_dir, "--steps", "6", where=where, data=ENDLESS) == 0
            # The servers hold what was trained: another run must not start from it unknowingly.
            capsys.readouterr()
            assert train(tmp_path / f"again-{count}", "--steps", "6", where=where, data=ENDLESS) == 1
            assert "already holds" in capsys.readouterr().err
        finally:
            for server in servers:
                server.stop()
    # What three servers wrote goes on in this process, as if it had never been interrupted.
    assert train(tmp_path / "run-3", "--steps", "8", "--resume", data=ENDLESS) == 0
    assert losses(tmp_path / "run-3") == expected
    assert losses(tmp_path / "run-1") == {step: expected[step] for step in range(1, 7)}


@pytest.mark.parametrize("rows", ["pool", "increments"])
def test_killed_worker_then_killed_server(tmp_path: Path, rows: str) -> None:
    run_dir = tmp_path / "run"
    server = ServerProcess(tmp_path / "server", storage="pmem_libpmem" if rows == "pool" else "dram")
    more = () if rows == "pool" else ("--checkpoint-increments", "3")
    arguments = ("--servers", server.endpoint, "--checkpoint-steps", "5", "--server-wait", "0", *more)
    worker = start(run_dir, *arguments)
    try:
        wait_for(lambda: 8 in losses(run_dir), worker)
        worker.kill()
        worker.communicate(timeout=60)
        # The same server has rows from after the checkpoint; they must not survive the resume.
        first = max(e["step"] for e in events(run_dir, "checkpoint"))
        worker = start(run_dir, *arguments, "--resume")
        wait_for(lambda: first + 7 in losses(run_dir) and events(run_dir, "resume"), worker)
        server.process.kill()
        _, error = worker.communicate(timeout=60)
    finally:
        worker.kill()
        server.stop()
    assert worker.returncode == 1
    assert len(error.splitlines()) == 1, error
    # The worker that was killed may have published one that it could not tell of.
    last = max(int(path.name[5:15]) for path in published(run_dir / "checkpoints"))
    for part in ("error: ", server.endpoint, f"step-{last:010d}", "--resume"):
        assert part in error
    assert server.endpoint in events(run_dir, "error")[0]["message"]

    fresh = ServerProcess(tmp_path / "fresh")
    try:
        where = ("--servers", fresh.endpoint)
        steps = str(last + 3)
        assert train(run_dir, "--resume", "--steps", steps, where=where, data=ENDLESS) == 0
    finally:
        fresh.stop()
    assert [e["step"] for e in events(run_dir, "resume")][1:] == [last]
    undisturbed = tmp_path / "undisturbed"
    assert train(undisturbed, "--steps", steps, "--checkpoint-steps", "5", data=ENDLESS) == 0
    expected = losses(undisturbed)
    assert {step: losses(run_dir)[step] for step in expected} == expected


@pytest.mark.parametrize("cause", ["SIGINT", "stdin"])
def test_a_stopped_run_leaves_a_checkpoint(tmp_path: Path, cause: str) -> None:
    run_dir = tmp_path / "run"
    worker = start(run_dir, "--in-process", "--exit-with-parent", "--checkpoint-steps", "0")
    try:
        wait_for(lambda: len(losses(run_dir)) >= 3, worker)
        if cause == "stdin":
            assert worker.stdin is not None
            worker.stdin.close()
        else:
            os.kill(worker.pid, signal.SIGINT)
        assert worker.wait(timeout=60) == 130
        assert worker.stdout is not None
        assert worker.stderr is not None
        said = worker.stdout.read().splitlines()[-1]
        assert worker.stderr.read() == ""
    finally:
        worker.kill()
    stopped = events(run_dir, "interrupted")[0]
    assert stopped["step"] == max(losses(run_dir))
    assert stopped["path"].endswith(f"step-{stopped['step']:010d}")
    assert f"after step {stopped['step']}" in said
    assert "--resume" in said
