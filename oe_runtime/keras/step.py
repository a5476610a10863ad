"""One batch: ids, pull, one compiled function, push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.client import Client
from oe_runtime.keras.arrays import to_numpy, to_tensor
from oe_runtime.keras.feed import Supply, feeding
from oe_runtime.keras.gradients import RowGroup, clip, needs_sums, regularization
from oe_runtime.keras.plan import Plan
from oe_runtime.keras.workers import weighted_mean

# What is compiled: (model, the rows of all lookups, those of trained tables by groups of one dim,
# (x, y, sample_weight)) → outputs.
_Body = Callable[[Any, Supply, list[RowGroup], tuple[Any, Any, Any]], Any]


class Steps:
    """Runs the batches of one compiled model.

    For every structure of the data there is one plan of lookups and one compiled function for each of
    training, testing and predicting. The batch's size is free in them, so that the last, smaller batch needs
    no new ones.
    """

    def __init__(self, model: Any, client: Client, *, eager: bool) -> None:
        self._model = model
        self._client = client
        self._eager = eager
        self._programs: dict[Any, _Program] = {}

    def train(self, data: Any) -> Any:
        """One training step on (x, y, sample_weight); returns Keras's logs."""
        program, tensors = self._program(_train, data)
        pulls = program.pull(self._client, tensors)
        logs, rate, gradients = program.run(pulls, tensors)
        if gradients:
            arrays = [to_numpy(g) for g in gradients]
            self._client.push(pulls[0], arrays, float(rate), summed=program.sums)
        return logs

    def test(self, data: Any) -> Any:
        """One evaluation step on (x, y, sample_weight); returns Keras's logs."""
        program, tensors = self._program(_test, data)
        return program.run(program.pull(self._client, tensors), tensors)

    def predict(self, data: Any) -> Any:
        """The model's outputs for (x, …)."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        program, tensors = self._program(_predict, (x, None, None))
        return program.run(program.pull(self._client, tensors), tensors)

    def _program(self, body: _Body, data: Any) -> tuple[_Program, list[Any]]:
        data = keras.utils.unpack_x_y_sample_weight(data)
        leaves = [None if isinstance(v, tf.experimental.Optional) else v for v in keras.tree.flatten(data)]
        tensors = [to_tensor(v) for v in leaves if v is not None]
        present = tuple(v is not None for v in leaves)
        shapes = [tuple(t.shape) for t in tensors]
        key = (
            body,
            _skeleton(data),
            present,
            tuple((t.dtype, len(s)) for t, s in zip(tensors, shapes, strict=True)),
        )
        program = self._programs.get(key)
        if program is None or not program.accepts(shapes):
            specs = [
                tf.TensorSpec([None, *s[1:]] if s else [], t.dtype)
                for t, s in zip(tensors, shapes, strict=True)
            ]
            if program is not None:  # lengths differ from batch to batch: free them too
                specs = [
                    a.most_specific_common_supertype([b]) for a, b in zip(specs, program.specs, strict=True)
                ]
            program = _Program(self._model, body, data, present, specs, eager=self._eager)
            self._programs[key] = program
        return program, tensors


def _skeleton(data: Any) -> Any:
    """Equal for equal structures of dicts, lists and tuples."""
    if isinstance(data, dict):
        return tuple((k, _skeleton(v)) for k, v in data.items())
    if isinstance(data, (list, tuple)):
        return (type(data), *(_skeleton(v) for v in data))
    return None


class _Program:
    """The plan and the compiled function for data of one structure."""

    def __init__(
        self,
        model: Any,
        body: _Body,
        data: Any,
        present: Sequence[bool],
        specs: Sequence[Any],
        *,
        eager: bool,
    ) -> None:
        self.specs = specs
        self._lengths = [tuple(spec.shape)[1:] for spec in specs]
        self._model = model
        self._body = body
        self._data = data
        self._present = present
        self._eager = eager
        n = len(keras.tree.flatten(data[0]))
        if not all(present[:n]):
            raise ValueError(
                "a model with distributed embeddings needs all of its inputs, but one of them is None"
            )
        self._inputs = n
        self._plan = Plan(model, data[0], specs[:n])
        for layer in self._plan.layers:
            if layer.table is None:
                raise RuntimeError(f"Embedding '{layer.name}' has no table yet: compile the model first")
        lookups = range(len(self._plan.layers))
        # Frozen tables are pulled by themselves, because all that a pull brought is pushed.
        self._trained = [i for i in lookups if self._plan.layers[i].trainable]
        # Whether the gradients that a training step returns are by row, not by id.
        self.sums = needs_sums(model.optimizer, [self._plan.layers[i] for i in self._trained])
        frozen = [i for i in lookups if not self._plan.layers[i].trainable]
        self._pulls = [pulled for pulled in (self._trained, frozen) if pulled]
        self._tables = [
            [(self._plan.layers[i].table.number, self._plan.sources[i]) for i in pulled]
            for pulled in self._pulls
        ]
        self._function: Any = None
        self._sizes: tuple[list[list[int]], list[Any]] = ([], [])

    def accepts(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes fit the compiled function."""
        return all(
            shape[1:] == lengths or all(b in (a, None) for a, b in zip(shape[1:], lengths, strict=True))
            for shape, lengths in zip(shapes, self._lengths, strict=True)
        )

    def pull(self, client: Client, tensors: Sequence[Any]) -> list[Any]:
        """Pulls the rows of all lookups: of trained tables first, if there are any, then of frozen ones."""
        if not self._pulls:
            return []
        ids = self._plan.ids(tensors[: self._inputs])
        return [client.pull(ids, tables) for tables in self._tables]

    def run(self, pulls: Sequence[Any], tensors: Sequence[Any]) -> Any:
        """Runs the compiled function on pulled rows and the batch."""
        groups = [group for pulled in pulls for group in pulled.groups]
        if self._function is None:
            self._function = self._compile(pulls)
        rows = [to_tensor(group.rows) for group in groups]
        inverses = [to_tensor(group.inverse) for group in groups]
        sizes = [group.sizes for group in groups]
        if self._sizes[0] != sizes:  # seldom: at the last, smaller batch
            self._sizes = (sizes, [tf.constant(part, tf.int32) for part in sizes])
        return self._function(*rows, *inverses, *self._sizes[1], *tensors)

    def _compile(self, pulls: Sequence[Any]) -> Any:
        model, body, layers, data, present = (
            self._model,
            self._body,
            self._plan.layers,
            self._data,
            self._present,
        )
        # For every group, its rows and its lookups as the plan numbers them.
        groups = [
            (tf.TensorSpec([None, group.dim], group.rows.dtype), [lookups[i] for i in group.lookups])
            for lookups, pulled in zip(self._pulls, pulls, strict=True)
            for group in pulled.groups
        ]
        n = len(groups)
        trained = len(pulls[0].groups) if self._trained else 0

        def function(*flat: Any) -> Any:
            rows: list[Any] = [None] * len(layers)
            for (_, lookups), unique, inverse, sizes in zip(
                groups, flat[:n], flat[n : 2 * n], flat[2 * n : 3 * n], strict=True
            ):
                # The positions are split, not the gathered rows: those would be copied once more.
                for lookup, part in zip(lookups, tf.split(inverse, sizes, num=len(lookups)), strict=True):
                    rows[lookup] = tf.gather(unique, part)
            batch = iter(flat[3 * n :])
            values = keras.tree.pack_sequence_as(data, [next(batch) if p else None for p in present])
            row_groups = [
                RowGroup(unique, inverse, sizes, [layers[i] for i in lookups], [rows[i] for i in lookups])
                for (_, lookups), unique, inverse, sizes in zip(
                    groups[:trained], flat, flat[n:], flat[2 * n :], strict=False
                )
            ]
            return body(model, Supply(layers, rows), row_groups, values)

        if self._eager:
            return function
        return tf.function(function, autograph=False).get_concrete_function(
            *(unique for unique, _ in groups),
            *(tf.TensorSpec([None], tf.int32) for _ in groups),
            *(tf.TensorSpec([len(lookups)], tf.int32) for _, lookups in groups),
            *self.specs,
        )


def _train(model: Any, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    """Updates the dense variables; returns (logs, learning rate, a gradient for each group)."""
    x, y, sample_weight = data
    rows, lookups = [group.rows for group in groups], [group.lookups for group in groups]
    with tf.GradientTape() as tape:
        tape.watch([rows, lookups])
        with feeding(supply):
            y_pred = _forward(model)(x)
        loss = _loss(model, groups, x, y, y_pred, sample_weight, training=True)
        _track(model, loss, x)
    variables = model.trainable_variables
    optimizer = model.optimizer
    # Rows are gathered for the lookups before the tape: only regularizers see them directly.
    dense, of_rows, of_lookups = tape.gradient(loss, [variables, rows, lookups])
    gradients: Sequence[Any] = [
        tf.concat([tf.zeros_like(r) if g is None else g for r, g in zip(*group, strict=True)], 0)
        for group in zip(lookups, of_lookups, strict=True)
    ]
    if needs_sums(optimizer, [layer for group in groups for layer in group.layers]):
        sums = [
            group.sum(g) if direct is None else group.sum(g) + direct
            for group, g, direct in zip(groups, gradients, of_rows, strict=True)
        ]
        dense, gradients = clip(optimizer, dense, groups, sums)
    if model._workers is not None:
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        zeros = [tf.zeros_like(v) if g is None else g for g, v in zip(dense, variables, strict=True)]
        dense, gradients = weighted_mean(model._workers, zeros, gradients, examples)
    # The rate of this step: applying the gradients moves the schedule on.
    rate = tf.cast(keras.ops.convert_to_tensor(optimizer.learning_rate), tf.float64)
    if variables:
        optimizer.apply_gradients(zip(dense, variables, strict=True))
    else:
        optimizer.iterations.assign_add(1)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight), rate, gradients


def _forward(model: Any) -> Any:
    """The model's call in training, and with it its gradients: compiled by XLA if wanted.

    Only the gathered rows of the lookups go in, whose shapes follow from the batch's. That of the unique rows
    differs from batch to batch, and XLA would compile each anew.
    """

    def call(x: Any) -> Any:
        return model(x, training=True)

    return tf.function(call, jit_compile=True, autograph=False) if model.xla else call


def _test(model: Any, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    x, y, sample_weight = data
    with feeding(supply):
        y_pred = model(x, training=False)
    _track(model, _loss(model, groups, x, y, y_pred, sample_weight, training=False), x)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _predict(model: Any, supply: Supply, _groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    with feeding(supply):
        return model(data[0], training=False)


def _loss(
    model: Any, groups: list[RowGroup], x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Keras's loss, and that of the tables' regularizers."""
    loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
    return tf.add_n([loss, *(tf.cast(term, loss.dtype) for term in regularization(groups))])


def _track(model: Any, loss: Any, x: Any) -> None:
    """Keras's running mean of the loss, which `fit` and `evaluate` report."""
    model._loss_tracker.update_state(loss, sample_weight=tf.shape(keras.tree.flatten(x)[0])[0])
