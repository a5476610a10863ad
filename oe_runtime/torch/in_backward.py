"""Optimizers that update rows in the backward pass, as `apply_optimizer_in_backward` chooses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from oe_runtime.torch.embedding import TableLayer
from oe_runtime.torch.rowwise_adagrad import RowWiseAdagrad

# TorchRec's classes stand for FBGEMM's rules, with FBGEMM's names and defaults of their settings.
_OF_TORCHREC: Mapping[str, Callable[..., Any]] = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "RowWiseAdagrad": RowWiseAdagrad,
}
_FBGEMM_NAMES = {"learning_rate": "lr"}


def take(layer: TableLayer, weight: Any) -> None:
    """Let a layer have the optimizer that was applied in backward to the weight that it replaces.

    Raises ValueError for two of them, and for one that tables do not have.
    """
    classes = getattr(weight, "_optimizer_classes", [])
    if not classes:
        return
    if len(classes) > 1:
        names = ", ".join(one.__name__ for one in classes)
        raise ValueError(f"a weight has several optimizers in backward: {names}; apply one")
    kind, given = classes[0], dict(weight._optimizer_kwargs[0])
    given.pop("optimizer", None)  # TorchRec's name of the rule, which the class says
    check_rounding(f"{kind.__name__} in backward", layer.dtype, given.pop("stochastic_rounding", None))
    if kind.__module__.startswith("torchrec."):
        if kind.__name__ not in _OF_TORCHREC:
            known = ", ".join(_OF_TORCHREC)
            raise ValueError(
                f"{kind.__module__}.{kind.__name__} in backward: embedding tables on the parameter servers "
                f"do not support it; use one of {known}"
            )
        kind, given = _OF_TORCHREC[kind.__name__], _settings(kind.__name__, given)
    try:
        optimizer = kind([layer.anchor], **given)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} in backward: {error}; leave this setting out") from None
    # What PyTorch and TorchRec look for: the first as `_get_in_backward_optimizers`, the second to leave it
    # out of other optimizers.
    layer.anchor._in_backward_optimizers = [optimizer]
    layer.anchor._optimizer_classes, layer.anchor._optimizer_kwargs = [kind], [given]


def check_rounding(where: str, dtype: Any, stochastic: bool | None) -> None:
    """Raise ValueError where rows of two bytes shall be rounded to the nearest."""
    if stochastic is not None and not stochastic and dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{where}: stochastic_rounding=False is not offered, because rows of two bytes would lose small "
            "updates; leave it out, or keep rows in float32"
        )


def _settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by PyTorch's names."""
    found = {_FBGEMM_NAMES.get(key, key): value for key, value in given.items()}
    if "beta1" in found or "beta2" in found:
        found["betas"] = (found.pop("beta1", 0.9), found.pop("beta2", 0.999))
    if name == "SGD":
        found.pop("eps", None)  # the rule has none
    else:
        found.setdefault("eps", 1e-8)
    return found


def optimizer_of(layer: TableLayer) -> Any:
    """Return the optimizer that updates a layer's rows in the backward pass, or None."""
    return next(iter(getattr(layer.anchor, "_in_backward_optimizers", ())), None)


class AfterBackward:
    """Calls a function once at the end of each backward pass that has reached one of some parameters."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._queued = -1  # for which pass

    def queue(self, _: Any = None) -> None:
        """Call the function when the present backward pass ends."""
        task = torch._C._current_graph_task_id()
        if task != self._queued:  # an error may have ended an earlier pass
            self._queued = task
            torch.autograd.Variable._execution_engine.queue_callback(self._call)

    def _call(self) -> None:
        self._queued = -1
        self._function()
