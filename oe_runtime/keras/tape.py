"""Custom training loops on TensorFlow: a GradientTape that also has the gradients of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from oe_runtime.keras import feed
from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.backends import tensorflow as backend
from oe_runtime.keras.feed import feeding, to_keys
from oe_runtime.keras.supply import Plain
from oe_runtime.keras.table_variable import TableVariable, table_variable
from oe_runtime.keras.with_tables import WithTables


class _Lookup(NamedTuple):
    layer: Any
    ids: Any
    rows: Any  # ids.shape + (dim,)


class GradientTape(tf.GradientTape):  # type: ignore[misc]
    """tf.GradientTape for a model with tables, in a custom training loop.

        with embed.GradientTape(model) as tape:
            loss = loss_function(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    Among `model.trainable_variables`, a TableVariable stands for each table, where a stock model has the
    matrix of an Embedding. Its gradient is as in stock Keras: a tf.IndexedSlices with a gradient for each id
    that the model has looked up inside the `with`, which may be clipped, scaled, summed or left out. The rows
    change when the optimizer of `compile` applies it, by one push with the learning rate of that time. It
    also works in a tf.function that contains the tape. Each lookup is a separate pull: `fit` and
    `train_on_batch`, which prefetch all rows of a batch together, are faster.

    Raises ValueError for several workers, gradient_accumulation_steps and embeddings_regularizer, which need
    `fit`.
    """

    def __init__(self, model: Any, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        if not isinstance(model, WithTables):
            raise TypeError(
                f"GradientTape: the model is a {type(model).__name__}, not one of distributed_model: "
                "write embed.GradientTape(model)"
            )
        served = model.served
        served.tables()  # raises before compile
        layers = served.layers
        regularized = [name for name in layers if layers[name].embeddings_regularizer is not None]
        refused = {
            "several workers": served.workers is not None,
            "gradient_accumulation_steps": accumulation_steps(model.optimizer) > 1,
            f"embeddings_regularizer of {', '.join(regularized)}": regularized,
        }
        for what, there in refused.items():
            if there:
                raise ValueError(f"GradientTape: {what} is not offered; train with fit or train_on_batch")
        self._model = model
        self._own = {id(layer) for layer in layers.values()}
        self._watched = set(self._own) if watch_accessed_variables else set()
        self._lookups: list[_Lookup] = []
        self._stack = contextlib.ExitStack()
        self._outer: Any = None
        self._graph: Any = None

    def __enter__(self) -> GradientTape:
        self._graph = _graph()
        self._outer = feed.current()
        super().__enter__()
        self._stack.enter_context(feeding(_Feed(self)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)

    def reset(self) -> None:
        """See tf.GradientTape."""
        super().reset()
        self._lookups.clear()

    def watch(self, tensor: Any) -> None:
        """See tf.GradientTape; also takes TableVariables."""
        flat = tf.nest.flatten(tensor)
        self._watched |= {id(one.layer) for one in flat if isinstance(one, TableVariable)}
        super().watch([one for one in flat if not isinstance(one, TableVariable)])

    def watched_variables(self) -> Any:
        """See tf.GradientTape; also those of tables that were looked up."""
        layers = dict.fromkeys(lookup.layer for lookup in self._lookups)
        return (*super().watched_variables(), *(table_variable(layer) for layer in layers))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """See tf.GradientTape. The gradient of a TableVariable is a tf.IndexedSlices of the rows' numbers.

        Raises ValueError where `sources` has the variables of a layer without the tables inside of it.
        """
        flat = tf.nest.flatten(sources)
        self._refuse_left_out(flat)
        lookups = [
            [one for one in self._lookups if isinstance(source, TableVariable) and one.layer is source.layer]
            for source in flat
        ]
        found = super().gradient(
            target,
            [
                [lookup.rows for lookup in of_table] if isinstance(source, TableVariable) else source
                for source, of_table in zip(flat, lookups, strict=True)
            ],
            output_gradients,
            unconnected_gradients,
        )
        zero = tf.UnconnectedGradients(unconnected_gradients) is tf.UnconnectedGradients.ZERO
        gradients = [
            _slices(source.layer, of_table, gradient, zero=zero)
            if isinstance(source, TableVariable)
            else gradient
            for source, of_table, gradient in zip(flat, lookups, found, strict=True)
        ]
        return tf.nest.pack_sequence_as(sources, gradients)

    def _refuse_left_out(self, sources: Sequence[Any]) -> None:
        """Raise ValueError for variables of an inner layer of Keras 3, which do not have those of its tables.

        The rows would not be trained.
        """
        given = {id(source) for source in sources}
        left_out = [one.layer for one in self._lookups if id(table_variable(one.layer)) not in given]
        for inner in self._model._flatten_layers(include_self=False) if left_out else ():
            own = inner.trainable_variables
            tables = [one for one in left_out if one in inner._flatten_layers(include_self=False)]
            if own and tables and all(id(one) in given for one in own):
                raise ValueError(
                    f"GradientTape: the sources have all variables of layer '{inner.name}', which lack table "
                    f"'{tables[0].name}' inside of it: take those of model.trainable_variables, or add the "
                    "trainable_variables of that Embedding; set its `trainable = False` to keep its rows"
                )

    def jacobian(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ValueError: jacobians do not train rows."""
        raise ValueError(
            "GradientTape: jacobians do not train rows; take tape.gradient, or a tf.GradientTape"
        )

    batch_jacobian = jacobian

    def look_up(self, layer: Any, ids: Any) -> Any:
        """Return the rows of ids, which this tape and those around it watch."""
        if layer.table is None or (layer.trainable and self._recording and id(layer) not in self._own):
            if self._outer is not None:  # the tape of another model
                return self._outer.lookup(layer, ids)
            raise RuntimeError(f"Embedding '{layer.name}' is of another model than that of the GradientTape")
        rows = backend.rows_of(layer.table, ids, layer.rows_dtype)
        if layer.trainable:
            self._note(_Lookup(layer, ids, rows))
        return rows

    def _note(self, lookup: _Lookup) -> None:
        """Watch the rows of a lookup, here and in the tapes around, whose gradients may be of gradients."""
        if isinstance(self._outer, _Feed):
            self._outer.tape._note(lookup)
        if not self._recording or id(lookup.layer) not in self._watched:
            return
        if _graph() is not self._graph:
            raise RuntimeError(
                f"Embedding '{lookup.layer.name}' is called in a tf.function, but the GradientTape was "
                "entered outside of it: enter it inside, or call the model itself"
            )
        super().watch(lookup.rows)
        self._lookups.append(lookup)


class _Feed(Plain):
    """Answers the lookups inside of a tape."""

    def __init__(self, tape: GradientTape) -> None:
        self.tape = tape

    def lookup(self, layer: Any, ids: Any) -> Any:
        return self.tape.look_up(layer, ids)


def _slices(layer: Any, lookups: Sequence[_Lookup], gradients: Sequence[Any], *, zero: bool) -> Any:
    """Return the gradient of a layer's rows, one for each id, from that of each lookup; None without any."""
    dim = layer.output_dim
    values = [tf.zeros((0, dim), layer.rows_dtype)] if zero else []
    keys = [tf.zeros((0,), tf.int64)] if zero else []
    for lookup, gradient in zip(lookups, gradients, strict=True):
        if gradient is not None:
            values.append(tf.reshape(tf.convert_to_tensor(gradient), [-1, dim]))
            keys.append(tf.reshape(_int64(lookup.ids, layer.name), [-1]))
    if not values:
        return None
    shape = None if layer.input_dim == -1 else tf.constant([layer.input_dim, dim], tf.int64)
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(keys, 0), shape)


def _int64(ids: Any, layer: str) -> Any:
    """Return ids as the servers know them."""
    if not ids.dtype.is_floating:
        return tf.cast(ids, tf.int64)
    return tf.numpy_function(lambda array: to_keys(array, layer), [ids], tf.int64)


def _graph() -> Any:
    """Return the current graph; None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
