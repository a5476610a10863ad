"""Train a LightningModule as a job: the Trainer keeps the loop.

<!-- needs: torch pytorch_lightning -->

Run by itself, in this process:

    python examples/pytorch_lightning_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/pytorch_lightning_job.py --in-process --run-dir run
"""

import pytorch_lightning as lightning
import torch
from clicks import ITEMS, USERS, clicks

import oe_runtime.job as job
import oe_runtime.torch as embed


class ClickModel(lightning.LightningModule):
    """An ordinary LightningModule, whose optimizer is given from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, 16)
        self.items = torch.nn.Embedding(ITEMS, 16)
        self.dense = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """The loss of a batch."""
        user, item, label = batch
        scores = self.dense(torch.cat([self.users(user), self.items(item)], 1))
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that also trains the rows."""
        return self.optimizer


torch.manual_seed(0)
inputs, labels = clicks(20_000)
ids = [torch.from_numpy(inputs[name][:, 0]) for name in ("user", "item")]
data = torch.utils.data.TensorDataset(*ids, torch.from_numpy(labels))
loader = torch.utils.data.DataLoader(data, batch_size=500, shuffle=True)

model = embed.distributed_model(ClickModel(), job.client())  # 1
model.optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)  # 2
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
with job.training(model, model.optimizer, loops=trainer.fit_loop) as loop:  # 3
    loop.fit(lambda _: trainer.fit(model, loader), epochs=2)
