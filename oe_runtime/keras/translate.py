"""Keras's optimizers and initializers in the words of a table's specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

_NO_EQUIVALENT = "embedding tables on the parameter servers do not support it"

# The hyperparameters that decide how a row is updated; the learning rate travels with every push instead.
_OPTIMIZERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Adagrad": ("adagrad", ("initial_accumulator_value", "epsilon")),
    "Adam": ("adam", ("beta_1", "beta_2", "epsilon")),
    "SGD": ("sgd", ("momentum", "nesterov")),
    "Ftrl": (
        "ftrl",
        (
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        ),
    ),
}

# Options of any Keras optimizer that change an update beyond its rule.
_UNSUPPORTED = (
    "amsgrad",
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def distributed_optimizer(optimizer: Any) -> Any:
    """Checks that tables can be trained like dense variables by `optimizer`, and returns it.

    Takes a Keras Adagrad, Adam, SGD or Ftrl, or the name of one. `DistributedModel.compile` gives every table
    the server's counterpart with the same hyperparameters; each step pushes with the learning rate of that
    step, also when it follows a schedule. A row's gradients are summed over the batch before the update, and
    only rows that are in the batch are updated.

    Raises ValueError naming the optimizer or the option that tables do not support.
    """
    optimizer = keras.optimizers.get(optimizer)
    table_optimizer(optimizer)
    return optimizer


def table_optimizer(optimizer: Any) -> dict[str, Any]:
    """The server's counterpart of a Keras optimizer: {"name": …, hyperparameters}.

    Raises ValueError naming the optimizer or the option that tables do not support.
    """
    kind = type(optimizer).__name__
    # Exactly Keras's own class: a subclass may update differently.
    if kind not in _OPTIMIZERS or type(optimizer) is not getattr(keras.optimizers, kind):
        known = ", ".join(_OPTIMIZERS)
        raise ValueError(f"optimizer {kind}: {_NO_EQUIVALENT}; use one of {known}")
    for option in _UNSUPPORTED:
        value = getattr(optimizer, option, None)
        if value is not None and value is not False:
            raise ValueError(f"optimizer {kind}({option}={value}): {_NO_EQUIVALENT}; leave {option} out")
    name, hyperparameters = _OPTIMIZERS[kind]
    values = {key: getattr(optimizer, key) for key in hyperparameters}
    return {"name": name, **{k: v if isinstance(v, bool) else float(v) for k, v in values.items()}}


def table_initializer(initializer: Any, seed: int, layer: str) -> dict[str, Any]:
    """The server's counterpart of a Keras initializer: {"name": …, parameters, "seed": …}.

    The initializer's own seed is taken when it has one, else `seed`. Raises ValueError naming `layer` when
    there is no counterpart.
    """
    kind = type(initializer)
    config = initializer.get_config() if isinstance(initializer, keras.initializers.Initializer) else {}
    own_seed = config.get("seed")
    if own_seed is None:
        own_seed = seed
    if not isinstance(own_seed, int) or own_seed < 0:
        raise ValueError(f"layer '{layer}': the initializer's seed must be an integer ≥ 0, not {own_seed!r}")
    spec: dict[str, Any]
    if kind is keras.initializers.Zeros:
        spec = {"name": "zeros"}
    elif kind is keras.initializers.Ones:
        spec = {"name": "constant", "value": 1.0}
    elif kind is keras.initializers.Constant and isinstance(initializer.value, (int, float)):
        spec = {"name": "constant", "value": float(initializer.value)}
    elif kind is keras.initializers.RandomUniform:
        spec = {"name": "uniform", "minval": float(config["minval"]), "maxval": float(config["maxval"])}
    elif kind is keras.initializers.RandomNormal:
        spec = {"name": "normal", "mean": float(config["mean"]), "stddev": float(config["stddev"])}
    else:
        raise ValueError(
            f"layer '{layer}': the initializer {kind.__name__} has no counterpart on the parameter servers; "
            "use Zeros, Ones, Constant (one number), RandomUniform or RandomNormal"
        )
    return {**spec, "seed": own_seed}


def expected_row_value(initializer: Mapping[str, Any]) -> float:
    """The mean of what a table's initializer gives an untrained row."""
    match initializer["name"]:
        case "constant":
            return float(initializer["value"])
        case "uniform":
            return (float(initializer["minval"]) + float(initializer["maxval"])) / 2
        case "normal":
            return float(initializer["mean"])
        case _:
            return 0.0
