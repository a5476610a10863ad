"""What is compared between the models of a job's workers."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.keras.model_settings import keras_settings


def settings(
    activation: str = "relu", seed: int = 1, loss: Any = "mse", rate: float = 0.1, trainable: bool = True
) -> dict[str, Any]:
    """Those of a model with a table."""
    ids = keras.Input((2,), dtype="int64")
    rows = keras.layers.Embedding(300, 4, name="C1", trainable=trainable)(ids)
    kernel = keras.initializers.RandomNormal(seed=seed)
    x = keras.layers.Dense(8, activation=activation, kernel_initializer=kernel)(keras.layers.Flatten()(rows))
    x = keras.layers.Dropout(0.1, seed=seed)(x)
    stock = keras.Model(ids, keras.layers.Dense(1)(x))
    model = embed.distributed_model(stock, Client.in_process())
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(rate)), loss)
    return keras_settings(model)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"activation": "tanh"}, "layer 3 (Dense) activation"),
        ({"loss": "mae"}, "the loss"),
        ({"loss": keras.losses.Huber()}, "the loss"),
        ({"rate": 0.2}, "the optimizer's learning_rate"),
        ({"trainable": False}, "layer 1 (Embedding) trainable"),
    ],
)
def test_a_change_is_seen(change: dict[str, Any], name: str) -> None:
    first, second = settings(), settings(**change)
    differences = [key for key in first | second if first.get(key) != second.get(key)]
    assert differences[0] == name


def test_workers_may_have_seeds_and_names_of_their_own() -> None:
    assert settings(seed=1) == settings(seed=2)


def test_functions_are_not_compared() -> None:
    assert settings(loss=lambda y, p: y - p) == settings(loss=lambda y, p: p - y)
