"""Train a two-tower retrieval model with in-batch negatives, and put its items into an index.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_two_tower.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_two_tower.py --in-process --run-dir run

The index is of faiss (pip install 'oeprov[index]'), in items.faiss. Without faiss the search is exact.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import oe_runtime.job as job
import oe_runtime.torch as embed

try:
    import faiss
except ImportError:
    faiss = None

USERS, ITEMS, BATCH, DIM, TEMPERATURE = 2_000, 2_000, 500, 16, 0.1


def choices(per_user: int, seed: int = 0) -> torch.Tensor:
    """(user, item) pairs, (USERS, per_user, 2): planted factors and popularity say what users choose."""
    rng = np.random.default_rng(seed)
    users, items = (rng.normal(size=(n, 4)).astype("float32") for n in (USERS, ITEMS))
    users, items = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (users, items))
    chances = np.exp(16 * users @ items.T) / np.arange(10, ITEMS + 10) ** 0.5  # the first are popular
    edges = chances.cumsum(1, dtype="float64")
    drawn = rng.random((USERS, per_user)) * edges[:, -1:]
    chosen = np.stack([np.searchsorted(*pair) for pair in zip(edges, drawn, strict=True)])
    return torch.from_numpy(np.stack([np.repeat(np.arange(USERS)[:, None], per_user, 1), chosen], 2))


class Tower(nn.Module):
    """A table of ids, and a small network to vectors of length 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, DIM)
        self.network = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The vectors of ids, (ids, DIM)."""
        rows = self.table(ids)
        return nn.functional.normalize(rows + self.network(rows), dim=1)


class TwoTower(nn.Module):
    """A tower for users and one for items; the other items of a batch are the negatives of each user."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)

    def forward(self, user: torch.Tensor, item: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        """The loss; log_q, the logarithm of how often each item is drawn, corrects for popular negatives."""
        scores = self.user(user) @ self.item(item).T / TEMPERATURE - log_q
        again = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)  # the same item
        return nn.functional.cross_entropy(scores.masked_fill(again, -torch.inf), torch.arange(len(item)))


def find_exact(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The ten items with the largest products, for each user."""
    return (users @ items.T).topk(10).indices


def find_by_index(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The same by a graph of the items, which is written to a file and read as a server would."""
    graph = faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT)
    graph.add(items.numpy())
    faiss.write_index(graph, "items.faiss")
    index = faiss.read_index("items.faiss")
    return torch.from_numpy(index.search(users.numpy(), 10)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the layers are small
    torch.manual_seed(0)
    pairs = choices(60)
    seen, held_out = pairs[:, :50].flatten(0, 1), pairs[:, 50:]
    log_q = (seen[:, 1].bincount(minlength=ITEMS) + 1).log() - np.log(len(seen) + ITEMS)
    loader = DataLoader(TensorDataset(*seen.T, log_q[seen[:, 1]]), BATCH, shuffle=True)
    model = embed.distributed_model(TwoTower(), job.client())
    optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
    with job.training(model, optimizer) as loop:
        for _epoch in loop.epochs(4):
            for user, item, correction in loop.batches(loader):
                optimizer.zero_grad()
                loss = model(user, item, correction)
                loss.backward()
                optimizer.step()
                job.step(loss=loss)
        with torch.no_grad():
            users, items = model.user(torch.arange(USERS)), model.item(torch.arange(ITEMS))
    recalls = {}
    for name, find in {"exact search": find_exact, **({"the index": find_by_index} if faiss else {})}.items():
        hits = (held_out[:, :, 1, None] == find(users, items)[:, None]).any(2)
        recalls[name] = hits.float().mean().item()
    print("recall at 10", *(f"by {name} {recall:.3f}" for name, recall in recalls.items()), sep=", ")
    if not faiss:
        print("faiss is not installed: only exact search; pip install 'oeprov[index]'")
    if min(recalls.values()) < 10 * 10 / ITEMS:
        raise SystemExit("the model has not learned")
