"""Checkpoints that are due by time: in each kind of run, and at the same step in all its workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import job_scripts
import pytest
from job_scripts import run, write
from server_processes import free_endpoints
from test_train import keep_determinism, train  # noqa: F401
from training_runs import DATA, SMALL, ServerProcess, events

from oe_runtime.data.generate import main as generate
from oe_runtime.run import course

NONE_BY_STEPS = ("--checkpoint-steps", "0")
# A trainer for which each step takes longer than the minutes between checkpoints.
HURRIED = (
    "import sys; from oe_runtime.run import course; from oe_runtime.train import main; "
    "course.MINUTE, course.COST = 1e-9, 1e9; sys.exit(main(sys.argv[1:]))"
)
ALL = (sys.executable, "-c", HURRIED)
CALM = (sys.executable, "-m", "oe_runtime.train")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "MINUTE", 1e-9)
    monkeypatch.setattr(course, "COST", 1e9)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "server")
    yield server
    server.stop()


def saved(run_dir: Path) -> list[int]:
    return [event["step"] for event in events(run_dir, "checkpoint")]


def last_step(run_dir: Path) -> int:
    return int(events(run_dir, "end")[0]["steps"])


@pytest.mark.usefixtures("hurried")
def test_a_model_of_ours(tmp_path: Path) -> None:
    assert train(tmp_path / "run", *NONE_BY_STEPS) == 0
    assert saved(tmp_path / "run") == list(range(1, 10))
    assert train(tmp_path / "by-steps", "--checkpoint-minutes", "0", "--checkpoint-steps", "4") == 0
    assert saved(tmp_path / "by-steps") == [4, 8, 9]
    assert train(tmp_path / "none", "--checkpoint-minutes", "0", *NONE_BY_STEPS) == 0
    assert saved(tmp_path / "none") == [9]


def test_rows_that_arrive(tmp_path: Path) -> None:
    file = tmp_path / "rows.tsv"
    assert generate(["--rows", "1000", "--seed", "1", "--out", str(file)]) == 0
    command = [*ALL, "--in-process", "--data", "-", *SMALL, *NONE_BY_STEPS]
    with file.open() as rows:
        done = subprocess.run(
            [*command, "--run-dir", str(tmp_path / "run")], stdin=rows, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "run") == [1, 2, 3]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("script", ["ARRAYS", "TAPE", "TORCH"])
def test_a_script(tmp_path: Path, script: str) -> None:
    if script == "TORCH":
        pytest.importorskip("torch")
    assert run(write(tmp_path, getattr(job_scripts, script)), tmp_path / "run", *NONE_BY_STEPS) == 0
    assert saved(tmp_path / "run") == list(range(1, 61))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["together", "workqueue", "script"])
def test_workers_agree_by_the_clock_of_the_first(tmp_path: Path, server: ServerProcess, kind: str) -> None:
    """The other worker's clock says that no checkpoint is due: if it counted, both would wait for ever."""
    run_dir = tmp_path / "run"
    more = ["--servers", server.endpoint, "--workers", free_endpoints(2), *NONE_BY_STEPS]
    if kind == "script":
        text = job_scripts.DATASET.replace("epochs=3", "epochs=1")
        more += ["--script", str(write(tmp_path, text)), "--log-every", "1"]
    else:
        more += [*DATA, *SMALL, "--no-eval"] + (["--workqueue"] if kind == "workqueue" else [])
    workers = [
        subprocess.Popen(
            [*(CALM if rank else ALL), *more, "--rank", str(rank), "--run-dir", str(tmp_path / where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, where in enumerate(("run", "other"))
    ]
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    steps = last_step(run_dir)
    if kind == "workqueue":  # worker 0 takes one after each step of its own
        assert len(saved(run_dir)) >= 2
        assert saved(run_dir)[-1] == steps
    else:
        assert saved(run_dir) == list(range(steps + 1))


def test_checkpoints_that_take_long_are_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(course, "MINUTE", 1e-9)
    monkeypatch.setattr(course, "COST", 1e-9)
    assert train(tmp_path / "run", *NONE_BY_STEPS) == 0
    assert saved(tmp_path / "run") == [1, 9]
    assert "the next one by time comes after" in capsys.readouterr().out
