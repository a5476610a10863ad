"""`fit` as a part of a job: progress, checkpoints, stop requests, and resuming at the right batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oe_runtime.keras.dense import is_built
from oe_runtime.keras.job_state import KerasScriptState
from oe_runtime.run.callback_state import CallbackStates
from oe_runtime.run.position import Position

if TYPE_CHECKING:
    from oe_runtime.run.course import Course
    from oe_runtime.run.session import Session


# Wraps the function that `fit` calls with batches.
StepAround = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]


class FitPart:
    """What a `JobCallback` does, for Keras 3 and tf-keras."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._course: Course | None = None
        self._model: Any = None
        self._skip = 0  # batches of the epoch that were trained before the checkpoint
        self._epochs = 1  # that fit is to end at
        self._drop = 0  # batches before these: steps_per_epoch's epochs share an iterator
        self._data: Any = None
        self._others: list[Any] = []  # callbacks
        self._resumed = False  # in this part
        self._logs: Any = None  # of the skipped batches
        # The epoch's figures, while the model's are those of a validation.
        self._trained: dict[str, float] | None = None

    def begin_fit(self, callback: Any, model: Any, given: dict[str, Any]) -> StepAround | None:
        """Change the `given` arguments of the model's `fit` so that it goes on from the run's checkpoint.

        `callback` is the JobCallback among them. Returns what `fit` does around each step; None where this
        call was done before the checkpoint. Call `end_fit` after it.
        """
        if model.steps_per_execution != 1:
            raise ValueError("JobCallback counts single batches: leave out steps_per_execution")
        self._session.refuse_input_flags()
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
        course.summed(state.gradients())
        course.agree_on_epochs(epochs)
        options = self._session.options
        if _is_shuffled(given) and given.get("steps_per_epoch") in (None, -1, _size(given)):
            from oe_runtime.keras.job_data import shuffled_batches

            self._data = given["x"] = shuffled_batches(model.served.library, self._data)
            given["shuffle"] = False
        course.evaluate_by(
            _validation(model, given) if options.eval_every or options.eval_data else None,
            "fit has no validation_data to evaluate on: give it, or leave the flag out",
            "the evaluation on fit's validation_data",
        )
        self._session.refuse_unread_eval_data()
        if not course.begin_part(epochs):
            course.skip_part()
            _pass_epochs(self._data, epochs - first)
            self._session.screen.say("fit was done before the checkpoint: skipped")
            return None
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
        self._others, self._resumed = _first(callback, given), bool(at.batch or at.epoch > first)
        seed = _seed(self._session, course.position.part)
        if hasattr(self._data, "seed"):
            self._data.seed = seed
        self._epochs = epochs
        return self._around

    def end_fit(self) -> None:
        """End the part of the run that `fit` was."""
        assert self._course is not None  # noqa: S101 - in fit
        self._course.end_part(self._epochs)

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
            course.count(steps.examples * self._session.workers)
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
        self._trained = None
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
        self._session.warn_of_callbacks(state.callbacks.unsaved())
        figures.update(self._course.end_epoch(epoch, figures))

    def stop_here(self) -> None:
        """Stop in a validation too."""
        if self._course is not None:
            self._course.stop_here()

    def begin_validation(self) -> None:
        """Keep the figures of training, because the validation uses the model's metrics."""
        if self._course is not None:
            self._trained = self._figures()

    def _figures(self) -> dict[str, float]:
        if self._trained is not None:
            return self._trained
        return {name: float(value) for name, value in self._model.get_metrics_result().items()}


class JobFit:
    """The part of `JobCallback` that Keras 3 and tf-keras share; a callback."""

    model: Any
    params: Any

    def __init__(self, job: Any) -> None:
        """`job` is the module oe_runtime.job."""
        super().__init__()
        self._part = FitPart(job.current())

    def begin_fit(self, model: Any, given: dict[str, Any]) -> StepAround | None:
        """See FitPart.begin_fit."""
        return self._part.begin_fit(self, model, given)

    def end_fit(self) -> None:
        """After the model's `fit`."""
        self._part.end_fit()

    def on_train_begin(self, logs: Any = None) -> None:
        """Count the run's steps."""
        if getattr(self.model, "_around", None) is None:
            raise ValueError(
                "JobCallback is for the models of oe_runtime: give this one to distributed_model first"
            )
        self._part.begin(self.params)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the position."""
        self._part.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the position, and the epoch's figures."""
        self._part.end_epoch(epoch, {} if logs is None else logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Before the validation at an epoch's end."""
        self._part.begin_validation()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop in a validation too."""
        self._part.stop_here()


def fit_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` by name."""
    given = dict(inspect.signature(model.served.library.Model.fit).bind(model, *args, **kwargs).arguments)
    del given["self"]
    return given


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
    from oe_runtime.keras.job_data import EpochDataset

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


def _validation(model: Any, given: Mapping[str, Any]) -> Callable[[], Iterator[tuple[Any, Any]]] | None:
    """Return what yields labels and the model's probabilities of fit's validation_data; None without them.

    Predicting leaves the model's metrics, which are of the epoch, as they are. Raises ValueError for data
    that can be read once only.
    """
    data, steps = given.get("validation_data"), given.get("validation_steps")
    if isinstance(data, Iterator) or (data is None and given.get("validation_split")):
        found = "validation_split has no data of its own" if data is None else "a generator is read only once"
        raise ValueError(
            f"--eval-every and --eval-data: {found}: give fit's validation_data arrays, a tf.data dataset or "
            "a PyDataset"
        )
    if data is None:
        return None
    size = int(given.get("validation_batch_size") or given.get("batch_size") or 32)

    def predictions() -> Iterator[tuple[Any, Any]]:
        for batch in itertools.islice(_validation_batches(data, size), steps):
            x, labels, _ = model.served.library.utils.unpack_x_y_sample_weight(batch)
            yield labels, model.predict_on_batch(x)

    return predictions


def _validation_batches(data: Any, size: int) -> Iterator[Any]:
    import keras

    if _is_py_dataset(data):
        return (data[index] for index in range(_size({"x": data}) or 0))
    if not isinstance(data, (tuple, list)):
        return iter(data)
    rows = len(keras.tree.flatten(data)[0])

    def cut(start: int) -> Any:
        return keras.tree.map_structure(
            lambda array: None if array is None else array[start : start + size], tuple(data)
        )

    return map(cut, range(0, rows, size))


def _pass_epochs(data: Any, epochs: int) -> None:
    """Bring data whose order depends on the epochs before to where it was."""
    if hasattr(data, "skip_epochs"):
        data.skip_epochs(epochs)
    elif hasattr(data, "on_epoch_end"):  # of a PyDataset that is not shuffled
        for _ in range(epochs):
            data.on_epoch_end()
