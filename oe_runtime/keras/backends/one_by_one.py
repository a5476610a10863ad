"""Sequential batches for Keras on PyTorch and on JAX: ids, a pull, a step, a push.

A step takes the rows of a batch already gathered, one array per group (`Pulled`) of shape (ids, dim), which
follows from the batch's shape. Gradients come out in the same shape, and the client sums them by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from oe_runtime.client import Client, Pulled
from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.feed import check_order
from oe_runtime.keras.served import Served
from oe_runtime.keras.translate import clip_tables, clips

# Per group: the lookups whose rows it has, with their numbers of ids.
Layout = tuple[tuple[tuple[int, int], ...], ...]


def check(what: str, *, several_workers: bool, staleness: int, micro_batches: int) -> None:
    """Raise ValueError for options that need TensorFlow; `what` is the backend."""
    for wanted, option in (
        (several_workers, "several workers, whose dense gradients TensorFlow sums,"),
        (staleness, "staleness=1"),
        (micro_batches != 1, "micro_batches"),
    ):
        if wanted:
            raise ValueError(f"{option} needs Keras on TensorFlow, but it runs on {what} here")


def all_rows(layer: Any) -> Any:
    """See Backend."""
    return ops.convert_to_tensor(layer.get_weights()[0])


def update_rows(optimizer: Any) -> None:
    """Do nothing: there are no such loops on these backends."""
    del optimizer


def all_inputs(x: Any) -> list[Any]:
    """Return the flat inputs. Raises ValueError if one is missing."""
    flat = list(keras.tree.flatten(x))
    if any(v is None for v in flat):
        raise ValueError(
            "a model with distributed embeddings needs all of its inputs, but one of them is None"
        )
    return flat


class Collect:
    """Records the lookups of a model's call, and ends it after the last one if `count` is given."""

    def __init__(self, count: int | None = None) -> None:
        self.layers: list[Any] = []
        self.ids: list[Any] = []
        self._count = count

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Return zeros; nothing computed from them is kept."""
        if not getattr(ids, "is_meta", False):  # of PyTorch, where Keras asks for shapes first
            self.layers.append(layer)
            self.ids.append(ids)
        if len(self.ids) == self._count:
            raise AllSeen
        return ops.zeros((*ids.shape, layer.output_dim), layer.rows_dtype)


class AllSeen(BaseException):  # an Exception, Keras would give another message
    """All lookups of a model's call were recorded."""


class Supply:
    """Answers the lookups, in the order of `Collect`, with rows[i] of shape (ids, dim).

    `ids` are the ids asked for.
    """

    def __init__(self, layers: Sequence[Any], rows: Sequence[Any]) -> None:
        self.ids: list[Any] = []
        self._layers = layers
        self._rows = rows

    def lookup(self, layer: Any, ids: Any) -> Any:
        """Return the rows of the next lookup in the shape of `ids`."""
        number = len(self.ids)
        check_order(self._layers, number, layer)
        self.ids.append(ids)
        return ops.reshape(self._rows[number], (*ids.shape, layer.output_dim))


@dataclass(frozen=True)
class TableIds:
    """A trained table's part of a group, for sums of its rows' gradients."""

    group: int
    slices: tuple[tuple[int, int], ...]  # of its lookups among the ids of the group
    numbers: NDArray[np.int32]  # of each of its ids, which of its rows
    rows: NDArray[np.int64]  # of each of its rows, which of the group's


@dataclass(frozen=True)
class PulledRows:
    """The pulled rows of a batch, as NumPy arrays."""

    layers: Sequence[Any]  # of the lookups
    pulls: Sequence[Pulled]  # of trained tables first, then of frozen ones
    trained: int  # groups of the first pull, which is pushed
    layout: Layout
    arrays: Sequence[NDArray[Any]]  # of each group: (ids, dim)
    once: Sequence[NDArray[Any]]  # of each trained group, if a layer is regularized: see `regularization`
    tables: Sequence[TableIds]  # if gradients are clipped
    ids: Sequence[NDArray[np.int64]]  # of the lookups, flat


def pull(
    client: Client, optimizer: Any, layers: Sequence[Any], ids: Any, sources: Sequence[int]
) -> PulledRows:
    """Pull the rows of lookups: `layers[i]` looks up `ids[sources[i]]`, flat int64 arrays."""
    lookups = range(len(layers))
    # Frozen tables have a pull of their own, because a push covers all rows of its pull.
    trained = [i for i in lookups if layers[i].trainable]
    parts = [part for part in (trained, [i for i in lookups if not layers[i].trainable]) if part]
    pulls = [client.pull(ids, [(layers[i].table.number, sources[i]) for i in part]) for part in parts]
    layout = tuple(
        tuple((part[lookup], size) for lookup, size in zip(group.lookups, group.sizes, strict=True))
        for part, pulled in zip(parts, pulls, strict=True)
        for group in pulled.groups
    )
    arrays = [client.embeddings(group) for pulled in pulls for group in pulled.groups]
    groups = pulls[0].groups if trained else []
    regularized = any(layers[i].embeddings_regularizer is not None for i in trained)
    return PulledRows(
        layers,
        pulls,
        len(groups),
        layout,
        arrays,
        [_once(group) for group in groups] if regularized else [],
        [table for g, group in enumerate(groups) for table in _tables(g, group, layers, layout[g])]
        if optimizer is not None and clips(optimizer)
        else [],
        [ids[source] for source in sources],
    )


def _once(group: Any) -> NDArray[Any]:
    once = np.zeros((len(group.inverse), 1), group.rows.dtype)
    once[np.unique(group.inverse, return_index=True)[1]] = 1
    return once


def _tables(number: int, group: Any, layers: Sequence[Any], layout: Any) -> list[TableIds]:
    slices: dict[int, list[tuple[int, int]]] = {}
    begin = 0
    for lookup, size in layout:
        slices.setdefault(id(layers[lookup]), []).append((begin, begin + size))
        begin += size
    tables = []
    for parts in slices.values():
        of_ids = np.concatenate([group.inverse[b:e] for b, e in parts])
        rows, numbers = np.unique(of_ids, return_inverse=True)
        tables.append(TableIds(number, tuple(parts), numbers.astype(np.int32), rows.astype(np.int64)))
    return tables


def split_by_lookup(layout: Layout, groups: Sequence[Any], count: int) -> list[Any]:
    """Split tensors of groups, (ids, n), into those of the lookups."""
    rows: list[Any] = [None] * count
    for group, values in zip(layout, groups, strict=True):
        begin = 0
        for lookup, size in group:
            rows[lookup] = values[begin : begin + size]
            begin += size
    return rows


def regularization(layers: Sequence[Any], layout: Layout, groups: Sequence[Any], once: Sequence[Any]) -> Any:
    """Return the regularizers' losses of a batch's rows, each row once.

    `groups` and `once` are of trained tables. `once` has 1 for one id of each row and 0 for its others, and
    L1 and L2 of zeros are zero.
    """
    if not once:
        return 0.0
    number = len(layers)
    rows = split_by_lookup(layout[: len(once)], [r * o for r, o in zip(groups, once, strict=True)], number)
    return sum(
        layer.embeddings_regularizer(part)
        for layer, part in zip(layers, rows, strict=True)
        if part is not None and layer.embeddings_regularizer is not None
    )


def clip(
    optimizer: Any,
    dense: Sequence[Any],
    gradients: Sequence[Any],
    places: Sequence[tuple[int, tuple[tuple[int, int], ...]]],
    numbers: Sequence[Any],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Sum the gradients of groups by row of each table, and clip them and the dense ones.

    `places` and `numbers` are of `PulledRows.tables`. The result of a table has one row per id, of which the
    first ones belong to its rows.
    """
    if not clips(optimizer):
        return dense, gradients
    sums = []
    for (group, slices), of_ids in zip(places, numbers, strict=True):
        values = ops.concatenate([gradients[group][b:e] for b, e in slices])
        sums.append(ops.segment_sum(values, of_ids, num_segments=int(of_ids.shape[0])))
    return clip_tables(optimizer, dense, sums)


def push(
    served: Served,
    rows: PulledRows,
    gradients: Sequence[NDArray[Any]],
    rate: float,
    iterations: Any,
    cause: Callable[[], str],
) -> None:
    """Push the gradients of a step: one array per trained group, or per table if they were clipped.

    `iterations` is the number of the step, counted from 1; `cause` is that of `Client.push`.
    """
    if not rows.trained:
        return
    client = served.client
    if accumulation_steps(served.model.optimizer) > 1:
        before = served.accumulated.copy()
        try:
            for lookups, of_group in zip(rows.layout, gradients, strict=False):  # frozen groups have none
                begin = 0
                for lookup, size in lookups:
                    table = rows.layers[lookup].table.spec.name
                    served.accumulated.add(table, rows.ids[lookup], of_group[begin : begin + size])
                    begin += size
            served.push_accumulated(iterations, partial(client.push, learning_rate=rate, cause=cause))
        except BaseException:  # the model stays as it was before the step, its dense gradients too
            served.accumulated = before
            raise
        return
    pulled = rows.pulls[0]
    if not rows.tables:
        client.push(pulled, gradients, rate, cause=cause)
        return
    sums = [np.zeros_like(group.rows) for group in pulled.groups]
    for table, part in zip(rows.tables, gradients, strict=True):
        sums[table.group][table.rows] = part[: len(table.rows)]
    client.push(pulled, sums, rate, summed=True, cause=cause)
