"""Keras on JAX: a step is one function of the model's state, the rows and the batch, compiled by XLA.

XLA compiles it once per batch size, as it does Keras's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax import numpy as jnp
from keras.src.backend.common.stateless_scope import get_stateless_scope  # it has no public name
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.keras.backends import one_by_one
from oe_runtime.keras.backends.one_by_one import Collect, Layout, PulledRows, Supply
from oe_runtime.keras.feed import (
    NanCauses,
    dependent_ids_error,
    feeding,
    padding_cause,
    skeleton,
    to_keys,
)
from oe_runtime.keras.served import Served

_INT32 = 2**31

all_rows, update_rows = one_by_one.all_rows, one_by_one.update_rows


def check(*, several_workers: bool, staleness: int, micro_batches: int) -> None:
    """See Backend."""
    one_by_one.check("jax", several_workers=several_workers, staleness=staleness, micro_batches=micro_batches)


def adapt(model: Any) -> None:
    """See Backend: nothing to replace."""
    del model


def check_compile(served: Served, *, jit_compile: Any) -> Any:
    """See Backend. JAX truncates 64-bit numbers to 32 bits by default."""
    if jax.config.jax_enable_x64:
        return jit_compile
    for layer in served.layers.values():
        why = (
            "takes any 64-bit id"
            if layer.input_dim == -1
            else f"has {layer.input_dim} rows"
            if layer.input_dim > _INT32
            else "has float64 rows"
            if layer.rows_dtype == "float64"
            else ""
        )
        if why:
            raise ValueError(
                f"Embedding '{layer.name}' {why}, but JAX truncates numbers to 32 bits: start Python with "
                "JAX_ENABLE_X64=1, or call jax.config.update('jax_enable_x64', True) first"
            )
    return jit_compile


def steps(served: Served, *, eager: bool) -> Steps:
    """See Backend."""
    return Steps(served.model, served.client, compiled=not eager and bool(served.model.jit_compile))


class _Layout(NamedTuple):
    """The common properties of all batches of one shape: an argument that XLA compiles for."""

    layers: tuple[Any, ...]
    lookups: Layout
    trained: int
    tables: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class _Lookups:
    """The lookups of a model for inputs of one structure and shape."""

    def __init__(self, model: Any, state: Sequence[Any], x: Any) -> None:
        self._model = model
        flat = keras.tree.flatten(x)
        collect = Collect()
        self.direct: list[int | None] = []  # of each lookup, the input that its ids are

        def trace(state: Any, *inputs: Any) -> None:
            with feeding(collect):
                _call(model, state, keras.tree.pack_sequence_as(x, list(inputs)))
            numbers = {id(tensor): i for i, tensor in enumerate(inputs)}
            self.direct = [numbers.get(id(ids)) for ids in collect.ids]
            collect.ids.clear()

        jax.eval_shape(trace, state, *flat)
        self.layers = collect.layers
        self._computed = [i for i, direct in enumerate(self.direct) if direct is None]
        # XLA leaves out what does not lead to ids.
        self._compute = jax.jit(self._trace)
        self._unknown = bool(self._computed)  # whether the ids depend on the rows

    def _trace(self, state: Any, x: Any, rows: Any) -> list[Any]:
        feed = Collect() if rows is None else Supply(self.layers, rows)
        with feeding(feed):
            _call(self._model, state, x)
        return [feed.ids[i] for i in self._computed]

    def ids(self, state: Any, x: Any) -> tuple[list[NDArray[np.int64]], list[int]]:
        """Return the distinct ids of a batch, and the index of each lookup's ids among them."""
        flat = keras.tree.flatten(x)
        computed = iter(self._compute(state, x, None) if self._computed else ())
        numbers: dict[int, int] = {}
        ids: list[NDArray[np.int64]] = []
        sources: list[int] = []
        for lookup, direct in enumerate(self.direct):
            key = -1 - lookup if direct is None else direct
            if key not in numbers:
                numbers[key] = len(ids)
                ids.append(
                    to_keys(
                        np.asarray(next(computed) if direct is None else flat[direct]),
                        self.layers[lookup].name,
                    )
                )
            sources.append(numbers[key])
        return ids, sources

    def check(self, state: Any, x: Any, rows: PulledRows) -> None:
        """Raise ValueError, at the first batch, when computed ids depend on the rows."""
        if not self._unknown:
            return
        self._unknown = False
        parts = one_by_one.split_by_lookup(rows.layout, rows.arrays, len(self.layers))
        without, with_rows = self._compute(state, x, None), self._compute(state, x, parts)
        for lookup, a, b in zip(self._computed, without, with_rows, strict=True):
            if not np.array_equal(a, b):
                raise dependent_ids_error(self.layers[lookup].name)


def _call(model: Any, state: Sequence[Any], x: Any) -> Any:
    """Return the model's outputs; `state` begins with its trainable and its other variables."""
    return _call_and_update(model, state, x)[0]


def _call_and_update(model: Any, state: Sequence[Any], x: Any) -> tuple[Any, Any]:
    """Return the model's outputs and its other variables."""
    options = {"training": False} if model._call_has_training_arg else {}
    outputs, others = model.stateless_call(state[0], state[1], x, **options)
    return outputs, others


class Steps:
    """The steps of one compiled model."""

    def __init__(self, model: Any, client: Client, *, compiled: bool) -> None:
        self._model = model
        self._client = client
        self._causes = NanCauses()
        self._lookups: dict[Any, _Lookups] = {}

        def function(step: Any) -> Any:
            # The state is not donated: if the servers refuse a push, the model stays unchanged.
            step = partial(step, model)
            return jax.jit(step, static_argnums=1) if compiled else step

        self._train, self._test, self._predict = function(_train), function(_test), function(_predict)

    def announce(self, data: Any, after: Any) -> None:
        """Ignored: nothing is prefetched."""

    def train_function(self) -> Callable[[Any, Iterator[Any]], Any]:
        """Return a function of a state and an iterator over batches: the logs and the new state."""

        def step(state: Any, data: Any) -> Any:
            data, rows, layout = self._pull(state, data)
            numbers = [table.numbers for table in rows.tables]
            logs, state, rate, gradients = self._train(state, layout, rows.arrays, rows.once, numbers, data)
            variables = zip(self._model.optimizer.variables, state[2], strict=True)
            iterations = next(new for old, new in variables if old is self._model.optimizer._iterations)
            examples = int(np.shape(keras.tree.flatten(data[0])[0])[0])
            cause = self._causes.begin_step(partial(padding_cause, rows.layers, rows.ids, examples))
            if not self._model.served.ends_with(logs):
                parts = [np.asarray(g) for g in gradients]
                one_by_one.push(self._model.served, rows, parts, float(rate), iterations, cause)
            return logs, state

        return self._over_batches(step, lambda logs: logs[-1])

    def test_function(self) -> Callable[[Any, Iterator[Any]], Any]:
        """Return a function as train_function does."""

        def step(state: Any, data: Any) -> Any:
            data, rows, layout = self._pull(state, data)
            return self._test(state, layout, rows.arrays, rows.once, data)

        return self._over_batches(step, lambda logs: logs[-1])

    def predict_function(self) -> Callable[[Any, Iterator[Any]], Any]:
        """Return a function as train_function does, with the outputs of all its batches."""

        def step(state: Any, data: Any) -> Any:
            data, rows, layout = self._pull(state, data)
            return self._predict(state, layout, rows.arrays, data)

        def join(outputs: list[Any]) -> Any:
            return keras.tree.map_structure(lambda *parts: jnp.concatenate(parts), *outputs)

        return self._over_batches(step, join)

    def _over_batches(self, step: Any, join: Any) -> Callable[[Any, Iterator[Any]], Any]:
        def function(state: Any, iterator: Iterator[Any]) -> Any:
            results = []
            for number in range(self._model.steps_per_execution):
                try:
                    data = next(iterator)
                except StopIteration:
                    if number == 0:
                        raise
                    break
                try:
                    result, state = step(state, data)
                except Exception:
                    self._put_back(state)
                    raise
                results.append(result)
            return join(results), state

        return function

    def _put_back(self, state: Any) -> None:
        """Give the model the state before a failed step, which Keras took out of its variables."""
        names = ["trainable_variables", "non_trainable_variables", "metrics_variables"][: len(state)]
        if len(state) == 4:
            names.insert(2, "optimizer_variables")
        self._model._jax_state = dict(zip(names, state, strict=True))
        self._model._jax_state_synced = False
        self._model.jax_state_sync()

    def _pull(self, state: Any, data: Any) -> tuple[Any, PulledRows, _Layout]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        flat = one_by_one.all_inputs(x)
        key = (skeleton(x), tuple((np.shape(v), v.dtype) for v in flat))
        lookups = self._lookups.get(key)
        if lookups is None:
            lookups = self._lookups[key] = _Lookups(self._model, state, x)
        ids, sources = lookups.ids(state, x)
        rows = one_by_one.pull(
            self._client, getattr(self._model, "optimizer", None), lookups.layers, ids, sources
        )
        lookups.check(state, x, rows)
        tables = tuple((table.group, table.slices) for table in rows.tables)
        layout = _Layout(tuple(rows.layers), rows.layout, rows.trained, tables)
        return (x, y, sample_weight), rows, layout


def _train(
    model: Any, state: Any, layout: _Layout, rows: Any, once: Any, numbers: Any, data: Any
) -> tuple[Any, Any, Any, Any]:
    """Return (logs, the new state, the learning rate, gradients for `one_by_one.push`)."""
    trainable, _, optimizer_variables, metrics = state
    optimizer, n = model.optimizer, layout.trained

    def loss_of(trainable: Any, trained_rows: Any) -> Any:
        groups = [*trained_rows, *rows[n:]]
        changed = (trainable, *state[1:])
        return _loss(model, changed, metrics, layout, groups, once, data, training=True)

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (loss, (y_pred, others, metrics)), (dense, gradients) = differentiate(trainable, rows[:n])
    dense, gradients = one_by_one.clip(optimizer, dense, gradients, layout.tables, numbers)
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables, strict=True))):
        # The rate of this step: applying the gradients moves the schedule on.
        rate = jnp.asarray(optimizer.learning_rate)
    if trainable:
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, dense, trainable)
    else:
        optimizer_variables = [
            value + 1 if variable is optimizer._iterations else value
            for variable, value in zip(optimizer.variables, optimizer_variables, strict=True)
        ]
    logs, metrics = _logs(model, metrics, loss, y_pred, data)
    return logs, (trainable, others, optimizer_variables, metrics), rate, gradients


def _test(model: Any, state: Any, layout: _Layout, rows: Any, once: Any, data: Any) -> tuple[Any, Any]:
    """Return (logs, the new state)."""
    trainable, _, metrics = state
    loss, (y_pred, others, metrics) = _loss(model, state, metrics, layout, rows, once, data, training=False)
    logs, metrics = _logs(model, metrics, loss, y_pred, data)
    return logs, (trainable, others, metrics)


def _predict(model: Any, state: Any, layout: _Layout, rows: Any, data: Any) -> tuple[Any, Any]:
    """Return (outputs, the new state)."""
    with feeding(_supply(layout, rows)):
        outputs, others = _call_and_update(model, state, data[0])
    return outputs, (state[0], others)


def _loss(
    model: Any, state: Any, metrics: Any, layout: _Layout, rows: Any, once: Any, data: Any, *, training: bool
) -> Any:
    """Return Keras's loss plus that of the tables' regularizers, and (outputs, other variables, metrics)."""
    x, y, sample_weight = data
    with feeding(_supply(layout, rows)):
        loss, (_, y_pred, others, metrics) = model.compute_loss_and_updates(
            *state[:2],
            metrics,
            x,
            y,
            sample_weight,
            training=training,
            optimizer_variables=state[2] if training else None,
        )
    loss = loss + one_by_one.regularization(layout.layers, layout.lookups, rows[: layout.trained], once)
    return loss, (y_pred, others, metrics)


def _supply(layout: _Layout, rows: Any) -> Supply:
    return Supply(layout.layers, one_by_one.split_by_lookup(layout.lookups, rows, len(layout.layers)))


def _logs(model: Any, metrics: Any, loss: Any, y_pred: Any, data: Any) -> Any:
    x, y, sample_weight = data
    return model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)


def integer_ids(ids: Any, layer: str) -> Any:
    """See Backend."""
    del layer
    ids = keras.ops.convert_to_tensor(ids)
    if ids.dtype == jnp.uint64:
        return jax.lax.bitcast_convert_type(ids, jnp.int64)
    return ids.astype(int) if ids.dtype == bool else ids


def is_traced(values: Sequence[Any]) -> bool:
    """See Backend."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def pull(layer: Any, ids: Any) -> Any:
    """See Backend."""
    table = layer.table
    if isinstance(ids, jax.core.Tracer):
        shape = jax.ShapeDtypeStruct((*ids.shape, table.spec.dim), layer.rows_dtype)
        rows = jax.pure_callback(
            lambda keys: table.rows(np.asarray(keys)), shape, ids, vmap_method="expand_dims"
        )
    else:
        rows = jnp.asarray(table.rows(np.asarray(ids)))
    return _refuse_gradients(layer.name, rows) if layer.trainable else rows


def _refuse_gradients(layer: str, rows: Any) -> Any:
    """Return `rows` with an error where the weights of a stateless call are differentiated."""
    scope = get_stateless_scope()
    values = [] if scope is None else list(scope.state_mapping.values())
    weights = [v for v in values if jnp.issubdtype(jnp.result_type(v), jnp.inexact)]
    if not any(isinstance(v, jax.core.Tracer) for v in weights):
        return rows

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def refusing(rows: Any, _weights: Any) -> Any:
        return rows

    @refusing.defjvp  # type: ignore[untyped-decorator]
    def _(_primals: Any, _tangents: Any) -> Any:
        raise RuntimeError(
            f"Embedding '{layer}' is called while JAX differentiates the model outside of fit and "
            "train_on_batch, which alone train rows on parameter servers: train with those"
        )

    return refusing(rows, weights)
