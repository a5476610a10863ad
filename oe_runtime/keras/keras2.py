"""Code for Keras 2 on Keras 3."""

from __future__ import annotations

import functools
from typing import Any

import keras

_ORDER = ("name", "shape", "dtype", "initializer", "regularizer", "trainable")  # of Keras 2's add_weight


def accept_keras2_layers() -> None:
    """Let layers name their weights by position, as in Keras 2: `self.add_weight("kernel", shape=…)`.

    DeepCTR 0.9.4's WDL, DeepFM and xDeepFM need only this on Keras 3. Changes keras.layers.Layer in this
    process; calls in Keras 3's order keep their meaning, because a shape is not a str. May be called twice.
    """
    add_weight = keras.layers.Layer.add_weight
    if getattr(add_weight, "accepts_keras2", False):
        return

    @functools.wraps(add_weight)
    def either(self: Any, *positional: Any, **named: Any) -> Any:
        if positional and isinstance(positional[0], str):
            named |= dict(zip(_ORDER, positional, strict=False))
            positional = ()
        return add_weight(self, *positional, **named)

    either.accepts_keras2 = True  # type: ignore[attr-defined]
    keras.layers.Layer.add_weight = either


def refuse_legacy(thing: Any) -> None:
    """Raise ValueError for a model or optimizer of tf-keras (tf.keras with TF_USE_LEGACY_KERAS=1)."""
    if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(thing).__mro__):
        raise ValueError(
            f"{type(thing).__name__} is of tf-keras 2, which tf.keras is with TF_USE_LEGACY_KERAS=1, but "
            "oe_runtime.keras is for Keras 3: write `import oe_runtime.tf_keras as embed`, or unset "
            "TF_USE_LEGACY_KERAS"
        )
