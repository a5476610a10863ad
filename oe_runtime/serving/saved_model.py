"""SavedModels to serve, with or without rows. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import InputError, KeyRangeError, ServingError
from oe_runtime.model_description import FILE, Description, Tensor

Arrays = Mapping[str, NDArray[Any]]


def load(path: Path) -> WithoutRows | WithRows:
    """Load the SavedModel at `path`. Raises ServingError if it is none."""
    if not (path / "saved_model.pb").exists():
        raise ServingError(
            f"{path} is not a model to serve: save_serving_model or save_as_original_model writes one"
        )
    try:
        loaded = tf.saved_model.load(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ServingError(f"{path}: TensorFlow cannot load it: {error}") from error
    if (path / FILE).exists():
        return WithoutRows(path, loaded, Description.read(path / FILE))
    return WithRows(path, loaded)


class WithRows:
    """A SavedModel that includes its rows, served by its signature."""

    def __init__(self, path: Path, loaded: Any) -> None:
        try:
            self._function = loaded.signatures["serving_default"]
        except KeyError:
            raise ServingError(f"{path} has no signature serving_default") from None
        self._loaded = loaded  # its variables live as long as it does
        self.inputs = [_tensor(n, s) for n, s in self._function.structured_input_signature[1].items()]
        self.outputs = [_tensor(name, spec) for name, spec in self._function.structured_outputs.items()]

    def predict(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Return outputs by name. Raises InputError."""
        with _refusals(inputs):
            outputs = self._function(**{name: _constant(array) for name, array in inputs.items()})
        return {name: np.asarray(value) for name, value in outputs.items()}


class WithoutRows:
    """A SavedModel that takes its rows as arguments."""

    def __init__(self, path: Path, loaded: Any, description: Description) -> None:
        self._path = path
        self._loaded = loaded
        self.description = description
        self.inputs = description.inputs
        self.outputs = description.outputs
        self._forward = loaded.signatures["forward"]
        self._ids = loaded.signatures["ids"] if description.lookups else None
        names = [spec["name"] for spec in description.tables]
        # The client made its tables in the description's order.
        self._lookups = [(names.index(lookup.table), lookup.ids) for lookup in description.lookups]
        self._weights = dict(zip(description.weights, loaded.weights, strict=True))

    def look_up(self, inputs: Arrays, client: Client) -> dict[str, Any]:
        """Return the arguments of `forward`, with the present rows. Raises InputError, ServerLost."""
        tensors = {f"input_{i}": _constant(inputs[t.name]) for i, t in enumerate(self.inputs)}
        rows: list[Any] = [None] * len(self._lookups)
        if self._ids is not None:
            asked = self._ids(**tensors)
            ids = [asked[f"ids_{n}"].numpy() for n in range(len(asked))]
            try:
                pulled = client.pull(ids, self._lookups)
            except KeyRangeError as error:
                raise self._refusal(error, ids, inputs) from error
            for group in pulled.groups:
                parts = np.split(client.embeddings(group), np.cumsum(group.sizes)[:-1])
                for lookup, part in zip(group.lookups, parts, strict=True):
                    rows[lookup] = part
        groups = {
            f"rows_{i}": tf.constant(np.concatenate([rows[lookup] for lookup in group]))
            for i, group in enumerate(self.description.groups)
        }
        sizes = tf.constant([len(part) for part in rows], tf.int64)
        return {"sizes": sizes, **groups, **tensors}

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return outputs by name from the result of `look_up` for `inputs`. Raises InputError."""
        with _refusals(inputs):
            outputs = self._forward(**arguments)
        return {name: np.asarray(value) for name, value in outputs.items()}

    def _refusal(self, error: KeyRangeError, ids: Sequence[NDArray[Any]], inputs: Arrays) -> InputError:
        """Return what to say of an id outside of a table, whose input has the same ids as the lookup."""
        found = _OUTSIDE_OF_TABLE.fullmatch(str(error))
        if found is None:
            return InputError(str(error))
        key, rows = int(found[2]), int(found[3])
        for table, n in self._lookups:
            places = np.flatnonzero(ids[n] == key)
            if self.description.tables[table]["name"] == found[1] and len(places):
                return _outside(inputs, key, rows, partial(_unravel, places[0], len(ids[n])))
        return InputError(str(error))

    def read_weights(self, file: Path) -> list[NDArray[Any]]:
        """Return the model's variables from a checkpoint's dense.npz.

        Raises ServingError naming the variable that is missing or differs.
        """
        arrays = []
        try:
            with np.load(file, allow_pickle=False) as content:
                for name, variable in self._weights.items():
                    if name not in content.files:
                        raise ServingError(f"{file}: variable {name} of {self._path} is missing")
                    array = content[name]
                    want = (tuple(variable.shape), variable.dtype.as_numpy_dtype)
                    if (array.shape, array.dtype) != want:
                        raise ServingError(
                            f"{file}: variable {name} is {array.dtype} of shape {array.shape}, but that of "
                            f"{self._path} is {variable.dtype.name} of shape {want[0]}"
                        )
                    arrays.append(array)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ServingError(f"{file}: cannot be read as a dense checkpoint: {error}") from error
        return arrays

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Assign the result of `read_weights`."""
        for variable, array in zip(self._weights.values(), arrays, strict=True):
            variable.assign(array)


# What the client and TensorFlow's gather say of an id.
_OUTSIDE_OF_TABLE = re.compile(r"table '(.*)': key (-?\d+) is not in \[0, (\d+)\)")
_OUTSIDE_OF_ROWS = re.compile(r"indices(?:\[([\d,]*)\])? = (-?\d+) is not in \[0, (\d+)\)")
_OF_GRAPH = re.compile(
    r"\[\[.*?\]\]|\[Op:.*?\]|^(Graph execution error|Detected at node|<stack traces).*$", re.M
)


@contextlib.contextmanager
def _refusals(inputs: Arrays) -> Iterator[None]:
    """Raise InputError for inputs that TensorFlow refuses, without the names of its graph."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if found := _OUTSIDE_OF_ROWS.search(error.message):
            place = tuple(int(n) for n in (found[1] or "").split(",") if n)
            raise _outside(
                inputs,
                int(found[2]),
                int(found[3]),
                lambda a: (
                    place if np.shape(place) == (a.ndim,) and np.all(place < np.array(a.shape)) else None
                ),
            ) from error
        said = " ".join(_OF_GRAPH.sub("", error.message).split())
        raise InputError(f"TensorFlow cannot answer it: {said[:300]}") from error


def _unravel(place: Any, size: int, array: NDArray[Any]) -> Any | None:
    """Return the indices in `array` of a place in `size` flat numbers, if it has as many."""
    return np.unravel_index(place, array.shape) if array.size == size else None


def _outside(
    inputs: Arrays, key: int, rows: int, place_in: Callable[[NDArray[Any]], Any | None]
) -> InputError:
    """Return what to say of an id outside of a table; `place_in` finds its place in an array like the ids."""
    names, where = [], ""
    for name, array in inputs.items():
        place = place_in(array) if array.dtype.kind in "iu" else None
        if place is not None and int(array[place].astype(np.int64)) == key:
            names.append(repr(name))
            where = f" of example {place[0]}" if len(place) else ""
            key = int(array[place])  # of an unsigned input
    what = f"input {' or '.join(names)}{where}" if names else "an id that the model computes"
    return InputError(f"{what}: id {key} is not in [0, {rows})")


def _constant(array: NDArray[Any]) -> Any:
    return tf.constant(array, tf.string if array.dtype == object else None)


def _tensor(name: str, spec: Any) -> Tensor:
    return Tensor(name, spec.dtype.name, None if spec.shape.rank is None else spec.shape.as_list())
