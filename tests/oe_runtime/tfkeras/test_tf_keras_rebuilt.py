"""Weights of a tf-keras model that is made a second time in a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import tf_keras

import oe_runtime.tf_keras as embed
from oe_runtime.client import Client

X = np.random.default_rng(0).integers(0, 128, (64, 3))
Y = (X[:, :1] % 2).astype(np.float32)


def compiled() -> Any:
    ids = tf_keras.Input((3,), dtype="int64")
    x = tf_keras.layers.Flatten()(tf_keras.layers.Embedding(128, 4)(ids))
    stock = tf_keras.Model(ids, tf_keras.layers.Dense(1)(tf_keras.layers.Dense(4)(x)))
    model = embed.distributed_model(stock, Client.in_process())
    model.compile(embed.distributed_optimizer(tf_keras.optimizers.Adam(0.05)), "mse")
    return model


def test_a_model_that_is_made_again_goes_on_from_its_weights(tmp_path):
    first = compiled()
    first.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    first.save_weights(tmp_path / "w")
    second = compiled()
    second.load_weights(tmp_path / "w")
    everything = np.random.default_rng(1).integers(0, 128, (128, 3))  # untrained rows too
    np.testing.assert_array_equal(second.predict(everything, verbose=0), first.predict(everything, verbose=0))
    ours, theirs = (m.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history for m in (second, first))
    assert ours == theirs
