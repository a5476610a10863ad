"""One of several processes that train one model: rows on servers, dense weights by torch.distributed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import oe_runtime.torch as embed
from oe_runtime import Client, Worker

ROWS, BATCH, STEPS = 50, 16, 12


class Net(torch.nn.Module):
    """A lookup of every id, and a bag that only some workers' parts use."""

    def __init__(self):
        super().__init__()
        self.users = embed.Embedding(-1, 4)
        self.items = embed.EmbeddingBag(ROWS, 3, mode="sum")
        self.dense = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, users, items, use_items):
        bags = self.items(items) if use_items else torch.zeros(len(users), 3)
        return self.dense(torch.cat([self.users(users), bags], 1))


def train(client, rank, workers):
    """Each worker has its part of every batch; the rows and weights at the end."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    net = embed.distributed_model(Net(), client)
    # Each worker has rows of its own to begin with: the first's count.
    net.items.set_rows(torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(rank)))
    model = torch.nn.parallel.DistributedDataParallel(net) if workers > 1 else net
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
    optimizer = embed.distributed_optimizer(optimizer, model)
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        users = torch.from_numpy(rng.integers(0, ROWS, BATCH))
        items = torch.from_numpy(rng.integers(0, ROWS, (BATCH, 2)))
        y = torch.from_numpy(rng.random((BATCH, 1), dtype=np.float32))
        size = BATCH // workers
        part = slice(rank * size, (rank + 1) * size)
        optimizer.zero_grad()
        # In some steps a worker has nothing to push to a table.
        for half in range(0, BATCH, BATCH // 2):
            mine = slice(max(half, part.start), min(half + BATCH // 2, part.stop))
            if mine.start >= mine.stop:
                continue
            use_items = not (step % 3 == 0 and half)
            loss = torch.nn.functional.mse_loss(model(users[mine], items[mine], use_items), y[mine])
            (loss * (mine.stop - mine.start) / size).backward()
        optimizer.step()
    weights = {name: value.detach().numpy() for name, value in net.dense.state_dict().items()}
    for layer in (net.users, net.items):
        weights[layer.table.spec.name] = client.pull_rows(layer.table.number, np.arange(ROWS))
    return weights


def main() -> None:
    directory, rank, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=workers
    )
    with Client(json.loads(sys.argv[4]), worker=Worker(rank, of=workers)) as client:
        np.savez(directory / f"worker-{rank}.npz", **train(client, rank, workers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
