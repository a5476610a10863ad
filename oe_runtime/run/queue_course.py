"""The steps and checkpoints of asynchronous workers, which share the input by a work queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

from oe_runtime.client import Client
from oe_runtime.data import Batch
from oe_runtime.data.work_queue import Work
from oe_runtime.errors import ServerLost
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.connection import connect
from oe_runtime.run.course import Course, Interrupted
from oe_runtime.run.dense_state import DenseState
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory, restore_target
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks, Stopped
from oe_runtime.run.run_directory import RunDirectory
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.shared_input import SharedInput
from oe_runtime.run.stopping import StopRequest
from oe_runtime.support import dense_file


class QueueCourse(Course):
    """Steps count those of all workers; loss and AUC are of this worker's rows.

    Worker 0 takes the checkpoints, between the steps of all, and evaluates alone.
    """

    def __init__(
        self,
        options: RunOptions,
        client: Client,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        state: ScriptState,
        *,
        rows: RunInput,
        shared: SharedInput,
        dense: Any,
    ) -> None:
        """`dense`: the ServerWorkers."""
        state.bind(dense)
        ranks = Ranks()
        kind = QueueFollower if options.rank else QueueCheckpoints
        checkpoints = kind(options, state, client, ranks, shared)
        super().__init__(options, ranks, client, directory, view, stop, state, checkpoints)
        self._rows = rows
        self._shared = shared
        self._dense = dense
        self._first = options.rank == 0
        self._work: tuple[Work, int] | None = None  # the present range, and its rows done with this step

    def go_to_start(self) -> tuple[RunCheckpoint, str]:
        """See Course: all workers go to a checkpoint, for which they wait for each other."""
        if isinstance(self.checkpoints, Checkpoints) and not self._run.resume:
            self.checkpoints.take_files(Position(queue=self._shared.fresh))
        try:
            found = self.checkpoints.roll_back()
        except ServerLost:
            if self._stop:
                raise Stopped from None
            raise
        self._dense.rebase()
        return found

    def sharing_losses(self) -> AbstractContextManager[None]:
        """See Course."""
        return self._shared.sharing_losses()

    def batches(self, ahead: int) -> Generator[tuple[int, Batch, list[Batch]], None, None]:
        """See Course: the batches of the queue, to its end or to --steps."""
        with closing(self._shared.work(ahead)) as parts:
            for work, batch, done, following in parts:
                self._work = work, done
                yield batch.rows, batch, following
                if self._rows.has_ended(self.position):
                    return

    def steps(self) -> int | None:
        """See Course: those of all workers."""
        return self._rows.steps()

    def compute(self, run: Callable[[], Any], size: int = 0) -> Any:
        """See Course: a step on the present weights of all workers."""
        self.step = self.position.step + 1
        started = time.monotonic()
        # With --staleness, pulls wait for workers that are too far behind.
        waits = self._run.staleness is not None and size in self._sizes
        with self._stop.waiting() if waits else nullcontext(), self.tracing():
            self._dense.pull()
            result = run()  # its push holds the lock
            self._dense.push()
        # Other workers may take as long, compiling included, and a checkpoint waits for their steps.
        self._stop.raise_limit(2 * (time.monotonic() - started))
        self._sizes.add(size)
        return result

    def count(self, rows: int, batches: int = 1, *, ends_epoch: bool = False) -> None:
        """See Course; `rows` are this worker's, and the steps of the others are counted too."""
        assert self._work is not None  # noqa: S101 - batches
        work, done = self._work
        before = self.position
        position = self.position = replace(before, step=self._shared.report(work, done), epoch=work.epoch)
        self._clock.add((position.step - before.step) * rows)
        self._note_step()
        self._offer_weights()
        self._view.tick(position.step)
        every, log = self._run.checkpoint_steps, self._run.log_every
        timed = self._is_time()
        due = timed or (self._first and bool(every) and position.step // every > before.step // every)
        if due or position.step // log > before.step // log:
            self._log(position)
        again = self._next_checkpoint(position)
        if self._first:
            self._publish(lambda _: self.checkpoints.settle(wait=due), position, again)
        if self._shared.stop_requested():
            raise self._stopped()
        if due:
            self._save(self._due_take(position, timed=timed), position, again=again)

    def _finish(self, position: Position) -> None:
        if self._shared.stop_requested():
            raise self._stopped()
        self._shared.raise_losses()
        if position.step == 0 and self._first:
            raise self._rows.no_rows()
        if self._clock.pending:
            self._log(position)
        self._figures.finish(position.step)
        if self._first:
            # The servers and their storage may end after this.
            self._save(self.checkpoints.take_files, position, files=True)
            assert self.saved is not None  # noqa: S101 - just now, or at the begin
            # The other workers' last steps, which they have reported since this one's.
            self.position = replace(position, step=self.saved.position.step)

    def evaluate_at_end(self) -> None:
        """See Course. Worker 0 evaluates; the others wait for its end."""
        if self._first:
            self._dense.pull()
            super().evaluate_at_end()
        self._shared.end()

    def _stopped(self) -> Interrupted:
        position = replace(self.position, ended=None)
        if not self._first:
            return Interrupted(position, None)
        self._shared.stop_all()
        if self._clock.pending:
            self._log(position)
        self._save(self.checkpoints.take_now, position, files=self._stop.in_files)
        if self.saved is None:
            return Interrupted(position, None)
        return Interrupted(self.saved.position, self.saved.path)  # with the steps of all workers

    def _save(self, take: Any, position: Position, *, files: bool = False, again: str | None = None) -> None:
        """Take a checkpoint between the steps of all workers.

        At most one per step, unless the step's rows are in pools and `files` are wanted.
        """
        self._publish(lambda _: self.checkpoints.settle(wait=True), position, again or "now")
        with self._shared.paused_queue() as state:
            step = state["reports"]
            if self.saved and self.saved.position.step == step and not (files and self.saved.pool):
                return
            self._dense.pull()
            started = time.monotonic()
            self._publish(take, replace(position, step=step, queue=state), again)
            self._count_from_now(time.monotonic() - started)


class QueueCheckpoints(Checkpoints):
    """The checkpoints of worker 0 of asynchronous workers; all go back to them, together."""

    def __init__(
        self, options: RunOptions, state: DenseState, client: Client, ranks: Ranks, shared: SharedInput
    ) -> None:
        super().__init__(options, state, client, ranks)
        self._shared = shared

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """See Checkpoints; call it at the start or after a loss, when this worker is connected."""
        with self._shared.sharing_losses():
            for rank in self._shared.await_others():
                self._excuse(rank)
            with self._shared.between_steps():  # no pushes until everything is checked
                return super().roll_back()

    def _excuse(self, rank: int) -> None:
        """Tell the servers that the worker of that rank will not return."""
        if (there := connect(replace(self._options, rank=rank))) is not None:
            with there:
                there.leave()

    def _chosen(self, saved: RunCheckpoint, target: Mapping[str, Any]) -> None:
        weights = (saved.path / dense_file.FILE).read_bytes()
        self._shared.begin(saved.position.queue, target, weights)


class QueueFollower(FollowingCheckpoints):
    """The same for the other workers, which need not see the checkpoints' directory."""

    def __init__(
        self, options: RunOptions, state: DenseState, client: Client, ranks: Ranks, shared: SharedInput
    ) -> None:
        super().__init__(state, client, ranks)
        self._shared = shared

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """Go to worker 0's checkpoint, as QueueCheckpoints.roll_back."""
        with self._shared.sharing_losses():
            target, weights = self._shared.await_begin()
            restore_target(self._client, target)
            return self._loaded(target, weights)
