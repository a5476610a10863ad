"""The input of asynchronous workers: a work queue in the run directory, in step with checkpoints.

A worker pushes rows and then reports them, under a lock that all steps share; a checkpoint takes the lock
exclusively. So the checkpoint's rows and its queue agree.

The worker that notices a lost server leaves a mark for the others. All connect again and report ready. Then
worker 0 chooses a checkpoint, restores the queue, and all go back to it. Calls to the queue's old state are
refused (QueueRestored).
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from oe_runtime.client import Client
from oe_runtime.data import Batch, Source, Split, holdout_batches, range_batches
from oe_runtime.data.shared_queue import QueueRestored, SharedWorkQueue
from oe_runtime.data.work_queue import Work
from oe_runtime.errors import ServerLost, TornError, WorkerLost
from oe_runtime.training.options import Options
from oe_runtime.training.run_directory import RunError
from oe_runtime.training.stopping import StopRequest
from oe_runtime.training.worker_input import WorkerInput

_ALWAYS = 1 << 40  # epochs, where --steps decides the end
_LOCK_POLL = 0.005  # seconds
_POLL = 0.2
# Seconds for the mark of a lost server to appear, after servers take the worker that noticed it for lost.
_GRACE = 5.0


class HoldingClient(Client):
    """A client whose pushes take the lock of the steps; pulls, which may wait for other workers, do not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before_push: Callable[[], None] = lambda: None

    def push(self, *arguments: Any, **options: Any) -> None:
        """See Client."""
        self.before_push()
        super().push(*arguments, **options)


class SharedInput:
    """One worker's end of the queue."""

    def __init__(
        self,
        options: Options,
        source: Source,
        split: Split,
        stop: StopRequest,
        client: HoldingClient | None = None,
        mine: WorkerInput | None = None,
    ) -> None:
        """The directory must be visible to all workers. `mine`: the input of one of several."""
        self._source = source
        self._split = split
        self._options = options
        self._stop = stop
        self._client = client
        self._left = False  # whether the servers know that this worker pushes no more
        if client is not None:
            client.before_push = self.hold
        self._directory = options.run_dir / "queue"
        self._ranges = source.ranges()
        self._queue = SharedWorkQueue(self._directory, self._ranges, options.epochs or _ALWAYS)
        self._marker = self._directory / "stop"
        self._gate = (self._directory / "gate.lock").open("a")
        self._steps = (self._directory / "steps.lock").open("a")
        self._holds = False
        # Locked until this worker finishes.
        self._mine = self._rank_file(options.rank).open("a")
        _try(self._mine, fcntl.LOCK_EX)
        if mine is not None:
            partial = self._input(options.rank).with_suffix(".part")
            partial.write_text(mine.to_json())
            partial.replace(self._input(options.rank))

    def check_input(self) -> None:
        """When all have come, raise RunError, the same in each worker, unless all have the same input."""
        if self._options.size == 1:
            return
        found = [
            WorkerInput.from_json(self._input(rank).read_text())
            for rank in range(self._options.size)
            if self._input(rank).exists()
        ]
        for other in found[1:]:
            if problem := other.problem(found[0]):
                raise RunError(problem)

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Start the queue in worker 0, before any range is taken: from the start, or a checkpoint's state."""
        self._marker.unlink(missing_ok=True)
        for mark in [*self._directory.glob("lost-*"), *self._directory.glob("ready-*")]:
            mark.unlink(missing_ok=True)
        self._queue.restore(state)

    def follow(self) -> None:
        """Note that this worker has gone back to the queue's checkpoint."""
        self._left = False
        self._queue.follow()

    def await_others(self) -> list[int]:
        """In worker 0, connected again, wait for the others; return the lost ones, if others may continue.

        Raises WorkerLost for a worker that is gone or does not come, and ServerLost after a stop request.
        """
        gone = []
        for rank in range(1, self._options.size):
            self._await(self._ready(rank).exists, rank)
            if not self._ready(rank).exists():
                gone.append(rank)
        if gone and self._options.on_worker_lost == "stop":
            raise WorkerLost(f"worker {gone[0]} was lost")
        return gone

    def await_begin(self) -> None:
        """In another worker, connected again, wait for worker 0 to begin. Raises as `await_others`."""
        before = self._queue.restores()
        self._ready(self._options.rank).touch()
        try:
            self._await(lambda: self._queue.restores() != before, 0)
            if self._queue.restores() == before:
                raise WorkerLost("worker 0 was lost, which takes the others back to a checkpoint")
        finally:
            self._ready(self._options.rank).unlink(missing_ok=True)

    def _await(self, condition: Callable[[], bool], rank: int) -> None:
        """Wait until the condition holds or that worker is gone."""
        deadline = time.monotonic() + self._options.worker_wait
        while not (condition() or self.is_gone(rank)):
            if self._stop:
                raise ServerLost("", "a server was lost")
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"worker {rank} did not come within {self._options.worker_wait} s, to go back to a "
                    "checkpoint"
                )
            self._stop.wait(_POLL)

    def work(self) -> Iterator[tuple[Work, Batch, int]]:
        """Yield this worker's batches, each with the number of rows of its range that are done with it.

        They end with the queue, after a stop request, or when another worker has lost a server.
        """
        while (work := self._queue.take(give_up=self._gives_up, idle=self._leave)) is not None:
            if self._left and self._client is not None:
                self._client.reconnect()  # of another worker that was lost
                self._left = False
            done = work.done
            for batch in range_batches(self._source, self._split, work.range, self._options.batch_size, done):
                done += batch.rows
                yield work, batch, done
            self._queue.finish(work)

    def held_out(self) -> Iterator[Batch]:
        """Yield the rows that no worker trains on."""
        if self._source.evaluation() is not None:
            yield from holdout_batches(self._source, self._split, self._options.batch_size)
            return
        for part in self._ranges:
            yield from range_batches(self._source, self._split, part, self._options.batch_size, held=True)

    def hold(self) -> None:
        """Prevent checkpoints from here to `report`. Raises ServerLost when all go back to one."""
        with self._stop.without_time_limit():  # this waits only for checkpoints
            self._hold()

    def _hold(self) -> None:
        looked = time.monotonic()
        while not self._holds:
            # Not while a checkpoint waits for the steps to end.
            if _try(self._gate, fcntl.LOCK_SH):
                fcntl.flock(self._gate, fcntl.LOCK_UN)
                self._holds = _try(self._steps, fcntl.LOCK_SH)
            if self._holds:
                return
            if time.monotonic() - looked > _POLL:
                self.raise_losses()
                looked = time.monotonic()
            time.sleep(_LOCK_POLL)

    def report(self, work: Work, done: int) -> int:
        """Report the pushed rows; return the number of batches that all workers pushed."""
        batches = self._queue.report(work, done)
        self._release()
        return batches

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Run the block between the steps of all workers."""
        with contextlib.ExitStack() as locks:
            with self._stop.waiting():
                for file in (self._gate, self._steps):
                    locks.enter_context(_locked(file, fcntl.LOCK_EX))
            yield

    @contextlib.contextmanager
    def paused_queue(self) -> Iterator[dict[str, Any]]:
        """Run the block between the steps of all workers, with the queue's state for a checkpoint."""
        with self.between_steps():
            yield self._queue.save()

    @contextlib.contextmanager
    def sharing_losses(self) -> Iterator[None]:
        """Raise ServerLost for any error that a lost server causes, and notify the others."""
        try:
            yield
        except ServerLost as error:
            self._mark(self._queue.restores()).write_text(error.endpoint)
            raise
        except (QueueRestored, TornError, WorkerLost) as error:
            deadline = time.monotonic() + _GRACE
            while not self.is_losing():
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL)
            raise self._loss() from error
        finally:
            self._release()

    def is_losing(self) -> bool:
        """Whether another worker has lost a server."""
        followed = self._queue.followed
        if followed is None:
            return False
        return self._mark(followed).exists() or self._queue.restores() != followed

    def raise_losses(self) -> None:
        """Raise ServerLost if another worker has lost a server."""
        if self.is_losing():
            raise self._loss()

    def end(self) -> None:
        """Finish this worker; the others wait for worker 0, which may need them to go back."""
        if self._options.rank:
            self._leave()
            while not (self.is_gone(0) or self._stop):
                self.raise_losses()
                time.sleep(_POLL)
        self._mine.close()

    def is_gone(self, rank: int) -> bool:
        """Whether that worker has ended or finished."""
        with self._rank_file(rank).open("a") as file:
            return _try(file, fcntl.LOCK_SH)

    def stop_all(self) -> None:
        """Ask all workers to stop after their step."""
        self._marker.touch()

    def stop_requested(self) -> bool:
        """Whether any worker was asked to stop."""
        if self._stop:
            return True
        if self._marker.exists():
            self._stop.reason = self._stop.reason or "another worker was asked to"
            return True
        return False

    def close(self) -> None:
        """Give back unfinished ranges."""
        self._queue.close()
        for file in (self._gate, self._steps, self._mine):
            file.close()

    def _gives_up(self) -> bool:
        return self.stop_requested() or self.is_losing()

    def _leave(self) -> None:
        """Stop others from waiting for this worker's pushes (--staleness) while it has none."""
        if self._client is not None and not self._left:
            self._client.leave()
            self._left = True

    def _release(self) -> None:
        if self._holds:
            fcntl.flock(self._steps, fcntl.LOCK_UN)
            self._holds = False

    def _mark(self, restored: int) -> Path:
        """Return the file that notes a lost server, for this number of restores of the queue."""
        return self._directory / f"lost-{restored}"

    def _loss(self) -> ServerLost:
        endpoint = ""
        with contextlib.suppress(OSError):
            endpoint = self._mark(self._queue.followed or 0).read_text()
        return ServerLost(endpoint, "another worker has lost a server")

    def _ready(self, rank: int) -> Path:
        return self._directory / f"ready-{rank}"

    def _input(self, rank: int) -> Path:
        return self._directory / f"input-{rank}.json"

    def _rank_file(self, rank: int) -> Path:
        return self._directory / f"rank-{rank}.lock"


def _try(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(file: IO[str], how: int) -> Iterator[None]:
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
