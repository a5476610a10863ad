"""Copies of functional tf-keras models with some layers replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tf_keras

from oe_runtime.keras.clone import check_ties, copy_weights, remake_layer


def clone(model: Any, replace: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Do as `oe_runtime.keras.clone.clone` for tf-keras; return (inputs, outputs) of the copied graph."""
    copies: list[tuple[Any, Any]] = []
    originals: list[Any] = []
    made: dict[int, Any] = {}  # by id of the layer, because inner models may share layers

    def copy(layer: Any) -> Any:
        if id(layer) not in made:
            made[id(layer)] = copy_once(layer)
        return made[id(layer)]

    def copy_once(layer: Any) -> Any:
        replacement = replace(layer)
        if replacement is None and isinstance(layer, tf_keras.Model) and getattr(layer, "inputs", None):
            return tf_keras.models.clone_model(layer, clone_function=copy)
        originals.append(layer)
        if replacement is not None:
            return replacement
        new = remake_layer(layer)
        copies.append((layer, new))
        return new

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    sequential = isinstance(model, tf_keras.Sequential)
    ends = (model.inputs, model.outputs) if sequential else (model.input, model.output)
    cloned = tf_keras.models.clone_model(tf_keras.Model(*ends, name=model.name), clone_function=copy)
    check_ties(originals)
    copy_weights(copies)
    return cloned.input, cloned.output
