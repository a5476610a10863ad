"""DeepFM (Guo et al., 2017): linear part, factorisation machine and deep part over the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from oe_runtime.models.blocks import Seeds, deep, embed, inputs, linear


def build(field_rows: Sequence[int], dim: int, hidden: Sequence[int], seed: int) -> Any:
    """See oe_runtime.models.build."""
    seeds = Seeds(seed)
    integers, ids = inputs()
    embeddings = embed(ids, field_rows, dim, seeds)
    logits = keras.layers.Add(name="logit")(
        [
            linear(integers, ids, field_rows, seeds),
            factorisation(embeddings),
            deep(embeddings, integers, hidden, seeds),
        ]
    )
    probability = keras.layers.Activation("sigmoid", dtype="float32", name="click")(logits)
    return keras.Model([integers, *ids], probability, name="deepfm")


def factorisation(embeddings: Any) -> Any:
    """(B, fields, dim) → (B, 1): the sum of all pairs' inner products, as (sum² − sum of squares) / 2."""
    square_of_sum = keras.ops.square(keras.ops.sum(embeddings, axis=1))
    sum_of_squares = keras.ops.sum(keras.ops.square(embeddings), axis=1)
    return 0.5 * keras.ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)
