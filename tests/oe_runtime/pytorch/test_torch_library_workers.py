"""Lightning and Accelerate as jobs of two workers train as one worker does, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_scripts import losses, start, write
from library_scripts import STOP
from server_processes import free_endpoints
from training_runs import ServerProcess, events

pytest.importorskip("torch")
pytestmark = pytest.mark.process

_HEAD = """
import os, signal
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
ids = torch.randint(0, 300, (640, 2), generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(ids, (ids[:, :1] % 3 == 0).float())
loader = torch.utils.data.DataLoader(data, batch_size=32 // job.workers)
loss_of = torch.nn.BCEWithLogitsLoss()


def layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(300, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))

"""
LIGHTNING = (
    _HEAD
    + """
import pytorch_lightning as lightning

torch.distributed.init_process_group("gloo")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def training_step(self, batch, _):
        return loss_of(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer


trainer = lightning.Trainer(
    max_epochs=2, strategy="ddp", devices=job.local_workers, gradient_clip_val=0.3, accumulate_grad_batches=2,
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, use_distributed_sampler=False,
)
mine = torch.utils.data.DistributedSampler(data, job.workers, job.rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=32 // job.workers, sampler=mine)
model = embed.distributed_model(Model(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
model.optimizer = optimizer
with job.training(model, optimizer, loops=trainer.fit_loop) as loop:
    # train
    loop.fit(lambda _: trainer.fit(model, loader), epochs=2)
"""
)
ACCELERATE = (
    _HEAD
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = embed.distributed_model(layers(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with job.training(model, optimizer) as loop:
    # train
    for epoch in loop.epochs(2):
        for x, y in loop.batches(loader):
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
            job.step(loss=loss)
"""
)
SCRIPTS = {"pytorch_lightning": LIGHTNING, "accelerate": ACCELERATE}


def train(
    script: Path, run_dir: Path, server: ServerProcess, workers: int, *more: str, **given: Any
) -> list[int]:
    """Run the script by so many workers; return their statuses."""
    words = ["--servers", server.endpoint, "--checkpoint-steps", "3", *more]
    group = []
    endpoints = free_endpoints(workers)
    for rank in range(workers):
        own = ["--rank", str(rank), "--workers", endpoints] if workers > 1 else []
        group.append(start(script, run_dir, *words, *own, **given))
    said = [process.communicate(timeout=240) for process in group]
    codes = [process.returncode for process in group]
    for (out, error), code in zip(said, codes, strict=True):
        assert code in (0, 130), error + out
    return codes


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_workers_train_as_one_and_resume(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    text = SCRIPTS[name]
    before, _, after = text.partition("    # train\n")
    indented = "".join(f"    {line}\n" if line else "\n" for line in STOP.splitlines())
    script = write(tmp_path, before + indented + after)
    found = {}
    for kind, workers in (("one", 1), ("two", 2), ("stopped", 2)):
        server = ServerProcess(tmp_path / f"server-{kind}")
        run_dir = tmp_path / kind
        try:
            stops = ("7",) if kind == "stopped" else ()
            codes = train(script, run_dir, server, workers, arguments=stops)
            assert codes == [130 if stops else 0] * workers
            if stops:
                train(script, run_dir, server, workers, "--resume")
                assert events(run_dir, "resume")[0]["step"] >= 7
        finally:
            server.stop()
        found[kind] = [loss for loss, _ in losses(run_dir).values()]
    assert len(found["one"]) == 20
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)
    assert found["stopped"] == found["two"]
