"""Copies of functional models in which some layers are other layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


def clone(model: Any, replace: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A copy of a functional or Sequential model's graph, as the symbolic (inputs, outputs) of the copy.

    `replace(layer)` returns the layer to take in place of `layer`, or None to take a copy of it with the same
    weights. Models inside the model are copied too; layers that are used several times stay shared.

    Raises ValueError when `model` has no graph, or naming a layer that cannot be copied.
    """
    if not isinstance(model, keras.Model) or not getattr(model, "inputs", None):
        raise ValueError(
            "a functional keras.Model (or a Sequential model with an Input) is needed, not "
            f"{type(model).__name__}: the graph of a subclassed model is not known"
        )
    copies: list[tuple[Any, Any]] = []

    def copy(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):
            return _copy_operation(layer)
        replacement = replace(layer)
        if replacement is not None:
            return replacement
        new = remade(layer)
        copies.append((layer, new))
        return new

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    if isinstance(model, keras.Sequential):
        source = keras.Model(model.inputs, model.outputs, name=model.name)
    else:
        source = keras.Model(model.input, model.output, name=model.name)
    cloned = keras.models.clone_model(source, clone_function=copy, recursive=True)
    copy_weights(copies)
    return cloned.input, cloned.output


def remade(layer: Any) -> Any:
    """A layer like another one, of Keras 3 or of tf-keras; ValueError where it cannot be made."""
    try:
        new = type(layer).from_config(layer.get_config())
    except Exception as error:
        raise ValueError(
            f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied, because it cannot be made "
            f"from its get_config(): {error}"
        ) from error
    if hasattr(new, "take_first_rows"):  # ours, whose rows are no variable
        new.take_first_rows(layer)
    return new


def copy_weights(copies: Sequence[tuple[Any, Any]]) -> None:
    """Gives the second layer of each pair, once it is built, the weights of the first."""
    for layer, new in copies:
        if len(layer.variables) != len(new.variables):
            raise ValueError(
                f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied: it has "
                f"{len(layer.variables)} variables, but a layer made from its get_config() has "
                f"{len(new.variables)}"
            )
        for old_variable, new_variable in zip(layer.variables, new.variables, strict=True):
            new_variable.assign(old_variable)


def _copy_operation(operation: Any) -> Any:
    """A copy of an operation such as keras.ops.add.

    It has no weights, but it knows the graphs it is used in: if two models share it, either keeps the
    weights of both in memory. One that cannot be copied is shared nevertheless.
    """
    try:
        return type(operation).from_config(operation.get_config())
    except Exception:
        return operation
