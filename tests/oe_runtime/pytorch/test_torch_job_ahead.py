"""A PyTorch script's rows are pulled while the batch before computes, and no loss changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_scripts import losses, run, start, write
from server_processes import free_endpoints
from test_job_batches import flags
from training_runs import ServerProcess, wait_for

# A layer per category, with its values or pooled, and numbers; dropout draws random numbers.
SCRIPT = """
import os, signal
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
torch.manual_seed(1)
if job.workers > 1:
    torch.distributed.init_process_group("gloo")
categories = {one.name: one.length for one in job.schema.categories}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = torch.nn.ModuleList(
            embed.Embedding(-1, 4) if at % 2 else embed.EmbeddingBag(-1, 4, mode="sum")
            for at in range(len(categories))
        )
        self.drop = torch.nn.Dropout(0.2)
        width = sum(4 * n if at % 2 else 4 for at, n in enumerate(categories.values()))
        self.top = torch.nn.Linear(width + len(job.schema.numbers), 1)

    def forward(self, numbers, ids):
        found = [layer(one).flatten(1) for layer, one in zip(self.rows, ids)]
        return self.top(self.drop(torch.cat([*numbers, *found], 1)))


model = embed.distributed_model(Model(), job.client())
if job.workers > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
loss_of = torch.nn.BCEWithLogitsLoss()
stops = [int(step) for step in job.arguments]
followed, follow = [], job.client().follow
job.client().follow = lambda *batches: (followed.append(1), follow(*batches))


def forward(batch):
    features, labels, *weights = batch
    numbers = [torch.from_numpy(features[one.name]) for one in job.schema.numbers]
    ids = [torch.from_numpy(features[name]) for name in categories]
    return loss_of(model(numbers, ids), torch.from_numpy(labels))


def train(batch):
    optimizer.zero_grad()
    loss = forward(batch)
    loss.backward()
    optimizer.step()
    return loss
"""
# Without bags: the first forward pass of a process pools them by PyTorch, which rounds otherwise.
LISTS = SCRIPT.replace('embed.EmbeddingBag(-1, 4, mode="sum")', "embed.Embedding(-1, 4)").replace(
    "4 * n if at % 2 else 4 for", "4 * n for"
)
BLOCK = """
with job.training(model, optimizer) as loop:
    for batch in job.batches():
        loss = train(batch)
        if loop.step_number + 1 in stops and loop.step_number + 1 > job.resume_step:
            os.kill(os.getpid(), signal.SIGTERM)
        job.step(loss=loss)
"""
TRAIN = "\njob.train(train, model, optimizer)\n"
COUNTED = '\nprint(f"followed {len(followed)}")\n'


def words(directory: Path, epochs: int = 2) -> list[str]:
    return [*flags(directory), "--batch-size", "64", "--epochs", str(epochs), "--checkpoint-steps", "5"]


@pytest.mark.parametrize("loop", [BLOCK, TRAIN], ids=["batches", "train"])
def test_rows_pulled_ahead_change_no_loss(
    loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, SCRIPT + loop + COUNTED)
    assert run(script, tmp_path / "ahead", *words(tmp_path)) == 0
    ahead = capsys.readouterr().out
    assert run(script, tmp_path / "after", *words(tmp_path), "--no-pipeline") == 0
    assert "followed 0\n" in capsys.readouterr().out
    assert "followed 7\n" in ahead, "of all but three batches of the first epoch, and two of the second"
    assert max(losses(tmp_path / "ahead")) == 12
    assert losses(tmp_path / "ahead") == losses(tmp_path / "after")


def test_staleness_1_lacks_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write(tmp_path, SCRIPT + BLOCK)
    every = ("--log-every", "1")
    assert run(script, tmp_path / "exact", *words(tmp_path), *every) == 0
    assert run(script, tmp_path / "stale", *words(tmp_path), *every, "--staleness", "1") == 0
    exact, stale = losses(tmp_path / "exact"), losses(tmp_path / "stale")
    assert exact.keys() == stale.keys()
    assert [exact[step] == stale[step] for step in (1, 2)] == [True, True]
    assert exact != stale
    assert all(abs(exact[step][0] - stale[step][0]) < 0.2 for step in exact)
    capsys.readouterr()
    assert run(script, tmp_path / "parts", *words(tmp_path), "--micro-batch", "2") == 1
    assert "--micro-batch is of Keras models" in capsys.readouterr().err


def test_a_job_that_stops_has_the_losses_of_one_that_does_not(tmp_path: Path) -> None:
    script = write(tmp_path, LISTS + BLOCK)
    assert run(script, tmp_path / "whole", *words(tmp_path)) == 0
    run_dir, stops = tmp_path / "run", ("3", "9")
    codes = [run(script, run_dir, *words(tmp_path), arguments=stops)]
    codes += [run(script, run_dir, *words(tmp_path), "--resume", arguments=stops) for _ in range(2)]
    assert codes == [130, 130, 0]
    assert losses(run_dir) == losses(tmp_path / "whole")


def test_a_layout_that_draws_random_numbers_does_so_in_its_turn(tmp_path: Path) -> None:
    layout = """
def layout(batch):
    features, labels, *_ = job.current().columns(batch)
    return features | {"noise": torch.rand(1)}, labels

"""
    text = SCRIPT + layout + BLOCK.replace("job.batches()", "job.batches(layout)")
    script = write(tmp_path, text.replace("return loss_of(", "return (1 + features['noise']) * loss_of("))
    assert run(script, tmp_path / "ahead", *words(tmp_path)) == 0
    assert run(script, tmp_path / "after", *words(tmp_path), "--no-pipeline") == 0
    assert losses(tmp_path / "ahead") == losses(tmp_path / "after")


def test_batches_of_a_loader_with_processes_are_known_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = """
random = torch.Generator().manual_seed(0)
rows = torch.randint(0, 30, (320, 2), generator=random)
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.drop = torch.nn.Embedding(100, 4), torch.nn.Dropout(0.2)
    def forward(self, ids):
        return self.drop(self.one(ids).flatten(1)).sum(1)
model = embed.distributed_model(Two(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
loader = torch.utils.data.DataLoader(rows, 32, shuffle=True, num_workers=PROCESSES)
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(2):
        for ids in loop.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model(ids), (ids[:, 0] % 2).float())
            loss.backward()
            optimizer.step()
            job.step(loss=loss)
"""
    for processes in (0, 1):
        text = SCRIPT + loop.replace("PROCESSES", str(processes)) + COUNTED
        run_dir = tmp_path / f"run-{processes}"
        data = words(tmp_path)[:4]
        assert run(write(tmp_path / str(processes), text), run_dir, *data, "--log-every", "1") == 0
    assert "followed 15\n" in capsys.readouterr().out
    assert losses(tmp_path / "run-0") == losses(tmp_path / "run-1")


@pytest.mark.process
def test_a_lost_server(tmp_path: Path) -> None:
    step = "        job.step(loss=loss)\n"
    waits = "        while loop.step_number == 20 and not os.path.exists('go-on'): os.sched_yield()\n"
    assert step in BLOCK
    script, more = write(tmp_path, LISTS + BLOCK.replace(step, waits + step)), words(tmp_path, 20)
    server, run_dir = ServerProcess(tmp_path / "server"), tmp_path / "run"
    process = start(script, run_dir, "--servers", server.endpoint, *more)
    try:
        wait_for(lambda: max(losses(run_dir), default=0) >= 20, process)
        server.kill()
        (tmp_path / "go-on").touch()
        server.start_again()
        said, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        assert "is back after" in said
    finally:
        process.kill()
        process.communicate()
        server.stop()
    assert run(script, tmp_path / "whole", *more) == 0
    assert losses(run_dir) == losses(tmp_path / "whole")


@pytest.mark.process
def test_two_workers(tmp_path: Path) -> None:
    """They train what one trains."""
    script, more = write(tmp_path, LISTS.replace("Dropout(0.2)", "Dropout(0.0)") + BLOCK), words(tmp_path)
    server, run_dir = ServerProcess(tmp_path / "server"), tmp_path / "run"
    place = ("--servers", server.endpoint, "--workers", free_endpoints(2))
    workers = [start(script, run_dir, *place, *more, "--rank", str(rank)) for rank in range(2)]
    try:
        said = [worker.communicate(timeout=240) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
    assert run(script, tmp_path / "one", *more) == 0
    one = losses(tmp_path / "one")
    assert {step: loss for step, (loss, _) in losses(run_dir).items()} == {
        step: pytest.approx(loss, rel=1e-4) for step, (loss, _) in one.items()
    }
