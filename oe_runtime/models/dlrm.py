"""DLRM: the integers' own layers, interactions of all pairs of fields, layers over them.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
https://arxiv.org/abs/1906.00091, and https://github.com/facebookresearch/dlrm (there, `bottom` is
arch_mlp_bot, `hidden` arch_mlp_top, `interaction` arch_interaction_op, without arch_interaction_itself).
"""

from __future__ import annotations

from typing import Any

import keras

from oe_runtime.models.blocks import Fields, Seeds, click_model, dense
from oe_runtime.models.shape import Shape


def build(fields: Fields, shape: Shape, seeds: Seeds) -> Any:
    """See oe_runtime.models.build."""
    bottom = fields.numbers
    if bottom is not None:
        for i, width in enumerate((*shape.bottom, shape.dim), start=1):
            bottom = dense(width, "relu", f"bottom_{i}", seeds, dtype=shape.dtype)(bottom)
    embeddings = fields.embed(shape.dim, seeds)
    if shape.interaction == "dot":
        interactions = dot_products(bottom, embeddings)
    else:
        interactions = keras.layers.Flatten(name="flat")(embeddings)
    x = interactions
    if bottom is not None:
        x = keras.layers.Concatenate(name="top_input")([bottom, interactions])
    for i, width in enumerate(shape.hidden, start=1):
        x = dense(width, "relu", f"top_{i}", seeds, dtype=shape.dtype)(x)
    return click_model("dlrm", fields, [dense(1, None, "top_logit", seeds)(x)])


def dot_products(bottom: Any, embeddings: Any) -> Any:
    """(B, dim), (B, fields, dim) → (B, (fields + 1) · fields / 2): ⟨v, w⟩ of every pair of the vectors.

    A vector's product with itself is not among them. Without numbers, `bottom` is None and no vector.
    """
    vectors = embeddings
    if bottom is not None:
        first = keras.layers.Reshape((1, bottom.shape[1]), name="bottom_vector")(bottom)
        vectors = keras.layers.Concatenate(axis=1, name="vectors")([first, embeddings])
    n = vectors.shape[1]
    products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
    flat = keras.layers.Reshape((n * n,), name="products")(products)
    return keras.ops.take(flat, [i * n + j for i in range(n) for j in range(i)], axis=1)
