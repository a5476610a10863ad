"""Copies of functional models with some layers replaced."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from oe_runtime.keras.embedding import TableLayer


def clone(model: Any, replace: Callable[[Any], Any], library: Any = keras) -> tuple[Any, Any]:
    """Copy a functional or Sequential model's graph; return the symbolic (inputs, outputs) of the copy.

    `library` is the model's, keras or tf_keras. `replace(layer)` returns the replacement of `layer`, or None
    for a copy of it with the same weights. Models inside the model are copied too; layers used several times
    stay shared.

    Raises ValueError when `model` has no graph, or naming a layer that cannot be copied.
    """
    if not isinstance(model, library.Model) or not getattr(model, "inputs", None):
        raise ValueError(
            "a functional keras.Model (or a Sequential model with an Input) is needed, not "
            f"{type(model).__name__}: the graph of a subclassed model is not known"
        )
    copies: list[tuple[Any, Any]] = []
    originals: list[Any] = []
    made: dict[int, Any] = {}  # by id of the layer, because inner models may share layers
    make = library.models.clone_model

    def copy_of(layer: Any) -> Any:
        if not isinstance(layer, library.layers.Layer):
            return _copy_operation(layer)
        if id(layer) not in made:
            made[id(layer)] = copy_once(layer)
        return made[id(layer)]

    def copy_once(layer: Any) -> Any:
        new = replace(layer)
        is_model = isinstance(layer, library.Model) and getattr(layer, "inputs", None)
        if new is None and is_model and library is not keras:  # Keras 3 enters inner models itself
            return make(layer, clone_function=copy_of)
        originals.append(layer)
        if new is None:
            new = remake_layer(layer)
            copies.append((layer, new))
        return new

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    sequential = isinstance(model, library.Sequential)
    ends = (model.inputs, model.outputs) if sequential else (model.input, model.output)
    inner = {"recursive": True} if library is keras else {}
    cloned = make(library.Model(*ends, name=model.name), clone_function=copy_of, **inner)
    check_ties(originals)
    copy_weights(copies)
    return cloned.input, cloned.output


def remake_layer(layer: Any) -> Any:
    """Make a layer like another one, of Keras 3 or tf-keras. Raises ValueError where that fails."""
    # A configuration has a Lambda's bytecode without its global names, and for a subclass of our layer the
    # arguments of our constructor, not the subclass's.
    if not layer.variables and (
        isinstance(layer, TableLayer) or any(map(_is_lambda, layer._flatten_layers()))
    ):
        return _copy_without_weights(layer)
    try:
        return type(layer).from_config(layer.get_config())
    except Exception as error:
        if not layer.variables:
            return _copy_without_weights(layer)
        raise ValueError(
            f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied, because it has weights and "
            f"cannot be made from its get_config(): {error}"
        ) from error


def _is_lambda(layer: Any) -> bool:
    return any(
        kind.__name__ == "Lambda" and kind.__module__.startswith(("keras.", "tf_keras."))
        for kind in type(layer).__mro__
    )


# Attributes that a copy must not share: places in graphs, and the losses of the last call.
_OWN: Mapping[str, Callable[[], Any]] = {
    "_inbound_nodes": list,
    "_outbound_nodes": list,
    "_inbound_nodes_value": list,
    "_outbound_nodes_value": list,
    "_losses": list,
    "_loss_ids": set,
}


def _copy_without_weights(layer: Any) -> Any:
    """Return a layer with the attributes of one without weights, in no graph.

    The layer itself knows its graphs, so the copied model would keep the original embeddings in memory.
    """
    if isinstance(layer, keras.layers.Layer):
        kind: Any = type(layer)
        new = kind.__new__(kind)
        wrapped = {name: method for name, method in vars(new).items() if callable(method)}
        vars(new).update({**vars(layer), **wrapped})
    else:
        new = copy.copy(layer)
    vars(new).update({name: make() for name, make in _OWN.items() if name in vars(new)})
    if isinstance(new, TableLayer):
        new.table = None
        new.take_first_rows(layer)
    return new


def check_ties(layers: Sequence[Any]) -> None:
    """Raise ValueError naming layers that share a weight, which their copies would not share."""
    owners: dict[int, Any] = {}
    for layer in layers:
        for weight in layer.weights:
            owner = owners.setdefault(id(weight), layer)
            if owner is not layer:
                raise ValueError(
                    f"layers '{owner.name}' and '{layer.name}' share the weight {weight.name}, which their "
                    "copies would not: make it a subclassed model, or train without servers"
                )


def copy_weights(copies: Sequence[tuple[Any, Any]]) -> None:
    """Assign the weights of the first layer of each pair to the second, once that is built."""
    for layer, new in copies:
        _make_all_weights(layer)
        _make_all_weights(new)
        if len(layer.variables) != len(new.variables):
            raise ValueError(
                f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied: it has "
                f"{len(layer.variables)} variables, but a layer made from its get_config() has "
                f"{len(new.variables)}"
            )
        for old_variable, new_variable in zip(layer.variables, new.variables, strict=True):
            # On JAX they would share an array, which the other model's steps give up.
            shared = isinstance(old_variable, keras.Variable) and keras.backend.backend() == "jax"
            new_variable.assign(keras.ops.copy(old_variable) if shared else old_variable)


def _make_all_weights(layer: Any) -> None:
    """Trace the call of a layer that makes weights in it.

    Keras 3 does so unless the layer declares its output shape. Such a layer has all of its weights only after
    the first batch, and a copy would draw other values.
    """
    if not isinstance(layer, keras.layers.Layer) or all(one.built for one in layer._flatten_layers()):
        return
    for node in layer._inbound_nodes[:1]:
        arguments = node.arguments
        # An error of a layer's call is that of the first batch.
        with contextlib.suppress(Exception):
            keras.Operation.compute_output_spec(layer, *arguments.args, **arguments.kwargs)


def _copy_operation(operation: Any) -> Any:
    """Copy an operation such as keras.ops.add.

    It has no weights but knows its graphs: a shared one would keep the weights of both models in memory. An
    operation that cannot be copied is shared nevertheless.
    """
    try:
        return type(operation).from_config(operation.get_config())
    except Exception:
        return operation
