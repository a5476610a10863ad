"""A Keras model with distributed embeddings, and how it is made from an ordinary one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from oe_runtime.client import Client
from oe_runtime.keras import dense, export
from oe_runtime.keras.clone import clone
from oe_runtime.keras.embedding import Embedding, Table
from oe_runtime.keras.gradients import needs_sums
from oe_runtime.keras.step import Steps
from oe_runtime.keras.translate import check_constraint, table_optimizer
from oe_runtime.keras.workers import Workers, begin_alike
from oe_runtime.spec import TableSpec


def distributed_model(
    model: Any,
    client: Client | None = None,
    *,
    sparse_as_dense_size: int = 64,
    seed: int = 0,
    name_prefix: str = "",
    nonfinite_gradients: str = "refuse",
    workers: Workers | None = None,
) -> DistributedModel:
    """A model like the functional (or Sequential) `model`, with its large embeddings on parameter servers.

    Every `keras.layers.Embedding` with input_dim ≥ `sparse_as_dense_size`, and every
    `oe_runtime.keras.Embedding`, becomes a table of the servers behind `client`, named `name_prefix` + the
    layer's name; without a client the tables live in this process. All other weights are copied; `model`
    stays as it is. The rows begin with what the layer's initializer means: a pure function of its seed
    (`seed` if it has none), the table's name and the row, so not with the values that the original layer
    drew.

    The tables are made when the result is compiled, because their rows keep the optimizer's state.
    `nonfinite_gradients` says what they do with NaN and infinities: "refuse" raises GradientError, "skip"
    leaves such rows as they are, "pass" trains them like Keras.

    With `workers`, each process trains on its part of every batch: the gradients of the mean loss over all
    parts are applied, dense ones summed by `workers`, rows' by the servers, which `client` tells the same
    rank. All start with worker 0's weights. Metrics and callbacks see a process's own part.

    An embeddings_regularizer (L1, L2, L1L2) counts for the rows of the batch only, and a warning says so.

    Raises ValueError naming the layer for what tables do not support: other regularizers, constraints, LoRA,
    quantization, other initializers, dtypes that are no floats, two layers of one name; and compile() with
    several workers for clipping and regularizers, which are about the gradients of all.
    """
    if tf.distribute.has_strategy():
        raise ValueError("distributed_model does not work inside a tf.distribute strategy; call it outside")

    def replace(layer: Any) -> Any:
        if isinstance(layer, keras.layers.Embedding) and layer.input_dim >= sparse_as_dense_size:
            return _server_embedding(layer)
        return None

    inputs, outputs = clone(model, replace)
    new = DistributedModel(inputs, outputs, name=model.name)
    _warn_of_hidden_embeddings(new, sparse_as_dense_size)
    new._bind(client if client is not None else Client.in_process(), seed, name_prefix, nonfinite_gradients)
    new._workers = workers if workers is not None and workers.count > 1 else None
    _warn_of_regularizers(new)
    return new


class DistributedModel(keras.Model):  # type: ignore[misc]
    """A functional Keras model with embeddings on parameter servers; `distributed_model` makes it.

    compile, fit, evaluate, predict and the on_batch methods are Keras's. A training step pulls the rows of
    its batch, runs one compiled function, and pushes the rows' gradients; the step is done when the servers
    have applied them.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    def __init__(self, inputs: Any, outputs: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name, **kwargs)
        self._client: Client | None = None
        self._table_layers: Mapping[str, Embedding] = MappingProxyType({})
        self._table_seed = 0
        self._nonfinite_gradients = "refuse"
        self._steps: Steps | None = None
        self._workers: Workers | None = None
        self.xla = False  # whether steps are compiled by XLA

    def _bind(self, client: Client, seed: int, name_prefix: str, nonfinite_gradients: str) -> None:
        layers: dict[str, Embedding] = {}
        for layer in self._flatten_layers(include_self=False, recursive=True):
            if not isinstance(layer, Embedding):
                continue
            name = name_prefix + layer.name
            if layers.setdefault(name, layer) is not layer:
                raise ValueError(
                    f"two embedding layers have the name '{layer.name}': tables are named by their layer"
                )
            layer.initializer_spec(seed)
        self._client = client
        self._table_seed = seed
        self._nonfinite_gradients = nonfinite_gradients
        self._table_layers = MappingProxyType(layers)

    @property
    def client(self) -> Client:
        """The client of the parameter servers."""
        if self._client is None:
            raise RuntimeError(
                "this model has no parameter servers: make it with distributed_model(model, client)"
            )
        return self._client

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables by name. The model must be compiled."""
        return {name: table.spec for name, table in self._tables().items()}

    def _tables(self) -> dict[str, Table]:
        tables = {}
        for name, layer in self._table_layers.items():
            if layer.table is None:
                raise RuntimeError(f"table '{name}' does not exist yet: compile the model first")
            tables[name] = layer.table
        return tables

    def compile(
        self,
        optimizer: Any = "rmsprop",
        *args: Any,
        jit_compile: Any = "auto",
        run_eagerly: bool = False,
        **kwargs: Any,
    ) -> None:
        """As keras.Model.compile; makes the tables. `optimizer`: see `distributed_optimizer`.

        With `jit_compile=True`, XLA compiles the model's call in training and its gradients, for each size of
        a batch anew; "auto" does not.

        Raises ValueError for an optimizer that tables do not support, and SpecMismatch when the servers have
        a table of the same name but, say, another dim or optimizer.
        """
        if self.dtype_policy.name == "mixed_float16":
            raise ValueError("mixed_float16 scales the loss, which tables do not support; use mixed_bfloat16")
        optimizer = keras.optimizers.get(optimizer)
        rule = table_optimizer(optimizer)
        client = self.client
        if self._workers is not None and needs_sums(optimizer, list(self._table_layers.values())):
            raise ValueError(
                "clipping gradients and embeddings_regularizer need the gradients of all workers, but those "
                "of rows meet at the servers only: train with one worker, or without them"
            )
        specs = {
            name: layer.table_spec(name, rule, self._table_seed, self._nonfinite_gradients)
            for name, layer in self._table_layers.items()
        }
        tables = {name: Table(client, client.create_table(spec), spec) for name, spec in specs.items()}
        self.xla = jit_compile is True and not run_eagerly
        super().compile(optimizer, *args, jit_compile=False, run_eagerly=run_eagerly, **kwargs)
        for name, layer in self._table_layers.items():
            layer.table = tables[name]
        self._steps = Steps(self, client, eager=run_eagerly)

    def make_train_function(self, force: bool = False) -> Any:
        """The function that `fit` calls with an iterator of batches."""
        if self.train_function is None or force:
            if not self.optimizer.built:
                self.optimizer.build(self.trainable_variables)
            if self._workers is not None:
                begin_alike(self._workers, [*self.variables, *self.optimizer.variables])
            self.train_function = self._over_batches(self._running().train)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """The function that `evaluate` calls with an iterator of batches."""
        if self.test_function is None or force:
            self.test_function = self._over_batches(self._running().test)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """The function that `predict` calls with a list of batches."""
        if self.predict_function is None or force:
            step = self._running().predict

            def predict(batches: Iterable[Any]) -> Any:
                outputs = [step(batch) for batch in batches]
                return (
                    keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
                    if outputs[1:]
                    else outputs[0]
                )

            self.predict_function = predict
        return self.predict_function

    def _running(self) -> Steps:
        if self._steps is None:
            raise RuntimeError("compile the model first: the rows of its tables keep the optimizer's state")
        return self._steps

    def _over_batches(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def function(iterator: Any) -> Any:
            logs = None
            for _, batch in zip(range(self.steps_per_execution), iterator, strict=False):
                logs = step(batch)
            if logs is None:
                raise StopIteration
            return logs

        return function

    def save_dense(self, directory: str | os.PathLike[str]) -> Path:
        """Writes all weights that are not rows, and the optimizer's variables, into `directory`/dense.npz.

        Returns the file's path. The rows are saved by the client: `model.client.save(directory)`.
        """
        return dense.save(self, Path(directory))

    def load_dense(self, directory: str | os.PathLike[str]) -> None:
        """Reads what `save_dense` wrote. The model must be compiled, with the same kind of optimizer.

        Raises CheckpointError naming the file and the variable (with both shapes) that does not fit; the
        model is then as it was.
        """
        dense.load(self, Path(directory))

    def save_as_original_model(self, path: str | os.PathLike[str]) -> Path:
        """Writes a SavedModel with the embeddings inside, which TensorFlow alone can load and serve.

        All rows of a table with an input_dim are read from the servers, untrained ones with their first
        value. Of a table for any 64-bit id the rows that training made are written; for any other id the
        exported model takes the mean of the initializer (the value of Constant, (minval + maxval) / 2 of
        RandomUniform, the mean of RandomNormal), because TensorFlow cannot compute the initializer's
        function.

        `path` must not exist; it appears only when it is complete. Returns it.
        """
        return export.save_as_original_model(self, self._tables(), Path(path))

    def save_serving_model(self, path: str | os.PathLike[str]) -> Path:
        """Writes a SavedModel without the rows, for `oe_runtime.serving` and `python -m oe_runtime.serve`.

        Those look the rows up in checkpoints or at the servers, so that tables may be as large as they like.
        They need neither Keras nor the code that made the model. `path` must not exist; it appears only when
        it is complete. Returns it. Raises ValueError for a model without a graph (a subclassed one).
        """
        return export.save_serving_model(self, self._tables(), Path(path))

    def export(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused: the rows are not in the model. Use `save_as_original_model`."""
        raise ValueError("the rows of this model are on parameter servers; use save_as_original_model(path)")

    def save(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused: the rows are not in the model. Use `save_dense` and the client's `save`."""
        raise ValueError(
            "the rows of this model are on parameter servers: save_dense(directory) and "
            "client.save(directory) write a checkpoint, save_as_original_model(path) a SavedModel"
        )

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Refused as `save` is."""
        return self.save(*args, **kwargs)

    def load_weights(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused: use `load_dense` and the client's `restore`."""
        raise ValueError("the rows of this model are on parameter servers; use load_dense and client.restore")


def _server_embedding(layer: Any) -> Embedding:
    """Our layer in place of a `keras.layers.Embedding`."""
    check_constraint(layer.embeddings_constraint, layer.name)
    unsupported = {
        "lora_rank": getattr(layer, "lora_rank", None),
        "quantization": getattr(layer, "quantization_mode", None),
    }
    for option, value in unsupported.items():
        if value is not None:
            raise ValueError(f"layer '{layer.name}': {option} is not supported for rows on parameter servers")
    return Embedding(
        layer.input_dim,
        layer.output_dim,
        layer.embeddings_initializer,
        embeddings_regularizer=layer.embeddings_regularizer,
        mask_zero=layer.mask_zero,
        name=layer.name,
        dtype=layer.dtype_policy,
        trainable=layer.trainable,
    )


def _warn_of_regularizers(model: DistributedModel) -> None:
    names = [layer.name for layer in model._table_layers.values() if layer.embeddings_regularizer is not None]
    if names:
        warnings.warn(
            f"embeddings_regularizer of {', '.join(names)}: only the rows of a batch are regularized in its "
            "step, while Keras regularizes all rows of a matrix in every step",
            stacklevel=3,
        )


def _warn_of_hidden_embeddings(model: Any, size: int) -> None:
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if isinstance(layer, keras.layers.Embedding) and layer.input_dim >= size:
            warnings.warn(
                f"layer '{layer.name}' ({layer.input_dim} rows) is inside of another layer and stays an "
                "ordinary Keras embedding in the worker's memory",
                stacklevel=3,
            )
