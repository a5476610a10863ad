"""The course of a run: steps, progress, checkpoints, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

from oe_runtime.data import Batch, Source, holdout_batches, make_split, training_batches
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.batches import with_following
from oe_runtime.programs.click_model import KerasTrainee
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.course import Course
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import Options
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import deferring_losses
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.stopping import StopRequest


class Loop(Course):
    """One run over the data."""

    def __init__(
        self,
        options: Options,
        source: Source,
        trainee: KerasTrainee,
        checkpoints: Checkpoints | FollowingCheckpoints,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        figures: ServerFigures,
    ) -> None:
        super().__init__(options, trainee.ranks, checkpoints, directory, view, stop, figures)
        self._options = options
        self._source = source
        self._split = make_split(source, options.holdout)
        self._trainee = trainee
        # Batch sizes for which TensorFlow has compiled since the start or the last return to a checkpoint.
        self._sizes: set[int] = set()
        self._latest: tuple[int, StreamingAuc] | None = None  # step and result of the last evaluation

    def window(self) -> tuple[float, float | None]:
        """See Course."""
        return self._trainee.window()

    def train(self, start: Position) -> Position:
        """Train from `start` to the end of the last epoch or to --steps, and checkpoint the end.

        `saved` is the checkpoint of `start`, if there is one.
        """
        position = start
        self._begin(position)
        while not self._finished(position):
            before = position.step
            batches = training_batches(self._source, self._split, self._options.batch_size, position.batch)
            for rows, part, following in self._parts(batches):
                position = self._step(position, rows, part, following)
                if self._finished(position):
                    break
            else:
                if position.step == before and position.batch == 0:
                    raise RunError(
                        f"{self._source.describe()} has no rows to train on (holdout {self._options.holdout})"
                    )
                position = Position(position.step, position.epoch + 1)
        self._finish(position)
        return position

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """See Course."""
        super().rolled_back(saved, seconds)
        self._trainee.window()
        self._latest = None
        self._sizes.clear()  # before the next step some workers skip more input than others

    def evaluate(self) -> StreamingAuc:
        """Return AUC, accuracy and log loss on the rows for the evaluation."""
        if self._latest is not None and self._latest[0] == self.step:
            return self._latest[1]
        auc = self._evaluated() if self._options.evaluates(self._source) else StreamingAuc()
        if auc is None:
            raise self.interrupted()
        return auc

    def say_evaluation(self, step: int, auc: StreamingAuc) -> None:
        """Write an evaluation's result to the run directory and the screen, once."""
        if self._latest is not None and self._latest[0] == step:
            return
        self._latest = step, auc
        found = {"loss": auc.log_loss(), "auc": auc.result(), "accuracy": auc.accuracy()}
        only = {} if auc.only_label is None else {"only_label": auc.only_label}
        self._directory.event("eval", step=step, rows=auc.rows, **found, **only)
        self._directory.scalars(step, {f"eval/{name}": value for name, value in found.items()})
        self._view.say(
            f"held-out rows {auc.rows:,}: AUC {found['auc']:.4f}, accuracy {found['accuracy']:.4f}, "
            f"log loss {found['loss']:.4f}"
        )
        if only:
            self._view.say(
                f"warning: the label of all held-out rows is {auc.only_label}, so AUC says nothing; is it "
                "the right column?"
            )

    def _evaluate_between(self, position: Position) -> None:
        """Evaluate after a step, outside the measured speed; a stop request ends it without a result."""
        started = time.perf_counter()
        with self._stop.without_time_limit():
            auc = self._evaluated()
        if auc is not None and auc.rows:
            self.say_evaluation(position.step, auc)
        self._clock.pause(time.perf_counter() - started)

    def _evaluated(self) -> StreamingAuc | None:
        """Return the result; None after a stop request."""
        auc = StreamingAuc()
        for batch in holdout_batches(self._source, self._split, self._options.batch_size):
            if self._ranks.stop_requested(self._stop):
                return None
            part = batch.part(self._ranks.rank, self._ranks.count)
            if part.rows:
                with deferring_losses(self._ranks):
                    auc.update(part.labels, self._trainee.predict(part))
        self._ranks.barrier()
        if self._ranks.count > 1:
            auc.gather(self._ranks.sum)
        return auc

    def steps(self) -> int | None:
        """Return the steps of the whole run as far as known; estimated from bytes while a file is read."""
        limits = [] if self._options.steps is None else [self._options.steps]
        rows = self._source.total_rows()
        if self._options.epochs is not None:
            if rows is None:
                return None
            per_epoch = -(-self._split.training_rows(rows) // self._options.batch_size)
            limits.append(per_epoch * self._options.epochs)
        return min(limits, default=None)

    def _parts(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch, list[Batch]]]:
        """Yield of each batch its rows, and this worker's part of it and of the next ones, one or two."""
        parts = ((batch.rows, batch.part(self._ranks.rank, self._ranks.count)) for batch in batches)
        for (rows, part), following in with_following(parts, self._trainee.batches_ahead):
            yield rows, part, [later for _, later in following]

    def _step(self, position: Position, rows: int, part: Batch, following: list[Batch]) -> Position:
        self.step = position.step + 1
        self._announce()
        every = self._options.timeline
        first = rows not in self._sizes  # TensorFlow compiles in this step
        with self._stop.without_time_limit() if first else self._stop.waiting():
            with self._directory.traced() if every and self.step % every == 0 else nullcontext():
                if not self._ranks.lost:
                    with deferring_losses(self._ranks):
                        self._trainee.train(part, *following)
            stop = self._ranks.any_stop_request(self._stop)
        if not first and self._ended is not None:  # including its input, for which the others wait
            self._stop.raise_limit(2 * (time.monotonic() - self._ended))
        self._sizes.add(rows)
        self._clock.add(rows)
        position = replace(position, step=position.step + 1, batch=position.batch + 1)
        self._after_step(position, stop)
        every = self._options.eval_every
        if every and position.step % every == 0 and self._options.evaluates(self._source):
            self._evaluate_between(position)
            self._ended = time.monotonic()
        return position

    def _finished(self, position: Position) -> bool:
        if self._options.steps is not None and position.step >= self._options.steps:
            return True
        return self._options.epochs is not None and position.epoch >= self._options.epochs
