"""Ranges of the input, shared by the workers of a job: each is read once an epoch, by whoever comes first.

The counterpart of DeepRec's WorkQueue, for asynchronous training, where a slow worker takes fewer ranges and
holds nobody up. (Synchronous workers split each batch instead, see `Batch.part`.) `WorkQueue` is
the state alone, plain values in and out; `shared_queue.SharedWorkQueue` keeps one in a directory.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oe_runtime.data.errors import DataError


class Range(NamedTuple):
    """A part of the input: bytes of a plain text file, whose lines are those that begin in it; else rows.

    Files that can only be read from their begin (compressed ones, TFRecord) are one range of all their bytes.
    """

    file: str
    start: int
    stop: int


class Work(NamedTuple):
    """A range that a worker has taken."""

    number: int  # ranges are numbered as they are given out, through all epochs
    epoch: int
    range: Range
    done: int  # rows of it that were reported already, by a worker that is gone or before a restart


@dataclass
class _Open:
    done: int = 0
    worker: str | None = None  # None: comes back to the next who asks


class WorkQueue:
    """Which ranges were taken, how far they are, and which are finished.

    A worker reports rows as it trains on them. What a lost worker had not finished comes back, from its last
    report on; so each row is trained on once, but for those between a last report and the loss.
    """

    def __init__(self, ranges: Sequence[Range], epochs: int = 1, seed: int | None = None) -> None:
        """`seed` shuffles the ranges, anew in each epoch; None takes them in their order."""
        if not ranges:
            raise DataError("there is nothing to read: the work queue has no ranges")
        self._ranges = list(ranges)
        self._epochs = epochs
        self._seed = seed
        # Without the epochs: whoever goes on may train for more of them. Earlier versions had them in it.
        self._digest, self._older_digest = _digest(ranges, seed), _digest(ranges, epochs, seed)
        self._taken = 0  # ranges given out so far, in all epochs
        self.reports = 0  # so far
        self._open: dict[int, _Open] = {}  # by the number under which it was given out
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, worker: str) -> Work | None:
        """The next range for `worker`; None when there is none now; others may still lose theirs."""
        for number, one in sorted(self._open.items()):
            if one.worker is None:
                one.worker = worker
                return self._work(number, one.done)
        if self._taken >= self._epochs * len(self._ranges):
            return None
        number = self._taken
        self._taken += 1
        self._open[number] = _Open(worker=worker)
        return self._work(number, 0)

    def report(self, worker: str, work: Work, done: int) -> None:
        """`done` rows of the range, from its begin, were trained on."""
        self._held(worker, work).done = done
        self.reports += 1

    def finish(self, worker: str, work: Work) -> None:
        """All rows of the range were trained on."""
        self._held(worker, work)
        del self._open[work.number]

    def lost(self, worker: str) -> int:
        """The worker is gone: what it had comes back. How many ranges that are."""
        had = [one for one in self._open.values() if one.worker == worker]
        for one in had:
            one.worker = None
        return len(had)

    def workers(self) -> set[str]:
        """Who has ranges."""
        return {one.worker for one in self._open.values() if one.worker is not None}

    @property
    def finished(self) -> bool:
        """Whether all ranges of all epochs are."""
        return self._taken >= self._epochs * len(self._ranges) and not self._open

    def save(self, *, workers: bool = False) -> dict[str, Any]:
        """The state as plain JSON; for a checkpoint without `workers`, who do not outlive a restart."""
        open_ = [[n, one.done, one.worker if workers else None] for n, one in sorted(self._open.items())]
        return {"ranges": self._digest, "taken": self._taken, "open": open_, "reports": self.reports}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, perhaps for more epochs; DataError if it is that of other ranges."""
        if state.get("ranges") not in (self._digest, self._older_digest):
            raise DataError(
                "the saved work queue is of other data: the same files and seed are needed to go on (and the "
                "same epochs too, if an earlier version wrote it)"
            )
        self._taken, self.reports = state["taken"], state["reports"]
        self._open = {number: _Open(done, worker) for number, done, worker in state["open"]}

    def _held(self, worker: str, work: Work) -> _Open:
        one = self._open.get(work.number)
        if one is None or one.worker != worker:
            raise DataError(f"worker {worker} has not range {work.number}, or has it no more: {work.range}")
        return one

    def _work(self, number: int, done: int) -> Work:
        epoch, place = divmod(number, len(self._ranges))
        return Work(number, epoch, self._ranges[self._order_of(epoch)[place]], done)

    def _order_of(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._ranges)))
            if self._seed is not None:
                random.Random(f"{self._seed} {epoch}").shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return self._order[1]


def _digest(ranges: Sequence[Range], *settings: int | None) -> str:
    return hashlib.sha256(json.dumps([list(ranges), *settings]).encode()).hexdigest()
