"""Keras models whose embedding rows live on parameter servers.

    import oe_runtime.keras as embed

    model = embed.distributed_model(model, client)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
    model.fit(...)

The names are those of `openembedding.tensorflow`. Importing this module needs Keras and its backend
(KERAS_BACKEND: TensorFlow, PyTorch or JAX), but no server. `GradientTape`, `pulling` and `TensorFlowWorkers`
exist on TensorFlow only.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from oe_runtime.keras import backends, exb
from oe_runtime.keras.convert import distributed_model
from oe_runtime.keras.embedding import Embedding
from oe_runtime.keras.exb import (
    load_server_model,
    persist_server_model,
    restore_server_model,
    save_server_model,
    should_persist_server_model,
)
from oe_runtime.keras.job_callback import JobCallback
from oe_runtime.keras.keras2 import accept_keras2_layers
from oe_runtime.keras.model import Distributed, DistributedModel, distributed_optimizer
from oe_runtime.keras.optimizers import DECLARED, AdagradDecay, AdamAsync, Ftrl, RowWiseAdagrad
from oe_runtime.keras.saving import check_export, save_as_original_model
from oe_runtime.keras.servers import Flags, flags
from oe_runtime.support import job_hooks

__version__ = version("oeprov")

if backends.NAME == "tensorflow":
    job_hooks.join()

__all__ = [
    "AdagradDecay",
    "AdamAsync",
    "Distributed",
    "DistributedModel",
    "Embedding",
    "Flags",
    "Ftrl",
    "JobCallback",
    "RowWiseAdagrad",
    "accept_keras2_layers",
    "check_export",
    "distributed_model",
    "distributed_optimizer",
    "exb",
    "flags",
    "load_server_model",
    "persist_server_model",
    "restore_server_model",
    "save_as_original_model",
    "save_server_model",
    "should_persist_server_model",
]

globals().update(DECLARED)
__all__ += list(DECLARED)

if TYPE_CHECKING or backends.NAME == "tensorflow":
    from oe_runtime.keras.pipeline import pulling
    from oe_runtime.keras.tape import GradientTape
    from oe_runtime.keras.workers import Workers
    from oe_runtime.run.tensorflow_workers import TensorFlowWorkers

    __all__ += ["GradientTape", "TensorFlowWorkers", "Workers", "pulling"]
else:

    def __getattr__(name: str) -> Any:
        if name in ("GradientTape", "TensorFlowWorkers", "Workers", "pulling"):
            raise AttributeError(f"{name} needs Keras on TensorFlow, but it runs on {backends.NAME} here")
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
