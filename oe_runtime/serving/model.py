"""A model that answers requests while training goes on."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import KeyRangeError, OeError, ServerLost
from oe_runtime.serving.checkpoints import Checkpoints, Place, Rows
from oe_runtime.serving.description import FILE, InputError, ServingError, Tensor
from oe_runtime.serving.gate import Gate
from oe_runtime.spec import StorageSpec


class Model:
    """A trained model for reading: rows in a store of this process, or at running servers.

    `predict` may be called from any thread. `refresh` takes over what training has published since; every
    request sees one checkpoint, rows and dense weights, and never part of another. A row that is not there
    is what training would begin with: the initializer's, or the default_value of a table with admission.
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
    ) -> Model:
        """Load a model and its rows. Imports TensorFlow.

        `model` is what `save_serving_model` wrote, or the directory of a run of `oe_runtime.train`, whose
        model is made anew and whose checkpoints are the rows, or a SavedModel with its rows inside.
        `rows` is a directory of checkpoints, of which the newest with rows in files counts, of a run, or of
        one checkpoint. They are kept in `storage` of this process, in DRAM by default. With `client`
        (``Client(…, read_only=True)``) the running servers are asked instead, and of `rows`, if given, the
        dense weights are taken. Raises ServingError, CheckpointError, SpecMismatch, StorageError.
        """
        path = Path(model)
        if not path.is_dir():
            raise ServingError(f"{path}: there is no such directory")
        from oe_runtime.serving import saved_model

        if (path / FILE).exists() or (path / "saved_model.pb").exists():
            loaded = saved_model.load(path)
        else:
            from oe_runtime.serving.run import serving_model_of

            rows = path if rows is None and client is None else rows
            with tempfile.TemporaryDirectory(prefix="oe-serving-") as directory:
                loaded = saved_model.load(serving_model_of(path, Path(directory) / "model"))
        if isinstance(loaded, saved_model.WithRows):
            if rows is not None or client is not None:
                raise ServingError(f"{path} has its rows inside; serve it without others")
            return cls(loaded, None, None, None)
        if rows is None and client is None:
            raise ServingError(f"{path} has no rows inside: name checkpoints or servers that have them")
        specs = loaded.description.specs()
        if client is not None:
            for spec in specs:
                client.create_table(spec)
            self = cls(loaded, None, client, None if rows is None else Checkpoints(Path(rows)))
        else:
            assert rows is not None  # noqa: S101 - see above
            store = Rows(specs, storage or StorageSpec(), threads)
            self = cls(loaded, store, None, Checkpoints(Path(rows)))
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise
        return self

    def __init__(
        self, loaded: Any, rows: Rows | None, client: Client | None, checkpoints: Checkpoints | None
    ) -> None:
        self._loaded = loaded
        self._rows = rows
        self._client = client
        self._checkpoints = checkpoints
        self._place: Place | None = None
        self._gate = Gate()
        self._refreshing = threading.Lock()
        self._lost = False  # whether the client has to connect anew
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        self.problem = ""  # why the last refresh of `watch` failed

    @property
    def inputs(self) -> list[Tensor]:
        """What `predict` takes."""
        return list(self._loaded.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """What `predict` returns."""
        return list(self._loaded.outputs)

    @property
    def version(self) -> int:
        """The step of the checkpoint that is served; 1 where there is none."""
        return 1 if self._place is None else self._place.step

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that is served."""
        return None if self._place is None else self._place.path

    def predict(self, inputs: Any) -> dict[str, NDArray[Any]]:
        """Outputs by name for a batch of inputs: a mapping by name, or the array of the only one.

        Integers may not come as floats; the first size is the batch's. Raises InputError naming the input,
        ServerLost.
        """
        return self.predict_versioned(inputs)[0]

    def predict_versioned(self, inputs: Any) -> tuple[dict[str, NDArray[Any]], int]:
        """The same, and the version that answered."""
        arrays = self._checked(inputs)
        with self._gate.passing():
            try:
                if self._client is None and self._rows is None:
                    return self._loaded.predict(arrays), self.version
                client = self._client if self._rows is None else self._rows.client
                if client is None:
                    raise ServingError("the rows are gone, because they could not be refreshed or are closed")
                return self._loaded.predict(arrays, client), self.version
            except KeyRangeError as error:
                raise InputError(str(error)) from error
            except ServerLost:
                self._lost = True
                raise

    def _checked(self, inputs: Any) -> dict[str, NDArray[Any]]:
        wanted = {tensor.name: tensor for tensor in self._loaded.inputs}
        if not isinstance(inputs, Mapping):
            if len(wanted) != 1:
                raise InputError(f"the model has {len(wanted)} inputs ({', '.join(wanted)}); name each")
            inputs = {next(iter(wanted)): inputs}
        for name in inputs:
            if name not in wanted:
                raise InputError(f"the model has no input {name!r}; it has {', '.join(wanted)}")
        arrays = {}
        batch: tuple[str, int] | None = None
        for name, tensor in wanted.items():
            if name not in inputs:
                raise InputError(f"input {name!r} is missing")
            array = arrays[name] = _array(tensor, inputs[name])
            if not array.ndim:
                continue
            if batch is not None and batch[1] != len(array):
                raise InputError(f"input {name!r} has {len(array)} examples, but {batch[0]!r} has {batch[1]}")
            batch = name, len(array)
        return arrays

    def refresh(self) -> bool:
        """Take over the newest checkpoint, if there is a newer one; whether there was.

        Increments on the one that is served are applied to its rows; any other is loaded beside them, which
        takes their memory twice. Requests go on meanwhile, but for the moment in which it is put in place.
        Servers that were lost are connected to again. Raises CheckpointError, ServingError, StorageError,
        ServerLost; then what was served before still is, unless an increment could not be applied to the
        end: requests are refused then until a refresh succeeds.
        """
        with self._refreshing:
            if self._lost and self._client is not None:
                with self._gate.closed():
                    self._client.reconnect()
                    self._lost = False
            if self._checkpoints is None:
                return False
            place = self._checkpoints.newest()
            since = place.since(self._place)
            if since is not None and not since:
                return False
            weights = None if place.dense is None else self._loaded.read_weights(place.dense)
            loaded = None
            if self._rows is not None:
                if since is None:
                    loaded = self._rows.load(place)
                else:
                    self._rows.read_ahead(since)
            with self._gate.closed():
                if self._rows is not None and loaded is not None:
                    self._rows.use(loaded)
                elif self._rows is not None and since:
                    self._place = None  # if it fails, the next one loads all rows
                    self._rows.apply(since)
                if weights is not None:
                    self._loaded.use_weights(weights)
                self._place = place
            return True

    def watch(self, seconds: float) -> None:
        """Refresh every so many seconds from now on, in a thread; `problem` says what fails."""
        if self._watcher is not None:
            raise ServingError("the checkpoints are watched already")
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(seconds):
                try:
                    self.refresh()
                    self.problem = ""
                except OeError as error:
                    self.problem = str(error)

        thread = threading.Thread(target=run, name="oe-serving-watch", daemon=True)
        self._watcher = thread, stop
        thread.start()

    def close(self) -> None:
        """End the watcher and give the memory back."""
        if self._watcher is not None:
            self._watcher[1].set()
            self._watcher[0].join()
            self._watcher = None
        with self._refreshing, self._gate.closed():
            if self._rows is not None:
                self._rows.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _array(tensor: Tensor, value: Any) -> NDArray[Any]:
    """`value` as the model takes it; InputError says why it cannot be."""
    wanted = np.dtype("S" if tensor.dtype == "string" else tensor.dtype)
    try:
        array = np.asarray(value)
        if array.size and (array.dtype.kind == "O" or array.dtype.kind not in _FROM.get(wanted.kind, "")):
            raise InputError(f"input {tensor.name!r} is {tensor.dtype}, but the request has {array.dtype}")
        if wanted.kind in "iu" and array.size and array.dtype != wanted:
            limits = np.iinfo(wanted)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise InputError(f"input {tensor.name!r}: a number is outside of {tensor.dtype}")
        array = array.astype(wanted, copy=False)
    except (ValueError, TypeError, OverflowError) as error:  # numpy on lists of different lengths
        raise InputError(f"input {tensor.name!r} is not an array of {tensor.dtype}: {error}") from None
    shape = tensor.shape
    if shape is not None and (
        len(shape) != array.ndim
        or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True))
    ):
        text = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"input {tensor.name!r} has shape {array.shape}; the model takes ({text})")
    return array


# Kinds of numbers that may come for one of a kind.
_FROM = {"i": "iu", "u": "iu", "f": "iuf", "b": "b", "U": "US", "S": "US"}
