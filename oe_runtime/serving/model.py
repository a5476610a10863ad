"""A model that answers requests, also while training goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import _core, published_weights
from oe_runtime.client import Client
from oe_runtime.errors import DataError, InputError, OeError, ServingError
from oe_runtime.freshness import FreshnessLog
from oe_runtime.model_description import FILE, PROGRAM, SIGNATURE, Signature, Tensor
from oe_runtime.models.options import ModelOptions
from oe_runtime.serving.checkpoints import ServedCheckpoint, ServedCheckpoints, ServedRows
from oe_runtime.serving.connections import Connections
from oe_runtime.serving.without_rows import WithoutRows
from oe_runtime.spec import StorageSpec, TableSpec
from oe_runtime.support import remote_files
from oe_runtime.support.remote_files import RemotePath

CONFIG = "config.json"  # of a run
MAX_DIMENSIONS = 32  # of an input; the product of many more sizes could take minutes
_SLOW = 1.0  # seconds behind training, from which on the status says so
_LOOKS = 0.05  # seconds between two looks at a directory of checkpoints
_NO_STEPS = "the rows do not come from checkpoints, so no step can be chosen"
_GONE = "the rows are gone, because they could not be refreshed or are closed"


class NotServed(ServingError):
    """Labels for another version than the served ones, or a step where none can be chosen."""


class Unloaded(ServingError):
    """The rows of a model are gone."""


# Called with the version that a refresh is about to load, which it may refuse by an error; what it returns is
# called at the moment of the exchange.
Prepare = Callable[[int], Callable[[], None]]


class Model:
    """A trained model for reading: rows in a store of this process, or at running servers.

    `predict` may be called from any thread. `refresh` loads what training has published since. Every request
    sees one checkpoint, rows and dense weights, and never parts of two. A missing row reads as its initial
    value, or the default_value of a table with admission.
    """

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        rows: str | os.PathLike[str] | None = None,
        *,
        client: Client | None = None,
        storage: StorageSpec | None = None,
        threads: int = 0,
        seconds: float = 60.0,
        step: int | None = None,
        compile_to: Path | None = None,
    ) -> Model:
        """Load a model and its rows. Imports PyTorch for a model of that, TensorFlow for any other.

        `model` is the output of `save_serving_model`, or of `oe_runtime.torch.export`, whose own rows
        serve without `rows` and `client`. Or it is the directory of a run of `oe_runtime.train`, whose model
        is made anew and whose checkpoints have the rows, or a SavedModel that includes its rows. `rows`
        is a directory of checkpoints, of which the newest with rows in files is used, of a run, or of one
        checkpoint. They are loaded into `storage` of this process, DRAM by default. With `client`
        (``Client(…, read_only=True)``) the running servers give the rows, and `rows`, if given, only the
        dense weights. Up to four requests look up at a time then, over connections like that client's; others
        wait up to `seconds` for one. Both may be URLs of an object store: the model is fetched once, the rows
        again with each newer checkpoint. With `step` it is pinned, see `pin`. With `compile_to`, a model
        of PyTorch is compiled for this machine, which takes up to some minutes, and kept in that directory
        for the next load. Raises ServingError, CheckpointError, SpecMismatch, StorageError.
        """
        more: dict[str, Any] = {
            "storage": storage,
            "threads": threads,
            "seconds": seconds,
            "compile_to": compile_to,
        }
        if remote_files.is_remote(model):
            return cls._load_url(str(model), rows, client, step, more)
        path = Path(model)
        if not path.is_dir():
            raise ServingError(f"{path}: there is no such directory")
        if not is_model(path):
            rows = path if rows is None and client is None else rows
            with tempfile.TemporaryDirectory(prefix="oe-serving-") as directory:
                loaded = _load(_write_serving_model(path, Path(directory) / "model"), compile_to)
        else:
            loaded = _load(path, compile_to)
        _check_precision("" if storage is None else storage.row_precision, path, loaded, client)
        if not isinstance(loaded, WithoutRows):
            if rows is not None or client is not None:
                raise ServingError(f"{path} includes its rows; serve it without other rows or servers")
            if step is not None:
                raise ServingError(_NO_STEPS)
            return cls(loaded, None, None, None)
        rows = loaded.rows if rows is None and client is None else rows
        if rows is None and client is None:
            raise ServingError(f"{path} includes no rows: name checkpoints or servers that have them")
        specs = [TableSpec.from_json(spec) for spec in loaded.description.tables]
        if client is not None:
            for spec in specs:
                client.create_table(spec)
            self = cls(loaded, None, client, None if rows is None else ServedCheckpoints(rows), seconds)
        else:
            assert rows is not None  # noqa: S101 - see above
            store = ServedRows(specs, storage or StorageSpec(), threads)
            self = cls(loaded, store, None, ServedCheckpoints(rows, step))
            self._load_beside = lambda other: cls.load(model, rows, step=other, **more)
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def _load_url(
        cls,
        model: str,
        rows: str | os.PathLike[str] | None,
        client: Client | None,
        step: int | None,
        more: Mapping[str, Any],
    ) -> Model:
        url = RemotePath(model.rstrip("/"))
        with tempfile.TemporaryDirectory(prefix="oe-serving-") as copy:
            of_run = _fetch(url, Path(copy))
            rows = url.url if of_run and rows is None and client is None else rows
            try:
                found = cls.load(copy, rows, client=client, step=step, **more)
            except ServingError as error:
                raise ServingError(str(error).replace(copy, url.url)) from error
        found._load_beside = lambda other: cls.load(model, rows, step=other, **more)
        return found

    def __init__(
        self,
        loaded: Any,
        rows: ServedRows | None,
        client: Client | None,
        checkpoints: ServedCheckpoints | None,
        seconds: float = 60.0,
    ) -> None:
        self._loaded = loaded
        self._rows = rows
        self._servers = None if client is None else Connections(client)
        self._seconds = seconds
        self._checkpoints = checkpoints
        self._served: ServedCheckpoint | None = None
        self._has_parts = False  # of a checkpoint that failed while it was applied: the next loads all rows
        self._gate = _Gate()
        self._refreshing = threading.Lock()
        self._taking = threading.Lock()
        self._pinning = threading.Lock()
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        self._published = 0  # the version at the servers of the dense weights that were tried last
        self._published_step: int | None = None  # of those in use; None: they are a checkpoint's
        self._problem = ""  # of the last refresh of `watch`
        self._coming: tuple[int, float] | None = None  # step and publication of what is not served yet
        self._freshness: float | None = None
        self._log = FreshnessLog()
        self._load_beside: Callable[[int], Model] | None = None
        self.on_change: Callable[[], None] = lambda: None  # called after another version is served

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of `predict`."""
        return list(self._loaded.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs of `predict`."""
        return list(self._loaded.outputs)

    @property
    def signatures(self) -> dict[str, Signature]:
        """What `predict_versioned` takes and gives by name; `serving_default` comes first."""
        return {SIGNATURE: Signature(self._loaded.inputs, self._loaded.outputs), **self._loaded.others}

    @property
    def platform(self) -> str:
        """What the model is a file of, by the Open Inference Protocol."""
        platform: str = self._loaded.platform
        return platform

    @property
    def version(self) -> int:
        """The step of the dense weights, and of the rows unless these are at servers; 1 without any."""
        if self._published_step is not None:
            return self._published_step
        return 1 if self._served is None else self._served.step

    @property
    def has_steps(self) -> bool:
        """Whether `pin` can choose a step."""
        return self._checkpoints is not None and self._rows is not None

    @property
    def step(self) -> int | None:
        """The step that it is pinned to; None: it serves the newest."""
        return None if self._checkpoints is None else self._checkpoints.step

    def load_beside(self, step: int) -> Model:
        """Load the same model with the kept checkpoint of another step, in memory of its own.

        Raises NotServed where rows do not come from checkpoints, and what `load` does.
        """
        if self._load_beside is None:
            raise NotServed(_NO_STEPS)
        return self._load_beside(step)

    @property
    def checkpoint(self) -> Path | None:
        """The path of the served checkpoint."""
        return None if self._served is None else self._served.path

    def predict(self, inputs: Any) -> dict[str, NDArray[Any]]:
        """Return outputs by name for a batch of inputs: a mapping by name, or the array of the only input.

        Integers must not come as floats; the first dimension is the batch. Raises InputError naming the
        input, ServerLost.
        """
        return self.predict_versioned(inputs)[0]

    def predict_versioned(
        self, inputs: Any, signature: str = SIGNATURE
    ) -> tuple[dict[str, NDArray[Any]], int]:
        """Return the same of one of `signatures`, and the version that answered."""
        arrays = self._checked(inputs, self.signatures[signature].inputs)

        def forward(arguments: Any) -> Any:
            if arguments is None:
                return self._loaded.predict(arrays, signature)
            return self._loaded.forward(arrays, arguments)

        return self._answer(lambda client: self._loaded.look_up(arrays, client), forward)

    def make_predictor(self, name: str) -> _core.Predictor | None:
        """Return what answers predictions of `name` over HTTP without Python, if the model allows it."""
        predictor: _core.Predictor | None = self._loaded.make_predictor(name)
        return predictor

    def lead(self, call: _core.PredictorCall) -> None:
        """Lead a request of `make_predictor` through its steps."""
        call.version = self._answer(lambda client: call.pull(client.core), lambda _: call.forward())[1]

    def _answer(self, pull: Callable[[Client], Any], forward: Callable[[Any], Any]) -> tuple[Any, int]:
        """Pull rows, if the model has them outside of it, and compute with them; return what version did."""
        if self._servers is not None:
            # Outside of the gate, which a server that does not answer must not hold.
            with self._servers.borrow(self._seconds) as client:
                rows = pull(client)
            with self._gate.shared():
                return forward(rows), self.version
        with self._gate.shared():
            if self._rows is None:
                return forward(None), self.version
            if self._rows.client is None:
                raise Unloaded(_GONE)
            return forward(pull(self._rows.client)), self.version

    def settle(self) -> None:
        """Return once no version is being exchanged."""
        with self._gate.shared():
            pass

    @property
    def unavailable(self) -> str:
        """Why no requests should be sent now; "" if they may."""
        if self._servers is not None:
            return self._servers.problem
        return _GONE if self._rows is not None and self._rows.client is None else ""

    @property
    def sources(self) -> str:
        """Where the parts of an answer are from, if not all from one checkpoint, as rows at servers."""
        if self._servers is None:
            return ""
        of = "the export" if self._served is None else f"step {self._served.step}"
        if self._published_step is not None:
            of = f"step {self._published_step}, as training publishes them there"
        return f"rows are read from the servers at each request; the dense weights are those of {of}"

    @property
    def problem(self) -> str:
        """Why the last attempt of `watch` to follow training failed; "" if it did not."""
        return self._problem or ("" if self._servers is None else self._servers.following)

    @property
    def freshness(self) -> float | None:
        """Seconds from the publication of the served checkpoint until it was served; None for the first."""
        return self._freshness

    @property
    def seconds_behind(self) -> float:
        """How long ago the checkpoint was published that is not served yet; 0 where the newest is served."""
        coming = self._coming
        return 0.0 if coming is None else max(0.0, time.time() - coming[1])

    @property
    def slowness(self) -> str:
        """How far training is ahead of the answers, if that is more than a second."""
        coming, seconds = self._coming, self.seconds_behind
        if coming is None or seconds < _SLOW:
            return ""
        return f"step {self.version} is served; step {coming[0]} was published {seconds:.0f} s ago"

    def _checked(self, inputs: Any, tensors: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
        wanted = {tensor.name: tensor for tensor in tensors}
        if not isinstance(inputs, Mapping):
            if len(wanted) != 1:
                raise InputError(f"the model has {len(wanted)} inputs ({', '.join(wanted)}); name each")
            inputs = {next(iter(wanted)): inputs}
        for name in inputs:
            if name not in wanted and name not in {tensor.lengths for tensor in wanted.values()}:
                raise InputError(f"the model has no input {name!r}; it has {', '.join(wanted)}")
        arrays: dict[str, NDArray[Any]] = {}
        batch: tuple[str, int] | None = None
        for name, tensor in wanted.items():
            if name not in inputs:
                raise InputError(f"input {name!r} is missing")
            if tensor.lengths is None:
                array = arrays[name] = as_array(tensor, inputs[name])
            else:
                arrays[name], array = _lists(tensor, inputs[name], inputs.get(tensor.lengths))
                if not np.array_equal(arrays.setdefault(tensor.lengths, array), array):
                    raise InputError(f"input {name!r} has lists of other lengths than the ids that it is of")
            if not array.ndim:
                continue
            if batch is not None and batch[1] != len(array):
                raise InputError(f"input {name!r} has {len(array)} examples, but {batch[0]!r} has {batch[1]}")
            batch = name, len(array)
        return arrays

    def refresh(self, prepare: Prepare | None = None) -> bool:
        """Load the newest checkpoint if it is newer than the served one; return whether it was.

        Increments on the served checkpoint are applied to its rows; any other is loaded beside them, which
        takes their memory twice. Requests go on meanwhile, except for the moment of the exchange. Connects
        again to lost servers. Raises CheckpointError, ServingError, StorageError, ServerLost; the previous
        checkpoint is still served then. Only after an increment that could not be applied completely,
        requests are refused until a refresh succeeds. See `Prepare`.
        """
        has_changed = self._refresh(prepare or (lambda _: lambda: None))
        if has_changed:
            self.on_change()
        return has_changed

    def _refresh(self, prepare: Prepare) -> bool:
        with self._refreshing:
            published = False
            if self._servers is not None:
                self._servers.reconnect()
                if not self._servers.follows:
                    with self._servers.borrow(self._seconds) as client:
                        published = self._take_published(client)
            newest = None if self._checkpoints is None else self._checkpoints.newest()
            since = None if newest is None or self._has_parts else newest.since(self._served)
            if newest is None or (since is not None and not since):
                prepare(self.version)()
                self._coming = None
                return published
            commit = None if self._rows is None else prepare(newest.step)
            before, self._coming = self._served, (newest.step, newest.published)
            weights = None if newest.dense is None else self._loaded.read_weights(newest.dense)
            loaded = None
            if self._rows is not None:
                if since is None:
                    loaded = self._rows.load(newest)
                else:
                    self._rows.read_ahead(since)
            with self._gate.exclusive():
                if self._rows is not None and loaded is not None:
                    self._rows.use(loaded)
                elif self._rows is not None and since:
                    self._has_parts = True
                    self._rows.apply(since)
                if weights is not None and not self._is_published_since(newest.step):
                    self._loaded.use_weights(weights)
                    self._published_step = None
                self._served, self._has_parts = newest, False
                (commit or prepare(self.version))()
            if before is not None:
                self._freshness = self.seconds_behind
                self._note_freshness(newest.step, newest.taken)
            self._coming = None
            return True

    def pin(self, step: int | None, prepare: Prepare | None = None) -> bool:
        """Serve the kept checkpoint of `step`, and no other until the next call; None: the newest again.

        Otherwise as `refresh`; after an error the previous pin stays. Raises NotServed where rows do not come
        from checkpoints.
        """
        if self._checkpoints is None or not self.has_steps:
            raise NotServed(_NO_STEPS)
        with self._pinning:
            before, self._checkpoints.step = self._checkpoints.step, step
            try:
                return self.refresh(prepare)
            except BaseException:
                self._checkpoints.step = before
                raise

    def _note_freshness(self, step: int, taken: float | None) -> None:
        """Write down for the run's report how old the step is of which answers are from now on."""
        run = None if self._checkpoints is None else self._checkpoints.run_directory
        if run is not None and taken is not None:
            self._log.note(run, step, time.time() - taken)

    def _is_published_since(self, step: int) -> bool:
        """Whether the dense weights in use are published ones, of this step or of a later one."""
        return self._published_step is not None and self._published_step >= step

    def _take_published(self, client: Client) -> bool:
        """Take dense weights that training has published at the servers since; return whether there are any.

        Raises ServingError for those of another model, ServerLost.
        """
        with self._taking:
            found = published_weights.read(client.core, self._published) if client.is_remote else None
            if found is None:
                return False
            self._published, step, arrays, taken = found
            weights = self._loaded.select_weights(arrays, f"the dense weights of step {step} at the servers")
            with self._gate.exclusive():
                self._loaded.use_weights(weights)
                self._published_step = step
            self._note_freshness(step, taken)
            self.on_change()
            return True

    def watch(self, seconds: float) -> None:
        """Refresh every `seconds` in a thread, 0: never; `problem` has the error of the last refresh.

        It looks at the times of a local directory twenty times per second, and refreshes at once when they
        have changed. Of servers, it takes the dense weights that training publishes there. It also connects
        to lost servers again, and asks several times per second whether they answer.
        """
        if self._watcher is not None:
            raise ServingError("the checkpoints are watched already")
        if self._servers is not None:
            self._servers.watch()
            self._servers.follow(self._take_published)
        if not seconds:
            return
        stop = threading.Event()

        def run() -> None:
            seen: object = None
            due = time.monotonic() + seconds
            while not stop.wait(min(seconds, _LOOKS)):
                stamp = None if self._checkpoints is None else self._checkpoints.stamp()
                if stamp == seen and time.monotonic() < due:
                    continue
                seen, due = stamp, time.monotonic() + seconds
                try:
                    self.refresh()
                    self._problem = ""
                except OeError as error:
                    self._problem = str(error)

        thread = threading.Thread(target=run, name="oe-serving-watch", daemon=True)
        self._watcher = thread, stop
        thread.start()

    def close(self) -> None:
        """Stop the thread of `watch` and free the memory."""
        if self._watcher is not None:
            self._watcher[1].set()
            self._watcher[0].join()
            self._watcher = None
        if self._servers is not None:
            self._servers.close()
        with self._refreshing, self._gate.exclusive():
            if self._rows is not None:
                self._rows.close()
            self._log.flush()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_model(path: Path) -> bool:
    """Whether a directory has a model to serve itself, unlike that of a run."""
    return any((path / name).exists() for name in (FILE, "saved_model.pb", PROGRAM))


def is_torch(path: str | os.PathLike[str]) -> bool:
    """Whether a directory or URL has a model of PyTorch. Raises ServingError."""
    if not remote_files.is_remote(path):
        return (Path(path) / PROGRAM).exists()
    try:
        return (RemotePath(str(path).rstrip("/")) / PROGRAM).exists()
    except OSError as error:
        raise ServingError(f"cannot read {remote_files.describe(error)}") from error


def _check_precision(precision: str, path: Path, loaded: Any, client: Client | None) -> None:
    """Raise ServingError where rows are not this process's own, to be kept in another precision."""
    if precision and not isinstance(loaded, WithoutRows):
        raise ServingError(
            f"{path} includes its rows and keeps them as they are; "
            f"export it with rows={precision!r}, or serve it without a row precision"
        )
    if precision and client is not None:
        raise ServingError(
            f"the servers keep their rows; a row precision ({precision}) is for rows from checkpoints"
        )


def _load(path: Path, compile_to: Path | None) -> Any:
    if is_torch(path):
        try:
            from oe_runtime.serving import torch_program
        except ImportError as error:
            raise ServingError(f"{path} needs PyTorch ({error}): pip install 'oeprov[torch]'") from error
        return torch_program.load(path, compile_to)
    if compile_to is not None:
        raise ServingError(
            f"{path} is a model of TensorFlow; --compile-to is for exports of PyTorch: leave it out"
        )
    from oe_runtime.serving import saved_model

    return saved_model.load(path)


def as_array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """Return `value` as the model takes it; texts as objects. Raises InputError saying why it cannot."""
    try:
        array = _texts(tensor, value) if tensor.dtype == "string" else _numbers(tensor, value)
    except InputError:
        raise
    # NumPy on lists of different lengths, and of more than 32 levels.
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(f"input {tensor.name!r} is not an array of {tensor.dtype}: {error}") from None
    shape = tensor.shape
    if shape is not None and (
        len(shape) != array.ndim
        or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True))
    ):
        text = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"input {tensor.name!r} has shape {array.shape}; the model takes ({text})")
    return array


def _lists(tensor: Tensor, value: Any, lengths: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the elements of the lists of all examples, and the length of each list. Raises InputError.

    `value` has a list per example, or, with `lengths`, the elements one after the other.
    """
    flat = Tensor(tensor.name, tensor.dtype, [None])
    if lengths is not None:
        assert tensor.lengths is not None  # noqa: S101 - see _checked
        elements, counts = as_array(flat, value), as_array(Tensor(tensor.lengths, "int64", [None]), lengths)
        # Each by itself too: a sum beyond int64 begins again, and PyTorch then leaves its memory.
        if (counts < 0).any() or (counts > len(elements)).any() or counts.sum() != len(elements):
            raise InputError(
                f"input {tensor.lengths!r} must be the lengths of lists that have {len(elements)} elements"
            )
        return elements, counts
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return as_array(flat, value.reshape(-1)), np.full(len(value), value.shape[1])
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(one, (list, tuple, np.ndarray)) for one in value
    ):
        raise InputError(f"input {tensor.name!r} must have a list of {tensor.dtype} for each example")
    every = list(itertools.chain.from_iterable(value))
    return as_array(flat, every), np.array([len(one) for one in value], np.int64)


def _texts(tensor: Tensor, value: Any) -> NDArray[Any]:
    """Return an array of bytes objects, because numpy's own texts lose zeros at their ends."""
    array = np.asarray(value, object)
    texts = np.empty(array.shape, object)
    for place, item in np.ndenumerate(array):
        if not isinstance(item, (bytes, str)):
            raise InputError(f"input {tensor.name!r} is string, but the request has {type(item).__name__}")
        texts[place] = item.encode() if isinstance(item, str) else item
    return texts


def _numbers(tensor: Tensor, value: Any) -> NDArray[Any]:
    wanted = np.dtype(tensor.dtype)
    if not isinstance(value, np.ndarray):
        # Before NumPy makes all of them as long as the longest text.
        for kind in {*map(type, np.asarray(value, object).reshape(-1))} & {str, bytes}:
            raise InputError(f"input {tensor.name!r} is {tensor.dtype}, but the request has {kind.__name__}")
    array = np.asarray(value)
    if wanted.kind in "iu" and array.dtype.kind in "fO":
        # numpy makes floats of integers on both sides of 2**63, and objects of larger ones.
        whole = np.asarray(value, object)
        if all(type(item) is int for item in whole.flat):
            return _within(tensor, whole).astype(wanted)
    if array.size and (array.dtype.kind == "O" or array.dtype.kind not in _FROM.get(wanted.kind, "")):
        raise InputError(f"input {tensor.name!r} is {tensor.dtype}, but the request has {array.dtype}")
    if wanted.kind in "iu" and array.dtype != wanted:
        _within(tensor, array)
    with np.errstate(over="ignore"):
        cast = array.astype(wanted, copy=False)
    if wanted.kind in "fV" and cast is not array:
        lost = np.isinf(cast) & np.isfinite(array)
        if lost.any():
            raise InputError(f"input {tensor.name!r}: {float(array[lost][0])} is outside of {tensor.dtype}")
    return cast


def _within(tensor: Tensor, array: NDArray[Any]) -> NDArray[Any]:
    """Return the integers of `array`. Raises InputError for one that the input's type cannot hold."""
    limits = np.iinfo(tensor.dtype)
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise InputError(f"input {tensor.name!r}: a number is outside of {tensor.dtype}")
    return array


# Accepted kinds of numbers by the wanted kind; V is bfloat16.
_FROM = {"i": "iu", "u": "iu", "f": "iufV", "V": "iufV", "b": "b"}


class _Gate:
    """A readers-writer lock: requests share it, and a change goes before requests that come later."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._closed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Share the lock, for a request."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone, for a change."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closed)
            self._closed = True
            self._condition.wait_for(lambda: self._readers == 0)
        try:
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()


def _fetch(url: RemotePath, directory: Path) -> bool:
    """Fetch a SavedModel with all its files, or of a run what its model is made of; return whether it is one.

    Raises ServingError.
    """
    try:
        names = [file.relative_to(url) for file in url.files()]
        of_run = not {"saved_model.pb", PROGRAM} & {str(name) for name in names}
        if of_run and CONFIG not in names:
            raise ServingError(
                f"{url}: there is neither a model to serve nor a run, which has its {CONFIG} there at its end"
            )
        for name in [CONFIG] if of_run else names:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (url / name).download(directory / name)
    except OSError as error:
        raise ServingError(f"cannot read {remote_files.describe(error)}") from error
    return of_run


def _write_serving_model(run_directory: Path, path: Path) -> Path:
    """Make the model of a run of `oe_runtime.train` anew, and write it without rows to the new `path`."""
    from oe_runtime.programs import click_model

    file = run_directory / CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ServingError(
            f"{run_directory} is neither a model to serve nor the directory of a run: {file.name}: {error}"
        ) from error
    if config.get("stock"):
        raise ServingError(f"{run_directory} is a run with --stock; serve what its --export wrote")
    if script := config.get("script"):
        raise ServingError(
            f"{run_directory} is a run of {script}, which alone makes its model; serve what it saves with "
            "oe_runtime.torch.export (PyTorch) or model.save_serving_model (Keras), and this as --rows"
        )
    try:
        options = ModelOptions.from_config(config, str(file))
        click_model.import_keras(
            deterministic=bool(config.get("deterministic", True)),
            device="cpu" if config.get("device") == "cpu" else "auto",  # a GPU's run is served anywhere
        )
        with Client.in_process() as client:
            click_model.build(options, client).save_serving_model(path)
    except (AttributeError, DataError, KeyError, TypeError) as error:
        raise ServingError(f"{file} is of another version of the trainer: {error}") from error
    return path
