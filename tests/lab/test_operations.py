"""A node's later life: what `oeprov doctor` says when it is broken, the ways back, and how oeprov leaves it.

One test builds on what the one before left. ``-s`` shows what each command took.
"""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from test_training import Trainer, far

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]
NODE = ("--limit", "lab-1")  # the controller is left as it is
FSTAB_AND_BOOT = "cat /etc/fstab; grep CMDLINE /etc/default/grub"


@pytest.fixture(scope="module")
def user(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    lab = new_lab(nodes=1, variant="bare-metal", pmem=1 << 30)
    found = Trainer(
        lab,
        tmp_path_factory.mktemp("operations"),
        training_data="generate:3000000:7",
        training_batch_size=512,
        training_checkpoint_steps=20,
        training_max_cardinality=2000,
    )
    yield found
    print("\n" + found.told())


@pytest.fixture(scope="module")
def before(user: Trainer) -> dict[str, str]:
    """The node as it came."""
    return {"kernel": user.on("lab-1", "uname -r").strip(), "files": user.on("lab-1", FSTAB_AND_BOOT)}


def ails(user: Trainer) -> str:
    """What doctor says of the node, on which something is wrong; a finding and what to do in one line."""
    return re.sub(r"\n *→", " →", user.oeprov("doctor", *NODE, expect=1))


def is_well(user: Trainer) -> bool:
    return "lab-1: nothing wrong" in user.oeprov("doctor", *NODE)


def interrupted_job(user: Trainer) -> str:
    """A job whose launcher was killed after its first checkpoint: its server still runs on the node."""
    user.oeprov("launch-training", "--detach")
    user.until(far)
    os.kill(user.job.state().supervisor_pid, signal.SIGKILL)
    user.until(lambda found: found["state"] == "interrupted" and not found["processes"][-1]["alive"])
    return user.job.id


def test_a_healthy_node(user: Trainer, before: dict[str, str]) -> None:
    shown = ails(user)
    assert "it differs from the inventory" in shown
    assert "create a fsdax namespace on region0" in shown
    user.oeprov("bootstrap", "--yes")
    assert is_well(user)


def test_a_mount_that_is_gone(user: Trainer) -> None:
    user.on("lab-1", "umount /mnt/pmem0")
    assert "/dev/pmem0 is not mounted → `mount /mnt/pmem0`" in ails(user)
    user.on("lab-1", "mount /mnt/pmem0")
    assert is_well(user)
    user.on("lab-1", "umount /mnt/pmem0 && mount /dev/pmem0 /mnt/pmem0")
    assert "/mnt/pmem0 is mounted without DAX" in ails(user)
    user.oeprov("bootstrap", "--yes", *NODE)
    assert is_well(user)


def test_disks_that_are_full(user: Trainer) -> None:
    for place in ("/", "/mnt/pmem0"):
        user.on("lab-1", f"fallocate -l $(df --output=avail -B1 {place} | tail -1) {place}/filler && sync")
        assert f"- {place} is full: " in ails(user)
        user.on("lab-1", f"rm {place}/filler && sync")
    assert is_well(user)


def test_rollback_of_the_mode(user: Trainer) -> None:
    change = ("pmem-mode", "system-ram", *NODE)
    user.oeprov(*change, "--yes", *user.consents(*change))
    assert "system-ram" in user.on("lab-1", "daxctl list")
    assert "namespace0.0 is in mode devdax, and pmem_mode asks for fsdax" in ails(user)
    back = ("rollback", "pmem-mode", *NODE)
    user.oeprov(*back, "--yes", *user.consents(*back))
    assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")
    assert is_well(user)


def test_a_namespace_in_another_mode(user: Trainer) -> None:
    user.on("lab-1", "umount /mnt/pmem0 && ndctl create-namespace -f -e namespace0.0 -m devdax", timeout=600)
    assert "namespace0.0 is in mode devdax, and pmem_mode asks for fsdax" in ails(user)
    change = ("pmem-mode", "fsdax", *NODE)
    user.oeprov(*change, "--yes", *user.consents(*change))
    assert is_well(user)


def test_a_server_that_was_stopped(user: Trainer) -> None:
    job = interrupted_job(user)
    unit = f"oeprov-{job}-server-0.service"
    assert is_well(user), "its server runs"
    user.on("lab-1", f"systemctl stop {unit}")
    shown = ails(user)
    assert f"server-0 of job {job} does not run: it ended" in shown
    assert f"`systemctl start {unit}`" in shown
    user.on("lab-1", f"systemctl start {unit}")
    refused = user.oeprov("destroy", *NODE, "--yes", expect=1)
    assert f"training job {job} runs on this host; stop it first" in refused
    assert "lab-1: stopped server-0" in user.say("stop", job)
    assert is_well(user)


def test_rollback_of_the_kernel(user: Trainer, before: dict[str, str]) -> None:
    user.set(kernel_version="newest", kernel_arguments=["mitigations=off"])
    user.oeprov("bootstrap", *NODE, "--yes")
    assert user.on("lab-1", "uname -r").strip() != before["kernel"]
    assert "mitigations=off" in user.on("lab-1", "cat /proc/cmdline")
    user.oeprov("rollback", "kernel", *NODE, "--yes")
    assert user.on("lab-1", "uname -r").strip() == before["kernel"]
    assert "not what the inventory asks for" in ails(user)
    user.set(kernel_version="keep")
    assert is_well(user)


def test_destroy_leaves_nothing_of_oeprov(user: Trainer, before: dict[str, str]) -> None:
    user.oeprov("destroy", *NODE, "--yes")
    assert user.on("lab-1", "ndctl list -N | grep -c fsdax").strip() == "1", "data stays unless it is named"
    agreed = re.findall(r"--consent|lab-1:\S+/\S+", user.oeprov("destroy", *NODE, "--check"))
    assert any(item.startswith("lab-1:namespace0.0/") for item in agreed)
    user.oeprov("destroy", *NODE, "--yes", *agreed)
    assert user.on("lab-1", "ndctl list -N").strip() in ("", "[]")
    assert user.on("lab-1", "ls -d /opt/oeprov /etc/oeprov /var/lib/oeprov /mnt/pmem0 2>/dev/null || :") == ""
    assert user.on("lab-1", "ls /etc/systemd/system | grep oeprov || :") == ""
    assert user.on("lab-1", "id oeprov 2>&1 || :").strip().endswith("no such user")
    assert user.on("lab-1", FSTAB_AND_BOOT) == before["files"]
    assert "mitigations=off" not in user.on("lab-1", "cat /proc/cmdline")
    older, newest = before["kernel"], user.on("lab-1", "ls /boot/vmlinuz-* | sort -V | tail -1").strip()
    newest = newest.partition("vmlinuz-")[2]
    again = user.oeprov("destroy", *NODE, "--yes", *agreed)
    kept = f"before oeprov it was 0, with which the next boot would start kernel {newest}, and {older} runs"
    assert f"lab-1: left: GRUB_DEFAULT=saved in /etc/default/grub; {kept}" in again
    user.on("lab-1", f"apt-get purge -y linux-image-amd64 linux-image-{newest}", timeout=900)
    again = user.oeprov("destroy", *NODE, "--yes", *agreed)
    said = [line for line in again.splitlines() if "lab-1: left: " in line and "note" not in line]
    assert said == ["✓ lab-1: left: the goal of the modules, App Direct; ipmctl changes it"]
    assert user.on("lab-1", "grep GRUB_DEFAULT /etc/default/grub") == "GRUB_DEFAULT=0\n"
