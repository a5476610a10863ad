"""The trainer's optimizers by name: all that tables support."""

from __future__ import annotations

from oe_runtime.spec import OPTIMIZERS

_DEFAULT_RATE = 0.001

# Default learning rates for click models, with names for an option of another optimizer.
LEARNING_RATES = dict(
    sorted(
        {
            **{name.replace("_", ""): _DEFAULT_RATE for name in OPTIMIZERS},
            "adadelta": 1.0,
            "adagrad": 0.05,
            "adagraddecay": 0.05,
            "adamax": 0.002,
            "amsgrad": _DEFAULT_RATE,
            "ftrl": 0.05,
            "lion": 0.0001,
            "momentum": 0.02,
            "rowwiseadagrad": 0.05,
            "sgd": 0.1,
        }.items()
    )
)
