"""The tf-keras embedding layer whose rows live on parameter servers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from oe_runtime.keras.embedding import TableLayer
from oe_runtime.tf_keras.translate import keras3


@tf_keras.saving.register_keras_serializable(package="oe_runtime")
class Embedding(TableLayer, tf_keras.layers.Layer):  # type: ignore[misc]
    """tf_keras.layers.Embedding with its rows on parameter servers; TableLayer documents the arguments.

    tf-keras's `input_length` is accepted and ignored.
    """

    _library = tf_keras

    def __init__(self, *args: Any, input_length: int | None = None, **kwargs: Any) -> None:
        del input_length
        super().__init__(*args, autocast=False, **kwargs)

    def _should_use_autograph(self) -> bool:
        return False  # there is nothing to convert, and `oe_runtime` is not written for it

    def _pull(self, ids: Any) -> Any:
        if not tf.executing_eagerly() and _shapes_only():
            rows = tf.zeros(tf.concat([tf.shape(ids), [self.output_dim]], 0), self.rows_dtype)
            rows.set_shape((*ids.shape, self.output_dim))
            return rows
        return super()._pull(ids)

    def add_stock_variable(self) -> Any:
        """Add the variable of tf_keras.layers.Embedding, filled with zeros."""
        return self.add_weight("embeddings", (self.input_dim, self.output_dim), initializer="zeros")

    def remove_stock_variable(self, variable: Any) -> None:
        """Remove the variable of `add_stock_variable`."""
        for kind in ("_trainable_weights", "_non_trainable_weights"):
            setattr(self, kind, [one for one in getattr(self, kind) if one is not variable])
        self._delete_tracking("embeddings")

    @staticmethod
    def _keras3(part: Any) -> Any:
        return keras3(part)


def _shapes_only() -> bool:
    """Whether tf-keras calls layers on placeholders to learn output shapes, while a model is made."""
    name = getattr(tf.compat.v1.get_default_graph(), "name", "")
    return name.endswith("_scratch_graph") or name == "build_graph"
