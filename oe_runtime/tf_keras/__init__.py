"""Models of tf-keras 2 whose embedding rows live on parameter servers: for scripts that need Keras 2.

    import tf_keras as keras  # or tf.keras, with TF_USE_LEGACY_KERAS=1
    import oe_runtime.tf_keras as embed

    model = embed.distributed_model(model, client)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
    model.fit(...)

Names, tables, row files and steps are those of `oe_runtime.keras`, which this package builds on. Importing it
needs TensorFlow, tf-keras of the same version, and Keras 3, which comes with TensorFlow.
"""

from importlib.metadata import version

import keras as _keras3

try:
    import tf_keras  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"oe_runtime.tf_keras needs tf-keras of TensorFlow's version, pip install --no-deps tf-keras: {error}"
    ) from error

if _keras3.backend.backend() != "tensorflow":
    raise ImportError(
        f"oe_runtime.tf_keras needs TensorFlow, but KERAS_BACKEND is {_keras3.backend.backend()}: unset it"
    )

from oe_runtime.keras import exb
from oe_runtime.keras.exb import (
    load_server_model,
    persist_server_model,
    restore_server_model,
    save_server_model,
    should_persist_server_model,
)
from oe_runtime.keras.pipeline import pulling
from oe_runtime.keras.saving import check_export, save_as_original_model
from oe_runtime.keras.servers import Flags, flags
from oe_runtime.keras.tape import GradientTape
from oe_runtime.keras.workers import Workers
from oe_runtime.run.tensorflow_workers import TensorFlowWorkers
from oe_runtime.tf_keras.convert import distributed_model
from oe_runtime.tf_keras.embedding import Embedding
from oe_runtime.tf_keras.job_callback import JobCallback
from oe_runtime.tf_keras.model import Distributed, DistributedModel
from oe_runtime.tf_keras.translate import distributed_optimizer

__version__ = version("oeprov")

__all__ = [
    "Distributed",
    "DistributedModel",
    "Embedding",
    "Flags",
    "GradientTape",
    "JobCallback",
    "TensorFlowWorkers",
    "Workers",
    "check_export",
    "distributed_model",
    "distributed_optimizer",
    "exb",
    "flags",
    "load_server_model",
    "persist_server_model",
    "pulling",
    "restore_server_model",
    "save_as_original_model",
    "save_server_model",
    "should_persist_server_model",
]
