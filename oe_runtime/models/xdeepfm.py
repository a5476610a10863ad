"""xDeepFM: linear part, compressed interaction network (CIN) and deep part over the same embeddings.

Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems", KDD
2018, https://arxiv.org/abs/1803.05170. As in the paper's equations, the CIN has neither bias nor activation,
and every feature map of every layer counts (their code can hand half of them to the next layer only).
"""

from __future__ import annotations

from typing import Any

import keras

from oe_runtime.models.blocks import Fields, Seeds, click_model, deep, dense
from oe_runtime.models.shape import Shape


def build(fields: Fields, shape: Shape, seeds: Seeds) -> Any:
    """See oe_runtime.models.build."""
    embeddings = fields.embed(shape.dim, seeds)
    parts = [
        fields.linear(seeds),
        interactions(embeddings, shape, seeds),
        deep(embeddings, fields.numbers, shape, seeds),
    ]
    return click_model("xdeepfm", fields, parts)


def interactions(embeddings: Any, shape: Shape, seeds: Seeds) -> Any:
    """(B, fields, dim) → (B, 1): the CIN, whose layer k has shape.cin[k-1] feature maps.

    X⁰ are the embeddings, and feature map h of layer k is (equation 6) the sum over its rows i and the fields
    j of weights times element-wise products,

        Xᵏ[h] = Σᵢⱼ Wᵏʰ[i, j] · (Xᵏ⁻¹[i] ∘ X⁰[j]),

    which is one matrix product over the pairs (i, j) in each dimension. Every map is summed over the
    dimensions (7), and the logit is linear in all these sums (8).
    """
    dim, fields = embeddings.shape[2], embeddings.shape[1]
    first = keras.layers.Permute((2, 1), name="cin_fields")(embeddings)  # (B, dim, fields)
    last, sums = first, []
    for k, width in enumerate(shape.cin, start=1):
        pairs = keras.ops.expand_dims(last, 3) * keras.ops.expand_dims(first, 2)
        pairs = keras.layers.Reshape((dim, last.shape[2] * fields), name=f"cin_pairs_{k}")(pairs)
        last = dense(width, None, f"cin_{k}", seeds, bias=False, dtype=shape.dtype)(pairs)  # (B, dim, width)
        sums.append(keras.ops.sum(last, axis=1))
    joined = keras.layers.Concatenate(name="cin_sums")(sums) if sums[1:] else sums[0]
    return dense(1, None, "cin_logit", seeds)(joined)
