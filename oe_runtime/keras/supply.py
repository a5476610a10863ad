"""The feeds of a step on TensorFlow, whose graph is traced once for batches of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from oe_runtime.keras.feed import check_order

# By graph and operation of a tensor: the lookups that it answers, side by side, with one id per example.
Answers = dict[tuple[int, str], tuple[int, ...]]


class Plain:
    """A feed without shorter ways: each None lets Keras compute the result."""

    def product(self, *_inputs: Any) -> Any:
        """Return None."""
        return None

    summed = joined = product


class Collect(Plain):
    """Records the lookups of a model's call; `answers` are the tensors in place of the rows."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.ids: list[Any] = []
        self.answers: list[Any] = []

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Return zeros; nothing computed from them is kept."""
        answer = tf.zeros(tf.concat([tf.shape(ids), [layer.output_dim]], 0), layer.rows_dtype)
        answer.set_shape((*ids.shape, layer.output_dim))
        self.layers.append(layer)
        self.ids.append(ids)
        self.answers.append(answer)
        return answer


class Supply:
    """Answers the lookups, in the order of `Collect`, with rows[i] of shape (number of ids, dim).

    `together`: by lookups with one id per example, their rows side by side, (examples, lookups, dim).
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rows: Sequence[Any],
        together: Mapping[tuple[int, ...], Any] = MappingProxyType({}),
        products: Any = None,  # by_row.Products
    ) -> None:
        self._layers = layers
        self._rows = rows
        self._next = 0
        self._products = products
        self._together = together
        self._answers: Answers = {}

    def part(self, cut: Callable[[Any], Any]) -> Supply:
        """Return the same for a part of the batch, which `cut` takes from the rows of a lookup."""
        return Supply(self._layers, [cut(rows) for rows in self._rows])

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Return the rows of the next lookup in the shape of `ids`."""
        check_order(self._layers, self._next, layer)
        rows = self._rows[self._next]
        self._next += 1
        if ids.shape.rank is not None and None not in ids.shape[1:]:
            shape: Any = [-1 if ids.shape.rank else 1, *ids.shape[1:], layer.output_dim]
            if not ids.shape.rank:
                shape = [layer.output_dim]
        else:
            shape = tf.concat([tf.shape(ids), [layer.output_dim]], 0)
        rows = tf.reshape(rows, shape)
        rows.set_shape((*ids.shape, layer.output_dim))
        if ids.shape.rank and all(n == 1 for n in ids.shape[1:]):
            self._note(rows, (self._next - 1,))
        return rows

    def joined(self, inputs: Sequence[Any], axis: int) -> Any:
        """Return the concatenation of `inputs` if all are lookups of tables of one dim, else None."""
        if tf.executing_eagerly() or not all(isinstance(t, tf.Tensor) for t in inputs):
            return None
        known = [self._answers.get((id(t.graph), t.op.name), ()) for t in inputs]
        whole = self._together.get(tuple(lookup for lookups in known for lookup in lookups))
        rank = inputs[0].shape.rank
        if whole is None or not all(known) or len(inputs) < 2 or axis % rank not in (1, rank - 1):
            return None
        if axis % rank == rank - 1:
            shape = [-1, *inputs[0].shape[1:-1], whole.shape[1] * whole.shape[2]]
        else:
            shape = [-1, whole.shape[1], *inputs[0].shape[2:]]
        result = tf.reshape(whole, shape)
        self._note(result, tuple(lookup for lookups in known for lookup in lookups))
        return result

    def _note(self, answer: Any, lookups: tuple[int, ...]) -> None:
        if not tf.executing_eagerly():
            self._answers[id(answer.graph), answer.op.name] = lookups

    def product(self, inputs: Any, kernel: Any) -> Any:
        """Return inputs @ kernel if it needs no rows per example, else None."""
        return None if self._products is None else self._products.product(self._answers, inputs, kernel)

    def summed(self, inputs: Any) -> Any:
        """Return (examples, lookups, dim) summed over the lookups likewise, else None."""
        return None if self._products is None else self._products.summed(self._answers, inputs)
