"""Train a small HSTU: attention by SiLU without a softmax, gated per position; next items by sampled softmax.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_hstu.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_hstu.py --in-process --run-dir run

The model is one of plain PyTorch. Its items are rows on the servers; the rest stays in the worker.
Zhai et al., "Actions Speak Louder than Words", 2024.
"""

import torch
from sequences import ITEMS, LENGTH, histories, hit_rate, training_set
from torch import nn
from torch.nn.functional import cross_entropy, normalize, silu
from torch.utils.data import DataLoader

import oe_runtime.job as job
import oe_runtime.torch as embed

BATCH, EPOCHS, DIM, HEADS, LAYERS, DROPOUT = 100, 10, 32, 2, 2, 0.1
SAMPLED, TEMPERATURE = 128, 0.05


class Layer(nn.Module):
    """Aggregate values by pointwise attention, gate them, and add them to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attended_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.project, self.output = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)
        self.distances = nn.Parameter(
            torch.zeros(HEADS, LENGTH)
        )  # a weight for each distance of two positions
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, rows: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Rows of (users, positions, DIM); `visible` is true for known items up to each position."""
        u, v, q, k = silu(self.project(self.norm(rows))).chunk(4, -1)
        v, q, k = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (v, q, k))
        positions = torch.arange(LENGTH)
        bias = self.distances[:, (positions[:, None] - positions).clamp(min=0)]
        weights = silu(q @ k.mT + bias) / LENGTH * visible[:, None]
        attended = (weights @ v).transpose(1, 2).flatten(2)
        return rows + self.output(self.dropout(u * self.attended_norm(attended)))


class HSTU(nn.Module):
    """What a user takes next, from the items before."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        nn.init.normal_(self.items.weight, std=DIM**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """The user's state after each item, (users, LENGTH, DIM), of norm 1."""
        rows = self.dropout(self.items(seen) * DIM**0.5)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & (seen != 0)[:, None, :]
        for layer in self.layers:
            rows = layer(rows, visible)
        return normalize(rows, dim=-1)

    def forward(self, seen: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """The loss of the next items among the items `negative`, (SAMPLED,), which all positions share."""
        known = seen != 0
        states, positive = self.encode(seen)[known], positive[known]
        right = (states * normalize(self.items(positive), dim=-1)).sum(-1, keepdim=True)
        wrong = states @ normalize(self.items(negative), dim=-1).T
        wrong = wrong.masked_fill(positive[:, None] == negative, -torch.inf)  # drawn by accident
        logits = torch.cat([right, wrong], 1) / TEMPERATURE
        return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def score(self, seen: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """The scores of each user's candidates as the next item, (users, candidates)."""
        return (self.encode(seen)[:, -1:] @ normalize(self.items(candidates), dim=-1).mT)[:, 0]


def main() -> None:
    """Train, and print the loss and the hit rate."""
    torch.set_num_threads(1)  # threads that wait for each other take longer than this small model
    torch.manual_seed(0)
    items = histories()
    loader = DataLoader(training_set(items), BATCH, shuffle=True)
    model = embed.distributed_model(HSTU(), job.client())
    optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.003), model)
    with job.training(model, optimizer) as loop:
        for epoch in loop.epochs(EPOCHS):
            for seen, positive in loop.batches(loader):
                optimizer.zero_grad()
                loss = model(seen, positive, torch.randint(1, ITEMS + 1, (SAMPLED,)))
                loss.backward()
                optimizer.step()
                job.step(loss=loss)
            if epoch % 5 == 4:
                print(f"epoch {epoch + 1}: loss {loss:.3f}, hit rate at 10 {hit_rate(model, items):.3f}")


if __name__ == "__main__":
    main()
