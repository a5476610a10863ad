"""Train clicks and conversions after clicks together: experts with a gate per task (MMoE) over shared tables.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_multi_task.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_multi_task.py --in-process --run-dir run
"""

import numpy as np
import torch
from clicks import ITEMS, USERS, clicks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oe_runtime.job as job
import oe_runtime.torch as embed
from oe_runtime.data.auc import StreamingAuc

BATCH, DIM, EXPERTS, TASKS = 500, 16, 4, ("click", "conversion")


class MultiTask(nn.Module):
    """Each task mixes the same experts by a gate of its own. Both train the rows of both tables."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.experts = nn.Linear(2 * DIM, EXPERTS * 32)
        self.gates = nn.ModuleList(nn.Linear(2 * DIM, EXPERTS) for _ in TASKS)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in TASKS
        )

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """The logits of a click, and of a conversion if there is a click, (examples, 2)."""
        rows = torch.cat([self.users(user), self.items(item)], 1)
        experts = self.experts(rows).relu().unflatten(1, (EXPERTS, 32))
        mixed = [(gate(rows).softmax(1)[..., None] * experts).sum(1) for gate in self.gates]
        return torch.cat([tower(one) for tower, one in zip(self.towers, mixed, strict=True)], 1)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of the clicks of all examples, and of the conversions of those with a click."""
    losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    clicked = labels[:, 0]
    return losses[:, 0].mean() + (losses[:, 1] * clicked).sum() / clicked.sum().clamp(min=1)


def examples(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users, items, and labels (rows, 2); only examples with a click can have a conversion."""
    inputs, click = clicks(rows)
    user, item = inputs["user"], inputs["item"]
    need = np.sin(user * 12.9898) + np.sin(item * 37.719) - 0.5  # the users' taste, other items
    bought = np.random.default_rng(1).random((rows, 1)) < 1 / (1 + np.exp(-2 * need))
    labels = np.concatenate([click, click * bought], 1, dtype="float32")
    return torch.from_numpy(user[:, 0]), torch.from_numpy(item[:, 0]), torch.from_numpy(labels)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the layers are small
    torch.manual_seed(0)
    data = examples(100_000)
    loader = DataLoader(TensorDataset(*(one[:80_000] for one in data)), BATCH, shuffle=True)
    user, item, labels = (one[80_000:] for one in data)  # held out
    model = embed.distributed_model(MultiTask(), job.client())
    optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.03), model)
    with job.training(model, optimizer) as loop:
        for _epoch in loop.epochs(2):
            for batch_user, batch_item, batch_labels in loop.batches(loader):
                optimizer.zero_grad()
                loss = loss_of(model(batch_user, batch_item), batch_labels)
                loss.backward()
                optimizer.step()
                job.step(loss=loss)
        with torch.no_grad():
            probabilities = model(user, item).sigmoid().numpy()
    clicked = labels[:, 0] == 1
    aucs = []
    for task, of_task in enumerate((torch.ones_like(clicked), clicked)):
        auc = StreamingAuc()
        auc.update(labels[of_task, task].numpy(), probabilities[of_task.numpy(), task])
        aucs.append(auc.result())
    print(f"AUC of clicks {aucs[0]:.3f}, of conversions after clicks {aucs[1]:.3f}")
    if min(aucs) < 0.65:
        raise SystemExit("the model has not learned")
