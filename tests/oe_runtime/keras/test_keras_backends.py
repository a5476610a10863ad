"""What is offered on every backend of Keras gives what stock Keras gives on it.

`make test` runs this on TensorFlow, `make test-torch` and `make test-jax` on the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import keras
import numpy as np
import pytest
from keras_models import OPTIMIZERS, ROWS, array, copy_rows, pair, permutations, random_ids, same, two_fields
from warm_starts import WarmStarts

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import GradientError, KeyRangeError, OeError

BACKEND = keras.backend.backend()


@pytest.fixture
def any_id():
    """Ids may have 64 bits, which JAX has to be told."""
    if BACKEND != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equals_stock_keras(optimizer):
    """Unmodified Keras `fit`, every row in every batch: the loss of every epoch and the predictions."""
    x, y = permutations(batches=6)
    stock = two_fields()
    model = embed.distributed_model(stock)
    model.compile(embed.distributed_optimizer(OPTIMIZERS[optimizer]()), "binary_crossentropy")
    assert set(model.tables) == {"table_a", "table_b", "linear_a"}
    copy_rows(model, stock)
    stock.compile(OPTIMIZERS[optimizer](), "binary_crossentropy")
    before = array(model(x))
    np.testing.assert_allclose(before, array(stock(x)), atol=1e-6)

    options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
    ours, theirs = model.fit(x, y, **options).history, stock.fit(x, y, **options).history

    np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-5)
    after = model.predict(x, verbose=0)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, array(stock(x)), atol=1e-4)


def test_histories_are_equal_with_metrics_weights_validation_and_a_partial_batch():
    model, stock = pair(metrics=["AUC", "accuracy"], weighted_metrics=["mse"])
    x, y = random_ids(300)
    validation = (*random_ids(90, seed=1), np.linspace(0, 1, 90))
    options = {
        "sample_weight": np.linspace(0, 2, 300),
        "validation_data": validation,
        "batch_size": 64,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
    }
    ours, theirs = model.fit(x, y, **options).history, stock.fit(x, y, **options).history
    assert ours.keys() == theirs.keys()
    assert {"loss", "val_loss", "AUC", "val_AUC", "mse"} <= set(ours)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)
    same(model, stock, x)
    if BACKEND == "tensorflow":
        # Training, testing and predicting: none for the last, smaller batches.
        assert len(model._steps._programs) == 3


def test_class_weight_and_on_batch_methods():
    model, stock = pair(metrics=["accuracy"])
    x, y = random_ids(70)
    for m in (model, stock):
        m.fit(x, y, class_weight={0: 1.0, 1: 3.0}, batch_size=32, shuffle=False, verbose=0)
    same(model, stock, x)
    weight = np.linspace(0, 1, 70)
    ours = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    assert ours == pytest.approx(stock.train_on_batch(x, y, sample_weight=weight, return_dict=True), abs=1e-5)
    assert model.test_on_batch(x, y) == pytest.approx(stock.test_on_batch(x, y), abs=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x), stock.predict_on_batch(x), atol=1e-5)


def test_learning_rate_schedule_and_callback():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=2, decay_rate=0.5)
    model, stock = pair(lambda: keras.optimizers.Adagrad(schedule))
    x, y = permutations(batches=6)
    for m in (model, stock):
        m.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    same(model, stock, x)

    model, stock = pair()
    for m in (model, stock):
        callback = keras.callbacks.LearningRateScheduler(lambda epoch, _: [0.5, 0.0, 1.0][epoch])
        m.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    same(model, stock, x)


def test_steps_per_execution_and_eager_runs():
    # Keras on PyTorch takes no other number.
    model, stock = pair(steps_per_execution=1 if BACKEND == "torch" else 3)
    x, y = random_ids(260)
    for m in (model, stock):
        m.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    same(model, stock, x)

    model, stock = pair(run_eagerly=True)
    for m in (model, stock):
        m.fit(x, y, batch_size=130, shuffle=False, verbose=0)
    same(model, stock, x)


ACCUMULATING = {
    "sgd": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=3),
    "momentum": lambda: keras.optimizers.SGD(
        0.2, momentum=0.9, weight_decay=0.05, gradient_accumulation_steps=3
    ),
    "adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.7),
        epsilon=1e-6,
        gradient_accumulation_steps=3,
    ),
}


@pytest.mark.parametrize("optimizer", ACCUMULATING)
def test_accumulated_gradients_equal_stock_keras(optimizer):
    """Over the ends of epochs too, and with rows that only some of the batches have."""
    model, stock = pair(ACCUMULATING[optimizer])
    # The other rules move rows that are in no batch.
    x, y = permutations(batches=4) if optimizer in ("momentum", "adam") else random_ids(4 * ROWS)
    options = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    before = model.predict(x, verbose=0)
    for one in (model, stock):
        one.train_on_batch([part[:ROWS] for part in x], y[:ROWS])
        one.train_on_batch([part[:ROWS] for part in x], y[:ROWS])
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)  # no update yet
    ours, theirs = model.fit(x, y, **options).history, stock.fit(x, y, **options).history
    np.testing.assert_allclose(ours["loss"], theirs["loss"], atol=1e-5)
    assert np.abs(model.predict(x, verbose=0) - before).max() > 0.01
    same(model, stock, x)


def test_accumulated_gradients_with_regularizers_and_embeddings_in_the_worker():
    def layer(rows, dim, *args, name):
        regularizer = keras.regularizers.L2(0.01) if name == "table_a" else None
        return keras.layers.Embedding(rows, dim, *args, embeddings_regularizer=regularizer, name=name)

    x, y = permutations(batches=7)
    stock = two_fields(layer)
    model = embed.distributed_model(stock, in_worker=["table_b"])
    model.compile(ACCUMULATING["adam"](), "binary_crossentropy")
    copy_rows(model, stock)
    stock.compile(ACCUMULATING["adam"](), "binary_crossentropy")
    for one in (model, stock):
        one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    same(model, stock, x)


def test_accumulated_gradients_of_a_model_of_rows_alone():
    ids = keras.Input((2,), dtype="int64")
    rows = keras.layers.Embedding(ROWS, 1, name="table")(ids)
    stock = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(rows))
    model = embed.distributed_model(stock)
    for one in (model, stock):
        one.compile(ACCUMULATING["sgd"](), "mse")
    stock.get_layer("table").set_weights(model.get_layer("table").get_weights())
    x = np.random.default_rng(0).integers(0, ROWS, (7 * 32, 2))
    for one in (model, stock):
        one.fit(x, x[:, :1] % 3, batch_size=32, shuffle=False, verbose=0)
    same(model, stock, x)


def test_a_save_between_updates_has_the_accumulated_gradients(tmp_path, monkeypatch):
    x, y = random_ids(5 * 64)
    batches = [([part[i : i + 64] for part in x], y[i : i + 64]) for i in range(0, len(y), 64)]
    model, _ = pair(ACCUMULATING["adagrad"])
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    model.save_weights(tmp_path / "saved")
    losses = [model.train_on_batch(*batch) for batch in batches[2:]]
    again, _ = pair(ACCUMULATING["adagrad"])
    again.train_on_batch(*batches[4])  # which the load forgets
    again.load_weights(tmp_path / "saved")
    np.testing.assert_allclose([again.train_on_batch(*batch) for batch in batches[2:]], losses, atol=1e-6)
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    with monkeypatch.context() as patch:  # a failed compile leaves the model as it was
        patch.setattr("oe_runtime.keras.with_tables.make_tables", Mock(side_effect=OeError))
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(OeError), pytest.warns(UserWarning, match="not be brought back"):
            again.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    assert again.served.accumulated.arrays()
    # What was compiled with another optimizer does not go on with them.
    again.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    assert not again.served.accumulated.arrays()


def test_ids_drawn_in_the_model_accumulate_for_the_rows_that_were_pulled():
    class Drawn(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = embed.Embedding(10_000, 2, "zeros", name="table")
            self.seeds = keras.random.SeedGenerator(3)

        def call(self, x):
            ids = keras.random.randint(keras.ops.shape(x), 0, 10_000, "int32", self.seeds)
            return keras.ops.sum(self.table(ids), -1)

    model = embed.distributed_model(Drawn())
    model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), "mse")
    client, pulled = model.client, []

    def noting(function):
        def noted(ids, tables):
            pulled.append(ids[0])
            return function(ids, tables)

        return noted

    client.plan, client.pull = noting(client.plan), noting(client.pull)
    if BACKEND == "torch":  # it calls the model twice, and refuses what differs then
        with pytest.raises(ValueError, match="All ids of a batch must be known before rows are pulled"):
            model.train_on_batch(np.zeros((50, 1)), np.ones((50, 1)))
        return
    for _ in range(2):
        model.train_on_batch(np.zeros((50, 1)), np.ones((50, 1)))
    rows = model.table.table.rows(np.arange(10_000))
    # The third is that of the push.
    np.testing.assert_array_equal(np.flatnonzero(rows[:, 0]), np.unique(np.concatenate(pulled[:2])))


@pytest.mark.parametrize("steps", [None, 2])
def test_admission_counts_every_id_of_accumulated_batches(steps, any_id):
    """The two ids of an example count twice, whatever form the gradients of rows have."""
    ids = keras.Input((2,), dtype="int64")
    table = embed.Embedding(
        -1,
        2,
        "zeros",
        admission={"name": "counter", "filter_freq": 4, "default_value": 0.25},
        embeddings_regularizer=keras.regularizers.L2(0.01),
        name="table",
    )
    model = embed.distributed_model(keras.Model(ids, keras.layers.Dense(1)(keras.ops.sum(table(ids), 1))))
    model.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=steps), "mse")
    for _ in range(2):
        model.train_on_batch(np.array([[1, 1], [2, 3]]), np.ones((2, 1)))
    assert model.client.export_rows(model.get_layer("table").table.number)[0].tolist() == [1]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="a step is over there when its rows are pushed")
def test_a_refused_push_keeps_the_accumulated_gradients():
    """Of the earlier batches of the update: the model is as it was before the refused one."""
    ids = keras.Input((1,), dtype="int64")
    rows = embed.Embedding(9, 2, "zeros", name="table")(ids)
    model = embed.distributed_model(keras.Model(ids, keras.ops.sum(rows, -1)))
    model.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), "mse")
    model.train_on_batch(np.array([[1]]), np.ones((1, 1)))
    with pytest.raises(GradientError):
        model.train_on_batch(np.array([[2]]), np.full((1, 1), np.nan))
    model.train_on_batch(np.array([[3]]), np.ones((1, 1)))
    found = model.get_layer("table").table.rows(np.arange(9))
    assert found[[1, 3]].all()
    assert not np.delete(found, [1, 3], axis=0).any()


def test_predict_before_compile():
    WarmStarts(keras, embed, two_fields, permutations, random_ids).assert_predicts_before_compile()


def test_initial_rows_before_compile_are_those_after_it():
    with Client.in_process(servers=2) as client:
        model = embed.distributed_model(two_fields(), client, seed=5)
        x, y = random_ids(50)
        before = model.predict(x, verbose=0)
        # As in stock Keras.
        with pytest.raises((ValueError, AttributeError), match=r"must call `compile\(\)`|'optimizer'"):
            model.evaluate(x, y, verbose=0)
        model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
        np.testing.assert_array_equal(model.predict(x, verbose=0), before)


@pytest.mark.parametrize("by_call", [True, False])
def test_a_subclassed_model_makes_its_weights_before_compile(by_call):
    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(ROWS, 4, name="table")
            self.click = keras.layers.Dense(1)

        def call(self, x):
            return self.click(self.table(x))

    model = embed.distributed_model(Towers())
    x = np.arange(ROWS)
    outputs = array(model(x)) if by_call else model.predict(x, verbose=0)
    assert model.click.built
    model.compile("sgd", "mse")
    np.testing.assert_allclose(model.predict(x, verbose=0), outputs, atol=1e-6)


class Encoder(keras.Model):
    """One table, of the layer `table` if there is one."""

    def __init__(self, table=None):
        super().__init__()
        self.table = table or embed.Embedding(ROWS, 4, name="table")

    def call(self, x):
        return self.table(x)


class Click(keras.Model):
    """A dense layer on what `encoder` returns."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.click = keras.layers.Dense(1)

    def call(self, x):
        return self.click(self.encoder(x))


@pytest.mark.parametrize("before", [False, True])  # whether the encoder is asked before it is trained
def test_a_model_in_a_compiled_one_has_its_tables(before):
    with Client.in_process() as client:
        encoder = embed.distributed_model(Encoder(), client)
        x = np.arange(ROWS)
        if before:
            encoder.predict(x, verbose=0)
        model = embed.distributed_model(Click(encoder), client)
        model.compile(keras.optimizers.SGD(0.5), "mse")
        first = client.pull_rows(model.served.tables()["table"].number, x)
        model.fit(x, np.ones((ROWS, 1)), batch_size=20, verbose=0)
        rows = client.pull_rows(model.served.tables()["table"].number, x)
        assert np.abs(rows - first).max() > 0.001
        for found in (encoder.table.table.rows(x), encoder.predict(x, verbose=0), array(encoder(x))):
            np.testing.assert_array_equal(found, rows)
        model.compile(keras.optimizers.SGD(0.1), "mse")  # connects the layer anew
        model.fit(x, np.zeros((ROWS, 1)), verbose=0)
        np.testing.assert_array_equal(encoder.predict(x, verbose=0), array(encoder(x)))


def test_models_that_share_an_embedding_share_its_table(tmp_path):
    with Client.in_process() as client:
        table = embed.Embedding(ROWS, 4, name="table")
        one, other = (embed.distributed_model(Click(Encoder(table)), client) for _ in range(2))
        x = np.arange(ROWS)
        one.compile(keras.optimizers.SGD(0.5), "mse")
        one.fit(x, np.ones((ROWS, 1)), batch_size=20, verbose=0)
        one.save_weights(tmp_path / "saved")
        outputs, rows = array(one(x)), table.table.rows(x)
        found = other.predict(x, verbose=0)
        np.testing.assert_allclose(found, array(other.click(rows)), atol=1e-6)
        np.testing.assert_allclose(array(one(x)), outputs, atol=1e-6)
        one.fit(x, np.ones((ROWS, 1)), batch_size=20, verbose=0)
        one.load_weights(tmp_path / "saved")
        np.testing.assert_allclose(one.predict(x, verbose=0), outputs, atol=1e-6)
        np.testing.assert_allclose(other.predict(x, verbose=0), found, atol=1e-6)


def test_a_model_with_a_part_of_a_compiled_ones_tables_says_so():
    class Both(keras.Model):
        def __init__(self, table):
            super().__init__()
            self.table, self.own = table, embed.Embedding(ROWS, 4, name="own")

        def call(self, x):
            return self.table(x) + self.own(x)

    table = embed.Embedding(ROWS, 4, name="table")
    one, other = embed.distributed_model(Encoder(table)), embed.distributed_model(Both(table))
    x = np.arange(ROWS)
    one.compile("sgd", "mse")
    outputs = array(one(x))
    for use in (lambda: other.predict(x, verbose=0), lambda: other(x)):
        with pytest.raises(
            RuntimeError, match=r"compile the model first: a part of its tables is of another"
        ):
            use()
    np.testing.assert_array_equal(array(one(x)), outputs)


def test_models_that_share_an_embedding_predict_in_turn_before_compile():
    table = embed.Embedding(ROWS, 4, name="table")
    models = [embed.distributed_model(Click(Encoder(table))) for _ in range(2)]
    x = np.arange(ROWS)
    first = [model.predict(x, verbose=0) for model in models]
    for model, outputs in zip(models, first, strict=True):
        np.testing.assert_array_equal(model.predict(x, verbose=0), outputs)
        np.testing.assert_allclose(array(model(x)), outputs, atol=1e-6)


@pytest.mark.skipif(BACKEND == "torch", reason="it has no graphs")
def test_graphs_from_before_compile_are_refused():
    """They would keep the rows of before."""
    model = embed.distributed_model(Click(Encoder()))
    x = keras.ops.arange(ROWS)
    outputs = array(model(x))
    assert model.compute_output_spec(keras.KerasTensor((ROWS,), "int32")).shape == (ROWS, 1)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        function = tf.function(lambda x: model(x))
    else:
        import jax

        function = jax.jit(lambda x: model(x))
    with pytest.raises(RuntimeError, match=r"'table' is called in a graph before its model is compiled"):
        function(x)
    np.testing.assert_array_equal(array(model(x)), outputs)


def test_frozen_tables_stay():
    stock = two_fields()
    stock.get_layer("table_a").trainable = False
    model = embed.distributed_model(stock)
    model.compile(keras.optimizers.Ftrl(0.1), "binary_crossentropy")
    copy_rows(model, stock)
    stock.compile(keras.optimizers.Ftrl(0.1), "binary_crossentropy")
    frozen = model.get_layer("table_a").table.rows(np.arange(ROWS))
    x, y = permutations(batches=3)
    for m in (model, stock):
        m.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    same(model, stock, x)
    np.testing.assert_array_equal(model.get_layer("table_a").table.rows(np.arange(ROWS)), frozen)

    for layer in model.layers:  # nothing left to train
        layer.trainable = False
    model.compile(keras.optimizers.Ftrl(0.1), "binary_crossentropy")
    before = model.predict(x, verbose=0)
    model.fit(x, y, batch_size=ROWS, verbose=0)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)


def test_only_tables_to_train(any_id):
    ids = keras.Input((2,), dtype="int64")
    output = keras.ops.sum(embed.Embedding(-1, 1, "zeros", name="weights")(ids), axis=1)
    model = embed.distributed_model(keras.Model(ids, output))
    model.compile(
        keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.5, 0.0])), "mse"
    )
    x = np.array([[-1, 2**62], [5, 2**62]])
    model.fit(x, np.array([[1.0], [2.0]]), epochs=3, verbose=0)
    rows = model.get_layer("weights").table.rows(x)
    assert model.optimizer.iterations == 3
    assert (rows != 0).all()
    model.fit(x, np.array([[1.0], [2.0]]), verbose=0)  # the rate is 0 now
    np.testing.assert_array_equal(model.get_layer("weights").table.rows(x), rows)


def test_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, stock = pair(lambda: keras.optimizers.Adagrad(0.1))
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = permutations(batches=3)
    for m in (model, stock):
        m.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    same(model, stock, x, atol=0.02)
    assert model.get_layer("table_a").compute_dtype == "bfloat16"


def _regularized(rows, dim, initializer="uniform", *, name):
    kind = {"table_a": keras.regularizers.L2(0.01), "table_b": keras.regularizers.L1L2(0.002, 0.02)}
    return keras.layers.Embedding(rows, dim, initializer, name=name, embeddings_regularizer=kind.get(name))


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_regularizers_with_every_row_in_every_batch(optimizer):
    x, y = permutations(batches=5)
    stock = two_fields(_regularized)
    with pytest.warns(
        UserWarning, match="embeddings_regularizer of table_a, table_b: only the rows of a batch"
    ):
        model = embed.distributed_model(stock, Client.in_process(servers=2))
    model.compile(optimizer, "binary_crossentropy")
    copy_rows(model, stock)
    stock.compile(optimizer, "binary_crossentropy")
    options = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    ours, theirs = model.fit(x, y, **options), stock.fit(x, y, **options)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], atol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(x, y, batch_size=ROWS, verbose=0),
        stock.evaluate(x, y, batch_size=ROWS, verbose=0),
        atol=1e-5,
    )
    for name in model.tables:
        rows = model.get_layer(name).table.rows(np.arange(ROWS))
        np.testing.assert_allclose(rows, stock.get_layer(name).get_weights()[0], atol=1e-5)


def test_regularizers_see_a_row_of_the_batch_once_and_others_not_at_all():
    x = keras.Input((2,), dtype="int64")
    layer = embed.Embedding(10, 3, keras.initializers.Constant(0.5), embeddings_regularizer="l2", name="t")
    zero = keras.ops.sum(layer(x), axis=(1, 2)) * 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = embed.distributed_model(keras.Model(x, zero))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    ids, y = np.array([[1, 1], [1, 4]]), np.zeros(2)
    assert model.evaluate(ids, y, verbose=0) == pytest.approx(0.01 * 2 * 3 * 0.25)
    assert model.train_on_batch(ids, y) == pytest.approx(0.01 * 2 * 3 * 0.25)
    rows = model.get_layer("t").table.rows(np.arange(10))
    expected = np.full((10, 3), 0.5, np.float32)
    expected[[1, 4]] -= 0.01 * 2 * 0.5
    np.testing.assert_allclose(rows, expected, atol=1e-7)
    # A frozen table is neither trained nor regularized, as in Keras.
    model.get_layer("t").trainable = False
    model.compile(keras.optimizers.SGD(1.0), "mse")
    assert model.evaluate(ids, y, verbose=0) == 0


@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.02}, {"clipvalue": 0.001}, {"global_clipnorm": 0.03}], ids=str
)
def test_clipping_counts_a_table_as_one_variable(clip):
    model, stock = pair(lambda: keras.optimizers.SGD(2.0, **clip))
    # Keras on TensorFlow has the gradients of equal ids one by one, and clips those.
    x, y = permutations(batches=3) if BACKEND == "tensorflow" else random_ids(200, seed=2)
    for m in (model, stock):
        m.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    same(model, stock, x, atol=1e-4)
    free, _ = pair(lambda: keras.optimizers.SGD(2.0))
    free.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    assert np.abs(free.predict(x, verbose=0) - model.predict(x, verbose=0)).max() > 0.01


class Subclassed(keras.Model):
    """Ids of 64 bits, in a dict, one field looked up by a hash of it too, with dropout."""

    def __init__(self):
        super().__init__(name="clicks")
        self.wide = embed.Embedding(-1, 3, keras.initializers.RandomNormal(stddev=0.1, seed=2), name="wide")
        self.hashed = keras.layers.Embedding(ROWS, 2, name="hashed")
        self.drop = keras.layers.Dropout(0.2, seed=3)
        self.out = keras.layers.Dense(1, "sigmoid", name="out")

    def call(self, x, training=False):
        rows = keras.ops.sum(self.wide(x["ids"]), axis=1)
        few = self.hashed(keras.ops.mod(x["ids"][:, 0], ROWS))
        return self.out(self.drop(keras.ops.concatenate([rows, few], -1), training=training))


def _subclassed(client=None):
    model = embed.distributed_model(Subclassed(), client)
    model.compile(
        embed.distributed_optimizer(keras.optimizers.Adam(0.05)), "binary_crossentropy", metrics=["AUC"]
    )
    assert set(model.tables) == {"wide", "hashed"}
    return model


def _wide_data():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 40, (120, 2)) * 2**56
    ids[:, 0] += rng.integers(0, ROWS, 120)
    return {"ids": ids}, (ids[:, :1] // 2**56 % 2).astype(np.float32)


def test_subclassed_models_and_their_files(any_id, tmp_path):
    x, y = _wide_data()
    model = _subclassed(Client.in_process(servers=2))
    each = keras.callbacks.ModelCheckpoint(tmp_path / "each.keras")
    losses = model.fit(x, y, batch_size=50, epochs=6, verbose=0, callbacks=[each]).history["loss"]
    assert losses[-1] < losses[0]
    assert model.client.stats()["servers"][0]["tables"]["wide"]["rows"] > 20
    expected = model.predict(x, verbose=0)
    model.save_weights(tmp_path / "weights")
    embed.save_server_model(model, tmp_path / "rows")

    again = _subclassed()
    again.fit(x, y, verbose=0)
    again.load_weights(tmp_path / "weights")
    np.testing.assert_allclose(again.predict(x, verbose=0), expected, atol=1e-6)
    assert again.evaluate(x, y, verbose=0) == pytest.approx(model.evaluate(x, y, verbose=0), abs=1e-5)
    again.fit(x, y, verbose=0)
    embed.load_server_model(again, tmp_path / "rows")
    rows = again.get_layer("wide").table.rows(x["ids"])
    np.testing.assert_array_equal(rows, model.get_layer("wide").table.rows(x["ids"]))
    again.load_weights(tmp_path / "each.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0), expected, atol=1e-6)


def test_ids_may_not_depend_on_embeddings(any_id):
    x = keras.Input((1,), dtype="int64")
    first = keras.ops.sum(embed.Embedding(ROWS, 2, "ones", name="first")(x), axis=-1)
    second = embed.Embedding(ROWS, 2, name="second")(keras.ops.cast(first, "int64"))
    model = embed.distributed_model(keras.Model(x, keras.layers.Flatten()(second)))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'second': its ids are computed from the embeddings of"):
        model.fit(np.arange(8)[:, None], np.zeros((8, 2)), verbose=0)


def test_a_refused_push_says_why():
    x, factor = keras.Input((1,), dtype="int64"), keras.Input((1,))
    rows = keras.layers.Flatten()(embed.Embedding(ROWS, 3, name="t")(x))
    model = embed.distributed_model(keras.Model([x, factor], keras.layers.Dense(1)(rows * factor)))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    ids, factors, y = np.arange(8)[:, None], np.ones((8, 1), np.float32), np.ones((8, 1))
    factors[2] = np.nan
    with pytest.raises(GradientError, match="table 't': the gradient of key 2 is not finite"):
        model.fit([ids, factors], y, verbose=0)
    assert np.isfinite(model.get_layer("t").table.rows(np.arange(ROWS))).all()
    factors[2] = 0
    if BACKEND != "tensorflow":  # dense weights are not changed before the push there
        assert np.isfinite(model.evaluate([ids, factors], y, verbose=0))


FIRST_SHARED = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}


def _looked_up(dtype):
    """Ids of a float type, looked up as they are and cut out of the input."""
    x = keras.Input((2,), dtype=dtype, name="ids")
    both = embed.Embedding(-1, 2, "ones", name="both")(x)
    first = embed.Embedding(-1, 2, "ones", name="first")(x[:, :1])
    pooled = keras.layers.GlobalAveragePooling1D()
    model = embed.distributed_model(keras.Model(x, keras.layers.Dense(1)(pooled(both) + pooled(first))))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("dtype", FIRST_SHARED)
def test_ids_that_floats_cannot_tell_apart_are_refused(any_id, dtype):
    limit = FIRST_SHARED[dtype]
    model = _looked_up(dtype)
    ids = np.array([[3, limit - 1], [1 - limit, 3], [7, 8]])
    model.fit(ids, np.ones((3, 1)), verbose=0)
    rows = model.get_layer("both").table.rows(ids)
    assert (rows != 1).all()  # the rows of these very ids were trained
    advice = r'came as \w+, in which ids from \d+ on .*; give .*keras.Input\(shape, dtype="int64"\)'
    for bad in (limit, limit + 1, -limit):  # limit + 1 is rounded to limit before it gets here
        ids[1, 1] = bad
        found = f"Embedding 'both': id {bad if bad < 0 else limit}.* {advice}"
        for use in (
            lambda: model.fit(ids, np.ones((3, 1)), verbose=0),
            lambda: model.train_on_batch(ids, np.ones((3, 1))),
            lambda: model.evaluate(ids, np.ones((3, 1)), verbose=0),
            lambda: model.predict(ids, verbose=0),
            lambda: model(keras.ops.cast(keras.ops.convert_to_tensor(ids), dtype)),
        ):
            with pytest.raises(KeyRangeError, match=found):
                use()
    ids[:] = [[limit, 1]] * 3  # also where they are computed from the input
    with pytest.raises(KeyRangeError, match=r"'(both|first)'"):
        model.predict(ids, verbose=0)
    ids = np.full((3, 2), np.nan)
    with pytest.raises(KeyRangeError, match=f"'(both|first)': id nan came as {dtype}"):
        model.predict(ids, verbose=0)
    np.testing.assert_array_equal(model.get_layer("both").table.rows(np.array([limit])), 1)


def test_floats_lose_their_fraction_as_in_keras(any_id):
    model = _looked_up("float32")
    whole, parts = np.array([[3.0, 5.0]]), np.array([[3.9, 5.2]])
    model.fit(whole, np.ones((1, 1)), verbose=0)
    np.testing.assert_array_equal(model.predict(parts, verbose=0), model.predict(whole, verbose=0))


def _pooled():
    """The mean over the unmasked ids of an example."""
    x = keras.Input((3,), dtype="int64")
    words = embed.Embedding(20, 2, mask_zero=True, name="words")(x)
    model = embed.distributed_model(
        keras.Model(x, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(words)))
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("together", [False, True])  # in another thread on TensorFlow
def test_an_example_of_padding_alone_is_named(together):
    """Keras masks the rows' gradients, but the dense weights and with them the next step are NaN."""
    ids = np.arange(1, 37).reshape(-1, 3) % 19 + 1
    ids[6] = 0
    model = _pooled()
    if not together:
        for begin in (0, 4):
            model.train_on_batch(ids[begin : begin + 4], np.ones((4, 1)))
        ids = ids[8:]
    with pytest.raises(GradientError) as error:
        model.fit(ids, np.ones((len(ids), 1)), batch_size=4, shuffle=False, verbose=0)
    assert re.fullmatch(
        r"table 'words': the gradient of key \d+ is not finite \(12 of 12 keys\); example 2 of the batch "
        r"before has only padding \(id 0\) in Embedding 'words', and a mean over .* masked is 0/0: .* give "
        r"such examples an id of their own; otherwise try a smaller learning rate, or set .*",
        str(error.value),
    )


def test_a_mean_over_padding_alone_that_reaches_its_rows_is_named():
    x = keras.Input((3,), dtype="int64")
    words = embed.Embedding(20, 2, mask_zero=True, name="words")(x)
    there = keras.ops.cast(x != 0, "float32")
    mean = keras.ops.sum(words * there[..., None], axis=1) / keras.ops.sum(there, axis=1, keepdims=True)
    model = embed.distributed_model(keras.Model(x, keras.layers.Dense(1)(mean)))
    model.compile("sgd", "mse")
    with pytest.raises(
        GradientError, match=r"key 0 is not finite .*; example 1 of the batch has only padding"
    ):
        model.train_on_batch(np.array([[1, 2, 0], [0, 0, 0]]), np.ones((2, 1)))
    assert np.isfinite(model.get_layer("words").table.rows(np.arange(20))).all()


@pytest.mark.parametrize("bad", [2, 4])  # the batch, of 0 to 4
@pytest.mark.parametrize("given", ["one", "a list", "Keras's list"])
def test_terminate_on_nan_ends_training_as_in_keras(given, bad):
    x, y = random_ids(100)
    y[20 * bad] = np.nan
    model, _ = pair()
    model.compile(keras.optimizers.SGD(0.5), "mse")  # PyTorch's cross entropy refuses such a label
    losses = []

    class Noting(keras.callbacks.TerminateOnNaN):
        def on_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])
            super().on_batch_end(batch, logs)

    callbacks = {
        "one": Noting,
        "a list": lambda: [Noting()],
        "Keras's list": lambda: keras.callbacks.CallbackList([Noting()], add_history=True, model=model),
    }[given]()
    options = {"batch_size": 20, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=callbacks, **options)
    # On JAX, Keras calls callbacks in another thread and may begin one more batch.
    assert np.isfinite(losses[:bad]).all()
    assert not np.isfinite(losses[bad:]).any()
    assert 1 <= len(losses) - bad <= 2
    assert np.isfinite(model.get_layer("table_a").table.rows(np.arange(ROWS))).all()
    with pytest.raises(GradientError):  # in a fit without it
        model.fit(x, y, **options)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="all of it is offered there")
def test_what_is_not_offered(tmp_path):
    for options, message in (
        ({"staleness": 1}, "staleness=1 needs Keras on TensorFlow, but it runs on"),
        ({"micro_batches": 2}, "micro_batches needs Keras on TensorFlow"),
    ):
        with pytest.raises(ValueError, match=message):
            embed.distributed_model(two_fields(), **options)
    with pytest.raises(AttributeError, match="TensorFlowWorkers needs Keras on TensorFlow"):
        _ = embed.TensorFlowWorkers
    model, _ = pair()
    with pytest.raises(ValueError, match="a SavedModel is TensorFlow's"):
        model.save_as_original_model(tmp_path / "export")
    assert not (tmp_path / "export").exists()
    if BACKEND == "torch":
        with pytest.raises(ValueError, match="jit_compile=True is not supported on PyTorch"):
            model.compile("sgd", "mse", jit_compile=True)
    else:
        wide = embed.distributed_model(
            keras.Sequential([keras.Input((1,)), embed.Embedding(-1, 2, name="w")])
        )
        with pytest.raises(ValueError, match="'w' takes any 64-bit id, but JAX truncates numbers to 32 bits"):
            wide.compile("sgd", "mse")


@pytest.mark.skipif(BACKEND == "tensorflow", reason="GradientTape is there: test_keras_convert.py")
def test_a_training_loop_of_ones_own_is_refused():
    """It would train the dense weights only. A call that trains nothing is none."""
    model, _ = pair()
    x = [keras.ops.convert_to_tensor(a) for a in random_ids(8)[0]]
    assert array(model(x)).shape == (8, 1)
    if BACKEND == "torch":
        with pytest.raises(RuntimeError, match=r"'(table|linear)_a' is in a backward pass outside of fit"):
            model(x).sum().backward()
        model.trainable = False
        assert not model.get_layer("table_a")(x[0]).requires_grad
        return
    import jax

    weights = [[v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables)]

    def loss(*weights):
        return model.stateless_call(*weights, x, training=True)[0].sum()

    assert np.isfinite(jax.jit(loss)(*weights))
    jitted = jax.jit(loss)
    jitted(*weights)
    for differentiated in (jax.grad(loss), jax.jit(jax.value_and_grad(loss)), jax.grad(jitted)):
        with pytest.raises(RuntimeError, match=r"'table_.' is called while JAX differentiates"):
            differentiated(*weights)


def test_activity_regularizer():
    """It is about what the layer puts out, so that it means exactly what it does in Keras."""

    def layer(*args, **options):
        return keras.layers.Embedding(*args, activity_regularizer=keras.regularizers.L2(0.5), **options)

    stock = two_fields(layer)
    model = embed.distributed_model(embed.distributed_model(stock))  # the second time from our own layers
    for one in (model, stock):
        one.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    copy_rows(model, stock)
    x, y = random_ids(100)
    options = {"batch_size": 40, "shuffle": False, "verbose": 0}
    losses = [one.fit(x, y, **options).history["loss"] for one in (model, stock)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    same(model, stock, x)


_ON_TENSORFLOW = """
import sys
import keras, numpy as np
sys.path.insert(0, sys.argv[1])
import oe_runtime.keras as embed
from keras_models import random_ids, two_fields

model = embed.distributed_model(two_fields())
model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
model.load_weights(sys.argv[2] + "/before")
x, y = random_ids(300)
losses = model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0).history["loss"]
np.savez(sys.argv[2] + "/tensorflow.npz", losses=losses, predictions=model.predict(x, verbose=0))
model.save_as_original_model(sys.argv[2] + "/export")
"""


@pytest.mark.skipif(BACKEND == "tensorflow", reason="compares another backend with TensorFlow")
def test_goes_on_under_tensorflow_with_the_same_losses(tmp_path):
    pytest.importorskip("tensorflow")
    model, _ = pair(lambda: keras.optimizers.Adagrad(0.1))
    x, y = random_ids(300)
    model.fit(x, y, batch_size=64, verbose=0)
    model.save_weights(tmp_path / "before")
    losses = model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0).history["loss"]
    subprocess.run(
        [sys.executable, "-c", _ON_TENSORFLOW, str(Path(__file__).parent), str(tmp_path)],
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},
        check=True,
    )
    with np.load(tmp_path / "tensorflow.npz") as there:
        np.testing.assert_allclose(losses, there["losses"], atol=1e-5)
        np.testing.assert_allclose(model.predict(x, verbose=0), there["predictions"], atol=1e-5)
    assert (tmp_path / "export" / "saved_model.pb").is_file()
