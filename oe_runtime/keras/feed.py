"""How rows reach the embedding layers while a model is traced.

A step runs outside the graph: first the ids, then the pull, then one compiled function. While a model is
called under `feeding(...)`, its `Embedding` layers ask the given feed, once per lookup, always in the same
order. A `Collect` records which layer looks up which ids; a `Supply` answers with rows that were pulled
before. TensorFlow's graphs have one of each (`supply`), other backends too (`backends.one_by_one`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Feed(Protocol):
    """Answers the lookups of a model's call."""

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Return the embeddings of `ids` as the servers give them, of shape ids.shape + (dim,)."""


_current: contextvars.ContextVar[Feed | None] = contextvars.ContextVar("oe_runtime_keras_feed", default=None)


def current() -> Feed | None:
    """Return the active feed, or None outside of a step."""
    return _current.get()


@contextlib.contextmanager
def feeding(feed: Feed) -> Iterator[None]:
    """Let `feed` answer the lookups of every model called inside."""
    token = _current.set(feed)
    try:
        yield
    finally:
        _current.reset(token)


def check_order(layers: Sequence[Any], number: int, layer: Any) -> None:
    """Raise RuntimeError unless lookup `number` of `layers`, whose rows were pulled, is that of `layer`."""
    if number >= len(layers) or layers[number] is not layer:
        raise RuntimeError(
            f"Embedding '{layer.name}' was not expected here: the model looks its embeddings up in "
            "another order when training=True than when training=False, which is not supported"
        )


def dependent_ids_error(layer: str, of: str = "other layers") -> ValueError:
    """Return the error for a model that computes ids from embeddings."""
    return ValueError(
        f"Embedding '{layer}': its ids are computed from the embeddings of {of}. "
        "All ids of a batch must be known before rows are pulled"
    )


def skeleton(data: Any) -> Any:
    """Return a key that is equal for equal structures of dicts, lists and tuples."""
    if isinstance(data, dict):
        return tuple((k, skeleton(v)) for k, v in data.items())
    if isinstance(data, (list, tuple)):
        return (type(data), *(skeleton(v) for v in data))
    return None
