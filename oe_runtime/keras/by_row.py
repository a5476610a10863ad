"""Dense layers over embeddings, computed once for each distinct embedding of a batch.

A dense layer over concatenated embeddings is a sum: of each embedding times its own rows of the kernel. The
ids of a batch of clicks repeat themselves (in Criteo's data, 4,096 examples have 13 % distinct ids), so the
products are computed for the distinct (lookup, row) pairs, and summed by example: fewer multiplications, and
neither the embeddings nor their gradients need to be written out for each example. The result differs from
Keras's in the order of the summation only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.client import Pairs
from oe_runtime.keras import feed
from oe_runtime.keras.gradients import RowGroup
from oe_runtime.keras.supply import Answers

# Below, a row of products takes longer to sum than to compute (measured: dim 9 loses, dim 64 wins).
_LEAST_DIM = 32
_LEAST_UNITS = 64


@keras.saving.register_keras_serializable(package="oe_runtime", name="Dense")
class Dense(keras.layers.Dense):  # type: ignore[misc]
    """keras.layers.Dense, which in a step asks the feed first whether it knows the product."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        """See keras.layers.Dense."""
        step: Any = feed.current()  # one of `supply`
        product = None if step is None else step.product(inputs, self.kernel)
        if product is None:
            return super().call(inputs, training=training)
        if self.bias is not None:
            product = keras.ops.add(product, self.bias)
        return product if self.activation is None else self.activation(product)


@keras.saving.register_keras_serializable(package="oe_runtime", name="Concatenate")
class Concatenate(keras.layers.Concatenate):  # type: ignore[misc]
    """keras.layers.Concatenate, which in a step asks the feed whether it has the embeddings in one piece."""

    def call(self, inputs: Any) -> Any:
        """See keras.layers.Concatenate."""
        step: Any = feed.current()  # one of `supply`
        joined = None
        if step is not None and isinstance(inputs, (list, tuple)) and not self._reshape_required:
            joined = step.joined(inputs, self.axis)
        return super().call(inputs) if joined is None else joined


def take_over(model: Any) -> None:
    """Makes the plain dense and concatenating layers of a model ours."""
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if type(layer) is keras.layers.Concatenate:
            layer.__class__ = Concatenate
        if type(layer) is keras.layers.Dense and layer.units >= _LEAST_UNITS:
            layer.__class__ = Dense


def wants_pairs(model: Any, group: Any) -> bool:
    """Whether dense layers over a pulled group may be worth it."""
    return (
        group.dim >= _LEAST_DIM
        and len(set(group.sizes)) == 1
        and any(isinstance(layer, Dense) for layer in model._flatten_layers())
    )


@dataclass(frozen=True)
class PairedGroup:
    """A group of rows with its distinct pairs, as tensors of a step's function."""

    group: RowGroup
    pairs: Pairs
    lookups: Sequence[int]  # of the group, as the plan numbers them


class Products:
    """The products of dense layers in one step."""

    def __init__(self, groups: Mapping[int, PairedGroup]) -> None:
        self._groups = groups
        self.used: set[int] = set()

    def product(self, answers: Answers, inputs: Any, kernel: Any) -> Any:
        """inputs @ kernel, or None where its lookups are not those of one whole group or more, each once."""
        if not isinstance(inputs, tf.Tensor) or tf.executing_eagerly() or inputs.shape.rank != 2:
            return None
        parts = _parts(inputs, answers)
        if parts is None:
            return None
        found = {part: place for place, part in enumerate(parts) if isinstance(part, int)}
        groups = {
            number: paired
            for number, paired in self._groups.items()
            if all(lookup in found for lookup in paired.lookups) and paired.group.rows.dtype == inputs.dtype
        }
        summed = {lookup for paired in groups.values() for lookup in paired.lookups}
        if not summed or summed != set(found) or len(found) < sum(isinstance(part, int) for part in parts):
            return None
        kernel = tf.convert_to_tensor(kernel)
        if kernel.dtype != inputs.dtype:
            return None
        dims = {lookup: p.group.rows.shape[1] for p in self._groups.values() for lookup in p.lookups}
        widths = [dims[part] if isinstance(part, int) else part.shape[1] for part in parts]
        blocks = tf.split(kernel, widths, axis=0)
        terms = [_sum(paired, [blocks[found[i]] for i in paired.lookups]) for paired in groups.values()]
        rest = [place for place, part in enumerate(parts) if not isinstance(part, int)]
        if rest:
            columns = tf.concat([parts[place] for place in rest], 1)
            terms.append(tf.matmul(columns, tf.concat([blocks[place] for place in rest], 0)))
        self.used.update(groups)
        return tf.add_n(terms)


def _sum(paired: PairedGroup, blocks: Sequence[Any]) -> Any:
    """(examples, units): each example's products of a group's lookups with their blocks of the kernel."""
    pairs = paired.pairs
    rows = tf.split(_gather(paired.group.rows, pairs.rows), pairs.sizes, num=len(blocks))
    products = tf.concat([tf.matmul(part, block) for part, block in zip(rows, blocks, strict=True)], 0)
    examples = tf.size(pairs.of_ids) // len(blocks)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def by_example(values: Any) -> Any:
        of = tf.repeat(tf.range(examples), len(blocks))
        sums = _segment_sum(values, pairs.of_ids, of, examples)
        count = tf.shape(values)[0]
        return sums, lambda gradient: _segment_sum(gradient, pairs.examples, pairs.pairs, count)

    return by_example(products)


def _segment_sum(values: Any, indices: Any, segments: Any, count: Any) -> Any:
    return tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=values, indices=indices, segment_ids=segments, num_segments=count
    )


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _gather(rows: Any, places: Any) -> Any:
    """tf.gather whose gradient is a dense tensor: there are hardly more places than rows."""
    count = tf.shape(rows)[0]
    return tf.gather(rows, places), lambda g: (tf.math.unsorted_segment_sum(g, places, count), None)


def _parts(tensor: Any, answers: Answers) -> list[Any] | None:
    """What lies side by side in each example of `tensor`: lookups (int), and other tensors (examples, n).

    None where the lengths are not known.
    """
    key = (id(tensor.graph), tensor.op.name)
    if key in answers:
        return list(answers[key])
    length = _length(tensor)
    if length is None:
        return None
    op = tensor.op
    inside: list[Any] | None = None
    if op.type in ("Identity", "Reshape", "Squeeze", "ExpandDims") and _length(op.inputs[0]) == length:
        inside = _parts(op.inputs[0], answers)
    elif op.type == "ConcatV2":
        *tensors, axis = op.inputs
        along = tf.get_static_value(axis)
        if along is not None and along % tensor.shape.rank > 0:
            before = tensor.shape[1 : int(along) % tensor.shape.rank]
            if before.is_fully_defined() and math.prod(before) == 1:
                several = [_parts(t, answers) for t in tensors]
                if all(several):
                    inside = [part for parts in several for part in parts or []]
    if inside is not None and any(isinstance(part, int) for part in inside):
        return inside
    return [tf.reshape(tensor, [-1, length])]


def _length(tensor: Any) -> int | None:
    """Numbers in each example."""
    shape = tensor.shape
    if not shape.rank or not shape[1:].is_fully_defined():
        return None
    return int(math.prod(shape[1:]))
