"""What differs between the backends of Keras.

`backend` is the one that Keras runs on (KERAS_BACKEND): a module of this package, and the only one that is
imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

import keras

from oe_runtime.keras.served import Served

NAME: str = keras.backend.backend()


class Steps(Protocol):
    """The batches of one compiled model, as the trainer of Keras on this backend runs them."""

    def train_function(self) -> Callable[..., Any]:
        """What `keras.Model.train_function` is."""
        ...

    def test_function(self) -> Callable[..., Any]:
        """What `keras.Model.test_function` is."""
        ...

    def predict_function(self) -> Callable[..., Any]:
        """What `keras.Model.predict_function` is."""
        ...

    def announce(self, data: Any) -> None:
        """See `Distributed.prefetch`."""
        ...


class Backend(Protocol):
    """A backend: what is not offered on it, how a layer looks up, and the steps of a model."""

    def check(self, *, several_workers: bool, staleness: int, micro_batches: int) -> None:
        """Raises ValueError for what `distributed_model` cannot do here."""
        ...

    def adapt(self, model: Any) -> None:
        """Replaces layers of a distributed model by faster ones, if there are any."""
        ...

    def check_compile(self, served: Served, *, jit_compile: Any) -> Any:
        """Returns the `jit_compile` that is for Keras; ValueError for what a model cannot have here."""
        ...

    def steps(self, served: Served, *, eager: bool) -> Steps:
        """The steps of a compiled model."""
        ...

    def integer_ids(self, ids: Any, layer: str) -> Any:
        """What a layer was called with, as a tensor of int32 or int64; uint64 by its bits."""
        ...

    def pull(self, layer: Any, ids: Any) -> Any:
        """The rows of ids, pulled here and now: outside of a step.

        Raises RuntimeError where gradients of rows that are to be trained would be lost.
        """
        ...


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
