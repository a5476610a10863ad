"""A trained PyTorch model as a program of torch.export and its tables, for `oe_runtime.serve`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oe_runtime.model_description import FILE, PROGRAM, ROWS, Description, Lookup, Tensor
from oe_runtime.support.directories import published
from oe_runtime.torch.collections import Collection
from oe_runtime.torch.embedding import EmbeddingBag, TableLayer
from oe_runtime.torch.model import table_layers


def export(model: Any, path: str | os.PathLike[str], example_inputs: Any, *, overwrite: bool = False) -> Path:
    """Write a model of `distributed_model` for `python -m oe_runtime.serve`; return `path`, a directory.

    It has the program of `torch.export` (`model.pt2`), its tables' rows as their servers have them now, and a
    description. `example_inputs` are the tensors of a call of `model`, one example per row: a mapping by the
    names of forward's arguments, a sequence in their order, or one tensor. Those names are the inputs of
    requests, each with any number of examples; outputs have the names of a mapping that forward returns, or
    `output_0`, `output_1`…. The program computes as `model.eval()` does.

    With several workers, one of them calls it, between steps. Raises ValueError for what cannot be exported,
    naming it, and FileExistsError; `overwrite` replaces an earlier export.
    """
    if torch.__version__ < "2.9":  # which writes files of another form
        raise ValueError(f"export needs PyTorch 2.9 or later, but {torch.__version__} is installed")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    layers = table_layers(model)
    _check(model, layers)
    inputs = _named_inputs(model, example_inputs)
    program, names = _program(model, layers, inputs)
    _check_examples(program, model, inputs, names)
    tables = {layer.bound().spec.name: layer.bound() for layer in layers.values()}
    with published(Path(path), overwrite=overwrite, ours=PROGRAM) as place:
        program.example_inputs = None  # they may be of real users
        torch.export.save(program, place / PROGRAM)
        for table in list(tables.values())[:1]:  # all are of one client
            (place / ROWS).mkdir()
            table.client.save(place / ROWS)
        outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
        Description(
            inputs=[_tensor(name, value) for name, value in inputs.items()],
            outputs=[_tensor(name, value) for name, value in zip(names, outputs, strict=True)],
            tables=[json.loads(table.spec.to_json()) for table in tables.values()],
            lookups=[Lookup(node.args[1], i) for i, node in enumerate(lookups_of(program.graph))],
            groups=[],
            weights=[weight_name(name) for name in program.state_dict],
        ).write(place / FILE)
    return Path(path)


def weight_name(name: str) -> str:
    """Return the name of a program's weight in checkpoints and descriptions."""
    return f"model/{name.removeprefix('module.')}"


def lookups_of(graph: Any) -> list[Any]:
    """Return the nodes of a program's graph that look rows up, in their order."""
    return [node for node in graph.nodes if node.target is torch.ops.oe_runtime.rows.default]


def sources_of(nodes: Iterable[Any]) -> set[Any]:
    """Return nodes of a graph with all nodes that they are computed from."""
    found: set[Any] = set()
    more = list(nodes)
    while more:
        node = more.pop()
        if node not in found:
            found.add(node)
            more += node.all_input_nodes
    return found


def _check(model: Any, layers: Mapping[str, TableLayer]) -> None:
    if not layers:
        raise ValueError("the model has no table: give it to distributed_model first")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"'{name}' is on {tensor.device}: move the model to the CPU before export")
    for name, module in model.named_modules():
        if isinstance(module, Collection):
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) cannot be exported yet: only Embedding and "
                "EmbeddingBag can"
            )
    for name, layer in layers.items():
        if layer.table is None or layer.is_table_private:
            raise ValueError(
                f"layer '{name}' has no table on servers: give its model to distributed_model, and its "
                "optimizer to distributed_optimizer, before export"
            )
    if len({id(layer.bound().client) for layer in layers.values()}) > 1:
        raise ValueError("the model's layers have tables of several clients; export takes those of one")


def _named_inputs(model: Any, example_inputs: Any) -> dict[str, Any]:
    """Return example inputs by the names of forward's arguments, at least two examples of each.

    torch.export takes a size of 1 for a fixed one.
    """
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (Mapping, Sequence)):
        raise ValueError(
            f"example_inputs is {type(example_inputs).__name__}: give the tensors of a call, by the names of "
            "forward's arguments or in their order"
        )
    names: Mapping[str, Any] = example_inputs if isinstance(example_inputs, Mapping) else {}
    places = () if isinstance(example_inputs, Mapping) else example_inputs
    try:
        call = inspect.signature(model.forward).bind(*places, **names)
    except TypeError as error:
        raise ValueError(f"example_inputs do not fit {type(model).__name__}.forward: {error}") from None
    found = dict(names or call.arguments)
    if not found:
        raise ValueError("example_inputs has no tensor")
    examples: tuple[str, int] | None = None
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"input '{name}' is {type(value).__name__}: export takes tensors; wrap the model in a module "
                "whose forward takes each tensor as an argument"
            )
        if value.dtype == torch.bfloat16:
            raise ValueError(f"input '{name}' is bfloat16, which requests cannot have: give it as float32")
        if not value.dim() or not len(value):
            raise ValueError(
                f"input '{name}' of shape {tuple(value.shape)} has no example; its rows are those"
            )
        if examples is not None and examples[1] != len(value):
            raise ValueError(
                f"input '{name}' has {len(value)} rows, but '{examples[0]}' has {examples[1]}: each input "
                "of a served model has one row per example"
            )
        examples = name, len(value)
        found[name] = value.detach() if len(value) > 1 else torch.cat([value.detach()] * 2)
    return found


def _program(model: Any, layers: Mapping[str, TableLayer], inputs: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the program of torch.export for any number of examples, and the names of its outputs."""
    names: list[str] = []

    class Served(nn.Module):  # type: ignore[misc]
        """The model with its outputs in a tuple."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
            outputs = self.module(**inputs)
            values = _outputs(outputs)
            numbered = (f"output_{i}" for i in range(len(values)))
            names[:] = outputs if isinstance(outputs, Mapping) else numbered
            for name, value in zip(names, values, strict=True):
                if not isinstance(value, torch.Tensor):
                    raise ValueError(f"output '{name}' is {type(value).__name__}; export takes tensors")
                if not value.dim():
                    raise ValueError(f"output '{name}' is one number; a served model has one row per example")
            return values

    shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    with _served_layers(model, layers) as served, torch.no_grad():
        try:
            program = torch.export.export(Served(served), (inputs,), dynamic_shapes=(shapes,))
        except ValueError:
            raise
        except Exception as error:  # of many kinds
            said = " ".join(str(error).split())[:500] or type(error).__name__
            raise ValueError(f"torch.export cannot export {type(model).__name__}: {said}") from error
    lookups = lookups_of(program.graph)
    asked = sources_of(node.args[0] for node in lookups)
    if twice := [node for node in lookups if node in asked]:
        raise ValueError(
            f"ids are computed from rows of table '{twice[0].args[1]}': a served model looks up "
            "all rows before it computes"
        )
    return program, names


def _check_examples(program: Any, model: Any, inputs: dict[str, Any], names: list[str]) -> None:
    """Raise ValueError for a model whose answer for an example depends on others or on earlier calls.

    torch.export takes it that there are at least two examples, and follows the way that `inputs` went.
    """
    given = set(program.graph_signature.user_inputs)
    sizes = [node.meta["val"].shape[0] for node in program.graph.nodes if node.name in given]
    for size in sizes:
        bounds = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
        if bounds is not None and (bounds.lower > 2 or bounds.upper < 1 << 31):
            raise ValueError(
                f"forward goes another way for other numbers of examples than from {bounds.lower} to "
                f"{bounds.upper}: a served model gets any number"
            )
    with _evaluating(model), torch.no_grad():
        whole, one = model(**inputs), model(**{name: value[:1] for name, value in inputs.items()})
    examples = len(next(iter(inputs.values())))
    for name, many, single in zip(names, _outputs(whole), _outputs(one), strict=True):
        if many.shape[0] != examples or single.shape != (1, *many.shape[1:]):
            raise ValueError(
                f"output '{name}' has shape {tuple(many.shape)} for {examples} examples, and "
                f"{tuple(single.shape)} for one: a served model has one row per example"
            )
        if not torch.allclose(many[:1].double(), single.double(), rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"output '{name}' of an example depends on the others of its batch, or on chance: a served "
                "model gets any"
            )


def _outputs(outputs: Any) -> tuple[Any, ...]:
    """Return what forward returns, as a tuple of tensors."""
    if isinstance(outputs, Mapping):
        return tuple(outputs.values())
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextlib.contextmanager
def _served_layers(model: Any, layers: Mapping[str, TableLayer]) -> Iterator[Any]:
    """Put the operator in place of a model's layers, and let it evaluate, for the block."""
    by_layer = {id(layer): _ServedLayer(layer) for layer in layers.values()}
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if id(child) in by_layer
    ]
    with _evaluating(model):
        try:
            for parent, name, child in places:
                parent._modules[name] = by_layer[id(child)]
            yield by_layer.get(id(model), model).eval()
        finally:
            for parent, name, child in places:
                parent._modules[name] = child


class _ServedLayer(nn.Module):  # type: ignore[misc]
    """A layer in a program: the operator, and the pooling of a bag."""

    def __init__(self, layer: TableLayer) -> None:
        super().__init__()
        self._layer = [layer]  # in a list: no module of this one
        spec = layer.bound().spec
        self._table = (spec.name, spec.dim, spec.dtype == "float64")
        row = None if layer.padding_idx is None else layer.padding_row().to(layer.dtype).clone()
        self.register_buffer("_padding", row, persistent=False)

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Return what the layer does."""
        (layer,) = self._layer
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{layer}: ids must be int64 or int32, not {ids.dtype}")
        rows = torch.ops.oe_runtime.rows.default(ids.to(torch.int64), *self._table, -1).to(layer.dtype)
        there = None if self._padding is None else (ids != layer.padding_idx).unsqueeze(-1)
        if not isinstance(layer, EmbeddingBag):
            return rows if there is None else torch.where(there, rows, self._padding)
        if offsets is not None or ids.dim() != 2:
            raise ValueError(
                f"{layer}: bags with offsets cannot be exported; give ids of shape (examples, ids), with "
                "padding_idx in shorter bags"
            )
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(-1)
        if layer.mode == "max":
            if there is None:
                return rows.amax(1)
            found = torch.where(there, rows, -torch.inf).amax(1)
            return torch.where(there.any(1), found, 0)
        counts = ids.shape[1] if there is None else there.sum(1).clamp(min=1)
        total = (rows if there is None else torch.where(there, rows, 0)).sum(1)
        return total / counts if layer.mode == "mean" else total


def _tensor(name: str, value: Any) -> Tensor:
    """Return the description of an input or output, with None for sizes that depend on the batch."""
    sizes = [size if isinstance(size, int) else None for size in value.shape[1:]]
    return Tensor(name, str(value.dtype).removeprefix("torch."), [None, *sizes])
