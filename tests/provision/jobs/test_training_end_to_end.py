"""The whole path on this machine with the real runtime: bootstrap, training, every way that it can end."""

import ctypes.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provision.jobs.request import Request
from provision.jobs.store import Job, all_jobs
from provision.node import process

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[3]
OEPROV = [sys.executable, "-m", "provision.cli"]
SECONDS = 240


class Cluster:
    """A directory with a copy of inventory/local.yml, in which `oeprov` is run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        text = (REPOSITORY / "inventory" / "local.yml").read_text()
        (directory / "local.yml").write_text(text)
        every = "    training_checkpoint_steps: 100\n"
        more = "    training_server_wait: 0\n    training_checkpoint_rows: files\n"
        assert every in text
        (directory / "nowait.yml").write_text(text.replace(every, f"{every}{more}"))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OEPROV_")}
        self.environment = {**environment, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "400"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = subprocess.Popen(
            [*OEPROV, *words],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(command)
        return command

    def run(self, *words: str, expect: int = 0) -> str:
        return self.finish(self.start(*words), expect)

    def finish(self, command: subprocess.Popen[str], expect: int) -> str:
        out, _ = command.communicate(timeout=SECONDS)
        assert command.returncode == expect, out
        assert "Traceback" not in out
        return out

    def job(self) -> Job:
        return all_jobs(self.directory / ".oeprov")[-1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    for command in cluster.started:
        if command.poll() is None:
            command.kill()
            command.communicate()


def wait_for(found: Callable[[], Any], command: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (value := found()):
        assert command.poll() is None, command.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def events(job: Job, kind: str) -> list[dict[str, Any]]:
    try:
        lines = job.metrics_file.read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def pid(job: Job, name: str) -> int:
    return next(item.pid for item in job.state().processes if item.name == name)


def assert_no_orphans(job: Job) -> None:
    for item in job.state().processes:
        assert not process.alive(item.pid, item.started), f"{item.name} still runs"


def test_bootstrap_then_train(cluster: Cluster) -> None:
    refused = cluster.run("launch-training", "-i", "local.yml", expect=1)
    assert "is not ready: make " in refused
    assert "run: oeprov bootstrap -i local.yml" in refused
    cluster.run("bootstrap", "-i", "local.yml", "--yes")
    assert "nothing to do" in cluster.run("bootstrap", "-i", "local.yml", "--yes")

    small = ["--data", "generate:6000", "--max-cardinality", "1000", "--batch-size", "512"]
    out = cluster.run("launch-training", "-i", "local.yml", *small, "--checkpoint-steps", "5", "--json")
    report = json.loads(out.splitlines()[-1])
    assert (report["state"], report["step"], report["steps"]) == ("done", 11, 11)
    assert 0.4 < report["eval"]["auc"] < 1
    assert (Path(report["export"]) / "saved_model.pb").is_file()
    assert report["checkpoint_step"] == 11
    job = cluster.job()
    assert_no_orphans(job)
    assert "pmem_libpmem" in " ".join(job.spec().processes[0].argv)
    (listed,) = json.loads(cluster.run("status", "--json"))["jobs"]
    assert listed["state"] == "done"
    assert listed["rows"]["C1"] > 0
    assert "trained 11 steps" in cluster.run("logs", "--process", "worker-0")


def test_every_way_to_end_early_can_be_resumed(cluster: Cluster) -> None:
    cluster.run("bootstrap", "-i", "local.yml", "--yes")
    long = ["--data", "generate:5000000", "--max-cardinality", "1000", "--batch-size", "256"]
    named = ["--checkpoint-steps", "10", "--name", "broken"]
    command = cluster.start("launch-training", "-i", "nowait.yml", *long, *named)
    (path,) = wait_for(lambda: list(cluster.directory.glob(".oeprov/jobs/broken-*/job.json")), command)
    job = Job(path.parent)

    wait_for(lambda: events(job, "checkpoint"), command)
    os.kill(pid(job, "worker-0"), signal.SIGKILL)
    out = cluster.finish(command, 1)
    assert "was killed by signal 9" in out
    saved = job.checkpoint()
    assert saved is not None
    assert f"oeprov resume {job.id}" in out
    assert_no_orphans(job)

    command = cluster.start("launch-training", "-i", "local.yml", "--resume")
    (resumed,) = wait_for(lambda: events(job, "resume"), command)
    assert resumed["step"] == saved[0]
    wait_for(lambda: (found := job.checkpoint()) and found[0] > saved[0], command)
    os.kill(pid(job, "server-1"), signal.SIGKILL)
    out = cluster.finish(command, 1)
    assert "server-1 on localhost" in out
    assert "the worker says: parameter server 127.0.0.1:" in out
    assert_no_orphans(job)

    command = cluster.start("resume", job.id, "--servers", "3")
    wait_for(lambda: len(events(job, "resume")) == 2 and len(events(job, "step")) > 3, command)
    command.send_signal(signal.SIGINT)
    out = cluster.finish(command, 130)
    saved = job.checkpoint()
    assert saved is not None
    assert f"stopped at step {saved[0]}, which is saved" in out
    assert events(job, "interrupted")[-1]["step"] == saved[0]
    assert_no_orphans(job)


WAITING = """
import os, sys, time
import torch
from clicks import ITEMS, USERS, clicks
import oe_runtime.job as job
import oe_runtime.torch as embed

losses, *waits = sys.argv[1:]  # steps in which it waits until LOSSES.STEP is there
torch.manual_seed(0)
inputs, labels = clicks(6000)
user, item = (torch.from_numpy(inputs[name][:, 0]) for name in ("user", "item"))
data = torch.utils.data.TensorDataset(user, item, torch.from_numpy(labels))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = torch.nn.Embedding(USERS, 8), torch.nn.Embedding(ITEMS, 8)
        self.dense = torch.nn.Linear(16, 1)

    def forward(self, user, item):
        return self.dense(torch.cat([self.users(user), self.items(item)], 1))

model = embed.distributed_model(Model(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
step = sum(1 for _ in open(losses)) if os.path.exists(losses) else 0
with job.training(model, optimizer) as loop:
    for epoch in loop.epochs(1):
        for user, item, label in loop.batches(torch.utils.data.DataLoader(data, batch_size=100)):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
            loss.backward()
            optimizer.step()
            step += 1
            with open(losses, "a") as file:
                print(step, loss.item().hex(), file=file)
            while str(step) in waits and not os.path.exists(f"{losses}.{step}"):
                time.sleep(0.02)
            job.step(loss=loss)
"""


def test_a_scaled_job_has_the_losses_of_an_undisturbed_one(cluster: Cluster) -> None:
    """From two servers to three, and after a stop to one, with rows in pools: to the bit, each step once."""
    pytest.importorskip("torch")
    lines = (cluster.directory / "local.yml").read_text().splitlines(keepends=True)
    plain = "".join(line for line in lines if not line.lstrip().startswith("training_"))
    (cluster.directory / "script.yml").write_text(plain)
    (cluster.directory / "clicks.py").write_text((REPOSITORY / "examples/clicks.py").read_text())
    (cluster.directory / "waiting.py").write_text(WAITING)
    cluster.run("bootstrap", "-i", "script.yml", "--yes")
    words = ["launch-training", "-i", "script.yml", "--script", "waiting.py", "--checkpoint-steps", "5"]
    whole, disturbed = cluster.directory / "whole", cluster.directory / "disturbed"
    cluster.run(*words, "--name", "undisturbed", "--", str(whole))
    command = cluster.start(*words, "--name", "scaled", "--", str(disturbed), "20", "40", "55")
    (path,) = wait_for(lambda: list(cluster.directory.glob(".oeprov/jobs/scaled-*/job.json")), command)
    job = Job(path.parent)

    def at_step(step: int, process: Any, phase: str) -> None:
        wait_for(lambda: disturbed.exists() and f"\n{step} " in disturbed.read_text(), process)
        wait_for(lambda: job.state().phase == phase, process)
        Path(f"{disturbed}.{step}").touch()

    wait_for(lambda: disturbed.exists() and "\n20 " in disturbed.read_text(), command)
    scale = cluster.start("scale", job.id, "--servers", "3", "--yes")
    at_step(20, scale, "scaling")
    assert "; training paused " in cluster.finish(scale, 0).splitlines()[-1]
    wait_for(lambda: "\n40 " in disturbed.read_text(), command)
    stop = cluster.start("stop", job.id)
    at_step(40, stop, "stopping")
    cluster.finish(command, 130)
    cluster.finish(stop, 0)
    assert job.pool_servers() == 3
    command = cluster.start("resume", job.id, "--servers", "1")
    wait_for(
        lambda: job.state().phase == "scaling" or Request.from_job(job.spec()).total_servers == 1, command
    )
    Path(f"{disturbed}.55").touch()
    out = cluster.finish(command, 0)
    assert "are in the pools of 3 servers" in out
    assert "servers: 3 → 1" in out
    assert disturbed.read_text() == whole.read_text(), "each step once, with the same loss"
    assert len(whole.read_text().splitlines()) == 60
    pauses = events(job, "pause")
    found = [(event["servers_before"], event["servers"]) for event in pauses]
    assert found == [(2, 3), (3, 3), (3, 1)]
    assert [event["step"] for event in pauses][:2] == [20, 40]
    assert 40 < pauses[2]["step"] <= 55, "after the first report"
    assert all(0 < event["seconds"] < SECONDS for event in pauses)
    assert "paused for other servers" in (job.run_dir / "report.html").read_text()
    assert_no_orphans(job)


@pytest.mark.parametrize(
    ("storage", "more"),
    [("pmem_libpmem", []), ("dram_pmem", ["--storage", "dram_pmem", "--storage-cache", "64K"])],
)
def test_killed_server_comes_back_and_the_job_is_done(
    cluster: Cluster, storage: str, more: list[str]
) -> None:
    cluster.run("bootstrap", "-i", "local.yml", "--yes")
    data = ["--data", "generate:5000000", "--max-cardinality", "1000", "--batch-size", "256"]
    name = f"survivor-of-{storage}"
    named = ["--steps", "150", "--checkpoint-steps", "10", "--no-export", "--name", name, "--json", *more]
    command = cluster.start("launch-training", "-i", "local.yml", *data, *named)
    (path,) = wait_for(lambda: list(cluster.directory.glob(f".oeprov/jobs/{name}-*/job.json")), command)
    job = Job(path.parent)
    wait_for(lambda: len(events(job, "checkpoint")) > 1, command)
    saved = events(job, "checkpoint")[-1]
    assert saved["rows"] == "pool"
    assert json.loads((Path(saved["path"]) / "manifest.json").read_text())["pool"]["storage"] == storage
    server = pid(job, "server-1")
    pools = Path(job.spec().processes[1].pools)
    assert list(pools.glob("*.pool"))
    os.kill(server, signal.SIGKILL)
    out = cluster.finish(command, 0)
    for words in ("server-1 on localhost was lost: it was killed by signal 9", "was restarted", "is back"):
        assert words in out
    report = json.loads(out.splitlines()[-1])
    assert (report["state"], report["step"]) == ("done", 150)
    (back,) = events(job, "server_back")
    assert back["step"] >= saved["step"]
    steps = [event["step"] for event in events(job, "step")]
    assert steps[-1] == 150
    assert events(job, "checkpoint")[-1]["rows"] == "files"
    assert pid(job, "server-1") != server
    assert_no_orphans(job)
    assert not pools.parent.exists(), "a job that is done leaves nothing on persistent memory"


def test_a_script_stops_goes_on_and_trains_with_two_workers(cluster: Cluster) -> None:
    lines = (cluster.directory / "local.yml").read_text().splitlines(keepends=True)
    plain = "".join(line for line in lines if not line.lstrip().startswith("training_"))
    (cluster.directory / "script.yml").write_text(plain)
    cluster.run("bootstrap", "-i", "script.yml", "--yes")
    script = ["--script", str(REPOSITORY / "examples/keras_job.py"), "--servers", "1"]
    words = ["launch-training", "-i", "script.yml", *script, "--checkpoint-steps", "20"]
    command = cluster.start(*words)
    (path,) = wait_for(lambda: list(cluster.directory.glob(".oeprov/jobs/keras_job-*/job.json")), command)
    job = Job(path.parent)
    wait_for(lambda: events(job, "checkpoint"), command)
    command.send_signal(signal.SIGTERM)
    out = cluster.finish(command, 130)
    stopped = events(job, "interrupted")[-1]["step"]
    assert f"stopped at step {stopped}, which is saved" in out
    assert_no_orphans(job)

    report = json.loads(cluster.run("resume", job.id, "--json").splitlines()[-1])
    assert (report["state"], report["step"]) == ("done", 392)
    assert events(job, "resume")[-1]["step"] == stopped
    assert_no_orphans(job)

    out = cluster.run(*words, "--workers", "2", "--name", "two", "--json")
    report = json.loads(out.splitlines()[-1])
    assert (report["state"], report["step"]) == ("done", 392)
    two = cluster.job()
    assert [item.role for item in two.spec().processes] == ["parameter_server", "worker", "worker"]
    assert_no_orphans(two)


def test_a_program_of_accelerate_trains_with_two_workers_and_resumes_after_a_kill(cluster: Cluster) -> None:
    pytest.importorskip("accelerate")
    lines = (cluster.directory / "local.yml").read_text().splitlines(keepends=True)
    plain = "".join(line for line in lines if not line.lstrip().startswith("training_"))
    (cluster.directory / "script.yml").write_text(plain)
    (cluster.directory / "clicks.py").write_text((REPOSITORY / "examples/clicks.py").read_text())
    program = (REPOSITORY / "examples/pytorch_accelerate_job.py").read_text()
    longer = program.replace("loop.epochs(2)", "loop.epochs(10)")
    assert longer != program
    (cluster.directory / "train.py").write_text(longer)
    cluster.run("bootstrap", "-i", "script.yml", "--yes")
    words = [
        "launch-training",
        "-i",
        "script.yml",
        "--script",
        "train.py",
        "--servers",
        "1",
        "--workers",
        "2",
    ]
    command = cluster.start(*words, "--checkpoint-steps", "20", "--json")
    (path,) = wait_for(lambda: list(cluster.directory.glob(".oeprov/jobs/train-*/job.json")), command)
    job = Job(path.parent)
    wait_for(lambda: any(event["step"] for event in events(job, "checkpoint")), command)
    os.kill(pid(job, "worker-1"), signal.SIGKILL)
    command.communicate(timeout=SECONDS)
    assert command.returncode != 0
    report = json.loads(cluster.run("resume", job.id, "--json").splitlines()[-1])
    assert (report["state"], report["step"]) == ("done", 200)
    assert events(job, "resume")[-1]["step"] >= 20
    assert_no_orphans(job)


@pytest.mark.skipif(ctypes.util.find_library("memkind") is None, reason="libmemkind is not here")
def test_memkind_in_a_directory_leaves_nothing_there(cluster: Cluster) -> None:
    cluster.run("bootstrap", "-i", "local.yml", "--yes")
    directory = cluster.directory / ".oeprov/pmem0"
    before = sorted(directory.iterdir())  # what jobs that were not done left
    data = ["--data", "generate:20000", "--max-cardinality", "1000", "--steps", "5"]
    named = ["--storage", "pmem_memkind", "--name", "kind", "--no-export", "--json"]
    out = cluster.run("launch-training", "-i", "local.yml", *data, *named)
    assert json.loads(out.splitlines()[-1])["state"] == "done"
    (path,) = cluster.directory.glob(".oeprov/jobs/kind-*/job.json")
    assert "pmem_memkind" in Job(path.parent).spec().processes[0].argv
    assert sorted(directory.iterdir()) == before
