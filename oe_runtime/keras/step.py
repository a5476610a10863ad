"""One batch: ids, pull, one compiled function, push."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.arrays import not_dense_error, to_numpy, to_tensor
from oe_runtime.keras.dense import build_optimizer, is_built
from oe_runtime.keras.feed import NanCauses, skeleton
from oe_runtime.keras.program import Prepared, StepFunction
from oe_runtime.keras.served import Served
from oe_runtime.keras.step_bodies import PREDICT, TEST, TRAIN, Body
from oe_runtime.keras.workers import broadcast_weights

_NOT_DENSE = (tf.RaggedTensor, tf.SparseTensor)


class Steps:
    """Runs the batches of one compiled model.

    For each structure of the data there is one plan of lookups, and one compiled function each for training,
    testing and predicting. Their batch size is free, so that the last, smaller batch needs no new ones.
    """

    def __init__(self, served: Served, *, eager: bool) -> None:
        self._served = served
        self._model = served.model
        self._client = served.client
        self._eager = eager
        self._programs: dict[Any, StepFunction] = {}
        self._begun = False
        self._causes = NanCauses()
        self.examples = 0  # of the last training step

    def measure_losses(self) -> Any:
        """Let training steps sum their losses; return the variable: sum over the examples, their number."""
        if self._served.losses is None:
            self._served.losses = tf.Variable(np.zeros(2), trainable=False)
            self._programs.clear()  # compiled without it
        return self._served.losses

    @property
    def alone(self) -> bool:
        """Whether no other worker trains the same tables."""
        return self._served.workers is None

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for (x, …)."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        prepared = self.prepare(PREDICT, (x, None, None))
        self._client.settle()
        self.refresh(prepared)
        return self.finish(prepared)

    def test(self, data: Any) -> Any:
        """Return the logs of a test of (x, y, …)."""
        prepared = self.prepare(TEST, data)
        self._client.settle()
        self.refresh(prepared)
        return self.finish(prepared)

    def prepare(self, body: Body, data: Any) -> Prepared:
        """Prepare a batch up to the request for its rows."""
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
            program = StepFunction(self._served, body, data, present, specs, eager=self._eager)
            self._programs[key] = program
        return self._plan(program, tensors)

    def plan_ahead(self, body: Body, data: Any) -> Prepared | None:
        """Prepare a batch without its rows, in another thread than the one that computes.

        Returns None for data of a new structure.
        """
        tensors, key, _ = self._tensors(body, data)
        program = self._programs.get(key)
        if program is None or not program.accepts([tuple(t.shape) for t in tensors]):
            return None
        return self._plan(program, tensors)

    def read_ahead(self, prepared: Prepared) -> None:
        """Let the servers read the rows of a batch from their drives that is going to be pulled."""
        self._client.read_ahead(*prepared.pulls)

    def prepare_ahead(
        self, body: Body, data: Any, before: Prepared | None, planned: Prepared | None
    ) -> Prepared | None:
        """Prepare a batch with its present rows, in another thread than the one that computes.

        `before` is the batch whose push these rows will lack, `planned` the result of `plan_ahead`, if there
        is one. With several workers nothing is pulled: the servers hold a pull back until all have pushed.
        Returns None for data of a new structure.
        """
        prepared = planned
        if prepared is None or prepared.connection != self._client.connection:
            prepared = self.plan_ahead(body, data)
        if prepared is not None and self.alone:
            for pulled in prepared.pulls:
                self._client.refresh(pulled)
                if before is not None and before.program.trains:
                    self._client.follow(pulled, before.pulls[0])
        return prepared

    def _plan(self, program: StepFunction, tensors: list[Any]) -> Prepared:
        connection = self._client.connection
        ids = program.ids(tensors)
        pulls = program.plan(self._client, ids)
        return Prepared(program, tensors, ids, pulls, program.pairs(self._client, pulls), connection)

    def refresh(self, prepared: Prepared, staleness: int = 0) -> None:
        """Bring the rows of a batch up to date, except for `staleness` pushes."""
        for pulled in prepared.pulls:
            self._client.refresh(pulled, staleness=staleness)

    def finish(self, prepared: Prepared, thread: Executor | None = None) -> Any:
        """Compute, and push the gradients of training, in `thread` if there is one.

        Returns Keras's logs, or the model's outputs.
        """
        program = prepared.program
        result = program.run(prepared)
        if program.body is not TRAIN:
            return result
        logs, rate, *gradients = result
        self.examples = int(prepared.tensors[0].shape[0])
        cause = self._causes.begin_step(partial(program.padding_cause, prepared.ids, self.examples))
        if gradients[0] and not self._served.ends_with(logs):
            of_ids, of_rows = ([None if g is None else to_numpy(g) for g in part] for part in gradients)
            push = self._client.push if thread is None else partial(self._client.push_later, thread)
            if accumulation_steps(self._model.optimizer) == 1:
                push(prepared.pulls[0], of_ids, float(rate), of_rows=of_rows, cause=cause)
            else:
                ids = program.trained_ids(prepared.ids)
                for group, *parts in zip(prepared.pulls[0].groups, of_ids, of_rows, strict=True):
                    self._served.accumulated.add_group(group, ids, *parts)
                push = partial(push, learning_rate=float(rate), cause=cause)
                self._served.push_accumulated(self._model.optimizer._iterations, push)
        return logs

    def build(self, data: Any) -> None:
        """Let a model without a graph make its weights, from a batch (x, …)."""
        tensors, _, _ = self._tensors(PREDICT, data)
        self._build(keras.utils.unpack_x_y_sample_weight(data)[0], tensors)

    def _build(self, x: Any, tensors: Sequence[Any]) -> None:
        """Call a model without a graph once; one that is built while traced would be called twice."""
        if not is_built(self._model):
            flat = [t[:1] for t in tensors[: len(keras.tree.flatten(x))]]
            self._model(keras.tree.pack_sequence_as(x, flat), training=False)
        self._served.finish_loading()

    def _begin(self) -> None:
        """Prepare the first training step."""
        model, workers = self._model, self._served.workers
        build_optimizer(model)
        if workers is not None:
            broadcast_weights(workers, [*model.variables, *model.optimizer.variables])
        self._served.warn_of_large_weights()
        self._begun = True

    def _tensors(self, body: Body, data: Any) -> tuple[list[Any], Any, tuple[bool, ...]]:
        """Return the data as flat tensors, the key of their program, and which leaves are present."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        leaves = [None if isinstance(v, tf.experimental.Optional) else v for v in keras.tree.flatten(data)]
        if any(isinstance(v, _NOT_DENSE) for v in leaves):
            raise _not_dense(data, leaves)
        tensors = [to_tensor(v) for v in leaves if v is not None]
        present = tuple(v is not None for v in leaves)
        key = (body, skeleton(data), present, tuple((t.dtype, len(t.shape)) for t in tensors))
        return tensors, key, present


def _not_dense(data: Any, leaves: Sequence[Any]) -> ValueError:
    value = next(v for v in leaves if isinstance(v, _NOT_DENSE))
    x, _, _ = data
    inputs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    names = [f"input {name!r}" for name, one in inputs if one is value]
    return not_dense_error(f"{names[0] if names else 'the input' if value is x else 'a label'} is", value)
