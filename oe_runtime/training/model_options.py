"""The flags of the model and its tables."""

from __future__ import annotations

import argparse

from oe_runtime import models
from oe_runtime.training import policies
from oe_runtime.training.argument_types import widths
from oe_runtime.training.setting_flags import add


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The flags of what is trained."""
    m = p.add_argument_group("model")
    add(m, "model")
    add(m, "dim", 9)
    for name, layers in (
        ("hidden", models.Shape.hidden),
        ("cin", models.Shape.cin),
        ("bottom", models.Shape.bottom),
    ):
        add(m, name, layers, type=widths, metavar="N,N")
    add(m, "interaction", models.Shape.interaction)
    add(m, "precision", "float32")
    add(m, "row_precision", "float32")
    add(m, "index", "array")
    add(m, "admission", type=policies.admission, metavar="RULE")
    add(m, "eviction", [], type=policies.eviction, metavar="RULE,…")
    add(m, "max_cardinality", 0)
