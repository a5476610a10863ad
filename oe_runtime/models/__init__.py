"""Click models over Criteo's fields: stock Keras 3 functional models with plain Embedding layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

NAMES = ("deepfm", "wdl")
HIDDEN = (256, 128)


def build(
    name: str,
    field_rows: Sequence[int],
    dim: int,
    *,
    hidden: Sequence[int] = HIDDEN,
    seed: int = 0,
    embedding: Callable[..., Any] | None = None,
) -> Any:
    """A keras.Model from [integers (B, 13), C1_id (B, 1), …, C26_id (B, 1)] to click probability (B, 1).

    `field_rows[i]` is the number of ids of field i. Embedding layers, and so the tables, are called
    C1 … C26 (width `dim`) and C1_linear … C26_linear (width 1). All initial values follow from `seed`.
    `embedding` makes the layers, keras.layers.Embedding unless given: for tables larger than this
    process's memory, pass one that makes oe_runtime.keras.Embedding. Imports TensorFlow.
    """
    from oe_runtime.models import deepfm, wdl
    from oe_runtime.models.blocks import Fields, Seeds

    fields = Fields(field_rows, embedding)
    return {"deepfm": deepfm.build, "wdl": wdl.build}[name](fields, dim, tuple(hidden), Seeds(seed))
