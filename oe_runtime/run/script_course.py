"""The course of a script's run: its steps come from the script's own loop, `fit` or another."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import checkpoint
from oe_runtime.client import Client
from oe_runtime.run.charts import duration
from oe_runtime.run.checkpoints import Checkpoints, check_settings
from oe_runtime.run.course import Course
from oe_runtime.run.evaluation import Prediction
from oe_runtime.run.followers import FollowingCheckpoints, FollowingDirectory
from oe_runtime.run.options import RunOptions, ScriptOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.progress import View
from oe_runtime.run.ranks import CollectiveRanks, Ranks, refuse_together
from oe_runtime.run.run_directory import RunDirectory, RunError
from oe_runtime.run.script_state import ScriptState
from oe_runtime.run.server_figures import ServerFigures
from oe_runtime.run.stopping import StopRequest
from oe_runtime.run.uploads import Uploads

_FIXED = (
    "not in the middle of training, because the job's checkpoints would not hold the tables as they were; "
    "do it before fit, or after it"
)
_MOST_NAMED = 8  # workers
_LEAST_STEPS = 2  # before losses are compared


class ScriptCourse(Course):
    """The steps of one model. A part is a call of `fit`, or a block of `job.training`."""

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
        figures = ServerFigures(None if options.rank else client, directory, options.stats_seconds)
        super().__init__(options, ranks, checkpoints, directory, view, stop, figures)
        self.state = state
        self._client = client
        self._rate = "learning rate" if isinstance(options, ScriptOptions) else "--learning-rate"
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

    def summed(self, gradients: int) -> None:
        """Note how many values of dense gradients the workers sum in each step."""
        if isinstance(self._ranks, CollectiveRanks):
            self._ranks.gradients = gradients

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

    def predict(self) -> Iterator[Prediction] | None:
        """See Course."""
        if self._predict is None or not self._run.eval:
            return None
        return (_checked(found, self._source) for found in self._predict())

    def evaluate_at_end(self) -> None:
        """Evaluate after the last step of a part, unless the program has nothing to evaluate with."""
        if self._predict is None or not self._run.eval:
            return
        known = self.input is not None and not isinstance(self._run, ScriptOptions)
        self._view.say(f"evaluating on {self.input.held_out}" if self.input and known else "evaluating")
        step = self.position.step
        auc = self.evaluate(step)
        if auc.rows:
            self.evaluation.say(step, auc)
        else:
            self._view.say(
                "warning: evaluate yields no rows, so nothing was measured; --no-eval leaves it out"
            )

    def goes_on(self) -> bool:
        """Return whether the next step is the first after the checkpoint, in the middle of its part."""
        at = self.position
        return at.step == self._restored and bool(at.batch or at.epoch)

    def skip_part(self) -> None:
        """Pass over the part that `begin_part` has found done; the last one is evaluated anew."""
        if self._parts - 1 == self.position.part:
            self.evaluate_at_end()

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
        self._begin(self.position)
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

    def end_part(self, epochs: int, *, left_early: bool = False) -> None:
        """End the part, of which so many epochs were asked: the run can go on after it.

        With `left_early`, rows of the job are left because the program took no more of them.
        """
        batch = self.position.batch if self.input is not None else 0  # --steps may end in an epoch
        self.position = replace(self.position, batch=batch, ended=epochs, left_early=left_early)
        self.state.gather(self._ranks)
        self._finish(self.position)
        self.say_trained()
        self.evaluate_at_end()
        self.training = False
        if self._client is not None:
            self._client.fixed = ""

    def say_trained(self) -> None:
        """Write that the steps are done, before the evaluation."""
        self._directory.event("trained", step=self.position.step)
        seconds, speed = self.speed()
        rate = f", {speed:,.0f} samples/s" if speed else ""
        self._view.say(f"trained {self.position.step - self._start} steps in {duration(seconds)}{rate}")

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

    def compute(self, run: Callable[[], Any], size: int = 0) -> Any:
        """Run a step with the other workers; what it raises, it raises in all of them.

        `size`: the rows of the batch, for each number of which the model compiles anew.
        """
        result = self._compute(run, compiles=size not in self._sizes)
        self._sizes.add(size)
        return result

    def stepped(self, rows: int) -> None:
        """Count the step that `compute` has run over this worker's `rows`."""
        self.count(rows * self._ranks.count)

    def count(self, rows: int) -> None:
        """Count the step that `compute` has run over the `rows` of all workers."""
        if self._client is not None:
            self._client.fixed = _FIXED  # models may make their tables in the first step
        self._count_step(rows)

    def rolled_back(self, saved: RunCheckpoint, seconds: float) -> None:
        """See Course."""
        super().rolled_back(saved, seconds)
        self.state.share_extra(self._ranks, saved.path)
        self.state.begin_window()
        self.measure()
        self._restored = saved.position.step
        self._sizes.clear()  # before the next step some workers skip more input than others

    def own_step(self, rows: int) -> None:
        """Count a step that the script has computed by itself."""
        self._check_equal()
        self._ranks.wants_checkpoint = self._is_time()
        self._asked = self._ranks.stop_requested(self._stop)
        self.stepped(rows)

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

    def _take(
        self, take: Callable[[Position], RunCheckpoint | None], position: Position, again: str | None = None
    ) -> None:
        self.state.gather(self._ranks)
        super()._take(take, position, again)

    def stop_here(self) -> None:
        """Between steps, as in an evaluation: take a checkpoint and stop, if that was asked for."""
        if not self._stop or self._ranks.count > 1 or not self.training:
            return
        if self._clock.pending:
            self._log(self.position)
        if self.saved is None or self.saved.position != self.position:
            self._take(self.checkpoints.take_now, self.position)
        raise self.interrupted()

    def steps(self) -> int | None:
        """See Course."""
        if self.total is not None or self.input is None:
            return self.total
        return self.input.steps(self.position)

    def window(self) -> tuple[float, float | None]:
        """See Course."""
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

    def end(self) -> None:
        """After the script: the last event of its run."""
        seconds, speed = self.speed()
        self._directory.event(
            "end",
            steps=self.position.step,
            seconds=round(seconds, 3),
            total_seconds=round(time.perf_counter() - self._began, 3),
            samples_per_s=round(speed, 1),
        )

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


def _checked(found: Any, source: str) -> Prediction:
    """Return labels and probabilities as flat arrays. Raises RunError for others, of `source`."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise RunError(f"{source} yields pairs of labels and probabilities, not a {type(found).__name__}")
    labels, probabilities = (  # numpy has no bfloat16 as PyTorch has it
        np.asarray(one.detach().cpu().double() if hasattr(one, "detach") else one) for one in found
    )
    for what, array in (("labels", labels), ("probabilities", probabilities)):
        if array.ndim == 0 or array.shape[1:] not in ((), (1,)):
            raise RunError(
                f"{source} yields {what} shaped {array.shape}: AUC and log loss need one for each row, "
                "shaped (B,) or (B, 1)"
            )
    labels, probabilities = labels.reshape(-1), probabilities.reshape(-1)
    if len(labels) != len(probabilities):
        raise RunError(
            f"{source} yields {len(probabilities)} probabilities for {len(labels)} labels: AUC and log loss "
            "need one for each row"
        )
    if not np.isin(labels, (0, 1)).all():
        raise RunError(f"{source} yields labels other than 0 and 1, for which there is no AUC")
    if np.isnan(probabilities).any():
        raise RunError(f"{source} yields NaN as a probability: try a smaller learning rate")
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise RunError(
            f"{source} yields values outside of 0 to 1 as probabilities: apply a sigmoid to logits first"
        )
    return labels, probabilities
