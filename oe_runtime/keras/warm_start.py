"""Trained rows that a model brings along, or that stock files contain.

The servers make untrained rows themselves, from the initializer.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from oe_runtime.errors import CheckpointError
from oe_runtime.keras import dense
from oe_runtime.keras.matrices import snapshot
from oe_runtime.keras.served import Served
from oe_runtime.keras.table_variable import listing_tables
from oe_runtime.model_tables import rows_on_servers
from oe_runtime.spec import TableSpec
from oe_runtime.support import job_hooks

_MODEL_FILES = (".h5", ".hdf5", ".keras", ".weights.json")


def choose_rows(served: Served) -> None:
    """Before the tables are made, choose between the model's rows and those that the servers have already.

    The option `fresh` of `distributed_model` decides. Raises ValueError where it is not given.
    """
    if served.fresh or not served.is_first or served.client.restores:
        return
    # Rows of an interrupted compile() are the model's own.
    bringing = {
        name: layer
        for name, layer in served.layers.items()
        if layer.first_rows is not None and not layer.bringing_rows
    }
    for name, rows in rows_on_servers(served.client, bringing).items() if bringing else ():
        if rows and served.fresh is None:
            raise ValueError(
                f"table '{name}' has {rows} rows on the servers already, and the model brings trained ones: "
                "distributed_model(…, fresh=True) drops those of the servers, fresh=False goes on with them, "
                "another job or name_prefix keeps both"
            )
        if rows:
            bringing[name].first_rows = None


def assign(served: Served) -> None:
    """Assign the rows that the layers hold to their tables, which exist now.

    Of several workers only worker 0 does so: all begin with its weights.
    """
    for layer in served.layers.values():
        if layer.first_rows is None:
            continue
        if served.is_first and not served.client.restores:
            layer.bringing_rows = True
            layer.bound().assign(layer.first_rows)
            layer.bringing_rows = False
        layer.first_rows = None  # not before: where that failed, the next compile() does it


@contextlib.contextmanager
def keeping_rows(
    served: Served, specs: Mapping[str, TableSpec]
) -> Iterator[Callable[[Mapping[str, int]], None]]:
    """Drop the model's tables that a new compile trains by another optimizer; yield what brings rows back.

    The rows lie in a temporary directory (TMPDIR) meanwhile, without the former optimizer's state, and stay
    there if they cannot be brought back. That takes a number for each new table. Nothing is dropped in a job,
    whose checkpoints have the former tables, and with several workers: the servers refuse the optimizer then.
    """
    client = served.client
    tables = {name: layer.table for name, layer in served.layers.items() if layer.table is not None}
    other = [name for name, table in tables.items() if table.spec.optimizer != specs[name].optimizer]
    if not other or served.workers is not None or client is job_hooks.client():
        yield lambda _numbers: None
        return
    directory = Path(tempfile.mkdtemp(prefix="oe-rows-"))
    files = {name: directory / f"{number}.parquet" for number, name in enumerate(other)}
    dropped = False

    def bring(numbers: Mapping[str, int]) -> None:
        for name, file in files.items():
            client.import_rows(numbers[name], file, slots=False)

    try:
        for name, file in files.items():
            client.export(tables[name].number, file)
        client.drop_tables(other)
        dropped = True
        for name in other:
            served.layers[name].table = None
        yield bring
    except BaseException:
        if not dropped:
            shutil.rmtree(directory)
        else:
            warnings.warn(
                f"the rows of table {', '.join(other)} could not be brought back: they are in {directory}, "
                "which Client.import_rows reads",
                stacklevel=5,
            )
        raise
    shutil.rmtree(directory)


def is_stock(path: Path) -> bool:
    """Whether stock Keras or tf-keras wrote `path`, TensorFlow checkpoints included."""
    if path.is_dir():
        return (path / "saved_model.pb").is_file()
    return path.name.endswith(_MODEL_FILES) or path.with_name(path.name + ".index").is_file()


def load(served: Served, path: Path, read: Callable[[str], Any]) -> None:
    """Load a stock file or SavedModel: rows into tables, all other weights into the model.

    `read` is the library's own load_weights. Raises CheckpointError if anything does not fit; nothing has
    changed then.
    """
    model = served.model
    dense.check_built(model)
    variables = [*model.variables, *(model.optimizer.variables if model.compiled else ())]
    before = [(variable, snapshot(variable)) for variable in variables]
    by_key: dict[Any, tuple[Any, Any]] = {}
    try:
        with listing_tables(False), _stock_variables(served) as matrices:
            wanted = [v for v in model.weights if "float" in keras.backend.standardize_dtype(v.dtype)]
            for variable in wanted:  # NaN stays where nothing is loaded
                dtype = keras.backend.standardize_dtype(variable.dtype)
                variable.assign(keras.ops.full(tuple(variable.shape), np.nan, dtype))
            if path.is_dir() and served.library is keras:
                by_key = _read_saved_model(served, path)
            else:
                read(str(path))
            for variable in wanted:
                if math.prod(variable.shape) and bool(keras.ops.all(keras.ops.isnan(variable))):
                    name = getattr(variable, "path", None) or variable.name
                    raise CheckpointError(f"{path}: has no weights '{name}', which the model has")
            found = {layer: snapshot(variable) for layer, variable in matrices.items()}
    except Exception as error:
        for variable, value in before:
            variable.assign(value)
        if isinstance(error, CheckpointError):
            raise
        # Keras's message contains the values of the variable.
        what = " ".join(re.sub(r", value=[^>]*>", ">", str(error)).split())
        raise CheckpointError(f"{path}: cannot be loaded into this model: {what}") from error
    for layer, matrix in found.items():
        if not layer.on_servers:
            layer.keep_rows(matrix)
        elif served.is_first:
            layer.table.assign(matrix)
    for layer, (keys, rows) in by_key.items():
        if served.is_first:
            served.client.assign(layer.table.number, keys, rows)
    if served.workers is not None:
        from oe_runtime.keras.workers import barrier  # TensorFlow, which not every backend needs

        barrier(served.workers)


@contextlib.contextmanager
def _stock_variables(served: Served) -> Iterator[Mapping[Any, Any]]:
    """Meanwhile give layers of tables with an input_dim the variable of a stock Embedding."""
    matrices: dict[Any, Any] = {}
    try:
        for layer in served.layers.values():
            if layer.input_dim != -1:
                matrices[layer] = layer.add_stock_variable()
        yield matrices
    finally:
        for layer, variable in matrices.items():
            layer.remove_stock_variable(variable)


def _read_saved_model(served: Served, path: Path) -> dict[Any, tuple[Any, Any]]:
    """Assign the variables of a SavedModel by their names.

    Returns the (keys, rows) of tables for any id, which `save_as_original_model` writes.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise CheckpointError(f"{path}: reading a SavedModel needs TensorFlow: {error}") from error
    loaded = tf.saved_model.load(str(path)).variables
    saved = _by_name((v.name.partition(":")[0], v) for v in loaded)
    by_key = {}
    for layer in served.layers.values():
        if layer.input_dim == -1 and f"{layer.name}/keys" in saved:
            if not layer.on_servers:
                raise CheckpointError(f"{path}: compile the model first: table '{layer.name}' takes any id")
            by_key[layer] = tuple(saved.pop(f"{layer.name}/{part}").numpy() for part in ("keys", "rows"))
    wanted = _by_name((v.path, v) for v in served.model.weights)
    if saved.keys() != wanted.keys():
        # Keras numbers layers without a name through all models of a process.
        saved, wanted = _numbered_anew(saved), _numbered_anew(wanted)
    for name, variable in wanted.items():
        if name not in saved:
            raise CheckpointError(
                f"{path}: has no weights '{name}', which the model has; it has {', '.join(saved) or 'none'}"
            )
        have, want = tuple(saved[name].shape), tuple(variable.shape)
        if have != want:
            raise CheckpointError(f"{path}: weights '{name}' have shape {have}, but the model's {want}")
        variable.assign(saved.pop(name).numpy())
    if saved:
        raise CheckpointError(f"{path}: has weights '{next(iter(saved))}', which the model lacks")
    return by_key


def _numbered_anew(named: Mapping[str, Any]) -> dict[str, Any]:
    """Rename dense_7/kernel and dense_9/kernel to dense/kernel and dense/kernel#2, in order."""
    return _by_name(
        (re.sub(r"(_\d+)?(#\d+)?(?=/|$)", "", name), variable) for name, variable in named.items()
    )


def _by_name(variables: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the variables by unique name, without random states."""
    return dense.by_unique_name((name, one) for name, one in variables if "seed_generator" not in name)
