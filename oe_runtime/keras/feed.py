"""How a step hands rows to the embedding layers while a model is traced.

A step runs outside the graph: the ids first, then the pull, then one compiled function. While a model is
called under `feeding(...)`, its `Embedding` layers turn to the given feed, once for every lookup, always in
the same order: a `Collect` writes down which layer looks up which ids, a `Supply` answers with rows that were
pulled before. There is one of each for TensorFlow's graphs (`supply`) and one for other backends
(`backends.one_by_one`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


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


def check_order(layers: Sequence[Any], number: int, layer: Any) -> None:
    """Raises RuntimeError unless lookup `number` of `layers`, whose rows were pulled, is that of `layer`."""
    if number >= len(layers) or layers[number] is not layer:
        raise RuntimeError(
            f"Embedding '{layer.name}' was not expected here: the model looks its embeddings up in "
            "another order when training=True than when training=False, which is not supported"
        )


def dependent_ids(layer: str, of: str = "other layers") -> ValueError:
    """The error of a model that computes ids from embeddings."""
    return ValueError(
        f"Embedding '{layer}': its ids are computed from the embeddings of {of}. "
        "All ids of a batch must be known before rows are pulled"
    )


def skeleton(data: Any) -> Any:
    """Equal for equal structures of dicts, lists and tuples."""
    if isinstance(data, dict):
        return tuple((k, skeleton(v)) for k, v in data.items())
    if isinstance(data, (list, tuple)):
        return (type(data), *(skeleton(v) for v in data))
    return None
