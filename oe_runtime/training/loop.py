"""The course of a run: steps, progress, checkpoints, evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from oe_runtime.data import Batch, Source, holdout_batches, make_split, training_batches
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.errors import CheckpointError
from oe_runtime.training.checkpoints import Checkpoints
from oe_runtime.training.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.training.options import Options
from oe_runtime.training.position import Position, RunCheckpoint
from oe_runtime.training.progress import View
from oe_runtime.training.ranks import deferring_losses
from oe_runtime.training.run_directory import RunDirectory, RunError
from oe_runtime.training.server_figures import ServerFigures
from oe_runtime.training.stopping import StopRequest
from oe_runtime.training.trainee import KerasTrainee


class Interrupted(Exception):
    """The run was asked to stop and has written what it needs to resume."""

    def __init__(self, position: Position, path: Path | None) -> None:
        super().__init__()
        self.position = position
        self.path = path


class Loop:
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
        self._options = options
        self._source = source
        self._split = make_split(source, options.holdout)
        self._trainee = trainee
        self._ranks = trainee.ranks
        self._checkpoints = checkpoints
        self._directory = directory
        self._view = view
        self._stop = stop
        self._figures = figures
        self._clock = _Clock()
        # Batch sizes for which TensorFlow has compiled since the start or the last return to a checkpoint.
        self._sizes: set[int] = set()
        self._ended: float | None = None  # time of the last step's end
        self.saved: RunCheckpoint | None = None  # the latest checkpoint
        self.step = 0  # the last step begun

    def train(self, start: Position) -> Position:
        """Train from `start` to the end of the last epoch or to --steps, and checkpoint the end.

        `saved` is the checkpoint of `start`, if there is one.
        """
        position = start
        if self._options.servers and self.saved is None:
            self._take(self._checkpoints.take_now, position)  # to return to after an early loss
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
        if self._clock.pending:
            self._log(position)
        self._ranks.barrier()  # all have pushed
        with deferring_losses(self._ranks):
            self._figures.finish(position.step)
        # Rows in files, because the servers and their storage may end after the last step.
        saved = self.saved
        with self._stop.without_time_limit():
            if saved is None or saved.position.step != position.step or saved.pool is not None:
                self._publish(self._checkpoints.take_files, position)
            self._ranks.barrier()  # before anybody leaves
        return position

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """Note that a checkpoint was restored to the servers and the model, in `seconds`."""
        self.saved = saved
        self._trainee.window()
        self._clock.pause(seconds)
        self._clock.window()
        self._sizes.clear()  # before the next step some workers skip more input than others
        self._ended = None

    def evaluate(self) -> StreamingAuc:
        """Return AUC and log loss on the held-out rows."""
        auc = StreamingAuc()
        if not self._options.holdout or not self._options.eval:
            return auc
        for batch in holdout_batches(self._source, self._split, self._options.batch_size):
            if self._ranks.stop_requested(self._stop):
                raise self.interrupted()
            part = batch.part(self._ranks.rank, self._ranks.count)
            if part.rows:
                with deferring_losses(self._ranks):
                    auc.update(part.labels, self._trainee.predict(part))
        self._ranks.barrier()
        if self._ranks.count > 1:
            auc.gather(self._ranks.sum)
        return auc

    def speed(self) -> tuple[float, float]:
        """Return seconds of training, and samples per second without the first step, which compiles."""
        return self._clock.seconds, self._clock.overall()

    def steps(self) -> int | None:
        """Return the steps of the whole run as far as known; estimated from bytes while a file is read."""
        limits = [] if self._options.steps is None else [self._options.steps]
        rows = self._source.total_rows()
        if self._options.epochs is not None:
            if rows is None:
                return None
            per_epoch = -(-self._split.training_rows(rows) // self._options.batch_size)
            limits.append(per_epoch * self._options.epochs)
        return min(limits)

    def _parts(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch, Batch | None]]:
        """Yield of each batch its rows, and this worker's part of it and of the next one."""
        iterator = ((batch.rows, batch.part(self._ranks.rank, self._ranks.count)) for batch in batches)
        now = next(iterator, None)
        while now is not None:
            following = next(iterator, None)
            yield *now, None if following is None else following[1]
            now = following

    def _step(self, position: Position, rows: int, part: Batch, following: Batch | None) -> Position:
        self.step = position.step + 1
        self._ranks.send_stop_request(self._stop)
        every = self._options.timeline
        first = rows not in self._sizes  # TensorFlow compiles in this step
        with self._stop.without_time_limit() if first else self._stop.waiting():
            with self._directory.traced() if every and self.step % every == 0 else nullcontext():
                if not self._ranks.lost:
                    with deferring_losses(self._ranks):
                        self._trainee.train(part, following)
            stop = self._ranks.any_stop_request(self._stop)
        if not first and self._ended is not None:  # including its input, for which the others wait
            self._stop.raise_limit(2 * (time.monotonic() - self._ended))
        self._sizes.add(rows)
        self._clock.add(rows)
        position = replace(position, step=position.step + 1, batch=position.batch + 1)
        self._view.tick(position.step)
        every = self._options.checkpoint_steps
        due = bool(every) and position.step % every == 0
        if due or stop:
            self._ranks.barrier()  # all have pushed
        # A checkpoint ends a window, so that a resumed run reports the same means.
        if due or stop or position.step % self._options.log_every == 0:
            self._log(position)
        again = self._next_checkpoint(position)
        self._publish(lambda _: self._checkpoints.settle(), position, again)
        if stop:
            self._take(self._checkpoints.take_now, position)
            raise Interrupted(position, self.saved.path if self.saved else None)
        if due:
            self._take(self._due_take(position), position, again)
        self._ended = time.monotonic()
        return position

    def _next_checkpoint(self, position: Position) -> int:
        """Return the step of the next checkpoint after `position`."""
        every = self._options.checkpoint_steps
        return position.step + every - (position.step % every if every else 0)

    def _due_take(self, position: Position) -> Callable[[Position], RunCheckpoint | None]:
        """Return how to take a due checkpoint: every Nth has its rows in files."""
        nth = self._options.export_checkpoints
        export = bool(nth) and position.step // self._options.checkpoint_steps % nth == 0
        return self._checkpoints.take_files if export else self._checkpoints.take

    def interrupted(self) -> Interrupted:
        """Return the exception for a stop at the latest checkpoint."""
        if self.saved is None:
            return Interrupted(Position(), None)
        return Interrupted(self.saved.position, self.saved.path)

    def _finished(self, position: Position) -> bool:
        if self._options.steps is not None and position.step >= self._options.steps:
            return True
        return self._options.epochs is not None and position.epoch >= self._options.epochs

    def _log(self, position: Position) -> None:
        loss, auc = self._trainee.window()
        if not math.isfinite(loss):
            raise RunError(f"the loss is {loss} at step {position.step}; try a smaller --learning-rate")
        steps = self.steps()
        speed, step_seconds = self._clock.window()
        eta: float | None = None
        if steps is not None and step_seconds is not None:
            eta = max(0, steps - position.step) * step_seconds
        self._directory.event(
            "step",
            step=position.step,
            steps=steps,
            epoch=position.epoch,
            loss=loss,
            auc=auc,
            samples_per_s=None if speed is None else round(speed, 1),
            eta_s=None if eta is None else round(eta, 1),
        )
        numbers = {"loss": loss, "auc": auc, "samples_per_s": speed, "eta_s": eta}
        self._view.step(position.step, steps, numbers)
        self._directory.scalars(position.step, {"loss": loss, "auc": auc, "samples_per_s": speed})
        if not self._ranks.lost:
            with deferring_losses(self._ranks):
                self._figures.sample(position.step)

    def _take(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: int | None = None
    ) -> None:
        """Let worker 0 take a checkpoint; the others know that they wait for it."""
        with self._stop.without_time_limit():
            self._publish(take, position, again)
            self._ranks.barrier()

    def _publish(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: int | None = None
    ) -> None:
        """Publish a checkpoint. A failure is a warning where the next attempt is at step `again`."""
        if self._ranks.lost:
            return
        started = time.perf_counter()
        saved: RunCheckpoint | None = None
        with deferring_losses(self._ranks):
            try:
                saved = take(position)
            except CheckpointError as error:
                if again is None:
                    raise
                self._directory.event("no_checkpoint", step=position.step, message=str(error))
                self._view.say(
                    f"warning: no checkpoint of step {position.step}: {error}; training goes on, and "
                    f"the next one is tried at step {again}"
                )
        seconds = time.perf_counter() - started
        self._clock.pause(seconds)
        if saved is None:
            return
        self.saved = saved
        rows = "files" if saved.pool is None else "pool"
        self._directory.event(
            "checkpoint", step=saved.position.step, path=str(saved.path), seconds=round(seconds, 3), rows=rows
        )
        self._view.say(f"checkpoint {saved.path} ({seconds:.1f} s)")


class _Clock:
    """The speed of the steps, without checkpoints and the first step, in which TensorFlow compiles."""

    def __init__(self) -> None:
        self._began = self._window_began = time.perf_counter()
        self._paused = 0.0
        self._first_ended: float | None = None
        self._rows = 0  # after the first step
        self._window_rows = self._window_steps = 0
        self.pending = False  # steps since the last window

    def add(self, rows: int) -> None:
        """Count a step over `rows` rows."""
        self.pending = True
        if self._first_ended is None:
            self._first_ended = self._window_began = time.perf_counter()
            return
        self._rows += rows
        self._window_rows += rows
        self._window_steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out `seconds` of other work."""
        self._window_began += seconds
        if self._first_ended is None:
            self._began += seconds
        else:
            self._paused += seconds

    def window(self) -> tuple[float | None, float | None]:
        """Return samples per second and seconds per step since the last call; None after only one step."""
        now = time.perf_counter()
        seconds, rows, steps = now - self._window_began, self._window_rows, self._window_steps
        self._window_began, self._window_rows, self._window_steps, self.pending = now, 0, 0, False
        return (rows / seconds, seconds / steps) if steps and seconds > 0 else (None, None)

    @property
    def seconds(self) -> float:
        """The seconds since the start, without pauses."""
        return time.perf_counter() - self._began - self._paused

    def overall(self) -> float:
        """Return samples per second of all steps except the first."""
        if self._first_ended is None or not self._rows:
            return 0.0
        return self._rows / max(time.perf_counter() - self._first_ended - self._paused, 1e-9)
