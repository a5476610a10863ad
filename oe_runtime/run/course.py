"""The course of a run, whoever computes its steps: progress, checkpoints, the answer to stop requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from oe_runtime.data import Batch, Stream
from oe_runtime.data.auc import StreamingAuc
from oe_runtime.data.batches import with_following
from oe_runtime.data.stream import Place
from oe_runtime.errors import CheckpointError
from oe_runtime.run.checkpoints import Checkpoints
from oe_runtime.run.evaluation import Evaluation, Prediction
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import Ranks, deferring_losses
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.stopping import StopRequest

MINUTE = 60.0  # seconds
COST = 0.01  # most of the time that checkpoints by time may take


class Interrupted(BaseException):
    """The run was asked to stop and has written what it needs to resume. No error that a script handles."""

    def __init__(self, position: Position, path: Path | None) -> None:
        super().__init__()
        self.position = position
        self.path = path


class Course:
    """What follows a step: a progress line, a checkpoint, an end."""

    _rate = "--learning-rate"

    def __init__(
        self,
        options: RunOptions,
        ranks: Ranks,
        checkpoints: Checkpoints | FollowingCheckpoints,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        figures: ServerFigures,
    ) -> None:
        self._run = options
        self._ranks = ranks
        self.checkpoints = checkpoints
        self._directory = directory
        self._view = view
        self._stop = stop
        self._figures = figures
        self.evaluation = Evaluation(ranks, directory, view, stop)
        self._clock = Clock()
        self._ended: float | None = None  # time of the last step's end
        self._due_at = time.monotonic() + self._interval(0.0)  # of the next checkpoint by time
        self._told = MINUTE * options.checkpoint_minutes  # longer intervals are news to the user
        self._timed = 0  # checkpoints that were due by time
        self.saved: RunCheckpoint | None = None  # the latest checkpoint
        self._begun = False  # once
        self.step = 0  # the last step begun
        self.position = Position()
        self.input: RunInput | None = None  # rows that the run itself reads
        self._place: Mapping[str, Any] | None = None  # in a stream, after the present batch
        self._waits = False  # for rows of a stream
        self._asked = False  # to stop, in the present step

    def steps(self) -> int | None:
        """Return the steps of the whole run as far as known."""
        return None if self.input is None else self.input.steps()

    def window(self) -> tuple[float, float | None]:
        """Return mean loss and AUC of all workers' steps since the last call."""
        raise NotImplementedError

    def facts(self, position: Position) -> dict[str, Any]:
        """Return what a step's event says besides.

        Of a stream: the rows so far, their last file, and the files that have not been read.
        """
        if position.stream is None or self.input is None or self.input.stream is None:
            return {}
        place = Place.from_json(position.stream)
        return {"rows": place.rows, "file": place.file, "waiting": self.input.stream.waiting}

    def batches(self, ahead: int) -> Generator[tuple[int, Batch, list[Batch]], None, None]:
        """Yield the batches of the input that are left: rows, this worker's part, its parts of the next ones.

        The next ones are `ahead`, or fewer at the end. The caller does a step with each, and counts it.
        Raises Interrupted after a stop request in a wait for rows.
        """
        assert self.input is not None  # noqa: S101 - set before
        if self.input.stream is not None:
            yield from self._arrivals(self.input, self.input.stream, ahead)
            return
        while not self.input.has_ended(self.position):
            begin = self.position
            parts = (
                (batch.rows, batch.part(self._ranks.rank, self._ranks.count))
                for batch in self.input.read_epoch(begin.batch)
            )
            for (rows, part), following in with_following(parts, ahead):
                yield rows, part, [later for _, later in following]
                if self.input.has_ended(self.position):
                    return
            if self.position.step == begin.step and begin.batch == 0:
                raise self.input.no_rows()
            self.position = replace(self.position, epoch=self.position.epoch + 1, batch=0)

    def _arrivals(
        self, rows: RunInput, stream: Stream, ahead: int
    ) -> Iterator[tuple[int, Batch, list[Batch]]]:
        """Yield the batches of a stream, to its end, as `batches`."""
        arriving = stream.batches(rows.batch_size, Place.from_json(self.position.stream))
        with closing(arriving):
            for now, following in with_following(arriving, ahead):
                if rows.has_ended(self.position):
                    break
                if now is None:
                    self._wait(stream)
                    continue
                self._waits, self._place = False, now.place.to_json()
                yield now.batch.rows, now.batch, [later.batch for later in following if later is not None]
                if rows.has_ended(self.position):
                    break
        self._place = None
        if not self.position.step:
            raise rows.no_rows()

    def _wait(self, stream: Stream) -> None:
        """Between two steps, where no whole batch has arrived. Raises Interrupted after a stop request."""
        position = self.position
        if not self._waits:
            if self._clock.pending:
                self._log(position)
            self._view.say(f"waiting for rows in {stream.describe()}")
            self._waits = True
        self._publish(lambda _: self.checkpoints.settle(), position, self._next_checkpoint(position))
        new = position.step and (self.saved is None or self.saved.position.step != position.step)
        if self._ranks.stop_requested(self._stop):
            if new:
                self._take(self.checkpoints.take_now, position)
            raise self.interrupted()
        if self._is_time() and new:
            self._take(self._due_take(position, timed=True), position, self._next_checkpoint(position))
        started = time.perf_counter()
        self._stop.wait(stream.pause)
        self._clock.pause(time.perf_counter() - started)

    def sharing_losses(self) -> AbstractContextManager[None]:
        """Tell workers that do not agree in each step of a server that this one loses in the block."""
        return nullcontext()

    def _compute(self, run: Callable[[], Any], *, compiles: bool) -> Any:
        """Run a step with the other workers; what it raises, it raises in all of them.

        A step that `compiles` may take long after a stop request. Count it with `_count_step`.
        """
        self.step = self.position.step + 1
        self._announce()
        result = None
        with self._stop.without_time_limit() if compiles else self._stop.waiting():
            if not self._ranks.lost:
                with deferring_losses(self._ranks), self.tracing():
                    result = run()
            self._asked = self._ranks.any_stop_request(self._stop)
        if not compiles and self._ended is not None:  # including its input, for which the others wait
            self._stop.raise_limit(2 * (time.monotonic() - self._ended))
        return result

    @property
    def lost(self) -> bool:
        """Whether this worker has lost a server or a worker: the others learn it as the step is counted."""
        return bool(self._ranks.lost)

    def tracing(self) -> AbstractContextManager[None]:
        """Trace the block, which is the next step, if that is one of --timeline."""
        every, step = self._run.timeline, self.position.step + 1
        return self._directory.traced() if every and step % every == 0 else nullcontext()

    def _count_step(self, rows: int) -> None:
        """Count a step over `rows` rows of all workers, and do what is due after it."""
        self._clock.add(rows)
        at = self.position
        self.position = replace(
            at, step=at.step + 1, batch=at.batch + 1, stream=at.stream if self._place is None else self._place
        )
        self._after_step(self.position, self._asked)
        self._evaluate_between(self.position)

    def predict(self) -> Iterable[Prediction] | None:
        """Return those of this worker's rows for the evaluation; None: there is nothing to evaluate."""
        return None

    def evaluate(self, step: int) -> StreamingAuc:
        """Return the result on the rows for the evaluation after the last step, which is `step`."""
        if (known := self.evaluation.latest(step)) is not None:
            return known
        predictions = self.predict()
        auc = StreamingAuc() if predictions is None else self.evaluation.measure(predictions)
        if auc is None:
            raise self.interrupted()
        return auc

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """Note that a checkpoint was restored to the servers and the model, in `seconds`."""
        self.saved = saved
        self._clock.pause(seconds)
        self._clock.window()
        self.evaluation.forget()
        self._ended = None

    def speed(self) -> tuple[float, float]:
        """Return seconds of training, and samples per second without the first step, which compiles."""
        return self._clock.seconds, self._clock.overall()

    def interrupted(self) -> Interrupted:
        """Return the exception for a stop at the latest checkpoint."""
        if self.saved is None:
            return Interrupted(Position(), None)
        return Interrupted(self.saved.position, self.saved.path)

    def _begin(self, position: Position) -> None:
        """Before the first step: take a checkpoint to return to after an early loss, unless there is one."""
        # All workers take part, and of those that did not resume only worker 0 knows what is saved.
        if self._run.servers and self.saved is None and not self._begun:
            self._take(self.checkpoints.take_now, position)
        self._begun = True

    def _after_step(self, position: Position, stop: bool) -> None:
        """Log, and take a checkpoint, where they are due. Raises Interrupted after a stop request."""
        self._view.tick(position.step)
        every = self._run.checkpoint_steps
        timed = self._ranks.checkpoint_due  # in all workers
        due = timed or (bool(every) and position.step % every == 0)
        if due or stop:
            self._ranks.barrier()  # all have pushed
        # A checkpoint ends a window, so that a resumed run reports the same means.
        if due or stop or position.step % self._run.log_every == 0:
            self._log(position)
        again = self._next_checkpoint(position)
        self._publish(lambda _: self.checkpoints.settle(), position, again)
        if stop:
            self._take(self.checkpoints.take_now, position)
            raise Interrupted(position, self.saved.path if self.saved else None)
        if due:
            self._take(self._due_take(position, timed=timed), position, again)
        self._ended = time.monotonic()

    def _evaluate_between(self, position: Position) -> None:
        """After a step, evaluate if that is due, outside the measured speed.

        A stop request ends it without a result.
        """
        if not self._run.eval_every or position.step % self._run.eval_every:
            return
        if (predictions := self.predict()) is None:
            return
        started = time.perf_counter()
        with self._stop.without_time_limit():
            auc = self.evaluation.measure(predictions)
        if auc is None:
            self._view.say(f"no evaluation of step {position.step}, because the stop request came during it")
        elif auc.rows:
            self.evaluation.say(position.step, auc)
        self._clock.pause(time.perf_counter() - started)
        self._ended = time.monotonic()

    def _announce(self) -> None:
        """Before a step: let the workers know of a stop request, and of a checkpoint that time asks for."""
        self._ranks.wants_checkpoint = self._is_time()
        self._ranks.send_stop_request(self._stop)

    def _is_time(self) -> bool:
        """Whether the last checkpoint is as old as it may be, by the clock of worker 0."""
        return self._run.rank == 0 and time.monotonic() >= self._due_at

    def _interval(self, seconds: float) -> float:
        """Return the seconds from a checkpoint that took `seconds` to the next one by time."""
        minutes = self._run.checkpoint_minutes
        return max(MINUTE * minutes, seconds / COST) if minutes else math.inf

    def _count_from_now(self, seconds: float) -> None:
        """After a checkpoint, which took `seconds`: the time until the next one begins."""
        interval = self._interval(seconds)
        self._due_at = time.monotonic() + interval
        if self._told < interval < math.inf and self._run.rank == 0:
            self._told = 2 * interval
            self._view.say(
                f"the checkpoint took {seconds:.0f} s: the next one by time comes after "
                f"{interval / MINUTE:.0f} minutes, so that they take {COST:.0%} of the time at most"
            )

    def _finish(self, position: Position) -> None:
        """After the last step: the last figures, and a checkpoint with its rows in files."""
        if self._clock.pending:
            self._log(position)
        self._ranks.barrier()  # all have pushed
        with deferring_losses(self._ranks):
            self._figures.finish(position.step)
        # Rows in files, because the servers and their storage may end after the last step.
        saved = self.saved
        with self._stop.without_time_limit():
            known = saved is not None and saved.pool is None and saved.position.step == position.step
            if not known or position.left_early:  # which the checkpoint of the last step does not say
                self._publish(self.checkpoints.take_files, position)
            self._ranks.barrier()  # before anybody leaves

    def _next_checkpoint(self, position: Position) -> str:
        """Return when the next checkpoint after `position` comes."""
        every = self._run.checkpoint_steps
        by_step = f"at step {position.step + every - position.step % every}" if every else ""
        by_time = f"after {self._run.checkpoint_minutes} minutes" if self._run.checkpoint_minutes else ""
        return " or ".join(filter(None, (by_step, by_time)))

    def _due_take(self, position: Position, *, timed: bool) -> Callable[[Position], RunCheckpoint | None]:
        """Return how to take a due checkpoint: every Nth has its rows in files."""
        self._timed += timed
        nth = self._run.export_checkpoints
        number = self._timed if timed else position.step // self._run.checkpoint_steps
        return self.checkpoints.take_files if nth and number % nth == 0 else self.checkpoints.take

    def _log(self, position: Position) -> None:
        loss, auc = self.window()
        if not math.isfinite(loss):
            raise RunError(f"the loss is {loss} at step {position.step}; try a smaller {self._rate}")
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
            **(facts := self.facts(position)),
        )
        numbers = {"loss": loss, "auc": auc, "samples_per_s": speed, "eta_s": eta}
        numbers |= {name: facts[name] for name in ("rows", "waiting") if name in facts}
        self._view.step(position.step, steps, numbers)
        self._directory.scalars(position.step, {"loss": loss, "auc": auc, "samples_per_s": speed})
        if not self._ranks.lost:
            with deferring_losses(self._ranks):
                self._figures.sample(position.step)

    def _take(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: str | None = None
    ) -> None:
        """Let worker 0 take a checkpoint; the others know that they wait for it."""
        started = time.monotonic()
        with self._stop.without_time_limit():
            self._publish(take, position, again)
            self._ranks.barrier()
        self._count_from_now(time.monotonic() - started)

    def _publish(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: str | None = None
    ) -> None:
        """Publish a checkpoint. A failure is a warning where `again` says when the next attempt is."""
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
                    f"the next one is tried {again}"
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


class Clock:
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
