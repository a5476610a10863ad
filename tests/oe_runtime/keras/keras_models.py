"""Small models and data for the tests here."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

import oe_runtime.keras as embed
from oe_runtime.keras.optimizers import DECLARED

ROWS = 80


OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.2, epsilon=1e-6),
    "adam": lambda: keras.optimizers.Adam(0.02, beta_1=0.8, beta_2=0.99, epsilon=1e-6),
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.2, momentum=0.9, nesterov=True),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1,
        l1_regularization_strength=0.001,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.1,
    ),
    "adadelta": lambda: keras.optimizers.Adadelta(2.0, rho=0.9, epsilon=1e-4),
    "amsgrad": lambda: keras.optimizers.Adam(0.02, amsgrad=True, epsilon=1e-6),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, epsilon=1e-6),
    "adamax": lambda: keras.optimizers.Adamax(0.02, epsilon=1e-6),
    "nadam": lambda: keras.optimizers.Nadam(0.02, epsilon=1e-6),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.005, momentum=0.5, centered=True, epsilon=1e-5),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "adam_async": lambda: embed.AdamAsync(0.02, epsilon=1e-6),
    "adagrad_decay": lambda: embed.AdagradDecay(0.1, accumulator_decay_step=4),
    "rowwise_adagrad": lambda: embed.RowWiseAdagrad(0.1, epsilon=1e-6),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.7),
        weight_decay=0.05,
        epsilon=1e-6,
    ),
    # Those that Keras does not have, with their defaults.
    **{name: functools.partial(kind, 0.02) for name, kind in DECLARED.items()},
}


def two_fields(layer: Any = keras.layers.Embedding, rows: int = ROWS) -> Any:
    """Two fields with tables of width 4, one with a linear table of width 1 too, and a dense input."""
    a = keras.Input((1,), dtype="int64", name="a")
    b = keras.Input((1,), dtype="int64", name="b")
    numbers = keras.Input((3,), name="numbers")
    parts = [
        keras.layers.Flatten(name="flat_a")(layer(rows, 4, name="table_a")(a)),
        keras.layers.Flatten(name="flat_b")(layer(rows, 4, name="table_b")(b)),
        numbers,
    ]
    x = keras.layers.Concatenate(name="all")(parts)
    x = keras.layers.Dense(8, activation="relu", name="hidden")(x)
    logit = keras.layers.Dense(1, name="logit")(x)
    linear = keras.layers.Flatten(name="flat_linear")(layer(rows, 1, "zeros", name="linear_a")(a))
    return keras.Model([a, b, numbers], keras.layers.Activation("sigmoid", name="click")(logit + linear))


def shared_field(layer: Any = keras.layers.Embedding, rows: int = ROWS) -> Any:
    """One table looked up twice: by a field of three ids and by a field of one."""
    many = keras.Input((3,), dtype="int64", name="many")
    one = keras.Input((1,), dtype="int64", name="one")
    table = layer(rows, 4, keras.initializers.RandomNormal(stddev=0.1, seed=5), name="shared")
    x = keras.layers.Concatenate(axis=1, name="both")([table(many), table(one)])
    x = keras.layers.Dense(4, activation="tanh", name="hidden")(keras.layers.Flatten(name="flat")(x))
    return keras.Model([many, one], keras.layers.Dense(1, activation="sigmoid", name="click")(x))


def permutations(batches: int, rows: int = ROWS, seed: int = 0) -> tuple[list[Any], Any]:
    """Data for `two_fields` in which every batch of `rows` has every id of every field once."""
    rng = np.random.default_rng(seed)
    fields = [np.concatenate([rng.permutation(rows) for _ in range(batches)])[:, None] for _ in range(2)]
    numbers = rng.random((rows * batches, 3), dtype=np.float32)
    labels = ((fields[0] % 3 + fields[1] % 2 + numbers[:, :1]) > 2).astype(np.float32)
    return [*fields, numbers], labels


def random_ids(samples: int, rows: int = ROWS, seed: int = 0) -> tuple[list[Any], Any]:
    """Data for `two_fields` with ids that repeat."""
    rng = np.random.default_rng(seed)
    fields = [rng.integers(0, rows, (samples, 1)) for _ in range(2)]
    numbers = rng.random((samples, 3), dtype=np.float32)
    labels = ((fields[0] % 3 + fields[1] % 2 + numbers[:, :1]) > 2).astype(np.float32)
    return [*fields, numbers], labels


def copy_rows(model: Any, stock: Any) -> None:
    """Gives the embeddings of `stock` the rows of the tables, and its other layers the model's weights."""
    for name, spec in model.tables.items():
        table = model.get_layer(name).table
        stock.get_layer(name).set_weights([table.rows(np.arange(spec.input_dim))])
    for layer in stock.layers:
        if layer.name not in model.tables:
            layer.set_weights(model.get_layer(layer.name).get_weights())


def array(tensor: Any) -> Any:
    """A tensor of any backend as a numpy array."""
    return keras.ops.convert_to_numpy(tensor)


def pair(optimizer=lambda: keras.optimizers.SGD(0.5), **options):
    """A distributed model and the stock model with the same weights, compiled alike."""
    stock = two_fields()
    model = embed.distributed_model(stock)
    model.compile(optimizer(), "binary_crossentropy", **options)
    copy_rows(model, stock)
    stock.compile(optimizer(), "binary_crossentropy", **options)
    return model, stock


def same(model, stock, x, atol=1e-5):
    """Both predict alike. (The stock model is called without tracing it once more.)"""
    np.testing.assert_allclose(model.predict(x, verbose=0, batch_size=1000), array(stock(x)), atol=atol)
