"""Train SASRec: causal self-attention over each user's items, and one sampled negative per position.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_sasrec.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_sasrec.py --in-process --run-dir run

The model is one of plain PyTorch. Its items are rows on the servers; its positions stay in the worker.
Kang and McAuley, "Self-Attentive Sequential Recommendation", 2018.
"""

import torch
from sequences import ITEMS, LENGTH, histories, hit_rate, training_set
from torch import nn
from torch.utils.data import DataLoader

import oe_runtime.job as job
import oe_runtime.torch as embed

BATCH, EPOCHS, DIM, BLOCKS, DROPOUT = 100, 10, 32, 2, 0.1


class Block(nn.Module):
    """Causal self-attention and a network per position, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 1, DROPOUT, batch_first=True)
        self.network = nn.Sequential(
            nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(DIM, DIM), nn.Dropout(DROPOUT)
        )

    def forward(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of (users, positions, DIM); `hidden` masks the positions after each and the padding."""
        query = self.attention_norm(rows)
        rows = rows + self.attention(query, rows, rows, attn_mask=hidden, need_weights=False)[0]
        return rows + self.network(self.network_norm(rows))


class SASRec(nn.Module):
    """What a user takes next, from the items before."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, DIM)
        for table in (self.items, self.positions):
            nn.init.normal_(table.weight, std=DIM**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)

    def encode(self, seen: torch.Tensor) -> torch.Tensor:
        """The user's state after each item, (users, LENGTH, DIM)."""
        rows = self.dropout(self.items(seen) * DIM**0.5 + self.positions.weight)
        after = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = after | (seen == 0)[:, None, :] & ~torch.eye(LENGTH, dtype=torch.bool)
        for block in self.blocks:
            rows = block(rows, hidden)
        return self.norm(rows)

    def forward(self, seen: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """The loss of the next items against one other item per position."""
        states = self.encode(seen)
        right, wrong = ((states * self.items(ids)).sum(-1)[seen != 0] for ids in (positive, negative))
        loss_of = nn.functional.binary_cross_entropy_with_logits
        return loss_of(right, torch.ones_like(right)) + loss_of(wrong, torch.zeros_like(wrong))

    def score(self, seen: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """The scores of each user's candidates as the next item, (users, candidates)."""
        return (self.encode(seen)[:, -1:] @ self.items(candidates).mT)[:, 0]


def draw_negatives(seen: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    """Draw an item for each position that the user has not taken."""
    taken = torch.cat([seen, positive[:, -1:]], 1)[:, None, :]
    negative = torch.randint(1, ITEMS + 1, positive.shape)
    while (again := (negative[:, :, None] == taken).any(-1)).any():
        negative[again] = torch.randint(1, ITEMS + 1, (int(again.sum()),))
    return negative


def main() -> None:
    """Train, and print the loss and the hit rate."""
    torch.set_num_threads(1)  # threads that wait for each other take longer than this small model
    torch.manual_seed(0)
    items = histories()
    loader = DataLoader(training_set(items), BATCH, shuffle=True)
    model = embed.distributed_model(SASRec(), job.client(), in_worker=["positions"])
    optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.003), model)
    with job.training(model, optimizer) as loop:
        for epoch in loop.epochs(EPOCHS):
            for seen, positive in loop.batches(loader):
                optimizer.zero_grad()
                loss = model(seen, positive, draw_negatives(seen, positive))
                loss.backward()
                optimizer.step()
                job.step(loss=loss)
            if epoch % 5 == 4:
                print(f"epoch {epoch + 1}: loss {loss:.3f}, hit rate at 10 {hit_rate(model, items):.3f}")


if __name__ == "__main__":
    main()
