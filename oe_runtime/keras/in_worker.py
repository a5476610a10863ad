"""Weights that stay in the worker's memory when a model of Keras 3 or tf-keras is converted."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from oe_runtime.keras.table_variable import without_tables
from oe_runtime.model_tables import is_large


def check_names(model: Any, names: Sequence[str]) -> None:
    """Raise ValueError for a name in `in_worker` that no layer of the model has."""
    if isinstance(names, str):
        raise ValueError(f"in_worker is a list of layers' names: in_worker=[{names!r}]")
    known = {layer.name for layer in _layers(model)}
    for name in names:
        if name not in known:
            raise ValueError(f"in_worker: the model has no layer '{name}'; it has {', '.join(sorted(known))}")


def find_kept_layers(model: Any, names: Sequence[str]) -> set[int]:
    """Return the ids of the layers with these names, and of all layers inside them."""
    named = [layer for layer in _layers(model) if layer.name in names]
    return {id(one) for layer in named for one in layer._flatten_layers()}


def warn_of_embeddings(model: Any, library: Any, size: int, names: Sequence[str]) -> None:
    """Warn of embeddings of `library` that were not replaced, except those in `names`."""
    meant = find_kept_layers(model, names)
    for layer in _layers(model):
        if id(layer) in meant:
            continue
        if getattr(layer, "sparse_as_dense", False):
            continue
        if isinstance(layer, library.layers.Embedding) and layer.input_dim >= size:
            warnings.warn(
                f"layer '{layer.name}' ({layer.input_dim} rows) is inside of another layer and stays an "
                "ordinary Keras embedding in the worker's memory",
                stacklevel=4,
            )
        for column, rows in _embedding_columns(layer):
            if rows >= size:
                warnings.warn(
                    f"layer '{layer.name}' ({type(layer).__name__}): its column '{column}' ({rows} rows) "
                    "stays in the worker's memory, because feature columns are not served; look it up with "
                    "Hashing, IntegerLookup or StringLookup and an Embedding",
                    stacklevel=4,
                )


def warn_of_weights(model: Any, library: Any, names: Sequence[str]) -> None:
    """Warn of other layers with weights of a size that belongs on servers, except those in `names`."""
    meant = find_kept_layers(model, names)
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if id(layer) in meant or isinstance(layer, library.layers.Embedding):
            continue
        if any(_embedding_columns(layer)):  # it was named when the model was converted
            continue
        inner = {id(weight) for one in layer._flatten_layers(include_self=False) for weight in one.variables}
        shapes = [
            f"{weight.name} {tuple(weight.shape)}"
            for weight in without_tables(layer.variables)
            if id(weight) not in inner and is_large(weight.shape, _item_bytes(weight.dtype))
        ]
        if shapes:
            warnings.warn(
                f"layer '{layer.name}' ({type(layer).__name__}): {', '.join(shapes)} stays in the worker's "
                "memory, because only Embedding layers become tables; if it is looked up by ids, use an "
                f"Embedding, else in_worker=['{layer.name}'] says that this is meant",
                stacklevel=3,
            )


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=False, recursive=True))


def _embedding_columns(layer: Any) -> Iterator[tuple[str, int]]:
    """Yield name and rows of each embedding column, for DenseFeatures and similar layers."""
    for column in getattr(layer, "_feature_columns", None) or ():
        if hasattr(column, "dimension") and hasattr(column, "categorical_column"):
            yield column.name, int(column.categorical_column.num_buckets)


def _item_bytes(dtype: Any) -> int:
    bits = re.search(r"\d+$", str(getattr(dtype, "name", dtype)))
    return max(1, int(bits.group()) // 8) if bits else 1
