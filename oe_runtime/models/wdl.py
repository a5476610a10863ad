"""Wide & Deep (Cheng et al., 2016): a linear part beside a deep part."""

from __future__ import annotations

from typing import Any

from oe_runtime.models.blocks import Fields, Seeds, click_model, deep
from oe_runtime.models.shape import Shape


def build(fields: Fields, shape: Shape, seeds: Seeds) -> Any:
    """See oe_runtime.models.build."""
    linear = fields.linear(seeds)
    parts = [linear, deep(fields.embed(shape.dim, seeds), fields.numbers, shape, seeds)]
    return click_model("wdl", fields, parts)
