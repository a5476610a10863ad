"""Power cuts of parameter servers in the middle of training: nothing that a checkpoint has is lost."""

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_training import Trainer

from provision.jobs.store import Job
from provision.lab.node import BOOT_SECONDS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3 * 3600)]
STEPS = 240
CUTS = 3
NODES = ("lab-1", "lab-2")


@pytest.fixture(scope="module")
def user(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    lab = new_lab(nodes=len(NODES), variant="bare-metal", pmem=1 << 30)
    found = Trainer(
        lab,
        tmp_path_factory.mktemp("cuts"),
        training_data="generate:3000000:7",
        training_batch_size=512,
        training_steps=STEPS,
        training_checkpoint_steps=8,
        training_server_wait=2 * BOOT_SECONDS,
        training_max_cardinality=2000,
        training_export=False,
    )
    found.oeprov("bootstrap", "--yes")
    yield found
    print("\n" + found.told())


@pytest.fixture(scope="module")
def undisturbed(user: Trainer) -> Job:
    out = user.train("--name", "undisturbed")
    assert (out["state"], out["step"]) == ("done", STEPS)
    return user.job


def events(job: Job, kind: str) -> list[dict[str, Any]]:
    try:
        lines = job.metrics_file.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [event for line in lines if line.endswith("\n") and (event := json.loads(line))["event"] == kind]


def losses(job: Job) -> dict[int, float]:
    """Of each step the one that was reported last."""
    return {event["step"]: event["loss"] for event in events(job, "step")}


def wait(what: Callable[[], bool], command: subprocess.Popen[str]) -> None:
    """Return once it is so; the launcher must not end before."""
    while not what():
        if command.poll() is not None:
            out, err = command.communicate()
            pytest.fail(f"exit status {command.returncode}: {out}{err}")
        time.sleep(0.2)


def begin(user: Trainer, name: str, *words: str) -> tuple[subprocess.Popen[str], Job]:
    """A job and its launcher, once it trains."""
    command = user.start("launch-training", "--name", name, *words)
    jobs = user.directory / ".oeprov" / "jobs"
    wait(lambda: any(jobs.glob(f"{name}-*/run/metrics.jsonl")), command)
    (path,) = jobs.glob(f"{name}-*")
    return command, Job(path)


def assert_the_same(user: Trainer, job: Job, undisturbed: Job) -> None:
    """Losses, rows with their optimizer's state, dense weights: all as if nothing had happened."""
    assert job.state().phase == "done", job.state()
    ours, theirs = losses(job), losses(undisturbed)
    common = ours.keys() & theirs.keys()
    assert STEPS in common
    assert {step: ours[step] for step in common} == {step: theirs[step] for step in common}
    newest = [found.checkpoint() for found in (undisturbed, job)]
    paths = [str(found[1]) for found in newest if found is not None]
    out, _ = user.finish(user.begin("checkpoint", "diff", *paths))
    assert "no difference" in out


def moments() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"random moments of seed {seed}")
    return random.Random(seed)  # noqa: S311


@pytest.mark.parametrize(
    "storage",
    [("pmem_libpmem",), ("dram_pmem", "--storage-cache", "256K")],
    ids=["pmem_libpmem", "dram_pmem"],
)
def test_training_goes_on_after_each_cut(user: Trainer, undisturbed: Job, storage: tuple[str, ...]) -> None:
    chance, name = moments(), f"cut-{storage[0]}"
    command, job = begin(user, name, "--storage", *storage)
    for number in range(CUTS):
        # Far from the end, which must not come before the power is cut.
        step = number * STEPS // (CUTS + 1) + chance.randrange(STEPS // (CUTS + 1))
        wait(lambda step=step: max(losses(job), default=-1) >= step, command)
        time.sleep(chance.uniform(0, 2))
        node = user.lab.node(chance.choice(NODES))
        print(f"{name}: power cut of {node.name} after step {max(losses(job))}")
        node.power_cut()
        time.sleep(chance.uniform(0, 5))
        node.start()
        wait(lambda number=number: len(events(job, "server_back")) > number, command)
        print(f"{name}: back at step {events(job, 'server_back')[-1]['step']}")
    user.finish(command, 0)
    assert len(events(job, "server_gone")) >= CUTS
    assert {event["rows"] for event in events(job, "checkpoint")[:-1]} == {"pool"}
    assert_the_same(user, job, undisturbed)


def test_both_lose_power_and_the_job_is_resumed(user: Trainer, undisturbed: Job) -> None:
    chance = moments()
    user.set(training_server_wait=0)
    command, job = begin(user, "resumed")
    step = STEPS // 4 + chance.randrange(STEPS // 4)
    wait(lambda: max(losses(job), default=-1) >= step, command)
    time.sleep(chance.uniform(0, 2))
    for name in NODES:
        user.lab.node(name).power_cut()
    user.finish(command, 1)
    saved = job.checkpoint()
    assert saved is not None
    manifest = json.loads((Path(saved[1]) / "manifest.json").read_text())
    assert manifest["pool"]["servers"] == len(NODES)
    for name in NODES:
        user.lab.node(name).start()
    for name in NODES:
        user.lab.node(name).wait_ssh()
    user.say("resume", job.id)
    assert events(job, "resume")[-1]["step"] == saved[0]
    assert_the_same(user, job, undisturbed)
    assert user.on(NODES[0], "ls /mnt/pmem0/oeprov || :") == "", "a job that is done leaves nothing there"
