"""SavedModels to serve, with or without rows. Imports TensorFlow."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import InputError, ServingError
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
        """Return outputs by name."""
        try:
            outputs = self._function(**{name: _constant(array) for name, array in inputs.items()})
        except tf.errors.InvalidArgumentError as error:  # an id that a table has no row for
            raise InputError(f"TensorFlow cannot answer it: {error.message.strip()[:300]}") from error
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

    def predict(self, inputs: Arrays, client: Client) -> dict[str, NDArray[Any]]:
        """Return outputs by name, with the present rows of `client`."""
        tensors = {f"input_{i}": _constant(inputs[t.name]) for i, t in enumerate(self.inputs)}
        rows: list[Any] = [None] * len(self._lookups)
        if self._ids is not None:
            asked = self._ids(**tensors)
            ids = [asked[f"ids_{n}"].numpy() for n in range(len(asked))]
            for group in client.pull(ids, self._lookups).groups:
                parts = np.split(client.embeddings(group), np.cumsum(group.sizes)[:-1])
                for lookup, part in zip(group.lookups, parts, strict=True):
                    rows[lookup] = part
        groups = {
            f"rows_{i}": tf.constant(np.concatenate([rows[lookup] for lookup in group]))
            for i, group in enumerate(self.description.groups)
        }
        sizes = tf.constant([len(part) for part in rows], tf.int64)
        outputs = self._forward(sizes=sizes, **groups, **tensors)
        return {name: np.asarray(value) for name, value in outputs.items()}

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


def _constant(array: NDArray[Any]) -> Any:
    return tf.constant(array, tf.string if array.dtype == object else None)


def _tensor(name: str, spec: Any) -> Tensor:
    return Tensor(name, spec.dtype.name, None if spec.shape.rank is None else spec.shape.as_list())
