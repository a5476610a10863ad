"""Rows on drives of a virtual node: an empty NVMe drive becomes a file system; training survives power cuts.

It trains in a directory on the node's disk: under load QEMU's NVMe ends in errors at each read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from test_power_cuts import STEPS, assert_the_same, begin, events, losses, moments, wait
from test_training import Trainer

from provision.lab.node import BOOT_SECONDS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * 3600)]
CUTS = 2
DIRECTORY = "/var/lib/rows"
CACHE = ("--storage", "dram_ssd", "--storage-cache", "256K")


@pytest.fixture(scope="module")
def user(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    lab = new_lab(nodes=1, variant="nvme", pmem=4 << 30)  # 52 tables of 16 MiB at least
    found = Trainer(
        lab,
        tmp_path_factory.mktemp("drives"),
        training_data="generate:150000:7",  # a tenth of it is evaluated at the end
        training_batch_size=512,
        training_steps=STEPS,
        training_checkpoint_steps=8,
        training_server_wait=2 * BOOT_SECONDS,
        training_max_cardinality=2000,
        training_export=False,
    )
    yield found
    print("\n" + found.told())


def test_an_empty_drive_becomes_a_place_for_rows(user: Trainer) -> None:
    plan = user.oeprov("plan", expect=2)
    assert re.search(r"ext4.*nvme0n1", plan), plan
    user.oeprov("bootstrap", "--yes")
    mounted = user.on("lab-1", "grep /mnt/ssd0 /proc/mounts")
    assert re.match(r"/dev/nvme0n1 /mnt/ssd0 ext4 \S*noatime", mounted), mounted
    assert "[none]" in user.on("lab-1", "cat /sys/block/nvme0n1/queue/scheduler")
    assert "converged already" in user.oeprov("bootstrap")
    assert "nvme0n1" in user.oeprov("doctor")


def test_training_goes_on_after_each_cut(user: Trainer) -> None:
    document = yaml.safe_load(user.inventory.read_text())
    document["all"]["children"]["parameter_servers"]["hosts"]["lab-1"]["ssd_devices"] = [DIRECTORY]
    user.inventory.write_text(yaml.safe_dump(document, sort_keys=False))
    user.on("lab-1", f"mkdir {DIRECTORY}")
    user.oeprov("bootstrap", "--yes")
    out = user.train("--name", "undisturbed", *CACHE)
    assert (out["state"], out["step"]) == ("done", STEPS)
    undisturbed, chance, node = user.job, moments(), user.lab.node("lab-1")
    command, job = begin(user, "cut", *CACHE)
    for number in range(CUTS):
        # Far from the end, which must not come before the power is cut.
        step = number * STEPS // (CUTS + 1) + chance.randrange(STEPS // (CUTS + 1))
        wait(lambda step=step: max(losses(job), default=-1) >= step, command)
        time.sleep(chance.uniform(0, 2))
        print(f"power cut after step {max(losses(job))}")
        node.power_cut()
        node.start()
        wait(lambda number=number: len(events(job, "server_back")) > number, command)
        print(f"back at step {events(job, 'server_back')[-1]['step']}")
    user.finish(command, 0)
    assert {event["rows"] for event in events(job, "checkpoint")[:-1]} == {"pool"}
    assert_the_same(user, job, undisturbed)
    assert user.on("lab-1", f"ls {DIRECTORY}/oeprov || :") == "", "a job that is done leaves nothing there"
