"""Scripts that read the job's rows by job.batches: flags of built-in models, resumes, streams, workers."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import job_scripts
import pytest
import test_train_schema
import yaml
from job_scripts import losses, run, start, write
from server_processes import free_endpoints
from training_runs import ServerProcess, events, wait_for

from oe_runtime.data import open_source
from oe_runtime.run.options import outside
from oe_runtime.run.position import Position
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks, check_agreement
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.session import JobError, Session
from oe_runtime.run.stopping import StopRequest

# A table per category, and the numbers.
SCRIPT = """
import os, signal
import keras
import numpy as np
import oe_runtime.job as job
import oe_runtime.keras as embed

keras.utils.set_random_seed(1)
inputs = {one.name: keras.Input((1,), name=one.name) for one in job.schema.numbers}
ids = {one.name: keras.Input((one.length,), dtype="int64", name=one.name) for one in job.schema.categories}
rows = [embed.Embedding(-1, 4, name=f"rows_{at}")(one) for at, one in enumerate(ids.values())]
x = keras.layers.Concatenate()([*inputs.values(), *(keras.layers.Flatten()(one) for one in rows)])
model = keras.Model(inputs | ids, keras.layers.Dense(1, activation="sigmoid")(x))
model = embed.distributed_model(model, job.client())
adam = embed.distributed_optimizer(keras.optimizers.Adam(0.01))
model.compile(adam, "binary_crossentropy", metrics=["AUC"])
stops = [int(step) for step in job.arguments]


def evaluate():
    for x, y, _ in job.eval_batches():
        yield y, model.predict_on_batch(x)


with job.training(model, evaluate=evaluate) as loop:
    for x, y, weights in job.batches():
        model.reset_metrics()
        loss, _ = model.train_on_batch(x, y, weights)
        if loop.step_number + 1 in stops and loop.step_number + 1 > job.resume_step:
            os.kill(os.getpid(), signal.SIGTERM)
        job.step(loss=loss)
"""


# Counts what is announced.
COUNTED = SCRIPT.replace(
    "with job.training",
    """
announced, ahead = [], model.prefetch


def prefetch(*arguments, **more):
    announced.append(arguments)
    ahead(*arguments, **more)


model.prefetch = prefetch
with job.training""",
)


def write_rows(directory: Path, rows: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = test_train_schema.write(directory, rows)
    schema = test_train_schema.SCHEMA
    few = {name: one for name, one in schema["categories"].items() if name != "last seen"}
    schema = schema | {"categories": few, "ignored": ["id", "last seen"]}
    (directory / "schema.yml").write_text(yaml.safe_dump(schema, sort_keys=False))
    return path


def flags(directory: Path, rows: int = 400) -> list[str]:
    return ["--data", str(write_rows(directory, rows)), "--schema", str(directory / "schema.yml")]


def test_the_flags_of_built_in_models_say_what_is_read(tmp_path: Path) -> None:
    """As many steps, and the same rows for the evaluation."""
    words = [*flags(tmp_path), "--batch-size", "64", "--epochs", "2"]
    words += ["--eval-data", "0.2", "--eval-every", "4"]
    script, mine, theirs = write(tmp_path, SCRIPT), tmp_path / "mine", tmp_path / "theirs"
    assert run(script, mine, *words) == 0
    assert test_train_schema.train(theirs, *words, "--in-process") == 0
    assert [*losses(mine)] == [e["step"] for e in events(theirs, "step")] == [*range(1, 11)]
    of_both = [[(e["step"], e["rows"]) for e in events(one, "eval")] for one in (mine, theirs)]
    assert of_both[0] == of_both[1] == [(4, 80), (8, 80), (10, 80)]
    assert {e["steps"] for e in events(mine, "step")} == {10}
    assert [e["epoch"] for e in events(mine, "step")] == [e["epoch"] for e in events(theirs, "step")]

    assert run(script, tmp_path / "default", *words[:6]) == 0
    assert run(script, tmp_path / "default", *words[:6], "--epochs", "2", "--resume") == 0
    assert max(losses(tmp_path / "default")) == 12
    said = [e["event"] for e in events(tmp_path / "default") if e["event"] in ("start", "resume", "input")]
    assert said == ["start", "input", "start", "resume", "input"], "so that resume knows whose flags end it"

    assert run(script, tmp_path / "steps", *words, "--steps", "7") == 0
    assert max(losses(tmp_path / "steps")) == 7
    assert run(script, tmp_path / "steps", *words, "--steps", "10", "--resume") == 0  # trains longer
    assert losses(tmp_path / "steps") == losses(mine)


def test_progress_counts_the_steps_of_all_parts(tmp_path: Path) -> None:
    """Those of a call of fit, and of a block that reads before it and after it."""
    head, block = SCRIPT.split("with job.training", 1)
    block = "with job.training" + block
    fit = """
x = {name: np.ones((64, *one.shape[1:])) for name, one in (inputs | ids).items()}
model.fit(x, np.ones(64), 64, 2, 0, callbacks=[embed.JobCallback(job)])
"""
    script, run_dir = write(tmp_path, head + block + fit + block), tmp_path / "run"
    words = [*flags(tmp_path), "--batch-size", "64", "--epochs", "2"]
    assert run(script, run_dir, *words, arguments=("17",)) == 130
    assert run(script, run_dir, *words, "--resume") == 0
    steps = {e["step"]: e["steps"] for e in events(run_dir, "step")}
    assert steps == {step: 12 if step < 13 else 14 if step < 15 else 26 for step in range(1, 27)}


@pytest.mark.parametrize(("given", "name"), [("0.2", None), ("rows.csv", "rows.csv"), (None, None)])
def test_a_share_is_no_name_of_rows(given: str | None, name: str | None) -> None:
    options = outside(Path("train.py"), data="generate:100", eval_data=given)
    assert Session(options, StopRequest(with_parent=False), View(), launched=False).eval_data == name


def test_batches_that_are_left_out_are_no_steps() -> None:
    options = outside(Path("train.py"), data="generate:101", batch_size=10, epochs=3, holdout=0)
    assert RunInput(options, open_source(options.data)).steps() == 33
    rows = RunInput(replace(options, size=2), open_source(options.data))
    assert rows.steps() == 30
    assert [batch.rows for batch in rows.read_epoch(0)] == 10 * [10]
    assert rows.steps(Position(step=17, epoch=1, batch=4)) == 33


def test_a_run_that_stops_in_the_middle_has_the_losses_of_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "3"]
    script, whole, run_dir = write(tmp_path, SCRIPT), tmp_path / "whole", tmp_path / "run"
    assert run(script, whole, *words) == 0
    assert max(losses(whole)) == 24
    stops = ("5", "13", "20")
    codes = [run(script, run_dir, *words, arguments=stops)]
    codes += [run(script, run_dir, *words, "--resume", arguments=stops) for _ in range(3)]
    assert codes == [130, 130, 130, 0]
    assert losses(run_dir) == losses(whole)
    assert events(run_dir, "eval")[-1]["loss"] == events(whole, "eval")[-1]["loss"]
    capsys.readouterr()
    assert run(script, run_dir, *words[:-4], "--batch-size", "60", "--resume") == 1
    assert "cannot resume from" in (said := capsys.readouterr().err)
    assert "--batch-size" in said


def test_a_resume_goes_on_with_the_rows_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other rows hold out others for the evaluation, so that a batch of the same number differs."""
    words, apart = flags(tmp_path), write_rows(tmp_path / "apart", 60)
    other = str(shutil.copy(words[1], tmp_path / "other.csv"))
    evaluation, script, run_dir = ["--eval-data", str(apart)], write(tmp_path, SCRIPT), tmp_path / "run"
    assert run(script, run_dir, *words, "--batch-size", "50", *evaluation, arguments=("4",)) == 130
    stopped = losses(run_dir)
    for given, said in (
        ([*words, "--batch-size", "50"], f"has eval data {apart}, --eval-data is not given"),
        (["--data", other, *words[2:], "--batch-size", "50", *evaluation], f"--data is {other}"),
        ([*words, *evaluation], "has batch size 50, --batch-size is 4096"),
        ([*words[:2], "--batch-size", "50", *evaluation], "--schema is criteo"),
    ):
        capsys.readouterr()
        assert run(script, run_dir, *given, "--resume") == 1
        error = capsys.readouterr().err
        assert "cannot resume from" in error
        assert said in error
    assert losses(run_dir) == stopped
    words_apart = [*words, "--batch-size", "50"]
    assert run(script, tmp_path / "held", *words_apart, arguments=("4",)) == 130
    assert run(script, tmp_path / "held", *words_apart, *evaluation, "--resume") == 1
    assert f"the checkpoint has no eval data, --eval-data is {apart}" in capsys.readouterr().err
    assert run(script, run_dir, *words, "--batch-size", "50", *evaluation, "--resume") == 0
    assert [*losses(run_dir)] == [*range(1, 9)]


def test_a_program_that_leaves_the_rows_early_stays_ended(tmp_path: Path) -> None:
    words, run_dir = [*flags(tmp_path), "--batch-size", "50", "--epochs", "2"], tmp_path / "run"
    leaves = SCRIPT + "        if loop.step_number == 3:\n            break\n"
    script = write(tmp_path, leaves)
    assert run(script, run_dir, *words, "--checkpoint-steps", "3") == 0
    for more in ([], ["--epochs", "3"], ["--steps", "9"]):
        assert run(script, run_dir, *words, "--resume", *more) == 0
        assert [*losses(run_dir)] == [1, 2, 3]
    assert run(script, tmp_path / "steps", *words, "--steps", "3") == 0  # by the flag, as a longer one may be
    assert run(script, tmp_path / "steps", *words, "--steps", "5", "--resume") == 0
    assert [*losses(tmp_path / "steps")] == [1, 2, 3, 4, 5]


FIT = """
from oe_runtime.data import dataset

rows = dataset(job.schema, job.data, 50)
model.fit(rows, epochs=1, verbose=0, callbacks=[embed.JobCallback(job)])
"""


def test_a_program_may_read_by_itself_as_well(tmp_path: Path) -> None:
    words = [*flags(tmp_path), "--batch-size", "50"]
    script, whole, run_dir = write(tmp_path, SCRIPT + FIT), tmp_path / "whole", tmp_path / "run"
    assert run(script, whole, *words) == 0
    assert [*losses(whole)] == [*range(1, 17)]  # 8 of batches, and 8 of fit
    assert run(script, run_dir, *words, arguments=("5",)) == 130
    assert run(script, run_dir, *words, "--resume") == 0
    assert losses(run_dir) == losses(whole)


LOOP = """
from oe_runtime.data import Rows

with job.training(model) as loop:
    for epoch in loop.epochs(1):
        for x, y, weights in loop.batches(Rows(job.schema, job.data, 50)):
            job.step(loss=model.train_on_batch(x, y, weights)[0])
"""


@pytest.mark.parametrize("train", [FIT, LOOP])
def test_flags_of_columns_are_for_a_program_that_uses_the_schema(
    train: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*flags(tmp_path), "--max-cardinality", "9"]
    script = write(tmp_path, SCRIPT[: SCRIPT.index("with job.training")] + train)
    assert run(script, tmp_path / "run", *words) == 0
    assert [*losses(tmp_path / "run")] == [*range(1, 9)]
    assert run(script, tmp_path / "run", *words[:-1], "8", "--resume") == 1
    assert "has max cardinality 9, --max-cardinality is 8" in capsys.readouterr().err
    assert run(script, tmp_path / "other", *words, "--batch-size", "50") == 1
    assert "--batch-size is of rows that job.batches() reads" in capsys.readouterr().err


def test_random_numbers_go_on_once_after_a_resume(tmp_path: Path) -> None:
    """A block may ask for its batches twice. PyTorch's generator is set where `skipped` is called."""
    words, run_dir = [*flags(tmp_path), "--batch-size", "50"], tmp_path / "run"
    begin, end = SCRIPT.index("    for x, y, weights in job.batches"), SCRIPT.index("        model.reset")
    twice = (
        SCRIPT[:begin]
        + "    at = []\n    job.current().course.state.skipped = lambda: at.append(loop.step_number)\n"
        + "    for x, y, weights in (row for _ in range(2) for row in batches(loop)):\n"
        + SCRIPT[end:]
        + "assert at == ([job.resume_step] if job.resume_step else []), at\n"
    )
    first = "def batches(loop):\n    for row in job.batches():\n        yield row\n"
    first += "        if loop.step_number == job.resume_step + 2:\n            break\n\n\n"
    script = write(tmp_path, twice.replace("def evaluate", first + "def evaluate"))
    assert run(script, run_dir, *words, arguments=("4",)) == 130
    assert run(script, run_dir, *words, "--resume") == 0
    assert [*losses(run_dir)] == [*range(1, 9)]


def test_rows_are_prefetched_for_train_on_batch(tmp_path: Path) -> None:
    """Pulls are announced, and no loss changes."""
    words = [*flags(tmp_path), "--batch-size", "50"]
    counted = write(tmp_path, COUNTED + "assert len(announced) == 7, announced\n")
    assert run(counted, tmp_path / "counted", *words) == 0
    copied = "        x = {name: array.copy() for name, array in x.items()}\n        model.reset_metrics()"
    alone = write(tmp_path, SCRIPT.replace("        model.reset_metrics()", copied))
    assert run(alone, tmp_path / "alone", *words) == 0
    assert losses(tmp_path / "counted") == losses(tmp_path / "alone")


@pytest.mark.process
def test_a_stream_is_read_on_after_a_stop(tmp_path: Path) -> None:
    inbox, kept = tmp_path / "inbox", tmp_path / "kept"
    for one in (inbox, kept):
        one.mkdir()
    first, second = (write_rows(kept, 150).rename(kept / f"{name}.csv") for name in "ab")
    words = ["--data", str(inbox), "--follow", "--schema", str(kept / "schema.yml"), "--batch-size", "50"]
    script, run_dir = write(tmp_path, SCRIPT), tmp_path / "run"
    first.rename(inbox / "a.csv")
    process = start(script, run_dir, *words)
    try:
        wait_for(lambda: max(losses(run_dir), default=0) == 3, process)
        process.send_signal(signal.SIGTERM)  # while it waits for rows
        said, error = process.communicate(timeout=60)
        assert process.returncode == 130, error
        assert f"waiting for rows in {inbox}" in said
    finally:
        process.kill()
        process.communicate()
    second.rename(inbox / "b.csv")
    (inbox / "_END").touch()
    assert run(script, run_dir, *words, "--resume") == 0
    assert [*losses(run_dir)] == [*range(1, 7)]
    last = events(run_dir, "step")[-1]
    assert (last["rows"], last["file"]) == (300, "b.csv")


def test_batches_with_fewer_rows_than_workers(tmp_path: Path) -> None:
    alone = outside(tmp_path / "train.py", data="generate:99", batch_size=1)
    session = Session(replace(alone, size=2), StopRequest(with_parent=False), View(), launched=True)
    with pytest.raises(JobError, match="--batch-size is 1, expected at least a row for each of 2 workers"):
        session.open_input()


class SharedWords(Ranks):
    """Shares the flags of the first worker that calls it."""

    def __init__(self) -> None:
        self.flags = b""

    def share(self, value: bytes, origin: int = 0) -> bytes:
        self.flags = self.flags or value
        return self.flags if value.startswith(b"{") else value


def test_a_worker_may_be_given_a_default_value(tmp_path: Path) -> None:
    script, ranks = tmp_path / "train.py", SharedWords()
    check_agreement(outside(script, run_dir=tmp_path), ranks)
    check_agreement(outside(script, run_dir=tmp_path, batch_size=4096), ranks)
    with pytest.raises(RunError, match="--batch-size is 50 in worker 0 and 4096"):
        check_agreement(outside(script, run_dir=tmp_path, batch_size=50), ranks)


@pytest.mark.process
def test_two_workers_have_the_losses_of_one_after_a_kill_too(tmp_path: Path) -> None:
    words = [*flags(tmp_path), "--batch-size", "50", "--epochs", "12", "--checkpoint-steps", "15"]
    script, run_dir = write(tmp_path, SCRIPT), tmp_path / "two"
    server, alone = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "alone")

    def both(*more: str) -> list[object]:
        together = (*words, "--servers", server.endpoint, "--workers", free_endpoints(2), *more)
        return [start(script, run_dir, *together, "--rank", str(rank)) for rank in range(2)]

    workers = both()
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 20, workers[0])
        for worker in workers:
            worker.kill()
            worker.communicate()
        workers = both("--resume")
        said = [worker.communicate(timeout=240) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        assert run(script, tmp_path / "one", *words, "--servers", alone.endpoint) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
        alone.stop()
    one, two = losses(tmp_path / "one"), losses(run_dir)
    assert [*one] == [*two] == [*range(1, 97)]
    for step, (loss, _) in one.items():
        assert two[step][0] == pytest.approx(loss, rel=2e-3)
    assert events(run_dir, "eval")[0]["rows"] == 40


MISTAKES = {
    "no step": (
        SCRIPT.replace("job.step(loss=loss)", "pass"),
        None,
        "job.step(loss=…): call it in each step",
    ),
    "epochs": (
        SCRIPT.replace(
            "for x, y, weights in", "for x, y, weights in (row for _ in loop.epochs(3) for row in"
        ).replace("job.batches():", "job.batches()):"),
        None,
        "job.batches() has all epochs of --epochs: leave loop.epochs out",
    ),
    "no data": (SCRIPT, [], "job.batches() reads --data, which is not given"),
    "stdin": (SCRIPT, ["--data", "-"], "is standard input, which cannot be read again: name files"),
    "outside": (SCRIPT + "job.batches()\n", None, "job.batches() belongs into a block of `with job.training"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words, message = MISTAKES[name]
    given = flags(tmp_path)
    if words is not None:
        given = [*given[2:], *words]
    assert run(write(tmp_path, text), tmp_path / "run", *given) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (job_scripts.ARRAYS, ("--batch-size", "9")),
        (job_scripts.ARRAYS, ("--eval-data", "0.2")),
        (job_scripts.TAPE, ("--epochs", "9")),
    ],
)
def test_flags_of_rows_that_the_program_reads_itself(
    text: str, words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text.replace("            x, y =", "            print('a batch')\n            x, y =")
    assert run(write(tmp_path, text), tmp_path / "run", *words) == 1
    said = capsys.readouterr()
    assert f"{words[0]} is of rows that job.batches() reads, but train.py reads its own" in said.err
    assert "a batch" not in said.out
    assert not losses(tmp_path / "run")


@pytest.mark.process
@pytest.mark.parametrize("text", [job_scripts.ARRAYS, job_scripts.TAPE])
def test_a_run_goes_on_without_a_flag_that_was_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers have a checkpoint before the first step."""
    server, run_dir = ServerProcess(tmp_path / "server"), tmp_path / "run"
    script = write(tmp_path, text)
    try:
        assert run(script, run_dir, "--servers", server.endpoint, "--batch-size", "9") == 1
        again = ["--resume"] if any((run_dir / "checkpoints").iterdir()) else []
        assert run(script, run_dir, "--servers", server.endpoint, *again) == 0, capsys.readouterr().err
    finally:
        server.stop()
    assert max(losses(run_dir)) == 60
    assert not events(tmp_path / "run", "input")
