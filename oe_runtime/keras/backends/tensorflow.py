"""Keras on TensorFlow: a step is a graph, and the rows of the next batch are prefetched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record  # whether a tape records has no public name

from oe_runtime.keras import by_row, row_updates, step, step_bodies
from oe_runtime.keras.arrays import not_dense_error, to_numpy, to_tensor
from oe_runtime.keras.matrices import check_readable
from oe_runtime.keras.pipeline import Pipeline
from oe_runtime.keras.served import Served

update_rows = row_updates.update_rows


def check(*, several_workers: bool, staleness: int, micro_batches: int) -> None:
    """See Backend."""
    del several_workers, staleness, micro_batches
    strategy = tf.distribute.get_strategy()
    one = isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy))
    if tf.distribute.has_strategy() and not (one and strategy.num_replicas_in_sync == 1):
        name = type(strategy).__name__.replace("CollectiveAllReduce", "MultiWorkerMirrored")
        raise ValueError(
            f"distributed_model does not work inside a {name} over {strategy.num_replicas_in_sync} replicas, "
            "but only with one replica on one device: make the model outside of the strategy's scope, and "
            "run one process per device, as a job or with workers=TensorFlowWorkers(endpoints, rank)"
        )


def adapt(model: Any) -> None:
    """See Backend."""
    by_row.use_fast_layers(model)


def check_compile(served: Served, *, jit_compile: Any) -> Any:
    """See Backend. Keras compiles nothing: XLA is used for a part of the step (`Served.xla`)."""
    del served, jit_compile
    return False


def steps(served: Served, *, eager: bool) -> Steps:
    """See Backend."""
    return Steps(served, eager=eager)


class Steps(step.Steps):
    """The steps of one compiled model, in a pipeline."""

    def __init__(self, served: Served, *, eager: bool) -> None:
        super().__init__(served, eager=eager)
        self.training = self.pipeline(step_bodies.TRAIN, served.settings.staleness)

    def pipeline(self, body: step_bodies.Body, staleness: int = 0) -> Pipeline:
        """Return a new pipeline, which prefetches rows if the model wants that."""
        ahead = self._served.settings.pipeline and not self._eager
        return Pipeline(self, self._client, body, ahead=ahead, staleness=staleness if ahead else 0)

    def announce(self, data: Any, after: Any) -> None:
        """See Distributed.prefetch."""
        self.training.announce(data, after)

    def train_function(self) -> Callable[[Any], Any]:
        """Return a function of an iterator over batches."""
        return self._over_batches(self.training)

    def test_function(self) -> Callable[[Any], Any]:
        """Return a function of an iterator over batches."""
        return self._over_batches(self.pipeline(step_bodies.TEST))

    def predict_function(self) -> Callable[[Any], Any]:
        """Return a function of a list of batches."""

        def predict(batches: Iterable[Any]) -> Any:
            outputs = [self.predict(batch) for batch in batches]
            return (
                keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
                if outputs[1:]
                else outputs[0]
            )

        return predict

    def _over_batches(self, run: Pipeline) -> Callable[[Any], Any]:
        def function(iterator: Any) -> Any:
            logs = run(iterator)
            with contextlib.suppress(StopIteration):
                for _ in range(1, self._model.steps_per_execution):
                    logs = run(iterator)
            return logs

        return function


def integer_ids(ids: Any, layer: str) -> Any:
    """See Backend."""
    if isinstance(ids, (tf.SparseTensor, tf.RaggedTensor)):
        raise not_dense_error(f"layer '{layer}': what it looks up is", ids)
    ids = tf.convert_to_tensor(ids)
    if ids.dtype == tf.uint64:
        return tf.bitcast(ids, tf.int64)
    return ids if ids.dtype in (tf.int32, tf.int64) or ids.dtype.is_floating else tf.cast(ids, tf.int64)


def is_traced(values: Sequence[Any]) -> bool:
    """See Backend."""
    del values
    return not tf.executing_eagerly()


def pull(layer: Any, ids: Any) -> Any:
    """See Backend. Refuses any recording tape, because tapes do not tell their purpose."""
    if layer.trainable and record.could_possibly_record():
        raise RuntimeError(
            f"Embedding '{layer.name}' is called under a tf.GradientTape, which does not train rows on "
            "parameter servers: write `with embed.GradientTape(model) as tape:`; for a call that trains "
            "nothing, `with tape.stop_recording():`"
        )
    rows = rows_of(layer.table, ids, layer.rows_dtype)
    if layer.trainable and not tf.executing_eagerly():
        return _refuse_gradients(layer.name, rows)
    return rows


def all_rows(layer: Any) -> Any:
    """Pull all rows of a layer with an input_dim. Raises RuntimeError inside a tape, which trains no rows."""
    if layer.trainable and record.could_possibly_record():
        raise RuntimeError(
            f"the rows of '{layer.name}' are read under a GradientTape, which would train no rows by that: "
            "compute such a loss from the embeddings that the model looks up, or give the layer an "
            "embeddings_regularizer and train with fit"
        )
    check_readable([layer])
    if not tf.executing_eagerly():
        return rows_of(layer.bound(), tf.range(layer.input_dim, dtype=tf.int64), layer.rows_dtype)
    return to_tensor(layer.get_weights()[0])


def _refuse_gradients(layer: str, rows: Any) -> Any:
    """Return `rows` in a tf.function, with an error for a tape that was entered outside of it."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def refusing(rows: Any, _trigger: Any) -> Any:
        def gradient(*_: Any) -> Any:
            raise RuntimeError(
                f"Embedding '{layer}' is called in a tf.function under a GradientTape that was entered "
                "outside of it, which does not train rows on parameter servers: write "
                "`with embed.GradientTape(model) as tape:` in the tf.function; for a call that trains "
                "nothing, `with tape.stop_recording():`"
            )

        return tf.identity(rows), gradient

    return refusing(rows, trigger().read_value())


@functools.cache
def trigger() -> Any:
    """Return a variable, because a tape that is entered later asks only for gradients of those.

    A saved graph with rows must save it too.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0.0)


def rows_of(table: Any, ids: Any, dtype: str) -> Any:
    """Return the rows of ids as a tensor, now or when the graph runs."""
    if tf.executing_eagerly():
        return to_tensor(table.rows(to_numpy(ids)))
    rows = tf.numpy_function(table.rows, [ids], dtype, stateful=True)
    rows.set_shape((*ids.shape, table.spec.dim))
    return rows
