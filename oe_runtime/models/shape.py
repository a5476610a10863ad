"""The sizes of a click model; each model uses some of them."""

from __future__ import annotations

from dataclasses import dataclass

INTERACTIONS = ("dot", "cat")


@dataclass(frozen=True)
class Shape:
    """Widths of the layers, from inputs to outputs."""

    dim: int  # of an embedding
    hidden: tuple[int, ...] = (256, 128)  # the deep part; DLRM's top
    cin: tuple[int, ...] = (64, 64)  # xDeepFM: feature maps of each layer of the CIN
    bottom: tuple[int, ...] = (512, 256, 64)  # DLRM: layers over the integers, before one of width `dim`
    interaction: str = "dot"  # DLRM: one of INTERACTIONS
    dtype: str = "float32"  # Keras's dtype policy of the hidden layers; mixed_bfloat16: weights stay float32
