"""Click models over a schema's columns: stock functional Keras 3 models with plain Embedding layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oe_runtime.data.row_schema import CRITEO, Schema
from oe_runtime.models.shape import INTERACTIONS, Shape

__all__ = ["INTERACTIONS", "NAMES", "Shape", "build"]

NAMES = ("deepfm", "dlrm", "wdl", "xdeepfm")


def build(
    name: str,
    field_rows: Sequence[int],
    dim: int,
    *,
    hidden: Sequence[int] = Shape.hidden,
    cin: Sequence[int] = Shape.cin,
    bottom: Sequence[int] = Shape.bottom,
    interaction: str = Shape.interaction,
    dtype: str = Shape.dtype,
    seed: int = 0,
    embedding: Callable[..., Any] | None = None,
    schema: Schema = CRITEO,
) -> Any:
    """Return a keras.Model from [integers (B, 13), C1_id (B, 1), …, C26_id (B, 1)] to click probability.

    The output is (B, 1). `field_rows[i]` is the number of ids of field i. Embedding layers, and so the
    tables, are named C1 … C26 (width `dim`) and, except for DLRM, C1_linear … C26_linear (width 1).
    Another `schema` has its own columns for them: inputs `numbers`, unless it has none, and NAME_id (B,
    length), whose embeddings are averaged or summed over its values. All initial values follow from `seed`.
    `hidden`, `cin`, `bottom`, `interaction` and `dtype`: see `Shape`. `embedding` makes the layers, by
    default keras.layers.Embedding. For tables larger than this process's memory, pass one that makes
    oe_runtime.keras.Embedding. Imports TensorFlow.
    """
    from oe_runtime.models import deepfm, dlrm, wdl, xdeepfm
    from oe_runtime.models.blocks import Fields, Seeds

    builders = {"deepfm": deepfm.build, "dlrm": dlrm.build, "wdl": wdl.build, "xdeepfm": xdeepfm.build}
    shape = Shape(dim, tuple(hidden), tuple(cin), tuple(bottom), interaction, dtype)
    return builders[name](Fields(field_rows, embedding, schema), shape, Seeds(seed))
