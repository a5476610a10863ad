"""tf-keras models with distributed embeddings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from oe_runtime.keras.backends import tensorflow
from oe_runtime.keras.served import Served
from oe_runtime.keras.with_tables import WithTables
from oe_runtime.tf_keras.translate import distributed_optimizer, learning_rate, table_optimizer


def _call(call: Any, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


# Lets TensorFlow convert the callee, though our steps are graphs without conversion.
_with_autograph = tf.autograph.to_graph(_call)


def refuse_strategy() -> None:
    """Raise ValueError inside a TensorFlow strategy, whose variables do not work in our steps."""
    strategy = tf.distribute.get_strategy()
    one = isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy))
    if tf.distribute.has_strategy() and not (one and strategy.num_replicas_in_sync == 1):
        raise ValueError(
            "models of tf-keras with distributed embeddings do not train inside a "
            f"{type(tf.distribute.get_strategy()).__name__}: make and compile them outside of its scope, and "
            "run one process per device with workers=TensorFlowWorkers(endpoints, rank)"
        )


class _Served(Served):
    """A model of tf-keras whose embeddings are tables."""

    library = tf_keras

    def run(self, body: Any, *args: Any) -> Any:
        """In a step: call `body`, in the one replica of the model's strategy."""
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, tf.distribute.MirroredStrategy):
            return body(self, *args)
        return strategy.run(lambda: body(self, *args))

    def batch_loss(
        self, row_losses: Sequence[Any], x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
    ) -> Any:
        """In a step: tf-keras's loss, which includes `losses`; its mean is in the logs."""
        del training
        self.model._row_losses = tuple(row_losses)
        try:
            return self.model.compute_loss(x, y, y_pred, sample_weight)
        finally:
            self.model._row_losses = ()

    def learning_rate(self) -> Any:
        """In a step, before the optimizer's update: the learning rate of this step."""
        return learning_rate(self.model.optimizer)


class _Steps(tensorflow.Steps):
    """The steps of one compiled model: those of Keras 3 on TensorFlow, in the form of tf-keras's trainer."""

    def _tensors(self, body: Any, data: Any) -> Any:
        if self._model.expands_inputs:
            data = keras.tree.map_structure(_as_column, data)
        return super()._tensors(body, data)

    def predict_function(self) -> Callable[[Any], Any]:
        """Return a function of an iterator over batches."""
        of_batches = super().predict_function()

        def predict(iterator: Any) -> Any:
            batches = list(islice(iterator, self._model.steps_per_execution))
            if not batches:
                raise StopIteration
            return of_batches(batches)

        return predict


def _as_column(value: Any) -> Any:
    """Give one-dimensional data a second dimension."""
    return value[:, None] if value is not None and len(value.shape) == 1 else value


class Distributed(WithTables):
    """The methods that `distributed_model` adds to a tf-keras model, with those of WithTables.

    All other methods are tf-keras's.
    """

    _kind = _Served
    _row_losses: Sequence[Any] = ()
    expands_inputs = False  # whether its steps give one-dimensional data a second dimension

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        run_eagerly: bool | None = None,
        jit_compile: bool | None = None,
        experimental_run_tf_function: Any = None,
        **kwargs: Any,
    ) -> None:
        """Compile as tf_keras.Model does, and make the tables. `optimizer`: see `distributed_optimizer`.

        Raises ValueError for what tables do not support, and SpecMismatch when the servers have a table of
        the same name with, say, another dim or optimizer.

        Scripts with `experimental_run_tf_function` are for TensorFlow 2.2 to 2.5: there, steps gave the
        one-dimensional data of a subclassed model a second dimension, as they do here then.
        """
        graph = bool(getattr(self, "inputs", None))
        self.expands_inputs = experimental_run_tf_function is not None and not graph
        refuse_strategy()
        policies = {layer.dtype_policy.name for layer in self._flatten_layers()}
        for name in sorted(policies & {"mixed_bfloat16", "mixed_float16"}):
            raise ValueError(
                f"{name} is not offered for models of tf-keras: compute in float32, or take "
                "oe_runtime.keras and its mixed_bfloat16"
            )
        if jit_compile:
            raise ValueError("jit_compile=True is not offered for models of tf-keras; leave it out")
        optimizer = distributed_optimizer(optimizer)
        tables = self._make_tables(optimizer, table_optimizer)
        super().compile(optimizer, *args, run_eagerly=run_eagerly, **kwargs)
        self._begin(tables, self._make_steps(self.served, eager=bool(run_eagerly)))

    def _make_steps(self, served: Served, *, eager: bool) -> _Steps:
        return _Steps(served, eager=eager)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; as in tf-keras's own steps, `if` and `while` of layers may depend on tensors."""
        call = super().__call__
        return call(*args, **kwargs) if tf.executing_eagerly() else _with_autograph(call, args, kwargs)

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called; Keras 3's name."""
        return bool(self._is_compiled)

    @property
    def steps_per_execution(self) -> int:
        """Batches per call of `train_function`."""
        number = self._steps_per_execution
        return 1 if number is None else int(tf.convert_to_tensor(number))  # None before compile

    @property
    def losses(self) -> list[Any]:
        """tf_keras.Model.losses, in a step with those of the regularized rows of its batch."""
        return [*super().losses, *self._row_losses]

    def save_serving_model(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ValueError: see `oe_runtime.keras`."""
        raise ValueError(
            "save_serving_model is not offered for models of tf-keras: save_as_original_model(path) has the "
            "rows inside, or make the model in Keras 3 and load_server_model into it"
        )

    def _exports(self) -> Any:
        """Return the module that writes SavedModels."""
        from oe_runtime.tf_keras import export

        return export

    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        include_optimizer: bool = True,
        **_of_files: Any,
    ) -> None:
        """Save as `save_weights` does; a tf-keras file could not hold the rows, which are on the servers.

        To load it, make the model as before, and call `load_weights`. `save_format` and other options of
        tf-keras's files are ignored.
        """
        super().save(filepath, overwrite, include_optimizer)

    def save_weights(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        save_format: str | None = None,
        options: Any = None,
    ) -> None:
        """Write weights, optimizer's variables and all rows with their state into the directory `filepath`.

        `save_format` and `options`, of tf-keras's files, are ignored. The rows also fit a model of Keras 3
        (`load_server_model`); the optimizer's variables have other names there.
        """
        del save_format, options
        super().save_weights(filepath, overwrite)

    def load_weights(
        self,
        filepath: str | os.PathLike[str],
        skip_mismatch: bool = False,
        by_name: bool = False,
        options: Any = None,
    ) -> None:
        """Load as `oe_runtime.keras` does, and also TensorFlow checkpoints of stock tf-keras by their prefix.

        Raises CheckpointError naming the file and the variable or table that does not fit, and ValueError for
        `skip_mismatch` and `by_name`: it loads everything or nothing.
        """
        if by_name:
            raise ValueError("by_name=True is not supported: a checkpoint is loaded completely")
        del options
        super().load_weights(filepath, skip_mismatch)


class DistributedModel(Distributed, tf_keras.Model):  # type: ignore[misc]
    """A functional model of tf-keras with embeddings on parameter servers."""
