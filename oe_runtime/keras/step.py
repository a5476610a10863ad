"""One batch: ids, pull, one compiled function, push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.client import Client, Pairs, Pulled
from oe_runtime.keras import by_row
from oe_runtime.keras.arrays import to_numpy, to_tensor
from oe_runtime.keras.dense import build_optimizer
from oe_runtime.keras.feed import feeding, skeleton
from oe_runtime.keras.gradients import RowGroup, clip, each_row_once, regularization
from oe_runtime.keras.micro_batches import Gradients, accumulated
from oe_runtime.keras.plan import Plan
from oe_runtime.keras.supply import Supply
from oe_runtime.keras.translate import needs_sums
from oe_runtime.keras.workers import begin_alike, weighted_mean

# What is compiled, one of TRAIN, TEST and PREDICT: (model, the rows of all lookups, those of trained tables
# by groups of one dim, (x, y, sample_weight)) → outputs.
Body = Callable[[Any, Supply, list[RowGroup], tuple[Any, Any, Any]], Any]


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
        self._begun = False

    @property
    def alone(self) -> bool:
        """Whether no other worker trains the same tables."""
        return self._model._workers is None

    def predict(self, data: Any) -> Any:
        """The model's outputs for (x, …)."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        prepared = self.prepare(PREDICT, (x, None, None))
        self._client.settle()
        self.refresh(prepared)
        return self.finish(prepared)

    def prepare(self, body: Body, data: Any) -> Prepared:
        """What there is to do for a batch before its rows are asked for."""
        tensors, key, present = self._tensors(body, data)
        program = self._programs.get(key)
        shapes = [tuple(t.shape) for t in tensors]
        if program is None or not program.accepts(shapes):
            specs = [
                tf.TensorSpec([None, *s[1:]] if s else [], t.dtype)
                for t, s in zip(tensors, shapes, strict=True)
            ]
            if program is not None:  # lengths differ from batch to batch: free them too
                specs = [
                    a.most_specific_common_supertype([b]) for a, b in zip(specs, program.specs, strict=True)
                ]
            data = keras.utils.unpack_x_y_sample_weight(data)
            self._build(data[0], tensors)
            if body is TRAIN and not self._begun:
                self._begin()
            program = _Program(self._model, body, data, present, specs, eager=self._eager)
            self._programs[key] = program
        return self._plan(program, tensors)

    def prepare_ahead(self, body: Body, data: Any, before: Prepared | None) -> Prepared | None:
        """The same with the rows, as they are now, in another thread than the one that computes.

        `before` is the batch whose push they are going to lack. With several workers nothing is pulled: the
        servers hold a pull back until all have pushed. None when data of this structure were not seen before.
        """
        tensors, key, _ = self._tensors(body, data)
        program = self._programs.get(key)
        if program is None or not program.accepts([tuple(t.shape) for t in tensors]):
            return None
        prepared = self._plan(program, tensors)
        if self.alone:
            for pulled in prepared.pulls:
                self._client.refresh(pulled)
                if before is not None and before.program.trains:
                    self._client.follow(pulled, before.pulls[0])
        return prepared

    def _plan(self, program: _Program, tensors: list[Any]) -> Prepared:
        connection = self._client.connection
        pulls = program.plan(self._client, tensors)
        return Prepared(program, tensors, pulls, program.pairs(self._client, pulls), connection)

    def refresh(self, prepared: Prepared, staleness: int = 0) -> None:
        """Brings the rows of a batch up to date, but for that many pushes."""
        for pulled in prepared.pulls:
            self._client.refresh(pulled, staleness=staleness)

    def finish(self, prepared: Prepared, thread: ThreadPoolExecutor | None = None) -> Any:
        """Computes, and pushes what training gives, in `thread` if there is one.

        Returns Keras's logs, or the model's outputs.
        """
        program = prepared.program
        result = program.run(prepared)
        if program.body is not TRAIN:
            return result
        logs, rate, *gradients = result
        if gradients[0]:
            of_ids, of_rows = ([None if g is None else to_numpy(g) for g in part] for part in gradients)
            push = self._client.push if thread is None else partial(self._client.push_later, thread)
            push(prepared.pulls[0], of_ids, float(rate), of_rows=of_rows)
        return logs

    def _build(self, x: Any, tensors: Sequence[Any]) -> None:
        """Calls a model without a graph once: one that is built while it is traced is called twice then."""
        if all(layer.built for layer in self._model._flatten_layers()):
            return
        flat = [t[:1] for t in tensors[: len(keras.tree.flatten(x))]]
        self._model(keras.tree.pack_sequence_as(x, flat), training=False)

    def _begin(self) -> None:
        """Before the first training step."""
        model = self._model
        build_optimizer(model)
        if model._workers is not None:
            begin_alike(model._workers, [*model.variables, *model.optimizer.variables])
        self._begun = True

    def _tensors(self, body: Body, data: Any) -> tuple[list[Any], Any, tuple[bool, ...]]:
        """The data as flat tensors, the key of the program for them, and which leaves are there."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        leaves = [None if isinstance(v, tf.experimental.Optional) else v for v in keras.tree.flatten(data)]
        tensors = [to_tensor(v) for v in leaves if v is not None]
        present = tuple(v is not None for v in leaves)
        key = (body, skeleton(data), present, tuple((t.dtype, len(t.shape)) for t in tensors))
        return tensors, key, present


@dataclass(frozen=True)
class Prepared:
    """A batch that is ready to compute once its rows are there."""

    program: _Program
    tensors: list[Any]
    pulls: list[Pulled]
    pairs: list[
        list[Any]
    ]  # of each group, the tensors of its Pairs: empty ones where there is no use of them
    connection: int  # the client's, over which the pulls were made


class _Program:
    """The plan and the compiled function for data of one structure."""

    def __init__(
        self,
        model: Any,
        body: Body,
        data: Any,
        present: Sequence[bool],
        specs: Sequence[Any],
        *,
        eager: bool,
    ) -> None:
        self.specs = specs
        self._lengths = [tuple(spec.shape)[1:] for spec in specs]
        self._model = model
        self.body = body
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
        frozen = [i for i in lookups if not self._plan.layers[i].trainable]
        self._pulls = [pulled for pulled in (self._trained, frozen) if pulled]
        self._tables = [
            [(self._plan.layers[i].table.number, self._plan.sources[i]) for i in pulled]
            for pulled in self._pulls
        ]
        self._function: Any = None
        self._sizes: tuple[list[list[int]], list[Any]] = ([], [])
        self._paired: set[int] | None = None  # the groups whose pairs the function uses, once it is known

    def accepts(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes fit the compiled function."""
        return all(
            shape[1:] == lengths or all(b in (a, None) for a, b in zip(shape[1:], lengths, strict=True))
            for shape, lengths in zip(shapes, self._lengths, strict=True)
        )

    @property
    def trains(self) -> bool:
        """Whether the first of the pulls is pushed."""
        return self.body is TRAIN and bool(self._trained)

    def plan(self, client: Client, tensors: Sequence[Any]) -> list[Pulled]:
        """The pulls of all lookups: of trained tables first, if there are any, then of frozen ones."""
        if not self._pulls:
            return []
        ids = self._plan.ids(tensors[: self._inputs])
        return [client.plan(ids, tables) for tables in self._tables]

    def pairs(self, client: Client, pulls: Sequence[Pulled]) -> list[list[Any]]:
        """The pairs of all groups that need them (`by_row`)."""
        groups = [group for pulled in pulls for group in pulled.groups]
        if self._paired is None:
            model = self._model
            possible = not self._eager and not model.xla and model._micro_batches == 1
            wanted = {g for g, group in enumerate(groups) if possible and by_row.wants_pairs(model, group)}
        else:
            wanted = self._paired
        return [
            [tf.constant(part) for part in client.pairs(group)] if g in wanted else _no_pairs()
            for g, group in enumerate(groups)
        ]

    def run(self, prepared: Prepared) -> Any:
        """Runs the compiled function on pulled rows and the batch."""
        groups = [group for pulled in prepared.pulls for group in pulled.groups]
        if self._function is None:
            self._function = self._compile(prepared)
        rows = [to_tensor(group.rows) for group in groups]
        inverses = [to_tensor(group.inverse) for group in groups]
        sizes = [group.sizes for group in groups]
        if self._sizes[0] != sizes:  # seldom: at the last, smaller batch
            self._sizes = (sizes, [tf.constant(part, tf.int32) for part in sizes])
        pairs = [part for parts in prepared.pairs for part in parts]
        return self._function(*rows, *inverses, *self._sizes[1], *pairs, *prepared.tensors)

    def _compile(self, prepared: Prepared) -> Any:
        pulls = prepared.pulls
        model, body, layers, data, present = (
            self._model,
            self.body,
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
        n, m = len(groups), len(Pairs._fields)
        whole = model._micro_batches == 1
        parts = [part for pulled in pulls for part in pulled.groups]
        even = [g for g, part in enumerate(parts) if whole and _even(part.sizes)]
        paired = [g for g, parts in enumerate(prepared.pairs) if int(tf.size(parts[1]))]
        trained = len(pulls[0].groups) if self._trained else 0

        def function(*flat: Any) -> Any:
            rows: list[Any] = [None] * len(layers)
            for (_, lookups), unique, inverse, sizes in zip(
                groups, flat[:n], flat[n : 2 * n], flat[2 * n : 3 * n], strict=True
            ):
                # The positions are split, not the gathered rows: those would be copied once more.
                for lookup, part in zip(lookups, tf.split(inverse, sizes, num=len(lookups)), strict=True):
                    rows[lookup] = tf.gather(unique, part)
            every_pair = [Pairs(*flat[k : k + m]) for k in range(3 * n, (3 + m) * n, m)]
            batch = iter(flat[(3 + m) * n :])
            values = keras.tree.pack_sequence_as(data, [next(batch) if p else None for p in present])
            row_groups = []
            for k, (_, lookups) in enumerate(groups):
                unique, inverse, sizes = flat[k], flat[n + k], flat[2 * n + k]
                together = _together(unique, inverse, len(lookups)) if k in even else None
                of_group = [layers[i] for i in lookups], [rows[i] for i in lookups]
                row_groups.append(RowGroup(unique, inverse, sizes, *of_group, together))
            products = by_row.Products(
                {g: by_row.PairedGroup(row_groups[g], every_pair[g], groups[g][1]) for g in paired}
            )
            together = {tuple(groups[k][1]): row_groups[k].together for k in even}
            supply = Supply(layers, rows, together, products)
            result = body(model, supply, row_groups[:trained], values)
            self._paired = products.used
            return result

        if self._eager:
            return function
        return tf.function(function, autograph=False).get_concrete_function(
            *(unique for unique, _ in groups),
            *(tf.TensorSpec([None], tf.int32) for _ in groups),
            *(tf.TensorSpec([len(lookups)], tf.int32) for _, lookups in groups),
            *(tf.TensorSpec([None], tf.int32) for _ in range(m * n)),
            *self.specs,
        )


def _even(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) == 1 and len(sizes) > 1


def _together(rows: Any, inverse: Any, lookups: int) -> Any:
    """(examples, lookups, dim) of as many ids each."""
    # Not tf.transpose: of int32, oneDNN complains about it on stderr where there is no AVX-512.
    by_example = tf.stack(tf.split(inverse, lookups), axis=1)
    whole = tf.gather(rows, by_example)
    whole.set_shape((None, lookups, rows.shape[1]))
    return whole


def _no_pairs() -> list[Any]:
    return [tf.constant([], tf.int32)] * len(Pairs._fields)


def _gradients(
    model: Any, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any], share: Any = None
) -> Gradients:
    """Forward and backward, with the gradients times `share`."""
    x, y, sample_weight = data
    rows, lookups = [group.rows for group in groups], [group.lookups for group in groups]
    together = [() if group.together is None else (group.together,) for group in groups]
    with tf.GradientTape() as tape:
        tape.watch([rows, lookups, together])
        with feeding(supply):
            y_pred = _forward(model)(x)
        loss = model._batch_loss(regularization(groups), x, y, y_pred, sample_weight, training=True)
    # Lookups are gathered before the tape: of the rows there is what regularizers and `by_row` see directly.
    sources = [model.trainable_variables, rows, lookups, together]
    return Gradients(y_pred, *tape.gradient(loss, sources, output_gradients=share))


def _train(model: Any, supply: Supply, groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    """Updates the dense variables; returns (logs, learning rate, gradients of ids, gradients of rows).

    There is one of each for every group, or None where there is the other.
    """
    x, y, sample_weight = data
    count = model._micro_batches
    backward = _gradients if count == 1 else partial(accumulated, _gradients, count)
    y_pred, dense, direct_gradients, of_lookups, of_together = backward(model, supply, groups, data)
    dense = [each_row_once(gradient) for gradient in dense]
    rows = [group.rows for group in groups]
    variables = model.trainable_variables
    optimizer = model.optimizer
    of_ids = [
        group.of_ids(parts, next(iter(whole), None))
        for group, parts, whole in zip(groups, of_lookups, of_together, strict=True)
    ]
    of_rows: Sequence[Any] = [  # something for each group
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
    if model._workers is not None:
        examples = tf.shape(keras.tree.flatten(x)[0])[0]
        zeros = [tf.zeros_like(v) if g is None else g for g, v in zip(dense, variables, strict=True)]
        there = [g for g in (*of_ids, *of_rows) if g is not None]
        dense, weighted = weighted_mean(model._workers, zeros, there, examples)
        shares = iter(weighted)
        of_ids, of_rows = ([None if g is None else next(shares) for g in part] for part in (of_ids, of_rows))
    # The rate of this step: applying the gradients moves the schedule on.
    rate = tf.cast(model._learning_rate_now(), tf.float64)
    if variables:
        optimizer.apply_gradients(zip(dense, variables, strict=True))
    else:
        optimizer.iterations.assign_add(1)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight), rate, of_ids, of_rows


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
    model._batch_loss(regularization(groups), x, y, y_pred, sample_weight, training=False)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _predict(model: Any, supply: Supply, _groups: list[RowGroup], data: tuple[Any, Any, Any]) -> Any:
    with feeding(supply):
        return model(data[0], training=False)


TRAIN: Body = _train
TEST: Body = _test
PREDICT: Body = _predict
