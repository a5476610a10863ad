"""Evaluations of a script: between its steps and at the end, on fit's validation_data or its own rows."""

from __future__ import annotations

from pathlib import Path

import job_scripts
import pytest
from job_scripts import figures, losses, run, start, write
from server_processes import free_endpoints
from training_runs import ServerProcess, events, wait_for

OTHERS = """
others = np.random.default_rng(9).integers(0, 300, (240, 2))
theirs = (others[:, 0] % 3 == 0).astype("float32")
"""
# Keyed by how the rows for the evaluation are given.
FIT = {
    "arrays": (job_scripts.ARRAYS, "validation_data=(others, theirs), validation_batch_size=100"),
    "dataset": (
        job_scripts.DATASET,
        "validation_data=tf.data.Dataset.from_tensor_slices((others, theirs)).batch(100)",
    ),
}
EVALUATE = """
def evaluate():
    for start in range(job.rank * 40, 240, 40 * job.workers):
        yield theirs[start : start + 40], model.predict_on_batch(others[start : start + 40])

"""
TAPE = job_scripts.TAPE.replace("unused = ", OTHERS + EVALUATE + "unused = ").replace(
    "job.training(model)", "job.training(model, evaluate=evaluate)"
)
SCRIPTS = {
    kind: text.replace("callbacks = ", OTHERS + "callbacks = ").replace("verbose=0", f"verbose=0, {given}")
    for kind, (text, given) in FIT.items()
} | {"tape": TAPE}


# The only loop of one's own that Keras models have with several workers.
ON_BATCH = (
    TAPE[: TAPE.index("bce = ")].replace("Dropout(0.2)", "Dropout(0.0)")
    + """
with job.training(model, evaluate=evaluate) as loop:
    for epoch in loop.epochs(9):
        for i in loop.batches(range(0, 1000, 50)):
            mine = slice(i + job.rank, i + 50, job.workers)
            model.reset_metrics()
            loss, _ = model.train_on_batch(features[mine], labels[mine])
            job.step(loss=loss, rows=50 // job.workers)
"""
)


def evaluated(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(one["step"], one["loss"], one["auc"]) for one in events(run_dir, "eval")]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_evaluations_change_no_loss_and_go_on_after_a_stop(kind: str, tmp_path: Path) -> None:
    """As those of built-in models: see test_train_schema.py."""
    script = write(tmp_path, SCRIPTS[kind])
    plain, often, run_dir = tmp_path / "plain", tmp_path / "often", tmp_path / "run"
    every = ("--eval-every", "25")
    assert run(script, plain) == 0
    assert run(script, often, *every) == 0
    assert losses(often) == losses(plain)
    assert figures(often) == figures(plain)
    assert [step for step, _, _ in evaluated(often)] == [25, 50, 60]
    assert [step for step, _, _ in evaluated(plain)] == ([60] if kind == "tape" else [])
    assert {one["rows"] for one in events(often, "eval")} == {240}
    if kind != "tape":  # Keras's own, of the same rows
        expected = events(often, "epoch")[-1]["figures"]
        assert evaluated(often)[-1][1] == pytest.approx(expected["val_loss"], rel=1e-4)
        assert evaluated(often)[-1][2] == pytest.approx(expected["val_AUC"], abs=0.01)
    assert "held-out accuracy" in (often / "report.html").read_text()

    assert run(script, run_dir, *every, arguments=("33",)) == 130
    assert run(script, run_dir, *every, "--resume") == 0
    assert losses(run_dir) == losses(plain)
    assert evaluated(run_dir) == evaluated(often)
    # A complete run is evaluated anew, as its end may have been lost.
    assert run(script, run_dir, *every, "--resume") == 0
    assert evaluated(run_dir)[-1] == evaluated(often)[-1]


def test_a_stop_request_during_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = "def evaluate():\n    if loop.step_number == 25: os.kill(os.getpid(), signal.SIGTERM)\n"
    script = write(tmp_path, TAPE.replace("def evaluate():\n", stop))
    every, run_dir = ("--eval-every", "25"), tmp_path / "run"
    assert run(script, run_dir, *every) == 130
    assert "no evaluation of step 25, because the stop request came during it" in capsys.readouterr().out
    assert max(losses(run_dir)) == 26
    assert run(script, run_dir, *every, "--resume") == 0
    assert [step for step, _, _ in evaluated(run_dir)] == [50, 60]


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_the_last_figures_are_of_training(kind: str, tmp_path: Path) -> None:
    """Not of the validation at the end of the last epoch, which has no step after it."""
    script, plain = write(tmp_path, SCRIPTS[kind]), write(tmp_path, FIT[kind][0], "plain.py")
    for name, one in (("validated", script), ("plain", plain)):
        assert run(one, tmp_path / name, "--log-every", "7") == 0
    assert losses(tmp_path / "validated") == losses(tmp_path / "plain")
    assert max(losses(tmp_path / "plain")) == 60


def test_validation_data_may_leave_the_weights_out(tmp_path: Path) -> None:
    text = SCRIPTS["arrays"].replace("(others, theirs)", "(others, theirs, None)")
    assert text != SCRIPTS["arrays"]
    assert run(write(tmp_path, text), tmp_path / "run", "--eval-every", "30") == 0
    assert [step for step, _, _ in evaluated(tmp_path / "run")] == [30, 60]


def test_no_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path, TAPE), tmp_path / "run", "--no-eval") == 0
    assert evaluated(tmp_path / "run") == []
    assert run(write(tmp_path, TAPE.replace("240, 40", "0, 40")), tmp_path / "none") == 0
    assert evaluated(tmp_path / "none") == []
    assert "warning: evaluate yields no rows" in capsys.readouterr().out


def test_the_name_of_the_rows_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TAPE.replace("def evaluate():", "assert job.eval_data == job.arguments[-1]\n\ndef evaluate():")
    text = text.replace("for step in job.arguments]", "for step in job.arguments[:-1]]")
    script = write(tmp_path / "program", text)
    words = ("--eval-data", "rows.csv")
    assert run(script, tmp_path / "run", *words, arguments=(str(tmp_path / "rows.csv"),)) == 0
    assert len(evaluated(tmp_path / "run")) == 1


@pytest.mark.parametrize("kind", ["arrays", "tape"])
def test_rows_that_the_program_does_not_ask_for(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--eval-every", "9", "--eval-data", str(tmp_path / "rows.csv"))
    assert run(write(tmp_path, SCRIPTS[kind]), tmp_path / "run", *words) == 1
    assert "rows.csv: train.py evaluates on other rows" in capsys.readouterr().err
    assert evaluated(tmp_path / "run") == []


MISTAKES = {
    "fit": (job_scripts.ARRAYS, "--eval-every: fit has no validation_data to evaluate on"),
    "split": (
        job_scripts.ARRAYS.replace("verbose=0", "verbose=0, validation_split=0.1"),
        "validation_split has no data of its own: give fit's validation_data",
    ),
    "generator": (
        job_scripts.ARRAYS.replace("verbose=0", "verbose=0, validation_data=iter([(features, labels)])"),
        "a generator is read only once: give fit's validation_data",
    ),
    "loop": (job_scripts.TAPE, "--eval-every: give job.training(evaluate=…) what predicts"),
    "logits": (TAPE.replace("yield theirs", "yield 2 + theirs"), "labels other than 0 and 1"),
    "shapes": (TAPE.replace("yield theirs", "yield others"), "evaluate yields labels shaped (40, 2)"),
    "counts": (TAPE.replace("start + 40], ", "start + 20], "), "40 probabilities for 20 labels"),
    "classes": (
        job_scripts.ARRAYS.replace('Dense(1, activation="sigmoid")', 'Dense(5, activation="softmax")')
        .replace('"binary_crossentropy", metrics=["AUC"]', '"categorical_crossentropy"')
        .replace("callbacks = ", "labels = keras.utils.to_categorical(features[:, 0] % 5, 5)\ncallbacks = ")
        .replace("verbose=0", "verbose=0, validation_data=(features, labels)"),
        "the evaluation on fit's validation_data yields labels shaped (50, 5): AUC and log loss",
    ),
    "values": (
        TAPE.replace("yield theirs[start : start + 40], ", "yield theirs[start : start + 40], 2 + "),
        "values outside of 0 to 1 as probabilities",
    ),
    "nan": (
        TAPE.replace("start + 40], model", "start + 40], np.nan * model"),
        "evaluate yields NaN as a probability: try a smaller learning rate",
    ),
    "pairs": (TAPE.replace("yield theirs", "yield 1, theirs"), "pairs of labels and probabilities, not a"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = MISTAKES[name]
    assert run(write(tmp_path, text), tmp_path / "run", "--eval-every", "9") == 1
    error = capsys.readouterr().err
    assert message in error
    assert "error: train.py line" in error


@pytest.mark.process
def test_two_workers_have_the_evaluations_of_one_after_a_lost_server_too(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, ON_BATCH), tmp_path / "two"
    server, alone = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "alone")
    every = ("--eval-every", "40", "--checkpoint-steps", "15")
    more = (*every, "--servers", server.endpoint, "--workers", free_endpoints(2))
    workers = [start(script, run_dir, *more, "--rank", str(rank)) for rank in range(2)]
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 20, workers[0])
        server.kill()
        server.start_again()
        said = [worker.communicate(timeout=240) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        assert len(events(run_dir, "server_back")) == 1
        assert run(script, tmp_path / "one", *every, "--servers", alone.endpoint) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
        alone.stop()
    one, two = ({step: values for step, *values in evaluated(tmp_path / name)} for name in ("one", "two"))
    assert [*one] == [*two] == [40, 80, 120, 160, 180]
    for step, values in one.items():
        assert two[step] == pytest.approx(values, rel=2e-3)
    assert {each["rows"] for each in events(run_dir, "eval")} == {240}


DIFFERENCES = {
    "evaluate": (
        ON_BATCH.replace("evaluate=evaluate", "evaluate=None if job.rank else evaluate"),
        "worker 0 has something to evaluate with, and worker 1 has not: give evaluate",
    ),
    "values": (
        ON_BATCH.replace("start + 40], model", "start + 40], 2 * job.rank + model"),
        "values outside of 0 to 1 as probabilities",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("name", DIFFERENCES)
def test_workers_that_evaluate_differently_end_together(name: str, tmp_path: Path) -> None:
    text, message = DIFFERENCES[name]
    script, server = write(tmp_path, text), ServerProcess(tmp_path / "server")
    more = ("--eval-every", "5", "--servers", server.endpoint, "--workers", free_endpoints(2))
    workers = [start(script, tmp_path / "run", *more, "--rank", str(rank)) for rank in range(2)]
    try:
        said = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
    assert [worker.returncode for worker in workers] == [1, 1], said
    assert all(message in errors for _, errors in said), said
