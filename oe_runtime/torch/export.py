"""A trained PyTorch model as a program of torch.export and its tables, for `oe_runtime.serve`."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from oe_runtime.model_description import FILE, LENGTHS, PROGRAM, ROWS, Description, Lookup, Tensor
from oe_runtime.support.directories import published
from oe_runtime.torch import jagged
from oe_runtime.torch.collections import Collection, EmbeddingBagCollection, package_of
from oe_runtime.torch.embedding import EmbeddingBag, TableLayer
from oe_runtime.torch.model import table_layers


def export(model: Any, path: str | os.PathLike[str], example_inputs: Any, *, overwrite: bool = False) -> Path:
    """Write a model of `distributed_model` for `python -m oe_runtime.serve`; return `path`, a directory.

    It has the program of `torch.export` (`model.pt2`), its tables' rows as their servers have them now, and a
    description. `example_inputs` are the arguments of a call of `model`, one example per row: a mapping by
    the names of forward's arguments, a sequence in their order, or one argument. Those names are the inputs
    of requests, each with any number of examples; outputs have the names of a mapping that forward returns,
    or `output_0`, `output_1`…. The program computes as `model.eval()` does.

    An argument is a tensor, a KeyedJaggedTensor or a JaggedTensor (this package's or TorchRec's). Each
    feature of a KeyedJaggedTensor is an input, `NAME.weights` another if there are weights. Requests have a
    list of any length for each of its examples, or one id where the model takes nothing else, as it does
    with `features["item"].values()`.

    With several workers, one of them calls it, between steps. Raises ValueError for what cannot be exported,
    naming it, and FileExistsError; `overwrite` replaces an earlier export.
    """
    if torch.__version__ < "2.9":  # which writes files of another form
        raise ValueError(f"export needs PyTorch 2.9 or later, but {torch.__version__} is installed")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    layers = table_layers(model)
    _check(model, layers)
    arguments = _named_arguments(model, example_inputs)
    _find_single(model, arguments)
    inputs = _inputs(arguments)
    program, names = _program(model, layers, arguments, inputs)
    _check_examples(program, model, arguments, inputs, names)
    tables = {layer.bound().spec.name: layer.bound() for layer in layers.values()}
    with published(Path(path), overwrite=overwrite, ours=PROGRAM) as place:
        program.example_inputs = None  # they may be of real users
        torch.export.save(program, place / PROGRAM)
        for table in list(tables.values())[:1]:  # all are of one client
            (place / ROWS).mkdir()
            table.client.save(place / ROWS)
        outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
        Description(
            inputs=[_input(name, one) for name, one in inputs.items() if not one.is_lengths],
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
    for name, layer in layers.items():
        if layer.table is None or layer.is_table_private:
            raise ValueError(
                f"layer '{name}' has no table on servers: give its model to distributed_model, and its "
                "optimizer to distributed_optimizer, before export"
            )
    if len({id(layer.bound().client) for layer in layers.values()}) > 1:
        raise ValueError("the model's layers have tables of several clients; export takes those of one")


@dataclass
class _Input:
    """An input of the program: what an example has in a row, or the elements of all examples' lists."""

    tensor: Any
    lengths: str = ""  # the input that has the lengths of the lists, if an example has one
    is_lengths: bool = False

    def take_first(self, inputs: _Inputs) -> Any:
        """Return what the first example has."""
        return self.tensor[: int(inputs[self.lengths].tensor[0]) if self.lengths else 1]

    def to_trace(self) -> Any:
        """Return it with two elements or more, since torch.export takes a size of 0 or 1 for a fixed one."""
        value = self.tensor
        if self.lengths and len(value) < 2:
            return torch.cat([value, value.new_zeros(2)])  # no operator compares it with the lengths
        return value


def _named_arguments(model: Any, example_inputs: Any) -> dict[str, _Argument]:
    """Return the example inputs by the names of forward's arguments."""
    if isinstance(example_inputs, torch.Tensor) or _is_jagged(example_inputs):
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
    return {name: _Argument.read(name, value) for name, value in found.items()}


def _is_jagged(value: Any) -> bool:
    return type(value).__name__ in ("JaggedTensor", "KeyedJaggedTensor")


@dataclass
class _Argument:
    """An argument of forward."""

    value: Any
    features: dict[str, Any] | None = (
        None  # the JaggedTensors of one with lists, by the names of their inputs
    )
    single: frozenset[str] = frozenset()  # of those, what has one id per example, and no lengths

    @classmethod
    def read(cls, name: str, value: Any) -> _Argument:
        """Raise ValueError for what requests cannot have."""
        if isinstance(value, torch.Tensor):
            if not value.dim() or not len(value):
                raise ValueError(
                    f"input '{name}' of shape {tuple(value.shape)} has no example; its rows are those"
                )
            return cls(value)
        if not _is_jagged(value):
            raise ValueError(
                f"input '{name}' is {type(value).__name__}: export takes tensors and KeyedJaggedTensors; "
                "wrap the model in a module whose forward takes each tensor as an argument"
            )
        if type(value).__name__ == "JaggedTensor":
            return cls(value, {name: value})
        if value.inverse_indices_or_none() is not None or len(set(value.stride_per_key())) > 1:
            raise ValueError(f"input '{name}' has inverse_indices: a served model has a list per example")
        if not value.stride():
            raise ValueError(f"input '{name}' has no example")
        return cls(value, value.to_dict())

    def make(self, name: str, tensors: Mapping[str, Any], package: Any) -> Any:
        """Return it from the program's inputs, of the classes of `package`, by default its own."""
        if self.features is None:
            return tensors[name]
        package = package or package_of(self.value)
        parts = {
            feature: package.JaggedTensor(
                tensors[feature],
                None if one.weights_or_none() is None else tensors[f"{feature}.weights"],
                lengths=(
                    torch.ones(tensors[feature].shape[0], dtype=torch.int64)
                    if feature in self.single
                    else tensors[feature + LENGTHS]
                ),
            )
            for feature, one in self.features.items()
        }
        is_keyed = type(self.value).__name__ == "KeyedJaggedTensor"
        return package.KeyedJaggedTensor.from_jt_dict(parts) if is_keyed else parts[name]


def _inputs(arguments: _Arguments) -> dict[str, _Input]:
    """Return the program's inputs, at least two examples of each.

    torch.export takes a size of 1 for a fixed one.
    """
    found: dict[str, _Input] = {}
    examples: tuple[str, int] | None = None

    def add(name: str, value: Any, **more: Any) -> None:
        if name in found:
            raise ValueError(f"two inputs have the name '{name}': rename the argument or the feature")
        if value.dtype == torch.bfloat16:
            raise ValueError(f"input '{name}' is bfloat16, which requests cannot have: give it as float32")
        found[name] = _Input(value.detach(), **more)

    for name, argument in arguments.items():
        for feature, one in (argument.features or {name: None}).items():
            size = len(argument.value if one is None else one.lengths())
            repeats = 2 if size == 1 else 1
            if one is None:
                add(name, torch.cat([argument.value] * repeats))
            else:
                lengths = "" if feature in argument.single else feature + LENGTHS
                add(feature, torch.cat([one.values()] * repeats), lengths=lengths)
                if lengths:
                    add(lengths, torch.cat([one.lengths().to(torch.int64)] * repeats), is_lengths=True)
                if one.weights_or_none() is not None:
                    add(f"{feature}.weights", torch.cat([one.weights()] * repeats), lengths=lengths)
            if examples is not None and examples[1] != size:
                raise ValueError(
                    f"input '{feature}' has {size} rows, but '{examples[0]}' has {examples[1]}: each input "
                    "of a served model has one row per example"
                )
            examples = feature, size
    return found


def _find_single(model: Any, arguments: _Arguments) -> None:
    """Note the features of which `model` takes one id per example, and nothing else.

    Those have lists of one id in all example inputs, and the model fails, or has outputs of another number
    of examples, when the first list has two.
    """
    inputs = _inputs(arguments)
    ones = {
        (name, feature)
        for name, argument in arguments.items()
        for feature, one in (argument.features or {}).items()
        if bool((one.lengths() == 1).all())
    }

    def takes_lists(features: set[tuple[str, str]]) -> bool:
        tensors = {}
        for name, one in inputs.items():
            counts = inputs[one.lengths].tensor if one.lengths else None
            tensors[name] = one.tensor[: 2 if counts is None else int(counts[:2].sum())]
        for _, feature in features:
            tensors[feature + LENGTHS] = torch.tensor([2, 1])
            for part in (feature, f"{feature}.weights"):
                if part in tensors:
                    tensors[part] = torch.cat([tensors[part][:1], tensors[part]])
        try:
            with _evaluating(model), torch.no_grad():
                return all(one.shape[:1] == (2,) for one in _outputs(model(**_call(arguments, tensors))))
        except Exception:  # of many kinds; one of other causes comes again
            return False

    if not ones or takes_lists(ones):
        return
    single = {one for one in ones if not takes_lists({one})}
    for name, argument in arguments.items():
        argument.single = frozenset(feature for owner, feature in single if owner == name)


_Arguments: TypeAlias = Mapping[str, _Argument]  # by the names of forward's arguments
_Inputs: TypeAlias = Mapping[str, _Input]  # of the program, by name


def _call(arguments: _Arguments, tensors: Mapping[str, Any], package: Any = None) -> dict[str, Any]:
    """Return the arguments of forward from the program's inputs."""
    return {name: one.make(name, tensors, package) for name, one in arguments.items()}


def _program(
    model: Any,
    layers: Mapping[str, TableLayer],
    arguments: _Arguments,
    inputs: _Inputs,
) -> tuple[Any, list[str]]:
    """Return the program of torch.export for any number of examples, and the names of its outputs."""
    names: list[str] = []

    class Served(nn.Module):  # type: ignore[misc]
        """The model with its outputs in a tuple."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
            outputs = self.module(**_call(arguments, inputs, jagged))
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
    tensors = {name: one.to_trace() for name, one in inputs.items()}
    package = next((package_of(one.value) for one in arguments.values() if one.features), jagged)
    with _served_layers(model, layers, package) as served, torch.no_grad():
        try:
            program = torch.export.export(Served(served), (tensors,), dynamic_shapes=(shapes,))
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


def _check_examples(
    program: Any,
    model: Any,
    arguments: _Arguments,
    inputs: _Inputs,
    names: list[str],
) -> None:
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
        whole = model(**_call(arguments, {name: one.tensor for name, one in inputs.items()}))
        one = model(**_call(arguments, {name: one.take_first(inputs) for name, one in inputs.items()}))
    examples = next(len(one.tensor) for one in inputs.values() if not one.lengths)
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
def _served_layers(model: Any, layers: Mapping[str, TableLayer], package: Any) -> Iterator[Any]:
    """Put the operator in place of a model's layers, and let it evaluate, for the block."""
    by_layer: dict[int, Any] = {id(layer): _ServedLayer(layer) for layer in layers.values()}
    by_layer |= {
        id(one): _ServedCollection(one, package) for one in model.modules() if isinstance(one, Collection)
    }
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


class _InPlace(nn.Module):  # type: ignore[misc]
    """What stands for a layer or a collection in a program, with that one's other attributes."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self._original = [original]  # in a list: no module of this one

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "weight":  # rows are no part of a program
                raise
            return getattr(self._original[0], name)


class _ServedLayer(_InPlace):
    """A layer in a program: the operator, and the pooling of a bag."""

    def __init__(self, layer: TableLayer) -> None:
        super().__init__(layer)
        spec = layer.bound().spec
        self._table = (spec.name, spec.dim, spec.dtype == "float64")
        row = None if layer.padding_idx is None else layer.padding_row().to(layer.dtype).clone()
        self.register_buffer("_padding", row, persistent=False)

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Return what the layer does."""
        (layer,) = self._original
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{layer}: ids must be int64 or int32, not {ids.dtype}")
        rows = torch.ops.oe_runtime.rows.default(ids.to(torch.int64), *self._table, -1).to(layer.dtype)
        there = None if self._padding is None else (ids != layer.padding_idx).unsqueeze(-1)
        if not isinstance(layer, EmbeddingBag):
            return rows if there is None else torch.where(there, rows, self._padding)
        if ids.dim() == 1 and offsets is not None:
            begins = offsets[:-1] if layer.include_last_offset else offsets
            counted = None if self._padding is None else ids != layer.padding_idx
            return torch.ops.oe_runtime.bags.default(rows, begins, per_sample_weights, counted, layer.mode)
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


class _ServedCollection(_InPlace):
    """A collection in a program: the operator for each feature of each table, and the pooling of its bags."""

    def __init__(self, collection: Collection, package: Any) -> None:
        super().__init__(collection)
        self._package = package

    def forward(self, features: Any) -> Any:
        """Return what the collection does."""
        (collection,) = self._original
        found = {}
        for layer, name, feature in collection.lookups(features.keys()):
            part = features[feature]
            ids, spec = part.values(), layer.bound().spec
            table = (spec.name, spec.dim, spec.dtype == "float64")
            rows = torch.ops.oe_runtime.rows.default(ids.to(torch.int64), *table, -1)
            if isinstance(collection, EmbeddingBagCollection):
                weights = part.weights() if collection.is_weighted() else None
                begins = torch.cumsum(part.lengths(), 0) - part.lengths()
                found[name] = torch.ops.oe_runtime.bags.default(rows, begins, weights, None, layer.mode)
            else:
                indices = ids if collection.need_indices() else None
                found[name] = jagged.JaggedTensor(rows, indices, lengths=part.lengths())
        if isinstance(collection, EmbeddingBagCollection):
            dims = [value.shape[1] for value in found.values()]
            return self._package.KeyedTensor(list(found), dims, torch.cat(list(found.values()), 1))
        return found


def _input(name: str, value: _Input) -> Tensor:
    """Return the description of an input, which for lists has None for their length."""
    if value.lengths:
        return Tensor(name, str(value.tensor.dtype).removeprefix("torch."), [None, None], value.lengths)
    return _tensor(name, value.tensor)


def _tensor(name: str, value: Any) -> Tensor:
    """Return the description of an input or output, with None for sizes that depend on the batch."""
    sizes = [size if isinstance(size, int) else None for size in value.shape[1:]]
    return Tensor(name, str(value.dtype).removeprefix("torch."), [None, *sizes])
