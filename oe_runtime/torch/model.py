"""Ordinary PyTorch modules made into modules with embeddings on the servers."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from oe_runtime.checkpoint.saved import Saved
from oe_runtime.client import Client
from oe_runtime.model_tables import is_large
from oe_runtime.spec import TableSpec
from oe_runtime.torch.embedding import Embedding, EmbeddingBag, _Layer


def distributed_model(
    model: Any,
    client: Client | None = None,
    *,
    sparse_as_dense_size: int = 64,
    seed: int = 0,
    name_prefix: str = "",
    fresh: bool | None = None,
) -> Any:
    """Replace the large embeddings of `model` by tables on parameter servers, in place; return `model`.

    Replaces every `nn.Embedding` and `nn.EmbeddingBag` with num_embeddings ≥ `sparse_as_dense_size` by this
    package's layer. Connects this package's layers to `client`, or to tables in this process. A table has the
    name `name_prefix` + the layer's path in the model. Its rows start with the weights of the replaced layer,
    trained or not, which `distributed_optimizer` sends to the servers; with several processes of
    torch.distributed, those of the first. Make the optimizer after this. Rows of this package's layers start
    from their `initializer`, a function of `seed`, the table's name and the row.

    A warning names subclasses of the two layers, and other layers with weights of a size that belongs on
    servers, which stay in this process.

    Where the servers already have rows of these tables, the optimizer keeps them with a warning. `fresh=True`
    drops them first, with their checkpoints in the servers' storage; it raises SpecError while clients other
    than these workers use them. `fresh=False` keeps them without the warning.

    Raises ValueError naming the layer for what tables do not support (max_norm, scale_grad_by_freq, weights
    shared with another layer); the model is unchanged then.
    """
    replaced: dict[int, Any] = {}
    for name, layer in model.named_modules():
        if type(layer) in (nn.Embedding, nn.EmbeddingBag) and layer.num_embeddings >= sparse_as_dense_size:
            _refuse_shared(model, name, layer)
            replaced[id(layer)] = _replacement(name, layer)
    if id(model) in replaced:
        model = replaced[id(model)]
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in replaced:  # a layer that is used twice stays one
                setattr(parent, name, replaced[id(child)])
    _warn_of_what_stays(model, sparse_as_dense_size)
    client = client if client is not None else Client.in_process()
    for name, layer in _layers(model).items():
        layer.client = client
        layer.default_name = name_prefix + (name or "embedding")
        layer.seed = seed
        layer.fresh = fresh
    return model


def _warn_of_what_stays(model: Any, size: int) -> None:
    """Warn of weights of a size that belongs on servers in layers that are not replaced."""
    for name, layer in model.named_modules():
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


def _layers(model: Any) -> dict[str, _Layer]:
    """Return this package's layers by their path in `model`, once each."""
    return {
        name.removeprefix("module."): layer  # of DistributedDataParallel
        for name, layer in model.named_modules()
        if isinstance(layer, _Layer)
    }


def _replacement(name: str, layer: Any) -> _Layer:
    refused = {"max_norm": layer.max_norm is not None, "scale_grad_by_freq": layer.scale_grad_by_freq}
    for option, there in refused.items():
        if there:
            raise ValueError(f"layer '{name}': {option} is not supported for rows on parameter servers")
    shared = {"padding_idx": layer.padding_idx, "dtype": layer.weight.dtype}
    new: _Layer
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
    new.frozen = not layer.weight.requires_grad
    new.set_rows(layer.weight)
    new.to(layer.weight.device).train(layer.training)
    return new


def _refuse_shared(model: Any, name: str, layer: Any) -> None:
    """Raise ValueError for weights shared with another layer, which rows cannot be."""
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(path.rpartition(".")[0])
        if parameter is layer.weight and owner is not layer:
            raise ValueError(
                f"layer '{name}': its weights are also '{path}', but rows on parameter servers are not "
                "shared with other layers: untie them, or keep the layer in the worker by "
                "sparse_as_dense_size above its num_embeddings"
            )


def saved_tables(path: str | os.PathLike[str]) -> dict[str, TableSpec]:
    """Return the tables in a checkpoint or a directory of `Client.save`, for ``Embedding(spec=…)``.

    Raises CheckpointError.
    """
    saved = Saved.open(Path(path)).require()
    return {name: TableSpec.from_json(files[0]["spec"]) for name, files in saved.files.items()}
