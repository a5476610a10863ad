"""Scripts that train by job.train, as built-in models do: losses, resumes, going back after a lost server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import job_scripts
import pytest
from job_scripts import losses, run, start, write
from server_processes import free_endpoints
from test_job_batches import SCRIPT, flags
from training_runs import ServerProcess, events, wait_for

LOOP = SCRIPT[: SCRIPT.index("with job.training")]
BY_METRICS = (
    LOOP
    + """
def step(batch):
    x, y, weights = batch
    done = int(model.optimizer.iterations) + 1
    if done in stops and done > job.resume_step:
        os.kill(os.getpid(), signal.SIGTERM)
    return model.train_on_batch(x, y, weights, return_dict=True)


job.train(step, model, evaluate=evaluate)
"""
)
BY_LOSS = (
    LOOP
    + """
def step(batch):
    x, y, weights = batch
    model.reset_metrics()
    return model.train_on_batch(x, y, weights)[0]


job.train(step, model, evaluate=evaluate)
"""
)


def test_it_trains_as_a_loop_of_ones_own_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "3", "--eval-every", "10"]
    own, mine, stopped = tmp_path / "own", tmp_path / "mine", tmp_path / "stopped"
    assert run(write(tmp_path, SCRIPT), own, *words) == 0
    assert run(write(tmp_path, BY_LOSS), mine, *words) == 0
    script = write(tmp_path, BY_METRICS)
    stops = ("5", "13")
    codes = [run(script, stopped, *words, arguments=stops)]
    codes += [run(script, stopped, *words, "--resume", arguments=stops) for _ in range(2)]
    assert codes == [130, 130, 0]
    figures = [losses(one) for one in (own, mine, stopped)]
    of_each = [{step: loss for step, (loss, _) in one.items()} for one in figures]
    assert of_each[0] == of_each[1] == of_each[2]
    assert None not in [auc for _, auc in figures[2].values()], "of the compiled metric"
    evaluated = [[(e["step"], e["loss"]) for e in events(one, "eval")] for one in (own, mine, stopped)]
    assert evaluated[0] == evaluated[1] == evaluated[2]
    assert run(script, stopped, *words, "--epochs", "4", "--resume", arguments=stops) == 0
    assert max(losses(stopped)) == 32


@pytest.mark.parametrize("returned", ["None", "{'auc': 0.5}"])
def test_a_step_says_its_loss(returned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, LOOP + f"\njob.train(lambda batch: {returned}, model)\n")
    assert run(script, tmp_path / "run", *flags(tmp_path), "--batch-size", "50") == 1
    assert "step returns no loss: return the mean loss of its rows" in capsys.readouterr().err


@pytest.mark.process
def test_a_lost_server_takes_it_back_without_a_new_process(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, BY_METRICS), tmp_path / "run"
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "60", "--checkpoint-steps", "15"]
    server = ServerProcess(tmp_path / "server")
    process = start(script, run_dir, "--servers", server.endpoint, *words)
    try:
        for times in (1, 2):
            after = max(losses(run_dir), default=0) + 20
            wait_for(lambda: max(losses(run_dir), default=0) > after, process)  # noqa: B023
            server.kill()
            server.start_again()
            wait_for(lambda: len(events(run_dir, "server_back")) == times, process)  # noqa: B023
        said, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "is back after" in said
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert len(events(run_dir, "start")) == 1
    assert run(script, tmp_path / "whole", *words) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


@pytest.mark.parametrize("text", [SCRIPT, BY_METRICS])
def test_a_timeline_is_of_every_nth_step(text: str, tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, text), tmp_path / "run"
    words = ["--batch-size", "50", "--steps", "5", "--timeline", "3", "--no-eval"]
    assert run(script, run_dir, *flags(tmp_path), *words) == 0
    assert len(list(run_dir.glob("tensorboard/plugins/profile/*/*.xplane.pb"))) == 1


@pytest.mark.process
def test_standard_input_has_the_losses_of_its_file(tmp_path: Path) -> None:
    script = write(tmp_path, BY_METRICS)
    named, path, *schema = flags(tmp_path)
    words = [*schema, "--batch-size", "50", "--log-every", "1"]
    assert run(script, tmp_path / "file", named, path, *words, "--holdout", "0") == 0
    run_dir = tmp_path / "run"
    for more, stops, code in (([], ("3",), 130), (["--resume"], (), 0)):
        process = start(script, run_dir, named, "-", *words, *more, arguments=stops, stdin=subprocess.PIPE)
        try:
            _, error = process.communicate(Path(path).read_text(), timeout=120)
        finally:
            process.kill()
        assert process.returncode == code, error
    assert losses(run_dir) == losses(tmp_path / "file")


@pytest.mark.process
def test_a_work_queue_has_the_losses_of_a_run_in_order(tmp_path: Path) -> None:
    """With one worker and one file the steps are the same; its dense weights are on the server."""
    script, run_dir = write(tmp_path, BY_METRICS), tmp_path / "run"
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "2"]
    assert run(script, tmp_path / "one", *words) == 0
    for name, more, stops, code in (("first", [], ("5",), 130), ("fresh", ["--resume"], (), 0)):
        server = ServerProcess(tmp_path / name)
        queue = ("--servers", server.endpoint, "--workqueue", *more)
        process = start(script, run_dir, *words, *queue, arguments=stops)
        try:
            _, error = process.communicate(timeout=120)
        finally:
            process.kill()
            server.stop()
        assert process.returncode == code, error
    found, expected = losses(run_dir), losses(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert [loss for loss, _ in found.values()] == pytest.approx(
        [loss for loss, _ in expected.values()], 1e-4
    )
    of_both = [events(one, "eval")[-1]["loss"] for one in (run_dir, tmp_path / "one")]
    assert of_both[0] == pytest.approx(of_both[1], 1e-4)


@pytest.mark.process
def test_asynchronous_workers_share_the_rows_and_outlive_a_server(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, BY_METRICS), tmp_path / "run"
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "40", "--checkpoint-steps", "10"]
    server, workers = ServerProcess(tmp_path / "server"), free_endpoints(2)
    where = ("--servers", server.endpoint, "--workqueue", "--workers", workers)
    processes = [start(script, run_dir, *words, *where, "--rank", str(rank)) for rank in range(2)]
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 20, processes[0])
        server.kill()
        server.start_again()
        said = [process.communicate(timeout=200) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        for process in processes:
            process.kill()
        server.stop()
    assert events(run_dir, "server_back")
    assert (events(run_dir, "end")[-1]["steps"], len(events(run_dir, "start"))) == (320, 1)
    assert events(run_dir, "eval")[-1]["rows"] == 40


@pytest.mark.process
@pytest.mark.parametrize("text", [SCRIPT, job_scripts.ARRAYS, job_scripts.TAPE])
def test_a_work_queue_is_for_job_train(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess(tmp_path / "server")
    try:
        queue = ("--servers", server.endpoint, "--workqueue")
        words = flags(tmp_path) if text == SCRIPT else []
        assert run(write(tmp_path, text), tmp_path / "run", *words, *queue) == 1
    finally:
        server.stop()
    assert "train by job.train(step, model), or leave the flag out" in capsys.readouterr().err
