"""A Keras script as a job: its course, stops and resumes, whatever its data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job_scripts
import pytest
from job_scripts import figures, losses, run, run_apart, write
from training_runs import events

from oe_runtime.data import Rows, generate

SCRIPTS = {
    "arrays": job_scripts.ARRAYS,
    "dataset": job_scripts.DATASET,
    "py_dataset": job_scripts.PY_DATASET,
    "subclassed": job_scripts.SUBCLASSED,
    "parts": job_scripts.PARTS,
}


@pytest.mark.parametrize("data", SCRIPTS)
def test_a_run_that_stops_in_the_middle_has_the_losses_of_one_that_does_not(
    data: str, tmp_path: Path
) -> None:
    script = write(tmp_path, SCRIPTS[data])
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    every = ("--checkpoint-steps", "7")
    assert run(script, whole, *every) == 0
    assert max(losses(whole)) == 60
    stops = ("9", "20", "33", "45")
    codes = [run(script, run_dir, *every, arguments=stops)]
    codes += [run(script, run_dir, *every, "--resume", arguments=stops) for _ in range(4)]
    assert codes == [130, 130, 130, 130, 0]
    resumed = [e["step"] for e in events(run_dir, "resume")]
    assert resumed == [e["step"] for e in events(run_dir, "interrupted")]
    bounds = [*itertools.pairwise((9, 20, 33, 45, 60))]  # a busy machine delivers the signal some steps later
    assert all(low <= step < high for step, (low, high) in zip(resumed, bounds, strict=True))
    assert losses(run_dir) == losses(whole)
    if data != "parts":
        assert figures(run_dir) == figures(whole)
    assert events(run_dir, "end")[0]["steps"] == 60
    # A run that is complete trains nothing more.
    assert run(script, run_dir, "--resume") == 0
    assert len(losses(run_dir)) == 60


@pytest.mark.parametrize("data", ["arrays", "py_dataset", "generator"])
def test_fit_builds_a_subclassed_model_and_trains_on_every_batch(data: str, tmp_path: Path) -> None:
    text = job_scripts.SUBCLASSED
    given = {
        "arrays": "model.fit(features, labels, batch_size=50, verbose=0, callbacks=callbacks)",
        "py_dataset": job_scripts.PY_DATASET.removeprefix(job_scripts.KERAS).replace("epochs=3", "epochs=1"),
        "generator": "model.fit((pair for pair in data.as_numpy_iterator()), verbose=0, callbacks=callbacks)",
    }[data]
    script = write(tmp_path, text[: text.index("model.fit(")] + given)
    assert run(script, tmp_path / "run") == 0
    assert len(losses(tmp_path / "run")) == 20


@pytest.mark.parametrize("data", ["array", "Batches", "dataset", "generator"])
def test_fit_of_a_subclassed_model_on_no_data(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = job_scripts.SUBCLASSED
    text = text[: text.index("import tensorflow as tf")]
    text += {
        "array": "data = features[:0], labels[:0]",
        "Batches": job_scripts.PY_DATASET[: job_scripts.PY_DATASET.index("model.fit")]
        .removeprefix(job_scripts.KERAS)
        .replace("return 20", "return 0")
        + "\ndata = (Batches(),)",
        "dataset": "import tensorflow as tf\n"
        "data = (tf.data.Dataset.from_tensor_slices((features, labels)).take(0).batch(50),)",
        "generator": "data = (pair for pair in [])\ndata = (data,)",
    }[data]
    script = write(tmp_path, text + "\nmodel.fit(*data, verbose=0, callbacks=callbacks)\n")
    assert run(script, tmp_path / "run") == 1
    said = capsys.readouterr().err
    assert f"ValueError: fit: its data are empty: the {data} has no batch" in said, said


@pytest.mark.parametrize("kind", ["ENDLESS", "STEPS"])
def test_epochs_that_share_an_iterator_go_on_in_the_middle(kind: str, tmp_path: Path) -> None:
    script = write(tmp_path, getattr(job_scripts, kind))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(script, whole) == 0
    assert run(script, run_dir, arguments=("33",)) == 130
    assert run(script, run_dir, "--resume") == 0
    assert len(losses(whole)) == 60
    assert losses(run_dir) == losses(whole)
    assert figures(run_dir) == figures(whole)


def test_the_optimizer_of_a_later_fit_goes_on(tmp_path: Path) -> None:
    script = write(tmp_path, job_scripts.RECOMPILED)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(script, whole) == 0
    assert run(script, run_dir, arguments=("31",)) == 130
    assert run(script, run_dir, "--resume") == 0
    assert len(losses(whole)) == 40
    assert losses(run_dir) == losses(whole)


@pytest.mark.parametrize(
    ("text", "steps", "stop", "words"),
    [
        (
            job_scripts.DATASET.replace("data, ep", "data, steps_per_epoch=30, ep"),
            30,
            "33",
            "its data end at another",
        ),
        (
            job_scripts.PY_DATASET.replace("(), ep", "(), steps_per_epoch=15, ep"),
            15,
            "12",
            "a PyDataset of 20 batches",
        ),
    ],
)
def test_epochs_that_end_before_their_steps(
    text: str, steps: int, stop: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, text)
    assert run(script, tmp_path / "run", arguments=(stop,)) == 130
    assert run(script, tmp_path / "run", "--resume") == 1
    expected = f"ValueError: fit(steps_per_epoch={steps}) cannot go on here, because {words}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "argument"),
    [(("--staleness", "1"), "staleness=1"), (("--micro-batch", "5"), "micro_batches=5")],
    ids=["staleness", "micro_batch"],
)
def test_the_launcher_s_flags_say_how_steps_go(flags: tuple[str, str], argument: str, tmp_path: Path) -> None:
    """As the argument of distributed_model does, which counts where the program has both."""
    text = job_scripts.ARRAYS.replace("epochs=3", "epochs=1")
    named = text.replace("job.client())", f"job.client(), {argument})")
    usual = text.replace("job.client())", "job.client(), staleness=0, micro_batches=1)")
    assert run(write(tmp_path, text), tmp_path / "flag", *flags) == 0
    assert run(write(tmp_path, named), tmp_path / "argument") == 0
    assert run(write(tmp_path, usual), tmp_path / "both", *flags) == 0
    assert run(write(tmp_path, text), tmp_path / "neither") == 0
    assert losses(tmp_path / "flag") == losses(tmp_path / "argument")
    assert losses(tmp_path / "both") == losses(tmp_path / "neither")
    assert losses(tmp_path / "flag") != losses(tmp_path / "neither")


@pytest.mark.parametrize("data", ["arrays", "dataset", "py_dataset"])
def test_more_epochs_of_a_complete_run_are_trained(data: str, tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPTS[data].replace("epochs=3", "epochs=stops.pop(0)"))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(script, whole, "--checkpoint-steps", "20", arguments=("3",)) == 0
    for epochs in ("1", "1", "3", "2"):
        assert run(script, run_dir, *(("--resume",) if run_dir.exists() else ()), arguments=(epochs,)) == 0
    assert losses(run_dir) == losses(whole)
    assert [e["steps"] for e in events(run_dir, "end")] == [20, 20, 60, 60]


def test_callbacks_keep_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """EarlyStopping ends the run after 5 epochs, ReduceLROnPlateau halves the rate in two."""
    script = write(tmp_path, job_scripts.CALLBACKS)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run(script, whole) == 0
    assert run(script, run_dir, arguments=("47",)) == 130
    assert run(script, run_dir, "--resume", arguments=("69",)) == 130
    assert run(script, run_dir, "--resume") == 0
    assert len(losses(whole)) == 100
    assert losses(run_dir) == losses(whole)
    assert figures(run_dir) == figures(whole)
    assert "callbacks begin anew" not in capsys.readouterr().out

    script = write(
        tmp_path, job_scripts.CALLBACKS.replace("patience=4", "patience=0, restore_best_weights=True")
    )
    assert run(script, tmp_path / "best") == 0
    said = capsys.readouterr().out
    assert said.count("warning: EarlyStopping.best_weights of fit's callbacks is no number or text") == 1


@pytest.mark.process
def test_tf_keras(tmp_path: Path) -> None:
    """Dropout's state is carried where tf-keras keeps it in a variable; else the user is warned."""
    pytest.importorskip("tf_keras")
    text = job_scripts.TF_KERAS + job_scripts.DATASET.removeprefix(job_scripts.KERAS)
    on = "keras.backend.experimental.enable_tf_random_generator()\n"
    script = write(tmp_path, text.replace("keras.utils.set_random_seed", on + "keras.utils.set_random_seed"))
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    codes, said = run_apart(
        script,
        (whole, (), ()),
        (run_dir, (), ("9",)),
        (run_dir, ("--resume",), ("33",)),
        (run_dir, ("--resume",), ()),
    )
    assert codes == [0, 130, 130, 0], said
    assert len(losses(run_dir)) == len(losses(whole)) == 60
    assert losses(run_dir) == losses(whole)
    assert figures(run_dir) == figures(whole)
    assert "random numbers" not in said

    codes, said = run_apart(write(tmp_path, text), (tmp_path / "warned", (), ("9",)))
    assert codes == [130]
    assert said.count("warning: the random numbers of layer dropout are not in checkpoints") == 1


def test_the_reader_begins_at_the_batch_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []

    def batches(rows: Rows, start: int = 0) -> Iterator[tuple[Any, ...]]:
        starts.append(start)
        return read(rows, start)

    read = Rows.batches
    monkeypatch.setattr(Rows, "batches", batches)
    generate.main(["--rows", "2000", "--max-cardinality", "200", "--out", str(tmp_path / "rows.tsv")])
    script = write(tmp_path, job_scripts.READER)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    every = ("--checkpoint-steps", "7", "--data", str(tmp_path / "rows.tsv"))
    assert run(script, whole, *every) == 0
    stops = ("9", "20", "33")
    codes = [run(script, run_dir, *every, arguments=stops)]
    codes += [run(script, run_dir, *every, "--resume", arguments=stops) for _ in range(3)]
    assert codes == [130, 130, 130, 0]
    assert losses(run_dir) == losses(whole)
    assert figures(run_dir) == figures(whole)
    resumed = [e["step"] % 20 for e in events(run_dir, "resume")]
    assert [start for start in starts if start] == [batch for batch in resumed if batch]
