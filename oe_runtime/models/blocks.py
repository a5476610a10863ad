"""The common parts of the click models: inputs, embeddings, deep part, output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras

from oe_runtime.data.batch import MISSING_ID
from oe_runtime.data.row_schema import CRITEO, Category, Schema
from oe_runtime.models.shape import Shape


class Seeds:
    """A different seed for each weight of a model, the same each time the model is built."""

    def __init__(self, seed: int) -> None:
        self._next = seed * 1000

    def next(self) -> int:
        """Return the next weight's seed."""
        self._next += 1
        return self._next


# Names of the models' own layers, which a column's must not have.
_TAKEN = re.compile(
    r"(deep|bottom|top|cin)_.*|.*_id|.*_linear|integers|numbers|embeddings|linear(_.*)?|flat|logit|click|"
    r"vectors|products|.*_values"
)


class Fields:
    """A schema's inputs and the embedding layers over them."""

    def __init__(
        self,
        rows: Sequence[int],
        embedding: Callable[..., Any] | None = None,
        schema: Schema = CRITEO,
    ) -> None:
        """`rows[i]`: ids of category i; `embedding` makes layers as keras.layers.Embedding does."""
        self._categories = schema.categories
        self.names = table_names(schema)
        self.numbers: Any = None  # (B, numbers), unless there are none
        if schema.numbers:
            name = "integers" if all(one.whole for one in schema.numbers) else "numbers"
            self.numbers = keras.Input((len(schema.numbers),), dtype="float32", name=name)
        self.ids = [
            keras.Input((one.length,), dtype="int64", name=f"{name}_id")
            for name, one in zip(self.names, schema.categories, strict=True)
        ]
        self._rows = rows
        self._layer = embedding or keras.layers.Embedding

    @property
    def inputs(self) -> list[Any]:
        """The model's inputs: the numbers, if there are any, and the ids (B, length) of each category."""
        return [self.numbers, *self.ids] if self.numbers is not None else self.ids

    def embed(self, dim: int, seeds: Seeds) -> Any:
        """Return (B, categories, dim): every category's own embedding; None without categories."""
        initializers = [keras.initializers.RandomUniform(-0.05, 0.05, seed=seeds.next()) for _ in self.names]
        return self._lookup(dim, initializers, self.names, "embeddings")

    def linear(self, seeds: Seeds) -> Any:
        """Return (B, 1): one weight per id and one per number, summed."""
        names = [f"{name}_linear" for name in self.names]
        weights = self._lookup(1, [keras.initializers.Zeros()] * len(names), names, "linear_weights")
        parts = [] if weights is None else [keras.ops.sum(weights, axis=1)]
        if self.numbers is not None:
            parts.append(dense(1, None, "linear_integers", seeds)(self.numbers))
        return keras.layers.Add(name="linear")(parts) if parts[1:] else parts[0]

    def _lookup(self, dim: int, initializers: Sequence[Any], names: Sequence[str], name: str) -> Any:
        parts = []
        for rows, initializer, layer, ids, category in zip(
            self._rows, initializers, names, self.ids, self._categories, strict=True
        ):
            found = self._layer(rows, dim, embeddings_initializer=initializer, name=layer)(ids)
            parts.append(_pooled(found, ids, category) if category.several else found)
        return keras.layers.Concatenate(axis=1, name=name)(parts) if parts[1:] else (parts or [None])[0]


def table_names(schema: Schema) -> list[str]:
    """Return the names of the categories' tables: the columns', as far as layers can be called so."""
    found: list[str] = []
    for one in schema.categories:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", one.name)
        if not re.match("[A-Za-z0-9]", name) or _TAKEN.fullmatch(name):
            name = f"column_{name}"
        while name in found:
            name += "_2"
        found.append(name)
    return found


def _pooled(embeddings: Any, ids: Any, category: Category) -> Any:
    """Return (B, 1, dim): the mean or sum over the values; zero for a row without one."""
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(ids, MISSING_ID), "float32"), 2)
    total = keras.ops.sum(embeddings * there, axis=1, keepdims=True)
    if category.pooling == "sum":
        return total
    return total / keras.ops.maximum(keras.ops.sum(there, axis=1, keepdims=True), 1.0)


def deep(embeddings: Any, numbers: Any, shape: Shape, seeds: Seeds) -> Any:
    """Return (B, 1): ReLU layers over the concatenated embeddings and numbers; one of them may be None."""
    parts = [] if embeddings is None else [keras.layers.Flatten(name="flat")(embeddings)]
    if numbers is not None:
        parts.append(numbers)
    x = keras.layers.Concatenate(name="deep_input")(parts) if parts[1:] else parts[0]
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
