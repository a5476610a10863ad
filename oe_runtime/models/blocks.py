"""What the click models share: inputs, embeddings, the linear part and the multi-layer part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from oe_runtime.data.schema import CATEGORIES, INTEGERS


class Seeds:
    """A different seed for each weight of a model, the same ones each time the model is built."""

    def __init__(self, seed: int) -> None:
        self._next = seed * 1000

    def next(self) -> int:
        """The next weight's seed."""
        self._next += 1
        return self._next


def inputs() -> tuple[Any, list[Any]]:
    """The 13 integers (B, 13) and one id input (B, 1) a field."""
    integers = keras.Input((len(INTEGERS),), dtype="float32", name="integers")
    return integers, [keras.Input((1,), dtype="int64", name=f"{c}_id") for c in CATEGORIES]


def embed(ids: Sequence[Any], field_rows: Sequence[int], dim: int, seeds: Seeds) -> Any:
    """(B, 26, dim): every field's own embedding C1 … C26."""
    rows = [
        keras.layers.Embedding(
            count,
            dim,
            embeddings_initializer=keras.initializers.RandomUniform(-0.05, 0.05, seed=seeds.next()),
            name=name,
        )(field)
        for name, count, field in zip(CATEGORIES, field_rows, ids, strict=True)
    ]
    return keras.layers.Concatenate(axis=1, name="embeddings")(rows)


def linear(integers: Any, ids: Sequence[Any], field_rows: Sequence[int], seeds: Seeds) -> Any:
    """(B, 1): one weight an id and one an integer, summed."""
    weights = [
        keras.layers.Embedding(count, 1, embeddings_initializer="zeros", name=f"{name}_linear")(field)
        for name, count, field in zip(CATEGORIES, field_rows, ids, strict=True)
    ]
    categories = keras.ops.sum(keras.layers.Concatenate(axis=1, name="linear_weights")(weights), axis=1)
    return keras.layers.Add(name="linear")([categories, dense(1, None, "linear_integers", seeds)(integers)])


def deep(embeddings: Any, integers: Any, hidden: Sequence[int], seeds: Seeds) -> Any:
    """(B, 1): ReLU layers over the concatenated embeddings and integers."""
    flat = keras.layers.Flatten(name="flat")(embeddings)
    x = keras.layers.Concatenate(name="deep_input")([flat, integers])
    for i, width in enumerate(hidden, start=1):
        x = dense(width, "relu", f"deep_{i}", seeds)(x)
    return dense(1, None, "deep_logit", seeds)(x)


def dense(width: int, activation: str | None, name: str, seeds: Seeds) -> Any:
    """A Dense layer whose initial values follow from the model's seed."""
    return keras.layers.Dense(
        width,
        activation=activation,
        kernel_initializer=keras.initializers.GlorotUniform(seed=seeds.next()),
        name=name,
    )
