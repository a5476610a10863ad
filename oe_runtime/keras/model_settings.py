"""What a Keras model's layers, loss and optimizer are told, to compare the models of a job's workers.

Shapes are compared elsewhere. Workers may have seeds of their own, and functions have no form to compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

# Of a layer's config: own to a worker, or known by its shapes.
_IGNORED = frozenset(
    {"name", "seed", "batch_shape", "batch_input_shape", "batch_size", "module", "registered_name"}
    | {"build_config", "shared_object_id", "code"}
)
_LONG = 60  # characters of a value in a message


def keras_settings(model: Any) -> dict[str, Any]:
    """Return the settings by name, as JSON has them; those without such a form are left out."""
    found: dict[str, Any] = {}
    tables = {id(layer) for layer in model.served.layers.values()}
    for number, layer in enumerate(model._flatten_layers(include_self=False, recursive=True)):
        name = f"layer {number} ({type(layer).__name__})"
        found[f"{name} trainable"] = bool(layer.trainable)
        inner = list(layer._flatten_layers(include_self=False))
        if id(layer) not in tables and not inner:  # servers compare those of tables
            found |= _config(name, layer)
    found |= dict(_values("the loss", _plain(model.loss)))
    found |= {"the optimizer": type(model.optimizer).__name__, **_config("the optimizer's", model.optimizer)}
    return found


def _config(name: str, of: Any) -> dict[str, Any]:
    with suppress(Exception):  # a class of the program's, which may not have a config
        return dict(_values(name, of.get_config()))
    return {}


def _plain(loss: Any) -> Any:
    """Return a loss as its name, or with the config of its class."""
    if isinstance(loss, Mapping):
        return {str(key): _plain(value) for key, value in loss.items()}
    if isinstance(loss, (list, tuple)):
        return {str(number): _plain(value) for number, value in enumerate(loss)}
    if hasattr(loss, "get_config"):
        with suppress(Exception):
            return {"": type(loss).__name__, **loss.get_config()}
    return getattr(loss, "__name__", loss)


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the single values of a config with their paths."""
    if isinstance(value, Mapping):
        if value.get("class_name") in ("__lambda__", "function"):
            return
        for key, inner in value.items():
            if key not in _IGNORED:
                yield from _values(f"{name} {key}".rstrip(), inner)
        return
    with suppress(TypeError, ValueError):
        text = json.dumps(value)
        yield name, value if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest()[:12]
