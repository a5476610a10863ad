"""Ordinary PyTorch modules made into modules with embeddings on the servers."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from oe_runtime.checkpoint.saved import Saved
from oe_runtime.client import Client
from oe_runtime.model_tables import is_large
from oe_runtime.spec import TableSpec
from oe_runtime.support import job_hooks
from oe_runtime.torch import collections, in_backward, operators
from oe_runtime.torch.embedding import Embedding, EmbeddingBag, TableLayer
from oe_runtime.torch.forward_pull import pull_in_forward

_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, modules, hooks
_DEEPEST = 4  # lists in lists that may hold weights


def distributed_model(
    model: Any,
    client: Client | None = None,
    *,
    sparse_as_dense_size: int = 64,
    seed: int = 0,
    name_prefix: str = "",
    in_worker: Sequence[str] = (),
    fresh: bool | None = None,
    state_dtype: str | None = None,
    exchange_dtype: str | None = None,
) -> Any:
    """Replace the large embeddings of `model` by tables on parameter servers, in place; return `model`.

    Replaces every `nn.Embedding` and `nn.EmbeddingBag` with num_embeddings ≥ `sparse_as_dense_size` by this
    package's layer, and every collection of TorchRec with such a table by this package's. Connects this
    package's layers to `client`, by default the job's, or to tables in this process. A table has the name
    `name_prefix` + the layer's path in the model. Its rows start with the weights of the replaced layer,
    trained or not, which `distributed_optimizer` sends to the servers; with several processes of
    torch.distributed, those of the first. Make the optimizer after this. Rows of this package's layers start
    from their `initializer`, a function of `seed`, the table's name and the row. `state_dtype="bfloat16"`
    halves the optimizer's state of rows, `exchange_dtype="bfloat16"` the gradients of rows on their way to
    servers, unless a layer says otherwise.

    Layers at the paths `in_worker` stay unchanged, with everything inside them. A warning names subclasses of
    the two layers, and other large weights, which also stay in this process.

    Where the servers already have rows of these tables, the optimizer keeps them with a warning. `fresh=True`
    drops them first, with their checkpoints in the servers' storage; it raises SpecError while clients other
    than these workers use them. `fresh=False` keeps them without the warning.

    Raises ValueError naming the layer for what tables do not support (max_norm, scale_grad_by_freq, weights
    shared with another layer, layers inside DistributedDataParallel); the model is unchanged then.
    """
    _refuse_ddp(model)
    kept = _kept_layers(model, in_worker)
    replaced: dict[int, Any] = {}
    for name, layer in model.named_modules():
        if id(layer) in kept:
            continue
        if isinstance(layer, TableLayer):
            _refuse_tied(model, name, layer)
        if (collection := collections.replacement(layer, sparse_as_dense_size)) is not None:
            replaced[id(layer)] = collection
            kept |= {id(inner) for inner in layer.modules()}
        elif type(layer) in (nn.Embedding, nn.EmbeddingBag) and layer.num_embeddings >= sparse_as_dense_size:
            _refuse_shared(model, name, layer)
            replaced[id(layer)] = _replacement(name, layer)
    _replace_weights(model, replaced)
    model = replaced.get(id(model), model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in replaced:  # a layer that is used twice stays one
                setattr(parent, name, replaced[id(child)])
    _warn_of_large_weights(model, sparse_as_dense_size, kept)
    client = client or job_hooks.client() or Client.in_process()
    for name, layer in table_layers(model).items():
        layer.client = client
        layer.default_name = name_prefix + (name or "embedding")
        layer.seed = seed
        layer.fresh = fresh
        layer.state_dtype = layer.state_dtype or state_dtype
        layer.exchange_dtype = layer.exchange_dtype or exchange_dtype
        layer.anchor.belong_to(layer, f"layer '{layer.default_name}'")
    _leave_out_of_ddp(model)
    pull_in_forward(model)
    operators.register(model)
    return model


def _refuse_ddp(model: Any) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.parallel.DistributedDataParallel) and _has_embeddings(layer):
            raise ValueError(
                f"{f'layer {name!r}' if name else 'the model'} is in DistributedDataParallel already, which "
                "would keep the embeddings: call distributed_model first, and wrap what it returns"
            )


def _replace_weights(model: Any, replaced: Mapping[int, Any]) -> None:
    """Put the rows of tables where modules hold the weights of layers that are `replaced`, by their ids.

    DeepCTR-Torch's models hold them in lists, for L2.
    """
    weights = {
        id(layer.weight): replaced[id(layer)].weight
        for layer in model.modules()
        if id(layer) in replaced and isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    }

    def replace(value: Any, depth: int = 0) -> Any:
        if isinstance(value, nn.Parameter):
            return weights.get(id(value), value)
        if depth < _DEEPEST and type(value) in (list, tuple):
            found = [replace(one, depth + 1) for one in value]
            if any(one is not before for one, before in zip(found, value, strict=True)):
                if isinstance(value, tuple):
                    return tuple(found)
                value[:] = found
        elif depth < _DEEPEST and type(value) is dict:
            for key, one in value.items():
                value[key] = replace(one, depth + 1)
        return value

    for module in model.modules() if weights else ():
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        vars(module).update({name: replace(value) for name, value in own.items()})


def _leave_out_of_ddp(model: Any) -> None:
    """Keep the parameters of rows out of a DistributedDataParallel of `model`: the servers sum gradients.

    One of a module around it takes them as parameters that are empty, which costs little.
    """
    names = {f"{name}.anchor" for name, layer in model.named_modules() if isinstance(layer, TableLayer)}
    names |= {name.removeprefix(".") for name in names}
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*before, *sorted(names - set(before))]
    )


def _has_embeddings(model: Any) -> bool:
    return any(isinstance(one, (nn.Embedding, nn.EmbeddingBag, TableLayer)) for one in model.modules())


def _kept_layers(model: Any, names: Sequence[str]) -> set[int]:
    """Return the ids of the layers at these paths, and of all layers inside them."""
    if isinstance(names, str):
        raise ValueError(f"in_worker is a list of layers' paths: in_worker=[{names!r}]")
    layers = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in layers:
            known = ", ".join(path for path in layers if path)
            raise ValueError(f"in_worker: the model has no layer '{name}'; it has {known}")
    return {id(inner) for name in names for inner in layers[name].modules()}


def _warn_of_large_weights(model: Any, size: int, kept: set[int]) -> None:
    """Warn of weights of a size that belongs on servers in layers that are neither replaced nor `kept`."""
    for name, layer in model.named_modules():
        if id(layer) in kept:
            continue
        embedding = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        shapes = [
            f"{weight} {tuple(values.shape)}"
            for weight, values in layer.named_parameters(recurse=False)
            if (embedding and layer.num_embeddings >= size)
            or (not embedding and is_large(values.shape, values.element_size()))
        ]
        if shapes:
            kind = type(layer).__name__
            why = (
                "because a subclass may look rows up otherwise"
                if embedding
                else "because only nn.Embedding and nn.EmbeddingBag become tables"
            )
            warnings.warn(
                f"layer '{name}' ({kind}): {', '.join(shapes)} stays in this process's memory, {why}",
                stacklevel=3,
            )


def table_layers(model: Any) -> dict[str, TableLayer]:
    """Return this package's layers by their path in `model`, once each."""
    return {
        name.removeprefix("module."): layer  # of DistributedDataParallel
        for name, layer in model.named_modules()
        if isinstance(layer, TableLayer)
    }


def _replacement(name: str, layer: Any) -> TableLayer:
    if layer.max_norm is not None:
        raise ValueError(
            f"layer '{name}': max_norm is not supported for rows on parameter servers: it scales rows where "
            "they are looked up, and pulls never change rows; use weight_decay"
        )
    if layer.scale_grad_by_freq:
        raise ValueError(f"layer '{name}': scale_grad_by_freq is not supported for rows on parameter servers")
    shared = {"padding_idx": layer.padding_idx, "dtype": layer.weight.dtype}
    new: TableLayer
    if type(layer) is nn.Embedding:
        new = Embedding(layer.num_embeddings, layer.embedding_dim, **shared)
    else:
        new = EmbeddingBag(
            layer.num_embeddings,
            layer.embedding_dim,
            mode=layer.mode,
            include_last_offset=layer.include_last_offset,
            **shared,
        )
    in_backward.take(new, layer.weight)
    new.frozen = not layer.weight.requires_grad
    new.first_rows = layer.weight.detach()
    new.to(layer.weight.device).train(layer.training)
    return new


def _refuse_shared(model: Any, name: str, layer: Any) -> None:
    """Raise ValueError for weights in the same memory as another layer's, which rows cannot be."""
    begin = layer.weight.data_ptr()
    end = begin + layer.weight.nbytes
    for path, values in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if is_lazy(values):  # it has no memory yet
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        overlaps = values.data_ptr() < end and begin < values.data_ptr() + values.nbytes
        if owner is not layer and (values is layer.weight or overlaps):
            raise ValueError(
                f"layer '{name}': its weights are also '{path}', but rows on parameter servers are not "
                "shared with other layers: untie them, or keep the layer in this process by "
                f"distributed_model(…, in_worker=['{name}'])"
            )


def _refuse_tied(model: Any, name: str, layer: TableLayer) -> None:
    """Raise ValueError if the layer's `weight` was set to a parameter that another layer has, to tie them."""
    for path, parameter in model.named_parameters():
        if layer.is_assigned(parameter):
            raise ValueError(
                f"layer '{name}': its weight was set to '{path}', but rows on parameter servers are not "
                "shared with other layers: set it to a copy, or use nn.Embedding and in_worker"
            )


def saved_tables(path: str | os.PathLike[str]) -> dict[str, TableSpec]:
    """Return the tables in a checkpoint or a directory of `Client.save`, for ``Embedding(spec=…)``.

    Raises CheckpointError.
    """
    saved = Saved.open(Path(path)).require()
    return {name: TableSpec.from_json(files[0]["spec"]) for name, files in saved.files.items()}
