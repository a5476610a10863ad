"""DeepFM (Guo et al., 2017): linear part, factorization machine and deep part over shared embeddings."""

from __future__ import annotations

from typing import Any

import keras

from oe_runtime.models.blocks import Fields, Seeds, click_model, deep
from oe_runtime.models.shape import Shape


def build(fields: Fields, shape: Shape, seeds: Seeds) -> Any:
    """See oe_runtime.models.build."""
    embeddings = fields.embed(shape.dim, seeds)
    parts = [fields.linear(seeds), factorization(embeddings), deep(embeddings, fields.numbers, shape, seeds)]
    return click_model("deepfm", fields, parts)


def factorization(embeddings: Any) -> Any:
    """(B, fields, dim) → (B, 1): the sum of all pairs' inner products, as (sum² − sum of squares) / 2."""
    square_of_sum = keras.ops.square(keras.ops.sum(embeddings, axis=1))
    sum_of_squares = keras.ops.sum(keras.ops.square(embeddings), axis=1)
    return 0.5 * keras.ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)
