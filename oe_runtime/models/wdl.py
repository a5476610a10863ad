"""Wide & Deep (Cheng et al., 2016): a linear part beside a deep part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oe_runtime.models.blocks import Fields, Seeds, click_model, deep


def build(fields: Fields, dim: int, hidden: Sequence[int], seeds: Seeds) -> Any:
    """See oe_runtime.models.build."""
    parts = [fields.linear(seeds), deep(fields.embed(dim, seeds), fields.integers, hidden, seeds)]
    return click_model("wdl", fields, parts)
