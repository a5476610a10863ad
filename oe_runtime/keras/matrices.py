"""All rows of an embedding layer as one matrix: given, trained, or loaded from a file.

A layer holds such a matrix until it has a table, which then gets it piece by piece.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np


def matrix_of(initializer: Any, layer: Any) -> Any:
    """Return the matrix of Constant(matrix) for all rows of a layer, or None for other initializers.

    Raises ValueError naming the layer where a table cannot begin with it.
    """
    value: Any = getattr(initializer, "value", None)
    if type(initializer).__name__ != "Constant" or np.ndim(value) == 0:
        return None
    if layer.input_dim == -1:
        raise ValueError(
            f"layer '{layer.name}': Constant(matrix) needs an input_dim, but this table takes any id: assign "
            "the rows by key after compile, model.client.assign(layer.table.number, keys, rows)"
        )
    if layer.eviction:
        raise ValueError(
            f"layer '{layer.name}': Constant(matrix) is not supported with eviction: a row that comes "
            "back begins with the initializer's rule: use another initializer, and set_weights([matrix])"
        )
    try:
        return np.broadcast_to(np.asarray(value), (layer.input_dim, layer.output_dim))
    except ValueError as error:
        raise ValueError(
            f"layer '{layer.name}': Constant(matrix) has shape {np.shape(value)}, but the rows are "
            f"{(layer.input_dim, layer.output_dim)}"
        ) from error


def one_matrix(weights: Any, layer: Any) -> Any:
    """Return the matrix in the argument of `set_weights`. Raises ValueError where it does not fit."""
    if layer.input_dim == -1:
        raise ValueError(
            f"layer '{layer.name}' takes any id, so that no matrix has all of its rows: assign them by key, "
            "model.client.assign(layer.table.number, keys, rows)"
        )
    if not isinstance(weights, (list, tuple)) or len(weights) != 1:
        what = f"{len(weights)} of them" if isinstance(weights, (list, tuple)) else type(weights).__name__
        raise ValueError(f"layer '{layer.name}': weights must be a list of one matrix, not {what}")
    matrix = weights[0] if hasattr(weights[0], "shape") else np.asarray(weights[0])
    shape, found = (layer.input_dim, layer.output_dim), tuple(matrix.shape)
    if found != shape:
        raise ValueError(f"layer '{layer.name}': the matrix has shape {found}, but the rows are {shape}")
    return matrix


def check_readable(layers: Iterable[Any]) -> None:
    """Raise ValueError naming the layer unless all rows of all layers fit into the memory as matrices."""
    size = 0
    for layer in layers:
        if layer.input_dim == -1:
            raise ValueError(
                f"layer '{layer.name}' takes any id, so that no matrix has all of its rows: "
                "model.client.export_rows(layer.table.number) returns keys and rows, and "
                "model.save_weights(directory) and load_weights keep a whole model"
            )
        size += layer.input_dim * layer.output_dim * np.dtype(layer.rows_dtype).itemsize
        if size > (available := _available_bytes()):
            raise ValueError(
                f"the rows up to layer '{layer.name}' take {size / 2**30:,.1f} GiB as matrices, but the "
                f"worker has {available / 2**30:,.1f} GiB: use model.save_weights(directory) and load_weights"
            )


def _available_bytes() -> int:
    """Return the memory that programs can still take, as Linux estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else sys.maxsize


def written_rows(layer: Any) -> Any:
    """Return the matrix of a stock Embedding if it is not the output of its initializer; else None.

    Training, a file or `set_weights` make a difference. An initializer without a seed gives the same values
    again. One with a SeedGenerator does not, so its matrix counts as written.
    """
    if not layer.built:
        given = getattr(layer, "_initial_weights", None)  # of tf-keras: weights=[…]
        return None if given is None else given[0]
    matrix, initializer = layer.embeddings, layer.embeddings_initializer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tf-keras warns of the second call of one without a seed
        again = initializer(tuple(matrix.shape), dtype=layer.variable_dtype)
    if bool(keras.ops.all(keras.ops.equal(matrix, again))):
        return None
    return snapshot(matrix)


def snapshot(variable: Any) -> Any:
    """Return the present values of a variable."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(variable)  # not a copy before the variable changes
    return np.array(keras.ops.convert_to_numpy(variable))
