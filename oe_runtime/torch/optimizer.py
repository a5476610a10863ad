"""torch.optim's optimizers as entries of a table's specification, and the push in their step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.model_tables import make_tables
from oe_runtime.spec import TableSpec
from oe_runtime.torch import optimizer_state
from oe_runtime.torch.embedding import Lookup, Table, TableLayer, process
from oe_runtime.torch.model import table_layers
from oe_runtime.torch.translate import table_optimizer


def distributed_optimizer(optimizer: Any, model: Any, *, workers: int | None = None) -> Any:
    """Make the tables of `model`, and let `optimizer.step()` train them too; return `optimizer`.

    Takes a torch.optim SGD, Adagrad, Adadelta, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop or SparseAdam, or
    this package's RowWiseAdagrad, of `model.parameters()`, or of groups of them with their own
    hyperparameters. A table gets the server's counterpart with those of its layer's group. Every step pushes
    with the group's learning rate of that step.

    Differences from dense weights in PyTorch: only rows in a step's batches are updated. The momenta of other
    rows stay, and `weight_decay` shrinks a row only in its own steps. A layer made with a `spec` keeps its
    table's optimizer; only the learning rate is this one's.

    Several backward passes before a step count as one batch, as in PyTorch, and `zero_grad` discards unpushed
    gradients. With several `workers` (by default torch.distributed's number of processes, if initialised),
    each with a client of its own rank (`oe_runtime.Worker`), gradients are divided by their number, as
    DistributedDataParallel does with dense ones.

    Raises ValueError naming the optimizer or the option that tables do not support, and SpecMismatch when the
    servers have a table of the name with another description.
    """
    groups = _groups(optimizer)
    rows = _Rows(optimizer, model, workers)
    for name, layer in table_layers(model).items():
        if layer.client is None:
            raise ValueError(f"layer '{name}' has no servers: give the model to distributed_model first")
        group = groups.get(id(layer.anchor))
        if group is None:
            raise ValueError(
                f"layer '{name}' is not in the optimizer: make that of model.parameters(), after "
                "distributed_model"
            )
        rows.add(layer, group)
    rows.bind()
    return optimizer


class _Rows:
    """The tables that one optimizer trains."""

    def __init__(self, optimizer: Any, model: Any, workers: int | None) -> None:
        self._optimizer = optimizer
        self._workers = workers
        self._specs: list[tuple[TableLayer, dict[str, Any], Any]] = []

    def add(self, layer: TableLayer, group: dict[str, Any]) -> None:
        rule = table_optimizer(self._optimizer, group)
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
        optimizer_state.register(self._optimizer, [layer for layer, *_ in self._specs])
        self._optimizer.register_step_post_hook(self._push)
        forget = self._optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            forget(set_to_none)
            for layer, *_ in self._specs:
                layer.bound().lookups.clear()

        self._optimizer.zero_grad = zero_grad

    def _push(self, *_: Any) -> None:
        workers = self._workers or process()[1]
        by_client: dict[int, list[tuple[Table, float, bool]]] = {}
        groups = _groups(self._optimizer)  # load_state_dict makes new ones
        for layer, rule, _ in self._specs:
            group = groups[id(layer.anchor)]
            if layer.spec is None and table_optimizer(self._optimizer, group) != rule:
                raise ValueError(
                    f"the optimizer's settings for table '{layer.bound().spec.name}' have changed from "
                    f"{rule}; only the learning rate of a table may change"
                )
            table = layer.bound()
            by_client.setdefault(id(table.client), []).append((table, float(group["lr"]), layer.frozen))
        for tables in by_client.values():
            _push_tables(tables, workers)


def _groups(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the group of each parameter by its id."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


def _push_tables(tables: Sequence[tuple[Table, float, bool]], workers: int) -> None:
    """Push the gradients of the tables' lookups, each table once, and forget the lookups."""
    work = []
    for table, rate, frozen in tables:
        lookups = [] if frozen else [lookup for lookup in table.lookups if lookup.rows.grad is not None]
        table.lookups.clear()
        if lookups or (workers > 1 and not frozen):  # other workers wait for this one's part of each table
            work.append((table, rate, lookups))
    if not work:
        return
    every = [lookup for _, _, lookups in work for lookup in lookups]
    if workers == 1 and len({rate for _, rate, _ in work}) == 1 and _is_one_pull(every):
        _push_pull(every, work[0][1])
        return
    for table, rate, lookups in work:
        if len(lookups) == 1 and len(lookups[0].pull.lookups) == 1:
            pulled, gradients = lookups[0].pull.pulled, [_gradient(lookups[0].rows.grad, workers)]
        else:
            pulled, gradients = _together(table.client, table, lookups, workers)
        table.client.push(pulled, gradients, rate, summed=True)


def _is_one_pull(lookups: Sequence[Lookup]) -> bool:
    """Whether these are all lookups of one request, and no others."""
    whole = lookups[0].pull
    return all(lookup.pull is whole for lookup in lookups) and len(lookups) == len(whole.lookups)


def _push_pull(lookups: Sequence[Lookup], rate: float) -> None:
    """Push all rows of one request, in one message per server."""
    pulled = lookups[0].pull.pulled
    sums = [np.zeros_like(group.rows) for group in pulled.groups]
    for lookup in lookups:
        sums[lookup.group][lookup.places] += _gradient(lookup.rows.grad, 1)
    lookups[0].table.client.push(pulled, sums, rate, summed=True)


def _together(client: Client, table: Table, lookups: Sequence[Lookup], workers: int) -> tuple[Any, list[Any]]:
    """Join a table's lookups into one batch, with the gradients of a row summed over them."""
    keys = np.concatenate([lookup.ids for lookup in lookups]) if lookups else np.empty(0, np.int64)
    pulled = client.pull([keys], [(table.number, 0)])
    group = pulled.groups[0]
    sums = np.zeros_like(group.rows)
    begin = 0
    for lookup in lookups:
        end = begin + len(lookup.ids)
        # Where each of the lookup's rows is among those of all.
        places = np.empty(len(lookup.rows), np.int64)
        places[lookup.numbers] = group.inverse[begin:end]
        sums[places] += _gradient(lookup.rows.grad, workers)
        begin = end
    return pulled, [sums]


def _gradient(gradient: Any, workers: int) -> NDArray[Any]:
    gradient = gradient.detach().to("cpu")
    array: NDArray[Any] = (gradient / workers if workers > 1 else gradient).contiguous().numpy()
    return array
