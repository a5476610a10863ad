"""Keras's training machinery works on distributed models: ways to give data, weights, callbacks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import pair, random_ids, same


def test_tf_data_generators_and_dictionaries():
    model, stock = pair()
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
    same(model, stock, x)
    np.testing.assert_allclose(
        model.predict(dataset, verbose=0), stock.predict(dataset, verbose=0), atol=1e-5
    )
    before = model.predict(x, verbose=0)
    model.fit(((tuple(a), b) for a, b in generator()), verbose=0)
    assert np.abs(model.predict(x, verbose=0) - before).max() > 1e-4


def test_early_stopping():
    model, _ = pair(lambda: keras.optimizers.SGD(0.0))
    x, y = random_ids(64)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=0.1)
    assert len(model.fit(x, y, epochs=20, verbose=0, callbacks=[stop]).history["loss"]) == 2


def test_model_can_be_called_outside_of_a_step():
    model, stock = pair()
    x, _ = random_ids(20)
    expected = stock(x)
    np.testing.assert_allclose(model(x), expected, atol=1e-6)
    graph = tf.function(lambda *v: model(list(v)))
    np.testing.assert_allclose(graph(*x), expected, atol=1e-6)
    dataset = tf.data.Dataset.from_tensor_slices(tuple(x)).batch(20).map(lambda *v: model(list(v)))
    np.testing.assert_allclose(next(iter(dataset)), expected, atol=1e-6)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")  # Keras's callback wants it, and TensorFlow does not bring it
    model, _ = pair()
    x, y = random_ids(64)
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, write_images=True)
    model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0, callbacks=[board])
    for part in ("train", "validation"):
        (events,) = (tmp_path / part).glob("events.*")
        tags = set()
        for record in tf.data.TFRecordDataset(str(events)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            tags |= {value.tag for value in event.summary.value}
        assert "epoch_loss" in tags


class Interrupted(Exception):
    pass


def test_a_run_that_was_interrupted_goes_on_with_its_rows(tmp_path):
    """Keras's BackupAndRestore: the second process is a new model on new servers."""
    x, y = random_ids(64)
    options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}

    def interrupt(epoch, _logs):
        if epoch == 1:
            raise Interrupted

    found = []
    for stops in ([], [keras.callbacks.LambdaCallback(on_epoch_begin=interrupt)]):
        keras.utils.set_random_seed(1)
        model, _ = pair(lambda: keras.optimizers.Adam(0.05))
        backup = keras.callbacks.BackupAndRestore(tmp_path / str(len(stops)))
        if stops:
            with pytest.raises(Interrupted):
                model.fit(x, y, callbacks=[backup, *stops], **options)
            keras.utils.set_random_seed(2)
            model, _ = pair(lambda: keras.optimizers.Adam(0.05))
        model.fit(x, y, callbacks=[backup], **options)
        found.append(model.predict(x, verbose=0))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
