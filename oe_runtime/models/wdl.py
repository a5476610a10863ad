"""Wide & Deep (Cheng et al., 2016): a linear part beside a deep part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from oe_runtime.models.blocks import Seeds, deep, embed, inputs, linear


def build(field_rows: Sequence[int], dim: int, hidden: Sequence[int], seed: int) -> Any:
    """See oe_runtime.models.build."""
    seeds = Seeds(seed)
    integers, ids = inputs()
    wide = linear(integers, ids, field_rows, seeds)
    logits = keras.layers.Add(name="logit")(
        [wide, deep(embed(ids, field_rows, dim, seeds), integers, hidden, seeds)]
    )
    probability = keras.layers.Activation("sigmoid", dtype="float32", name="click")(logits)
    return keras.Model([integers, *ids], probability, name="wdl")
