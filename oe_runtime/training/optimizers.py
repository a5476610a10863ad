"""The trainer's optimizers by name: all that tables support."""

from __future__ import annotations

from typing import Any

# Name: class of Keras or of oe_runtime.keras, a learning rate that suits click models, other settings.
_OPTIMIZERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "adadelta": ("Adadelta", 1.0, {}),
    "adagrad": ("Adagrad", 0.05, {}),
    "adagraddecay": ("AdagradDecay", 0.05, {}),
    "adam": ("Adam", 0.001, {}),
    "adamasync": ("AdamAsync", 0.001, {}),
    "adamax": ("Adamax", 0.002, {}),
    "adamw": ("AdamW", 0.001, {}),
    "amsgrad": ("Adam", 0.001, {"amsgrad": True}),
    "ftrl": ("Ftrl", 0.05, {}),
    "lion": ("Lion", 0.0001, {}),
    "momentum": ("SGD", 0.02, {"momentum": 0.9}),
    "nadam": ("Nadam", 0.001, {}),
    "rmsprop": ("RMSprop", 0.001, {}),
    "sgd": ("SGD", 0.1, {}),
}
LEARNING_RATES = {name: rate for name, (_, rate, _) in _OPTIMIZERS.items()}


def make(name: str, learning_rate: float) -> Any:
    """Return the Keras optimizer `name` of LEARNING_RATES with its default settings. Imports Keras."""
    import keras

    import oe_runtime.keras as embed

    kind, _, options = _OPTIMIZERS[name]
    return (getattr(keras.optimizers, kind, None) or getattr(embed, kind))(learning_rate, **options)
