"""Built-in models over any columns."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from server_processes import free_endpoints
from training_runs import ServerProcess, events, losses

from oe_runtime import Client, models
from oe_runtime.data import Split, open_source, row_schema, training_batches
from oe_runtime.programs import click_model
from oe_runtime.train import main

SCHEMA: dict[str, Any] = {
    "label": "bought",
    "numbers": {"price": "log1p", "age": {"scale": "standard", "mean": 40, "deviation": 10}},
    "categories": {
        "site": 40,
        "user": "hash64",
        "deep_1": {"cardinality": 30, "separator": "|", "length": 3},
        "last seen": {"cardinality": 30, "separator": " ", "length": 2, "pooling": "sum"},
    },
    "weight": "importance",
    "ignored": ["id"],
}


def write(directory: Path, rows: int = 600) -> Path:
    """Rows whose label hangs on the first tag."""
    rng = random.Random(5)  # noqa: S311
    lines = ["id,bought,price,age,site,user,deep_1,last seen,importance"]
    for row in range(rows):
        site, tag = rng.randrange(10), rng.randrange(8)
        label = int(rng.random() < (0.9 if tag % 2 else 0.1))
        tags = "|".join([f"t{tag}"] + ["x"] * rng.randrange(3))
        seen = " ".join(f"p{rng.randrange(5)}" for _ in range(rng.randrange(3)))
        lines.append(
            f"{row},{label},{rng.random():.3f},{rng.randrange(20, 60)},s{site},u{row % 50},{tags},{seen},"
            f"{1 + row % 3}"
        )
    (directory / "rows.csv").write_text("\n".join(lines) + "\n")
    (directory / "schema.yml").write_text(yaml.safe_dump(SCHEMA, sort_keys=False))
    return directory / "rows.csv"


def arguments(run: Path, *more: str) -> list[str]:
    shape = ["--dim", "4", "--hidden", "16", "--cin", "4", "--bottom", "8", "--interaction", "cat"]
    steps = ["--batch-size", "50", "--log-every", "1", "--checkpoint-steps", "0"]
    rate = ["--optimizer", "adam", "--learning-rate", "0.02"]
    return ["--run-dir", str(run), *shape, *steps, *rate, *more]


def train(run: Path, *more: str) -> int:
    return main(arguments(run, *more))


@pytest.mark.parametrize("name", models.NAMES)
def test_models_train_on_any_columns(tmp_path: Path, name: str) -> None:
    data = ["--data", str(write(tmp_path)), "--schema", str(tmp_path / "schema.yml"), "--model", name]
    assert train(tmp_path / "run", "--in-process", "--epochs", "2", *data) == 0
    found = losses(tmp_path / "run")
    assert len(found) == 22
    assert events(tmp_path / "run", "eval")[0]["rows"] == 60
    mean = [
        np.mean([loss for loss, _ in part]) for part in (list(found.values())[:5], list(found.values())[-5:])
    ]
    assert mean[1] < mean[0] - 0.02


def test_served_and_stock_embeddings_are_alike(tmp_path: Path) -> None:
    """Pooled columns too: the same model on servers trains as the stock one does."""
    import keras

    import oe_runtime.keras as embed

    schema = row_schema.parse(SCHEMA, "schema").limited(30)
    source = open_source(str(write(tmp_path)), schema=schema)
    layout = click_model.Layout(schema)
    stock = models.build("deepfm", [one.rows for one in schema.categories], 4, hidden=(8,), schema=schema)
    names = {"site", "user", "column_deep_1", "last_seen"}
    with Client.in_process() as client:
        served = embed.distributed_model(stock, client, sparse_as_dense_size=2)
        served.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        assert set(served.tables) == names | {f"{name}_linear" for name in names}
        for table, spec in served.tables.items():
            rows = served.get_layer(table).table.rows(np.arange(spec.input_dim))
            stock.get_layer(table).set_weights([rows])
        stock.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        for batch in training_batches(source, Split(0), 100):
            x, y, weights = layout.data(batch)
            found = [model.train_on_batch(x, y, sample_weight=weights) for model in (stock, served)]
            np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_weights_count(tmp_path: Path) -> None:
    """Rows of weight 0 change no loss."""
    path = write(tmp_path, 100)
    lines = path.read_text().splitlines()
    worthless = [line[: line.rindex(",")] + ",0" for line in lines[1:]]
    turned = [",".join([f[0], str(1 - int(f[1])), *f[2:]]) for f in (line.split(",") for line in worthless)]
    data = ["--schema", str(tmp_path / "schema.yml"), "--holdout", "0", "--in-process", "--data", str(path)]
    found = []
    for run, zeros in (("a", worthless), ("b", turned)):
        pairs = [line for pair in zip(lines[1:], zeros, strict=True) for line in pair]
        path.write_text("\n".join([lines[0], *pairs]) + "\n")
        assert train(tmp_path / run, *data) == 0
        found.append([loss for loss, _ in losses(tmp_path / run).values()])
    assert found[0] == found[1]


def test_a_resumed_run_needs_the_same_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, 200)
    words = ["--data", str(path), "--in-process", "--holdout", "0", "--label", "bought", "--numbers", "price"]
    assert train(tmp_path / "run", *words, "--categories", "site:40", "--steps", "2") == 0
    assert train(tmp_path / "run", *words, "--categories", "site:40", "--steps", "4", "--resume") == 0
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    capsys.readouterr()
    assert train(tmp_path / "run", *words, "--categories", "site:50", "--steps", "5", "--resume") == 1
    said = capsys.readouterr().err
    assert "--schema is label bought, 1 numbers, 1 categories" in said
    assert (
        train(tmp_path / "other", "--data", str(path), "--stock", "--label", "bought", "--categories", "user")
        == 1
    )
    assert "--stock: the 64-bit ids of user need tables on servers" in capsys.readouterr().err
    assert (
        train(tmp_path / "other", "--data", str(path), "--in-process", "--label", "b", "--categories", "a")
        == 1
    )
    assert f"the header of {path} lacks the columns b, a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train(tmp_path / "other", "--data", str(path), "--in-process", "--schema", "avazzu")
    assert "did you mean avazu?" in capsys.readouterr().err


def test_evaluations_between_steps_change_no_loss(tmp_path: Path) -> None:
    data, other = write(tmp_path, 300), tmp_path / "other.csv"
    other.write_text("".join(data.read_text().splitlines(keepends=True)[:121]))
    words = ["--data", str(data), "--schema", str(tmp_path / "schema.yml"), "--in-process"]
    words += ["--eval-data", str(other)]
    assert train(tmp_path / "plain", *words) == 0
    assert train(tmp_path / "often", *words, "--eval-every", "2") == 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "often")
    assert len(losses(tmp_path / "plain")) == 6  # nothing is held out
    last = events(tmp_path / "plain", "eval")
    found = events(tmp_path / "often", "eval")
    assert [(one["step"], one["rows"]) for one in found] == [(2, 120), (4, 120), (6, 120)]
    for name in ("loss", "auc", "accuracy"):
        assert found[-1][name] == last[0][name]
    assert found[0]["loss"] != found[-1]["loss"]
    assert 0.5 <= last[0]["accuracy"] <= 1
    page = (tmp_path / "often" / "report.html").read_text()
    assert "held-out accuracy" in page


def test_a_share_to_hold_out(tmp_path: Path) -> None:
    words = ["--data", str(write(tmp_path, 300)), "--schema", str(tmp_path / "schema.yml"), "--in-process"]
    assert train(tmp_path / "run", *words, "--eval-data", "0.2") == 0
    assert events(tmp_path / "run", "eval")[0]["rows"] == 60


def test_deeprecs_directory_is_evaluated_on_its_own_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing is held out of the rows to train on."""
    directory = tmp_path / "data"
    directory.mkdir()
    for name, rows in (("eval", 70), ("train", 200)):
        write(directory, rows).rename(directory / f"{name}.csv")
    words = ["--data", str(directory), "--schema", str(directory / "schema.yml"), "--in-process"]
    assert train(tmp_path / "run", *words, "--holdout", "0") == 0
    assert [one["rows"] for one in events(tmp_path / "run", "eval")] == [70]
    assert len(losses(tmp_path / "run")) == 4
    assert train(tmp_path / "none", *words, "--no-eval") == 0
    assert not events(tmp_path / "none", "eval")
    capsys.readouterr()
    assert train(tmp_path / "share", *words, "--eval-data", "0.2") == 1
    assert "has rows for the evaluation" in capsys.readouterr().err
    assert not (tmp_path / "share").exists()


@pytest.mark.process
def test_two_workers_have_the_losses_of_one(tmp_path: Path) -> None:
    """Weights and evaluations between steps included."""
    data = [
        "--data",
        str(write(tmp_path, 400)),
        "--schema",
        str(tmp_path / "schema.yml"),
        "--eval-every",
        "3",
    ]
    server, alone = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "alone")
    command = [sys.executable, "-m", "oe_runtime.train"]
    together = [*data, "--servers", server.endpoint, "--workers", free_endpoints(2)]
    workers = []
    try:
        workers = [
            subprocess.Popen(
                [*command, *arguments(tmp_path / "two", *together, "--rank", str(rank))],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [worker.communicate(timeout=120)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
        assert train(tmp_path / "one", *data, "--servers", alone.endpoint) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
        alone.stop()
    found, expected = (list(losses(tmp_path / run).values()) for run in ("two", "one"))
    np.testing.assert_allclose([one[0] for one in found], [one[0] for one in expected], rtol=2e-4)
    two, one = (events(tmp_path / run, "eval") for run in ("two", "one"))
    assert [each["step"] for each in two] == [each["step"] for each in one] == [3, 6, 8]
    for mine, theirs in zip(two, one, strict=True):
        assert mine["rows"] == theirs["rows"] == 40
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


@pytest.mark.parametrize("kept", ["trained", "int8"])
def test_an_export_takes_the_schemas_columns(tmp_path: Path, kept: str) -> None:
    """The SavedModel, in plain TensorFlow, has the loss that the trainer found on the same rows."""
    import tensorflow as tf

    data, evaluation = write(tmp_path), tmp_path / "eval" / "rows.csv"
    evaluation.parent.mkdir()
    write(evaluation.parent, 100)
    export = tmp_path / "export"
    more = ["--eval-data", str(evaluation), "--export", str(export), "--max-cardinality", "60"]
    more += ["--export-rows", kept]
    more += ["--data", str(data), "--schema", str(tmp_path / "schema.yml")]
    assert train(tmp_path / "run", "--in-process", *more) == 0
    schema = row_schema.load(str(tmp_path / "schema.yml")).limited(60)
    (rows,) = open_source(str(evaluation), schema=schema).blocks()
    inputs: dict[str, Any] = {"numbers": rows.dense}
    at = 0
    names = ("site_id", "user_id", "column_deep_1_id", "last_seen_id")
    for name, category in zip(names, schema.categories, strict=True):
        inputs[name] = rows.ids[:, at : at + category.length]
        at += category.length
    served = tf.saved_model.load(str(export)).signatures["serving_default"]
    wanted = served.structured_input_signature[1]
    found = served(**{name: tf.cast(inputs[name], spec.dtype) for name, spec in wanted.items()})
    (clicks,) = (value.numpy()[:, 0] for value in found.values())
    loss = -np.mean(np.log(np.where(rows.labels > 0, clicks, 1 - clicks)))
    difference = abs(loss - events(tmp_path / "run", "eval")[0]["loss"])
    assert (difference < 1e-5) if kept == "trained" else (0 < difference < 1e-3)
