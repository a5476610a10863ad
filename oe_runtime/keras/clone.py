"""Copies of functional models in which some layers are other layers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from oe_runtime.keras.embedding import TableLayer


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
    originals: list[Any] = []
    made: dict[int, Any] = {}  # by the id of the layer: models inside may share layers

    def copy_of(layer: Any) -> Any:
        if not isinstance(layer, keras.layers.Layer):
            return _copy_operation(layer)
        if id(layer) not in made:
            originals.append(layer)
            made[id(layer)] = replace(layer)
            if made[id(layer)] is None:
                made[id(layer)] = remade(layer)
                copies.append((layer, made[id(layer)]))
        return made[id(layer)]

    # A fresh model over the same graph is not compiled, so that its clone is not either.
    if isinstance(model, keras.Sequential):
        source = keras.Model(model.inputs, model.outputs, name=model.name)
    else:
        source = keras.Model(model.input, model.output, name=model.name)
    cloned = keras.models.clone_model(source, clone_function=copy_of, recursive=True)
    check_ties(originals)
    copy_weights(copies)
    return cloned.input, cloned.output


def remade(layer: Any) -> Any:
    """A layer like another one, of Keras 3 or of tf-keras; ValueError where it cannot be made."""
    # A configuration has the bytecode of a Lambda without the names around it, and of a subclass of our layer
    # what the subclass gave ours, not what the subclass takes.
    if not layer.variables and (
        isinstance(layer, TableLayer) or any(map(_is_lambda, layer._flatten_layers()))
    ):
        return _twin(layer)
    try:
        return type(layer).from_config(layer.get_config())
    except Exception as error:
        if not layer.variables:
            return _twin(layer)
        raise ValueError(
            f"layer '{layer.name}' ({type(layer).__name__}) cannot be copied, because it has weights and "
            f"cannot be made from its get_config(): {error}"
        ) from error


def _is_lambda(layer: Any) -> bool:
    return any(
        kind.__name__ == "Lambda" and kind.__module__.startswith(("keras.", "tf_keras."))
        for kind in type(layer).__mro__
    )


# What an object has for itself: its places in graphs, and the losses of its last call.
_OWN: Mapping[str, Callable[[], Any]] = {
    "_inbound_nodes": list,
    "_outbound_nodes": list,
    "_inbound_nodes_value": list,
    "_outbound_nodes_value": list,
    "_losses": list,
    "_loss_ids": set,
}


def _twin(layer: Any) -> Any:
    """A layer with the attributes of one that has no weights, in no graph.

    Not the layer itself: it knows the graphs that it is used in, so that the copied model would keep the
    embeddings of the original one in memory.
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
    """Raises ValueError naming layers that share a weight, of which their copies would have one each."""
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
    """Gives the second layer of each pair, once it is built, the weights of the first."""
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
            new_variable.assign(old_variable)


def _make_all_weights(layer: Any) -> None:
    """Traces the call of a layer that makes weights in it.

    Keras 3 does so unless the layer says which shape comes out; such a layer has all of its weights only
    after the first batch, and those would be drawn anew in a copy.
    """
    if not isinstance(layer, keras.layers.Layer) or all(one.built for one in layer._flatten_layers()):
        return
    for node in layer._inbound_nodes[:1]:
        arguments = node.arguments
        # An error of a layer's call is that of the first batch.
        with contextlib.suppress(Exception):
            keras.Operation.compute_output_spec(layer, *arguments.args, **arguments.kwargs)


def _copy_operation(operation: Any) -> Any:
    """A copy of an operation such as keras.ops.add.

    It has no weights, but it knows the graphs it is used in: if two models share it, either keeps the
    weights of both in memory. One that cannot be copied is shared nevertheless.
    """
    try:
        return type(operation).from_config(operation.get_config())
    except Exception:
        return operation
