"""torch.optim's optimizers as entries of a table's specification, and the push in their step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oe_runtime.model_tables import make_tables
from oe_runtime.spec import TableSpec
from oe_runtime.torch import optimizer_state
from oe_runtime.torch.embedding import TableLayer, forwards, process
from oe_runtime.torch.gradients import Exchange, Part, RowsParameter, Table
from oe_runtime.torch.in_backward import AfterBackward, optimizer_of
from oe_runtime.torch.model import table_layers
from oe_runtime.torch.translate import table_optimizer


def distributed_optimizer(optimizer: Any, model: Any, *, workers: int | None = None) -> Any:
    """Make the tables of `model`, and let `optimizer.step()` train them too; return `optimizer`.

    Takes a torch.optim SGD, Adagrad, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop or SparseAdam, or
    this package's RowWiseAdagrad, of `model.parameters()`, or of groups of them with their own
    hyperparameters. A table gets the server's counterpart with those of its layer's group. Every step pushes
    with the group's learning rate of that step.

    A layer whose weight had an optimizer by `apply_optimizer_in_backward` keeps that: its rows are pushed at
    the end of each backward pass, and nothing between that and the step acts on them. `optimizer` then has
    the other weights.

    Differences from dense weights in PyTorch: only rows in a step's batches are updated. The momenta of other
    rows stay, and `weight_decay` shrinks a row only in its own steps. A layer made with a `spec` keeps its
    table's optimizer; only the learning rate is this one's.

    A step pushes the rows' gradients as they are then, so what changes `grad` of the layers' parameters after
    the backward pass acts on rows: clip_grad_norm_, GradScaler, zero_grad. With several `workers` (by default
    torch.distributed's number of processes, if initialised), each with a client of its own rank
    (`oe_runtime.Worker`), gradients are divided by their number, as DistributedDataParallel does with dense
    ones; a read of `grad` exchanges them.

    Raises ValueError naming the optimizer or the option that tables do not support, and SpecMismatch when the
    servers have a table of the name with another description.
    """
    groups = _groups(optimizer)
    rows = _Rows(optimizer, model, workers)
    for name, layer in table_layers(model).items():
        if layer.client is None:
            raise ValueError(f"layer '{name}' has no servers: give the model to distributed_model first")
        in_backward = optimizer_of(layer)
        group = in_backward.param_groups[0] if in_backward else groups.get(id(layer.anchor))
        if group is None:
            raise ValueError(
                f"layer '{name}' is not in the optimizer: make that of model.parameters(), after "
                "distributed_model"
            )
        rows.add(layer, group)
    rows.bind()
    return optimizer


_Spec = tuple[TableLayer, dict[str, Any], TableSpec]  # a layer, the optimizer's rule, and the table


class _Rows:
    """The tables that one optimizer trains."""

    def __init__(self, optimizer: Any, model: Any, workers: int | None) -> None:
        self._optimizer = optimizer
        self._workers = workers
        self._specs: list[_Spec] = []

    def add(self, layer: TableLayer, group: dict[str, Any]) -> None:
        rule = table_optimizer(optimizer_of(layer) or self._optimizer, group)
        self._specs.append((layer, rule, layer.table_spec(rule)))

    def bind(self) -> None:
        names = [spec.name for *_, spec in self._specs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two layers have tables of the name '{twice[0]}'")
        by_client: dict[int, list[tuple[TableLayer, TableSpec]]] = {}
        for layer, _, spec in self._specs:
            by_client.setdefault(id(layer.client), []).append((layer, spec))
        for layers in by_client.values():
            client, fresh = layers[0][0].client, layers[0][0].fresh
            for layer, _ in layers:
                layer.give_up_private_table()
            assert client is not None  # noqa: S101 - distributed_optimizer has asked
            given = [spec.name for layer, spec in layers if layer.are_first_rows_given]
            specs = [spec for _, spec in layers]
            numbers = make_tables(client, specs, fresh, replaced=given, first=process()[0] == 0)
            for number, (layer, _) in zip(numbers, layers, strict=True):
                layer.table = Table(client, number, client.spec(number))
                layer.fresh = False  # another optimizer goes on with these rows
                layer.bring_rows()
        if process()[1] > 1:
            torch.distributed.barrier()  # no pull before the first process has assigned all rows
        keep_freed_memory()
        in_backward = [one for one in self._specs if optimizer_of(one[0])]
        self._specs = [one for one in self._specs if not optimizer_of(one[0])]
        if in_backward:
            self._push_in_backward(in_backward)
        if not self._specs:  # an optimizer of dense weights, of any kind
            return
        optimizer_state.register(self._optimizer, [layer for layer, *_ in self._specs])
        self._share_gradients()
        for before in _BOUND.setdefault(self._optimizer, []):  # a second call is in place of the first
            before.forget([layer for layer, *_ in self._specs])
        _BOUND[self._optimizer].append(self)
        self._optimizer.register_step_pre_hook(self._hide)
        self._optimizer.register_step_post_hook(self._step)

    def forget(self, layers: Sequence[TableLayer]) -> None:
        """Leave these layers to another object."""
        self._specs = [spec for spec in self._specs if all(spec[0] is not layer for layer in layers)]

    def _push_in_backward(self, specs: Sequence[_Spec]) -> None:
        """Push the gradients of these tables at the end of each backward pass, which leaves none of them."""

        def push() -> None:
            try:
                self._push(specs)
            finally:
                for layer, *_ in specs:
                    layer.anchor.parts = []

        after = AfterBackward(push)
        for layer, _, spec in specs:
            optimizer_state.register(optimizer_of(layer), [layer])
            layer.anchor.exchange, layer.anchor.label = None, f"table '{spec.name}'"
            layer.anchor.after_backward = after.queue
        if (self._workers or process()[1]) > 1:
            self._call_for_dense_weights(after.queue)

    def _call_for_dense_weights(self, hook: Callable[[Any], None]) -> None:
        """Call a hook after a backward pass, also in a worker whose own had no rows."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not isinstance(parameter, RowsParameter):
                    parameter.register_post_accumulate_grad_hook(hook)

    def _share_gradients(self) -> None:
        """Let reads of the rows' gradients exchange them between several workers."""
        parameters = [layer.anchor for layer, *_ in self._specs]
        workers = self._workers or process()[1]
        exchange = Exchange(parameters, workers) if workers > 1 else None
        for layer, _, spec in self._specs:
            layer.anchor.exchange, layer.anchor.label = exchange, f"table '{spec.name}'"
        if exchange is not None:
            self._call_for_dense_weights(exchange.mark)

    def _hide_gradients(self, hidden: bool) -> None:
        for spec in self._specs:
            spec[0].anchor.hidden = hidden

    def _hide(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a step: hide the rows' gradients from PyTorch's own, but not from its closure."""

        self._hide_gradients(True)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def closure_with_rows() -> Any:
            self._hide_gradients(False)
            loss = closure()
            self._hide_gradients(True)
            return loss

        return (args[0], closure_with_rows), {}

    def _step(self, *_: Any) -> None:
        """After a step: push the gradients as they are now."""
        try:
            # GradScaler leaves these two to fused optimizers.
            found_inf = getattr(self._optimizer, "found_inf", None)
            if found_inf is None or not found_inf.item():
                self._push(self._specs, getattr(self._optimizer, "grad_scale", None))
        finally:
            self._hide_gradients(False)
        for spec in self._specs:
            spec[0].anchor.end_step()
        for spec in self._specs:
            if (exchange := spec[0].anchor.exchange) is not None:
                exchange.pending = False

    def _push(self, specs: Sequence[_Spec], scale: Any = None) -> None:
        for forward in forwards():  # a step within a forward pass, whose further calls see the new rows
            forward.answers.clear()
        workers = self._workers or process()[1]
        by_client: dict[int, list[tuple[Table, float, list[Part]]]] = {}
        groups = _groups(self._optimizer)  # load_state_dict makes new ones
        for layer, rule, _ in specs:
            optimizer = optimizer_of(layer)
            group = optimizer.param_groups[0] if optimizer else groups[id(layer.anchor)]
            if layer.spec is None and table_optimizer(optimizer or self._optimizer, group) != rule:
                raise ValueError(
                    f"the optimizer's settings for table '{layer.bound().spec.name}' have changed from "
                    f"{rule}; only the learning rate of a table may change"
                )
            table, parts = layer.bound(), layer.anchor.parts
            if scale is not None:
                for _, gradient in parts:
                    gradient /= scale
            # Other workers wait for this one's part of each table.
            if parts or (workers > 1 and not layer.frozen):
                by_client.setdefault(id(table.client), []).append((table, float(group["lr"]), parts))
        for tables in by_client.values():
            _push_tables(tables, workers)


_BOUND: WeakKeyDictionary[Any, list[_Rows]] = WeakKeyDictionary()  # by optimizer


def keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees, at most 64 MiB of it, for the next step.

    It returns freed memory to the kernel where that is more than twice the largest block that was ever freed,
    and counts blocks up to 32 MiB. A step that faults its activations in anew takes a tenth longer. So free
    one such block, without touching it. Other allocators do not mind.
    """
    np.empty((32 << 20) - (64 << 10), np.uint8)


def _refuse_unbound(optimizer: Any, *_: Any) -> None:
    """Before the step of any optimizer: raise RuntimeError if it would leave out gradients of rows."""
    if optimizer in _BOUND:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, RowsParameter) and parameter.parts and parameter.after_backward is None:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() cannot train the rows of {parameter.label} on "
                    "parameter servers: give the optimizer to distributed_optimizer(optimizer, model) first"
                )


register_optimizer_step_pre_hook(_refuse_unbound)


def _groups(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the group of each parameter by its id."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


_Rated = tuple[Table, float, list[Part]]  # a table, its learning rate, and its parts of the gradient


def _push_tables(tables: Sequence[_Rated], workers: int) -> None:
    """Push the gradients of the tables of one client, each table once.

    A pull of several tables whose rows all have gradients is pushed as it is, and all other tables of a
    learning rate together: one message per server each.
    """
    of_rates: dict[float, list[_Rated]] = {}
    for one in tables:
        of_rates.setdefault(one[1], []).append(one)
    for rate, of_rate in of_rates.items():
        wholes, others = _whole_pulls(of_rate) if workers == 1 else ([], of_rate)
        for parts in wholes:
            _push_pull(parts, rate)
        if others:
            pulled, sums = _together(others, workers)
            others[0][0].client.push(pulled, sums, rate, summed=True)


def _whole_pulls(tables: Sequence[_Rated]) -> tuple[list[list[Part]], list[_Rated]]:
    """Return the parts of each pull that all its tables have gradients of and no others, and other tables."""
    by_pull: dict[int, list[_Rated]] = {}
    for one in tables:
        pulls = {id(lookup.pull) for rows, _ in one[2] for lookup in rows.lookups}
        by_pull.setdefault(pulls.pop() if len(pulls) == 1 else 0, []).append(one)
    wholes, others = [], by_pull.pop(0, [])
    are_few = sum(len(of_pull) == 1 for of_pull in by_pull.values()) <= 1
    for of_pull in by_pull.values():
        parts = [part for *_, of_table in of_pull for part in of_table]
        size = parts[0][0].lookups[0].pull.size
        is_whole = len(parts) == size and all(rows.union is None for rows, _ in parts)
        if is_whole and (size > 1 or are_few):
            wholes.append(parts)
        else:
            others += of_pull
    return wholes, others


def _push_pull(parts: Sequence[Part], rate: float) -> None:
    """Push all rows of one request, in one message per server."""
    of_groups: dict[int, list[Part]] = {}
    for part in parts:
        of_groups.setdefault(part[0].lookups[0].group, []).append(part)
    first = parts[0][0].lookups[0]
    groups = first.pull.pulled.groups
    sums = [_sums(group.rows, of_groups.get(i, [])) for i, group in enumerate(groups)]
    first.table.client.push(first.pull.pulled, sums, rate, summed=True)


def _sums(rows: NDArray[Any], parts: Sequence[Part]) -> NDArray[Any]:
    """Return the gradients of all rows of a group. If the parts are all of one array, it is not copied."""
    whole = parts[0][1]._base if parts else None
    if whole is not None and whole.shape == rows.shape and len(rows) == sum(len(part) for _, part in parts):
        places = [of_rows.lookups[0].places for of_rows, _ in parts]
        if all(
            part._base is whole
            and isinstance(place, slice)
            and part.storage_offset() == place.start * rows.shape[1]
            for place, (_, part) in zip(places, parts, strict=True)
        ):
            return _gradient((parts[0][0], whole), 1)
    sums = np.zeros_like(rows)
    for of_rows, part in parts:
        sums[of_rows.lookups[0].places] += _gradient((of_rows, part), 1)
    return sums


def _together(tables: Sequence[_Rated], workers: int) -> tuple[Any, list[Any]]:
    """Join the lookups of each table into one batch, with the gradients of a row summed over the parts."""
    ids = []
    for _, _, parts in tables:
        lookups = dict.fromkeys(lookup for rows, _ in parts for lookup in rows.lookups)
        ids.append(np.concatenate([lookup.ids for lookup in lookups]) if lookups else np.empty(0, np.int64))
    numbers = [(table.number, i) for i, (table, *_) in enumerate(tables)]
    pulled = tables[0][0].client.plan(ids, numbers)
    every = []
    for group in pulled.groups:
        sums = np.zeros_like(group.rows)
        begin = 0
        for i, size in zip(group.lookups, group.sizes, strict=True):
            places = group.inverse[begin : begin + size]
            begin += size
            # Each key and its row, ascending by key.
            keys, first = np.unique(ids[i], return_index=True)
            for part in tables[i][2]:
                gradient, of_gradient = _gradient(part, workers), part[0].keys
                if part[0].mine is not None:
                    gradient, of_gradient = gradient[part[0].mine], of_gradient[part[0].mine]
                sums[places[first[np.searchsorted(keys, of_gradient)]]] += gradient
        every.append(sums)
    return pulled, every


def _gradient(part: Part, workers: int) -> NDArray[Any]:
    """Return the gradient as an array, divided by the workers unless it is their mean already."""
    rows, gradient = part
    gradient = gradient.detach().to("cpu")
    divided = gradient / workers if workers > 1 and rows.mine is None else gradient
    array: NDArray[Any] = divided.contiguous().numpy()
    return array
