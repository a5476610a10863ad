"""PyTorch models whose embedding rows live on parameter servers.

    import oe_runtime.torch as embed

    model = embed.distributed_model(model, client)  # its large nn.Embedding layers now live on the servers
    optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
    optimizer = embed.distributed_optimizer(optimizer, model)
    loss(model(x), y).backward()
    optimizer.step()  # pushes the rows' gradients

Servers, tables and checkpoints are those of `oe_runtime.keras`. Importing this module needs PyTorch, but no
server.
"""

from oe_runtime.torch.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from oe_runtime.torch.embedding import Embedding, EmbeddingBag, pull, read_ahead
from oe_runtime.torch.export import export
from oe_runtime.torch.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from oe_runtime.torch.model import distributed_model, saved_tables
from oe_runtime.torch.optimizer import distributed_optimizer
from oe_runtime.torch.pipeline import TrainPipeline
from oe_runtime.torch.rows import Rows
from oe_runtime.torch.rowwise_adagrad import RowWiseAdagrad

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "RowWiseAdagrad",
    "Rows",
    "TrainPipeline",
    "distributed_model",
    "distributed_optimizer",
    "export",
    "pull",
    "read_ahead",
    "saved_tables",
]
