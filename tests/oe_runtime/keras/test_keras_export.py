"""Exported models need TensorFlow only; dense checkpoints are strict."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras_models import random_ids, two_fields

import oe_runtime.keras as embed
from oe_runtime.errors import CheckpointError

FRESH = """
import sys
import numpy as np
sys.modules["keras"] = sys.modules["oe_runtime"] = None  # importing them fails
import tensorflow as tf
path, data = sys.argv[1:]
with np.load(data) as file:
    x = [tf.constant(file[f"x{i}"]) for i in range(3)]
    expected = file["expected"]
model = tf.saved_model.load(path)
difference = np.abs(model.serve(x).numpy() - expected).max()
named = dict(zip(("a", "b", "numbers"), x))
served = model.signatures["serving_default"](**named)
difference = max(difference, np.abs(list(served.values())[0].numpy() - expected).max())
print(difference)
sys.exit(0 if difference < 1e-6 else 1)
"""


def _mixed():
    """Field a in tables for any id, field b in one of 80 rows."""

    def layer(rows, dim, initializer="uniform", *, name):
        if name == "table_b":
            return keras.layers.Embedding(rows, dim, initializer, name=name)
        return embed.Embedding(-1, dim, initializer, name=name)

    return two_fields(layer)


@pytest.mark.process
def test_fresh_process_predicts_the_same(tmp_path):
    model = embed.distributed_model(_mixed())
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    assert {name: spec.index for name, spec in model.tables.items()} == {
        "table_a": "hash",
        "table_b": "array",
        "linear_a": "hash",
    }
    x, y = random_ids(200)
    x[0] = x[0] * np.int64(2**58) + np.int64(3)  # some are negative
    assert (x[0] < 0).any()
    x[1] //= 2  # half of the rows stay untrained
    model.fit(x, y, epochs=2, verbose=0)
    x[1] = x[1] + 40 * (np.arange(200)[:, None] % 2)
    path = model.save_as_original_model(tmp_path / "export" / "model")
    assert [p.name for p in path.parent.iterdir()] == ["model"]
    np.savez(tmp_path / "data.npz", x0=x[0], x1=x[1], x2=x[2], expected=model.predict(x, verbose=0))
    result = subprocess.run(
        [sys.executable, "-c", FRESH, str(path), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_unknown_ids_take_the_mean_of_the_initializer(tmp_path):
    import tensorflow as tf

    x = keras.Input((2,), dtype="int64")
    constant = embed.Embedding(-1, 2, keras.initializers.Constant(0.5), name="constant")(x)
    uniform = embed.Embedding(-1, 2, keras.initializers.RandomUniform(1.0, 2.0), name="uniform")(x)
    model = embed.distributed_model(keras.Model(x, keras.layers.Concatenate()([constant, uniform])))
    model.compile("sgd", "mse")
    model.train_on_batch(np.array([[1, 2]]), np.zeros((1, 2, 4)))
    model.save_as_original_model(tmp_path / "model")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    served = loaded.serve(tf.constant([[2, 3]], tf.int64)).numpy()
    np.testing.assert_allclose(served[0, 0], model.predict(np.array([[2, 3]]), verbose=0)[0, 0], atol=1e-6)
    np.testing.assert_allclose(served[0, 1], [0.5, 0.5, 1.5, 1.5])


def test_existing_path_is_refused_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    model = embed.distributed_model(two_fields())
    with pytest.raises(RuntimeError, match="compile the model first"):
        model.save_as_original_model(tmp_path / "model")
    model.compile("sgd", "mse")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists already"):
        model.save_as_original_model(tmp_path / "there")
    # The same before training.
    embed.check_export(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="there exists already"):
        embed.check_export(tmp_path / "there")
    with pytest.raises(FileExistsError, match="there is not a SavedModel"):
        embed.check_export(tmp_path / "there", overwrite=True)

    def fail(*_args):
        raise RuntimeError("no server")

    monkeypatch.setattr(type(model.client), "pull_rows", fail)
    with pytest.raises(RuntimeError, match="no server"):
        model.save_as_original_model(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_what_would_lose_the_rows_is_refused(tmp_path):
    model = embed.distributed_model(two_fields())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="on parameter servers"):
        model.export(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def _trained():
    model = embed.distributed_model(two_fields())
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    return model


def test_dense_weights_and_optimizer_state_come_back(tmp_path):
    x, y = random_ids(64)
    model = _trained()
    model.fit(x, y, epochs=2, verbose=0)
    path = model.save_dense(tmp_path / "step")
    assert [p.name for p in path.parent.iterdir()] == ["dense.npz"]
    with np.load(path, allow_pickle=False) as file:
        assert "model/hidden/kernel" in file.files
        assert file["optimizer/iteration"] == model.optimizer.iterations == 4
        assert not any("table" in name for name in file.files)

    other = _trained()  # other names of optimizer and generators, as they were made second
    other.load_dense(tmp_path / "step")
    for a, b in zip(
        model.variables + model.optimizer.variables, other.variables + other.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=a.path)


def test_a_dense_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    model = _trained()
    before = [np.array(v) for v in model.variables]
    path = model.save_dense(tmp_path)
    with np.load(path) as file:
        good = dict(file)

    for change, message in (
        (
            {"model/hidden/kernel": np.ones((2, 8), np.float32)},
            r"hidden/kernel has shape \(2, 8\).* \(11, 8\)",
        ),
        ({"model/hidden/kernel": np.ones((11, 8))}, "hidden/kernel is float64, but the model's is float32"),
        ({"model/hidden/bias": None}, "model/hidden/bias of the model is missing"),
        ({"model/other": np.ones(1)}, "model/other is not in the model"),
    ):
        arrays = {k: v for k, v in {**good, **change}.items() if v is not None}
        arrays["model/logit/kernel"] = arrays["model/logit/kernel"] + 1
        np.savez(path, **arrays)
        with pytest.raises(CheckpointError, match=message) as error:
            model.load_dense(tmp_path)
        assert str(path) in str(error.value)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        model.load_dense(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        model.load_dense(tmp_path / "nowhere")
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("dim", [16, 64])
def test_int8_rows_take_a_quarter_and_differ_by_half_a_scale(tmp_path, dim):
    import tensorflow as tf

    def size(path):
        return sum(file.stat().st_size for file in (path / "variables").iterdir())

    x = keras.Input((2,), dtype="int64")
    few = keras.layers.Embedding(20_000, dim, "normal", name="few", mask_zero=True)(x)
    many = embed.Embedding(-1, dim, keras.initializers.Constant(0.25), name="many")(x)
    model = embed.distributed_model(keras.Model(x, [few, many]))
    model.compile("sgd", "mse")
    ids = np.stack([np.arange(200), np.arange(200)[::-1]], 1)
    ids[0] = 0
    few_rows, many_rows = (np.random.default_rng(dim).normal(size=(200, 2, dim)) for _ in range(2))
    few_rows[ids == 7] = 0
    for _ in range(3):
        model.train_on_batch(ids, [few_rows, many_rows])
    trained = model.save_as_original_model(tmp_path / "trained")
    small = model.save_as_original_model(tmp_path / "small", rows="int8")
    ids = np.concatenate([ids, [[19_999, 12_345]]])  # of which `many` has none
    loaded = [tf.saved_model.load(str(path)) for path in (small, trained)]
    found, wanted = ([part.numpy() for part in one.serve(tf.constant(ids))] for one in loaded)
    for got, want in zip(found, wanted, strict=True):
        largest = np.abs(want).max(axis=-1, keepdims=True)
        assert (np.abs(got - want) <= largest / 254 * 1.00001).all()
        assert np.abs(got - want).max() > 0
    np.testing.assert_array_equal(found[1][-1], np.full((2, dim), 0.25, np.float32))
    assert size(small) < {16: 0.33, 64: 0.28}[dim] * size(trained)


def test_rows_that_int8_cannot_hold_are_refused(tmp_path):
    model = embed.distributed_model(two_fields(), nonfinite_gradients="pass")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="rows='int4' is not known; rows of an export are as trained, or 'i"):
        model.save_as_original_model(tmp_path / "model", rows="int4")
    table = model.served.tables()["table_b"]
    table.client.assign(table.number, np.array([3]), np.full((1, table.spec.dim), np.inf, np.float32))
    with pytest.raises(ValueError, match="table 'table_b': the row of id 3 has a value that is not finite"):
        model.save_as_original_model(tmp_path / "model", rows="int8")
    assert not list(tmp_path.iterdir())
