"""How `fit` becomes a part of a job: the callback passes it on to oe_runtime.job, which stands above this."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any


class JobFit:
    """The part of `JobCallback` that Keras 3 and tf-keras share; a callback."""

    model: Any
    params: Any

    def __init__(self, job: Any) -> None:
        """`job` is the module oe_runtime.job."""
        super().__init__()
        self._part = job.current().fit_part()

    def fit(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model's `fit`, from the position of the run's checkpoint on."""
        return self._part.fit(self, model, fit_arguments(model, args, kwargs))

    def on_train_begin(self, logs: Any = None) -> None:
        """Count the run's steps."""
        if getattr(self.model, "_around", None) is None:
            raise ValueError(
                "JobCallback is for the models of oe_runtime: give this one to distributed_model first"
            )
        self._part.begin(self.params)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the position."""
        self._part.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the position, and the epoch's figures."""
        self._part.end_epoch(epoch, {} if logs is None else logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop in a validation too."""
        self._part.stop_here()


def fit_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` by name."""
    given = dict(inspect.signature(model.served.library.Model.fit).bind(model, *args, **kwargs).arguments)
    del given["self"]
    return given
