"""Training with its server on a virtual node: status, logs, stop, resume, power cuts and reboots."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from user import User

from oe_runtime import Client, ServerLost, TableSpec
from provision.jobs.store import Job, all_jobs

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * 3600)]
ROWS = "generate:3000000:7"
DATA = Path(__file__).parents[3] / "shared" / "data" / "criteo_kaggle_7200.tsv.gz"


class Trainer(User):
    """Watches jobs too; these commands take no inventory."""

    @property
    def job(self) -> Job:
        return all_jobs(self.directory / ".oeprov")[-1]

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "provision.cli", *words],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def say(self, *words: str, expect: int = 0) -> str:
        begun = time.monotonic()
        out, err = self.finish(self.begin(*words), expect)
        self.times.append((" ".join(words), time.monotonic() - begun))
        return out + err

    def status(self) -> dict[str, Any]:
        out, _ = self.finish(self.begin("status", self.job.id, "--json"))
        (found,) = json.loads(out)["jobs"]
        return dict(found)

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 1800) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not what(found := self.status()):
            assert time.monotonic() < end, found
            time.sleep(1)
        return found

    def boot(self) -> None:
        node = self.lab.node("lab-1")
        node.start()
        node.wait_ssh()


@pytest.fixture(scope="module")
def user(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    lab = new_lab(nodes=1, variant="bare-metal", pmem=1 << 30)
    found = Trainer(
        lab,
        tmp_path_factory.mktemp("training"),
        training_data=ROWS,
        training_batch_size=512,
        training_checkpoint_steps=20,
        training_server_wait=0,  # what these tests break is to end the job
        training_max_cardinality=2000,
    )
    found.oeprov("bootstrap", "--yes")
    yield found
    print("\n" + found.told())


def far(found: dict[str, Any]) -> bool:
    """It trains and has a checkpoint."""
    return found["state"] == "running" and bool(found["checkpoint_step"])


def nothing_left(user: Trainer, *, pools: bool) -> None:
    """No process, unit or directory of the job; its rows on persistent memory stay until it is done."""
    assert user.on("lab-1", "ls /etc/systemd/system | grep oeprov-.*-server || :") == ""
    assert user.on("lab-1", "pgrep -f [o]e_runtime.server || :") == ""
    assert user.on("lab-1", "ls /var/lib/oeprov/jobs") == ""
    assert (user.job.id in user.on("lab-1", "ls /mnt/pmem0/oeprov").split()) is pools


def test_watch_stop_and_resume(user: Trainer) -> None:
    user.oeprov("launch-training", "--detach")
    found = user.until(far)
    server = found["processes"][0]
    assert (server["name"], server["host"], server["state"]) == ("server-0", "lab-1", "runs")
    assert re.fullmatch(r"127\.0\.0\.1:71\d\d", server["endpoint"]), "through the forwarded port"
    assert server["pmem_bytes"] > 0, "rows are on /mnt/pmem0"
    assert sum(found["rows"].values()) > 1000
    assert "lab-1" in user.say("status")
    unit = f"oeprov-{user.job.id}-server-0.service"
    assert user.on("lab-1", f"systemctl is-enabled {unit}") == "enabled\n"
    maps = user.on("lab-1", f"cat /proc/$(systemctl show -p MainPID --value {unit})/maps")
    assert f"/mnt/pmem0/oeprov/{user.job.id}/server-0/" in maps

    follow = user.begin("logs", "-f")
    out = user.say("stop")
    assert "lab-1: stopped server-0" in out
    saved = user.status()["checkpoint_step"]
    assert user.job.state().message == f"stopped at step {saved}, which is saved"
    lines, _ = user.finish(follow)
    assert re.search(r"^server-0 +\| .*SIGTERM", lines, re.MULTILINE)
    nothing_left(user, pools=True)

    user.say("resume", "--detach")
    user.until(lambda found: far(found) and found["checkpoint_step"] > saved)
    assert f'"step": {saved}' in next(
        line for line in user.job.metrics_file.read_text().splitlines() if '"resume"' in line
    )


def test_power_cut_then_resume(user: Trainer) -> None:
    if user.status()["state"] != "running":
        user.oeprov("launch-training", "--detach")
    user.until(far)
    user.lab.node("lab-1").power_cut()
    found = user.until(lambda found: found["state"] == "failed")
    assert "server-0 on lab-1" in found["message"]
    assert found["processes"][0]["state"] == "does not answer"
    assert f"oeprov resume {user.job.id}" in user.say("status")
    saved = found["checkpoint_step"]
    refused = user.say("resume", expect=1)
    assert "host lab-1 127.0.0.1 port " in refused
    assert "nothing was started" in refused

    user.boot()
    user.until(lambda found: found["processes"][0]["state"] == "came back")
    user.say("resume", "--detach")
    user.until(lambda found: far(found) and found["checkpoint_step"] > saved)


def test_reboot_of_the_node_then_killed_launcher(user: Trainer) -> None:
    if user.status()["state"] != "running":
        user.oeprov("launch-training", "--detach")
    user.until(far)
    node = user.lab.node("lab-1")
    boot = node.boot_id()
    node.run("systemctl reboot")
    user.until(lambda found: found["state"] == "failed")
    node.wait_ssh(after=boot)
    user.say("resume", "--detach")
    user.until(far)

    supervisor = user.job.state().supervisor_pid
    os.kill(supervisor, signal.SIGKILL)
    user.until(lambda found: found["state"] == "interrupted" and not found["processes"][-1]["alive"])
    assert user.status()["processes"][0]["state"] == "runs"
    assert "lab-1: stopped server-0" in user.say("stop", user.job.id)
    nothing_left(user, pools=True)


def test_servers_alone_keep_a_checkpoint_over_a_reboot(user: Trainer) -> None:
    """The shutdown ends the server with SIGTERM, and the one that systemd starts has the checkpoint."""
    out, _ = user.finish(user.begin("servers", "up", "-i", str(user.inventory), "--json"))
    found = json.loads(out)

    def connect() -> Client:
        token = Path(found["token_file"]).read_text().strip()
        return Client(found["endpoints"], token=token, tls=found["tls"])

    keys, spec = np.arange(500), TableSpec("t", 4, optimizer={"name": "sgd"})
    with connect() as client:
        table = client.create_table(spec)
        pulled = client.pull([keys], [(table, 0)])
        client.push(pulled, [np.ones((len(keys), 4), np.float32)], 1.0)
        client.checkpoint(1, wait=True)
        rows = client.pull_rows(table, keys)
    node = user.lab.node("lab-1")
    boot = node.boot_id()
    node.run("systemctl reboot")
    node.wait_ssh(after=boot)
    end = time.monotonic() + 600
    while True:
        try:
            client = connect()
            break
        except ServerLost:
            assert time.monotonic() < end
            time.sleep(1)
    with client:
        table = client.create_table(spec)
        assert client.recover() == 1
        assert np.array_equal(client.pull_rows(table, keys), rows)
        client.drop_table(table)
    user.say("servers", "down")


@pytest.mark.skipif(not DATA.exists(), reason="the real rows are not here")
def test_real_rows_to_the_end(user: Trainer) -> None:
    user.set(training_data=str(DATA), training_batch_size=256, training_max_cardinality=0)
    out = user.train("--epochs", "2")
    assert (out["state"], out["step"]) == ("done", out["steps"])
    assert 0.6 < out["eval"]["auc"] < 0.9
    assert (Path(out["export"]) / "saved_model.pb").is_file()
    nothing_left(user, pools=False)


# As EL has it; there, guests bring hot-added memory online as memory that is not movable.
REDHAT_RULES = """\
SUBSYSTEM!="memory", GOTO="memory_hotplug_end"
ACTION!="add", GOTO="memory_hotplug_end"
ENV{.state}="online"
CONST{virt}=="none", ENV{.state}="online_movable"
ATTR{state}=="offline", ATTR{state}="$env{.state}"
LABEL="memory_hotplug_end"
"""
SYSTEM_RAM = ("pmem-mode", "system-ram", "--limit", "lab-1")  # the controller has no such memory


@pytest.fixture(scope="module")
def memory_node(user: Trainer) -> str:
    """The number of the node that lab-1's persistent memory is from now on; the inventory does not say so."""
    rules = f"cat >/usr/lib/udev/rules.d/40-redhat.rules <<'END'\n{REDHAT_RULES}END\nudevadm control --reload"
    user.on("lab-1", rules)
    said = user.oeprov(*SYSTEM_RAM, "--yes", *user.consents(*SYSTEM_RAM))
    user.set(training_data=ROWS, training_batch_size=512, training_max_cardinality=2000)
    node = user.on("lab-1", "cat /etc/oeprov/memory.env").strip().partition("=")[2]
    assert f"✓ lab-1: memory nodes: {node} (" in said
    assert "+          pmem_mode: system-ram" in said, "what the inventory would have to say"
    return node


def zones(user: Trainer, node: str) -> str:
    """The zones of a node's memory blocks."""
    return user.on("lab-1", f"cat /sys/devices/system/node/node{node}/memory*/valid_zones | sort -u").strip()


def policies(user: Trainer) -> str:
    """Of each mapping of the job's server, where its memory may lie and does."""
    unit = f"oeprov-{user.job.id}-server-0.service"
    return user.on("lab-1", f"cat /proc/$(systemctl show -p MainPID --value {unit})/numa_maps")


def test_memkind_puts_rows_on_the_memory_node(user: Trainer, memory_node: str) -> None:
    said = user.oeprov("launch-training", "--detach", "--storage", "pmem_memkind")
    assert "lab-1: the job uses system-ram; " in said, "the inventory still means fsdax"
    found = user.until(far)
    server = found["processes"][0]
    assert (server["state"], server["host"]) == ("runs", "lab-1")
    assert server["pmem_bytes"] > sum(found["rows"].values()) * 4 * 9
    there = re.compile(rf"\bN{memory_node}=(\d+)")
    lines = policies(user).splitlines()
    bound = [found for line in lines if " default " not in line for found in [there.search(line)] if found]
    assert sum(int(found[1]) for found in bound) * 4096 >= server["pmem_bytes"], "in memkind's arenas"
    assert any(" default " in line and " heap " in line for line in lines), (
        "the rest of it is not bound there"
    )
    assert "lab-1: stopped server-0" in user.say("stop", user.job.id)


def test_rows_on_the_memory_node(user: Trainer, memory_node: str) -> None:
    user.oeprov(*SYSTEM_RAM, "--yes", "--write-inventory")
    user.oeprov("launch-training", "--detach")
    server = user.until(far)["processes"][0]
    assert (server["state"], server["host"]) == ("runs", "lab-1")
    assert server["pmem_bytes"] > server["dram_bytes"], (
        "the node without CPUs holds what the server allocates"
    )
    assert f" bind:{memory_node} " in policies(user)
    boot = user.lab.node("lab-1").boot_id()
    user.lab.node("lab-1").run("systemctl reboot")
    user.until(lambda found: found["state"] == "failed")
    user.lab.node("lab-1").wait_ssh(after=boot)
    found = user.until(lambda found: found["processes"][0]["state"] == "came back")
    assert found["processes"][0]["pid"] > 0, "it waited for its memory"
    assert zones(user, memory_node) == "Movable", "also where a rule of udev brings memory online"
    user.oeprov(*SYSTEM_RAM, "--check")
    assert "lab-1: stopped server-0" in user.say("stop", user.job.id)
