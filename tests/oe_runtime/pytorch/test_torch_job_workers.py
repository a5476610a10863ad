"""A PyTorch script with DistributedDataParallel as a job of two workers."""

from __future__ import annotations

import signal
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_scripts import losses, start, write
from server_processes import Relay, free_endpoints
from training_runs import ServerProcess, events, wait_for

from oe_runtime.checkpoint import latest
from oe_runtime.client import Client
from oe_runtime.data import open_source
from oe_runtime.spec import TableSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.process

# 20 steps per epoch, each of the same 50 examples for one worker and for two. In the steps that are its
# arguments it waits for a file.
SCRIPT = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
assert torch.distributed.get_rank() == job.rank
torch.manual_seed(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = torch.nn.Embedding(300, 4)
        self.dense = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, ids):
        return self.dense(self.c1(ids).flatten(1))[:, 0]


model = embed.distributed_model(Model(), job.client())
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
ids = torch.randint(0, 300, (1000, 2), generator=torch.Generator().manual_seed(0))
data = TensorDataset(ids, (ids[:, 0] % 3 == 0).float())
sampler = DistributedSampler(data, job.workers, job.rank)
loader = DataLoader(data, 50 // job.workers, sampler=sampler)
loss_of = torch.nn.BCEWithLogitsLoss()
with job.training(model, optimizer, scheduler=scheduler) as loop:
    for epoch in loop.epochs(6):
        sampler.set_epoch(epoch)
        for x, y in loop.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step = str(loop.step_number + 1)
            while step in job.arguments and not os.path.exists("go-on-" + step):
                time.sleep(0.01)
            job.step(loss=loss)
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def start_workers(
    script: Path, run_dir: Path, server: ServerProcess, *flags: str, waits: tuple[str, ...] = ()
) -> list[Any]:
    workers = free_endpoints(2)
    more = ("--servers", server.endpoint, "--workers", workers, "--checkpoint-steps", "15", *flags)
    return [start(script, run_dir, *more, "--rank", str(rank), arguments=waits) for rank in range(2)]


def ended(workers: list[Any]) -> tuple[list[int], list[tuple[str, str]]]:
    said = [worker.communicate(timeout=120) for worker in workers]
    return [worker.returncode for worker in workers], said


def test_two_workers_have_the_losses_of_one_whoever_is_lost(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, SCRIPT), tmp_path / "run"
    server, another = ServerProcess(tmp_path / "server"), ServerProcess(tmp_path / "another")
    workers = start_workers(script, run_dir, server, waits=("22", "40"))
    try:
        wait_for(lambda: max(losses(run_dir), default=0) >= 21, workers[0])
        server.kill()
        (tmp_path / "go-on-22").touch()
        server.start_again()
        wait_for(lambda: len(events(run_dir, "server_back")) == 1, workers[0])
        wait_for(lambda: max(losses(run_dir)) >= 39, workers[0])
        workers[1].send_signal(signal.SIGTERM)
        (tmp_path / "go-on-40").touch()
        codes, said = ended(workers)
        assert codes == [130, 130], said
        assert 40 <= events(run_dir, "interrupted")[0]["step"] < 42

        workers = start_workers(script, run_dir, another, "--resume", waits=("60",))
        wait_for(lambda: max(losses(run_dir)) >= 59, workers[0])
        workers[1].kill()
        (tmp_path / "go-on-60").touch()
        codes, said = ended(workers)
        assert codes == [3, -signal.SIGKILL], said
        assert "another worker was lost" in said[0][1] or "worker 1" in said[0][1]
        assert "--resume" in said[0][1]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        for one in (server, another):
            one.stop()
    codes, said = ended([start(script, run_dir, "--checkpoint-steps", "15", "--resume")])
    assert codes == [0], said
    codes, said = ended([start(script, tmp_path / "one", "--checkpoint-steps", "15")])
    assert codes == [0], said
    found, expected = losses(run_dir), losses(tmp_path / "one")
    assert len(found) == len(expected) == 120
    for step, (loss, _) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-3), step


WRONG = {
    "no group": (
        SCRIPT.replace('torch.distributed.init_process_group("gloo")\n', "").replace(
            "assert torch.distributed.get_rank() == job.rank\n", ""
        ),
        "a PyTorch job of 2 workers needs its process group first: call torch.distributed.init_process_group",
    ),
    "not wrapped": (
        SCRIPT.replace("model = torch.nn.parallel.DistributedDataParallel(model)\n", ""),
        "after the first step, dense.",
    ),
    "wrapped before": (
        SCRIPT.replace("Model(), job.client()", "wrapped, job.client()").replace(
            "model = embed", "wrapped = torch.nn.parallel.DistributedDataParallel(Model())\nmodel = embed", 1
        ),
        "the model is in DistributedDataParallel already, which would keep the embeddings: call distributed",
    ),
    "unequal": (
        SCRIPT.replace("50 // job.workers, sampler", "25 + 5 * job.rank, sampler"),
        "the workers have different numbers of batches in epoch 1: 20 in worker 0, 17 in worker 1; give each",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_several_workers(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    server = ServerProcess(tmp_path / "server")
    workers = start_workers(write(tmp_path, text), tmp_path / "run", server)
    try:
        codes, said = ended(workers)
    finally:
        for worker in workers:
            worker.kill()
        server.stop()
    assert codes == [1, 1], said
    assert all(f": {message}" in error for _, error in said), said


def test_the_same_script_alone(tmp_path: Path) -> None:
    """A group of one process needs no launcher's addresses."""
    codes, said = ended([start(write(tmp_path, SCRIPT.replace("epochs(6)", "epochs(1)")), tmp_path / "run")])
    assert codes == [0], said
    assert max(losses(tmp_path / "run")) == 20


# By job.train, on two columns of generated rows; the metrics are the job's.
TRAIN = """
import os, signal
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
torch.manual_seed(1 + job.rank)
names = [one.name for one in job.schema.categories][:2]
rows = [torch.nn.Embedding(1000, 4) for _ in names]
dense = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
model = embed.distributed_model(torch.nn.ModuleList([*rows, dense]), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
loss_of = torch.nn.BCEWithLogitsLoss()
stops = [int(step) for step in job.arguments]


def predict(features):
    found = [layer(torch.as_tensor(features[name])).flatten(1) for layer, name in zip(model, names)]
    return model[-1](torch.cat(found, 1))[:, 0]


def evaluate():
    for features, labels in job.eval_batches():
        with torch.no_grad():
            yield labels, torch.sigmoid(predict(features))


def step(batch):
    features, labels = batch
    done = max((int(one["step"]) for one in optimizer.state.values() if "step" in one), default=0) + 1
    if done in stops and done > job.resume_step:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.zero_grad()
    loss = loss_of(predict(features), torch.as_tensor(labels).reshape(-1).float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # the gradients of the step are kept before
    return loss


if job.rank:
    print("begins at", job.resume_step, flush=True)
job.train(step, model, optimizer, evaluate=evaluate)
"""
ROWS = ("--data", "generate:2000:1", "--max-cardinality", "1000", "--log-every", "1")


def test_a_work_queue_has_the_losses_of_a_run_in_order(tmp_path: Path) -> None:
    script, run_dir = write(tmp_path, TRAIN), tmp_path / "run"
    words = [*ROWS, "--batch-size", "100"]
    assert ended([start(script, tmp_path / "one", *words)])[0] == [0]
    for name, more, stops, code in (("first", [], ("7",), 130), ("fresh", ["--resume"], (), 0)):
        server = ServerProcess(tmp_path / name)
        queue = ("--servers", server.endpoint, "--workqueue", *more)
        worker = start(script, run_dir, *words, *queue, arguments=stops)
        try:
            codes, said = ended([worker])
        finally:
            worker.kill()
            server.stop()
        assert codes == [code], said
    found, expected = losses(run_dir), losses(tmp_path / "one")
    assert len(found) == len(expected) == 18
    for step, (loss, _) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-4), step
    of_both = [events(one, "eval")[-1]["loss"] for one in (run_dir, tmp_path / "one")]
    assert of_both[0] == pytest.approx(of_both[1], rel=1e-4)


def test_asynchronous_workers_share_the_rows_and_outlive_a_server(tmp_path: Path) -> None:
    """The second worker does not see the run directory, and goes on from the same step all the same."""
    script, run_dir = write(tmp_path, TRAIN), tmp_path / "run"
    server = ServerProcess(tmp_path / "server")

    def begin(*more: str, stops: tuple[str, ...] = ()) -> list[Any]:
        words = (*ROWS, "--batch-size", "50", "--epochs", "10", "--checkpoint-steps", "20", *more)
        where = ("--servers", server.endpoint, "--workqueue", "--workers", free_endpoints(2))
        directories = run_dir, tmp_path / "elsewhere"
        return [start(script, directories[i], *words, *where, "--rank", str(i)) for i in range(2)]

    workers = begin()
    try:
        wait_for(lambda: max(losses(run_dir), default=0) > 40, workers[0])
        server.kill()
        server.start_again()
        wait_for(lambda: len(events(run_dir, "server_back")) == 1, workers[0])
        workers[0].send_signal(signal.SIGTERM)  # who stops all
        codes, said = ended(workers)
        assert codes == [130, 130], said
        stopped = events(run_dir, "interrupted")[-1]["step"]
        server.stop()
        server = ServerProcess(tmp_path / "fresh")
        workers = begin("--resume")
        codes, said = ended(workers)
        assert codes == [0, 0], said
        assert f"begins at {stopped}" in said[1][0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        server.stop()
    assert events(run_dir, "end")[-1]["steps"] == 360
    assert events(run_dir, "eval")[-1]["rows"] == 200


PUSH = 4  # Op::kPush of oe_runtime/core/wire/frame.h
# Rows and a dense weight that count: SGD of rate 1 and gradients of -1.
COUNTS = """
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.set_num_threads(1)
name = job.schema.categories[0].name
rows, dense = torch.nn.Embedding(1000, 4), torch.nn.Linear(1, 1, bias=False)
for one in (rows, dense):
    torch.nn.init.zeros_(one.weight)
model = embed.distributed_model(torch.nn.ModuleDict({"rows": rows, "dense": dense}), job.client())
optimizer = embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 1.0), model)


def step(batch):
    optimizer.zero_grad()
    loss = -model["rows"](torch.as_tensor(batch[0][name])).sum() - model["dense"].weight.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


job.train(step, model, optimizer)
if job.rank == 0:
    print("weight", model["dense"].weight.item())
"""


def test_a_worker_that_dies_in_its_push_leaves_nothing_of_it(tmp_path: Path) -> None:
    """One server has its push, the other has not."""
    run_dir, servers = tmp_path / "run", [ServerProcess(tmp_path / str(i), i, 2) for i in range(2)]
    pushes, pushing, killed = count(), threading.Event(), threading.Event()

    def on_request(op: int) -> None:
        if op == PUSH and next(pushes) >= 10:
            pushing.set()
            killed.wait(60)
            raise ConnectionError

    relay = Relay(servers[1].endpoint, on_request)
    words = (*ROWS, "--holdout", "0", "--batch-size", "20", "--epochs", "3", "--checkpoint-steps", "40")
    queue = ("--workqueue", "--on-worker-lost", "continue", "--workers", free_endpoints(2))
    script = write(tmp_path, COUNTS)
    workers = []
    for rank, last in enumerate((servers[1].endpoint, relay.endpoint)):
        where = ("--servers", f"{servers[0].endpoint},{last}", "--rank", str(rank))
        workers.append(
            start(script, run_dir if rank == 0 else tmp_path / "elsewhere", *words, *queue, *where)
        )
    try:
        wait_for(pushing.is_set, workers[1])
        time.sleep(0.2)  # for the other server to have it
        workers[1].kill()
        killed.set()
        output, error = workers[0].communicate(timeout=120)
        assert (workers[0].returncode, error) == (0, "")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        relay.close()
        for server in servers:
            server.stop()
    found = latest(run_dir / "checkpoints")
    assert found is not None
    (entry,) = {one["table"]: one for one in found.manifest["tables"] if one["table"] == "rows"}.values()
    with Client.in_process() as client:
        table = client.create_table(TableSpec.from_json(entry["spec"]))
        client.restore(found.path)
        weights = client.pull_rows(table, np.arange(1000))
    blocks = open_source("generate:2000:1", 1000).blocks()
    counts = np.bincount(np.concatenate([block.ids[:, 0] for block in blocks]), minlength=1000)
    np.testing.assert_array_equal(weights, np.repeat(3.0 * counts[:, None], 4, axis=1))
    assert "weight 300.0" in output
    (back,) = events(run_dir, "went_back")
    assert back["message"] == "worker 1 was lost in its push"
    assert back["step"] % 40 == 0


REFUSED = {
    "a process group": (
        TRAIN.replace("torch.manual_seed", 'torch.distributed.init_process_group("gloo")\ntorch.manual_seed'),
        "leave out init_process_group and DistributedDataParallel",
    ),
    "two rates": (
        TRAIN.replace(
            "model.parameters(), 0.01",
            "[{'params': model[0].parameters()}, {'params': model[1].parameters()}, "
            "{'params': model[2][0].parameters()}, {'params': model[2][2].parameters(), 'lr': 0.1}], 0.01",
        ),
        "groups of equal settings",
    ),
    "a decay": (TRAIN.replace("0.01)", "0.01, weight_decay=0.1)"), "need one without decay"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_work_queues_refuse_what_they_cannot_train(what: str, tmp_path: Path) -> None:
    text, message = REFUSED[what]
    assert text != TRAIN
    server = ServerProcess(tmp_path / "server")
    script = write(tmp_path, text)
    try:
        worker = start(script, tmp_path / "run", *ROWS, "--servers", server.endpoint, "--workqueue")
        codes, said = ended([worker])
    finally:
        server.stop()
    assert codes == [1], said
    assert message in said[0][1]
