"""The rows of a layer as a module's state: `state_dict`, `weight`, copies, and changes of parameters.

The rows are no parameter of the layer, so functions of PyTorch that take its parameters do not find them.
Each of these functions acts on the rows here, or is refused by name.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from oe_runtime.client import Client
from oe_runtime.errors import OeError, ServerLost
from oe_runtime.model_tables import assign_all, rows_on_servers
from oe_runtime.spec import DTYPES
from oe_runtime.torch.rows import Rows, RowSource

if TYPE_CHECKING:
    from oe_runtime.spec import TableSpec

TORCH_DTYPES = {getattr(torch, name): name for name in DTYPES}

_PIECE = 64 << 20  # bytes of rows per request
_ADVICE = (
    "; keep them by client.save(directory), which the servers write themselves, or train in a job "
    "(oe_runtime.job), and leave tables out of the file: {name: value for name, value in "
    "model.state_dict().items() if not isinstance(value, oe_runtime.torch.Rows)}"
)


class _Parameters(dict[str, Any]):
    """A layer's parameters, for functions that replace the parameter `weight` by others."""

    def __missing__(self, name: str) -> NoReturn:
        _refuse_replacement(name)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            _refuse_replacement(name)
        super().__delitem__(name)


class RowState(nn.Module):  # type: ignore[misc]
    """The part of a layer that holds its rows as state; `oe_runtime.torch.embedding` has the rest."""

    name: str
    default_name: str
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    dtype: Any
    spec: TableSpec | None
    client: Client | None
    table: Any
    anchor: Any
    frozen: bool
    # The table's first rows, in place of the initializer's: a matrix, or ids and their rows.
    first_rows: Any
    are_first_rows_given: bool  # by the user: they replace those of a table that exists
    is_table_private: bool  # the table is of this layer, in this process, until there is an optimizer

    _assigned: weakref.ref[Any] | None = None  # a parameter whose values became the rows

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_parameters"] = _Parameters()

    def set_rows(self, rows: Any, ids: Any = None) -> None:
        """Set all rows of a table: at once, or when the table is created.

        `rows` has the shape (num_embeddings, dim). A table of any id takes `ids`, int64 (n,), and their rows
        (n, dim); all other ids lose theirs. The optimizer's state of the rows stays. All processes make this
        call. Raises ValueError for other shapes.
        """
        self._check(rows, ids)
        if isinstance(rows, Rows) and self._has(rows):
            return
        if ids is not None:
            ids = np.ascontiguousarray(_plain(ids).numpy())
        if self.table is None:
            given = _plain(rows).to("cpu").clone()
            self.first_rows, self.are_first_rows_given = given if ids is None else (ids, given), True
            return
        self.are_first_rows_given |= self.is_table_private
        self._assign(rows.detach() if ids is None else (ids, rows.detach()))

    def _check(self, rows: Any, ids: Any) -> None:
        shape = tuple(rows.shape)
        is_any = self.num_embeddings == -1
        wanted = (self.num_embeddings if ids is None else len(ids), self.embedding_dim)
        if is_any == (ids is None) or shape != wanted:
            if is_any and ids is None:
                what = "have any id: assign them by key, set_rows(rows, ids)"
            else:
                what = f"are {wanted}" + ("" if is_any or ids is None else " and have no ids")
            raise ValueError(f"{self}: the rows given have shape {shape}, but the table's {what}")
        if ids is not None and (ids.dtype != torch.int64 or ids.dim() != 1):
            raise ValueError(f"{self}: ids must be int64 of shape (n,), not {ids.dtype} {tuple(ids.shape)}")
        if ids is not None and len(np.unique(_plain(ids).numpy())) < len(ids):
            raise ValueError(f"{self}: an id is given twice")
        if not rows.is_floating_point() or rows.is_meta:
            what = "on the meta device, without values" if rows.is_meta else f"{rows.dtype}"
            raise ValueError(f"{self}: the rows given are {what}; expected floating-point values")

    def _assign(self, rows: Any) -> None:
        """Assign a matrix, or ids and rows, to the table."""
        table = self.bound()
        client, number = table.client, table.number
        if not isinstance(rows, tuple):
            assign_all(client, number, table.spec, rows, _to_numpy)
            return
        ids, values = rows
        pieces = [(ids[part], _values(values[part], table.spec)) for part in parts(len(ids), table.spec.dim)]
        for some, of_ids in pieces:
            client.check_rows(number, some, of_ids)
        if self.num_embeddings == -1:
            self._erase(np.setdiff1d(client.keys(number), ids))
        for some, of_ids in pieces:
            client.assign(number, some, of_ids)

    def _erase(self, ids: NDArray[np.int64]) -> None:
        table = self.bound()
        for part in parts(len(ids), 1):
            table.client.erase(table.number, ids[part])

    def bound(self) -> Any:
        """Return the layer's table."""
        raise NotImplementedError

    def padding_row(self) -> Any:
        """Return the row of padding, (1, dim): zeros unless one was given with the weights."""
        raise NotImplementedError

    def present_rows(self, ids: NDArray[np.int64]) -> Any:
        """Return the rows of these ids, those without a row as initial ones, (n, dim)."""
        table = self.bound()
        values = torch.empty(len(ids), self.embedding_dim, dtype=self.dtype)
        for part in parts(len(ids), self.embedding_dim):
            values[part] = torch.from_numpy(table.client.pull_rows(table.number, ids[part]))
        return values

    def write_rows(self, rows: Any, begin: int) -> None:
        """Set the rows from `begin` on of a table with a `num_embeddings`."""
        if begin == 0 and len(rows) == self.num_embeddings:
            self.set_rows(rows)
            return
        table = self.bound()
        self.are_first_rows_given |= self.is_table_private
        for part in parts(len(rows), self.embedding_dim):
            ids = np.arange(begin + part.start, begin + part.stop, dtype=np.int64)
            table.client.assign(table.number, ids, _values(rows[part], table.spec))

    def reset_parameters(self) -> None:
        """Set all rows and the optimizer's state of them to initial ones. All processes make this call."""
        self.first_rows = None
        if self.table is not None:
            self._erase(self.table.client.keys(self.table.number))

    def give_up_private_table(self) -> None:
        """Make the rows of a table of this layer its first rows, and leave the table."""
        if not self.is_table_private:
            return
        self.first_rows = self._private_rows()
        self.table, self.is_table_private = None, False

    def _private_rows(self) -> Any:
        """Return the ids and rows that were given; None if all are the initializer's."""
        table = self.bound()
        ids, rows = table.client.export_rows(table.number)
        return (ids, torch.from_numpy(rows)) if len(ids) else None

    # The state.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the rows as `weight`, as nn.Embedding does, of tables of any id with their `ids`."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "anchor"]
        if self.num_embeddings == -1:
            listing = Listing(self)
            destination[prefix + "ids"] = Rows(listing.values())
            destination[prefix + "weight"] = Rows(_RowsOfIds(listing))
        else:
            destination[prefix + "weight"] = Rows(_Matrix(self), attached=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Set the rows to `weight`, of this layer or a stock one; called by load_state_dict."""
        anchor = prefix + "anchor"  # empty; states of earlier versions have it
        others = {name: value for name, value in state_dict.items() if name != anchor}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        names = ["weight", "ids"] if self.num_embeddings == -1 else ["weight"]
        own = [prefix + name for name in names]
        missing_keys[:] = [name for name in missing_keys if name != anchor]
        unexpected_keys[:] = [name for name in unexpected_keys if name not in own]
        if missing := [name for name in own if name not in state_dict]:
            if len(missing) < len(own):  # a stock layer's rows
                error_msgs.append(f"{missing[0]} is missing: {self} has any id, so its rows come with ids")
            missing_keys.extend(missing)
            return
        try:
            self.set_rows(*(state_dict[name] for name in own))
        except ServerLost:
            raise
        except (ValueError, OeError) as error:
            error_msgs.append(f"{own[0]}: {error}")

    @property
    def weight(self) -> Rows:
        """All rows as a tensor, `Rows`, of a table with a `num_embeddings`."""
        if self.num_embeddings == -1:
            raise AttributeError  # __getattr__ says why
        return Rows(_Matrix(self), attached=True)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{self} has no weight, because it has any id; its rows by id are in state_dict(), and those "
                "of some ids are layer(ids)"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
            return
        if isinstance(value, Rows) and self._has(value):
            return  # after a change in place
        if not isinstance(value, nn.Parameter):
            raise TypeError(
                f"{self}: weight must be a torch.nn.Parameter, whose values become the rows, not "
                f"{type(value).__name__}"
            )
        if (
            sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        ):  # functional_call, for example
            _refuse_replacement(name)
        self.set_rows(value)
        self.frozen = not value.requires_grad
        self._assigned = weakref.ref(value)

    def is_assigned(self, parameter: Any) -> bool:
        """Whether this parameter was assigned to `weight`."""
        return self._assigned is not None and self._assigned() is parameter

    def _has(self, rows: Rows) -> bool:
        """Whether these are the rows of this layer's table."""
        return isinstance(rows.source, TableValues) and rows.source.is_of(self)

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a layer without servers. Raises TypeError if the rows are on servers."""
        if self.table is not None and not self.is_table_private:
            raise TypeError(
                f"{self} cannot be copied: its rows are in table '{self.table.spec.name}' on servers. Keep "
                "their present values by copy.deepcopy(model.state_dict()); for a second model, build it and "
                "call distributed_model(second, client, name_prefix='second/')"
            )
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        values = self.__dict__ | {"client": None, "table": None, "is_table_private": False, "ahead": []}
        values.pop("_assigned", None)
        if self.is_table_private:
            values["first_rows"] = self._private_rows()
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in values.items()})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickle once there are servers: the copy would train other rows, or these in secret."""
        if self.client is not None:
            raise TypeError(
                f"{self} cannot be pickled: its rows are on servers. Save model.state_dict() by torch.save, "
                "and load that into the model that the program builds"
            )
        return super().__reduce_ex__(protocol)

    # What changes or replaces parameters.

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follow a move to a device, or to another dtype as long as there is no table on servers."""
        probe = fn(torch.empty(1, dtype=self.dtype))
        if probe.is_meta or (probe.device.type == "cpu" and probe.is_shared()):
            raise TypeError(
                f"{self}: rows on servers are neither on the meta device nor in memory that processes share; "
                "each process makes a client of its own"
            )
        if probe.dtype != self.dtype:
            self._change_dtype(probe.dtype)
        return super()._apply(fn, recurse)

    def _change_dtype(self, dtype: Any) -> None:
        if self.spec is not None or (self.table is not None and not self.is_table_private):
            raise TypeError(
                f"{self}: its table has {self.dtype} rows and cannot change to {dtype}; convert the model "
                "before distributed_optimizer, or use torch.autocast"
            )
        if dtype not in TORCH_DTYPES:
            raise TypeError(f"{self}: rows are {', '.join(map(str, TORCH_DTYPES))}, not {dtype}")
        self.give_up_private_table()
        self.dtype = dtype
        if isinstance(self.first_rows, tuple):
            self.first_rows = (self.first_rows[0], self.first_rows[1].to(dtype))
        elif self.first_rows is not None:
            self.first_rows = self.first_rows.to(dtype)

    def register_parameter(self, name: str, param: Any) -> None:
        """Raise TypeError for another parameter made of the rows, as parametrizations and pruning do."""
        if isinstance(param, Rows) or name == "weight" or name.startswith("weight_"):
            _refuse_replacement(name)
        super().register_parameter(name, param)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_program(self, "torch.jit.script")


def _refuse_replacement(name: str) -> NoReturn:
    raise TypeError(
        f"{name} of an embedding on servers is no parameter, so parametrizations, pruning, weight "
        "and spectral norm, and functional_call cannot replace it; keep the layer in this process by "
        "distributed_model(…, in_worker=[path])"
    )


def refuse_program(layer: Any, function: str) -> NoReturn:
    """Refuse functions that make a program of a model, in which the rows would be constants."""
    raise TypeError(
        f"{function} cannot take {layer}, because its rows are on servers; load the state_dict into the "
        "ordinary model (nn.Embedding) and give that"
    )


def refuse_tracing(layer: Any, ids: Any) -> None:
    """Raise TypeError for ids that are not a tensor with values, and while a program is made."""
    if torch.jit.is_tracing():
        refuse_program(layer, "torch.jit.trace")
    if not isinstance(ids, torch.Tensor):
        if type(ids).__module__.startswith("torch.fx"):
            refuse_program(layer, "torch.fx.symbolic_trace")
        raise TypeError(f"{layer}: ids must be a tensor, not {type(ids).__name__}")
    if type(ids).__name__ in ("FakeTensor", "FunctionalTensor"):
        refuse_program(layer, "torch.export")


class TableValues(RowSource):
    """Values of a layer's table."""

    def __init__(self, layer: RowState, what: str, shape: tuple[int, ...], dtype: Any) -> None:
        name = (
            layer.table.spec.name
            if layer.table is not None
            else layer.name or layer.default_name or str(layer)
        )
        super().__init__(f"{what} of table '{name}'", shape, dtype, _ADVICE)
        self._layer = layer

    def is_of(self, layer: RowState) -> bool:
        """Whether these are values of a layer's table."""
        a, b = self._layer.table, layer.table
        if a is None or b is None:
            return self._layer is layer
        return a.client is b.client and a.number == b.number


class _Matrix(TableValues):
    """The rows of a table with a `num_embeddings`."""

    def __init__(self, layer: RowState) -> None:
        super().__init__(layer, "the rows", (layer.num_embeddings, layer.embedding_dim), layer.dtype)

    @property
    def trains(self) -> bool:  # type: ignore[override]
        return not self._layer.frozen

    def train(self, trains: bool) -> None:
        self._layer.frozen = not trains

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        layer = self._layer
        end = self.shape[0] if end is None else end
        if layer.table is None and isinstance(layer.first_rows, torch.Tensor):
            return layer.first_rows[begin:end].to("cpu", layer.dtype, copy=True)
        rows = layer.present_rows(np.arange(begin, end, dtype=np.int64))
        if layer.padding_idx is not None and begin <= layer.padding_idx < end:
            rows[layer.padding_idx - begin] = layer.padding_row()[0]
        return rows

    def write(self, values: Any, begin: int = 0) -> None:
        self._layer.write_rows(values, begin)

    def with_gradients(self) -> Any:
        rows, numbers = self._layer._rows(torch.arange(self.shape[0]))
        return rows[numbers]


class Listing:
    """The ids that have a row in a table of any id, listed when they are first used."""

    def __init__(self, layer: RowState) -> None:
        self.layer = layer
        self._ids: NDArray[np.int64] | None = None

    def size(self) -> int:
        """Return the number of ids."""
        if self.layer.table is None:
            return len(self.ids())
        name = self.layer.table.spec.name
        return rows_on_servers(self.layer.table.client, [name])[name]

    def values(self) -> RowSource:
        """Return the ids as values for `Rows`."""
        return _Ids(self)

    def ids(self) -> NDArray[np.int64]:
        """Return the ids, the same ones each time."""
        if self._ids is None:
            if (table := self.layer.table) is not None:
                self._ids = np.sort(table.client.keys(table.number))
            else:
                self._ids = self.layer.first_rows[0] if self.layer.first_rows else np.empty(0, np.int64)
        return self._ids


class _Ids(TableValues):
    """The ids of the rows of a table of any id."""

    def __init__(self, listing: Listing) -> None:
        super().__init__(listing.layer, "the ids", (listing.size(),), torch.int64)
        self._listing = listing

    def write(self, values: Any, begin: int = 0) -> None:
        _refuse_write(self)

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        return torch.from_numpy(self._listing.ids()[begin:end].copy())


class _RowsOfIds(TableValues):
    """The rows of a table of any id, in the order of its ids."""

    def __init__(self, listing: Listing) -> None:
        layer = listing.layer
        super().__init__(layer, "the rows", (listing.size(), layer.embedding_dim), layer.dtype)
        self._listing = listing

    def write(self, values: Any, begin: int = 0) -> None:
        _refuse_write(self)

    def read(self, begin: int = 0, end: int | None = None) -> Any:
        if self._layer.table is None and self._layer.first_rows:
            return self._layer.first_rows[1][begin:end].to("cpu", self._layer.dtype, copy=True)
        ids = self._listing.ids()[begin:end]
        return (
            self._layer.present_rows(ids) if len(ids) else torch.empty(0, *self.shape[1:], dtype=self.dtype)
        )


def _refuse_write(source: RowSource) -> NoReturn:
    raise TypeError(
        f"{source.what} cannot be changed in place, because the table has any id: load into tensors of the "
        "file's sizes and then load_state_dict, or use layer.set_rows(rows, ids)"
    )


def parts(size: int, dim: int) -> list[slice]:
    """Return slices that together are 0 to `size`, each of what one request carries."""
    step = max(1, _PIECE // (8 * dim))
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def _plain(values: Any) -> Any:
    return values.read() if isinstance(values, Rows) else values.detach()


def _to_numpy(rows: Any) -> NDArray[Any]:
    array: NDArray[Any] = _plain(rows).to("cpu", torch.promote_types(rows.dtype, torch.float32)).numpy()
    return array


def _values(rows: Any, spec: TableSpec) -> NDArray[Any]:
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    return np.ascontiguousarray(_to_numpy(rows), dtype=dtype)
