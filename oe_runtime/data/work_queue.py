"""Ranges of the input, shared by the workers of a job: each is read once per epoch, by the next free worker.

The counterpart of DeepRec's WorkQueue, for asynchronous training: a slow worker takes fewer ranges and delays
no other. (Synchronous workers split each batch instead, see `Batch.part`.) `WorkQueue` is the state alone,
plain values in and out; `shared_queue.SharedWorkQueue` keeps it on the first server.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oe_runtime.errors import DataError


class Range(NamedTuple):
    """A part of the input: bytes of a plain text file, for the lines that begin there; else rows.

    Files that can only be read from their start (compressed, TFRecord) are one range of all their bytes.
    """

    file: str
    start: int
    stop: int


class Work(NamedTuple):
    """A range taken by a worker."""

    number: int  # in the order of taking, through all epochs
    epoch: int
    range: Range
    done: int  # rows reported already, by a lost worker or before a restart


@dataclass
class _Open:
    done: int = 0
    worker: str | None = None  # None: for the next worker that asks


class WorkQueue:
    """The ranges taken, their progress, and those finished.

    A worker reports rows as it trains on them. Unfinished ranges of a lost worker come back from its last
    report on. Each row is trained on once, since what was trained on after that is undone (SharedInput).
    """

    def __init__(self, ranges: Sequence[Range], epochs: int = 1, seed: int | None = None) -> None:
        """`seed` shuffles the ranges, anew in each epoch; None keeps their order."""
        if not ranges:
            raise DataError("there is nothing to read: the work queue has no ranges")
        self._ranges = list(ranges)
        self._epochs = epochs
        self._seed = seed
        # Without the epochs, because a resumed run may train more of them. Earlier versions included them.
        self._digest, self._older_digest = _digest(ranges, seed), _digest(ranges, epochs, seed)
        self._taken = 0  # ranges so far, in all epochs
        self.reports = 0
        self._open: dict[int, _Open] = {}  # by Work.number
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, worker: str) -> Work | None:
        """Return the next range for `worker`; None when none is free now (others may still lose theirs)."""
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
        """Report that the first `done` rows of the range were trained on."""
        self._held(worker, work).done = done
        self.reports += 1

    def finish(self, worker: str, work: Work) -> None:
        """Report that all rows of the range were trained on."""
        self._held(worker, work)
        del self._open[work.number]

    def lost(self, worker: str) -> int:
        """Take back the ranges of a worker that is gone; return their number."""
        had = [one for one in self._open.values() if one.worker == worker]
        for one in had:
            one.worker = None
        return len(had)

    def workers(self) -> set[str]:
        """Return the workers with ranges."""
        return {one.worker for one in self._open.values() if one.worker is not None}

    @property
    def finished(self) -> bool:
        """Whether all ranges of all epochs are finished."""
        return self._taken >= self._epochs * len(self._ranges) and not self._open

    def save(self, *, workers: bool = False) -> dict[str, Any]:
        """Return the state as plain JSON; without `workers` for a checkpoint, which they do not outlive."""
        open_ = [[n, one.done, one.worker if workers else None] for n, one in sorted(self._open.items())]
        return {"ranges": self._digest, "taken": self._taken, "open": open_, "reports": self.reports}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, perhaps for more epochs. Raises DataError for other ranges."""
        if state.get("ranges") not in (self._digest, self._older_digest):
            raise DataError(
                "the saved work queue is of other data: continue with the same files and seed (and the same "
                "epochs, if an earlier version wrote it)"
            )
        self._taken, self.reports = state["taken"], state["reports"]
        self._open = {number: _Open(done, worker) for number, done, worker in state["open"]}

    def _held(self, worker: str, work: Work) -> _Open:
        one = self._open.get(work.number)
        if one is None or one.worker != worker:
            raise DataError(f"worker {worker} does not hold range {work.number} (any more): {work.range}")
        return one

    def _work(self, number: int, done: int) -> Work:
        epoch, place = divmod(number, len(self._ranges))
        return Work(number, epoch, self._ranges[self._order_in(epoch)[place]], done)

    def _order_in(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._ranges)))
            if self._seed is not None:
                random.Random(f"{self._seed} {epoch}").shuffle(order)  # noqa: S311
            self._order = (epoch, order)
        return self._order[1]


def _digest(ranges: Sequence[Range], *settings: int | None) -> str:
    return hashlib.sha256(json.dumps([list(ranges), *settings]).encode()).hexdigest()
