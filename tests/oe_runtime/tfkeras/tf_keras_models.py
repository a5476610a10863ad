"""Small models of tf-keras and data for the tests here."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("tf_keras", exc_type=ImportError)  # test modules import it from here
embed = pytest.importorskip("oe_runtime.tf_keras", exc_type=ImportError)

ROWS = 80


def two_fields(layer: Any = keras.layers.Embedding, **options: Any) -> Any:
    """Two fields with tables of width 4, one of them also with a linear one of width 1, and a dense input."""
    a = keras.Input((1,), dtype="int64", name="a")
    b = keras.Input((1,), dtype="int64", name="b")
    numbers = keras.Input((3,), name="numbers")
    flat = keras.layers.Flatten
    x = keras.layers.Concatenate()(
        [
            flat()(layer(ROWS, 4, name="table_a", **options)(a)),
            flat()(layer(ROWS, 4, name="table_b")(b)),
            numbers,
        ]
    )
    x = keras.layers.Dense(8, activation="relu", name="hidden")(x)
    logit = keras.layers.Dense(1, name="logit")(x) + flat()(layer(ROWS, 1, "zeros", name="linear_a")(a))
    return keras.Model([a, b, numbers], keras.layers.Activation("sigmoid", name="click")(logit))


def any_ids(rows: int, dim: int, *args: Any, **options: Any) -> Any:
    """Table b has an input_dim, the others take any id."""
    return embed.Embedding(rows if options["name"] == "table_b" else -1, dim, *args, **options)


def random_ids(samples: int, seed: int = 0) -> tuple[list[Any], Any]:
    """Ids that repeat."""
    rng = np.random.default_rng(seed)
    fields = [rng.integers(0, ROWS, (samples, 1)) for _ in range(2)]
    return _labelled(fields, rng)


def permutations(batches: int) -> tuple[list[Any], Any]:
    """Every batch of ROWS has every id of every field once."""
    rng = np.random.default_rng(0)
    fields = [np.concatenate([rng.permutation(ROWS) for _ in range(batches)])[:, None] for _ in range(2)]
    return _labelled(fields, rng)


def _labelled(fields: list[Any], rng: Any) -> tuple[list[Any], Any]:
    numbers = rng.random((len(fields[0]), 3), dtype=np.float32)
    return [*fields, numbers], ((fields[0] % 3 + fields[1] % 2 + numbers[:, :1]) > 2).astype(np.float32)


def rows(model: Any, name: str) -> Any:
    """All rows of one of a distributed model's tables with an input_dim."""
    return model.get_layer(name).table.rows(np.arange(ROWS))


def pair(optimizer: Any, *, table_a: Any = MappingProxyType({}), **options: Any) -> tuple[Any, Any]:
    """A distributed model and a plain one with the same weights, compiled alike."""
    plain = two_fields(**table_a)
    model = embed.distributed_model(plain, **options)
    for one in (model, plain):
        one.compile(optimizer(), "binary_crossentropy", metrics=["AUC"])
    for name in model.tables:
        plain.get_layer(name).set_weights([rows(model, name)])
    return model, plain


def trained(layer: Any = keras.layers.Embedding, epochs: int = 1) -> Any:
    """A model after some training."""
    model = embed.distributed_model(two_fields(layer))
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.02)), "binary_crossentropy")
    if epochs:
        x, y = random_ids(120)
        model.fit(x, y, batch_size=50, epochs=epochs, shuffle=False, verbose=0)
    return model
