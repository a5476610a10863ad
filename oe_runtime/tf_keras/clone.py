"""Copies of functional models of tf-keras in which some layers are other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tf_keras

from oe_runtime.keras.clone import copy_weights, remade


def clone(model: Any, replace: Callable[[Any], Any]) -> tuple[Any, Any]:
    """As `oe_runtime.keras.clone.clone`, for tf-keras: symbolic (inputs, outputs) of a copy of the graph."""
    copies: list[tuple[Any, Any]] = []

    def copy(layer: Any) -> Any:
        replacement = replace(layer)
        if replacement is not None:
            return replacement
        if isinstance(layer, tf_keras.Model) and getattr(layer, "inputs", None):
            return tf_keras.models.clone_model(layer, clone_function=copy)
        new = remade(layer)
        copies.append((layer, new))
        return new

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    sequential = isinstance(model, tf_keras.Sequential)
    ends = (model.inputs, model.outputs) if sequential else (model.input, model.output)
    cloned = tf_keras.models.clone_model(tf_keras.Model(*ends, name=model.name), clone_function=copy)
    copy_weights(copies)
    return cloned.input, cloned.output
