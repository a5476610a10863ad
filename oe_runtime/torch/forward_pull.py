"""One request for the rows of all layers in a model's forward pass, without a change of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from oe_runtime import _core
from oe_runtime.client import Bags, Client, Pulled
from oe_runtime.errors import KeyRangeError
from oe_runtime.torch import pooling
from oe_runtime.torch.batch_parts import BatchParts, Path, part_at
from oe_runtime.torch.collections import Collection
from oe_runtime.torch.embedding import (
    Answer,
    Call,
    EmbeddingBag,
    Forward,
    TableLayer,
    bring,
    check_ids,
    forwards,
    plan,
    requests,
    split,
)

_MOST_MISSES = 8  # calls of a layer that were not foreseen, until it is left alone


def pull_in_forward(model: nn.Module) -> None:
    """Let forward passes of a model, or of a module in it, pull the rows of all layers in one request."""
    for module in model.modules():
        if isinstance(module, (TableLayer, Collection, nn.ModuleList, nn.ModuleDict)):
            continue
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        if _has_layers(module) and not any(isinstance(one, _ForwardPull) for one in hooks):
            pull = _ForwardPull()
            module.register_forward_pre_hook(pull.begin, with_kwargs=True)
            module.register_forward_hook(pull.end, with_kwargs=True, always_call=True)


def _has_layers(module: nn.Module) -> bool:
    inner = {id(one) for part in module.modules() if isinstance(part, Collection) for one in part.layers}
    return any(isinstance(one, TableLayer) and id(one) not in inner for one in module.modules())


@dataclass
class KnownCall:
    """A call that forward passes make, by where its arguments are in the module's."""

    layer: TableLayer
    ids: Path
    offsets: Path | None  # None: there are none
    is_pooled: bool  # whether the request makes the layer's output, too

    def find_in(self, data: Any) -> Call:
        """Return the call for these arguments of the module, with values of its own."""
        offsets = None if self.offsets is None else part_at(data, self.offsets).clone()
        return Call(self.layer, part_at(data, self.ids).clone(), offsets)


class KnownCalls:
    """Which layers are called with which parts of some data, learned from passes with other data."""

    def __init__(self) -> None:
        self._known: dict[bool, list[KnownCall]] = {False: [], True: []}  # by whether the module trains
        self._misses: dict[TableLayer, int] = {}

    def known(self, *, training: bool) -> list[KnownCall]:
        """Return the calls that are known now of a module that trains, or does not."""
        return self._known[training]

    def learn(self, forward: Forward, data: Any, *, training: bool) -> list[TableLayer]:
        """After a pass: learn from the calls that were not foreseen; return the layers of those not found."""
        unused = [answer.call.layer for answer in forward.answers]
        for layer in {*unused, *(call.layer for call in forward.missed)}:
            self._misses[layer] = self._misses.get(layer, 0) + 1
        known = [one for one in self._known[training] if one.layer not in unused]
        news = [call for call in forward.missed if self._misses[call.layer] <= _MOST_MISSES]
        lost = []
        parts = None
        for call in news:
            found = None
            with contextlib.suppress(Exception):  # arguments may be of any type, whose own functions raise
                parts = parts or BatchParts(data)
                found = _find(call, parts)
            if found is None:
                lost.append(call.layer)
            else:
                known.append(found)
        self._known[training] = known
        return lost


class _ForwardPull:
    """What a module's forward passes look up, learned from the last one.

    A pass whose calls are as announced takes one request, one function of autograd's graph and one push. Each
    call is compared with what was announced; one with other ids pulls rows of its own.
    """

    def __init__(self) -> None:
        self._calls = KnownCalls()

    def begin(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a forward pass: pull the rows of the calls that are known."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        stack = forwards()
        own = [i for i, one in enumerate(stack) if one.owner is self]
        del stack[own[0] if own else len(stack) :]  # an interrupt has left them
        foreseen = {answer.call.layer for one in stack for answer in one.answers}
        known = self._calls.known(training=module.training)
        calls = [one for one in known if one.layer not in foreseen and not one.layer.ahead]
        planned = plan_calls(calls, (arguments, named))
        for client, pulled, _ in planned.requests:
            bring(client, pulled)
        stack.append(Forward(self, planned.answers(), []))

    def end(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        """After a forward pass: learn from the calls that were not foreseen."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        stack = forwards()
        forward = next((one for one in stack if one.owner is self), None)
        if forward is None:
            return
        del stack[stack.index(forward) :]
        self._calls.learn(forward, (arguments, named), training=module.training)


def _find(call: Call, parts: BatchParts) -> KnownCall | None:
    layer = call.layer
    if (ids := parts.find(call.ids)) is None:
        return None
    offsets = None if call.offsets is None else parts.find(call.offsets)
    is_pooled = not call.is_weighted and (call.offsets is None) == (offsets is None)
    return KnownCall(layer, ids, offsets if is_pooled else None, is_pooled)


@dataclass
class PlannedCalls:
    """Requests for the rows of calls, without rows before `Client.refresh`."""

    pooled: list[tuple[list[tuple[Call, pooling.Feature]], list[pooling.Request]]]
    others: list[tuple[list[tuple[TableLayer, Any]], Pulled]]

    @property
    def requests(self) -> list[tuple[Client, Pulled, list[TableLayer]]]:
        """Each request, with the layers whose rows it brings."""
        found = []
        for _, planned in self.pooled:
            found += [(one.client, one.pulled, [part.layer for part in one.features]) for one in planned]
        for asked, pulled in self.others:
            found.append((asked[0][0].bound().client, pulled, [layer for layer, _ in asked]))
        return found

    def answers(self) -> list[Answer]:
        """Return the answers to the calls, once the requests have their rows."""
        answers = [answer for some, planned in self.pooled for answer in _outputs(some, planned)]
        for asked, pulled in self.others:
            answers += [
                Answer(Call(layer, ids), found)
                for (layer, ids), found in zip(asked, split(asked, pulled), strict=True)
            ]
        return answers


def plan_calls(known: Sequence[KnownCall], data: Any) -> PlannedCalls:
    """Plan the requests of all calls: one for those that train and are pooled."""
    pooled: dict[tuple[bool, Any], list[tuple[Call, pooling.Feature]]] = {}
    others: dict[TableLayer, list[Call]] = {}
    for one in known:
        try:
            call = one.find_in(data)
            check_ids(call.ids)
            feature = feature_of(call) if one.is_pooled else None
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            continue  # a batch of another form: the call itself raises what is wrong, if it is
        if feature is None:
            others.setdefault(call.layer, []).append(call)
        else:
            pooled.setdefault((call.layer.trains(), call.ids.device), []).append((call, feature))
    try:
        plans = [(some, pooling.plan([feature for _, feature in some])) for some in pooled.values()]
        asked = requests("forward", {layer: [call.ids for call in some] for layer, some in others.items()})
        return PlannedCalls(plans, [(some, plan(some)) for some in asked])
    except KeyRangeError:
        return PlannedCalls([], [])  # the call itself raises it


def feature_of(call: Call, weights: Any = None) -> pooling.Feature | None:
    """Return a call's ids as bags, of one id each for an Embedding; None if the layer must make the output.

    Raises ValueError for ids and offsets that do not fit. Weights are for a layer without padding.
    """
    layer, ids = call.layer, call.ids
    if not layer.is_pooled:
        return None
    flat: NDArray[np.int64] = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
    if isinstance(layer, EmbeddingBag):
        offsets: NDArray[np.int64] = _offsets(layer, ids, call.offsets)
        is_mean = layer.mode == "mean"
    else:
        offsets, is_mean = np.arange(len(flat) + 1), False
    padding = None
    if layer.padding_idx is not None:
        counted = flat != layer.padding_idx
        if not isinstance(layer, EmbeddingBag):
            padding = ~counted, layer.padding_row().numpy()
        offsets = np.concatenate([[0], np.cumsum(counted)])[offsets]
        flat = np.ascontiguousarray(flat[counted])
    array = None if weights is None else weights.detach().to("cpu", torch.float32).numpy()
    bags = Bags(offsets, array, is_mean)
    return pooling.Feature(layer, flat, bags, weights, 0, (slice(None), slice(None)), padding)


def _offsets(layer: EmbeddingBag, ids: Any, given: Any) -> NDArray[np.int64]:
    """Return where each bag begins, and where the last one ends. Raises ValueError for others."""
    offsets: NDArray[np.int64]
    if ids.dim() == 2 and given is None:
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        return offsets
    if ids.dim() != 1 or given is None or given.dim() != 1:
        raise ValueError("no bags")
    offsets = given.to("cpu", torch.int64).numpy()
    if not layer.include_last_offset:
        offsets = np.append(offsets, len(ids))
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets that are not of bags")
    return offsets


def shape_of(call: Call) -> tuple[Any, ...]:
    """Return the shape of a call's output."""
    layer, ids = call.layer, call.ids
    if not isinstance(layer, EmbeddingBag):
        return (*ids.shape, layer.embedding_dim)
    bags = len(ids) if call.offsets is None else len(call.offsets) - int(layer.include_last_offset)
    return (bags, layer.embedding_dim)


def _outputs(
    some: Sequence[tuple[Call, pooling.Feature]], planned: Sequence[pooling.Request]
) -> list[Answer]:
    """Return the outputs of calls whose rows are there."""
    outputs, shapes = [], []
    for number, (call, feature) in enumerate(some):
        feature.output = number
        outputs.append(_core.empty(len(feature.bags.offsets) - 1, call.layer.embedding_dim, False))
        shapes.append(shape_of(call))
    values = pooling.pooled(planned, outputs, some[0][0].ids.device, shapes)
    return [Answer(call, None, value) for (call, _), value in zip(some, values, strict=True)]
