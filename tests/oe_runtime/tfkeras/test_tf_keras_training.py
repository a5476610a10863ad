"""Models of tf-keras 2: what they learn beside plain ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tf_keras_models import ROWS, keras, pair, permutations, random_ids, rows, trained

import oe_runtime.tf_keras as embed
from oe_runtime import Client, TableSpec
from oe_runtime.tf_keras.translate import _OPTIMIZERS, table_optimizer


def same(model, plain, x):
    for name in model.tables:
        np.testing.assert_allclose(rows(model, name), plain.get_layer(name).get_weights()[0], atol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


def fit_both(model, plain, x, y, **options):
    history, expected = (one.fit(x, y, shuffle=False, verbose=0, **options).history for one in (model, plain))
    assert sorted(history) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("kind", "rate"), [("SGD", 0.5), ("Adagrad", 0.1)])
def test_learns_what_a_plain_model_learns(kind, rate):
    """Ids that repeat in a batch, a smaller last batch, weights of classes, validation."""
    x, y = random_ids(200)
    model, plain = pair(lambda: getattr(keras.optimizers, kind)(rate))
    fit_both(
        model, plain, x, y, batch_size=64, epochs=3, class_weight={0: 1.0, 1: 2.0}, validation_data=(x, y)
    )
    same(model, plain, x)
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), atol=1e-5)
    for one in (model, plain):
        one.train_on_batch(x, y)
    same(model, plain, x)


def test_micro_batches_and_staleness():
    x, y = random_ids(200)
    model, plain = pair(lambda: keras.optimizers.SGD(0.5), micro_batches=3)
    fit_both(model, plain, x, y, batch_size=64, epochs=2)
    same(model, plain, x)
    model, _ = pair(lambda: keras.optimizers.SGD(0.5), staleness=1)
    losses = model.fit(x, y, batch_size=64, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_schedule_clipping_and_regularizer():
    """With every row in every batch, as what tf-keras does to other rows is left out."""
    x, y = permutations(5)

    def adam():
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.5)
        return keras.optimizers.Adam(rate, global_clipnorm=0.05, weight_decay=0.1)

    with pytest.warns(UserWarning, match="embeddings_regularizer of table_a: only the rows of a batch"):
        model, plain = pair(adam, table_a={"embeddings_regularizer": keras.regularizers.l2(0.01)})
    fit_both(model, plain, x, y, batch_size=ROWS, epochs=2)
    same(model, plain, x)


RULES = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"initial_accumulator_value": 0.2, "epsilon": 1e-3}),
    ("Adadelta", {"rho": 0.9, "epsilon": 1e-4}),
    ("Adam", {"beta_1": 0.8, "epsilon": 1e-3}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1}),
    ("Adamax", {"epsilon": 1e-3}),
    ("RMSprop", {"momentum": 0.5, "epsilon": 1e-3}),
    ("RMSprop", {"centered": True, "epsilon": 1e-3}),
    ("Lion", {}),
    (
        "Ftrl",
        {"l1_regularization_strength": 0.01, "l2_shrinkage_regularization_strength": 0.01, "beta": 0.1},
    ),
]


def test_every_optimizer_of_tf_keras_is_compared():
    assert {name for name, _ in RULES} == set(_OPTIMIZERS)


@pytest.mark.parametrize(("name", "options"), RULES)
def test_rows_in_every_batch_are_updated_as_tf_keras_variables(name, options):
    """A row that is in every batch is updated as a variable of tf-keras is."""
    optimizer = getattr(keras.optimizers, name)(0.05, **options)
    rng = np.random.default_rng(3)
    keys = np.arange(5)
    with Client.in_process() as client:
        table = client.create_table(TableSpec("t", 4, optimizer=table_optimizer(optimizer)))
        variable = tf.Variable(client.pull_rows(table, keys), name="embeddings")
        for _ in range(6):
            gradient = rng.normal(size=(5, 4)).astype(np.float32)
            client.push(client.pull([keys], [(table, 0)]), [gradient], 0.05)
            optimizer.apply_gradients([(tf.constant(gradient), variable)])
        np.testing.assert_allclose(client.pull_rows(table, keys), variable.numpy(), rtol=2e-5, atol=2e-6)


def test_rows_outside_of_a_batch_stay():
    """tf-keras's Adam moves them by their momenta."""
    model = trained()
    before = rows(model, "table_a")
    x, y = random_ids(8)
    model.train_on_batch(x, y)
    there = np.isin(np.arange(ROWS), x[0])
    after = rows(model, "table_a")
    np.testing.assert_array_equal(after[~there], before[~there])
    assert (after[there] != before[there]).any(axis=1).all()


def test_sequential_and_any_id():
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            embed.Embedding(-1, 4, mask_zero=True, input_length=3),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model = embed.distributed_model(model)
    model.compile("adam", "binary_crossentropy")
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, (64, 3))
    ids[:, 2] = 0
    y = (ids[:, :1] % 2).astype(np.float32)
    losses = model.fit(ids, y, epochs=5, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    keys, _ = model.client.export_rows(0)
    assert set(keys) == set(ids[:, :2].ravel()) | {0}


class Branches(keras.layers.Layer):
    """Python's `if` on a tensor, which tf-keras converts."""

    def call(self, x):
        if tf.reduce_sum(x) > 1e9:
            x = x * 0.0
        return x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = embed.Embedding(ROWS, 4, name="table")
        self.branches = [Branches(), keras.layers.Embedding(ROWS, 4, name="other")]
        self.out = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs, training=None):
        branch, other = self.branches
        return self.out(branch(tf.reduce_mean(self.table(inputs["ids"]) + other(inputs["ids"]), 1)))


def test_subclassed_with_a_dataset():
    x, y = random_ids(64)
    data = tf.data.Dataset.from_tensor_slices(({"ids": x[0]}, y)).batch(16).repeat()
    model = embed.distributed_model(Subclassed())
    assert isinstance(model, Subclassed)
    model.compile(keras.optimizers.Adagrad(0.5), "binary_crossentropy", steps_per_execution=2)
    losses = model.fit(embed.pulling(data, model), epochs=4, steps_per_epoch=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert int(model.optimizer.iterations) == 16
    assert list(model.tables) == ["table", "other"]
    assert len(model.weights) == 2
    assert model.predict(data, steps=3, verbose=0).shape == (48, 1)
    with pytest.raises(ValueError, match="Subclassed has no graph"):
        model.save_as_original_model("nowhere")


DEEPCTR = """
import numpy as np
import requests
import tensorflow as tf
requests.get = None  # or DeepCTR asks PyPI for a newer version of itself
from deepctr import models
from deepctr.feature_column import DenseFeat, SparseFeat
import oe_runtime.tf_keras as embed

columns = [SparseFeat(f"C{i}", 500, embedding_dim=8) for i in (1, 2, 3)] + [DenseFeat("I1", 1)]
rng = np.random.default_rng(1)
x = {f"C{i}": rng.integers(0, 500, 256) for i in (1, 2, 3)} | {"I1": rng.random(256, np.float32)}
y = (x["C1"] % 2).astype(np.float32)
for name in ("WDL", "DeepFM", "IFM", "DIFM", "MMOE", "PLE", "DCNMix"):
    tf.keras.utils.set_random_seed(1)  # a difference comes again, or is one of threads
    build = getattr(models, name)
    if name in ("MMOE", "PLE"):
        stock, labels = build(columns, task_types=["binary"] * 2, task_names=["a", "b"]), [y, y]
    else:
        stock, labels = build(columns, columns, task="binary"), y
    model = embed.distributed_model(stock)
    for one in (model, stock):
        one.compile(embed.distributed_optimizer(tf.keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
    assert len(model.tables) == (6 if labels is y else 3)
    for table, spec in model.tables.items():
        stock.get_layer(table).set_weights([model.get_layer(table).table.rows(np.arange(spec.input_dim))])
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    losses = [one.fit(x, labels, **options).history["loss"] for one in (model, stock)]
    np.testing.assert_allclose(*losses, atol=1e-5, err_msg=name)
"""


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("deepctr") is None, reason="make test installs DeepCTR")
def test_deepctr_with_legacy_keras():
    """DeepCTR's models are of tf.keras, whatever that is."""
    result = subprocess.run(
        [sys.executable, "-c", DEEPCTR],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
