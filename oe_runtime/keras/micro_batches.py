"""A batch computed in parts, whose gradients are summed before one update and one push.

A step then needs memory for activations and gradients of one part only. The parts run one after the other.
(DeepRec's micro batch.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from oe_runtime.keras.gradients import RowGroup
from oe_runtime.keras.served import Served
from oe_runtime.keras.supply import Supply


class Gradients(NamedTuple):
    """The result of one pass forward and backward; None for what the loss does not depend on."""

    y_pred: Any
    dense: Sequence[Any]  # one for each trainable variable
    rows: list[Any]  # one for each group: of the rows themselves, as by regularizers
    lookups: list[list[Any]]  # one for each lookup of each group: (ids, dim)
    together: list[tuple[Any, ...]]  # of each group that has some: (examples, lookups, dim)


# (served model, the rows of all lookups, trained groups, (x, y, sample_weight), a factor of the gradients)
Pass = Callable[[Served, Supply, list[RowGroup], tuple[Any, Any, Any], Any], Gradients]


def accumulated(
    step: Pass, count: int, served: Served, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]
) -> Gradients:
    """Return the gradients of `step` over the whole batch, in up to `count` parts of about equal size.

    Equal within floating point for a loss that is a mean over examples, and layers that treat each example
    alone (not BatchNormalization). Every lookup needs the same number of ids per example.
    """
    examples = tf.shape(keras.tree.flatten(data[0])[0])[0]
    parts = tf.clip_by_value(examples, 1, count)

    def part(number: Any) -> Gradients:
        begin, end = number * examples // parts, (number + 1) * examples // parts
        cut = _Cut(begin, end, examples)
        some = [replace(group, lookups=[cut(r) for r in group.lookups]) for group in groups]
        values = keras.tree.map_structure(
            lambda t: t[begin:end] if t is not None and t.shape.rank else t, data
        )
        share = tf.cast(end - begin, tf.float32) / tf.cast(tf.maximum(examples, 1), tf.float32)
        return step(served, supply.part(cut), some, values, share)

    first = part(0)
    sums = [tf.convert_to_tensor(g) for g in _there([*first.dense, *first.rows])]
    pieces = _there(keras.tree.flatten([first.y_pred, first.lookups]))
    joined = [
        tf.TensorArray(p.dtype, parts, element_shape=[None, *p.shape[1:]], infer_shape=False).write(0, p)
        for p in pieces
    ]

    def body(number: Any, sums: list[Any], joined: list[Any]) -> Any:
        found = part(number)
        more = [tf.convert_to_tensor(g) for g in _there([*found.dense, *found.rows])]
        pieces = _there(keras.tree.flatten([found.y_pred, found.lookups]))
        return (
            number + 1,
            [a + b for a, b in zip(sums, more, strict=True)],
            [array.write(number, p) for array, p in zip(joined, pieces, strict=True)],
        )

    _, sums, joined = tf.while_loop(
        lambda number, *_: number < parts, body, (tf.constant(1), sums, joined), parallel_iterations=1
    )
    summed, whole = iter(sums), iter(array.concat() for array in joined)
    return Gradients(
        keras.tree.map_structure(lambda _: next(whole), first.y_pred),
        [None if g is None else next(summed) for g in first.dense],
        [None if g is None else next(summed) for g in first.rows],
        [[None if g is None else next(whole) for g in group] for group in first.lookups],
        first.together,  # of no group: parts are cut from lookups
    )


class _Cut:
    """Takes the rows of some examples from those of a lookup; the same tensor for the same input."""

    def __init__(self, begin: Any, end: Any, examples: Any) -> None:
        self._begin, self._end, self._examples = begin, end, examples
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, rows: Any) -> Any:
        if id(rows) not in self._known:
            ids = tf.shape(rows)[0]
            each = ids // tf.maximum(self._examples, 1)
            equal = tf.debugging.assert_equal(
                each * self._examples, ids, "micro batches need equally many ids of a lookup for each example"
            )
            with tf.control_dependencies([] if equal is None else [equal]):
                self._known[id(rows)] = (rows, rows[self._begin * each : self._end * each])
        return self._known[id(rows)][1]


def _there(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]
