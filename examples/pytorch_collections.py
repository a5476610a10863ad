"""Train a two-tower recommender with lists of ids, by collections of tables as TorchRec has them, as a job.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_collections.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_collections.py --in-process --run-dir run

A program for TorchRec keeps its model: distributed_model puts this package's collections in place of
TorchRec's, and both take TorchRec's KeyedJaggedTensor.
"""

import numpy as np
import torch
from clicks import ITEMS, USERS, clicks
from torch import nn

import oe_runtime.job as job
import oe_runtime.torch as embed

BATCH, BATCHES, DIM = 500, 100, 16


class TwoTowers(nn.Module):
    """The users' tower has the user and the last items, which share a table with the items' tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = embed.EmbeddingBagCollection(
            [
                embed.EmbeddingBagConfig(USERS, DIM, "t_user", feature_names=["user"]),
                embed.EmbeddingBagConfig(ITEMS, DIM, "t_item", feature_names=["item", "last_items"]),
            ]
        )
        self.user = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.item = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, features: embed.KeyedJaggedTensor) -> torch.Tensor:
        """The score of each user and item, (examples, examples)."""
        found = self.tables(features)
        users = self.user(torch.cat([found["user"], found["last_items"]], 1))
        return users @ self.item(found["item"]).T


def batches():
    """KeyedJaggedTensors: a user, the item of the click, and up to four items of before."""
    inputs, labels = clicks(BATCH * BATCHES * 4)
    clicked = labels[:, 0] == 1
    users, items = (inputs[name][clicked, 0][: BATCH * BATCHES] for name in ("user", "item"))
    random = np.random.default_rng(0)
    for begin in range(0, len(users) - BATCH + 1, BATCH):
        lengths = random.integers(0, 5, BATCH)
        last = random.choice(items, int(lengths.sum()))
        ids = np.concatenate([users[begin : begin + BATCH], items[begin : begin + BATCH], last])
        one = np.ones(2 * BATCH, np.int64)
        yield embed.KeyedJaggedTensor(
            ["user", "item", "last_items"],
            torch.from_numpy(ids),
            lengths=torch.from_numpy(np.concatenate([one, lengths])),
        )


torch.manual_seed(0)
model = embed.distributed_model(TwoTowers(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.05), model)
with job.training(model, optimizer) as loop:
    for _epoch in loop.epochs(2):
        for features in loop.batches(list(batches())):
            optimizer.zero_grad()
            scores = model(features)
            loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
            loss.backward()
            optimizer.step()
            job.step(loss=loss)
