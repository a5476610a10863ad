"""The trainer's command, in this process: events, files, resume, equal losses, errors."""

import builtins
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import DATA, SMALL, events, losses

from oe_runtime import models
from oe_runtime.checkpoint import chain, published
from oe_runtime.checkpoint.cli import diff
from oe_runtime.run import progress
from oe_runtime.run.options import parse
from oe_runtime.run.outcome import disk_error, memory_error
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.train import main


@pytest.fixture(autouse=True)
def keep_determinism() -> Iterator[None]:
    """The trainer switches TensorFlow's deterministic operations on; other tests choose for themselves."""
    yield
    if "tensorflow" in sys.modules:
        from tensorflow.python.util import _pywrap_determinism

        _pywrap_determinism.enable(False)


def train(
    run_dir: Path, *arguments: str, where: tuple[str, ...] = ("--in-process",), data: Any = DATA
) -> int:
    return main([*data, *SMALL, "--run-dir", str(run_dir), *where, *arguments])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that was not interrupted, with an export."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    export = str(run_dir.parent / "exported")
    assert train(run_dir, "--epochs", "2", "--checkpoint-steps", "5", "--export", export) == 0
    return run_dir


def test_a_run_tells_its_course(whole: Path) -> None:
    kinds = [e["event"] for e in events(whole) if e["event"] not in ("servers", "tables")]
    steps = ["step"] * 5 + ["checkpoint"]
    assert kinds == [
        "start",
        *steps * 3,
        "step",
        "step",
        "step",
        "checkpoint",
        "trained",
        "eval",
        "export",
        "end",
    ]
    start = events(whole, "start")[0]
    assert (start["rows"], start["steps"], start["model"]) == (4000, 18, "deepfm")
    step = events(whole, "step")[9]
    assert (step["step"], step["epoch"], step["steps"]) == (10, 1, 18)
    assert set(step) == {"event", "step", "steps", "epoch", "loss", "auc", "samples_per_s", "eta_s", "time"}
    evaluation = events(whole, "eval")[0]
    assert evaluation["rows"] == 400
    assert 0.5 < evaluation["auc"] < 1
    first, last = losses(whole)[1][0], losses(whole)[18][0]
    assert last < first
    end = events(whole, "end")[0]
    assert end["steps"] == 18
    assert end["samples_per_s"] > 0
    assert json.loads((whole / "config.json").read_text())["dim"] == 4


def test_a_stop_after_the_last_step_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    run_dir, write = tmp_path / "run", RunDirectory.event

    def event(self: RunDirectory, kind: str, **values: Any) -> None:
        write(self, kind, **values)
        if kind == "trained":
            os.kill(os.getpid(), signal.SIGTERM)

    arguments = ("--epochs", "2", "--checkpoint-steps", "5", "--export", str(run_dir / "export"))
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "event", event)
        assert train(run_dir, *arguments) == 130
    assert events(run_dir, "interrupted")[0]["step"] == 18
    assert train(run_dir, *arguments, "--resume") == 0
    assert events(run_dir, "eval")[0]["auc"] == events(whole, "eval")[0]["auc"]
    assert events(run_dir)[-1]["event"] == "end"
    assert (run_dir / "export" / "saved_model.pb").is_file()


def test_checkpoints_describe_themselves_and_are_pruned(whole: Path) -> None:
    names = sorted(p.name for p in (whole / "checkpoints").iterdir())
    assert names == ["step-0000000010", "step-0000000015", "step-0000000018"]
    manifest = json.loads((whole / "checkpoints" / names[0] / "manifest.json").read_text())
    assert manifest["step"] == 10
    assert manifest["training"]["position"] == {"step": 10, "epoch": 1, "batch": 1}
    assert manifest["training"]["settings"]["optimizer"] == "adagrad"
    assert {t["table"] for t in manifest["tables"]} >= {"C1", "C3", "C1_linear"}
    assert "dense.npz" in manifest["files"]


def test_the_export_is_a_plain_saved_model(whole: Path) -> None:
    import tensorflow as tf

    served = tf.saved_model.load(str(whole.parent / "exported"))
    ids = [np.zeros((2, 1), np.int64)] * 26
    answer = np.asarray(served.serve([np.zeros((2, 13), np.float32), *ids]))
    assert answer.shape == (2, 1)
    assert ((answer > 0) & (answer < 1)).all()


def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("--checkpoint-steps", "5")
    # Stopped on the border of the epochs and inside the second one, which --steps alone reaches.
    assert train(run_dir, *arguments, "--steps", "9") == 0
    assert train(run_dir, *arguments, "--steps", "11", "--resume") == 0
    assert max(losses(run_dir)) == 11
    assert train(run_dir, *arguments, "--epochs", "2", "--resume") == 0
    assert [e["step"] for e in events(run_dir, "resume")] == [9, 11]
    assert losses(run_dir) == losses(whole)
    for kind in ("auc", "loss"):
        assert events(run_dir, "eval")[-1][kind] == events(whole, "eval")[0][kind]


def test_a_run_of_a_stock_model_has_checkpoints_and_goes_on(tmp_path: Path) -> None:
    for run_dir, flags in (("whole", ["--steps", "12"]), ("parts", ["--steps", "6"])):
        assert train(tmp_path / run_dir, "--epochs", "2", *flags, where=("--stock",)) == 0
    assert train(tmp_path / "parts", "--epochs", "2", "--steps", "12", "--resume", where=("--stock",)) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_finished_run_trains_longer_and_replaces_its_export(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    export = run_dir / "export"
    arguments = ("--checkpoint-steps", "5", "--export", str(export))
    assert train(run_dir, *arguments, "--epochs", "1") == 0
    before = (export / "variables/variables.data-00000-of-00001").read_bytes()
    assert train(run_dir, *arguments, "--epochs", "2", "--resume") == 0
    assert losses(run_dir) == losses(whole)
    assert (export / "variables/variables.data-00000-of-00001").read_bytes() != before
    assert [path.name for path in run_dir.glob("*export*")] == ["export"]
    assert json.loads((run_dir / "config.json").read_text())["epochs"] == 2
    assert [event["steps"] for event in events(run_dir, "start")] == [9, 18]
    assert train(run_dir, "--export", str(whole.parent / "exported"), "--epochs", "3", "--resume") == 1


def test_increments_make_the_same_checkpoints(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    more = ("--checkpoint-steps", "5", "--checkpoint-increments", "2", "--keep-checkpoints", "1")
    assert train(run_dir, "--steps", "12", *more) == 0
    steps = [path.name[-2:] for path in published(run_dir / "checkpoints")]
    assert steps == ["05", "10", "12"], "what the newest builds on is kept"
    assert train(run_dir, "--epochs", "2", *more, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    newest = published(run_dir / "checkpoints")[-1]
    assert len(chain(newest)) > 1
    difference = diff(whole / "checkpoints" / "step-0000000018", newest)
    assert difference["files"] == []
    for table in difference["tables"].values():
        assert (table["only_before"], table["only_after"], table["changed"]) == (0, 0, 0)


def test_pmem_has_the_losses_of_dram(whole: Path, tmp_path: Path) -> None:
    storage = tmp_path / "pmem"
    storage.mkdir()
    where = ("--in-process", "--storage", "pmem_libpmem", "--storage-path", str(storage))
    assert train(tmp_path / "run", "--epochs", "2", "--checkpoint-steps", "0", where=where) == 0
    assert losses(tmp_path / "run") == losses(whole)
    assert [e["step"] for e in events(tmp_path / "run", "checkpoint")] == [18]


def test_wdl_with_adam_learns(tmp_path: Path) -> None:
    arguments = ("--model", "wdl", "--optimizer", "adam", "--epochs", "3", "--log-every", "9")
    assert train(tmp_path / "run", *arguments) == 0
    seen = events(tmp_path / "run", "step")
    assert seen[-1]["loss"] < seen[0]["loss"]


def test_real_rows_and_a_short_last_batch(tmp_path: Path) -> None:
    data = ["--data", str(Path(__file__).parents[1] / "data/criteo_200.tsv")]
    assert train(tmp_path / "run", "--batch-size", "70", data=data) == 0
    assert events(tmp_path / "run", "start")[0]["steps"] == 3
    assert max(losses(tmp_path / "run")) == 3
    assert events(tmp_path / "run", "eval")[0]["rows"] == 20


@pytest.mark.parametrize("name", models.NAMES)
def test_layers_made_for_servers_are_those_that_distributed_model_makes(name: str) -> None:
    import keras

    import oe_runtime.keras as embed
    from oe_runtime import Client
    from oe_runtime.programs.click_model import _SERVED_ROWS, _served_embedding

    tables = []
    for layer in (None, partial(_served_embedding, parse(["--data", "x", "--in-process"]))):
        plain = models.build(name, [1, 64, 500] + [1] * 23, 4, hidden=(8,), seed=3, embedding=layer)
        model = embed.distributed_model(plain, Client.in_process(), sparse_as_dense_size=_SERVED_ROWS)
        model.compile(keras.optimizers.Adagrad(0.05), "binary_crossentropy")
        tables.append((model.tables, [(v.path, np.asarray(v).tolist()) for v in model.weights]))
    assert tables[0] == tables[1]
    linear = [] if name == "dlrm" else ["C2_linear", "C3_linear"]
    assert sorted(tables[0][0]) == sorted(["C2", "C3", *linear])


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_resume_names_what_differs(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole / "metrics.jsonl").read_text()
    assert train(whole, "--resume", "--dim", "8", "--epochs", "3") == 1
    error = one_error(capsys)
    assert "tables C1 to C26 have dim 4" in error
    assert "--dim is 8" in error
    assert train(whole, "--resume", "--optimizer", "adam", "--seed", "9") == 1
    error = one_error(capsys)
    for part in ("optimizer adagrad", "--optimizer is adam", "seed 0", "--seed is 9"):
        assert part in error
    assert train(whole, "--resume", data=["--data", "generate:4000:2"]) == 1
    assert "data generate:4000:1, --data is generate:4000:2" in one_error(capsys)
    assert (whole / "metrics.jsonl").read_text() == before


def test_a_run_directory_is_not_used_twice(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(whole) == 1
    assert "already holds a run; go on with --resume" in one_error(capsys)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert train(run_dir, "--steps", "2", "--checkpoint-steps", "1") == 0
    capsys.readouterr()
    dense = run_dir / "checkpoints/step-0000000002/dense.npz"
    content = bytearray(dense.read_bytes())
    content[len(content) // 2] ^= 1
    dense.write_bytes(content)
    assert train(run_dir, "--resume", "--steps", "3") == 1
    error = one_error(capsys)
    assert "dense.npz is damaged" in error
    assert "(step-0000000001 is whole: to go on from there, move " in error
    dense.parent.rename(tmp_path / "away")
    assert train(run_dir, "--resume", "--steps", "3") == 0
    assert [e["step"] for e in events(run_dir, "resume")] == [1]


@pytest.mark.parametrize(
    ("data", "message"),
    [("nothing.tsv", "there is no file or directory"), ("generate:none", "is not generate:ROWS")],
)
def test_no_such_data(tmp_path: Path, data: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", data=["--data", data]) == 1
    assert message in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_a_broken_line_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (Path(__file__).parents[1] / "data/criteo_200.tsv").read_text().splitlines()
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join([*lines[:150], "0\t1", *lines[151:]]) + "\n")
    assert train(tmp_path / "run", data=["--data", str(path)]) == 1
    assert f"{path} line 151: found 2 columns, expected 40" in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_broken_lines_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (Path(__file__).parents[1] / "data/criteo_200.tsv").read_text().splitlines()
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join([*lines[:150], "0\t1", *lines[150:]]) + "\n")
    arguments = ["--batch-size", "90", "--max-bad-rows", "1"]
    assert train(tmp_path / "run", *arguments, data=["--data", str(path)]) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped: ")]
    assert shown == [f"skipped: {path} line 151: found 2 columns, expected 40"]
    assert events(tmp_path / "run", "eval")[0]["rows"] == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eviction", "cap:0"], "'max_rows' must be between 1 and"),
        (["--eviction", "cap:10"], "cap has room for 10 rows"),
        (["--index", "hash", "--admission", "cbf:0"], "'filter_freq' must be"),
        (["--index", "hash", "--admission", "cbf:2:0"], "'max_element_size' must be"),
        (["--dim", "100000000"], "'dim' must be a whole number between 0 and 65536"),
        (["--device", "gpu"], "finds no GPU on this host"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "gpu" in arguments:
        import tensorflow as tf

        if tf.config.list_physical_devices("GPU"):
            pytest.skip("there is one here")
    assert train(tmp_path / "run", *arguments) == 1
    assert message in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_full_storage_and_then_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--storage-size", "10000") == 1
    assert "storage dram is full: table 'C1" in one_error(capsys)
    assert not list((tmp_path / "run/checkpoints").iterdir())
    assert train(tmp_path / "run", "--steps", "1", "--no-eval") == 0, "what never trained is in nobody's way"
    assert events(tmp_path / "run")[0]["event"] == "start"


def test_a_model_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    def build(*_: object, **__: object) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")

    monkeypatch.setattr(models, "build", build)
    assert train(tmp_path / "run") == 1
    error = one_error(capsys)
    assert "not enough memory for the model on this host (failed to allocate memory); try a smaller" in error
    assert events(tmp_path / "run", "error")[0]["message"] in error


@pytest.mark.parametrize(
    ("kind", "said", "cause"),
    [
        (
            "ResourceExhaustedError",
            "/d/variables; No space left on device [Op:Save]",
            "/d/variables: No space",
        ),
        ("ResourceExhaustedError", "/d/part-0; Too many open files", "/d/part-0: Too many open files"),
        ("ResourceExhaustedError", "OOM when allocating tensor with shape[9,9]", "not enough memory"),
        ("ResourceExhaustedError", "Received message larger than max (5 vs. 4)", ""),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "not enough memory"),
        (
            "XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate",
            "not enough memory",
        ),
        ("MemoryError", "std::bad_alloc", "not enough memory"),
        ("OSError", "Can't write (errno = 28, error message = 'No space left on device')", "No space left"),
        ("ConnectionResetError", "Connection reset by peer", ""),
        ("RuntimeError", "the memory of an elephant", ""),
    ],
)
def test_the_cause_of_an_error_is_what_it_says(kind: str, said: str, cause: str) -> None:
    error = getattr(builtins, kind, None) or type(kind, (RuntimeError,), {})
    found = memory_error(error(said)) or disk_error(error(said))
    assert found.startswith(cause)
    assert bool(found) == bool(cause)


def test_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--resume") == 1
    assert "nothing to resume" in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_run_and_export_directories_that_cannot_be_written_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file/run") == 1
    assert "cannot write to the run directory" in one_error(capsys)
    assert train(tmp_path / "run", "--export", str(tmp_path / "file")) == 1
    assert "exists already" in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_no_server_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", where=("--servers", "127.0.0.1:1")) == 1
    assert "127.0.0.1:1" in one_error(capsys)
    missing = str(tmp_path / "token")
    assert train(tmp_path / "run", where=("--servers", "127.0.0.1:1", "--token-file", missing)) == 1
    assert "cannot read the token file" in one_error(capsys)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--optimizer", "sgd", "--learning-rate", "1e30") == 1
    assert "try a smaller --learning-rate" in one_error(capsys)
    assert "smaller" in events(tmp_path / "run", "error")[0]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --servers --in-process --stock is required"),
        (["--in-process", "--stock"], "not allowed with"),
        (["--servers", "here"], "'here' is not HOST:PORT"),
        (["--servers", "a:1,a:1"], "named twice"),
        (["--stock", "--dim", "0"], "0 is less than 1"),
        (["--stock", "--holdout", "1.5"], "not between 0 and 0.9"),
        (["--stock", "--resume"], "--resume needs --run-dir"),
        (["--stock", "--storage", "dram"], "go with --in-process"),
        (["--in-process", "--storage", "pmem_libpmem"], "needs --storage-path"),
        (["--in-process", "--storage", "dram_pmem", "--storage-path", "x"], "--storage-cache go together"),
        (["--in-process", "--storage-cache", "1"], "--storage-cache go together"),
        (["--in-process", "--storage-fresh"], "--storage-fresh go with --storage pmem_libpmem, dram_pmem"),
        (["--in-process", "--storage-fresh", "--storage-recover"], "not allowed with"),
        (["--stock", "--storage-recover"], "go with --in-process"),
        (["--stock", "--token-file", "x"], "goes with --servers"),
        (["--stock", "--learning-rate", "-1"], "not a positive number"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--data", "generate:10", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_examples_and_exit_codes() -> None:
    command = [sys.executable, "-m", "oe_runtime.train", "--help"]
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "100"}
    )
    assert shown.returncode == 0
    for word in ("examples:", "--resume", "generate:ROWS", "130 interrupted"):
        assert word in shown.stdout


def test_the_progress_line_and_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"loss": 0.45123, "auc": 0.76549, "samples_per_s": 88120.3, "eta_s": 3723.0}
    assert progress.describe(numbers) == "loss 0.4512  auc 0.7655  88,120 samples/s  ETA 1:02:03"
    with progress.Bar() as bar:
        bar.total(10, 2)
        bar.say("checkpoint [somewhere]")
        bar.tick(3)
        bar.step(4, 10, numbers)
    shown = capsys.readouterr().out
    assert "checkpoint [somewhere]" in shown
    assert "4/10" in shown
