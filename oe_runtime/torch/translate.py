"""torch.optim's optimizers as entries of a table's specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from oe_runtime.torch.rowwise_adagrad import RowWiseAdagrad

_NO_EQUIVALENT = "embedding tables on the parameter servers do not support it"


def table_optimizer(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server's counterpart of a torch.optim optimizer with the settings of one group.

    `foreach`, `fused` and `capturable` say how PyTorch computes its own update; rows have none of them.
    Raises ValueError naming the optimizer or the option that tables do not support.
    """
    kind = type(optimizer)  # exactly: a subclass may update differently
    if kind not in _OPTIMIZERS:
        known = ", ".join(known.__name__ for known in _OPTIMIZERS)
        if kind.__name__ == RowWiseAdagrad.__name__:  # TorchRec's
            raise ValueError(
                f"optimizer {kind.__module__}.{kind.__name__}: its step takes the mean of a row's gradient "
                "for all weights of the row, which is not the rule of FBGEMM's tables; use "
                "oe_runtime.torch.RowWiseAdagrad, which is"
            )
        raise ValueError(f"optimizer {kind.__name__}: {_NO_EQUIVALENT}; use one of {known}")
    if group.get("differentiable"):
        raise ValueError(f"optimizer {kind.__name__}(differentiable=True): {_NO_EQUIVALENT}")
    rule = _OPTIMIZERS[kind](group)
    if decay := float(group.get("weight_decay", 0)):
        # For a linear rule both are the same.
        is_linear = rule["name"] == "sgd" and not rule["momentum"]
        is_decoupled = is_linear or kind is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        rule["weight_decay" if is_decoupled else "coupled_weight_decay"] = decay
    if group.get("maximize"):
        rule["maximize"] = True
    if decay := float(group.get("lr_decay", 0)):
        rule["learning_rate_decay"] = decay
    return rule


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    rule = {
        "name": "sgd",
        "momentum": float(group["momentum"]),
        "nesterov": bool(group["nesterov"]),
    }
    if rule["momentum"]:
        rule["torch"] = True
        if group["dampening"]:
            rule["dampening"] = float(group["dampening"])
    return rule


def _betas(group: Mapping[str, Any]) -> dict[str, Any]:
    beta_1, beta_2 = (float(beta) for beta in group["betas"])
    return {"beta_1": beta_1, "beta_2": beta_2, "epsilon": float(group["eps"])}


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": "adam",
        "torch": True,
        **_betas(group),
        "amsgrad": bool(group.get("amsgrad")),
        "weight_decay": 0.0,
    }


_OPTIMIZERS: Mapping[type, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: lambda group: {
        "name": "adagrad",
        "torch": True,
        "initial_accumulator_value": float(group["initial_accumulator_value"]),
        "epsilon": float(group["eps"]),
    },
    torch.optim.Adadelta: lambda group: {
        "name": "adadelta",
        "rho": float(group["rho"]),
        "epsilon": float(group["eps"]),
    },
    torch.optim.Adam: _adam,
    torch.optim.AdamW: lambda group: {**_adam(group), "name": "adamw"},
    torch.optim.Adamax: lambda group: {"name": "adamax", "torch": True, **_betas(group)},
    torch.optim.NAdam: lambda group: {
        "name": "nadam",
        "torch": True,
        **_betas(group),
        "momentum_decay": float(group["momentum_decay"]),
    },
    torch.optim.RAdam: lambda group: {"name": "radam", **_betas(group)},
    torch.optim.RMSprop: lambda group: {
        "name": "rmsprop",
        "torch": True,
        "rho": float(group["alpha"]),
        "momentum": float(group["momentum"]),
        "epsilon": float(group["eps"]),
        "centered": bool(group["centered"]),
    },
    # It adds ε where Keras's Adam does, the others where PyTorch's Adam does.
    torch.optim.SparseAdam: lambda group: {**_adam(group), "epsilon_hat": True},
    RowWiseAdagrad: lambda group: {
        "name": "rowwise_adagrad",
        "initial_accumulator_value": float(group["initial_accumulator_value"]),
        "epsilon": float(group["eps"]),
    },
}
