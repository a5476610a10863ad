"""The differences between the backends of Keras.

`backend` is the module of this package for Keras's backend (KERAS_BACKEND), and the only one imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import keras

from oe_runtime.keras.served import Served

NAME: str = keras.backend.backend()


class Steps(Protocol):
    """The batches of one compiled model, in the form that Keras's trainer on this backend calls."""

    def train_function(self) -> Callable[..., Any]:
        """Return the function for `keras.Model.train_function`."""

    def test_function(self) -> Callable[..., Any]:
        """Return the function for `keras.Model.test_function`."""

    def predict_function(self) -> Callable[..., Any]:
        """Return the function for `keras.Model.predict_function`."""

    def announce(self, data: Any, after: Any) -> None:
        """See `Distributed.prefetch`."""


class Backend(Protocol):
    """A backend: its limits, the lookups of a layer, and the steps of a model."""

    def check(self, *, several_workers: bool, staleness: int, micro_batches: int) -> None:
        """Raise ValueError for options of `distributed_model` that this backend does not support."""

    def adapt(self, model: Any) -> None:
        """Replace layers of a distributed model by faster ones, if there are any."""

    def check_compile(self, served: Served, *, jit_compile: Any) -> Any:
        """Return the `jit_compile` for Keras. Raises ValueError for models that this backend cannot run."""

    def steps(self, served: Served, *, eager: bool) -> Steps:
        """Return the steps of a compiled model."""

    def integer_ids(self, ids: Any, layer: str) -> Any:
        """Return a layer's input as a tensor of int32 or int64; uint64 by its bits.

        Floats stay as they are where they have no values yet: `feed.to_keys` checks and converts those.
        """

    def is_traced(self, values: Sequence[Any]) -> bool:
        """Whether a call with these arguments becomes a graph that may outlive the layers' tables."""

    def pull(self, layer: Any, ids: Any) -> Any:
        """Pull the rows of ids now, outside of a step.

        Raises RuntimeError where gradients of trainable rows would be lost.
        """

    def all_rows(self, layer: Any) -> Any:
        """Return all rows of a layer as a tensor. Raises RuntimeError where their gradients would be lost."""

    def update_rows(self, optimizer: Any) -> None:
        """Let an optimizer push the gradients of rows when a loop of one's own applies it."""


def _load() -> Backend:
    if keras.__version__.startswith("2."):
        raise ImportError(
            f"oe_runtime.keras needs Keras 3, but {keras.__version__} is installed: pip install 'keras>=3.4'"
        )
    if NAME not in ("tensorflow", "torch", "jax"):
        raise ImportError(
            f"oe_runtime.keras needs Keras on TensorFlow, PyTorch or JAX, not on {NAME}: set KERAS_BACKEND, "
            "or `backend` in ~/.keras/keras.json"
        )
    return cast(Backend, importlib.import_module(f"oe_runtime.keras.backends.{NAME}"))


backend = _load()
