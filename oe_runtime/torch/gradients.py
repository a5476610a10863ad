"""The gradients of rows between backward and step: a parameter whose `grad` PyTorch's functions act on.

A layer's rows are on the servers, so its parameter is empty. Each pull of rows is a function of the
parameters in autograd's graph; its backward leaves the rows' gradients here, where `clip_grad_norm_`,
GradScaler and `zero_grad` find them. The optimizer's step pushes what they are then (`optimizer.py`).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle

from oe_runtime.client import Client, Pulled
from oe_runtime.spec import TableSpec

# Older ones lack what this package asks of autograd and of torch.library.
if torch.__version__ < "2.8":
    raise ImportError(
        f"oe_runtime.torch needs PyTorch 2.8 or later, but {torch.__version__} is installed: "
        "pip install 'torch>=2.8'"
    )

_MOST_PARTS = 32  # of a gradient that are not joined yet
_plain = torch._C.DisableTorchFunctionSubclass  # inside, tensors of this module are ordinary ones


@dataclass
class Table:
    """A layer's table on the servers behind `client`."""

    client: Client
    number: int
    spec: TableSpec


@dataclass
class Pull:
    """One request for the rows of one or more lookups."""

    pulled: Pulled
    size: int  # number of lookups


@dataclass(eq=False)
class Lookup:
    """A table's part of a pull."""

    table: Table
    asked: Any  # the tensor of ids
    ids: NDArray[np.int64]  # without padding
    padding: Any  # where the flat tensor has padding; None without any
    pull: Pull
    group: int  # of the pull
    places: slice | NDArray[np.int64]  # of the lookup's rows in the group
    numbers: NDArray[np.int64]  # of each id, its place among the lookup's rows
    size: int  # number of rows


@dataclass(eq=False)
class GradientRows:
    """Which rows a gradient is of, and the lookups of this process with whose ids it is pushed."""

    lookups: Sequence[Lookup]
    union: NDArray[np.int64] | None = None  # ascending keys; None: those of the only lookup, in its order
    mine: NDArray[np.bool_] | None = None  # after an exchange, the rows that this worker pushes

    def equals(self, other: GradientRows) -> bool:
        """Whether both are of the same rows in the same order."""
        return self is other or np.array_equal(self.keys, other.keys)

    @property
    def keys(self) -> NDArray[np.int64]:
        """The key of each row of the gradient."""
        if self.union is not None:
            return self.union
        (lookup,) = self.lookups
        keys = np.empty(lookup.size, np.int64)
        keys[lookup.numbers] = lookup.ids
        return keys


Part = tuple[GradientRows, Any]  # and the gradient, (rows, dim)


def track(lookups: Sequence[Lookup], rows: Sequence[Any], parameters: Sequence[RowsParameter]) -> Any:
    """Return the rows of each lookup of one pull as functions of the layers' parameters."""
    forget(parameters)
    return _PulledRows.apply(lookups, rows, *parameters)


def forget(parameters: Sequence[RowsParameter]) -> None:
    """Drop what earlier backward passes have left and autograd has not asked for."""
    if torch._C._current_graph_task_id() == -1:  # no backward pass is running that would still take these
        for parameter in parameters:
            parameter.arrived.clear()


def saves_by_hooks() -> bool:
    """Whether a program's hooks take what autograd saves: a checkpoint's, which calls layers again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keep(ctx: Any, work: Any, *tensors: Any) -> None:
    """Keep what a function's backward needs until backward passes have used it, and so no second time."""
    if tensors and not saves_by_hooks():
        holder = torch.empty(0)  # autograd frees it after a backward pass, and refuses a second one
        holder.work = work
        ctx.save_for_backward(*tensors, holder)
        return
    # Hooks would give back another tensor; and each output may have a backward pass of its own, as the layers
    # of two losses have in torch.nn.
    ctx.work, ctx.is_hooked, ctx.reached = work, saves_by_hooks(), set()
    if tensors:
        ctx.save_for_backward(*tensors)


def kept(ctx: Any, gradients: Sequence[Any]) -> Any:
    """Return what `keep` was given, for the gradients of the outputs.

    Raises RuntimeError for an output of which a backward pass without retain_graph has come before.
    """
    if not hasattr(ctx, "work"):
        return ctx.saved_tensors[-1].work
    if ctx.is_hooked:
        _ = ctx.saved_tensors  # a checkpoint computes them now
        return ctx.work
    reached = {number for number, one in enumerate(gradients) if one is not None}
    if reached & ctx.reached:
        raise RuntimeError(
            "Trying to backward through the graph a second time: give retain_graph=True to the first time"
        )
    work = ctx.work
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.reached |= reached
        if len(ctx.reached) == len(gradients):
            ctx.work = None
    return work


class _PulledRows(torch.autograd.Function):  # type: ignore[misc]
    """Rows as a function of parameters; its backward leaves the gradients with them, by the backward pass."""

    @staticmethod
    def forward(ctx: Any, lookups: Sequence[Lookup], rows: Sequence[Any], *parameters: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        keep(ctx, lookups)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        parts = zip(kept(ctx, gradients), ctx.parameters, gradients, strict=True)
        found = [None if of_rows is None else one.bring(lookup, of_rows) for lookup, one, of_rows in parts]
        return None, None, *found


_ALLOWED = frozenset(
    (
        *("__get__", "__set__", "__delete__", "__len__", "size", "dim", "ndimension", "numel", "nelement"),
        *("stride", "element_size", "storage_offset", "data_ptr", "untyped_storage", "get_device", "type"),
        *("requires_grad_", "detach", "detach_", "to", "cpu", "cuda", "xpu", "float", "double", "half"),
        *("bfloat16", "pin_memory", "share_memory_", "copy_", "new_empty", "empty_like", "zeros_like"),
        *("full_like", "_has_compatible_shallow_copy_type"),
    )
)  # and predicates, is_…

_READS = frozenset(("norm", "square", "pow", "abs"))


class _OnServers(torch.Tensor):  # type: ignore[misc]
    """An empty tensor in the place of rows on servers, which refuses mathematics."""

    label = "an embedding layer"
    layer: Callable[[], Any] = staticmethod(lambda: None)  # whose rows these are, while it is there

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what moves, describes or detaches the tensor; refuse anything else by name, except norms.

        They are of all rows, and their gradients train them, as in loops that add L2 of all parameters.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is torch.autograd.grad:
            return _autograd_grad(*args, **kwargs)
        if getattr(func, "namespace", "") == "oe_runtime":  # an operator of `operators`
            with _plain():
                return func(*args, **kwargs)
        layer = args[0].layer() if name in _READS and isinstance(args[0], _OnServers) else None
        if layer is not None and layer.num_embeddings != -1:
            return func(layer.weight, *args[1:], **kwargs)
        is_harmless = name in _ALLOWED or name.startswith(("is_", "_is_"))
        if not is_harmless and not (name == "backward" and not isinstance(args[0], _OnServers)):
            label = next((one.label for one in _flat(args, kwargs) if isinstance(one, _OnServers)), cls.label)
            raise RuntimeError(  # a TypeError would become Python's of operands
                f"torch's {name} cannot use the parameter of {label}, whose rows are on parameter servers: "
                "for L2 set the optimizer's weight_decay or regularize the layer's output, train it by an "
                "optimizer from distributed_optimizer, and take the rows' values from layer.weight"
            )
        with _plain():
            found = func(*args, **kwargs)
            if type(found) is torch.Tensor and not name.endswith("_like"):  # an optimizer's state is ordinary
                label = args[0].label if isinstance(args[0], _OnServers) else cls.label
                found = found.as_subclass(_OnServers)
                found.label = label
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor, which any program can load."""
        with _plain():
            return torch.Tensor.detach(self).as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        """Say where the rows are."""
        return f"<rows of {self.label} on parameter servers>"


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments, and what lists and tuples among them hold."""
    found: list[Any] = []
    for one in (*args, *kwargs.values()):
        found.extend(one if isinstance(one, (list, tuple)) else [one])
    return found


_BASE = torch.Tensor._base.__get__


class RowsGradient(torch.Tensor):  # type: ignore[misc]
    """A gradient that knows which rows it is of, and is not added to one of others.

    Two gradients of equally many rows have one shape, but need not be of the same rows.
    """

    of_rows: GradientRows

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do it; a result of the same shape is of the same rows."""
        kwargs = kwargs or {}
        mine = [one for one in (*args, *kwargs.values()) if isinstance(one, RowsGradient)]
        for other in mine[1:]:
            if not mine[0].of_rows.equals(other.of_rows):
                raise ValueError(  # operators take a TypeError for something else
                    "gradients of different rows on parameter servers cannot be combined: add the losses, or "
                    "call backward for each without zero_grad between"
                )
        with _plain():
            found = func(*args, **kwargs)
            is_like = mine and type(found) is torch.Tensor and found.shape == mine[0].shape
            if is_like and func is not _BASE:  # each would have another base
                found = _with_rows(found, mine[0].of_rows)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsGradient:
        """Return a copy of the same rows."""
        with _plain():
            return _with_rows(torch.Tensor.clone(torch.Tensor.detach(self)), self.of_rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor, which any program can load."""
        with _plain():
            return torch.Tensor.detach(self).as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _with_rows(gradient: Any, rows: GradientRows) -> RowsGradient:
    found: RowsGradient = gradient.as_subclass(RowsGradient)
    found.of_rows = rows
    return found


class RowsParameter(_OnServers, nn.Parameter):  # type: ignore[misc]
    """The parameter of a layer with rows on servers: empty, with the gradient of the rows in use.

    `grad` has the shape (rows, dim): the rows, once each, of all lookups that backward passes have reached
    since the gradient was None. `grad_keys` are their keys. It may be changed in place, set to None, and
    assigned: a tensor that comes from it by a function, or from `torch.autograd.grad`.

    With several workers, reading `grad` exchanges the gradients of all layers of the optimizer between them
    and returns their mean over the workers, on each the same: all workers read it at the same place of their
    programs. Without such a read nothing is exchanged. A gradient that was not read is None after the step.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> RowsParameter:
        """Make one that is empty; `data` is, too, and gives the device and dtype."""
        made: RowsParameter = torch.Tensor._make_subclass(cls, torch.empty(0) if data is None else data, True)
        made.arrived = {}  # parts of backward passes, by their numbers in autograd
        made.parts = []
        made.hidden = False
        made.stepped = False
        made.exchange = None
        made.hooks = OrderedDict()
        made.hooks_after = OrderedDict()
        made.after_backward = None
        with _plain():
            torch.Tensor.register_post_accumulate_grad_hook(made, RowsParameter._accumulate)
            made.requires_grad_(requires_grad)
        return made

    arrived: dict[int, list[Part]]
    parts: list[Part]  # not joined yet; with several workers, those after an exchange are not exchanged
    hidden: bool  # from torch's own step
    stepped: bool  # whether a step has used the gradient
    exchange: Exchange | None  # with several workers
    hooks: OrderedDict[int, Callable[[Any], Any]]
    hooks_after: OrderedDict[int, Callable[[Any], None]]
    after_backward: Callable[[], None] | None  # of rows that are pushed without a step

    @property
    def trains(self) -> bool:
        """What `requires_grad` says, without the detour of each read through `__torch_function__`."""
        with _plain():
            return bool(self.requires_grad)

    def belong_to(self, layer: Any, label: str) -> None:
        """Be the parameter of this layer, and be called so."""
        self.layer, self.label = weakref.ref(layer), label

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsParameter:
        """Return a parameter without the gradient, as torch does."""
        with _plain():
            copied = RowsParameter(torch.Tensor.detach(self).clone(), self.requires_grad)
        copied.label = self.label
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle without the gradient, as torch does."""
        with _plain():
            return RowsParameter, (self.detach().as_subclass(torch.Tensor), self.requires_grad)

    __repr__ = _OnServers.__repr__

    @property
    def grad(self) -> Any:
        """The gradient of the rows of the lookups, (rows, dim); None without any."""
        # A compiler looks at all of a parameter, but a program has another gradient in each step.
        if self.hidden or self.after_backward is not None or TracingContext.try_get() is not None:
            return None
        if self.exchange is not None:
            self.exchange.run()
        if not self.parts:
            return None
        if len(self.parts) > 1:
            self.parts = [_joined(self.parts)]
        ((rows, gradient),) = self.parts
        if not isinstance(gradient, RowsGradient):
            with _plain():
                self.parts = [(rows, gradient := _with_rows(gradient, rows))]
        return gradient

    @grad.setter
    def grad(self, gradient: Any) -> None:
        self.hidden = False
        if self.after_backward is not None:  # PyTorch sets it to None in the backward pass
            if gradient is not None and gradient.numel():
                raise ValueError(
                    f"the rows of {self.label} are updated in the backward pass, and take no gradient later: "
                    "give the rule to distributed_optimizer instead of apply_optimizer_in_backward"
                )
            return
        if gradient is None:
            self.parts = []
            return
        rows: GradientRows | None = getattr(gradient, "of_rows", None)
        if rows is None:
            now = self.grad
            if now is None or now.shape != gradient.shape:
                raise ValueError(
                    f"the gradient for the rows of {self.label} has shape {tuple(gradient.shape)}, and which "
                    "rows it is of is unknown: change .grad in place, or assign a gradient of the same "
                    "shape while .grad is not None"
                )
            rows = now.of_rows
        self.parts = [(rows, gradient)]
        self.stepped = False
        if self.exchange is not None and rows.mine is None:
            self.exchange.pending = True

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def grad_keys(self) -> NDArray[np.int64] | None:
        """The keys of the rows of `grad`, int64 (rows,); None without a gradient."""
        gradient = self.grad
        return None if gradient is None else gradient.of_rows.keys

    def register_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:
        """Call `hook` with the rows' gradient of each backward pass; what it returns takes its place."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call `hook` with this parameter after each backward pass has added to its `grad`."""
        handle = RemovableHandle(self.hooks_after)
        self.hooks_after[handle.id] = hook
        return handle

    def bring(self, lookup: Lookup, gradient: Any) -> Any:
        """Leave a gradient of the backward pass; returns what autograd gets: it calls `_accumulate` once."""
        task = torch._C._current_graph_task_id()
        self.arrived.setdefault(task, []).append((GradientRows([lookup]), gradient))
        with _plain():
            return self.new_empty(self.shape)

    def take(self, task: int) -> list[Part]:
        """Return the parts that a backward pass has brought, as the hooks have changed them."""
        parts = self.arrived.pop(task, [])
        if self.hooks and parts:
            rows, gradient = parts[0] if len(parts) == 1 else _joined(parts)
            for hook in list(self.hooks.values()):
                if (changed := hook(gradient)) is not None:
                    gradient = changed
            parts = [(rows, gradient)]
        return parts

    def _accumulate(self) -> None:
        """Add what a backward pass has brought to the gradient; autograd calls this once per pass."""
        parts = self.take(torch._C._current_graph_task_id())
        if not self.trains:  # frozen since the forward pass
            return
        self.add(parts)
        for hook in list(self.hooks_after.values()):
            hook(self)
        if self.after_backward is not None:
            self.after_backward()

    def add(self, parts: Sequence[Part]) -> None:
        """Add to the gradient."""
        self.hidden = False
        if self.exchange is not None:
            self.exchange.pending = True
        # Without this, zero_grad(set_to_none=False) would keep the rows of all steps.
        if self.stepped and not any(bool(gradient.any()) for _, gradient in self.parts):
            self.parts = []
        self.stepped = False
        for rows, gradient in parts:
            for i, (others, sum_of_others) in enumerate(self.parts):
                if rows.lookups == others.lookups and rows.union is None and others.union is None:
                    if gradient.requires_grad or sum_of_others.requires_grad:
                        self.parts[i] = others, sum_of_others + gradient
                    else:
                        sum_of_others += gradient
                    break
            else:
                self.parts.append((rows, gradient))
        # Without a step a program may call backward often; a mean of several workers is not added to others.
        plain = all(of_rows.mine is None and not part.requires_grad for of_rows, part in self.parts)
        if len(self.parts) > _MOST_PARTS and plain:
            self.parts = [_joined(self.parts)]

    def end_step(self) -> None:
        """Keep the gradient after a step, as torch does, until it is None or added to.

        With several workers keep only their mean: `zero_grad` reads the gradient, which would exchange it.
        """
        self.stepped = True
        if self.exchange is not None and any(rows.mine is None for rows, _ in self.parts):
            self.parts = []


def _joined(parts: Sequence[Part]) -> Part:
    """Return one gradient of the rows of all parts."""
    lookups = list(dict.fromkeys(lookup for rows, _ in parts for lookup in rows.lookups))
    device = parts[0][1].device
    union, places = np.unique(np.concatenate([rows.keys for rows, _ in parts]), return_inverse=True)
    values = torch.cat([gradient.to(device) for _, gradient in parts])
    total = values.new_zeros(len(union), values.shape[1])
    total = total.index_add(0, torch.from_numpy(places.reshape(-1)).to(device), values)
    return GradientRows(lookups, union), total


def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Do as torch.autograd.grad, with gradients of rows for their parameters."""
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    ours = {i: one for i, one in enumerate(wanted) if isinstance(one, RowsParameter)}
    if kwargs.get("is_grads_batched") or len(args) > 5:
        raise TypeError(
            "torch.autograd.grad(is_grads_batched=…) has no gradients of rows on parameter servers"
        )
    known = {i: set(one.arrived) for i, one in ours.items()}
    with _plain():
        found = list(torch.autograd.grad(outputs, wanted, *args, **kwargs))
    for i, parameter in ours.items():
        parts = [part for task in set(parameter.arrived) - known[i] for part in parameter.take(task)]
        if parts:
            rows, gradient = parts[0] if len(parts) == 1 else _joined(parts)
            with _plain():
                found[i] = _with_rows(gradient, rows)
    return tuple(found)


class Exchange:
    """The exchange of rows' gradients between the workers that train the same parameters."""

    def __init__(self, parameters: Sequence[RowsParameter], workers: int) -> None:
        self._parameters = parameters
        self._workers = workers
        self.pending = False  # whether a backward pass has run since the last exchange or step

    def mark(self, _: Any = None) -> None:
        """Note that a backward pass has run, also one without gradients of rows."""
        self.pending = True

    def run(self) -> None:
        """Replace each worker's gradients by their mean over all, unless nothing has changed."""
        if not self.pending:
            return
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                f"gradients of rows are read with {self._workers} workers, but torch.distributed is not "
                "initialised, so they cannot be averaged: call init_process_group, or read no .grad of rows"
            )
        self.pending = False
        rank = distributed.get_rank()
        local = [self._local(parameter) for parameter in self._parameters]
        everyone = _gather([array for part in local for array in part])
        for i, parameter in enumerate(self._parameters):
            parts = [arrays[2 * i : 2 * i + 2] for arrays in everyone]
            if any(len(keys) for keys, _ in parts):
                _average(parameter, parts, rank)

    @staticmethod
    def _local(parameter: RowsParameter) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the keys and gradients that are not exchanged yet."""
        parts = [part for part in parameter.parts if part[0].mine is None]
        if not parts:
            return np.empty(0, np.int64), np.empty((0, 0), np.float32)
        rows, gradient = parts[0] if len(parts) == 1 else _joined(parts)
        return rows.keys, gradient.detach().to("cpu").contiguous().numpy()


def _average(parameter: RowsParameter, parts: Sequence[Sequence[NDArray[Any]]], rank: int) -> None:
    """Make the mean of all workers' parts a parameter's gradient, with those of earlier exchanges."""
    lookups = [lookup for rows, _ in parameter.parts for lookup in rows.lookups]
    exchanged = [part for part in parameter.parts if part[0].mine is not None]
    device = parameter.parts[0][1].device if parameter.parts else "cpu"
    values = next(of_rows for keys, of_rows in parts if len(keys))
    union, places = np.unique(np.concatenate([keys for keys, _ in parts]), return_inverse=True)
    total = np.zeros((len(union), values.shape[1]), values.dtype)
    owner = np.full(len(union), -1)  # the first worker that has the row
    begin = 0
    for worker, (keys, of_rows) in enumerate(parts):
        at = places.reshape(-1)[begin : begin + len(keys)]
        begin += len(keys)
        if len(keys):
            total[at] += of_rows
            owner[at[owner[at] < 0]] = worker
    total /= len(parts)
    rows, gradient = GradientRows([], union), torch.from_numpy(total).to(device)
    mine = owner == rank
    if exchanged:
        ((before, earlier),) = exchanged
        (rows, gradient) = _joined([(before, earlier), (rows, gradient)])
        assert rows.union is not None  # noqa: S101
        assert before.union is not None  # noqa: S101
        # A row goes with the worker that has it since an earlier exchange, if any.
        owned = np.zeros(len(rows.union), bool)
        owned[np.searchsorted(rows.union, union[mine])] = True
        owned[np.searchsorted(rows.union, before.union)] = before.mine
        mine = owned
    parameter.parts = [(GradientRows(list(dict.fromkeys(lookups)), rows.union, mine), gradient)]


def _gather(arrays: Sequence[NDArray[Any]]) -> list[list[NDArray[Any]]]:
    """Return the arrays of each worker; dtypes and dims of worker's arrays may differ only when empty."""
    distributed = torch.distributed
    cuda = distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def gather(tensor: Any) -> list[Any]:
        found = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, tensor)
        return found

    shapes = torch.tensor(
        [(len(a), a.shape[1] if a.ndim > 1 else 0, a.dtype.itemsize) for a in arrays], device=device
    )
    all_shapes = [shape.tolist() for shape in gather(shapes)]
    sizes = [sum(n * max(dim, 1) * size for n, dim, size in shape) for shape in all_shapes]
    if not max(sizes):
        return [[np.empty(0, np.int64)] * len(arrays) for _ in sizes]
    payload = np.zeros(max(sizes), np.uint8)
    mine = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    payload[: len(mine)] = np.frombuffer(mine, np.uint8)
    everyone = []
    for shape, tensor in zip(all_shapes, gather(torch.from_numpy(payload).to(device)), strict=True):
        data, begin, found = tensor.cpu().numpy(), 0, []
        for n, dim, size in shape:
            end = begin + n * max(dim, 1) * size
            part = data[begin:end].view(np.int64 if not dim else f"f{size}")
            found.append(part.reshape(n, dim) if dim else part)
            begin = end
        everyone.append(found)
    return everyone
