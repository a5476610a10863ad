"""The lookups of a model (which ids in which tables), found by tracing it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from oe_runtime.keras.arrays import to_numpy
from oe_runtime.keras.feed import dependent_ids_error, feeding, to_keys
from oe_runtime.keras.supply import Collect

# Operations that keep the order of the elements; so do widening integer casts.
_SAME_ELEMENTS = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient"}


class LookupPlan:
    """The lookups of one model for inputs of one structure.

    layers[i] is the layer of lookup i, sources[i] the index of its ids in the result of `ids`. Lookups of the
    same ids share them. Ids that are an input of the model are read from it directly. The others take one
    TensorFlow function with only the operations that lead to them.
    """

    def __init__(self, model: Any, structure: Any, specs: Sequence[Any]) -> None:
        """`structure` packs the flat inputs (tensors of `specs`) into the model's argument.

        Raises ValueError when ids are computed from embeddings.
        """
        collect = Collect()

        def trace(*flat: Any) -> list[Any]:
            with feeding(collect):
                model(keras.tree.pack_sequence_as(structure, list(flat)), training=False)
            return list(collect.ids)

        concrete = tf.function(trace, autograph=False).get_concrete_function(*specs)
        positions = {tensor.op.name: i for i, tensor in enumerate(concrete.inputs[: len(specs)])}
        stand_ins = {
            answer.op.name: layer.name for answer, layer in zip(collect.answers, collect.layers, strict=True)
        }
        self.layers: list[Any] = collect.layers
        self.sources: list[int] = []
        self._direct: list[int | None] = []  # per distinct ids: the index of their input, if they are one
        self._named: list[str] = []  # per distinct ids: the first layer that looks them up
        computed: list[int] = []  # a lookup for each of the others
        numbers: dict[Any, int] = {}
        for lookup, ids in enumerate(collect.ids):
            layer = collect.layers[lookup].name
            _refuse_dependence(ids, stand_ins, layer)
            tensor = _strip(ids)
            key = _identity(tensor, {})
            if key not in numbers:
                numbers[key] = len(self._direct)
                direct = positions.get(tensor.op.name)
                self._direct.append(direct)
                self._named.append(layer)
                if direct is None:
                    computed.append(lookup)
            self.sources.append(numbers[key])
        self._compute = _ids_function(model, structure, specs, computed) if computed else None

    def ids(self, inputs: Sequence[Any]) -> list[NDArray[np.int64]]:
        """Return the distinct ids of a batch, flat. `inputs` are the flat inputs as tensors."""
        values = iter(self._compute(*inputs)) if self._compute is not None else iter(())
        tensors = [next(values) if direct is None else inputs[direct] for direct in self._direct]
        return [to_keys(to_numpy(t), layer) for t, layer in zip(tensors, self._named, strict=True)]


def _ids_function(
    model: Any, structure: Any, specs: Sequence[Any], lookups: Sequence[int]
) -> Callable[..., Any]:
    def trace(*flat: Any) -> list[Any]:
        collect = Collect()
        with feeding(collect):
            model(keras.tree.pack_sequence_as(structure, list(flat)), training=False)
        return [collect.ids[i] for i in lookups]

    function: Callable[..., Any] = tf.function(trace, autograph=False).get_concrete_function(*specs)
    return function


def _strip(tensor: Any) -> Any:
    """Return the tensor nearest to the inputs with the elements of `tensor` in the same order."""
    while True:
        kind = tensor.op.type
        widening = (
            kind == "Cast" and tensor.dtype == tf.int64 and tensor.op.inputs[0].dtype in (tf.int32, tf.int64)
        )
        if kind not in _SAME_ELEMENTS and not widening:
            return tensor
        tensor = tensor.op.inputs[0]


def _identity(tensor: Any, known: dict[str, Any]) -> Any:
    """Return a key that is equal for equal operations on the same inputs."""
    op = tensor.op
    if op.name not in known:
        if op.type == "Placeholder" or op.op_def.is_stateful:
            known[op.name] = op.name
        else:
            attributes = tuple(
                sorted((k, v.SerializeToString(deterministic=True)) for k, v in op.node_def.attr.items())
            )
            inputs = tuple(_identity(t, known) for t in op.inputs)
            known[op.name] = (op.type, attributes, inputs)
    return (known[op.name], tensor.value_index)


def _refuse_dependence(ids: Any, stand_ins: dict[str, str], layer: str) -> None:
    seen: set[str] = set()
    rest = [ids.op]
    while rest:
        op = rest.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name in stand_ins:
            raise dependent_ids_error(layer, f"'{stand_ins[op.name]}'")
        rest.extend(t.op for t in op.inputs)
