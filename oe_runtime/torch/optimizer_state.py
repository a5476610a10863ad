"""The optimizer's state of rows on servers as a part of `optimizer.state_dict()`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.spec import counts_pushes
from oe_runtime.torch.rows import Rows
from oe_runtime.torch.state import Listing, RowState, TableValues, parts

# Loading makes at most this many steps without rows, for rules that depend on their number. Bias corrections
# are 1 in float32 long before.
MOST_STEPS = 20_000

# In a state that is loaded: the state of rows comes by other means, such as a checkpoint.
WITHOUT_ROWS = "oe_runtime.without_rows"

_IDS, _PUSHES = "ids", "pushes"

_BIAS_CORRECTED = ("adam", "adamw", "adamax", "radam")  # which depend on the steps in no other way

_LAYERS: WeakKeyDictionary[Any, dict[int, RowState]] = WeakKeyDictionary()  # of optimizers, by anchor


def register(optimizer: Any, layers: list[RowState]) -> None:
    """Let `state_dict` and `load_state_dict` of an optimizer carry the state of these layers' rows."""
    if optimizer not in _LAYERS:
        _LAYERS[optimizer] = {}
        optimizer.register_state_dict_post_hook(_save)
        optimizer.register_load_state_dict_pre_hook(_load)
    _LAYERS[optimizer].update({id(layer.anchor): layer for layer in layers})


def _numbered(optimizer: Any, state_dict: Mapping[str, Any]) -> Iterator[tuple[int, RowState]]:
    """Yield the layers with their parameters' numbers in a state."""
    numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):  # PyTorch refuses other lengths
        if (layer := _LAYERS[optimizer].get(id(parameter))) is not None:
            yield number, layer


def _save(optimizer: Any, state_dict: dict[str, Any]) -> None:
    for number, layer in _numbered(optimizer, state_dict):
        table = layer.bound()
        entry: dict[str, Any] = {_PUSHES: _pushes(layer)}
        listing = Listing(layer) if layer.num_embeddings == -1 else None
        if listing is not None:
            entry[_IDS] = Rows(listing.values())
        for name, size in table.client.slots(table.number).items():
            entry[name] = Rows(_Slot(layer, listing, name, size))
        state_dict["state"][number] = entry


def _load(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Assign the state of rows; return the state without it, for PyTorch."""
    state = dict(state_dict["state"])
    found = [(layer, state.pop(number, None)) for number, layer in _numbered(optimizer, state_dict)]
    if not state_dict.get(WITHOUT_ROWS):
        entries = [(layer, entry) for layer, entry in found if entry is not None]
        for layer, entry in found:
            _check(layer, entry)
        for layer, entry in entries:
            _assign(layer, entry)
        _count_steps(entries)
    return {**state_dict, "state": state}


def _check(layer: RowState, entry: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a state that is not of the layer's table; warn of what it does not restore."""
    table = layer.bound()
    what = f"optimizer.load_state_dict: table '{table.spec.name}'"
    sizes = table.client.slots(table.number)
    if entry is None:
        if sizes:
            warnings.warn(
                f"{what}: the state given has nothing for its rows, whose optimizer's state stays as it is",
                stacklevel=6,
            )
        return
    if _PUSHES not in entry:
        raise ValueError(
            f"{what}: the state given is of a layer in this process ({', '.join(entry)}); remove it from "
            "state_dict['state'] to go on with the state that the rows have"
        )
    names = {*sizes, *([_IDS] if layer.num_embeddings == -1 else [])}
    if (given := entry.keys() - {_PUSHES}) != names:
        raise ValueError(
            f"{what}: the state given has {', '.join(sorted(given)) or 'nothing'}, but optimizer "
            f"{table.spec.optimizer['name']} needs {', '.join(sorted(names)) or 'nothing'}"
        )
    count = len(entry[_IDS]) if _IDS in names else layer.num_embeddings
    for name, size in sizes.items():
        if tuple(entry[name].shape) != (count, size):
            raise ValueError(f"{what}: {name} has shape {tuple(entry[name].shape)}; expected {(count, size)}")
    missing = _missing_steps(layer, entry)
    if missing < 0 or (missing > MOST_STEPS and not _has_converged(table.spec.optimizer)):
        warnings.warn(
            f"{what}: optimizer {table.spec.optimizer['name']} depends on the number of pushes, which was "
            f"{entry[_PUSHES]} when the state was saved and is {entry[_PUSHES] - missing} in this table: its "
            "next updates differ from those of continued training; client.save and jobs keep the number",
            stacklevel=6,
        )


def _missing_steps(layer: RowState, entry: Mapping[str, Any]) -> int:
    """Return how many more pushes the saved table had; 0 where its rule does not depend on them."""
    return int(entry[_PUSHES]) - _pushes(layer) if counts_pushes(layer.bound().spec.optimizer) else 0


def _has_converged(rule: Mapping[str, Any]) -> bool:
    """Whether steps after MOST_STEPS do not change the factors of a rule."""
    betas = [float(value) for name, value in rule.items() if name.startswith("beta_")]
    return (
        rule["name"] in _BIAS_CORRECTED
        and not rule.get("learning_rate_decay")
        and all(beta**MOST_STEPS < 1e-8 for beta in betas)
    )


def _count_steps(entries: list[tuple[RowState, Mapping[str, Any]]]) -> None:
    """Let tables count the pushes that the saved ones had, by pushes without rows, all tables together."""
    missing: dict[Any, dict[int, int]] = {}
    for layer, entry in entries:
        steps = min(_missing_steps(layer, entry), MOST_STEPS)
        if steps > 0:
            missing.setdefault(layer.bound().client, {})[layer.bound().number] = steps
    for client, tables in missing.items():
        done = 0
        while behind := [(number, 0) for number, steps in tables.items() if steps > done]:
            nothing = client.plan([np.empty(0, np.int64)], behind)
            client.push(nothing, [np.zeros_like(group.rows) for group in nothing.groups], 0.0, summed=True)
            done += 1


def _assign(layer: RowState, entry: Mapping[str, Any]) -> None:
    table = layer.bound()
    sizes = table.client.slots(table.number)
    sources = [value.source for value in entry.values() if isinstance(value, Rows)]
    if not sizes or any(isinstance(source, TableValues) and source.is_of(layer) for source in sources):
        return  # there is nothing to set, or these are the present values
    listed = np.ascontiguousarray(entry[_IDS].numpy()) if _IDS in entry else None
    count = layer.num_embeddings if listed is None else len(listed)
    dtype = np.float64 if table.spec.dtype == "float64" else np.float32
    for part in parts(count, layer.embedding_dim + sum(sizes.values())):
        ids = np.arange(part.start, part.stop, dtype=np.int64) if listed is None else listed[part]
        slots = {name: np.ascontiguousarray(entry[name][part].numpy(), dtype) for name in sizes}
        table.client.assign(table.number, ids, _rows(layer, ids, dtype), slots)


def _rows(layer: RowState, ids: NDArray[np.int64], dtype: Any) -> NDArray[Any]:
    """Return the present rows, to be assigned again with their slots."""
    table = layer.bound()
    rows = table.client.read_rows(table.number, ids).rows
    if layer.padding_idx is not None:
        rows[ids == layer.padding_idx] = layer.padding_row().numpy()
    return np.ascontiguousarray(rows, dtype)


def _pushes(layer: RowState) -> int:
    table = layer.bound()
    servers = table.client.stats()["servers"]
    return max(int(server["tables"][table.spec.name]["version"]) for server in servers)


class _Slot(TableValues):
    """One slot of all rows of a table."""

    def __init__(self, layer: RowState, listing: Listing | None, name: str, size: int) -> None:
        table = layer.bound()
        dtype = torch.float64 if table.spec.dtype == "float64" else torch.float32
        count = layer.num_embeddings if listing is None else listing.size()
        super().__init__(layer, f"the optimizer's {name}", (count, size), dtype)
        self._listing, self._name = listing, name

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        if self._listing is None:
            ids = np.arange(begin, self.shape[0] if end is None else end, dtype=np.int64)
        else:
            ids = self._listing.ids()[begin:end]
        table = self._layer.bound()
        values = torch.empty(len(ids), self.shape[1], dtype=self.dtype)
        for part in parts(len(ids), sum(table.client.slots(table.number).values())):
            read = table.client.read_rows(table.number, ids[part])
            values[part] = torch.from_numpy(np.ascontiguousarray(read.slots[self._name]))
        return values
