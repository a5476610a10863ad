"""Keras's optimizers and initializers as entries of a table's specification."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

import oe_runtime._core as _core
from oe_runtime.keras import optimizers as ours
from oe_runtime.keras.accumulation import accumulation_steps
from oe_runtime.spec import OPTIMIZERS

STOCK_CLASS = "_stock_class"  # the attribute of a class that `row_updates` has made

_NO_EQUIVALENT = "embedding tables on the parameter servers do not support it"

# Each optimizer of tables by the Keras class of that name: Keras's own, or one of this package.
CLASSES: Mapping[type, str] = {
    kind: name
    for name in OPTIMIZERS
    for module in (keras.optimizers, ours)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__name__.lower() == name.replace("_", "")
}

# Options of any Keras optimizer that change an update beyond its rule, and why tables cannot follow.
_UNSUPPORTED = {
    "use_ema": "the average of a row changes in each step, also in those without it, but rows on the "
    "parameter servers change in their own steps only; a learning rate that falls to 0 (a schedule) evens "
    "weights out too",
    "loss_scale_factor": _NO_EQUIVALENT,
}


def stock_class(optimizer: Any) -> type:
    """Return the class of an optimizer as its library has it."""
    kind: type = getattr(type(optimizer), STOCK_CLASS, type(optimizer))
    return kind


def table_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the server's counterpart of a Keras optimizer: {"name": …, hyperparameters}.

    Raises ValueError naming the optimizer or the option that tables do not support.
    """
    kind = stock_class(optimizer)  # exactly: a subclass may update differently
    if kind.__module__.startswith("keras.src.backend.torch.optimizers."):
        # Keras's own, whose updates are written in PyTorch.
        kind = next((base for base in kind.__mro__ if base in CLASSES), kind)
    if kind not in CLASSES:
        known = ", ".join(dict.fromkeys(k.__name__ for k in CLASSES))
        raise ValueError(f"optimizer {kind.__name__}: {_NO_EQUIVALENT}; use one of {known}")
    for option, why in _UNSUPPORTED.items():
        value = getattr(optimizer, option, None)
        if value is not None and value is not False:
            raise ValueError(f"optimizer {kind.__name__}({option}={value}): {why}; leave {option} out")
    steps = accumulation_steps(optimizer)
    if steps > 1 and clips(optimizer):
        raise ValueError(
            f"optimizer {kind.__name__}(gradient_accumulation_steps={steps}): clipping needs the gradients "
            "of dense weights and rows of all these batches together, which are not kept in one place; "
            "leave clipping out, or use distributed_model(…, micro_batches=…)"
        )
    name = CLASSES[kind]
    # The learning rate travels with every push instead.
    defaults, _ = _core.optimizers()[name]
    values = {key: getattr(optimizer, key) for key in defaults if hasattr(optimizer, key)}
    values["weight_decay"] = _weight_decay(optimizer)
    return {"name": name, **{k: v if isinstance(v, bool) else float(v) for k, v in values.items()}}


def _weight_decay(optimizer: Any) -> float:
    """Return the decay of a variable `embeddings`: 0 if exclude_from_weight_decay(var_names=…) matches it."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if optimizer.weight_decay is None or (excluded is not None and re.search(excluded, "embeddings")):
        return 0.0
    return float(optimizer.weight_decay)


def clips(optimizer: Any) -> bool:
    """Whether gradients are clipped before the optimizer sees them."""
    return any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue))


def clip_tables(
    optimizer: Any, dense: Sequence[Any], tables: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Clip (dense gradients, summed gradients of tables) as Keras does, with a table as one variable.

    By norm and by value each variable is clipped alone, and the optimizer does so with the dense ones. By the
    global norm they are clipped together; the optimizer then sees no larger norm and changes nothing.
    """
    before = list(dense) if optimizer.global_clipnorm else []
    clipped = optimizer._clip_gradients([*before, *tables])
    return (clipped[: len(before)] if optimizer.global_clipnorm else dense), clipped[len(before) :]


def needs_sums(optimizer: Any, layers: Sequence[Any]) -> bool:
    """Whether the rows' gradients must be summed before the push, not by it."""
    return clips(optimizer) or any(layer.embeddings_regularizer is not None for layer in layers)


def table_initializer(
    initializer: Any, seed: int, layer: str, input_dim: int, output_dim: int
) -> dict[str, Any]:
    """Return the server's counterpart of a Keras initializer: {"name": …, parameters, "seed": …}.

    Uses the initializer's own seed if it has one, else `seed`. `input_dim` is -1 for a table of any ids,
    whose fan-in is unknown. Raises ValueError naming `layer` where there is no counterpart.
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
    elif kind is keras.initializers.Constant and np.ndim(initializer.value) == 0:
        spec = {"name": "constant", "value": float(initializer.value)}
    elif kind is keras.initializers.RandomUniform:
        spec = {"name": "uniform", "minval": float(config["minval"]), "maxval": float(config["maxval"])}
    elif kind in _NORMAL:
        spec = {"name": _NORMAL[kind], "mean": float(config["mean"]), "stddev": float(config["stddev"])}
    elif kind in _VARIANCE_SCALING:
        spec = _variance_scaling(initializer, layer, input_dim, output_dim)
    else:
        reason = _WHOLE_MATRIX.get(kind, "has no counterpart on the parameter servers")
        raise ValueError(
            f"layer '{layer}': the initializer {kind.__name__} {reason}; use Zeros, Ones, Constant (one "
            "number), RandomUniform, RandomNormal, TruncatedNormal, VarianceScaling, or one of Glorot's, "
            "He's and Lecun's"
        )
    return {**spec, "seed": own_seed}


_NORMAL: Mapping[type, str] = {
    keras.initializers.RandomNormal: "normal",
    keras.initializers.TruncatedNormal: "truncated_normal",
}

_VARIANCE_SCALING = {
    keras.initializers.VarianceScaling,
    keras.initializers.GlorotNormal,
    keras.initializers.GlorotUniform,
    keras.initializers.HeNormal,
    keras.initializers.HeUniform,
    keras.initializers.LecunNormal,
    keras.initializers.LecunUniform,
}

_WHOLE_MATRIX: Mapping[type, str] = dict.fromkeys(
    (keras.initializers.Orthogonal, keras.initializers.Identity),
    "makes the rows of a matrix depend on each other, but here each row is made by itself, from the seed, "
    "the table's name and the id",
)

# A standard normal variable cut off at ±2 has this standard deviation.
_TRUNCATED_DEVIATION = 0.87962566103423978


def _variance_scaling(initializer: Any, layer: str, input_dim: int, output_dim: int) -> dict[str, Any]:
    """Return variance scale / fan, as Keras computes it for a matrix (input_dim, output_dim)."""
    name, mode = type(initializer).__name__, initializer.mode
    if initializer.input_axes is not None or initializer.output_axes is not None:
        raise ValueError(f"layer '{layer}': {name} with input_axes or output_axes is not supported")
    if mode != "fan_out" and input_dim == -1:
        raise ValueError(
            f"layer '{layer}': the initializer {name} divides by the number of rows ({mode}), which is not "
            "known for a table of any ids; use RandomNormal or RandomUniform with the deviation you want, or "
            "VarianceScaling(mode='fan_out')"
        )
    fan = {"fan_in": input_dim, "fan_out": output_dim, "fan_avg": (input_dim + output_dim) / 2}[mode]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return {"name": "uniform", "minval": -limit, "maxval": limit}
    deviation = math.sqrt(variance)
    if initializer.distribution == "untruncated_normal":
        return {"name": "normal", "mean": 0.0, "stddev": deviation}
    return {"name": "truncated_normal", "mean": 0.0, "stddev": deviation / _TRUNCATED_DEVIATION}


def check_regularizer(regularizer: Any, layer: str) -> None:
    """Raise ValueError naming `layer` for a regularizer that tables do not support."""
    if regularizer is not None and type(regularizer) not in _REGULARIZERS:
        raise ValueError(
            f"layer '{layer}': embeddings_regularizer {type(regularizer).__name__} is not supported for rows "
            "on parameter servers, where only a sum over rows can be; use L1, L2 or L1L2"
        )


_REGULARIZERS = {keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2}


def check_constraint(constraint: Any, layer: str) -> None:
    """Raise ValueError naming `layer` when there is a constraint."""
    if constraint is not None:
        raise ValueError(
            f"layer '{layer}': embeddings_constraint is not supported for rows on parameter servers: Keras "
            "applies it to the whole matrix after each step; regularize with L2, or clip the gradients"
        )


def expected_row_value(initializer: Mapping[str, Any]) -> float:
    """Return the mean of a table initializer's values for an untrained row."""
    match initializer["name"]:
        case "constant":
            return float(initializer["value"])
        case "uniform":
            return (float(initializer["minval"]) + float(initializer["maxval"])) / 2
        case "normal" | "truncated_normal":
            return float(initializer["mean"])
        case _:
            return 0.0
