"""Whether a layer that we replace does what ours does: what subclasses change, of Keras 3 and tf-keras."""

from __future__ import annotations

import inspect
from typing import Any

# What a subclass may say anew without changing what the layer computes.
_HARMLESS = {"get_config", "from_config"}


def check_class(layer: Any, stock: type) -> None:
    """Raises ValueError naming what the class of `layer`, a `stock` Embedding, changes of it."""
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


def _overridden(kind: type, stock: type) -> list[str]:
    """The attributes of `stock` that are other ones in `kind`, by name."""
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
    """The variable of the rows, once it is built: Keras 3 and tf-keras name it otherwise."""
    return vars(layer).get("_embeddings", vars(layer).get("embeddings"))
