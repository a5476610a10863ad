"""Training on a stream: each row once, whatever happens in the middle."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import SMALL, ServerProcess, events, losses, wait_for

from oe_runtime.checkpoint import published
from oe_runtime.checkpoint.cli import diff
from oe_runtime.data.batches import with_following
from oe_runtime.data.generate import main as generate
from oe_runtime.support import dense_file
from oe_runtime.train import main

ROWS = 1000  # per file; with batches of 400, every second batch has rows of two files
FILES = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of different rows."""
    directory = tmp_path_factory.mktemp("files")
    found = [directory / f"part-{number}.tsv" for number in range(FILES)]
    for number, path in enumerate(found):
        assert generate(["--rows", str(ROWS), "--seed", str(number), "--out", str(path)]) == 0
    return found


@pytest.fixture(scope="module")
def undisturbed(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over the same rows when all of them are there."""
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    data = ["--data", str(files[0].parent), "--holdout", "0"]
    assert main([*data, *SMALL, "--run-dir", str(run), "--in-process"]) == 0
    return run


def arrive(path: Path, directory: Path) -> None:
    partial = directory / f".{path.name}"
    shutil.copyfile(path, partial)
    partial.rename(directory / path.name)


def start(run: Path, *more: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "oe_runtime.train", *SMALL, "--run-dir", str(run), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, **{"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True} | options
    )


def assert_alike(run: Path, undisturbed: Path) -> None:
    """A row that was left out or trained on twice would change weights, rows and losses."""
    assert losses(run) == losses(undisturbed)
    newest = [published(one / "checkpoints")[-1] for one in (run, undisturbed)]
    difference = diff(*newest)
    assert difference["tables"]
    for table in difference["tables"].values():
        assert (table["only_before"], table["only_after"], table["changed"]) == (0, 0, 0)
    weights = [np.load(path / dense_file.FILE) for path in newest]
    for name in weights[0].files:
        np.testing.assert_array_equal(weights[0][name], weights[1][name])


@pytest.mark.process
def test_each_row_is_trained_on_once_after_kills(
    tmp_path: Path, files: list[Path], undisturbed: Path
) -> None:
    """Worker and server are killed while files arrive, and the run is resumed from its checkpoints."""
    inbox, run = tmp_path / "inbox", tmp_path / "run"
    inbox.mkdir()
    arrive(files[0], inbox)
    server = ServerProcess(tmp_path / "server")
    arguments = ["--data", str(inbox), "--follow", "--servers", server.endpoint, "--checkpoint-steps", "3"]
    worker = start(run, *arguments)
    try:
        wait_for(lambda: 2 in losses(run), worker)  # waits for more: of the third batch half is there
        for path in files[1:3]:
            arrive(path, inbox)
        wait_for(lambda: 7 in losses(run) and len(events(run, "checkpoint")) > 2, worker)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
        for path in files[3:5]:
            arrive(path, inbox)
        (inbox / files[0].name).unlink()  # the checkpoint is in a later file
        worker = start(run, *arguments, "--resume", "--server-wait", "60")
        wait_for(lambda: 12 in losses(run), worker)
        server.kill()
        server.start_again()
        for path in files[5:]:
            arrive(path, inbox)
        (inbox / "_END").touch()
        said, error = worker.communicate(timeout=240)
        assert (worker.returncode, error) == (0, ""), said
    finally:
        worker.kill()
        worker.communicate()
        server.stop()
    assert_alike(run, undisturbed)
    step = events(run, "step")[-1]
    assert (step["rows"], step["file"], step["waiting"]) == (ROWS * FILES, files[-1].name, 0)


@pytest.mark.process
def test_a_stop_while_it_waits_keeps_the_place(tmp_path: Path, files: list[Path], undisturbed: Path) -> None:
    inbox, run = tmp_path / "inbox", tmp_path / "run"
    inbox.mkdir()
    arguments = ["--data", str(inbox), "--follow", "--in-process", "--checkpoint-steps", "0"]
    arrive(files[0], inbox)
    worker = start(run, *arguments)
    try:
        wait_for(lambda: 2 in losses(run), worker)
        time.sleep(1)
        worker.send_signal(signal.SIGTERM)
        said, error = worker.communicate(timeout=60)
        assert (worker.returncode, error) == (130, "")
        assert "after step 2" in said
        assert f"waiting for rows in {inbox}" in said
    finally:
        worker.kill()
        worker.communicate()
    for path in files[1:]:
        arrive(path, inbox)
    (inbox / "_END").touch()
    assert main([*SMALL, "--run-dir", str(run), *arguments, "--resume"]) == 0
    assert_alike(run, undisturbed)


@pytest.mark.process
def test_standard_input_is_sent_again_after_a_kill(
    tmp_path: Path, files: list[Path], undisturbed: Path
) -> None:
    run = tmp_path / "run"
    content = b"".join(path.read_bytes() for path in files)
    arguments = ["--data", "-", "--in-process", "--checkpoint-steps", "3"]
    worker = start(run, *arguments, text=False)
    assert worker.stdin is not None
    try:
        worker.stdin.write(content[: len(content) // 2])  # ends in the middle of a line
        worker.stdin.flush()
        wait_for(lambda: 9 in losses(run), worker)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=60)
    finally:
        worker.kill()
    worker = start(run, *arguments, "--resume", text=False)
    try:
        _, error = worker.communicate(content, timeout=240)
    finally:
        worker.kill()
        worker.communicate()
    assert (worker.returncode, error) == (0, b"")
    assert events(run, "resume")[-1]["step"] in (6, 9)  # the second may not have been complete
    assert_alike(run, undisturbed)


def test_evaluation_of_a_stream_is_on_other_files(tmp_path: Path, files: list[Path]) -> None:
    inbox, run = tmp_path / "inbox", tmp_path / "run"
    inbox.mkdir()
    arrive(files[0], inbox)
    (inbox / "_END").touch()
    data = ["--data", str(inbox), "--follow", "--eval-data", str(files[1]), "--eval-every", "1"]
    assert main([*data, *SMALL, "--run-dir", str(run), "--in-process"]) == 0
    assert [(one["step"], one["rows"]) for one in events(run, "eval")] == [(1, ROWS), (2, ROWS), (3, ROWS)]
    assert [one["rows"] for one in events(run, "step")] == [400, 800, 1000]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--follow", "--epochs", "2"], "--epochs does not go with --follow"),
        (["--follow", "--holdout", "0.1"], "--follow holds out no rows"),
        (["--follow", "--eval-data", "0.1"], "--follow holds out no rows"),
        (["--follow", "--workqueue"], "--follow is for one worker"),
        (["--data", "-", "--exit-with-parent"], "--data - does not go with --exit-with-parent"),
        (["--data", "-", "--follow"], "--data - does not go with --follow"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    where = ["--servers", "127.0.0.1:1"] if "--workqueue" in arguments else ["--in-process"]
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path), *SMALL, "--run-dir", str(tmp_path / "run"), *where, *arguments])
    assert said in capsys.readouterr().err


def test_the_batches_after_one_are_known_as_far_as_they_have_come() -> None:
    assert list(with_following(range(5), 2)) == [(0, [1, 2]), (1, [2, 3]), (2, [3, 4]), (3, [4]), (4, [])]
    assert list(with_following([], 2)) == []
    gaps = [0, 1, None, None, 2, None, 3]
    assert list(with_following(gaps, 2)) == [(0, [1]), (1, []), (None, []), (2, []), (3, [])]
    read = iter([0, 1, None, 3])
    turns = with_following(read, 2)
    assert [next(turns)[0] for _ in range(2)] == [0, 1]
    assert next(read) == 3  # not read before
