"""Optimizers that push the gradients of rows when they are applied, in a training loop of one's own.

`fit` needs none of this: its steps push by themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.gradients import each_row_once
from oe_runtime.keras.table_variable import TableVariable, without_tables
from oe_runtime.keras.translate import STOCK_CLASS, clip_tables, clips, stock_class, table_optimizer

_Pairs = list[tuple[Any, Any]]  # of gradients and variables


class UpdatesRows:
    """The methods of an optimizer that take tables among the variables; `update_rows` adds them.

    The library's own methods see the other variables only, so the optimizer has no slots for rows: those are
    on the servers.
    """

    _all_variables: Sequence[Any] = ()  # of `build`, with tables

    def build(self, variables: Any) -> None:
        """Build for the variables in the worker's memory."""
        if any(isinstance(one, TableVariable) for one in variables):
            self.__dict__["_all_variables"] = list(variables)  # the library would track an attribute
        super().build(without_tables(variables))  # type: ignore[misc]

    def apply_rows(self, pairs: _Pairs) -> _Pairs:
        """Push the gradients of tables among (gradient, variable) pairs; return the other pairs.

        Before the others, so that these stay as they were where the servers refuse the push.
        """
        rows = [pair for pair in pairs if isinstance(pair[1], TableVariable)]
        dense = [pair for pair in pairs if not isinstance(pair[1], TableVariable)]
        if not rows:
            return dense
        if accumulation_steps(self) > 1:
            raise ValueError(
                "gradient_accumulation_steps does not work in a loop of your own: sum the gradients of "
                "several tapes and apply the sum, or train with fit"
            )
        for _, variable in rows:
            self._check_rule(variable.layer.bound().spec)
        if missing := [variable.path for gradient, variable in rows if gradient is None]:
            if all(gradient is None for gradient, _ in pairs):
                raise ValueError(f"No gradients provided for any variable: {[v.name for _, v in pairs]}")
            warnings.warn(
                f"Gradients do not exist for variables {missing} when minimizing the loss.", stacklevel=4
            )
        slices = [(_as_slices(gradient, variable), variable) for gradient, variable in rows]
        if clips(self):
            slices, dense = self._clipped(slices, dense)
        rate = tf.cast(self._present_rate(), tf.float64)
        clients = list(dict.fromkeys(variable.layer.table.client for _, variable in slices))
        for client in clients:
            _push(client, rate, [(g, v.layer) for g, v in slices if v.layer.table.client is client])
        return dense

    def _check_rule(self, spec: Any) -> None:
        with tf.init_scope():  # tf-keras reads its learning rate for that
            rule = replace(spec, optimizer=self._table_rule()).optimizer
        if rule != spec.optimizer:
            raise ValueError(
                f"table '{spec.name}' was made for {_words(spec.optimizer)}, the optimizer of compile, but "
                f"its gradients are applied by {_words(rule)}: compile with that, or take the same optimizer "
                "with another learning rate"
            )

    def _clipped(self, slices: _Pairs, dense: _Pairs) -> tuple[_Pairs, _Pairs]:
        """Clip as Keras does, each row's gradients summed first, as `fit` does."""
        summed = [each_row_once(gradient) for gradient, _ in slices]
        present = [i for i, (gradient, _) in enumerate(dense) if gradient is not None]
        of_dense, values = clip_tables(self, [dense[i][0] for i in present], [one.values for one in summed])
        dense = list(dense)
        for i, gradient in zip(present, of_dense, strict=True):
            dense[i] = gradient, dense[i][1]
        return [
            (tf.IndexedSlices(value, one.indices), variable)
            for value, one, (_, variable) in zip(values, summed, slices, strict=True)
        ], dense

    def _table_rule(self) -> dict[str, Any]:
        """Return the rule of tables that are trained by this optimizer."""
        raise NotImplementedError

    def _present_rate(self) -> Any:
        """Return the learning rate of the next update."""
        raise NotImplementedError


class Keras3UpdatesRows(UpdatesRows):
    """The methods for optimizers of Keras 3."""

    _iterations: Any
    learning_rate: Any

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """See keras.optimizers.Optimizer; also pushes the gradients of rows among `grads`."""
        grads = list(grads)
        if trainable_variables is None and len(grads) == len(self._all_variables):
            trainable_variables = self._all_variables
        if trainable_variables is None:
            super().apply(grads)  # type: ignore[misc]
            return
        variables = list(trainable_variables)
        if not self.__dict__.get("_all_variables"):
            self.__dict__["_all_variables"] = variables
        dense = self.apply_rows(list(zip(grads, variables, strict=True)))
        if any(gradient is not None for gradient, _ in dense) or len(dense) == len(grads):
            super().apply(*(list(part) for part in zip(*dense, strict=True)) if dense else ([], []))  # type: ignore[misc]
        else:
            self._iterations.assign_add(1)

    def __reduce__(self) -> Any:
        """Pickle as Keras does, under the optimizer's own class; `compile` adds these methods again."""
        reduced: Any = super().__reduce__()
        unpickle, arguments = reduced
        return getattr(stock_class(self), unpickle.__name__), arguments

    def _table_rule(self) -> dict[str, Any]:
        return table_optimizer(self)

    def _present_rate(self) -> Any:
        return tf.convert_to_tensor(self.learning_rate)


def update_rows(optimizer: Any, methods: type[UpdatesRows] = Keras3UpdatesRows) -> None:
    """Add `methods` to an optimizer, unless it has them. Its class keeps its name, which files have."""
    kind = type(optimizer)
    if not isinstance(optimizer, UpdatesRows):
        attributes = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        optimizer.__class__ = type(kind.__name__, (methods, kind), {**attributes, STOCK_CLASS: kind})


def _words(rule: dict[str, Any]) -> str:
    return f"{rule['name']}({', '.join(f'{key}={value}' for key, value in rule.items() if key != 'name')})"


def _as_slices(gradient: Any, variable: TableVariable) -> tf.IndexedSlices:
    """Return the gradient of a table as slices of float rows and int64 keys.

    Of a dense one, the rows that are not zero. None becomes no rows: the table then counts the update, as
    optimizers of Keras do.
    """
    layer = variable.layer
    dtype, dim = layer.rows_dtype, layer.output_dim
    if gradient is None:
        return tf.IndexedSlices(tf.zeros((0, dim), dtype), tf.zeros((0,), tf.int64))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), tf.cast(gradient.indices, tf.int64))
    gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
    if not gradient.shape.is_compatible_with(variable.shape):
        raise ValueError(
            f"the gradient of the rows of '{layer.name}' has shape {gradient.shape}: it must be the "
            f"tf.IndexedSlices of tape.gradient, with values as changed, or dense of shape {variable.shape}"
        )
    keys = tf.where(tf.reduce_any(gradient != 0, 1))[:, 0]
    return tf.IndexedSlices(tf.gather(gradient, keys), keys)


def _push(client: Any, rate: Any, gradients: Sequence[tuple[tf.IndexedSlices, Any]]) -> None:
    """Push gradients of layers' tables on one client, now or when the graph runs."""
    tables = [(layer.table.number, i) for i, (_, layer) in enumerate(gradients)]

    def push(rate: Any, *arrays: Any) -> None:
        pulled = client.plan(arrays[: len(tables)], tables)
        values = arrays[len(tables) :]
        parts = [np.concatenate([values[i] for i in group.lookups]) for group in pulled.groups]
        client.push(pulled, parts, float(rate))

    keys, values = zip(*((one.indices, one.values) for one, _ in gradients), strict=True)
    if tf.executing_eagerly():
        push(*(one.numpy() for one in (rate, *keys, *values)))
    else:
        tf.numpy_function(push, [rate, *keys, *values], [])
