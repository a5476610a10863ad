"""Keras's training machinery works on distributed models: ways to give data, weights, callbacks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, copy_rows, permutations, random_ids, two_fields

import oe_runtime.keras as embed


def _pair(optimizer=lambda: keras.optimizers.SGD(0.5), **options):
    """A distributed model and the stock model with the same weights, compiled alike."""
    stock = two_fields()
    model = embed.distributed_model(stock)
    model.compile(optimizer(), "binary_crossentropy", **options)
    copy_rows(model, stock)
    stock.compile(optimizer(), "binary_crossentropy", **options)
    return model, stock


def _same(model, stock, x, atol=1e-5):
    # (the stock model is called without tracing it once more)
    np.testing.assert_allclose(model.predict(x, verbose=0, batch_size=1000), stock(x), atol=atol)


def test_histories_are_equal_with_metrics_weights_validation_and_a_partial_batch():
    model, stock = _pair(metrics=["AUC", "accuracy"], weighted_metrics=["mse"])
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
    _same(model, stock, x)
    # Training, testing and predicting: none for the last, smaller batches.
    assert len(model._steps._programs) == 3


def test_class_weight_and_on_batch_methods():
    model, stock = _pair(metrics=["accuracy"])
    x, y = random_ids(70)
    for m in (model, stock):
        m.fit(x, y, class_weight={0: 1.0, 1: 3.0}, batch_size=32, shuffle=False, verbose=0)
    _same(model, stock, x)
    weight = np.linspace(0, 1, 70)
    ours = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    assert ours == pytest.approx(stock.train_on_batch(x, y, sample_weight=weight, return_dict=True), abs=1e-5)
    assert model.test_on_batch(x, y) == pytest.approx(stock.test_on_batch(x, y), abs=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x), stock.predict_on_batch(x), atol=1e-5)


def test_tf_data_generators_and_dictionaries():
    model, stock = _pair()
    x, y = random_ids(100)
    named = dict(zip(("a", "b", "numbers"), x, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((named, y)).batch(32)

    def generator():
        for begin in range(0, 100, 25):
            yield [v[begin : begin + 25] for v in x], y[begin : begin + 25]

    for m in (model, stock):
        m.fit(dataset, verbose=0)
        m.fit(dataset.repeat(), steps_per_epoch=5, epochs=2, verbose=0)
        signature = (
            tuple(tf.TensorSpec((None, *v.shape[1:]), v.dtype) for v in x),
            tf.TensorSpec((None, 1), y.dtype),
        )
        m.fit(
            tf.data.Dataset.from_generator(
                lambda: ((tuple(a), b) for a, b in generator()), output_signature=signature
            ),
            verbose=0,
        )
    _same(model, stock, x)
    np.testing.assert_allclose(
        model.predict(dataset, verbose=0), stock.predict(dataset, verbose=0), atol=1e-5
    )
    before = model.predict(x, verbose=0)
    model.fit(((tuple(a), b) for a, b in generator()), verbose=0)
    assert np.abs(model.predict(x, verbose=0) - before).max() > 1e-4


def test_learning_rate_schedule_and_callback():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=2, decay_rate=0.5)
    model, stock = _pair(lambda: keras.optimizers.Adagrad(schedule))
    x, y = permutations(batches=6)
    for m in (model, stock):
        m.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    _same(model, stock, x)

    model, stock = _pair()
    for m in (model, stock):
        callback = keras.callbacks.LearningRateScheduler(lambda epoch, _: [0.5, 0.0, 1.0][epoch])
        m.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
    _same(model, stock, x)


def test_steps_per_execution_and_eager_runs():
    model, stock = _pair(steps_per_execution=3)
    x, y = random_ids(260)
    for m in (model, stock):
        m.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    _same(model, stock, x)

    model, stock = _pair(run_eagerly=True)
    for m in (model, stock):
        m.fit(x, y, batch_size=130, shuffle=False, verbose=0)
    _same(model, stock, x)


def test_early_stopping():
    model, _ = _pair(lambda: keras.optimizers.SGD(0.0))
    x, y = random_ids(64)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.1)
    assert len(model.fit(x, y, epochs=20, verbose=0, callbacks=[stop]).history["loss"]) == 2


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
    _same(model, stock, x)
    np.testing.assert_array_equal(model.get_layer("table_a").table.rows(np.arange(ROWS)), frozen)

    for layer in model.layers:  # nothing left to train
        layer.trainable = False
    model.compile(keras.optimizers.Ftrl(0.1), "binary_crossentropy")
    before = model.predict(x, verbose=0)
    model.fit(x, y, batch_size=ROWS, verbose=0)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)


def test_model_can_be_called_outside_of_a_step():
    model, stock = _pair()
    x, _ = random_ids(20)
    expected = stock(x)
    np.testing.assert_allclose(model(x), expected, atol=1e-6)
    graph = tf.function(lambda *v: model(list(v)))
    np.testing.assert_allclose(graph(*x), expected, atol=1e-6)
    dataset = tf.data.Dataset.from_tensor_slices(tuple(x)).batch(20).map(lambda *v: model(list(v)))
    np.testing.assert_allclose(next(iter(dataset)), expected, atol=1e-6)


def test_only_tables_to_train():
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
        model, stock = _pair(lambda: keras.optimizers.Adagrad(0.1))
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = permutations(batches=3)
    for m in (model, stock):
        m.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    _same(model, stock, x, atol=0.02)
    assert model.get_layer("table_a").compute_dtype == "bfloat16"
