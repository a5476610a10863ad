"""The input of asynchronous workers: a work queue in the run directory, in step with checkpoints.

A worker's rows are pushed and then reported, under a lock that all steps share; whoever takes a checkpoint
has it alone. So what is in the checkpoint's rows and what its queue says is done are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from oe_runtime.client import Client
from oe_runtime.data import Batch, Source, Split, range_batches
from oe_runtime.data.shared_queue import SharedWorkQueue
from oe_runtime.data.work_queue import Work
from oe_runtime.training.options import Options
from oe_runtime.training.stopping import StopRequest

_ALWAYS = 1 << 40  # epochs, where --steps is the end


class HoldingClient(Client):
    """A client whose pushes hold the lock of the steps; pulls, which may wait for other workers, do not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before_push: Callable[[], None] = lambda: None

    def push(self, *arguments: Any, **options: Any) -> None:
        """See Client."""
        self.before_push()
        super().push(*arguments, **options)


class SharedInput:
    """One worker's end of the queue."""

    def __init__(self, options: Options, source: Source, split: Split, stop: StopRequest) -> None:
        """The directory must be one that all workers see."""
        self._source = source
        self._split = split
        self._batch_size = options.batch_size
        self._stop = stop
        directory = options.run_dir / "queue"
        self._ranges = source.ranges()
        self._queue = SharedWorkQueue(directory, self._ranges, options.epochs or _ALWAYS)
        self._marker = directory / "stop"
        self._gate = (directory / "gate.lock").open("a")
        self._steps = (directory / "steps.lock").open("a")
        self._holds = False

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Worker 0, before any takes a range: from the start, or from a checkpoint's state."""
        self._marker.unlink(missing_ok=True)
        self._queue.restore(state)

    def work(self) -> Iterator[tuple[Work, Batch, int]]:
        """The batches that this worker gets, each with how many rows of its range are done with it."""
        while (work := self._queue.take(give_up=self.asked)) is not None:
            done = work.done
            for batch in range_batches(self._source, self._split, work.range, self._batch_size, done):
                done += batch.rows
                yield work, batch, done
            self._queue.finish(work)

    def held_out(self) -> Iterator[Batch]:
        """The rows that no worker trains on."""
        for part in self._ranges:
            yield from range_batches(self._source, self._split, part, self._batch_size, held=True)

    def hold(self) -> None:
        """From here to `report`, no checkpoint is taken."""
        if not self._holds:
            with _locked(self._gate, fcntl.LOCK_SH):  # not while one waits for the steps to end
                pass
            fcntl.flock(self._steps, fcntl.LOCK_SH)
            self._holds = True

    def report(self, work: Work, done: int) -> int:
        """The rows were pushed: how many batches of all workers were, in all."""
        batches = self._queue.report(work, done)
        fcntl.flock(self._steps, fcntl.LOCK_UN)
        self._holds = False
        return batches

    @contextlib.contextmanager
    def paused(self) -> Iterator[dict[str, Any]]:
        """Between the steps of all workers: what a checkpoint must have of the queue."""
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._steps, fcntl.LOCK_EX):
            yield self._queue.save()

    def stop_all(self) -> None:
        """Let all workers stop after their step."""
        self._marker.touch()

    def asked(self) -> bool:
        """Whether this one or another was asked to stop."""
        if self._stop:
            return True
        if self._marker.exists():
            self._stop.reason = self._stop.reason or "another worker was asked to"
            return True
        return False

    def close(self) -> None:
        """Give back what was not finished."""
        self._queue.close()
        self._gate.close()
        self._steps.close()


@contextlib.contextmanager
def _locked(file: IO[str], how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
