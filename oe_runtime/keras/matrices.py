"""All rows of an embedding layer as one matrix: given, trained, or loaded from a file.

A layer holds such a matrix until it has a table, which then gets it piece by piece.
"""

from __future__ import annotations

import warnings
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
