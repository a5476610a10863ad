"""Copies of functional models of tf-keras in which some layers are other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tf_keras


def clone(model: Any, replace: Callable[[Any], Any]) -> tuple[Any, Any]:
    """As `oe_runtime.keras.clone.clone`, for tf-keras: symbolic (inputs, outputs) of a copy of the graph."""
    copies: list[tuple[Any, Any]] = []

    def copy(layer: Any) -> Any:
        replacement = replace(layer)
        if replacement is not None:
            return replacement
        if isinstance(layer, tf_keras.Model) and getattr(layer, "inputs", None):
            return tf_keras.models.clone_model(layer, clone_function=copy)
        try:
            new = type(layer).from_config(layer.get_config())
        except Exception as error:
            raise ValueError(
                f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied, because it cannot be made "
                f"from its get_config(): {error}"
            ) from error
        copies.append((layer, new))
        return new

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    sequential = isinstance(model, tf_keras.Sequential)
    ends = (model.inputs, model.outputs) if sequential else (model.input, model.output)
    cloned = tf_keras.models.clone_model(tf_keras.Model(*ends, name=model.name), clone_function=copy)
    for layer, new in copies:
        if len(layer.variables) != len(new.variables):
            raise ValueError(
                f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied: it has "
                f"{len(layer.variables)} variables, but a layer made from its get_config() has "
                f"{len(new.variables)}"
            )
        for old_variable, new_variable in zip(layer.variables, new.variables, strict=True):
            new_variable.assign(old_variable)
    return cloned.input, cloned.output
