"""The model in training: built, compiled, stepped. The first import of TensorFlow."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime import checkpoint, models
from oe_runtime.client import Client
from oe_runtime.data import Batch
from oe_runtime.data.row_schema import Schema
from oe_runtime.models.options import ModelOptions
from oe_runtime.run.options import Options
from oe_runtime.run.outcome import disk_error
from oe_runtime.run.run_directory import RunError
from oe_runtime.support import durable
from oe_runtime.support.tensorflow_noise import without_noise

# All embeddings with two or more rows. With all lookups on the servers, the batch takes one gather, and dense
# layers and sums over lookups are computed per distinct row (keras/by_row.py).
_SERVED_ROWS = 2
_MOST_IDS = 1 << 62  # more: 64-bit hashes, for tables without a place for each id


def export(model: Any, path: Path, rows: str | None = None, *, rows_of: Path | None = None) -> None:
    """Write a SavedModel for plain TensorFlow; one at `path` stays until the new one is complete.

    `rows`: see save_as_original_model. `rows_of`: take them from the files of this checkpoint, and ask no
    server.
    """
    new, old = (path.with_name(f".{path.name}.{word}") for word in ("new", "old"))
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        if not hasattr(model, "served"):
            model.export(new, verbose=False)
        elif rows_of is None:
            model.save_as_original_model(new, rows=rows)
        else:
            _save_with_rows(model, new, rows_of, rows)
        if path.exists():
            path.rename(old)
        durable.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(new, ignore_errors=True)
        if said := disk_error(error):
            raise RunError(f"cannot export to {path}: {said}") from error
        raise


def _save_with_rows(model: Any, path: Path, rows_of: Path, rows: str | None) -> None:
    from oe_runtime.keras.export import save_as_original_model
    from oe_runtime.keras.served import Table

    with Client.in_process() as client:
        specs = model.tables.items()
        tables = {name: Table(client, client.create_table(spec), spec) for name, spec in specs}
        client.restore(*checkpoint.chain(rows_of))
        save_as_original_model(model, tables, path, overwrite=False, rows=rows)


def build(options: ModelOptions, client: Client | None, *, jit: bool = False, **how: Any) -> Any:
    """Return a compiled click model: stock when `client` is None, else with its tables on the servers.

    `how` goes to distributed_model. Imports TensorFlow. Raises RunError for columns of which it cannot be
    built.
    """
    import keras

    import oe_runtime.keras as embed

    check_schema(options, stock=client is None)
    schema = options.schema.limited(options.max_cardinality)
    keras.utils.set_random_seed(options.seed)
    model = models.build(
        options.model,
        [one.rows for one in schema.categories],
        options.dim,
        hidden=options.hidden,
        cin=options.cin,
        bottom=options.bottom,
        interaction=options.interaction,
        dtype={"float32": "float32", "bfloat16": "mixed_bfloat16"}[options.precision],
        seed=options.seed,
        embedding=None if client is None else partial(_served_embedding, options),
        schema=schema,
    )
    optimizer = make_optimizer(options.optimizer, options.learning_rate)
    if client is not None:
        # fresh: existing rows are those of --resume; others were refused.
        model = embed.distributed_model(model, client, sparse_as_dense_size=_SERVED_ROWS, fresh=False, **how)
        optimizer = embed.distributed_optimizer(optimizer)
    auc = keras.metrics.AUC(name="auc")
    model.compile(optimizer, "binary_crossentropy", metrics=[auc], jit_compile=jit)
    return model


def _served_embedding(options: ModelOptions, rows: int, *arguments: Any, **keywords: Any) -> Any:
    """Return distributed_model's layer for a keras.layers.Embedding, without its memory in this process."""
    import keras

    import oe_runtime.keras as embed

    if rows < _SERVED_ROWS:
        return keras.layers.Embedding(rows, *arguments, **keywords)
    admission: Mapping[str, Any] | None = options.admission
    if admission is not None and admission["name"] == "cbf" and rows <= _MOST_IDS:
        admission = {"max_element_size": rows, **admission}
    return embed.Embedding(
        -1 if options.index == "hash" or rows > _MOST_IDS else rows,
        *arguments,
        dtype=options.row_precision,
        state_dtype=options.state_precision,
        exchange_dtype=options.exchange_precision,
        admission=admission,
        eviction=options.eviction,
        **keywords,
    )


def make_optimizer(name: str, learning_rate: float) -> Any:
    """Return the Keras optimizer `name` of `oe_runtime.run.optimizers` with its default settings."""
    import keras

    from oe_runtime.keras.translate import CLASSES

    if name == "amsgrad":
        return keras.optimizers.Adam(learning_rate, amsgrad=True)
    if name == "momentum":
        return keras.optimizers.SGD(learning_rate, momentum=0.9)
    return {kind.__name__.lower(): kind for kind in CLASSES}[name](learning_rate)


def train_step(model: Any, batch: tuple[Any, Any, Any]) -> dict[str, float]:
    """Train on the inputs, labels and weights of a worker's part of a batch, which may have no rows.

    Returns the model's metrics.
    """
    x, y, weights = batch
    before = []
    if not len(y):  # the mean over no rows is not a number
        before = [(v, np.asarray(v)) for metric in model.metrics for v in metric.variables]
    found: dict[str, float] = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
    for variable, value in before:
        variable.assign(value)
    return found


class Layout:
    """Divides batches into the inputs of a schema's model."""

    def __init__(self, schema: Schema) -> None:
        self._numbers = bool(schema.numbers)
        ends = list(itertools.accumulate((one.length for one in schema.categories), initial=0))
        self._ids = list(itertools.pairwise(ends))

    def data(self, batch: Batch) -> tuple[list[NDArray[Any]], NDArray[Any], NDArray[Any] | None]:
        """Return inputs, labels and weights."""
        return self.inputs(batch), batch.labels[:, None], batch.weights

    def inputs(self, batch: Batch) -> list[NDArray[Any]]:
        """Return the numbers, if there are any, and the ids of each category."""
        ids = [batch.ids[:, begin:end] for begin, end in self._ids]
        return [batch.dense, *ids] if self._numbers else ids


def check_schema(options: ModelOptions, *, stock: bool) -> None:
    """Raise RunError for columns of which this model cannot be built."""
    schema = options.schema.limited(options.max_cardinality)
    if stock and (hashed := [one.name for one in schema.categories if one.hashed]):
        raise RunError(
            f"--stock: the 64-bit ids of {', '.join(hashed[:5])} need tables on servers or --in-process; "
            "give them a cardinality, or --max-cardinality"
        )
    if not schema.categories and options.model in ("deepfm", "dlrm", "xdeepfm"):
        raise RunError(
            f"{options.model} is a model over categories, and the schema names none; see --model wdl"
        )
    if not schema.categories and not stock:
        raise RunError("the schema names no categories, so servers would hold no table: train with --stock")


def prepare(options: Options) -> Any:
    """Return Keras on a TensorFlow with the options' settings, or raise RunError. May be called again."""
    if options.workers and not options.workqueue:  # several compute each batch
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the trainer itself reports lost workers
    return import_keras(
        deterministic=options.deterministic,
        threads=(options.inter_threads, options.intra_threads),
        device=options.device,
    )


def check_backend(name: str) -> None:
    """Raise RunError for a Keras backend other than TensorFlow."""
    if name != "tensorflow":
        raise RunError(
            f"KERAS_BACKEND is {name}, but this trainer runs on tensorflow: unset it (your own models also "
            "run on torch and jax, with oe_runtime.keras)"
        )


def import_keras(
    *, deterministic: bool = True, threads: tuple[int, int] = (0, 0), device: str = "auto"
) -> Any:
    """Return Keras on TensorFlow. RunError says how to install them, or that "gpu" finds no GPU.

    Hides TensorFlow's messages except errors. `threads`: between and within operations; 0: TensorFlow
    decides.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    check_backend(os.environ.setdefault("KERAS_BACKEND", "tensorflow"))
    try:
        with without_noise():
            import keras
            import tensorflow as tf
    except ImportError as error:
        raise RunError(
            f"training needs TensorFlow and Keras 3 ({error}): pip install 'oeprov[tensorflow]'"
        ) from error
    check_backend(keras.backend.backend())  # it may have been imported before
    if device == "gpu":
        with without_noise():
            found = tf.config.list_physical_devices("GPU")
        if not found:
            built = "" if tf.test.is_built_with_cuda() else ", which was built without CUDA,"
            raise RunError(
                f"--device gpu: TensorFlow {tf.__version__}{built} finds no GPU on this host; see nvidia-smi "
                "and CUDA_VISIBLE_DEVICES, or leave --device out to train on the CPU"
            )
    elif device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    if any(threads):
        tf.config.threading.set_inter_op_parallelism_threads(threads[0])
        tf.config.threading.set_intra_op_parallelism_threads(threads[1])
    return keras
