"""A model whose rows are elsewhere: what SavedModels and programs of PyTorch have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import _core
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError, InputError, KeyRangeError, ServingError
from oe_runtime.model_description import LENGTHS, Description, Signature
from oe_runtime.support import dense_file

Arrays = Mapping[str, NDArray[Any]]

# What the client says of an id.
_OUTSIDE_OF_TABLE = re.compile(r"table '(.*)': key (-?\d+) is not in \[0, (\d+)\)")


class WithoutRows:
    """A model that takes its rows as arguments, by its description."""

    rows: Path | None = None  # a directory of them beside the model, if it has one

    def __init__(
        self, path: Path, description: Description, weights: Sequence[tuple[tuple[int, ...], Any]]
    ) -> None:
        """`weights` are the shape and dtype of each of the description's."""
        self._path = path
        self.description = description
        self.others: Mapping[str, Signature] = {}  # besides that of `inputs` and `outputs`
        self.inputs = description.inputs
        self.outputs = description.outputs
        names = [spec["name"] for spec in description.tables]
        # The client made its tables in the description's order.
        self._lookups = [(names.index(lookup.table), lookup.ids) for lookup in description.lookups]
        self._weights = dict(zip(description.weights, weights, strict=True))

    def look_up(self, inputs: Arrays, client: Client) -> Mapping[str, Any]:
        """Return the arguments of `forward`, with the present rows. Raises InputError, ServerLost."""
        raise NotImplementedError

    def forward(self, inputs: Arrays, arguments: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Return outputs by name from the result of `look_up` for `inputs`. Raises InputError."""
        raise NotImplementedError

    def use_weights(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Assign the result of `read_weights`."""
        raise NotImplementedError

    def make_predictor(self, name: str) -> _core.Predictor | None:
        """Return what answers predictions of `name` in the core; None if this kind of model cannot."""
        return None

    def pull(self, ids: Sequence[NDArray[Any]], inputs: Arrays, client: Client) -> list[NDArray[Any]]:
        """Return the rows of each lookup, in one request. Raises InputError, ServerLost."""
        rows: list[Any] = [None] * len(self._lookups)
        try:
            pulled = client.pull(ids, self._lookups)
        except KeyRangeError as error:
            raise self._refusal(error, ids, inputs) from error
        for group in pulled.groups:
            parts = np.split(client.embeddings(group), np.cumsum(group.sizes)[:-1])
            for lookup, part in zip(group.lookups, parts, strict=True):
                rows[lookup] = part
        return rows

    def _refusal(self, error: KeyRangeError, ids: Sequence[NDArray[Any]], inputs: Arrays) -> InputError:
        """Return what to say of an id outside of a table, whose input has the same ids as the lookup."""
        found = _OUTSIDE_OF_TABLE.fullmatch(str(error))
        if found is None:
            return InputError(str(error))
        key, rows = int(found[2]), int(found[3])
        for table, n in self._lookups:
            places = np.flatnonzero(ids[n] == key)
            if self.description.tables[table]["name"] == found[1] and len(places):
                return outside(inputs, key, rows, partial(unravel, places[0], len(ids[n])))
        return InputError(str(error))

    def read_weights(self, file: Path) -> list[NDArray[Any]]:
        """Return the model's variables from a checkpoint's dense.npz.

        Raises ServingError naming the variable that is missing or differs.
        """
        try:
            arrays = dense_file.read(file, names=self._weights)
        except CheckpointError as error:
            raise ServingError(str(error)) from error
        return self.select_weights(arrays, str(file))

    def select_weights(self, arrays: Arrays, source: str) -> list[NDArray[Any]]:
        """Return the same from arrays by name; errors name their `source`."""
        selected = []
        for name, want in self._weights.items():
            if name not in arrays:
                raise ServingError(f"{source}: variable {name} of {self._path} is missing")
            array = arrays[name]
            if (array.shape, array.dtype) != want:
                raise ServingError(
                    f"{source}: variable {name} is {array.dtype} of shape {array.shape}, but that of "
                    f"{self._path} is {want[1].name} of shape {want[0]}"
                )
            selected.append(array)
        return selected


def unravel(place: Any, size: int, array: NDArray[Any]) -> Any | None:
    """Return the indices in `array` of a place in `size` flat numbers, if it has as many."""
    return np.unravel_index(place, array.shape) if array.size == size else None


def outside(
    inputs: Arrays, key: int, rows: int, place_in: Callable[[NDArray[Any]], Any | None]
) -> InputError:
    """Return what to say of an id outside of a table; `place_in` finds its place in an array like the ids."""
    names, where = [], ""
    for name, array in inputs.items():
        if name.endswith(LENGTHS) and name.removesuffix(LENGTHS) in inputs:
            continue
        place = place_in(array) if array.dtype.kind in "iu" else None
        if place is not None and int(array[place].astype(np.int64)) == key:
            names.append(repr(name))
            if (lengths := inputs.get(name + LENGTHS)) is not None:
                where = f" of example {np.searchsorted(np.cumsum(lengths), place[0], side='right')}"
            else:
                where = f" of example {place[0]}" if len(place) else ""
            key = int(array[place])  # of an unsigned input
    what = f"input {' or '.join(names)}{where}" if names else "an id that the model computes"
    return InputError(f"{what}: id {key} is not in [0, {rows})")
