"""Models of tf-keras 2: saving, exporting, callbacks, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import keras as keras3
import numpy as np
import pytest
import tensorflow as tf
from tf_keras_models import ROWS, any_ids, keras, random_ids, rows, trained, two_fields

import oe_runtime.keras as keras3_embed
import oe_runtime.tf_keras as embed
from oe_runtime.errors import CheckpointError

FRESH = """
import sys
import numpy as np
sys.modules["keras"] = sys.modules["tf_keras"] = sys.modules["oe_runtime"] = None  # importing them fails
import tensorflow as tf
path, data = sys.argv[1:]
with np.load(data) as file:
    named = {name: tf.constant(file[name]) for name in ("a", "b", "numbers")}
    expected = file["expected"]
served = tf.saved_model.load(path).signatures["serving_default"](**named)
difference = np.abs(served["click"].numpy() - expected).max()
print(difference)
sys.exit(0 if difference < 1e-6 else 1)
"""


@pytest.mark.process
@pytest.mark.parametrize("precision", [None, "int8"])
def test_export_in_a_fresh_process(tmp_path, precision):
    model = trained(any_ids, epochs=2)
    assert {name: spec.index for name, spec in model.tables.items()} == {
        "table_a": "hash",
        "table_b": "array",
        "linear_a": "hash",
    }
    x, _ = random_ids(50, seed=1)
    if precision is None:
        embed.save_as_original_model(model, tmp_path / "export")
    else:
        model.save_as_original_model(tmp_path / "export", rows=precision)
    with pytest.raises(FileExistsError, match="export exists already"):
        model.save_as_original_model(tmp_path / "export")
    known = np.isin(x[0], random_ids(120)[0][0])[:, 0]  # of others the export has the initializer's mean
    x = [part[known] for part in x]
    named = dict(zip(("a", "b", "numbers"), x, strict=True))
    loaded = keras.models.load_model(tmp_path / "export", compile=False)
    expected, found = model.predict(x, verbose=0), loaded.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6 if precision is None else 1e-3)
    np.savez(tmp_path / "data.npz", expected=found, **named)
    for key in (-1, model.tables["table_b"].input_dim, 2**32):  # servers refuse them
        others = [tf.constant(part[:1]) for part in x]
        others[1] = tf.fill(others[1].shape, tf.constant(key, others[1].dtype))
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf" = {key} is not in \[0, "):
            loaded(others)
    result = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "export"), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_weights_and_rows_come_back(tmp_path):
    """Training goes on as if nothing had happened; another process has other names of optimizers."""
    model = trained()
    model.save_weights(tmp_path / "weights")
    with np.load(tmp_path / "weights" / "dense.npz", allow_pickle=False) as file:
        assert "model/hidden/kernel" in file.files
        assert file["optimizer/iteration"] == model.optimizer.iterations == 3
    other = trained(epochs=0)
    other.load_weights(tmp_path / "weights")
    x, y = random_ids(100, seed=2)
    losses = [one.fit(x, y, shuffle=False, verbose=0).history["loss"] for one in (model, other)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    np.testing.assert_allclose(rows(other, "table_a"), rows(model, "table_a"), rtol=1e-6)

    wide = embed.distributed_model(
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(9, name="hidden")])
    )
    wide.compile("adam", "mse")
    with pytest.raises(
        CheckpointError, match=r"hidden/kernel has shape \(11, 8\), but the model's has \(3, 9\)"
    ):
        wide.load_weights(tmp_path / "weights")


def test_rows_are_those_of_keras_3(tmp_path):
    model = trained()
    embed.save_server_model(model, tmp_path / "rows")
    fields = [keras3.Input((1,), dtype="int64") for _ in range(3)]
    names = (("table_a", 4), ("table_b", 4), ("linear_a", 1))
    tables = [
        keras3.layers.Embedding(ROWS, dim, "zeros" if dim == 1 else "uniform", name=name)(field)
        for (name, dim), field in zip(names, fields, strict=True)
    ]
    modern = keras3_embed.distributed_model(keras3.Model(fields, tables))
    modern.compile(keras3.optimizers.Adam(0.02), "mse")
    keras3_embed.load_server_model(modern, tmp_path / "rows")
    np.testing.assert_array_equal(rows(modern, "table_a"), rows(model, "table_a"))
    back = trained(epochs=0)
    keras3_embed.save_server_model(modern, tmp_path / "back")
    embed.load_server_model(back, tmp_path / "back")
    np.testing.assert_array_equal(rows(back, "table_b"), rows(model, "table_b"))


def test_callbacks_keep_rows(tmp_path):
    """The best epoch is the first, as the rate is far too high afterwards."""
    x, y = random_ids(80)
    model = trained(epochs=0)
    seen = []
    model.fit(
        x,
        y,
        epochs=3,
        verbose=0,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: 50.0 if epoch else 0.001),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(rows(model, "table_a"))),
            keras.callbacks.ModelCheckpoint(str(tmp_path / "best"), save_best_only=True, monitor="loss"),
            keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True),
        ],
    )
    assert len(seen) == 3
    np.testing.assert_array_equal(rows(model, "table_a"), seen[0])
    other = trained(epochs=0)
    other.load_weights(tmp_path / "best")
    np.testing.assert_array_equal(rows(other, "table_a"), seen[0])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras3.optimizers.Adam(), "Adam is of Keras 3"),
        (lambda: keras.optimizers.legacy.Adagrad(), r"legacy.Adagrad: .*; use tf_keras.optimizers.Adagrad"),
        (lambda: keras.optimizers.Nadam(), "Nadam of tf-keras: .* do not support it; use one of"),
        (lambda: keras.optimizers.Adam(use_ema=True), "use_ema=True"),
        (lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam()), "LossScaleOptimizer"),
    ],
)
def test_optimizers_that_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        embed.distributed_optimizer(optimizer())


def test_models_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is of Keras 3: write `import oe_runtime.keras as embed"):
        embed.distributed_model(keras3.Sequential([keras3.Input((1,))]))
    with pytest.raises(ValueError, match=r"write `import oe_runtime.tf_keras as embed`"):
        keras3_embed.distributed_model(two_fields())
    with pytest.raises(ValueError, match="no Input yet"):
        embed.distributed_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match=r"'table_a': the initializer Orthogonal .*; use Zeros"):
        embed.distributed_model(two_fields(embeddings_initializer="orthogonal"))

    class Own(keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(ValueError, match="Own overrides train_step"):
        embed.distributed_model(Own())
    model = embed.distributed_model(two_fields())
    with tf.distribute.experimental.CentralStorageStrategy(["CPU:0"]).scope():
        for call in (lambda: embed.distributed_model(two_fields()), lambda: model.compile("sgd", "mse")):
            with pytest.raises(ValueError, match=r"do not train inside a CentralStorage\w+: make and"):
                call()
    with pytest.raises(RuntimeError, match="compile the model first"):
        model.save_as_original_model(tmp_path / "model")
    with pytest.raises(ValueError, match="jit_compile=True is not offered"):
        model.compile("adam", "mse", jit_compile=True)
    model.compile("adam", "mse")
    for call, message in (
        (lambda: model.export("nowhere"), "rows of this model are on parameter servers"),
        (lambda: model.save_serving_model("nowhere"), "save_serving_model is not offered"),
        (lambda: model.load_weights("nowhere", skip_mismatch=True), "skip_mismatch=True is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        mixed = embed.distributed_model(two_fields())
        with pytest.raises(ValueError, match="mixed_bfloat16 is not offered"):
            mixed.compile("adam", "mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert not list(tmp_path.iterdir())
