"""A work queue on the first server, which all workers of a job take ranges from."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from oe_runtime.data.work_queue import Range, Work, WorkQueue
from oe_runtime.shared_values import SharedValues

NAME = "queue"  # of the shared value
_T = TypeVar("_T")


class QueueRestored(Exception):
    """The queue has gone back to a checkpoint, and this worker has not: see `SharedWorkQueue.follow`."""


class SharedWorkQueue:
    """One worker's end of a WorkQueue, whose state is a shared value.

    A worker is its connection: when that ends, the others take its ranges. The state lives as long as the
    server's process; checkpoints (`save`) outlive that.
    """

    def __init__(
        self, values: SharedValues, ranges: Sequence[Range], epochs: int = 1, seed: int | None = None
    ) -> None:
        self._queue = WorkQueue(ranges, epochs, seed)
        self.fresh = self._queue.save()  # the state before the first range is taken
        self._values = values
        self.followed: str | None = None  # the restore that this worker has gone back by

    @property
    def worker(self) -> str:
        """The name of this worker in the queue."""
        return str(self._values.me)

    def change(self, change: Callable[[WorkQueue, dict[str, Any]], _T]) -> _T:
        """Change the queue, and the object that holds it, in one step. Raises QueueRestored.

        Before a restore of the queue nothing is taken: `change` gets a queue without its ranges' state.
        """

        def apply(found: dict[str, Any]) -> _T:
            if self.followed is not None and found.get("restored") != self.followed:
                raise QueueRestored
            self._queue.restore(found.get("queue", self.fresh))
            result = change(self._queue, found)
            found["queue"] = self._queue.save(workers=True)
            return result

        return self._values.change(NAME, apply)

    def take(
        self,
        poll_seconds: float = 0.2,
        give_up: Callable[[], bool] = lambda: False,
        idle: Callable[[], None] = lambda: None,
    ) -> Work | None:
        """Return the next range; None when all are finished except this worker's own.

        Where others have the last ones, waits until they finish or are lost, or until `give_up`; calls `idle`
        before. Raises QueueRestored, as do `report`, `finish` and `save`.
        """

        def take(queue: WorkQueue, _: dict[str, Any]) -> tuple[Work | None, bool]:
            for worker in queue.workers():
                if int(worker) not in self._values.members:
                    queue.lost(worker)
            return queue.take(self.worker), queue.workers() <= {self.worker}

        waits = False
        while not give_up():
            work, last = self.change(take)
            if work is not None or last:
                return work
            if not waits:
                idle()
                waits = True
            time.sleep(poll_seconds)
        return None

    def report(self, work: Work, done: int) -> int:
        """Report `done` trained rows of the range, from its start; return the number of all reports."""

        def report(queue: WorkQueue, found: dict[str, Any]) -> int:
            queue.report(self.worker, work, done)
            return queue.reports

        return self.change(report)

    def finish(self, work: Work) -> None:
        """Report that all rows of the range were trained on."""
        self.change(lambda queue, _: queue.finish(self.worker, work))

    def save(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON. One worker does so for all."""
        return self.change(lambda queue, _: queue.save())

    def restore(self, state: Mapping[str, Any] | None, **others: Any) -> None:
        """Continue from a checkpoint's state, or from the start (None).

        One worker calls it, before any takes a range; the others then `follow`. The state of an earlier run
        is forgotten. `others` are fields that change with it; None removes one.
        """
        self._queue.restore(self.fresh if state is None else state)
        restored = {"queue": self._queue.save(), "restored": secrets.token_hex(8), **others}

        def replace(found: dict[str, Any]) -> None:
            found.update(restored)
            for name, value in others.items():
                if value is None:
                    del found[name]

        self._values.change(NAME, replace)
        self.followed = restored["restored"]

    def restored(self) -> str | None:
        """Return which restore was the last; None: there was none."""
        found: str | None = self._values.change(NAME, lambda found: found.get("restored"))
        return found

    def follow(self) -> None:
        """Go to the state that the queue was restored to; this worker has no range then."""
        self.followed = self.restored()
