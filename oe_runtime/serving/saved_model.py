"""SavedModels to serve, with or without rows. Imports TensorFlow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import InputError, ServingError
from oe_runtime.model_description import FILE, Description, Tensor
from oe_runtime.serving.without_rows import Arrays, WithoutRows, outside


def load(path: Path) -> SavedWithoutRows | WithRows:
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
        return SavedWithoutRows(path, loaded, Description.read(path / FILE))
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


class SavedWithoutRows(WithoutRows):
    """A SavedModel that takes its rows as arguments."""

    def __init__(self, path: Path, loaded: Any, description: Description) -> None:
        self._variables = loaded.weights
        weights = [(tuple(one.shape), np.dtype(one.dtype.as_numpy_dtype)) for one in loaded.weights]
        super().__init__(path, description, weights)
        self._loaded = loaded
        self._forward = loaded.signatures["forward"]
        self._ids = loaded.signatures["ids"] if description.lookups else None

    def look_up(self, inputs: Arrays, client: Client) -> dict[str, Any]:
        """See WithoutRows."""
        tensors = {f"input_{i}": _constant(inputs[t.name]) for i, t in enumerate(self.inputs)}
        rows: list[Any] = []
        if self._ids is not None:
            asked = self._ids(**tensors)
            rows = self.pull([asked[f"ids_{n}"].numpy() for n in range(len(asked))], inputs, client)
        groups = {
            f"rows_{i}": tf.constant(np.concatenate([rows[lookup] for lookup in group]))
            for i, group in enumerate(self.description.groups)
        }
        sizes = tf.constant([len(part) for part in rows], tf.int64)
        return {"sizes": sizes, **groups, **tensors}

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """See WithoutRows."""
        with _refusals(inputs):
            outputs = self._forward(**arguments)
        return {name: np.asarray(value) for name, value in outputs.items()}

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """See WithoutRows."""
        for variable, array in zip(self._variables, arrays, strict=True):
            variable.assign(array)


# What TensorFlow's gather says of an id.
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
            raise outside(
                inputs,
                int(found[2]),
                int(found[3]),
                lambda a: (
                    place if np.shape(place) == (a.ndim,) and np.all(place < np.array(a.shape)) else None
                ),
            ) from error
        said = " ".join(_OF_GRAPH.sub("", error.message).split())
        raise InputError(f"TensorFlow cannot answer it: {said[:300]}") from error


def _constant(array: NDArray[Any]) -> Any:
    return tf.constant(array, tf.string if array.dtype == object else None)


def _tensor(name: str, spec: Any) -> Tensor:
    return Tensor(name, spec.dtype.name, None if spec.shape.rank is None else spec.shape.as_list())
