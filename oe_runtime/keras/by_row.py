"""Dense layers and sums over embeddings, computed once per distinct embedding of a batch.

A dense layer over concatenated embeddings is a sum: each embedding times its own rows of the kernel. The ids
in a batch of clicks repeat (in Criteo's data, 4,096 examples have 13 % distinct ids). So the products are
computed for the distinct (lookup, row) pairs and summed by example. This takes fewer multiplications, and
neither the embeddings nor their gradients are written out per example. The same holds for sums over fields of
embeddings and of their squares, as in factorization machines. The results differ from Keras's only in the
order of summation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.ops.function import Function  # these two have no public name
from keras.src.ops.numpy import Sum as KerasSum

from oe_runtime.client import Pairs
from oe_runtime.keras import feed
from oe_runtime.keras.gradients import RowGroup
from oe_runtime.keras.supply import Answers

# Below these, summing a row of products takes longer than computing it (measured: dim 9 loses, dim 64 wins).
_LEAST_DIM = 32
_LEAST_UNITS = 64
# TensorFlow sums in one thread. A fixed number, because the order of summation follows from it.
_PORTIONS = 2


@keras.saving.register_keras_serializable(package="oe_runtime", name="Dense")
class Dense(keras.layers.Dense):  # type: ignore[misc]
    """keras.layers.Dense, which in a step first asks the feed for the product."""

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
    """keras.layers.Concatenate, which in a step first asks the feed for the embeddings in one piece."""

    def call(self, inputs: Any) -> Any:
        """See keras.layers.Concatenate."""
        step: Any = feed.current()  # one of `supply`
        joined = None
        if step is not None and isinstance(inputs, (list, tuple)) and not self._reshape_required:
            joined = step.joined(inputs, self.axis)
        return super().call(inputs) if joined is None else joined


@keras.saving.register_keras_serializable(package="oe_runtime", name="Sum")
class Sum(KerasSum):  # type: ignore[misc]
    """keras.ops.sum in a functional model, which in a step first asks the feed for a sum of lookups."""

    def call(self, x: Any) -> Any:
        """See keras.ops.sum."""
        step: Any = feed.current()  # one of `supply`
        summed = None
        if step is not None and self.axis is not None and tuple(self.axis) in ((1,), (-2,)):
            summed = step.summed(x)
        if summed is None:
            return super().call(x)
        return keras.ops.expand_dims(summed, 1) if self.keepdims else summed


def use_fast_layers(model: Any) -> None:
    """Replace the plain Dense and Concatenate layers of a model, and the sums of its graph, by ours."""
    for one in _operations(model):
        if type(one) is keras.layers.Concatenate:
            one.__class__ = Concatenate
        if type(one) is keras.layers.Dense and one.units >= _LEAST_UNITS:
            one.__class__ = Dense
        if type(one) is KerasSum:
            one.__class__ = Sum


def _operations(model: Any) -> list[Any]:
    """Return all layers of a model, and the operations of its and their graphs."""
    layers = list(model._flatten_layers(include_self=True, recursive=True))
    graphs = [layer.operations for layer in layers if isinstance(layer, Function)]
    return [*layers[1:], *itertools.chain(*graphs)]


def wants_pairs(model: Any, group: Any) -> bool:
    """Whether dense layers and sums over a pulled group may be faster by pair."""
    return (
        group.dim >= _LEAST_DIM
        and len(set(group.sizes)) == 1
        and any(isinstance(one, (Dense, Sum)) for one in _operations(model))
    )


@dataclass(frozen=True)
class PairedGroup:
    """A group of rows with its distinct pairs, as tensors of a step's function."""

    group: RowGroup
    pairs: Pairs
    lookups: Sequence[int]  # of the group, as the plan numbers them


class Products:
    """The products of dense layers and the sums over lookups in one step."""

    def __init__(self, groups: Mapping[int, PairedGroup]) -> None:
        self._groups = groups
        self._rows: dict[tuple[int, int], Any] = {}
        self.used: set[int] = set()

    def product(self, answers: Answers, inputs: Any, kernel: Any) -> Any:
        """Return inputs @ kernel, or None unless its lookups are those of whole groups, each once."""
        if not isinstance(inputs, tf.Tensor) or tf.executing_eagerly() or inputs.shape.rank != 2:
            return None
        parts = _parts(inputs, answers) or []
        groups = self._groups_of(parts, inputs.dtype)
        if not groups:
            return None
        kernel = tf.convert_to_tensor(kernel)
        if kernel.dtype != inputs.dtype:
            return None
        dims = {lookup: p.group.rows.shape[1] for p in groups.values() for lookup in p.lookups}
        widths = [dims[part] if isinstance(part, int) else part.shape[1] for part in parts]
        blocks = tf.split(kernel, widths, axis=0)
        found = {part: place for place, part in enumerate(parts) if isinstance(part, int)}
        terms = []
        for number, paired in groups.items():
            rows = tf.split(
                self._pair_rows(number, inputs.graph), paired.pairs.sizes, num=len(paired.lookups)
            )
            products = [
                tf.matmul(part, blocks[found[i]]) for part, i in zip(rows, paired.lookups, strict=True)
            ]
            for part in _portions(paired):
                taken, products = products[: len(part.lookups)], products[len(part.lookups) :]
                terms.append(_by_example(part, tf.concat(taken, 0)))
        rest = [place for place, part in enumerate(parts) if not isinstance(part, int)]
        if rest:
            columns = tf.concat([parts[place] for place in rest], 1)
            terms.append(tf.matmul(columns, tf.concat([blocks[place] for place in rest], 0)))
        return tf.add_n(terms)

    def summed(self, answers: Answers, inputs: Any) -> Any:
        """Return the sum of (examples, lookups, dim) over the lookups, or None as `product`.

        `inputs` are embeddings or their squares.
        """
        if not isinstance(inputs, tf.Tensor) or tf.executing_eagerly() or inputs.shape.rank != 3:
            return None
        squared = _squared(inputs)
        parts = _parts(inputs if squared is None else squared, answers) or []
        groups = self._groups_of(parts, inputs.dtype)
        if not groups or len(parts) != inputs.shape[1] or not all(isinstance(part, int) for part in parts):
            return None
        if any(paired.group.rows.shape[1] != inputs.shape[2] for paired in groups.values()):
            return None
        rows = [(paired, self._pair_rows(number, inputs.graph)) for number, paired in groups.items()]
        return tf.add_n([_by_example(paired, r if squared is None else tf.square(r)) for paired, r in rows])

    def _groups_of(self, parts: Sequence[Any], dtype: Any) -> dict[int, PairedGroup] | None:
        """Return the groups, by number, whose lookups are exactly those in `parts`, each once."""
        found = [part for part in parts if isinstance(part, int)]
        groups = {
            number: paired
            for number, paired in self._groups.items()
            if set(paired.lookups) <= set(found) and paired.group.rows.dtype == dtype
        }
        if sorted(found) != sorted(lookup for paired in groups.values() for lookup in paired.lookups):
            return None
        return groups

    def _pair_rows(self, number: int, graph: Any) -> Any:
        """Return (pairs, dim): the row of each pair of a group, gathered once per graph."""
        paired, key = self._groups[number], (number, id(graph))
        self.used.add(number)
        if key not in self._rows:
            self._rows[key] = _gather(paired.group.rows, paired.pairs.rows)
        return self._rows[key]


def _portions(paired: PairedGroup) -> list[PairedGroup]:
    """Split a group's pairs by lookups into parts that are summed at the same time."""
    pairs, lookups = paired.pairs, len(paired.lookups)
    lengths = [lookups // _PORTIONS + (i < lookups % _PORTIONS) for i in range(min(lookups, _PORTIONS))]
    examples = tf.size(pairs.of_ids) // lookups
    sizes = tf.split(pairs.sizes, lengths)
    counts = tf.stack([tf.reduce_sum(part) for part in sizes])
    ids = [length * examples for length in lengths]
    portions = zip(
        tf.split(pairs.rows, counts, num=len(lengths)),
        sizes,
        tf.split(tf.reshape(pairs.of_ids, [-1, lookups]), lengths, axis=1),
        tf.split(pairs.examples, ids, num=len(lengths)),
        tf.split(pairs.pairs, ids, num=len(lengths)),
        strict=True,
    )
    first, begin, found = 0, 0, []
    for (rows, size, of_ids, of_examples, of_pairs), count, length in zip(
        portions, tf.unstack(counts, num=len(lengths)), lengths, strict=True
    ):
        own = Pairs(rows, size, tf.reshape(of_ids - first, [-1]), of_examples, of_pairs - first)
        found.append(PairedGroup(paired.group, own, paired.lookups[begin : begin + length]))
        first, begin = first + count, begin + length
    return found


def _by_example(paired: PairedGroup, values: Any) -> Any:
    """Sum values of a group's pairs, (pairs, n), over each example's lookups: (examples, n)."""
    pairs, lookups = paired.pairs, len(paired.lookups)
    examples = tf.size(pairs.of_ids) // lookups

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def by_example(values: Any) -> Any:
        of = tf.repeat(tf.range(examples), lookups)
        sums = _segment_sum(values, pairs.of_ids, of, examples)
        count = tf.shape(values)[0]
        return sums, lambda gradient: _segment_sum(gradient, pairs.examples, pairs.pairs, count)

    return by_example(values)


def _segment_sum(values: Any, indices: Any, segments: Any, count: Any) -> Any:
    return tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=values, indices=indices, segment_ids=segments, num_segments=count
    )


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _gather(rows: Any, places: Any) -> Any:
    """tf.gather with a dense gradient: there are hardly more places than rows."""
    count = tf.shape(rows)[0]
    return tf.gather(rows, places), lambda g: (tf.math.unsorted_segment_sum(g, places, count), None)


def _parts(tensor: Any, answers: Answers) -> list[Any] | None:
    """Return what lies side by side in each example: lookups (int), and other tensors (examples, n).

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
    elif op.type in ("ConcatV2", "Pack"):
        if op.type == "Pack":
            tensors, along = list(op.inputs), op.get_attr("axis")
        else:
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


def _squared(tensor: Any) -> Any:
    """Return the tensor whose square `tensor` is, or None."""
    op = tensor.op
    by_itself = op.type == "Mul" and op.inputs[0].name == op.inputs[1].name
    to_the_second = op.type == "Pow" and tf.get_static_value(op.inputs[1]) == 2
    return op.inputs[0] if op.type == "Square" or by_itself or to_the_second else None


def _length(tensor: Any) -> int | None:
    """Return the number of values per example."""
    shape = tensor.shape
    if not shape.rank or not shape[1:].is_fully_defined():
        return None
    return int(math.prod(shape[1:]))
