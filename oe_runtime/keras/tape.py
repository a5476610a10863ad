"""Custom training loops on TensorFlow: a GradientTape that also trains the rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from oe_runtime.keras import feed
from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.keras.backends import tensorflow as backend
from oe_runtime.keras.feed import feeding, to_keys
from oe_runtime.keras.supply import Plain
from oe_runtime.keras.translate import clips
from oe_runtime.keras.with_tables import WithTables


class _Lookup(NamedTuple):
    table: Any
    ids: Any
    rows: Any  # ids.shape + (dim,)


class GradientTape(tf.GradientTape):  # type: ignore[misc]
    """tf.GradientTape for a model with tables, in a custom training loop.

        with embed.GradientTape(model) as tape:
            loss = loss_function(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    `gradient` also pushes the gradients of all rows that the model has looked up inside the `with`, in one
    push with the learning rate of the optimizer of `compile`. Call it before `apply_gradients`. It also works
    in a tf.function that contains the tape. Each lookup is a separate pull: `fit` and `train_on_batch`, which
    prefetch all rows of a batch together, are faster.

    Raises ValueError for a persistent tape, several workers, gradient clipping and embeddings_regularizer;
    the last two need the sums over the rows of a batch that `fit` makes.
    """

    def __init__(self, model: Any, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__(watch_accessed_variables=watch_accessed_variables)
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
            "persistent=True": persistent,
            "several workers": served.workers is not None,
            "gradient clipping": clips(model.optimizer),
            "gradient_accumulation_steps": accumulation_steps(model.optimizer) > 1,
            f"embeddings_regularizer of {', '.join(regularized)}": regularized,
        }
        for what, there in refused.items():
            if there:
                raise ValueError(f"GradientTape: {what} is not offered; train with fit or train_on_batch")
        self._served = served
        self._own = {id(layer) for layer in layers.values()}
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

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """See tf.GradientTape; also pushes the gradients of the rows."""
        rows = [lookup.rows for lookup in self._lookups]
        found, of_rows = super().gradient(target, [sources, rows], output_gradients, unconnected_gradients)
        if self._lookups:
            # As in `fit`, a row of the batch without influence on the loss has a zero gradient.
            self._push(
                [
                    tf.zeros_like(r) if g is None else tf.convert_to_tensor(g)
                    for r, g in zip(rows, of_rows, strict=True)
                ]
            )
        return found

    def jacobian(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ValueError: jacobians do not train rows."""
        raise ValueError(
            "GradientTape: jacobians do not train rows; take tape.gradient, or a tf.GradientTape"
        )

    batch_jacobian = jacobian

    def look_up(self, layer: Any, ids: Any) -> Any:
        """Return the rows of ids, which the tape watches."""
        if layer.table is None or (layer.trainable and self._recording and id(layer) not in self._own):
            if self._outer is not None:  # the tape of another model
                return self._outer.lookup(layer, ids)
            raise RuntimeError(f"Embedding '{layer.name}' is of another model than that of the GradientTape")
        rows = backend.rows_of(layer.table, ids, layer.rows_dtype)
        if layer.trainable and self._recording:
            if _graph() is not self._graph:
                raise RuntimeError(
                    f"Embedding '{layer.name}' is called in a tf.function, but the GradientTape was entered "
                    "outside of it: enter it inside, or call the model itself"
                )
            self.watch(rows)
            self._lookups.append(_Lookup(layer.table, ids, rows))
        return rows

    def _push(self, gradients: Sequence[Any]) -> None:
        client = self._served.client
        tables = [(lookup.table.number, i) for i, lookup in enumerate(self._lookups)]
        lookups, n = list(self._lookups), len(tables)

        def push(rate: Any, *arrays: Any) -> None:
            ids = [
                to_keys(array, lookup.table.spec.name)
                for array, lookup in zip(arrays[:n], lookups, strict=True)
            ]
            pulled = client.plan(ids, tables)
            parts = [
                np.concatenate([arrays[n + i].reshape(-1, group.dim) for i in group.lookups])
                for group in pulled.groups
            ]
            client.push(pulled, parts, float(rate))

        ids = [lookup.ids for lookup in self._lookups]
        values = [tf.cast(self._served.learning_rate(), tf.float64), *ids, *gradients]
        if tf.executing_eagerly():
            push(*(value.numpy() for value in values))
        else:
            tf.numpy_function(push, values, [])


class _Feed(Plain):
    """Answers the lookups inside of a tape."""

    def __init__(self, tape: GradientTape) -> None:
        self._tape = tape

    def lookup(self, layer: Any, ids: Any) -> Any:
        return self._tape.look_up(layer, ids)


def _graph() -> Any:
    """Return the current graph; None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
