"""`fit` as a part of a job: progress, checkpoints, stop requests, and resuming at the right batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.job.state import ScriptState
from oe_runtime.training.dense_state import KerasState

if TYPE_CHECKING:
    from oe_runtime.job.course import ScriptCourse
    from oe_runtime.job.session import Session


class KerasScriptState(ScriptState):
    """A Keras model with its metrics, whose running means belong to the epoch."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, KerasState(model))

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        return {f"metric/{i}": np.asarray(v).copy() for i, v in enumerate(self._metrics())}

    def restore_metrics(self) -> None:
        """Give the metrics the values that they had at the checkpoint, where they are the same metrics."""
        variables = self._metrics()
        values = [self.loaded.get(f"metric/{i}") for i in range(len(variables))]
        if all(v is not None and v.shape == m.shape for v, m in zip(values, variables, strict=True)):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _metrics(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]


class JobFit:
    """The part of `JobCallback` that Keras 3 and tf-keras share; a callback."""

    model: Any
    _course: ScriptCourse | None = None

    def __init__(self, job: Any) -> None:
        """`job` is the module oe_runtime.job."""
        super().__init__()
        self._session: Session = job.current()
        self._skip = 0  # batches of the epoch that were trained before the checkpoint
        self._data: Any = None
        self._logs: Any = None  # of the skipped batches

    def fit(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model's `fit`, from the position of the run's checkpoint on."""
        given = fit_arguments(model, args, kwargs)
        if model.steps_per_execution != 1:
            raise ValueError("JobCallback counts single batches: leave out steps_per_execution")
        steps = model._running()
        state = KerasScriptState(model)
        losses = steps.measure_losses()
        course = self._course = self._session.begin(state)
        course.measure = lambda: _taken(losses)
        course.figures = self._figures
        course.summed(sum(math.prod(v.shape) for v in model.trainable_variables))
        first, epochs = int(given.get("initial_epoch", 0)), int(given.get("epochs", 1))
        self._data = given["x"] = epoch_data(given.get("x"))
        if not course.begin_part():
            _pass_epochs(self._data, epochs - first)
            self._session.screen.say("fit was done before the checkpoint: skipped")
            return state_library(model).callbacks.History()
        at = course.position
        if at.batch or at.epoch > first:
            self._skip, self._logs = at.batch, None
            if given.get("steps_per_epoch") is not None:
                raise ValueError(
                    "fit(steps_per_epoch=…) cannot go on in the middle: its epochs share an iterator; leave "
                    "it out, and give fit a dataset of one epoch (data.take(steps))"
                )
            _pass_epochs(self._data, at.epoch - first)
            given["initial_epoch"] = at.epoch
        _seed(course.position.part)
        model._around = self._around
        try:
            history = model.fit(**given)
        finally:
            model._around, model.train_function = None, None
        course.end_part()
        return history

    def _around(self, train: Callable[[Any], Any]) -> Callable[[Any], Any]:
        course = self._course
        assert course is not None  # noqa: S101 - in fit
        steps = self.model._running()

        def function(iterator: Any) -> Any:
            if self._skip:
                data = next(iterator)
                self._skip -= 1
                if self._logs is None:
                    steps.test(data)  # makes the metrics' variables, which Keras does with the first batch
                    course.state.restore_metrics()  # type: ignore[attr-defined]
                    self._logs = self._figures()
                return self._logs
            logs = course.compute(lambda: train(iterator))
            course.stepped(steps.examples)
            return logs

        return function

    def on_train_begin(self, logs: Any = None) -> None:
        """Count the run's steps."""
        if getattr(self.model, "_around", None) is None:
            raise ValueError(
                "JobCallback is for the models of oe_runtime: give this one to distributed_model first"
            )
        if hasattr(self._data, "training"):
            self._data.training = True
        params = self.params  # type: ignore[attr-defined]
        course = self._course
        if course is not None and params.get("steps"):
            course.expect(params["steps"], params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the position."""
        assert self._course is not None  # noqa: S101 - in fit
        self._course.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the position, and the epoch's figures."""
        assert self._course is not None  # noqa: S101 - in fit
        self._course.end_epoch(epoch, {} if logs is None else logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop in a validation too."""
        if self._course is not None:
            self._course.stop_here()

    def _figures(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.model.get_metrics_result().items()}


def fit_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` by name."""
    given = dict(inspect.signature(state_library(model).Model.fit).bind(model, *args, **kwargs).arguments)
    del given["self"]
    return given


def state_library(model: Any) -> Any:
    """Return the library of a model: keras or tf_keras."""
    return model.served.library


def _taken(losses: Any) -> tuple[float, int]:
    total, rows = losses.numpy()
    losses.assign([0.0, 0.0])
    return float(total), int(rows)


def _seed(part: int) -> None:
    """Let the order of shuffled arrays depend on the script's seed and the part only."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    seed = context.global_seed()
    tf.random.set_seed((0 if seed is None else seed) + part)


def epoch_data(data: Any) -> Any:
    """Return `data` for fit: of a tf.data dataset, one that can pass epochs."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        return data
    from oe_runtime.keras.job_data import EpochDataset

    return EpochDataset(data)


def _pass_epochs(data: Any, epochs: int) -> None:
    """Bring data whose order depends on the epochs before to where it was."""
    if hasattr(data, "skip_epochs"):
        data.skip_epochs(epochs)
    elif hasattr(data, "on_epoch_end"):  # of a PyDataset
        for _ in range(epochs):
            data.on_epoch_end()
