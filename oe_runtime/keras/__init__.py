"""Keras models whose embedding rows live on parameter servers.

    import oe_runtime.keras as embed

    model = embed.distributed_model(model, client)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
    model.fit(...)

Importing this module needs TensorFlow and Keras, but no server.
"""

from oe_runtime.keras.embedding import Embedding
from oe_runtime.keras.model import DistributedModel, distributed_model
from oe_runtime.keras.optimizers import AdagradDecay, AdamAsync
from oe_runtime.keras.translate import distributed_optimizer
from oe_runtime.keras.workers import TensorFlowWorkers, Workers

__all__ = [
    "AdagradDecay",
    "AdamAsync",
    "DistributedModel",
    "Embedding",
    "TensorFlowWorkers",
    "Workers",
    "distributed_model",
    "distributed_optimizer",
]
