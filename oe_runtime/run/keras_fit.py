"""`fit` as a part of a job: progress, checkpoints, stop requests, and resuming at the right batch."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.run.callback_state import CallbackStates
from oe_runtime.run.dense_state import KerasState
from oe_runtime.run.model_settings import keras_settings
from oe_runtime.run.position import Position
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.script_state import ScriptState
from oe_runtime.support import dense_file

if TYPE_CHECKING:
    from oe_runtime.run.script_course import ScriptCourse
    from oe_runtime.run.session import Session


class KerasScriptState(ScriptState):
    """A Keras model with its metrics, whose running means belong to the epoch."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, KerasState(model))
        self._optimizer: Any = None  # that has the checkpoint's variables
        self.callbacks: CallbackStates | None = None  # of the present fit, once they have begun

    def settings(self) -> Mapping[str, Any]:
        """See ScriptState."""
        return keras_settings(self.model)

    def load(self, directory: Path) -> None:
        """See ScriptState."""
        super().load(directory)
        self._optimizer = self.model.optimizer

    def load_again(self, ranks: Ranks, directory: Path) -> None:
        """Load the checkpoint once more where the script has compiled the model anew since."""
        if self._optimizer is None or self._optimizer is self.model.optimizer:
            return
        content = ranks.share(b"" if ranks.rank else (directory / dense_file.FILE).read_bytes())
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / dense_file.FILE).write_bytes(content)
            self._dense.load(Path(temporary))

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState."""
        if self.callbacks is None:
            return {}
        return {"callbacks": np.frombuffer(json.dumps(self.callbacks.changed()).encode(), np.uint8)}

    def own(self) -> Mapping[str, NDArray[Any]]:
        """See ScriptState: of this worker's part of the data."""
        metrics = {f"metric/{i}": np.asarray(v).copy() for i, v in enumerate(self._metrics())}
        states = {f"random/{i}": one.state.numpy() for i, one in enumerate(self._generators())}
        return {**metrics, **states}

    def load_extra(self, directory: Path) -> None:
        """See ScriptState."""
        super().load_extra(directory)
        for i, generator in enumerate(self._generators()):
            if (state := self.loaded_own(f"random/{i}")) is not None:
                generator.state.assign(state)

    def unsaved_random_layers(self) -> list[str]:
        """Return the names of layers of tf-keras whose random numbers go on otherwise after a resume."""
        return [layer.name for layer, generator in self._random_layers() if generator is None]

    def _generators(self) -> list[Any]:
        """Return the random generators of tf-keras's layers; Keras 3 has theirs among the variables."""
        return [generator for _, generator in self._random_layers() if generator is not None]

    def _random_layers(self) -> list[tuple[Any, Any]]:
        layers = self.model._flatten_layers(include_self=False, recursive=True)
        random = [(one, one._random_generator) for one in layers if hasattr(one, "_random_generator")]
        stateful = [(one, found) for one, found in random if found._rng_type != found.RNG_STATELESS]
        return [(one, getattr(found, "_generator", None)) for one, found in stateful]

    def restore_callbacks(self) -> None:
        """Give the callbacks the state that they had at the checkpoint."""
        if self.callbacks is not None and (state := self.loaded.get("callbacks")) is not None:
            self.callbacks.restore(json.loads(state.tobytes()))

    def restore_metrics(self) -> None:
        """Give the metrics the values that they had at the checkpoint, where they are the same metrics."""
        variables = self._metrics()
        values = [self.loaded_own(f"metric/{i}") for i in range(len(variables))]
        if all(v is not None and v.shape == m.shape for v, m in zip(values, variables, strict=True)):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _metrics(self) -> list[Any]:
        return [variable for metric in self.model.metrics for variable in metric.variables]


class FitPart:
    """What a `JobCallback` does, for Keras 3 and tf-keras."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._course: ScriptCourse | None = None
        self._model: Any = None
        self._skip = 0  # batches of the epoch that were trained before the checkpoint
        self._drop = 0  # batches before these: steps_per_epoch's epochs share an iterator
        self._data: Any = None
        self._callback: Any = None
        self._others: list[Any] = []  # callbacks
        self._resumed = False  # in this part
        self._logs: Any = None  # of the skipped batches

    def fit(self, callback: Any, model: Any, given: dict[str, Any]) -> Any:
        """Call the model's `fit` with the `given` arguments, from the position of the run's checkpoint on.

        `callback` is the JobCallback among them.
        """
        from oe_runtime.keras.dense import is_built

        self._callback = callback
        if model.steps_per_execution != 1:
            raise ValueError("JobCallback counts single batches: leave out steps_per_execution")
        self._model = model
        steps = model._running()
        first, epochs = int(given.get("initial_epoch", 0)), int(given.get("epochs", 1))
        self._data = given["x"] = epoch_data(
            _repeated(given, epochs - first) if model.served.library.__name__ == "keras" else given.get("x")
        )
        if not is_built(model):
            steps.build(_first_batch(given))
        state = KerasScriptState(model)
        losses = steps.measure_losses()
        course = self._course = self._session.begin(state)
        if (layers := state.unsaved_random_layers()) and not self._session.told_of_random:
            self._session.told_of_random = True
            self._session.screen.say(
                f"warning: the random numbers of layer {', '.join(layers)} are not in checkpoints, so losses "
                "after a resume differ from those of a run without a stop: call "
                "tf_keras.backend.experimental.enable_tf_random_generator() before the layers are made"
            )
        course.measure = lambda: _taken(losses)
        course.figures = self._figures
        course.summed(sum(math.prod(v.shape) for v in model.trainable_variables))
        course.agree_on_epochs(epochs)
        if _is_shuffled(given) and given.get("steps_per_epoch") in (None, -1, _size(given)):
            from oe_runtime.run.keras_data import shuffled_batches

            self._data = given["x"] = shuffled_batches(model.served.library, self._data)
            given["shuffle"] = False
        if not course.begin_part(epochs):
            _pass_epochs(self._data, epochs - first)
            self._session.screen.say("fit was done before the checkpoint: skipped")
            return model.served.library.callbacks.History()
        at = course.position
        if course.saved is not None and course.saved.position.part == at.part:
            course.state.load_again(self._session.ranks, course.saved.path)  # type: ignore[attr-defined]
        if at.batch or at.epoch > first:
            self._skip, self._logs = at.batch, None
            passes, batches = _read_before(given, at, first, epochs)
            self._drop = batches - at.batch
            _pass_epochs(self._data, passes)
            if hasattr(self._data, "pass_batches"):
                self._data.pass_batches(batches)
            given["initial_epoch"] = at.epoch
        state = course.state  # type: ignore[assignment]
        state.callbacks = None
        self._others, self._resumed = _first(self._callback, given), bool(at.batch or at.epoch > first)
        seed = _seed(self._session, course.position.part)
        if hasattr(self._data, "seed"):
            self._data.seed = seed
        model._around = self._around
        try:
            history = model.fit(**given)
        finally:
            model._around, model.train_function = None, None
        course.end_part(epochs)
        return history

    def _around(self, train: Callable[[Any], Any]) -> Callable[[Any], Any]:
        course = self._course
        assert course is not None  # noqa: S101 - in fit
        steps = self._model._running()

        def function(iterator: Any) -> Any:
            while self._drop:
                next(iterator)
                self._drop -= 1
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

    def begin(self, params: Mapping[str, Any]) -> None:
        """Count the run's steps, from the callback's `params`."""
        if hasattr(self._data, "training"):
            self._data.training = True
        if self._course is None:
            return
        self._course.agree_on_batches(self._course.position.epoch, params.get("steps"))
        if params.get("steps"):
            self._course.expect(params["steps"], params["epochs"])

    def begin_epoch(self, epoch: int) -> None:
        """Note the position. Before the first, callbacks get the state that they had at the checkpoint."""
        assert self._course is not None  # noqa: S101 - in fit
        state: Any = self._course.state
        if state.callbacks is None:
            state.callbacks = CallbackStates(self._others)
            if self._resumed:
                state.restore_callbacks()
        self._course.begin_epoch(epoch)

    def end_epoch(self, epoch: int, figures: dict[str, Any]) -> None:
        """Note the position and the epoch's figures, of which callbacks get the means over the workers."""
        assert self._course is not None  # noqa: S101 - in fit
        state: Any = self._course.state
        if (unsaved := state.callbacks.unsaved()) and not self._session.told_of_callbacks:
            self._session.told_of_callbacks = True
            self._session.screen.say(
                f"warning: {', '.join(unsaved)} of fit's callbacks is no number or text: after a resume, "
                "such callbacks begin anew"
            )
        figures.update(self._course.end_epoch(epoch, figures))

    def stop_here(self) -> None:
        """Stop in a validation too."""
        if self._course is not None:
            self._course.stop_here()

    def _figures(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._model.get_metrics_result().items()}


def _first(callback: Any, given: dict[str, Any]) -> list[Any]:
    """Put a JobCallback before fit's other callbacks, which are returned."""
    import keras

    every = [one for one in keras.tree.flatten(given.get("callbacks") or []) if one is not None]
    others = [one for one in every if one is not callback]
    given["callbacks"] = [callback, *others]
    return others


def _first_batch(given: dict[str, Any]) -> Any:
    """Return a batch of fit's data, which still has it afterwards: (x, …), of arrays the first example.

    Raises ValueError for data without one.
    """
    import tensorflow as tf

    data = given["x"]
    if isinstance(data, Iterator):
        if (batch := next(data, None)) is None:
            raise _no_batch("generator")
        given["x"] = (one for one in itertools.chain([batch], data))  # Keras asks for a generator
        return batch
    if _is_py_dataset(data):
        if _size(given) == 0:
            raise _no_batch(type(data).__name__)
        return data[0]
    if isinstance(data, tf.data.Dataset):
        if (batch := next(iter(data), None)) is None:
            raise _no_batch("dataset")
        return batch
    if _size(given) == 0:
        raise _no_batch("array")
    return (tf.nest.map_structure(lambda array: array[:1], data),)


def _no_batch(data: str) -> ValueError:
    return ValueError(
        f"fit: its data are empty: the {data} has no batch, from which the model makes its weights; give it "
        "at least one"
    )


def _taken(losses: Any) -> tuple[float, int]:
    total, rows = losses.numpy()
    losses.assign([0.0, 0.0])
    return float(total), int(rows)


def _seed(session: Session, part: int) -> int:
    """Let the order of shuffled data depend on the script's seed and the part only; return the seed."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    found = context.global_seed()
    if session.seeds is None or found != session.seeds[1]:  # the script has set one since the last part
        session.seeds = found or 0, None
    session.seeds = session.seeds[0], session.seeds[0] + part
    seed = session.seeds[0] + part
    tf.random.set_seed(seed)
    return seed


def epoch_data(data: Any) -> Any:
    """Return `data` for fit: of a tf.data dataset, one that can pass epochs."""
    import tensorflow as tf

    if not isinstance(data, tf.data.Dataset):
        return data
    from oe_runtime.run.keras_data import EpochDataset

    return EpochDataset(data)


def _read_before(given: Mapping[str, Any], at: Position, first: int, epochs: int) -> tuple[int, int]:
    """Return how often fit had read its data to their end at a position, and the batches since.

    `first` is fit's initial epoch. Raises ValueError where epochs have ended early, or will.
    """
    steps = given.get("steps_per_epoch")
    if steps in (None, -1):
        return at.epoch - first, at.batch
    batches = (at.epoch - first) * steps + at.batch
    size = _size(given)
    if size not in (None, steps) and (_is_shuffled(given) or _changes(given["x"])):
        raise ValueError(
            f"fit(steps_per_epoch={steps}) cannot go on here, because a PyDataset of {size} batches changes "
            "its order in the middle of them: leave steps_per_epoch out"
        )
    passes, rest = (0, batches) if size is None else divmod(batches, size)
    several = size is not None and steps < size < steps * (epochs - first)  # its epochs share an iterator
    early = size is not None and size < steps
    if several and size is not None:
        early = rest >= steps or (passes > 0 and size % steps > 0)
    if early or (not at.part and batches != at.step):
        raise ValueError(
            f"fit(steps_per_epoch={steps}) cannot go on here, because its data end at another place than its "
            "epochs: repeat the dataset (data.repeat()), or leave steps_per_epoch out"
        )
    return passes, rest


def _repeated(given: Mapping[str, Any], epochs: int) -> Any:
    """Return fit's data; an endless dataset in place of one that has several epochs and is read again."""
    steps, data = given.get("steps_per_epoch") or -1, given["x"]
    size = _size(given) if hasattr(data, "repeat") and hasattr(data, "cardinality") else None
    if size and 0 < steps < size < steps * epochs and not size % steps:
        return data.repeat()
    return data


def _size(given: Mapping[str, Any]) -> int | None:
    """Return the number of batches in fit's data; None for endless data and where it is unknown."""
    import tensorflow as tf

    data = given["x"]
    if isinstance(data, tf.data.Dataset):
        size = int(data.cardinality())
        return size if size >= 0 else None
    if _is_py_dataset(data):
        return getattr(data, "num_batches", None) or len(data)
    shape = getattr((tf.nest.flatten(data) or [None])[0], "shape", None)
    return -(-int(shape[0]) // int(given.get("batch_size") or 32)) if shape else None


def _is_py_dataset(data: Any) -> bool:
    """Whether it is a PyDataset of Keras 3, or a Sequence of tf-keras."""
    return hasattr(data, "__getitem__") and hasattr(data, "on_epoch_end")


def _is_shuffled(given: Mapping[str, Any]) -> bool:
    """Whether fit shuffles the batches of a PyDataset."""
    return _is_py_dataset(given["x"]) and bool(given.get("shuffle", True)) and bool(_size(given))


def _changes(data: Any) -> bool:
    """Whether a PyDataset may change at an epoch's end: its `on_epoch_end` is not that of Keras."""
    module = getattr(type(data), "on_epoch_end", _is_py_dataset).__module__
    return _is_py_dataset(data) and module.partition(".")[0] not in ("keras", "tf_keras")


def _pass_epochs(data: Any, epochs: int) -> None:
    """Bring data whose order depends on the epochs before to where it was."""
    if hasattr(data, "skip_epochs"):
        data.skip_epochs(epochs)
    elif hasattr(data, "on_epoch_end"):  # of a PyDataset that is not shuffled
        for _ in range(epochs):
            data.on_epoch_end()
