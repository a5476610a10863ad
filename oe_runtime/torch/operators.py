"""The look-up of layers and collections as an operator of torch.library, for programs of torch.compile.

Such a program has no Python objects, so layers and collections have numbers here, and a backward pass finds
what the look-up left for it by a ticket. Without torch.compile they do the same without the operator.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from oe_runtime import _core
from oe_runtime.torch import jagged, pooling
from oe_runtime.torch.collections import Collection
from oe_runtime.torch.embedding import Call, TableLayer, bring, check_ids
from oe_runtime.torch.forward_pull import feature_of, shape_of
from oe_runtime.torch.gradients import saves_by_hooks

_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_works: dict[int, Any] = {}  # by ticket, as long as a program keeps that
_counter = itertools.count(1)
_MOST_OF_HOOKS = (
    64  # look-ups under hooks of saved tensors, such as save_on_cpu, that wait for a backward pass
)
_of_hooks: deque[int] = deque()


def register(model: Any) -> None:
    """Give the layers and collections of a model the numbers by which the operator finds them."""
    for module in model.modules():
        # A copy has the number of its original.
        is_known = isinstance(module, (TableLayer, Collection)) and _modules.get(module.number) is module
        if isinstance(module, (TableLayer, Collection)) and not is_known:
            module.number = next(_counter)
            _modules[module.number] = module
            # Compilers leave out sums of empty tensors, such as gradients of a layer that is called twice,
            # with the calls of which they are the results; those of this one have an element.
            with torch.inference_mode(False):
                module.witness = torch.zeros(1, requires_grad=True)


@torch.library.custom_op("oe_runtime::look_up", mutates_args=())  # type: ignore[untyped-decorator]
def _look_up(
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    anchors: Sequence[torch.Tensor],
    keys: str,
    number: int,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.set_grad_enabled(trains):  # as where the program calls this
        requests, output, shape = _planned(number, ids, offsets, weights, keys)
        for request in requests:
            bring(request.client, request.pulled)
        work = pooling.fill(requests, [output])
    ticket = torch.zeros((), dtype=torch.int64)
    if trains or work.weights:
        name = next(_counter)
        ticket.fill_(name)
        _works[name] = work
        if saves_by_hooks():  # which may keep a copy of the ticket
            _of_hooks.append(name)
            if len(_of_hooks) > _MOST_OF_HOOKS:
                _works.pop(_of_hooks.popleft(), None)
        else:
            weakref.finalize(ticket, _works.pop, name, None)
    return torch.from_numpy(output.reshape(shape)).to(ids.device), ticket


def _planned(
    number: int, ids: Any, offsets: Any, weights: Any, keys: str
) -> tuple[Sequence[pooling.Request], NDArray[Any], tuple[int, ...]]:
    """Return the requests of a look-up, the output to be filled, and its shape."""
    module = _modules[number]
    if isinstance(module, Collection):
        planned = module.plan(jagged.KeyedJaggedTensor(keys.split("\n"), ids, weights, offsets=offsets))
        (output,) = planned.outputs
        return planned.requests, output, output.shape
    check_ids(ids)
    # Copies: the push needs them, when the caller may have changed the tensors.
    call = Call(module, ids.clone(), None if offsets is None else offsets.clone())
    feature = feature_of(call, weights)
    assert feature is not None  # noqa: S101 - forward has asked
    output = _core.empty(len(feature.bags.offsets) - 1, module.embedding_dim, False)
    return pooling.plan([feature]), output, shape_of(call)


@_look_up.register_fake  # type: ignore[untyped-decorator]
def _(ids: Any, offsets: Any, weights: Any, anchors: Any, keys: str, number: int, trains: bool) -> Any:
    module = _modules[number]
    if isinstance(module, Collection):
        shape = module.shape_of(len(ids), len(offsets) - 1, keys.count("\n") + 1)
    else:
        shape = shape_of(Call(module, ids, offsets))
    return ids.new_empty(shape, dtype=torch.float32), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("oe_runtime::look_up_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _look_up_backward(
    gradient: torch.Tensor,
    ticket: torch.Tensor,
    weights: torch.Tensor | None,
    anchors: Sequence[torch.Tensor],
    call: int,  # another one for each, or compilers make one of two with equal arguments
) -> list[torch.Tensor]:
    """Bring the rows their gradients; return those of the weights, and zeros for the anchors."""
    name = int(ticket)
    work = _works.get(name)
    if name in _of_hooks:  # nothing tells whether another backward pass will come
        _of_hooks.remove(name)
        del _works[name]
    if work is None:
        raise RuntimeError(
            "a compiled program has not kept the rows of a look-up for its backward pass: compile the model "
            "by another backend of torch.compile, or leave it as it is"
        )
    parts = work.weights
    _, of_parts = work.back([gradient], [True] * len(parts))
    of_weights = torch.empty(0)
    if weights is not None:
        of_weights = torch.zeros_like(weights)
        for part, found in zip(parts, of_parts, strict=True):  # of one feature each
            begin = part.storage_offset() - weights.storage_offset()
            of_weights[begin : begin + len(part)] += found
    return [of_weights, *(torch.zeros(anchor.shape) for anchor in anchors)]


@_look_up_backward.register_fake  # type: ignore[untyped-decorator]
def _(gradient: Any, ticket: Any, weights: Any, anchors: Any, call: int) -> Any:
    of_weights = torch.empty(0) if weights is None else torch.empty_like(weights)
    return [of_weights, *(torch.empty(anchor.shape) for anchor in anchors)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, weights, anchors, *_ = inputs
    ctx.save_for_backward(output[1], weights, *anchors)


def _back(ctx: Any, gradient: Any, _: Any) -> Any:
    ticket, weights, *anchors = ctx.saved_tensors
    of_weights, *of_anchors = torch.ops.oe_runtime.look_up_backward.default(
        gradient, ticket, weights, anchors, next(_counter)
    )
    return None, None, None if weights is None else of_weights, of_anchors, None, None, None


_look_up.register_autograd(_back, setup_context=_keep)


_served = threading.local()  # the rows of a request that this thread answers


@contextlib.contextmanager
def supplied(rows: Sequence[NDArray[Any]]) -> Iterator[None]:
    """Let this thread's calls of `oe_runtime::rows` answer with these, by the number of the lookup."""
    _served.rows = rows
    try:
        yield
    finally:
        del _served.rows


@torch.library.custom_op("oe_runtime::rows", mutates_args=())  # type: ignore[untyped-decorator]
def _rows(ids: torch.Tensor, table: str, dim: int, double: bool, lookup: int) -> torch.Tensor:
    """Return the rows of ids, ids.shape + (dim,), in a program of `embed.export` that is served."""
    rows = getattr(_served, "rows", None)
    if rows is None:
        raise RuntimeError(
            f"the rows of table '{table}' are not in this program: serve it by python -m "
            "oe_runtime.serve, or load it by oe_runtime.serving.Model"
        )
    return torch.from_numpy(rows[lookup]).reshape(*ids.shape, dim).to(ids.device)


@_rows.register_fake  # type: ignore[untyped-decorator]
def _(ids: Any, table: str, dim: int, double: bool, lookup: int) -> Any:
    return ids.new_empty((*ids.shape, dim), dtype=torch.float64 if double else torch.float32)


def pool_bags(
    rows: torch.Tensor,
    begins: torch.Tensor,
    weights: torch.Tensor | None,
    counted: torch.Tensor | None,
    mode: str,
) -> torch.Tensor:
    """Return the pooled rows of bags that begin there, without those that are not `counted`."""
    if counted is not None:
        begins = torch.cat([begins.new_zeros(1), counted.cumsum(0)])[begins]
        rows, weights = rows[counted], None if weights is None else weights[counted]
    if mode == "mean" and rows.dtype == torch.float32:  # the same numbers as the core's
        sizes = torch.diff(begins, append=begins.new_full((1,), rows.shape[0]))
        mode, weights = "sum", (1 / sizes.to(rows.dtype)).repeat_interleave(sizes, output_size=rows.shape[0])
    numbers = torch.arange(rows.shape[0], device=rows.device)
    found: torch.Tensor = torch.nn.functional.embedding_bag(
        numbers, rows, begins, mode=mode, per_sample_weights=weights
    )
    return found


_bags = torch.library.custom_op("oe_runtime::bags", pool_bags, mutates_args=())


@_bags.register_fake  # type: ignore[untyped-decorator]
def _(rows: Any, begins: Any, weights: Any, counted: Any, mode: str) -> Any:
    return rows.new_empty((begins.shape[0], rows.shape[1]))


@torch.library.custom_op("oe_runtime::padded", mutates_args=())  # type: ignore[untyped-decorator]
def _padded(values: torch.Tensor, lengths: torch.Tensor, length: int, padding: float) -> torch.Tensor:
    """Return what `JaggedTensor.to_padded_dense` does."""
    return jagged.JaggedTensor(values, lengths=lengths).to_padded_dense(length, padding)


@_padded.register_fake  # type: ignore[untyped-decorator]
def _(values: Any, lengths: Any, length: int, padding: float) -> Any:
    return values.new_empty((lengths.shape[0], length, *values.shape[1:]))
