"""Workers on several hosts have the same input, or say which file differs before the first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from server_processes import free_endpoints
from training_runs import SMALL, ServerProcess, events, losses, wait_for

from oe_runtime.data import DataError, open_source
from oe_runtime.data.identity import ALL_BLOCKS, BLOCK, MOST_BLOCKS
from oe_runtime.run.worker_input import WorkerInput

EXCERPT = (Path(__file__).parents[1] / "data" / "criteo_200.tsv").read_bytes()


def sparse(path: Path, size: int, *, at: int = 0, mark: bytes = b"") -> None:
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(mark)


def of(directory: Path, rank: int = 0) -> WorkerInput:
    return WorkerInput(rank, f"w{rank}", open_source(str(directory)).identity())


def copies(tmp_path: Path, change: Callable[[Path], object]) -> str:
    """What worker 1 says, whose copy of three files was changed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"part-{number}.tsv").write_bytes(EXCERPT * 40)
    change(tmp_path / "b")
    first = WorkerInput.from_json(of(tmp_path / "a").to_json())
    return of(tmp_path / "b", 1).problem(first)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda there: None, ""),
        (lambda there: os.utime(there / "part-1.tsv", (0, 0)), ""),
        (
            lambda there: (there / "part-1.tsv").write_bytes(EXCERPT * 39),
            f"part-1.tsv has {39 * len(EXCERPT):,} bytes on worker 1 (host w1) and {40 * len(EXCERPT):,} on "
            "worker 0 (host w0)",
        ),
        (
            lambda there: (there / "part-2.tsv").write_bytes(EXCERPT * 39 + EXCERPT[::-1]),
            "part-2.tsv has the same size on worker 1 (host w1) and on worker 0 (host w0)",
        ),
        (
            lambda there: (there / "part-0.tsv").unlink(),
            "part-0.tsv is on worker 0 (host w0) and not on worker 1 (host w1)",
        ),
        (
            lambda there: (there / "part-1b.tsv").write_bytes(EXCERPT),
            "part-1b.tsv is on worker 1 (host w1) and not on worker 0 (host w0)",
        ),
        (
            lambda there: (there / "part-9.tsv").write_bytes(EXCERPT),
            "part-9.tsv is on worker 1 (host w1) and not on worker 0 (host w0)",
        ),
    ],
)
def test_the_first_file_that_differs_is_named(
    tmp_path: Path, change: Callable[[Path], object], found: str
) -> None:
    said = copies(tmp_path, change)
    assert said.startswith(f"--data: {found}") if found else said == ""


def test_a_large_file_is_sampled_from_head_to_tail(tmp_path: Path) -> None:
    size = 100 << 30  # sparse
    name = tmp_path / "day.tsv"
    found = set()
    started = time.monotonic()
    places = [size * number // (MOST_BLOCKS - 1) for number in range(MOST_BLOCKS - 1)]
    for at in (0, size - 1, *places[1::9]):
        sparse(name, size, at=min(at, size - 1), mark=b"1")
        found.add(open_source(str(name)).identity()[0].digest)
    assert len(found) == 2 + len(places[1::9])
    assert time.monotonic() - started < 10


def test_many_files_are_sampled_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(ALL_BLOCKS // 4):
        sparse(tmp_path / f"part-{number:05d}.tsv", 10 * BLOCK)
    before = open_source(str(tmp_path)).identity()
    sparse(tmp_path / "part-00003.tsv", 10 * BLOCK, at=10 * BLOCK - 1, mark=b"1")
    after = open_source(str(tmp_path)).identity()
    assert [a.name for a, b in zip(before, after, strict=True) if a != b] == ["part-00003.tsv"]
    (tmp_path / "part-00004.tsv").unlink()
    source = open_source(str(tmp_path))
    (tmp_path / "part-00003.tsv").unlink()
    with pytest.raises(DataError, match=r"part-00003\.tsv: No such file"):
        source.identity()


def test_names_are_below_what_was_named(tmp_path: Path) -> None:
    for day in ("day-1", "day-2"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "rows.tsv").write_bytes(EXCERPT)
    assert [file.name for file in open_source(str(tmp_path / "day-*" / "*.tsv")).identity()] == [
        "day-1/rows.tsv",
        "day-2/rows.tsv",
    ]
    assert [file.name for file in open_source(str(tmp_path / "day-1")).identity()] == ["rows.tsv"]
    assert [file.name for file in open_source(str(tmp_path / "day-1" / "rows.tsv")).identity()] == [
        "rows.tsv"
    ]


def test_generated_rows_are_compared_too() -> None:
    first = WorkerInput(0, "w0", open_source("generate:1000:1", 100).identity())
    assert WorkerInput(1, "w1", open_source("generate:1000:1", 100).identity()).problem(first) == ""
    other = WorkerInput(1, "w1", open_source("generate:1000:2", 100).identity()).problem(first)
    assert other.startswith("--data: generate:1000:1 is on worker 0 (host w0) and not on worker 1 (host w1)")


def start(run_dir: Path, server: ServerProcess, places: list[Path], *flags: str) -> list[subprocess.Popen]:
    """Workers, each in a directory of its own."""
    command = [sys.executable, "-m", "oe_runtime.train", *SMALL, "--run-dir", str(run_dir)]
    command += ["--servers", server.endpoint, "--workers", free_endpoints(len(places)), *flags]
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(places)
    ]


@pytest.mark.process
@pytest.mark.parametrize("workqueue", [False, True])
def test_workers_with_other_files_are_refused_at_once(tmp_path: Path, workqueue: bool) -> None:
    run_dir, server = tmp_path / "run", ServerProcess(tmp_path / "server")
    places = [tmp_path / name for name in ("a", "b", "c")]
    for place, rows in zip(places, (EXCERPT * 15, EXCERPT * 15, EXCERPT * 12), strict=True):
        (place / "data").mkdir(parents=True)
        (place / "data" / "part-0.tsv").write_bytes(EXCERPT)
        (place / "data" / "part-1.tsv").write_bytes(rows)
    flags = ["--workqueue"] if workqueue else []
    workers = start(run_dir, server, places, "--data", "data", "--batch-size", "400", *flags)
    try:
        ended: list[float] = []
        for worker in workers:
            worker.wait(timeout=240)
            ended.append(time.monotonic())
        said = [worker.communicate()[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1, 1], said
    assert ended[-1] - ended[0] < 30
    for words in said:
        assert len(words.splitlines()) == 1, words
        assert f"error: --data: part-1.tsv has {12 * len(EXCERPT):,} bytes on worker 2 (host " in words
    assert f"and {15 * len(EXCERPT):,} on worker 0" in events(run_dir, "error")[0]["message"]
    assert losses(run_dir) == {}


@pytest.mark.process
def test_the_same_files_may_lie_elsewhere_and_a_frozen_worker_keeps_nobody(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", ServerProcess(tmp_path / "server")
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        (place / "data").mkdir(parents=True)
        (place / "data" / "part-0.tsv").write_bytes(EXCERPT * 20)
    workers = start(run_dir, server, places, "--data", "data", "--epochs", "10000")
    try:
        wait_for(lambda: 6 in losses(run_dir), workers[0], 200)
        workers[1].send_signal(signal.SIGSTOP)
        reached = -1
        while reached != len(losses(run_dir)):  # until worker 0 waits for it
            reached = len(losses(run_dir))
            time.sleep(2)
        started = time.monotonic()
        workers[0].send_signal(signal.SIGTERM)
        _, words = workers[0].communicate(timeout=60)
        assert time.monotonic() - started < 30
        assert workers[0].returncode == 3
        assert len(words.splitlines()) == 1, words
        assert "asked to stop (SIGTERM), but the other workers did not agree within 20 s" in words
        assert "start all workers again with --resume" in words
        assert events(run_dir, "error")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()


@pytest.mark.process
def test_a_second_signal_ends_a_worker_that_waits(tmp_path: Path) -> None:
    run_dir, server = tmp_path / "run", ServerProcess(tmp_path / "server")
    workers = start(run_dir, server, [tmp_path] * 2, "--data", "generate:100000000:1")
    try:
        wait_for(lambda: 6 in losses(run_dir), workers[0], 200)
        workers[1].send_signal(signal.SIGSTOP)
        time.sleep(2)
        for _ in range(2):
            workers[0].send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert workers[0].wait(timeout=60) == -signal.SIGTERM  # and not 3, as after the limit of waits
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
