"""The input of asynchronous workers: a work queue on the first server, in step with checkpoints.

A worker holds a mark in the queue's object from its push to the report of the rows; a checkpoint keeps all
from taking it. So the checkpoint's rows and its queue agree.

The worker that notices a lost server leaves a note for the others. All connect again and report ready. Then
worker 0 chooses a checkpoint, restores the queue, and all go back to it. Calls to the queue's old state are
refused (QueueRestored). If the first server was lost, everybody notices, and the queue is that of the
checkpoint.

A worker lives as long as its connection to the first server (oe_runtime.shared_values). After that server was
lost, workers that do not connect again within _LEASE seconds are gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

from oe_runtime.client import Client
from oe_runtime.data import Batch, Source, Split, holdout_batches, range_batches
from oe_runtime.data.batches import with_following
from oe_runtime.data.shared_queue import NAME, QueueRestored, SharedWorkQueue
from oe_runtime.data.work_queue import Work, WorkQueue
from oe_runtime.errors import OeError, ServerLost, TornError, WorkerLost
from oe_runtime.run.options import RunOptions
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.worker_input import WorkerInput
from oe_runtime.shared_values import SharedValues

_ALWAYS = 1 << 40  # epochs, where --steps decides the end
_HOLD_POLL = 0.005  # seconds
_POLL = 0.2
# Seconds for the note of a lost server to appear, after servers take the worker that noticed it for lost.
_GRACE = 5.0
# Seconds for a worker to connect to the first server again.
_LEASE = 15.0
_ENDED = ("problem", "ready", "lost", "torn", "stop", "holds")  # of the queue's object, when all begin anew
_WEIGHTS = "weights"  # the shared value with a checkpoint's dense weights


class LostInPush(ServerLost):
    """A worker was lost in its push, which some servers may have: all workers go back to a checkpoint."""


class HoldingClient(Client):
    """A client whose pushes hold off checkpoints; pulls, which may wait for other workers, do not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.before_push: Callable[[], None] = lambda: None
        self.values: SharedValues | None = None  # ends with this client

    def close(self) -> None:
        """See Client."""
        if self.values is not None:
            self.values.close()
        super().close()

    def push(self, *arguments: Any, **options: Any) -> None:
        """See Client."""
        self.before_push()
        super().push(*arguments, **options)


class SharedInput:
    """One worker's end of the queue.

    Beside the queue its object has: `ranks`, the connection of each worker, unless it has finished; `ready`,
    those that wait for worker 0 to go back to a checkpoint; `target`, that checkpoint, or `problem`, why
    nobody starts; `lost`, the server that a worker has lost; `torn`, which worker was lost in its push;
    `stop`, whether all shall stop; `holds`, the connections that push, and `gate`, that of a checkpoint.
    """

    def __init__(
        self,
        options: RunOptions,
        source: Source,
        split: Split,
        stop: StopRequest,
        values: SharedValues,
        client: HoldingClient | None = None,
        mine: WorkerInput | None = None,
    ) -> None:
        """`mine`: the input of one of several."""
        self._source = source
        self._split = split
        self._options = options
        self._stop = stop
        self._values = values
        self._client = client
        self._left = False  # whether the servers know that this worker pushes no more
        if client is not None:
            client.before_push = self.hold
        self._ranges = source.ranges()
        self._queue = SharedWorkQueue(values, self._ranges, options.epochs or _ALWAYS)
        self._holds = False
        self._mine = mine
        self._started = False
        values.announce(self._announce)

    def _announce(self) -> None:
        """Tell the others that this worker is there."""
        if self._mine is not None:
            self._values.write(self._input(self._options.rank), self._mine.to_json().encode())

        def announce(found: dict[str, Any]) -> None:
            found.setdefault("ranks", {})[str(self._options.rank)] = self._values.me

        self._values.change(NAME, announce)

    @property
    def fresh(self) -> dict[str, Any]:
        """The queue's state before the first range is taken."""
        return self._queue.fresh

    def begin(
        self, state: Mapping[str, Any] | None, target: Mapping[str, Any] | None = None, weights: bytes = b""
    ) -> None:
        """Start the queue in worker 0, before any range is taken: from the start, or a checkpoint's state.

        The others get the checkpoint's `target` and dense `weights`, see `await_begin`.
        """
        self._left = False
        if self._options.size > 1:
            self._values.write(_WEIGHTS, weights)
        self._queue.restore(state, target=target, **dict.fromkeys(_ENDED))

    def await_others(self) -> list[int]:
        """In worker 0, connected, wait for the others; return the lost ones, if others may continue.

        Raises WorkerLost for a worker that is gone or does not come; RunError, the same in each worker,
        unless all have the same input; and ServerLost after a stop request.
        """
        self._values.rejoin()
        self._note("")  # others may not have noticed what this worker has
        since = time.monotonic()
        gone = []
        for rank in range(1, self._options.size):
            if not self._await(partial(self._is_ready, str(rank)), rank, since):
                gone.append(rank)
        if gone and self._options.on_worker_lost == "stop":
            raise WorkerLost(f"worker {gone[0]} was lost")
        self._check_input()
        # Those that are left are of lost workers, whose connections may seem to live for a while.
        self._values.change(NAME, lambda found: found.pop("holds", None))
        self._started = True
        return gone

    def await_begin(self) -> tuple[dict[str, Any], bytes]:
        """In another worker, connected, wait for worker 0; return the checkpoint and its dense weights.

        Raises as `await_others`.
        """
        self._values.rejoin()
        self._note("")

        def report_ready(found: dict[str, Any]) -> str | None:
            found.setdefault("ready", {})[str(self._options.rank)] = self._values.me
            restored: str | None = found.get("restored")
            return restored

        before = self._values.change(NAME, report_ready)

        def begun(found: dict[str, Any]) -> bool:
            if found.get("problem"):
                raise RunError(found["problem"])
            return bool(found.get("restored") != before)

        if not self._await(begun, 0, time.monotonic()):
            raise WorkerLost("worker 0 was lost, which takes the others back to a checkpoint")
        self._started = True
        self._left = False
        self._queue.follow()
        return self._values.object(NAME)["target"], self._values.read_written(_WEIGHTS)

    def _await(self, condition: Callable[[dict[str, Any]], bool], rank: int, since: float) -> bool:
        """Wait until the condition of the queue's object holds, True, or that worker is gone."""

        def is_lost(found: dict[str, Any]) -> bool:
            number = found.get("ranks", {}).get(str(rank))
            if number is None:
                return time.monotonic() - since > _LEASE
            return number not in self._values.members

        while not self._values.change(NAME, condition):
            if self._stop:
                raise ServerLost("", "a server was lost")
            if time.monotonic() - since > self._options.worker_wait:
                raise WorkerLost(
                    f"worker {rank} did not come within {self._options.worker_wait} s, to go to a checkpoint "
                    "with the others"
                )
            if self._started and self._values.change(NAME, is_lost):
                return False
            self._stop.wait(_POLL)
        return True

    def _is_ready(self, rank: str, found: dict[str, Any]) -> bool:
        return found.get("ready", {}).get(rank) in self._values.members

    def _check_input(self) -> None:
        problem = ""
        for rank in range(1, self._options.size):
            text = self._values.read_written(self._input(rank))
            if text and self._mine is not None:
                problem = problem or WorkerInput.from_json(text.decode()).problem(self._mine)
        if problem:
            self._values.change(NAME, lambda found: found.update(problem=problem))
            raise RunError(problem)

    def work(self, ahead: int) -> Generator[tuple[Work, Batch, int, list[Batch]], None, None]:
        """Yield this worker's batches: range, batch, rows of the range that are done with it, next batches.

        The next ones are of the same range, at most `ahead`. The batches end with the queue, after a stop
        request, or when another worker has lost a server.
        """
        while (work := self._queue.take(give_up=self._gives_up, idle=self._leave)) is not None:
            if self._left and self._client is not None:
                self._client.reconnect()  # of another worker that was lost
                self._left = False
            done = work.done
            batches = range_batches(self._source, self._split, work.range, self._options.batch_size, done)
            for batch, following in with_following(batches, ahead):
                done += batch.rows
                yield work, batch, done, following
            self._queue.finish(work)

    def read_held_out(self) -> Iterator[Batch]:
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
            self._holds = self._queue.change(self._try_hold)
            if self._holds:
                return
            if time.monotonic() - looked > _POLL:
                self.raise_losses()
                looked = time.monotonic()
            time.sleep(_HOLD_POLL)

    def _try_hold(self, _: WorkQueue, found: dict[str, Any]) -> bool:
        me, members = self._values.me, self._values.members
        if self._note_torn(found):
            return False
        if found.get("gate", me) != me and found["gate"] in members:  # a checkpoint waits for steps to end
            return False
        found["holds"] = sorted({me, *found.get("holds", [])})
        return True

    def _note_torn(self, found: dict[str, Any]) -> bool:
        """Note whether a worker was lost in its push: between `hold` and `report`.

        Some servers may have what it pushed and others not, and the queue gives its rows to the next worker.
        """
        lost = {*found.get("holds", [])} - self._values.members
        if lost and "torn" not in found:
            ranks = [rank for rank, number in found.get("ranks", {}).items() if number in lost]
            found["torn"] = f"{f'worker {ranks[0]}' if ranks else 'a worker'} was lost in its push"
            found.setdefault("lost", "")
        return bool(lost)

    def _note_failure(self, found: dict[str, Any]) -> None:
        """Note that this worker's own program fails in its push, and ends."""
        found.setdefault("torn", f"worker {self._options.rank} failed in its push")
        found.setdefault("lost", "")

    def report(self, work: Work, done: int) -> int:
        """Report the pushed rows; return the number of batches that all workers pushed."""

        def report(queue: WorkQueue, found: dict[str, Any]) -> int:
            queue.report(self._queue.worker, work, done)
            self._let_go(found)
            return queue.reports

        batches = self._queue.change(report)
        self._holds = False
        return batches

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """Run the block between the steps of all workers."""

        def close(found: dict[str, Any]) -> tuple[bool, bool]:
            found["gate"] = self._values.me
            return self._note_torn(found), bool({*found.get("holds", [])} - {self._values.me})

        try:
            with self._stop.waiting():
                while (state := self._values.change(NAME, close))[1]:
                    if state[0]:
                        raise self._loss()
                    time.sleep(_HOLD_POLL)
            yield
        finally:
            with contextlib.suppress(ServerLost):
                self._values.change(NAME, lambda found: found.pop("gate", None))

    @contextlib.contextmanager
    def paused_queue(self) -> Iterator[dict[str, Any]]:
        """Run the block between the steps of all workers, with the queue's state for a checkpoint.

        Raises as `raise_losses`: who lost a server, or failed, in its push notes it before it lets go of it.
        """
        with self.between_steps():
            self.raise_losses()
            yield self._queue.save()

    @contextlib.contextmanager
    def sharing_losses(self) -> Iterator[None]:
        """Raise ServerLost for any error that a lost server causes, and notify the others."""
        try:
            yield
        except ServerLost as error:
            self._note(error.endpoint)
            raise
        except (QueueRestored, TornError, WorkerLost) as error:
            deadline = time.monotonic() + _GRACE
            while not self.is_losing():
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL)
            raise self._loss() from error
        except Exception:
            if self._holds and self._options.size > 1:
                with contextlib.suppress(OeError):
                    self._values.change(NAME, self._note_failure)
            raise
        finally:
            self._release()

    def is_losing(self) -> bool:
        """Whether another worker has lost a server. Raises ServerLost for the first server."""
        followed = self._queue.followed

        def is_losing(found: dict[str, Any]) -> bool:
            return "lost" in found or found.get("restored") != followed

        return followed is not None and self._values.change(NAME, is_losing)

    def raise_losses(self) -> None:
        """Raise ServerLost if another worker has lost a server."""
        if self.is_losing():
            raise self._loss()

    def end(self) -> None:
        """Finish this worker; the others wait for worker 0, which may need them to go back."""
        rank = str(self._options.rank)
        if self._options.rank:
            self._leave()
            while not (self._values.change(NAME, self._has_finished) or self._stop):
                self.raise_losses()
                time.sleep(_POLL)
        self._values.change(NAME, lambda found: found["ranks"].pop(rank, None))

    def _has_finished(self, found: dict[str, Any]) -> bool:
        """Whether worker 0 has finished or ended."""
        return found.get("ranks", {}).get("0") not in self._values.members

    def stop_all(self) -> None:
        """Ask all workers to stop after their step."""
        self._values.change(NAME, lambda found: found.update(stop=True))

    def stop_requested(self) -> bool:
        """Whether any worker was asked to stop, as of the last call that asked the server."""
        if self._stop:
            return True
        if self._values.object(NAME).get("stop"):
            self._stop.reason = self._stop.reason or "another worker was asked to"
            return True
        return False

    def close(self) -> None:
        """Give back unfinished ranges."""
        self._values.close()

    def _gives_up(self) -> bool:
        return self.is_losing() or self.stop_requested()

    def _leave(self) -> None:
        """Stop others from waiting for this worker's pushes (--staleness) while it has none."""
        if self._client is not None and not self._left:
            self._client.leave()
            self._left = True

    def _let_go(self, found: dict[str, Any]) -> None:
        found["holds"] = [number for number in found.get("holds", []) if number != self._values.me]

    def _release(self) -> None:
        if self._holds:
            self._holds = False
            with contextlib.suppress(OeError):  # then the connection is lost, or the client is closed
                self._values.change(NAME, self._let_go)

    def _note(self, endpoint: str) -> None:
        """Tell the others of a lost server, unless they have gone back meanwhile."""

        def note(found: dict[str, Any]) -> None:
            if self._started and found.get("restored") == self._queue.followed:
                found.setdefault("lost", endpoint)

        with contextlib.suppress(ServerLost):  # the first server, which everybody misses
            self._values.change(NAME, note)

    def _loss(self) -> ServerLost | WorkerLost:
        found = self._values.object(NAME)
        if "torn" not in found:
            return ServerLost(found.get("lost", ""), "another worker has lost a server")
        if self._options.on_worker_lost == "stop":
            return WorkerLost(found["torn"])
        return LostInPush("", found["torn"])

    def _input(self, rank: int) -> str:
        return f"input-{rank}"
