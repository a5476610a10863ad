"""The course of a run: its parts and epochs, what follows each step, and the answer to stop requests."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.data import Batch, Stream
from oe_runtime.data.batches import with_following
from oe_runtime.data.stream import Place
from oe_runtime.errors import CheckpointError
from oe_runtime.run.charts import duration
from oe_runtime.run.checkpoints import Checkpoints, Unpublished, check_settings
from oe_runtime.run.clock import Clock
from oe_runtime.run.connection import connect_publisher
from oe_runtime.run.evaluation import Evaluation, Prediction, checked_predictions
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import CollectiveRanks, Ranks, deferring_losses, refuse_together
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.run_input import RunInput
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.uploads import Uploads

MINUTE = 60.0  # seconds
COST = 0.01  # most of the time that checkpoints by time may take
_FIXED = (
    "not in the middle of training, because the job's checkpoints would not hold the tables as they were; "
    "do it before fit, or after it"
)
_MOST_NAMED = 8  # workers
_LEAST_STEPS = 2  # before losses are compared
_MORE = 2  # attempts at a checkpoint after which none comes
_PAUSE = 1.0  # seconds before each of them


class Interrupted(BaseException):
    """The run was asked to stop and has written what it needs to resume. No error that a script handles."""

    def __init__(self, position: Position, path: Path | None) -> None:
        super().__init__()
        self.position = position
        self.path = path


class Course:
    """The steps of one model, which come from `fit`, from job.train or from another loop.

    A part is a call of `fit` or job.train, or a block of job.training. After a step may come a progress line,
    a checkpoint, or the end.
    """

    def __init__(
        self,
        options: RunOptions,
        ranks: Ranks,
        client: Client | None,
        directory: RunDirectory | FollowingDirectory,
        view: View,
        stop: StopRequest,
        state: ScriptState,
        checkpoints: Checkpoints | FollowingCheckpoints | None = None,
    ) -> None:
        if checkpoints is None and options.rank and client is not None:
            checkpoints = FollowingCheckpoints(state, client, ranks)
        elif checkpoints is None:
            checkpoints = Checkpoints(options, state, client, ranks)
        if isinstance(checkpoints, Checkpoints):
            checkpoints.wants_files = lambda: stop.in_files
        self._run = options
        self._ranks = ranks
        self._client = client
        self.checkpoints = checkpoints
        self._directory = directory
        self._view = view
        self._stop = stop
        self.state = state
        self._figures = ServerFigures(None if options.rank else client, directory, options.stats_seconds)
        self.evaluation = Evaluation(ranks, directory, view, stop)
        self._publisher = None if client is None else connect_publisher(options, view.say)
        self._clock = Clock()
        self._ended: float | None = None  # time of the last step's end
        self.stepped: float | None = None  # the same by the system's clock, which a resumed run has too
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
        self.training = False  # in a part
        self.total: int | None = None  # steps to the end of the part, where it has an end of its own
        self.measure: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        self.figures: Callable[[], dict[str, float]] = dict  # more numbers to log
        self._predict: Callable[[], Iterable[Any]] | None = None  # of the present part
        self._source = ""  # where its labels and probabilities are from, for errors
        self._parts = 0  # begun
        self.metrics: Mapping[str, Any] | None = None  # the model's, after a step that returns no mean loss
        self._sizes: set[int] = set()  # of batches, for which the model has compiled
        self._warned = False  # looked whether workers train on the same batches
        self._checked = False  # the weights after the first step
        self._began = time.perf_counter()
        self._start = 0
        self._restored = 0  # the step that the model and its loop went back to
        self._resumed: tuple[Path, Mapping[str, Any]] | None = None  # the checkpoint, and its settings

    def is_of(self, state: ScriptState) -> bool:
        """Whether this course trains the model of `state`."""
        return self.state.model is state.model

    def begin(self, uploads: Uploads | None, settings: Mapping[str, Any]) -> None:
        """Go back to the run's checkpoint, if it is resumed. All workers begin together.

        `settings` are those of `keep_settings` that the program has used so far.
        """
        self._agree()
        if self._run.resume and isinstance(self.checkpoints, Checkpoints):
            found = checkpoint.latest(self._run.run_dir / "checkpoints")
            if found is not None:
                self._resumed = found.path, found.manifest["training"].get("settings", {})
        self.keep_settings(settings)
        if (began := self.go_to_start()) is not None:
            saved, lost = began
            self.saved, self.position = saved, saved.position
            if lost:
                self._view.say(lost)
        if self._run.resume and self.saved is not None:
            self._directory.event("resume", step=self.position.step, path=str(self.saved.path))
            self._view.say(f"going on from step {self.position.step}, {self.saved.path}")
        if uploads is not None and isinstance(self.checkpoints, Checkpoints):
            self.checkpoints.upload_to(uploads, self.saved)
        self._start = self._restored = self.position.step
        self._ranks.barrier()  # before the first push

    def go_to_start(self) -> tuple[RunCheckpoint, str] | None:
        """Go to the checkpoint that the run begins at; return it with a message. None: there is none."""
        if not self._run.resume:
            return None
        with self._stop.without_time_limit():
            saved, lost = self.checkpoints.roll_back()
            self.state.share_extra(self._ranks, saved.path)
        return saved, lost

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Write these settings into the checkpoints from now on. All workers call it together.

        Raises RunError in all of them if the resumed checkpoint has others. Checkpoints of programs that did
        not use the rows yet have none.
        """
        problem = ""
        if isinstance(self.checkpoints, Checkpoints):
            self.checkpoints.settings |= settings
            if self._resumed is not None and settings.keys() <= self._resumed[1].keys():
                try:
                    check_settings(*self._resumed, settings)
                except RunError as error:
                    problem = str(error)
        refuse_together(self._ranks, problem)

    def _agree(self) -> None:
        """Refuse workers whose models differ."""
        if self._ranks.count == 1:
            return
        mine = {name: [*value.shape, str(value.dtype)] for name, value in self.state.values().items()}
        mine = {name: shape for name, shape in mine.items() if not name.startswith("script/")}
        mine |= {f"table {name}": [spec.dim] for name, spec in self.state.tables.items()}
        mine = dict(sorted(mine.items())) | dict(self.state.settings())  # shapes explain most differences
        mine = json.loads(json.dumps(mine))
        theirs = json.loads(self._ranks.share(json.dumps(mine).encode()))
        problem = ""
        for name in mine | theirs:
            if repr(mine.get(name)) != repr(theirs.get(name)) and not problem:  # also of NaN
                problem = (
                    f"the workers' models differ: {name} is {mine.get(name, 'missing')} in worker "
                    f"{self._ranks.rank} and {theirs.get(name, 'missing')} in worker 0; the script must "
                    "build the same model in all of them"
                )
        refuse_together(self._ranks, problem)

    def summed(self, gradients: int) -> None:
        """Note how many values of dense gradients the workers sum in each step."""
        if isinstance(self._ranks, CollectiveRanks):
            self._ranks.gradients = gradients

    def begin_part(self, epochs: int = 0) -> bool:
        """Begin the next part; False for one that was done before the checkpoint.

        The part that had ended last goes on where more `epochs` are asked of it now.
        """
        part, self._parts = self._parts, self._parts + 1
        at = self.position
        if part < at.part or (part == at.part and at.ended is not None and epochs <= at.ended):
            return False
        if part > at.part:
            at = Position(at.step, part=part, stream=at.stream)  # a stream is read once
        self.total = None
        self.position = replace(at, ended=None, left_early=False)
        if self._ranks.stop_requested(self._stop):
            raise self.interrupted()
        # All workers take part, and of those that did not resume only worker 0 knows what is saved.
        if self._run.servers and self.saved is None and not self._begun:
            self._take(self.checkpoints.take_now, self.position)  # to return to after an early loss
        self._begun = True
        self.training = True
        return True

    def reopen_reading_part(self) -> bool:
        """Begin the part that `begin_part` has found done, if the flags now give its input more steps."""
        at = self.position
        if self.input is None or self._parts - 1 != at.part or at.ended is None or at.left_early:
            return False
        if self.input.has_ended(at):
            return False
        return self.reopen_part(at.ended + 1)

    def reopen_part(self, epochs: int) -> bool:
        """Begin the part that `begin_part` has found done; False unless it is to have more `epochs`."""
        self._parts -= 1
        return self.begin_part(epochs)

    def goes_on(self) -> bool:
        """Return whether the next step is the first after the checkpoint, in the middle of its part."""
        at = self.position
        return at.step == self._restored and bool(at.batch or at.epoch)

    def skip_part(self) -> None:
        """Pass over the part that `begin_part` has found done; the last one is evaluated anew."""
        if self._parts - 1 == self.position.part:
            self.evaluate_at_end()

    def end_part(self, epochs: int, *, left_early: bool = False) -> None:
        """End the part, of which so many epochs were asked: the run can go on after it.

        With `left_early`, rows of the job are left because the program took no more of them.
        """
        batch = self.position.batch if self.input is not None else 0  # --steps may end in an epoch
        self.position = replace(self.position, batch=batch, ended=epochs, left_early=left_early)
        self.state.gather(self._ranks)
        self._finish(self.position)
        if self._publisher is not None:
            self._publisher.finish(self.position.step, self.state.weights)
        self._directory.event("trained", step=self.position.step)
        seconds, speed = self._clock.seconds, self._clock.overall()
        rate = f", {speed:,.0f} samples/s" if speed else ""
        self._view.say(f"trained {self.position.step - self._start} steps in {duration(seconds)}{rate}")
        self.evaluate_at_end()
        self.training = False
        if self._client is not None:
            self._client.fixed = ""

    def end(self) -> None:
        """After the script: the last event of its run."""
        self._directory.event(
            "end",
            steps=self.position.step,
            seconds=round(self._clock.seconds, 3),
            total_seconds=round(time.perf_counter() - self._began, 3),
            samples_per_s=round(self._clock.overall(), 1),
        )

    def begin_epoch(self, epoch: int) -> None:
        """Note the begin of an epoch; of one that the checkpoint is in, its batches are kept."""
        if epoch != self.position.epoch:
            self.position = replace(self.position, epoch=epoch, batch=0)

    def end_epoch(self, epoch: int, figures: Mapping[str, Any]) -> dict[str, float]:
        """Note the end of an epoch, with its figures; return their means over the workers that have them."""
        self._ranks.end_epoch()
        mine = json.dumps({name: float(value) for name, value in figures.items()}).encode()
        each = [json.loads(self._ranks.share(mine, rank)) for rank in range(self._ranks.count)]
        values = {}
        for name in dict.fromkeys(itertools.chain.from_iterable(each)):
            found = [of_one[name] for of_one in each if name in of_one]
            values[name] = sum(found) / len(found)  # fmean refuses inf and -inf
        self._directory.event("epoch", epoch=epoch, step=self.position.step, figures=values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._view.say(f"epoch {epoch + 1} done at step {self.position.step}  {shown}".rstrip())
        self.position = replace(self.position, epoch=epoch + 1, batch=0)
        return values

    def agree_on_epochs(self, epochs: int) -> None:
        """Before training: refuse workers that will train different numbers of epochs."""
        self._agree_on("epochs", epochs)

    def agree_on_batches(self, epoch: int, batches: int | None) -> None:
        """Before an epoch: refuse workers with different numbers of batches, where all know theirs."""
        self._agree_on(f"batches in epoch {epoch + 1}", batches)

    def _agree_on(self, what: str, number: int | None) -> None:
        found = self._numbers(-1 if number is None else number)
        if -1 in found or len(set(found)) == 1:
            return
        each = ", ".join(f"{n} in worker {r}" for r, n in enumerate(found[:_MOST_NAMED]))
        raise RunError(
            f"the workers have different numbers of {what}: {each}"
            f"{', …' if len(found) > _MOST_NAMED else ''}; give each as many as the others"
        )

    def _numbers(self, mine: int) -> list[int]:
        """Return the numbers of all workers, of which `mine` is this worker's."""
        numbers = np.zeros(self._ranks.count, np.int64)
        numbers[self._ranks.rank] = mine
        return [int(number) for number in self._ranks.sum(numbers)]

    def expect(self, steps: int, epochs: int) -> None:
        """Note how many steps this part has in an epoch, and its epochs."""
        at = self.position
        self.total = at.step - at.batch + steps * (epochs - at.epoch)
        self._view.total(self.total, at.step)

    def steps(self) -> int | None:
        """Return the steps of the whole run as far as known."""
        if self.total is not None or self.input is None:
            return self.total
        return self.input.steps(self.position)

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
            if new or self._lacks_files():
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

    def compute(self, run: Callable[[], Any], size: int = 0) -> Any:
        """Run a step with the other workers; what it raises, it raises in all of them. Then call `count`.

        `size`: the rows of the batch, for each number of which the model compiles anew. That may take long
        after a stop request.
        """
        compiles = size not in self._sizes
        self.step = self.position.step + 1
        self._ranks.wants_checkpoint = self._is_time()
        self._ranks.send_stop_request(self._stop)
        result = None
        with self._stop.without_time_limit() if compiles else self._stop.waiting():
            if not self._ranks.lost:
                with deferring_losses(self._ranks), self.tracing():
                    result = run()
            self._asked = self._ranks.any_stop_request(self._stop)
        if not compiles and self._ended is not None:  # including its input, for which the others wait
            self._stop.raise_limit(2 * (time.monotonic() - self._ended))
        self._sizes.add(size)
        return result

    @property
    def lost(self) -> bool:
        """Whether this worker has lost a server or a worker: the others learn it as the step is counted."""
        return bool(self._ranks.lost)

    def tracing(self) -> AbstractContextManager[None]:
        """Trace the block, which is the next step, if that is one of --timeline."""
        every, step = self._run.timeline, self.position.step + 1
        return self._directory.traced() if every and step % every == 0 else nullcontext()

    def count(self, rows: int, batches: int = 1, *, ends_epoch: bool = False) -> None:
        """Count the step that `compute` has run over all workers' `rows`, and do what is due after it.

        It trained on `batches` of the epoch, the last of which ends it or not.
        """
        if self._client is not None:
            self._client.fixed = _FIXED  # models may make their tables in the first step
        self._clock.add(rows)
        self._note_step()
        at = self.position
        epoch, batch = (at.epoch + 1, 0) if ends_epoch else (at.epoch, at.batch + batches)
        place = at.stream if self._place is None else self._place
        self.position = replace(at, step=at.step + 1, epoch=epoch, batch=batch, stream=place)
        self._offer_weights()
        self._after_step(self.position, self._asked)
        self._evaluate_between(self.position)

    def _note_step(self) -> None:
        """Note when a step ended; after the first one of a resumed run, also how long training paused."""
        before, self.stepped = self.stepped, time.time()
        stopped = self._directory.stopped if before is None and self._run.resume else {}
        if stopped.get("step") != self._start or not isinstance(stopped.get("stepped"), float):
            return
        seconds = round(max(0.0, self.stepped - stopped["stepped"]), 3)
        servers = {"servers_before": stopped.get("servers"), "servers": len(self._run.servers)}
        self._directory.event("pause", step=self._start, seconds=seconds, **servers)
        self._view.say(
            f"training paused {seconds:.1f} s, from the end of step {self._start} to that of the next one; "
            f"servers: {servers['servers_before']} before, {servers['servers']} now"
        )

    def _offer_weights(self) -> None:
        """After a step: publish its dense weights for processes that serve the model, if that is due."""
        if self._publisher is not None and not self._ranks.lost:
            self._publisher.offer(self.position.step, self.state.weights)

    def own_step(self, rows: int, batches: int = 1, *, ends_epoch: bool = False) -> None:
        """Count a step over this worker's `rows` that the script has computed by itself; see `count`."""
        self._check_equal()
        self._ranks.wants_checkpoint = self._is_time()
        self._asked = self._ranks.stop_requested(self._stop)
        self.count(rows * self._ranks.count, batches, ends_epoch=ends_epoch)

    def _check_equal(self) -> None:
        """After the first step: refuse workers that do not train the same weights."""
        if self._ranks.count == 1 or self._checked:
            return
        self._checked = True
        problem = ""
        for name, mine in sorted(self.state.equal_values().items()):
            theirs = np.frombuffer(self._ranks.share(mine.tobytes()), mine.dtype).reshape(mine.shape)
            if not problem and not np.allclose(mine, theirs, rtol=1e-6, atol=1e-8):
                problem = (
                    f"after the first step, {name} of worker {self._ranks.rank} differs from that of worker "
                    "0: wrap the model that distributed_model returns in "
                    "torch.nn.parallel.DistributedDataParallel, which averages the workers' gradients"
                )
        refuse_together(self._ranks, problem)

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """Note that a checkpoint was restored to the servers and the model, in `seconds`."""
        self.saved = saved
        self._clock.pause(seconds)
        self._clock.window()
        self.evaluation.forget()
        self._ended = None
        self.state.share_extra(self._ranks, saved.path)
        self.state.begin_window()
        self.measure()
        self._restored = saved.position.step
        self._sizes.clear()  # before the next step some workers skip more input than others

    def interrupted(self) -> Interrupted:
        """Return the exception for a stop at the latest checkpoint."""
        if self.saved is None:
            return Interrupted(Position(), None)
        return Interrupted(self.saved.position, self.saved.path)

    def _lacks_files(self) -> bool:
        """Whether the latest checkpoint has its rows in pools, and a stop request wants them in files."""
        return self._stop.in_files and self.saved is not None and self.saved.pool is not None

    def stop_here(self) -> None:
        """Between steps, as in an evaluation: take a checkpoint and stop, if that was asked for."""
        if not self._stop or self._ranks.count > 1 or not self.training:
            return
        if self._clock.pending:
            self._log(self.position)
        if self.saved is None or self.saved.position != self.position or self._lacks_files():
            self._take(self.checkpoints.take_now, self.position)
        raise self.interrupted()

    def evaluate_by(
        self,
        predict: Callable[[], Iterable[Any]] | None,
        instead: str,
        source: str = "evaluate",
    ) -> None:
        """Before a part: evaluate by what `predict` yields, labels and probabilities of this worker's rows.

        Errors of these name the `source`. Without `predict`, raises RunError where a flag asks for
        evaluations; `instead` says what to do. All workers have it, or none.
        """
        having = self._numbers(int(predict is not None))
        if 0 in having and 1 in having:
            raise RunError(
                f"worker {having.index(1)} has something to evaluate with, and worker {having.index(0)} has "
                "not: give evaluate, or fit's validation_data, in all workers, which evaluate together"
            )
        flag = "--eval-every" if self._run.eval_every else "--eval-data" if self._run.eval_data else ""
        if predict is None and flag:
            raise RunError(f"{flag}: {instead}")
        self._predict, self._source = predict, source

    def _predictions(self) -> Iterator[Prediction] | None:
        """Return those of this worker's rows for the evaluation; None: there is nothing to evaluate."""
        if self._predict is None or not self._run.eval:
            return None
        return (checked_predictions(found, self._source) for found in self._predict())

    def evaluate_at_end(self) -> None:
        """Evaluate after the last step of a part, unless the program has nothing to evaluate with."""
        if (predictions := self._predictions()) is None:
            return
        known = self.input is not None and not self._run.program
        self._view.say(f"evaluating on {self.input.held_out}" if self.input and known else "evaluating")
        step = self.position.step
        if (auc := self.evaluation.latest(step)) is None:
            auc = self.evaluation.measure(predictions)
        if auc is None:
            raise self.interrupted()
        if auc.rows:
            self.evaluation.say(step, auc)
        else:
            self._view.say(
                "warning: evaluate yields no rows, so nothing was measured; --no-eval leaves it out"
            )

    def _evaluate_between(self, position: Position) -> None:
        """After a step, evaluate if that is due, outside the measured speed.

        A stop request ends it without a result.
        """
        if not self._run.eval_every or position.step % self._run.eval_every:
            return
        if (predictions := self._predictions()) is None:
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
        self._publish(lambda _: self.checkpoints.settle(wait=due or stop), position, again)
        if stop:
            self._take(self.checkpoints.take_now, position)
            raise Interrupted(position, self.saved.path if self.saved else None)
        if due:
            self._take(self._due_take(position, timed=timed), position, again)
        self._ended = time.monotonic()

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
        with self._stop.without_time_limit():
            self._publish(lambda _: self.checkpoints.settle(wait=True), position, "now")
            saved = self.saved
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
            rate = "learning rate" if self._run.program else "--learning-rate"
            raise RunError(f"the loss is {loss} at step {position.step}; try a smaller {rate}")
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
            **(facts := self._stream_facts(position)),
        )
        numbers = {"loss": loss, "auc": auc, "samples_per_s": speed, "eta_s": eta}
        numbers |= {name: facts[name] for name in ("rows", "waiting") if name in facts}
        self._view.step(position.step, steps, numbers)
        self._directory.scalars(position.step, {"loss": loss, "auc": auc, "samples_per_s": speed})
        if not self._ranks.lost:
            with deferring_losses(self._ranks):
                self._figures.sample(position.step)

    def window(self) -> tuple[float, float | None]:
        """Return mean loss and AUC of all workers' steps since the last call."""
        if self.metrics is not None:
            return self.state.window(self._ranks, self.metrics)
        own = np.zeros((self._ranks.count, 2), np.float64)
        own[self._ranks.rank] = self.measure()
        each = self._ranks.sum(own)
        total, rows = each.sum(axis=0)
        self._warn_of_same_batches(each)
        auc = next((value for name, value in self.figures().items() if name.lower() == "auc"), None)
        return (float(total / rows) if rows else 0.0), auc

    def _warn_of_same_batches(self, losses: NDArray[np.float64]) -> None:
        """Look at the first figures after the first step, before which all losses may be equal."""
        done = self.position.step - self._start
        if self._ranks.count == 1 or done < _LEAST_STEPS or self._warned:
            return
        self._warned = True
        if losses[0, 0] and (losses == losses[0]).all():
            self._view.say(
                f"warning: all {self._ranks.count} workers seem to train on the same batches, because their "
                "losses are equal: give each its part of the data by job.rank and job.workers"
            )

    def _stream_facts(self, position: Position) -> dict[str, Any]:
        """Return what a step's event says of a stream: rows so far, their last file, files not yet read."""
        if position.stream is None or self.input is None or self.input.stream is None:
            return {}
        place = Place.from_json(position.stream)
        return {"rows": place.rows, "file": place.file, "waiting": self.input.stream.waiting}

    def _take(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: str | None = None
    ) -> None:
        """Let worker 0 take a checkpoint; the others know that they wait for it."""
        self.state.gather(self._ranks)
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
            saved = self._attempt(take, position, again)
        seconds = time.perf_counter() - started
        self._clock.pause(seconds)
        if saved is not None:
            self._note(saved, seconds)

    def _attempt(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: str | None
    ) -> RunCheckpoint | None:
        """Take a checkpoint; where no later one is tried `again`, try this one up to twice more."""
        for left in range(0 if again else _MORE, -1, -1):
            try:
                return take(position)
            except CheckpointError as error:
                if again is None and not left:
                    raise
                step = error.step if isinstance(error, Unpublished) else position.step
                if again is not None:
                    self._directory.event("no_checkpoint", step=step, message=str(error))
                follows = f"training goes on, and the next one is tried {again}" if again else "trying again"
                self._view.say(f"warning: no checkpoint of step {step}: {error}; {follows}")
            if again is None:
                time.sleep(_PAUSE)
                take = self.checkpoints.take_files  # pools take no number twice
        return None

    def settle_files(self) -> None:
        """After an error, wait for a checkpoint that is being published; its problem is a warning."""
        try:
            if (saved := self.checkpoints.settle_files()) is not None:
                self._note(saved, 0.0)
        except CheckpointError as error:
            self._view.say(f"warning: {error}")

    def _note(self, saved: RunCheckpoint, seconds: float) -> None:
        """Tell of a checkpoint that kept training waiting for `seconds`."""
        self.saved = saved
        rows = "files" if saved.pool is None else "pool"
        self._directory.event(
            "checkpoint", step=saved.position.step, path=str(saved.path), seconds=round(seconds, 3), rows=rows
        )
        self._view.say(f"checkpoint {saved.path} ({seconds:.1f} s)")
