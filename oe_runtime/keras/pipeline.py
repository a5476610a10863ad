"""Prefetched rows: those of the next batch are pulled while a batch computes.

A second thread reads batch k + 1, makes its ids unique and pulls its rows during the compute of batch k.
After the push of k, the rows that both batches have are pulled again; or all rows, if anything else has
changed rows in between: a restored checkpoint, a save (which evicts), another model's push. So the results
are, bit for bit, those of sequential steps.

Where a following batch is known and there is one worker, the second thread also does the push and that pull,
while the caller reads input and runs callbacks. The next step raises the errors of the push. With `staleness`
1 the push of k goes out while k + 1 computes, on rows that lack only that push. In both cases save, evaluate
and every other request to the servers waits for the push.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import GeneratorType
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.client import Client
from oe_runtime.keras.bodies import Body
from oe_runtime.keras.program import Prepared
from oe_runtime.keras.step import Steps

_END = object()


class Pipeline:
    """Runs training or testing steps over iterators of batches."""

    def __init__(self, steps: Steps, client: Client, body: Body, *, ahead: bool, staleness: int = 0) -> None:
        self._steps = steps
        self._client = client
        self._body = body
        self._ahead = ahead
        self._staleness = staleness
        self._thread: ThreadPoolExecutor | None = None
        self._announced: Any = None
        # What the thread prepares: its owner (an iterator, or the data themselves), and the (data, Prepared).
        self._next: tuple[Any, Future[tuple[Any, Prepared | None]]] | None = None

    def announce(self, data: Any) -> None:
        """Announce the (x, y, sample_weight) of the `train_on_batch` after the next one."""
        self._announced = data if self._ahead else None

    def __call__(self, iterator: Any) -> Any:
        """Run one step; raise StopIteration at the end. A batch's error is raised at its own step."""
        following: Callable[[], Any] | None
        if isinstance(iterator, GeneratorType):  # from train_on_batch, with one batch
            data = next(iterator)
            announced, self._announced = self._announced, None
            _, prepared = self._take(lambda owner: _same(owner, data)) or (data, None)
            owner, following = announced, None if announced is None else lambda: announced
        else:
            data, prepared = self._take(lambda owner: owner is iterator) or (next(iterator, _END), None)
            if data is _END:
                raise StopIteration
            owner, following = iterator, lambda: next(iterator, _END)
        if prepared is None or prepared.connection != self._client.connection:
            prepared = self._steps.prepare(self._body, data)
            self._client.settle()
            self._steps.refresh(prepared)
        else:
            self._steps.refresh(prepared, self._staleness)
        if self._ahead and following is not None:
            self._next = (owner, self._in_thread().submit(self._prepare, following, prepared))
        later = self._staleness or (self._next is not None and self._steps.alone)
        result = self._steps.finish(prepared, self._in_thread() if later else None)
        if self._next is not None and later and not self._staleness:
            self._next = (owner, self._in_thread().submit(self._catch_up, self._next[1]))
        return result

    def _take(self, is_mine: Callable[[Any], bool]) -> tuple[Any, Prepared | None] | None:
        """Return what was prepared for this step, if anything; drop what was prepared for another."""
        waiting, self._next = self._next, None
        if not self._staleness:
            self._client.settle()
        return waiting[1].result() if waiting is not None and is_mine(waiting[0]) else None

    def _prepare(self, following: Callable[[], Any], before: Prepared) -> tuple[Any, Prepared | None]:
        data = following()
        if data is _END:
            return data, None
        return data, self._steps.prepare_ahead(self._body, data, None if self._staleness else before)

    def _catch_up(self, following: Future[tuple[Any, Prepared | None]]) -> tuple[Any, Prepared | None]:
        """Bring the result of `_prepare` up to date. The single thread has pushed before."""
        data, prepared = following.result()
        if prepared is not None:
            self._steps.refresh(prepared)
        return data, prepared

    def _in_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "oe-pull-ahead")
        return self._thread


def pulling(dataset: Any, model: Any, steps: int | None = None) -> Any:
    """Return the dataset unchanged, because `fit` prefetches the rows (OpenEmbedding's function).

    `steps` has no effect. Raises ValueError unless `dataset` is a tf.data.Dataset and `model` is compiled.
    """
    del steps
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(f"dataset must be a tf.data.Dataset, not {type(dataset).__name__}")
    if not getattr(model, "compiled", False):
        raise ValueError("compile the model before pulling(dataset, model)")
    return dataset


def _same(a: Any, b: Any) -> bool:
    """Whether two (x, y, sample_weight) have the same array objects."""
    ours, theirs = keras.tree.flatten(a), keras.tree.flatten(b)
    return len(ours) == len(theirs) and all(x is y for x, y in zip(ours, theirs, strict=True))
