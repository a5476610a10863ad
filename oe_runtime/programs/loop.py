"""The course of a run: steps, progress, checkpoints, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

from oe_runtime.data import Batch, Source, holdout_batches, make_split, training_batches
from oe_runtime.data.batches import with_following
from oe_runtime.programs.click_model import KerasTrainee
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.course import Course
from oe_runtime.run.evaluation import Prediction
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
        self._sizes.clear()  # before the next step some workers skip more input than others

    def predictions(self) -> Iterator[Prediction] | None:
        """See Course: of this worker's part of the held-out rows, or of those of --eval-data."""
        return self._predictions() if self._options.evaluates(self._source) else None

    def _predictions(self) -> Iterator[Prediction]:
        for batch in holdout_batches(self._source, self._split, self._options.batch_size):
            part = batch.part(self._ranks.rank, self._ranks.count)
            yield part.labels, self._trainee.predict(part) if part.rows else part.labels

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
        self._evaluate_between(position)
        return position

    def _finished(self, position: Position) -> bool:
        if self._options.steps is not None and position.step >= self._options.steps:
            return True
        return self._options.epochs is not None and position.epoch >= self._options.epochs
