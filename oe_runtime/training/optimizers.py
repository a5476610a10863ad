"""The trainer's optimizers by name: all that tables have."""

from __future__ import annotations

from typing import Any

# Learning rates that suit click models when none is given.
LEARNING_RATES = {
    "adadelta": 1.0,
    "adagrad": 0.05,
    "adagraddecay": 0.05,
    "adam": 0.001,
    "adamasync": 0.001,
    "adamax": 0.002,
    "adamw": 0.001,
    "amsgrad": 0.001,
    "ftrl": 0.05,
    "lion": 0.0001,
    "momentum": 0.02,
    "nadam": 0.001,
    "rmsprop": 0.001,
    "sgd": 0.1,
}


def make(name: str, learning_rate: float) -> Any:
    """The Keras optimizer `name`, one of LEARNING_RATES, otherwise with its own defaults. Imports Keras."""
    import keras

    import oe_runtime.keras as embed

    kinds = {
        "adadelta": keras.optimizers.Adadelta,
        "adagrad": keras.optimizers.Adagrad,
        "adagraddecay": embed.AdagradDecay,
        "adam": keras.optimizers.Adam,
        "adamasync": embed.AdamAsync,
        "adamax": keras.optimizers.Adamax,
        "adamw": keras.optimizers.AdamW,
        "amsgrad": keras.optimizers.Adam,
        "ftrl": keras.optimizers.Ftrl,
        "lion": keras.optimizers.Lion,
        "momentum": keras.optimizers.SGD,
        "nadam": keras.optimizers.Nadam,
        "rmsprop": keras.optimizers.RMSprop,
        "sgd": keras.optimizers.SGD,
    }
    options: dict[str, dict[str, Any]] = {"amsgrad": {"amsgrad": True}, "momentum": {"momentum": 0.9}}
    return kinds[name](learning_rate, **options.get(name, {}))
