"""How a step hands rows to the embedding layers while a model is traced.

A step runs outside the graph: the ids first, then the pull, then one compiled function. While a model is
called under `feeding(...)`, its `Embedding` layers turn to the given feed, once for every lookup, always in
the same order: `Collect` writes down which layer looks up which ids, `Supply` answers with rows that were
pulled before.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Feed(Protocol):
    """Answers the lookups of a model's call."""

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Returns the embeddings of `ids` as they come from servers, of shape ids.shape + (dim,)."""
        ...


_current: contextvars.ContextVar[Feed | None] = contextvars.ContextVar("oe_runtime_keras_feed", default=None)


def current() -> Feed | None:
    """The feed in force, or None outside of a step."""
    return _current.get()


@contextlib.contextmanager
def feeding(feed: Feed) -> Iterator[None]:
    """Makes `feed` answer the lookups of every model called inside."""
    token = _current.set(feed)
    try:
        yield
    finally:
        _current.reset(token)


class Collect:
    """Writes down the lookups of a model's call; `answers` are the tensors that stood in for the rows."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.ids: list[Any] = []
        self.answers: list[Any] = []

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Returns zeros: nothing that is computed from them is kept."""
        answer = tf.zeros(tf.concat([tf.shape(ids), [layer.output_dim]], 0), layer.rows_dtype)
        answer.set_shape((*ids.shape, layer.output_dim))
        self.layers.append(layer)
        self.ids.append(ids)
        self.answers.append(answer)
        return answer


class Supply:
    """Answers the lookups, in the order `Collect` saw them, with rows[i] of shape (number of ids, dim)."""

    def __init__(self, layers: Sequence[Any], rows: Sequence[Any]) -> None:
        self._layers = layers
        self._rows = rows
        self._next = 0

    def part(self, cut: Callable[[Any], Any]) -> Supply:
        """The same for a part of the batch, which `cut` takes from the rows of a lookup."""
        return Supply(self._layers, [cut(rows) for rows in self._rows])

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Returns the rows of the next lookup in the shape of `ids`."""
        if self._next >= len(self._layers) or self._layers[self._next] is not layer:
            raise RuntimeError(
                f"Embedding '{layer.name}' was not expected here: the model looks its embeddings up in "
                "another order when training=True than when training=False, which is not supported"
            )
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
        return rows
