"""The rows of many features in one request and one function of autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.client import Bags, Client, Group, Pulled
from oe_runtime.torch.embedding import TableLayer
from oe_runtime.torch.gradients import Lookup, Pull, RowsParameter, forget


@dataclass
class Feature:
    """The ids of one feature, and where its embeddings go."""

    layer: TableLayer
    ids: NDArray[np.int64]
    bags: Bags
    weights: Any  # a tensor, if they may be trained; None if all are 1
    output: int  # its number
    place: tuple[slice, slice]  # in the output


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


def pooled(requests: Sequence[Request], outputs: Sequence[NDArray[np.float32]], device: Any) -> list[Any]:
    """Fill the outputs with the features' embeddings; return them as tensors of the layers' parameters."""
    blocks = [block for request in requests for block in _blocks(request)]
    weights = [feature.weights for block in blocks for feature in block.features]
    parameters = [parameter for block in blocks for parameter in block.parameters]
    forget(parameters)
    for block in blocks:
        block.client.pool(block.group, block.bags, [outputs[one.output][one.place] for one in block.features])
    tensors = [torch.from_numpy(output).to(device) for output in outputs]
    work = _Work(blocks, len(parameters), [one is not None for one in weights])
    given = [one for one in weights if one is not None]
    return list(_Pooled.apply(work, tensors, *parameters, *given))


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


@dataclass
class _Work:
    blocks: list[_Block]
    parameters: int
    weighted: list[bool]  # of each feature of all blocks


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
        given = more[work.parameters :]
        # With a tensor that autograd keeps: it frees that after a backward pass, and refuses a second one.
        kept = torch.empty(0)
        kept.work = work
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            ctx.work = work  # a program's hooks give back another tensor
        ctx.save_for_backward(kept, *given)  # autograd tells if weights have been changed since
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True: a collection has no gradients of gradients; look the rows up by "
                "oe_runtime.torch.Embedding for them"
            )
        arrays = [_to_array(gradient) for gradient in gradients]
        kept = ctx.saved_tensors[0]
        work = ctx.work if hasattr(ctx, "work") else kept.work
        of_parameters: list[Any] = []
        of_weights: list[Any] = []
        wanted = iter(ctx.needs_input_grad[2 + work.parameters :])
        weighted = iter(work.weighted)
        for block in work.blocks:
            parts = [arrays[one.output][one.place] for one in block.features]
            if any(parameter.requires_grad for parameter in block.parameters):
                sums = torch.from_numpy(block.client.sum_bags(block.group, block.bags, parts))
            for lookup, parameter in zip(block.lookups, block.parameters, strict=True):
                trained = parameter.requires_grad
                of_parameters.append(parameter.bring(lookup, sums[lookup.places]) if trained else None)
            begin = 0
            for feature, part in zip(block.features, parts, strict=True):
                rows = block.group.inverse[begin : begin + len(feature.ids)]
                begin += len(feature.ids)
                if next(weighted):
                    of_weights.append(
                        _weight_gradients(block.group.rows[rows], feature, part) if next(wanted) else None
                    )
        return None, None, *of_parameters, *of_weights


def _weight_gradients(rows: NDArray[Any], feature: Feature, gradient: NDArray[Any]) -> Any:
    """Return the gradient of the weight of each id: its row times its bag's gradient."""
    bag = np.repeat(np.arange(len(gradient)), np.diff(feature.bags.offsets))
    found = torch.from_numpy(np.einsum("ij,ij->i", rows, gradient[bag]))
    return found.to(feature.weights.device, feature.weights.dtype)


def _to_array(gradient: Any) -> NDArray[Any]:
    array: NDArray[Any] = gradient.detach().to("cpu", torch.float32).contiguous().numpy()
    return array
