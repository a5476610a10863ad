"""Keras 3 models with distributed embeddings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras

from oe_runtime.keras import backends
from oe_runtime.keras.backends import backend
from oe_runtime.keras.keras2 import refuse_legacy
from oe_runtime.keras.served import Served
from oe_runtime.keras.translate import table_optimizer
from oe_runtime.keras.with_tables import WithTables


@keras.saving.register_keras_serializable(package="oe_runtime")
class WeightsOnly:
    """The class in config.json of a directory of `save_weights`, for keras.models.load_model."""

    def get_config(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    @classmethod
    def from_config(cls, config: Any) -> Any:
        """Raise ValueError: the layers are not in the directory."""
        raise ValueError(
            "this directory has the weights and rows of a distributed model, but not its layers: make the "
            "model as it was made before, compile it, and model.load_weights(directory)"
        )


def distributed_optimizer(optimizer: Any, explicit: bool = True) -> Any:
    """Check that tables can be trained like dense variables by `optimizer`, and return it.

    Takes an optimizer of Keras, or the name of one, or one of this package, whose rule tables have
    (`oe_runtime.spec.OPTIMIZERS`). `DistributedModel.compile` gives every table the server's counterpart with
    the same hyperparameters. Each step pushes with its learning rate, schedules included.

    Differences from dense variables in Keras: a row's gradients are summed over the batch before the update,
    and only rows in the batch are updated. So momenta of other rows stay, and `weight_decay` shrinks a row
    only in its own steps.

    `clipnorm`, `clipvalue` and `global_clipnorm` mean the same as in Keras, with a table as one variable.

    `explicit` is OpenEmbedding's and has no effect: no option is ignored silently.

    Raises ValueError naming the optimizer or the option that tables do not support.
    """
    del explicit
    refuse_legacy(optimizer)
    optimizer = keras.optimizers.get(optimizer)
    table_optimizer(optimizer)
    backend.update_rows(optimizer)
    return optimizer


class Distributed(WithTables):
    """The methods that `distributed_model` adds to a Keras model, with those of WithTables.

    All other methods are Keras's.
    """

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        jit_compile: Any = "auto",
        run_eagerly: bool = False,
        experimental_run_tf_function: Any = None,
        **kwargs: Any,
    ) -> None:
        """Compile as keras.Model does, and make the tables. `optimizer`: see `distributed_optimizer`.

        With `jit_compile=True`, XLA compiles the model's call in training and its gradients, once per batch
        size; "auto" does not. `experimental_run_tf_function`, of Keras 2, is ignored.

        Raises ValueError for an optimizer that tables do not support, and SpecMismatch when the servers have
        a table of the same name with, say, another dim or optimizer.
        """
        del experimental_run_tf_function
        if self.dtype_policy.name == "mixed_float16":
            raise ValueError("mixed_float16 scales the loss, which tables do not support; use mixed_bfloat16")
        served = self.served
        for_keras = backend.check_compile(served, jit_compile=jit_compile)
        optimizer = distributed_optimizer(optimizer)
        tables = self._make_tables(optimizer, table_optimizer)
        served.xla = jit_compile is True and not run_eagerly
        super().compile(optimizer, *args, jit_compile=for_keras, run_eagerly=run_eagerly, **kwargs)
        self._begin(tables, self._make_steps(served, eager=run_eagerly))

    def _make_steps(self, served: Served, *, eager: bool) -> backends.Steps:
        return backend.steps(served, eager=eager)

    def prefetch(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, after: tuple[Any, ...] | None = None
    ) -> None:
        """Announce the arrays of the `train_on_batch` after the next one.

        Their rows are pulled while the next batch computes. That batch's push goes on after its
        `train_on_batch` has returned: every request of the client, and the next `train_on_batch`, waits for
        it and raises its errors. The arrays must be the same objects and not change until then; if others
        come, the pulled rows are dropped. `after` is the (x, y, sample_weight) of the batch after that one:
        servers with rows on a drive read its rows from there meanwhile. The same holds for its arrays.
        """
        if after is not None and not (isinstance(after, tuple) and 1 <= len(after) <= 3):
            raise ValueError("after must be the tuple (x, y, sample_weight) of a batch, or (x, y), or (x,)")
        one_more = None if after is None else (*after, None, None)[:3]
        self._running().announce((x, y, sample_weight), one_more)

    def save_serving_model(self, path: str | os.PathLike[str]) -> Path:
        """Write a SavedModel without the rows, for `oe_runtime.serving` and `python -m oe_runtime.serve`.

        Those look the rows up in checkpoints or at the servers, so tables may have any size. They need
        neither Keras nor the code that made the model. `path` must not exist, and appears when it is
        complete. Returns it. Raises ValueError for a model without a graph (a subclassed one).
        """
        written: Path = self._exports().save_serving_model(self, self.served.tables(), Path(path))
        return written

    def _exports(self) -> Any:
        """Return the module that writes SavedModels."""
        if backends.NAME != "tensorflow":
            raise ValueError(
                f"a SavedModel is TensorFlow's, but Keras runs on {backends.NAME} here: "
                "save_weights(directory), make the model with KERAS_BACKEND=tensorflow, "
                "load_weights(directory), and export that"
            )
        from oe_runtime.keras import export

        return export


class DistributedModel(Distributed, keras.Model):  # type: ignore[misc]
    """A functional model with embeddings on parameter servers."""
