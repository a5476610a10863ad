"""Train with Accelerate as a job: gradient accumulation, and several workers with their parts of the data.

<!-- needs: torch accelerate -->

Run by itself, in this process:

    python examples/pytorch_accelerate_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_accelerate_job.py --in-process --run-dir run

Several workers (--workers) are processes of Accelerate.
"""

import torch
from accelerate import Accelerator
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


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # before job.client(): workers meet here
torch.manual_seed(0)
inputs, labels = clicks(20_000)
ids = [torch.from_numpy(inputs[name][:, 0]) for name in ("user", "item")]
data = torch.utils.data.TensorDataset(*ids, torch.from_numpy(labels))
loader = torch.utils.data.DataLoader(data, batch_size=500 // job.workers, shuffle=True)

model = embed.distributed_model(ClickModel(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
loss_of = torch.nn.BCEWithLogitsLoss()
with job.training(model, optimizer) as loop:
    for _ in loop.epochs(2):
        for user, item, label in loop.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model(user, item), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
            job.step(loss=loss)  # a step is counted where the optimizer made one
