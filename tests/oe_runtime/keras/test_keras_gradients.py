"""Clipping, regularizers and bad gradients mean for tables what they mean for Keras's variables."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, copy_rows, random_ids, two_fields

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import GradientError

CLIPS = [{"clipnorm": 0.02}, {"clipvalue": 0.001}, {"global_clipnorm": 0.03}]


def _ids(clip):
    return next(iter(clip))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("clip", CLIPS, ids=_ids)
def test_clipping(clip, servers):
    """Ids repeat and rows of several tables lie among each other; the reference has dense gradients."""
    stock = two_fields()
    model = embed.distributed_model(stock, Client.in_process(servers=servers))
    model.compile(keras.optimizers.SGD(2.0, **clip), "binary_crossentropy")
    copy_rows(model, stock)
    reference = keras.optimizers.SGD(2.0, **clip)
    variables = stock.trainable_variables
    x, y = random_ids(400, seed=2)
    clipped = 0
    for begin in range(0, 400, 50):
        batch = [values[begin : begin + 50] for values in x], y[begin : begin + 50]
        loss = model.train_on_batch(*batch)
        with tf.GradientTape() as tape:
            expected = tf.reduce_mean(keras.losses.binary_crossentropy(batch[1], stock(batch[0])))
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(expected, variables)]
        changed = reference._clip_gradients(gradients)
        clipped += sum(bool(tf.reduce_any(a != b)) for a, b in zip(gradients, changed, strict=True))
        reference.apply_gradients(zip(gradients, variables, strict=True))
        np.testing.assert_allclose(loss, expected, atol=1e-5)
    assert clipped > 20  # it does matter here
    for name in model.tables:
        rows = model.get_layer(name).table.rows(np.arange(ROWS))
        np.testing.assert_allclose(rows, stock.get_layer(name).get_weights()[0], atol=1e-6)
    for ours, theirs in zip(
        model.get_layer("hidden").weights, stock.get_layer("hidden").weights, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_no_warning_without_regularizers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embed.distributed_model(two_fields())


def test_excluded_from_weight_decay():
    for names, expected in ((["embeddings"], 0.0), (["bias"], 0.25)):
        optimizer = keras.optimizers.SGD(weight_decay=0.25)
        optimizer.exclude_from_weight_decay(var_names=names)
        model = embed.distributed_model(two_fields())
        model.compile(optimizer, "mse")
        assert model.tables["table_a"].optimizer["weight_decay"] == expected


@pytest.mark.parametrize("policy", ["refuse", "skip", "pass"])
def test_gradients_that_are_not_finite(policy):
    x = keras.Input((1,), dtype="int64")
    factor = keras.Input((1,))
    rows = keras.layers.Flatten()(embed.Embedding(-1, 3, name="t")(x))
    model = embed.distributed_model(keras.Model([x, factor], rows * factor), nonfinite_gradients=policy)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    table = model.get_layer("t").table
    ids, factors = np.arange(4)[:, None], np.ones((4, 1), np.float32)
    factors[2] = np.nan
    before = table.rows(ids)
    if policy == "refuse":
        with pytest.raises(GradientError, match=r"table 't': the gradient of key 2 is not finite \(1 of 4"):
            model.fit([ids, factors], np.ones((4, 3)), verbose=0)
        np.testing.assert_array_equal(table.rows(ids), before)
    else:
        model.fit([ids, factors], np.ones((4, 3)), verbose=0)
        after = table.rows(ids)
        assert (after != before).all(axis=(1, 2)).tolist() == [True, True, policy == "pass", True]
        assert np.isnan(after).any(axis=(1, 2)).tolist() == [False, False, policy == "pass", False]
    (server,) = model.client.stats()["servers"]
    assert server["tables"]["t"]["nonfinite_gradients"] == (0 if policy == "pass" else 1)
