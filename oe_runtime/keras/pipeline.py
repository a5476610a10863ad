"""Prefetched rows: those of the next batch are pulled while a batch computes.

A second thread reads batch k + 1, makes its ids unique and pulls its rows during the compute of batch k.
After the push of k, the rows that both batches have are pulled again; or all rows, if anything else has
changed rows in between: a restored checkpoint, a save (which evicts), another model's push. So the results
are, bit for bit, those of sequential steps.

Where a following batch is known and there is one worker, the second thread also does the push and that pull,
while the caller reads input and runs callbacks. The next step raises the errors of the push. With `staleness`
1 the push of k goes out while k + 1 computes, on rows that lack only that push. In both cases save, evaluate
and every other request to the servers waits for the push.

Where rows are on a drive, a third thread reads batch k + 2 and tells the servers which rows it has: they read
them from the drive until k + 2 is pulled.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import GeneratorType
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from oe_runtime.client import Client
from oe_runtime.keras.program import Prepared
from oe_runtime.keras.step import Steps
from oe_runtime.keras.step_bodies import Body
from oe_runtime.support.background import Background

_END = object()
# What reads a batch, and whose it is: an iterator's, or the data themselves.
_Source: TypeAlias = tuple[Any, Callable[[], Any]]


@dataclass(frozen=True)
class _Batch:
    data: Any  # or _END
    prepared: Prepared | None = None  # None: of a new structure
    # The batch after this one, without its rows, and whose it is; None: it is not known yet.
    after: tuple[Any, Future[_Batch]] | None = None


class Pipeline:
    """Runs training or testing steps over iterators of batches."""

    def __init__(self, steps: Steps, client: Client, body: Body, *, ahead: bool, staleness: int = 0) -> None:
        self._steps = steps
        self._client = client
        self._body = body
        self._ahead = ahead
        self._staleness = staleness
        self._thread: Background | None = None
        self._reader: Background | None = None
        self._announced: list[Any] = []
        self._next: tuple[Any, Future[_Batch]] | None = None  # what the thread prepares, and whose it is

    def announce(self, data: Any, after: Any = None) -> None:
        """Announce the (x, y, sample_weight) of the `train_on_batch` after the next, and of one more."""
        self._announced = [one for one in (data, after) if one is not None and self._ahead]

    def __call__(self, iterator: Any) -> Any:
        """Run one step; raise StopIteration at the end. A batch's error is raised at its own step."""
        following: list[_Source]
        if isinstance(iterator, GeneratorType):  # from train_on_batch, with one batch
            data = next(iterator)
            announced, self._announced = self._announced, []
            batch = self._take(data) or _Batch(data)
            following = [(one, partial(_given, one)) for one in announced]
        else:
            batch = self._take(iterator) or _Batch(next(iterator, _END))
            if batch.data is _END:
                raise StopIteration
            following = [(iterator, partial(next, iterator, _END))] * 2
        prepared = batch.prepared
        try:
            if prepared is None or prepared.connection != self._client.connection:
                prepared = self._steps.prepare(self._body, batch.data)
                self._client.settle()
                self._steps.refresh(prepared)
            else:
                self._steps.refresh(prepared, self._staleness)
        except Exception:
            self._next = batch.after  # what was read of the input is not lost
            raise
        if self._ahead and following:
            future = self._in_thread().submit(self._prepare, following, prepared, batch.after)
            self._next = (following[0][0], future)
        later = self._staleness or (self._next is not None and self._steps.alone)
        result = self._steps.finish(prepared, self._in_thread() if later else None)
        if self._next is not None and later and not self._staleness:
            owner, future = self._next
            self._next = (owner, self._in_thread().submit(self._catch_up, future))
        return result

    def _take(self, owner: Any) -> _Batch | None:
        """Return what was prepared for this step, if anything; drop what was prepared for another."""
        if not self._staleness:
            self._client.settle()
        waiting, self._next = self._next, None
        return waiting[1].result() if waiting is not None and _same(waiting[0], owner) else None

    def _prepare(
        self, following: list[_Source], before: Prepared, planned: tuple[Any, Future[_Batch]] | None
    ) -> _Batch:
        (owner, draw), *further = following
        # Both may read from one iterator: first this batch, then the one after.
        batch = planned[1].result() if planned and _same(planned[0], owner) else _Batch(draw())
        if batch.data is _END:
            return batch
        after = None
        if further and self._client.reads_ahead:
            after = (further[0][0], self._in_reader().submit(self._look_ahead, further[0][1]))
        with suppress(Exception):  # the batch's own step tries again, and raises it
            before_it = None if self._staleness else before
            prepared = self._steps.prepare_ahead(self._body, batch.data, before_it, batch.prepared)
            return _Batch(batch.data, prepared, after)
        return _Batch(batch.data, None, after)

    def _look_ahead(self, draw: Callable[[], Any]) -> _Batch:
        """Read one more batch and announce its rows."""
        data = draw()
        if data is _END:
            return _Batch(data)
        with suppress(Exception):  # as above
            prepared = self._steps.plan_ahead(self._body, data)
            if prepared is not None:
                self._steps.read_ahead(prepared)
            return _Batch(data, prepared)
        return _Batch(data)

    def _catch_up(self, following: Future[_Batch]) -> _Batch:
        """Bring the result of `_prepare` up to date. The single thread has pushed before."""
        batch = following.result()
        if batch.prepared is not None:
            with suppress(Exception):  # as above
                self._steps.refresh(batch.prepared)
        return batch

    def _in_thread(self) -> Background:
        if self._thread is None:
            self._thread = Background("oe-pull-ahead")
        return self._thread

    def _in_reader(self) -> Background:
        """Return the other thread: a push must not wait for input."""
        if self._reader is None:
            self._reader = Background("oe-read-ahead")
        return self._reader


def _given(data: Any) -> Any:
    return data


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
    """Whether two iterators are one, or two (x, y, sample_weight) have the same array objects."""
    ours, theirs = keras.tree.flatten(a), keras.tree.flatten(b)
    return len(ours) == len(theirs) and all(x is y for x, y in zip(ours, theirs, strict=True))
