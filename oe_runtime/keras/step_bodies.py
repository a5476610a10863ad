"""The computation of a training, testing or predicting step: the bodies of the compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.keras.dense import trainable
from oe_runtime.keras.feed import feeding
from oe_runtime.keras.gradients import RowGroup, clip, each_row_once, regularization
from oe_runtime.keras.micro_batches import Gradients, accumulated
from oe_runtime.keras.served import Served
from oe_runtime.keras.supply import Supply
from oe_runtime.keras.translate import needs_sums
from oe_runtime.keras.workers import SUM_OVER_WORKERS, weighted_mean

# What is compiled, one of TRAIN, TEST and PREDICT. Takes the model, the rows of all lookups, those of trained
# tables by groups of one dim, and (x, y, sample_weight); returns the outputs.
Body = Callable[[Served, Supply, list[RowGroup], tuple[Any, Any, Any]], Any]


def _gradients(
    served: Served, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any], share: Any = None
) -> Gradients:
    """Compute forward and backward, with the gradients times `share`."""
    x, y, sample_weight = data
    rows, lookups = [group.rows for group in groups], [group.lookups for group in groups]
    together = [() if group.together is None else (group.together,) for group in groups]
    with tf.GradientTape() as tape:
        tape.watch([rows, lookups, together])
        with feeding(supply):
            y_pred = _forward(served)(x)
        loss = served.batch_loss(regularization(groups), x, y, y_pred, sample_weight, training=True)
    if served.losses is not None:
        examples = tf.cast(tf.shape(keras.tree.flatten(x)[0])[0], tf.float64)
        total = tf.math.multiply_no_nan(tf.cast(loss, tf.float64), examples)  # 0 for the mean over none
        served.losses.assign_add([total, examples])
    # Lookups are gathered before the tape, so `rows` gets gradients only from regularizers and `by_row`.
    sources = [trainable(served.model), rows, lookups, together]
    return Gradients(y_pred, *tape.gradient(loss, sources, output_gradients=share))


def _train(served: Served, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    """Update the dense variables; return (logs, learning rate, gradients of ids, gradients of rows).

    Each group has one of each kind; None where it has only the other kind.
    """
    x, y, sample_weight = data
    model, workers, count = served.model, served.workers, served.settings.micro_batches
    backward = _gradients if count == 1 else partial(accumulated, _gradients, count)
    y_pred, dense, direct_gradients, of_lookups, of_together = backward(served, supply, groups, data)
    dense = [each_row_once(gradient) for gradient in dense]
    rows = [group.rows for group in groups]
    variables = trainable(model)
    optimizer = model.optimizer
    of_ids = [
        group.join_lookups(parts, next(iter(whole), None))
        for group, parts, whole in zip(groups, of_lookups, of_together, strict=True)
    ]
    of_rows: Sequence[Any] = [  # a gradient for each group
        tf.zeros_like(r) if direct is None and ids is None else direct
        for r, direct, ids in zip(rows, direct_gradients, of_ids, strict=True)
    ]
    if needs_sums(optimizer, [layer for group in groups for layer in group.layers]):
        sums = [
            tf.add_n([t for t in (None if g is None else group.sum(g), direct) if t is not None])
            for group, g, direct in zip(groups, of_ids, of_rows, strict=True)
        ]
        dense, of_rows = clip(optimizer, dense, groups, sums)
        of_ids = [None] * len(groups)
    if workers is not None:
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        zeros = [tf.zeros_like(v) if g is None else g for g, v in zip(dense, variables, strict=True)]
        there = [g for g in (*of_ids, *of_rows) if g is not None]
        dense, weighted = weighted_mean(
            workers, zeros, there, examples, as_sum=getattr(optimizer, SUM_OVER_WORKERS, False)
        )
        shares = iter(weighted)
        of_ids, of_rows = ([None if g is None else next(shares) for g in part] for part in (of_ids, of_rows))
    # Before the gradients are applied, which advances the schedule.
    rate = tf.cast(served.learning_rate(), tf.float64)
    if variables:
        optimizer.apply_gradients(zip(dense, variables, strict=True))
    else:
        optimizer._iterations.assign_add(1)  # not `iterations`, which may count updates
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight), rate, of_ids, of_rows


def _forward(served: Served) -> Any:
    """Return the model's call in training, compiled by XLA together with its gradients if wanted.

    Only the gathered rows of the lookups go in, whose shapes follow from the batch's. The number of unique
    rows differs between batches, and XLA would compile each anew.
    """

    def call(x: Any) -> Any:
        outputs = served.model(x, training=True)
        if served.xla:
            for layer in served.model._flatten_layers():
                if layer._losses:  # tensors of this function, which the loss is computed outside of
                    raise ValueError(
                        f"layer '{layer.name}' adds a loss in its call (activity_regularizer or add_loss), "
                        "which does not work with jit_compile=True; compile without it"
                    )
        return outputs

    return tf.function(call, jit_compile=True, autograph=False) if served.xla else call


def _test(served: Served, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    x, y, sample_weight = data
    with feeding(supply):
        y_pred = served.model(x, training=False)
    served.batch_loss(regularization(groups), x, y, y_pred, sample_weight, training=False)
    return served.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _predict(served: Served, supply: Supply, _groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    with feeding(supply):
        return served.model(data[0], training=False)


TRAIN: Body = _train
TEST: Body = _test
PREDICT: Body = _predict
