"""How rows reach the embedding layers while a model is traced.

A step runs outside the graph: first the ids, then the pull, then one compiled function. While a model is
called under `feeding(...)`, its `Embedding` layers ask the given feed, once per lookup, always in the same
order. A `Collect` records which layer looks up which ids; a `Supply` answers with rows that were pulled
before. TensorFlow's graphs have one of each (`supply`), other backends too (`backends.one_by_one`).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from oe_runtime.errors import KeyRangeError


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


def to_keys(ids: Any, layer: str) -> NDArray[np.int64]:
    """Return an array of ids of any shape and type as the client takes it: flat int64.

    Floats lose their fraction, as in Keras. Raises KeyRangeError as `check_exact` does.
    """
    flat = np.ascontiguousarray(ids).reshape(-1)
    if flat.dtype.kind not in "iub":  # "f", and "V" for bfloat16
        check_exact(flat, flat.dtype.name, layer)
    return flat.astype(np.int64, copy=False)


def check_exact(ids: NDArray[Any], dtype: str, layer: str) -> None:
    """Raise KeyRangeError for an id at or above the first integer that floats of `dtype` cannot tell apart.

    It may be another id, rounded, which would share the row.
    """
    limit = 2 ** (int(ml_dtypes.finfo(dtype).nmant) + 1)  # type: ignore[no-untyped-call]
    sizes = np.abs(ids.astype(np.float64, copy=False))
    if sizes.max(initial=0) < limit:  # not of NaN
        return
    value = float(ids[int(np.argmax(~(sizes < limit)))])
    raise KeyRangeError(
        f"Embedding '{layer}': id {value:.0f} came as {dtype}, in which ids from {limit} on cannot be told "
        'apart and would share rows; give the model\'s ids as integers: keras.Input(shape, dtype="int64")'
    )


class NanCauses:
    """Finds causes of gradients that are not finite in the training batches of a model.

    Keras's pooling keeps a NaN away from the rows that cause it. It comes through the dense weights, one step
    later, to all rows.
    """

    def __init__(self) -> None:
        self._last: Callable[[str], str] = _no_cause

    def begin_step(self, cause: Callable[[str], str]) -> Callable[[], str]:
        """Begin a step; return a function that returns its cause, or that of the step before, or "".

        `cause` returns that of this step. It is called with the words for its batch.
        """
        before, self._last = self._last, cause
        return lambda: cause("the batch") or before("the batch before")


def _no_cause(_batch: str) -> str:
    return ""


def padding_cause(
    layers: Sequence[Any], ids: Sequence[NDArray[Any]], examples: int, batch: str = "the batch"
) -> str:
    """Return how padding makes gradients NaN, if a batch has an example of padding alone; "" otherwise.

    `layers[i]` looks up `ids[i]`, flat, equally many for each of the `examples`.
    """
    for layer, flat in zip(layers, ids, strict=True):
        if not layer.mask_zero or not examples or not len(flat) or len(flat) % examples:
            continue
        padded = np.flatnonzero(~flat.reshape(examples, -1).any(axis=1))
        if len(padded):
            return (
                f"example {padded[0]} of {batch} has only padding (id 0) in Embedding '{layer.name}', and a "
                "mean over positions that are all masked is 0/0: if the model takes one, give such examples "
                "an id of their own"
            )
    return ""


def skeleton(data: Any) -> Any:
    """Return a key that is equal for equal structures of dicts, lists and tuples."""
    if isinstance(data, dict):
        return tuple((k, skeleton(v)) for k, v in data.items())
    if isinstance(data, (list, tuple)):
        return (type(data), *(skeleton(v) for v in data))
    return None
