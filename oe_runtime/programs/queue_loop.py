"""The steps and checkpoints of asynchronous workers, which share the input by a work queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from oe_runtime.client import Client
from oe_runtime.data import Batch
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.work_queue import Work
from oe_runtime.programs.loop import Loop
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.course import Interrupted
from oe_runtime.run.dense_state import DenseState
from oe_runtime.run.followers import FollowingCheckpoints, restore_target
from oe_runtime.run.options import Options
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.shared_input import SharedInput
from oe_runtime.support import dense_file


class QueueLoop(Loop):
    """Steps count those of all workers; loss and AUC are of this worker's rows.

    Worker 0 takes the checkpoints, between the steps of all, and evaluates alone.
    """

    def __init__(self, *arguments: Any, shared: SharedInput, dense: Any) -> None:
        """`dense`: the ServerWorkers of the model."""
        super().__init__(*arguments)
        self._shared = shared
        self._dense = dense
        self._first = self._options.rank == 0

    def train(self, start: Position) -> Position:
        """Train the batches of the queue, to its end or to --steps."""
        with self._shared.sharing_losses():
            position = start
            for work, batch, done, following in self._shared.work(self._trainee.batches_ahead):
                position = self._take_part(position, work, batch, done, following)
                if self._rows.has_ended(position):
                    break
            if self._shared.stop_requested():
                raise self._stopped(position)
            self._shared.raise_losses()
            if position.step == 0 and self._first:
                raise self._rows.no_rows()
            if self._clock.pending:
                self._log(position)
            self._figures.finish(position.step)
            if self._first:
                # The servers and their storage may end after this.
                self._save(self._checkpoints.take_files, position, files=True)
            return position

    def evaluate(self, step: int) -> StreamingAuc:
        """Return AUC and log loss on the held-out rows. Worker 0 evaluates; the others wait for its end."""
        auc = StreamingAuc()
        with self._shared.sharing_losses():
            if self._rows.evaluates() and self._first:
                self._dense.pull()
                for batch in self._shared.read_held_out():
                    if self._stop:
                        raise self.interrupted()
                    auc.update(batch.labels, self._trainee.predict(batch))
            self._shared.end()
        return auc

    def _take_part(
        self, before: Position, work: Work, batch: Batch, done: int, following: list[Batch]
    ) -> Position:
        self.step = before.step + 1
        started = time.monotonic()
        # With --staleness, pulls wait for workers that are too far behind.
        waits = self._options.staleness is not None and batch.rows in self._sizes
        with self._stop.waiting() if waits else nullcontext():
            self._dense.pull()
            self._trainee.train(batch, *following)  # its push holds the lock
            self._dense.push(self._options.learning_rate)
        # Other workers may take as long, compiling included, and a checkpoint waits for their steps.
        self._stop.raise_limit(2 * (time.monotonic() - started))
        self._sizes.add(batch.rows)
        position = replace(before, step=self._shared.report(work, done), epoch=work.epoch)
        new = position.step - before.step
        self._clock.add(new * batch.rows)
        self._view.tick(position.step)
        every, log = self._options.checkpoint_steps, self._options.log_every
        timed = self._is_time()
        due = timed or (self._first and bool(every) and position.step // every > before.step // every)
        if due or position.step // log > before.step // log:
            self._log(position)
        again = self._next_checkpoint(position)
        if self._first:
            self._publish(lambda _: self._checkpoints.settle(), position, again)
        if self._shared.stop_requested():
            raise self._stopped(position)
        if due:
            self._save(self._due_take(position, timed=timed), position, again=again)
        return position

    def _stopped(self, position: Position) -> Interrupted:
        if not self._first:
            return Interrupted(position, None)
        self._shared.stop_all()
        if self._clock.pending:
            self._log(position)
        self._save(self._checkpoints.take_now, position)
        return Interrupted(position, self.saved.path if self.saved else None)

    def _save(self, take: Any, position: Position, *, files: bool = False, again: str | None = None) -> None:
        """Take a checkpoint between the steps of all workers.

        At most one per step, unless the step's rows are in pools and `files` are wanted.
        """
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
        self,
        options: Options,
        state: DenseState,
        client: Client,
        ranks: Ranks,
        shared: SharedInput,
        excuse: Callable[[int], None],
    ) -> None:
        """`excuse` tells the servers that the worker of that rank will not return."""
        super().__init__(options, state, client, ranks)
        self._shared = shared
        self._excuse = excuse

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """See Checkpoints; call it at the start or after a loss, when this worker is connected."""
        with self._shared.sharing_losses():
            for rank in self._shared.await_others():
                self._excuse(rank)
            with self._shared.between_steps():  # no pushes until everything is checked
                return super().roll_back()

    def _chosen(self, saved: RunCheckpoint, target: Mapping[str, Any]) -> None:
        weights = (saved.path / dense_file.FILE).read_bytes()
        self._shared.begin(saved.position.queue, target, weights)


class QueueFollower(FollowingCheckpoints):
    """The same for the other workers, which need not see the checkpoints' directory."""

    def __init__(self, state: DenseState, client: Client, ranks: Ranks, shared: SharedInput) -> None:
        super().__init__(state, client, ranks)
        self._shared = shared

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """Go to worker 0's checkpoint, as QueueCheckpoints.roll_back."""
        with self._shared.sharing_losses():
            target, weights = self._shared.await_begin()
            restore_target(self._client, target)
            return self._loaded(target, weights)
