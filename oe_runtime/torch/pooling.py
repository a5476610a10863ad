"""The rows of many features in one request and one function of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.client import Bags, Client, Group, Pulled
from oe_runtime.torch.embedding import TableLayer
from oe_runtime.torch.gradients import Lookup, Pull, RowsParameter, forget, keep, kept


@dataclass
class Feature:
    """The ids of one feature, and where its embeddings go."""

    layer: TableLayer
    ids: NDArray[np.int64]
    bags: Bags
    weights: Any  # a tensor, if they may be trained; None if all are 1
    output: int  # its number
    place: tuple[slice, slice]  # in the output
    padding: tuple[NDArray[np.bool_], Any] | None = (
        None  # where an output has this row in place of an empty bag
    )


@dataclass
class Request:
    """The rows of features in the tables of one client: planned, without rows before `Client.refresh`."""

    client: Client
    pulled: Pulled
    features: list[Feature]

    @property
    def trains(self) -> bool:
        """Whether the tables are trained."""
        return any(feature.layer.trains() for feature in self.features)


def plan(features: Sequence[Feature]) -> list[Request]:
    """Plan the requests for the rows of features: one for the tables of a client, one for its frozen ones.

    Raises as `Client.plan` does.
    """
    found: dict[tuple[int, bool], list[Feature]] = {}
    for feature in features:
        # A push covers all rows of its request, so frozen tables have a request of their own.
        key = (id(feature.layer.bound().client), feature.layer.trains())
        found.setdefault(key, []).append(feature)
    requests = []
    for some in found.values():
        client = some[0].layer.bound().client
        lookups = [(feature.layer.bound().number, i) for i, feature in enumerate(some)]
        requests.append(Request(client, client.plan([feature.ids for feature in some], lookups), some))
    return requests


def pooled(
    requests: Sequence[Request],
    outputs: Sequence[NDArray[np.float32]],
    device: Any,
    shapes: Sequence[tuple[int, ...]] = (),
) -> list[Any]:
    """Fill the outputs with the features' embeddings; return them as tensors of the layers' parameters.

    `shapes` are those of the tensors, if they differ from the outputs'.
    """
    work = fill(requests, outputs)
    if shapes:  # not of the tensors: programs may change them in place, but not views of them
        outputs = [output.reshape(shape) for output, shape in zip(outputs, shapes, strict=True)]
    tensors = [torch.from_numpy(output).to(device) for output in outputs]
    return list(_Pooled.apply(work, tensors, *work.parameters, *work.weights))


def fill(requests: Sequence[Request], outputs: Sequence[NDArray[np.float32]]) -> _Work:
    """Fill the outputs with the features' embeddings; return what their gradients need."""
    blocks = [block for request in requests for block in _blocks(request)]
    work = _Work(blocks, [parameter for block in blocks for parameter in block.parameters])
    forget(work.parameters)
    for block in blocks:
        places = [outputs[one.output][one.place] for one in block.features]
        block.client.pool(block.group, block.bags, places)
        for feature, place in zip(block.features, places, strict=True):
            if feature.padding is not None:
                which, row = feature.padding
                place[which] = row
    return work


@dataclass
class _Block:
    """The tables of one dim of one request."""

    client: Client
    group: Group
    features: list[Feature]  # in the order of the group's lookups
    lookups: list[Lookup]  # of each table; none if they are not trained
    parameters: list[RowsParameter]  # of these tables

    @property
    def bags(self) -> list[Bags]:
        return [feature.bags for feature in self.features]

    def rows_of_features(self) -> list[NDArray[Any]]:
        """Return the numbers of the rows of each feature's ids in the group."""
        ends = list(accumulate((len(feature.ids) for feature in self.features), initial=0))
        return [self.group.inverse[begin:end] for begin, end in pairwise(ends)]


@dataclass
class _Work:
    """The rows that outputs were made of."""

    blocks: list[_Block]
    parameters: list[RowsParameter]  # of all blocks

    @property
    def weights(self) -> list[Any]:
        """The tensors of weights of all features that have some."""
        every = (feature.weights for block in self.blocks for feature in block.features)
        return [one for one in every if one is not None]

    def back(
        self, gradients: Sequence[Any], wanted: Sequence[bool], *, in_graph: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Bring the outputs' gradients to the rows'; return what autograd gets for parameters and weights.

        None is an output without a gradient. `wanted` says which weights' gradients are. `in_graph` lets
        autograd go back through the rows' gradients, too.
        """
        gradients = [None if one is None else one.reshape(-1, one.shape[-1]) for one in gradients]
        arrays = [None if one is None else _to_array(one) for one in gradients]
        of_parameters: list[Any] = []
        of_weights: list[Any] = []
        for block in self.blocks:
            parts = []
            for feature in block.features:
                array = arrays[feature.output]
                parts.append(None if array is None else array[feature.place])
            if any(parameter.trains for parameter in block.parameters):
                sums = _sums_in_graph(block, gradients) if in_graph else _sums(block, parts)
            is_complete = all(part is not None for part in parts)
            for lookup, parameter in zip(block.lookups, block.parameters, strict=True):
                used: Lookup | None = lookup if is_complete else _used(block, lookup, parts)
                if not parameter.trains:
                    used = None
                of_parameters.append(used and parameter.bring(used, sums[used.places]))
            for feature, rows, part in zip(block.features, block.rows_of_features(), parts, strict=True):
                if feature.weights is not None:
                    is_wanted = wanted[len(of_weights)] and part is not None
                    found = _weight_gradients(block.group.rows[rows], feature, part) if is_wanted else None
                    of_weights.append(found)
        return of_parameters, of_weights


def _blocks(request: Request) -> list[_Block]:
    """Return what a request has brought, by dim."""
    layers = {feature.layer.bound().number: feature.layer for feature in request.features}
    pull = Pull(request.pulled, len(layers))
    blocks = []
    for number, group in enumerate(request.pulled.groups):
        block = _Block(request.client, group, [request.features[i] for i in group.lookups], [], [])
        for table, keys, ranges in group.tables if request.trains else ():
            layer, size = layers[table], len(keys)
            places: slice | NDArray[np.int64] = slice(*ranges[0]) if len(ranges) == 1 else slice(0, 0)
            if len(ranges) > 1:
                places = np.concatenate([np.arange(*one) for one in ranges])
            block.lookups.append(
                Lookup(layer.bound(), None, keys, None, pull, number, places, np.arange(size), size)
            )
            block.parameters.append(layer.anchor)
        blocks.append(block)
    return blocks


class _Pooled(torch.autograd.Function):  # type: ignore[misc]
    """Embeddings as a function of the tables' parameters and of the ids' weights."""

    @staticmethod
    def forward(ctx: Any, work: _Work, outputs: Sequence[Any], *more: Any) -> Any:
        ctx.set_materialize_grads(False)
        keep(ctx, work, *more[len(work.parameters) :])  # autograd tells if weights have been changed since
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        work: _Work = kept(ctx, gradients)
        in_graph = torch.is_grad_enabled()
        if in_graph and work.weights:
            raise NotImplementedError(
                "create_graph=True: a collection has no gradients of gradients with respect to weights; look "
                "the rows up by oe_runtime.torch.Embedding for them"
            )
        wanted = ctx.needs_input_grad[2 + len(work.parameters) :]
        of_parameters, of_weights = work.back(gradients, wanted, in_graph=in_graph)
        return None, None, *of_parameters, *of_weights


def _sums(block: _Block, parts: Sequence[NDArray[Any] | None]) -> Any:
    """Return the gradient of each row of a block from those of its features; None is a feature without."""
    dim = block.group.rows.shape[1]
    given = [
        np.zeros((len(one.bags.offsets) - 1, dim), np.float32) if part is None else part
        for one, part in zip(block.features, parts, strict=True)
    ]
    return torch.from_numpy(block.client.sum_bags(block.group, block.bags, given))


def _sums_in_graph(block: _Block, gradients: Sequence[Any]) -> Any:
    """Return the same as a function of the outputs' gradients, which autograd goes back through."""
    sums = torch.zeros(block.group.rows.shape)
    for feature, rows in zip(block.features, block.rows_of_features(), strict=True):
        if gradients[feature.output] is None:
            continue
        part = gradients[feature.output].to("cpu", torch.float32)[feature.place]
        sizes = torch.from_numpy(np.diff(feature.bags.offsets))
        if feature.bags.mean:
            part = part / sizes.clamp(min=1)[:, None]
        each = part.repeat_interleave(sizes, dim=0)
        sums = sums.index_add(0, torch.from_numpy(rows.astype(np.int64)), each)
    return sums


def _used(block: _Block, lookup: Lookup, parts: Sequence[NDArray[Any] | None]) -> Lookup | None:
    """Return the lookup of those of a table's rows that a gradient has reached, or None without any."""
    reached, everything = [], True
    for feature, rows, part in zip(block.features, block.rows_of_features(), parts, strict=True):
        if feature.layer.bound().number == lookup.table.number:
            everything &= part is not None
            if part is not None:
                reached.append(rows)
    if everything:
        return lookup
    if not reached:
        return None
    places = lookup.places
    every = np.arange(places.start, places.stop) if isinstance(places, slice) else places
    mine = np.isin(every, np.concatenate(reached))
    keys = lookup.ids[mine]
    # Of no pull that can be pushed as a whole.
    return replace(
        lookup,
        ids=keys,
        places=every[mine],
        numbers=np.arange(len(keys)),
        size=len(keys),
        pull=Pull(lookup.pull.pulled, 0),
    )


def _weight_gradients(rows: NDArray[Any], feature: Feature, gradient: Any) -> Any:
    """Return the gradient of the weight of each id: its row times its bag's gradient."""
    bag = np.repeat(np.arange(len(gradient)), np.diff(feature.bags.offsets))
    found = torch.from_numpy(np.einsum("ij,ij->i", rows, gradient[bag]))
    return found.to(feature.weights.device, feature.weights.dtype)


def _to_array(gradient: Any) -> NDArray[Any]:
    gradient = gradient.detach().to("cpu", torch.float32)
    # Columns of a wider gradient, as that of torch.cat, are read where they are.
    array: NDArray[Any] = (gradient if gradient.stride(-1) == 1 else gradient.contiguous()).numpy()
    return array
