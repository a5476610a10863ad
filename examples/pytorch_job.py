"""Train a PyTorch model of your own as a job: checkpoints, stop and resume, lost servers.

<!-- needs: torch -->

Run by itself, in this process:

    python examples/pytorch_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_job.py --in-process --run-dir run

Several workers (--workers) are processes of torch.distributed.
"""

import torch
from clicks import ITEMS, USERS, clicks

import oe_runtime.job as job
import oe_runtime.torch as embed


class ClickModel(torch.nn.Module):
    """An ordinary PyTorch model."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, 16)
        self.items = torch.nn.Embedding(ITEMS, 16)
        self.dense = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """The logits of a click."""
        return self.dense(torch.cat([self.users(user), self.items(item)], 1))


if job.workers > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
inputs, labels = clicks(50_000)
ids = [torch.from_numpy(inputs[name][:, 0]) for name in ("user", "item")]
data = torch.utils.data.TensorDataset(*ids, torch.from_numpy(labels))
sampler = torch.utils.data.DistributedSampler(data, job.workers, job.rank)  # this worker's part of the data
loader = torch.utils.data.DataLoader(data, batch_size=500 // job.workers, sampler=sampler)
model = embed.distributed_model(ClickModel(), job.client())
if job.workers > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
loss_of = torch.nn.BCEWithLogitsLoss()
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(2):
        sampler.set_epoch(epoch)  # another order
        for user, item, label in loop.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model(user, item), label)
            loss.backward()
            optimizer.step()
            job.step(loss=loss)
