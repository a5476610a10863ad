"""Train DLRM with lists of ids, in one process or in several with DistributedDataParallel.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_dlrm.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_dlrm.py --in-process --run-dir run

Several workers (--workers) are processes of torch.distributed. The losses of two workers are those of one.
On hosts: oeprov launch-training -i INVENTORY --script examples/pytorch_dlrm.py --workers 2
"""

import itertools

import torch
from clicks import SIZES, impressions
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import oe_runtime.job as job
import oe_runtime.torch as embed

BATCH, DIM = 512, 16


class DLRM(nn.Module):
    """Numbers through a small network, ids through tables, and the products of all pairs of both."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = embed.EmbeddingBagCollection(
            [
                embed.EmbeddingBagConfig(size, DIM, f"t_{name}", feature_names=[name])
                for name, size in SIZES.items()
            ]
        )
        self.bottom = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        places = len(SIZES) + 1
        self.register_buffer("pairs", torch.tensor(list(itertools.combinations(range(places), 2))).T, False)
        self.top = nn.Sequential(nn.Linear(DIM + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, features: embed.KeyedJaggedTensor) -> torch.Tensor:
        """The logits of a click, (examples,)."""
        dense = self.bottom(numbers)
        every = torch.cat([dense, self.tables(features).values()], 1).unflatten(1, (-1, DIM))
        products = every @ every.transpose(1, 2)
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1))[:, 0]


def collate(examples: list[tuple]) -> tuple[torch.Tensor, embed.KeyedJaggedTensor, torch.Tensor]:
    """Lay out a batch: the lists of ids of the first feature for all examples, then those of the next."""
    numbers, *lists, labels = zip(*examples, strict=True)
    ids = [torch.from_numpy(one) for of_feature in lists for one in of_feature]
    features = embed.KeyedJaggedTensor(
        list(SIZES), torch.cat(ids), lengths=torch.tensor([len(one) for one in ids])
    )
    return torch.tensor(numbers), features, torch.tensor(labels)


if job.workers > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
numbers, lists, labels = impressions(20_000)
data = list(zip(numbers.tolist(), *lists.values(), labels.tolist(), strict=True))
sampler = DistributedSampler(data, job.workers, job.rank)  # this worker's part of the data
loader = DataLoader(data, BATCH // job.workers, sampler=sampler, collate_fn=collate)
model = embed.distributed_model(DLRM(), job.client())
if job.workers > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.05), model)
loss_of = nn.BCEWithLogitsLoss()
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(3):
        sampler.set_epoch(epoch)  # another order
        for numbers, features, labels in loop.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model(numbers, features), labels)
            loss.backward()
            optimizer.step()
            job.step(loss=loss)
