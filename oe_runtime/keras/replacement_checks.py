"""Checks that a replaced layer computes what ours does, and a copied model what its copy does.

They find what subclasses of Keras 3's and tf-keras's classes change.
"""

from __future__ import annotations

import inspect
from typing import Any

# Methods that a subclass may override without changing the computation.
_HARMLESS = {"get_config", "from_config"}


def check_class(layer: Any, stock: type) -> None:
    """Raise ValueError naming what the class of `layer`, a `stock` Embedding, changes."""
    changed = _overridden(type(layer), stock)
    # Attributes of the object come before those of its class.
    changed += [name for name in ("call", "compute_mask") if name in vars(layer)]
    if changed:
        what = f"overrides {', '.join(changed)}"
    else:
        weights = [weight.name for weight in layer.weights if weight is not _matrix(layer)]
        what = f"has more weights than embeddings: {', '.join(weights)}" if weights else ""
    if what:
        kind = type(layer)
        raise ValueError(
            f"layer '{layer.name}': {kind.__module__}.{kind.__qualname__} {what}, which rows on parameter "
            f"servers would lose; use {stock.__name__} itself with layers around it, or leave the layer in "
            f"the worker's memory: distributed_model(…, in_worker=['{layer.name}'])"
        )


# Methods that a copy of a model's graph takes from Keras, not from the model's class.
_OF_GRAPHS = (
    "__call__",
    "add_loss",
    "call",
    "compile",
    "compute_loss",
    "compute_mask",
    "compute_metrics",
    "evaluate",
    "fit",
    "get_metrics_result",
    "losses",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
    "metrics",
    "predict",
    "predict_on_batch",
    "predict_step",
    "test_on_batch",
    "test_step",
    "train_on_batch",
    "train_step",
)


def check_graph(model: Any) -> None:
    """Raise ValueError naming what the class of a model with a graph changes of its library's."""
    kind = type(model)
    stock = next((k for k in kind.__mro__ if k.__module__.startswith(("keras.", "tf_keras."))), kind)
    changed = [
        name
        for name in _OF_GRAPHS
        if name in vars(model)
        or inspect.getattr_static(kind, name, None) is not inspect.getattr_static(stock, name, None)
    ]
    if changed:
        raise ValueError(
            f"model '{model.name}': {kind.__module__}.{kind.__qualname__} overrides {', '.join(changed)}, "
            "which a copy of its graph would lose; make it of keras.Model itself, or a subclassed model: "
            "layers as attributes, and a call that uses them"
        )


def _overridden(kind: type, stock: type) -> list[str]:
    """Return the names of attributes that differ between `stock` and its subclass `kind`."""
    names = {name for base in kind.__mro__ if base not in stock.__mro__ for name in vars(base)}
    return sorted(
        name
        for name in names - _HARMLESS
        if hasattr(stock, name) and _changes(name, inspect.getattr_static(kind, name), stock)
    )


def _changes(name: str, value: Any, stock: type) -> bool:
    if value is inspect.getattr_static(stock, name, None):
        return False
    if name.startswith("__"):
        return name == "__call__"
    # Libraries note things about a class in private attributes.
    return not name.startswith("_") or callable(value) or hasattr(type(value), "__get__")


def _matrix(layer: Any) -> Any:
    """Return the variable of the rows, once built; its name differs in Keras 3 and tf-keras."""
    return vars(layer).get("_embeddings", vars(layer).get("embeddings"))
