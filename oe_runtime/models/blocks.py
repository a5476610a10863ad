"""The common parts of the click models: inputs, embeddings, deep part, output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from oe_runtime.data.schema import CATEGORIES, INTEGERS
from oe_runtime.models.shape import Shape


class Seeds:
    """A different seed for each weight of a model, the same each time the model is built."""

    def __init__(self, seed: int) -> None:
        self._next = seed * 1000

    def next(self) -> int:
        """Return the next weight's seed."""
        self._next += 1
        return self._next


class Fields:
    """Criteo's inputs and the embedding layers over them."""

    def __init__(self, rows: Sequence[int], embedding: Callable[..., Any] | None = None) -> None:
        """`rows[i]`: ids of field i; `embedding` makes layers as keras.layers.Embedding does."""
        self.integers: Any = keras.Input((len(INTEGERS),), dtype="float32", name="integers")
        self.ids = [keras.Input((1,), dtype="int64", name=f"{c}_id") for c in CATEGORIES]
        self._rows = rows
        self._layer = embedding or keras.layers.Embedding

    @property
    def inputs(self) -> list[Any]:
        """The model's inputs: the 13 integers (B, 13) and one id (B, 1) per field."""
        return [self.integers, *self.ids]

    def embed(self, dim: int, seeds: Seeds) -> Any:
        """Return (B, 26, dim): every field's own embedding C1 … C26."""
        initializers = [keras.initializers.RandomUniform(-0.05, 0.05, seed=seeds.next()) for _ in CATEGORIES]
        return self._lookup(dim, initializers, CATEGORIES, "embeddings")

    def linear(self, seeds: Seeds) -> Any:
        """Return (B, 1): one weight per id and one per integer, summed."""
        names = [f"{c}_linear" for c in CATEGORIES]
        weights = self._lookup(1, [keras.initializers.Zeros()] * len(names), names, "linear_weights")
        integers = dense(1, None, "linear_integers", seeds)(self.integers)
        return keras.layers.Add(name="linear")([keras.ops.sum(weights, axis=1), integers])

    def _lookup(self, dim: int, initializers: Sequence[Any], names: Sequence[str], name: str) -> Any:
        parts = [
            self._layer(rows, dim, embeddings_initializer=initializer, name=layer)(ids)
            for rows, initializer, layer, ids in zip(self._rows, initializers, names, self.ids, strict=True)
        ]
        return keras.layers.Concatenate(axis=1, name=name)(parts)


def deep(embeddings: Any, integers: Any, shape: Shape, seeds: Seeds) -> Any:
    """Return (B, 1): ReLU layers over the concatenated embeddings and integers."""
    flat = keras.layers.Flatten(name="flat")(embeddings)
    x = keras.layers.Concatenate(name="deep_input")([flat, integers])
    for i, width in enumerate(shape.hidden, start=1):
        x = dense(width, "relu", f"deep_{i}", seeds, dtype=shape.dtype)(x)
    return dense(1, None, "deep_logit", seeds)(x)


def dense(
    width: int, activation: str | None, name: str, seeds: Seeds, *, bias: bool = True, dtype: str = "float32"
) -> Any:
    """Return a Dense layer whose initial values follow from the model's seed."""
    return keras.layers.Dense(
        width,
        activation=activation,
        use_bias=bias,
        kernel_initializer=keras.initializers.GlorotUniform(seed=seeds.next()),
        name=name,
        dtype=dtype,
    )


def click_model(name: str, fields: Fields, parts: Sequence[Any]) -> Any:
    """Return the model whose click probability is the sigmoid of the sum of `parts`, each (B, 1)."""
    logit = keras.layers.Add(name="logit")(parts) if parts[1:] else parts[0]
    probability = keras.layers.Activation("sigmoid", dtype="float32", name="click")(logit)
    return keras.Model(fields.inputs, probability, name=name)
