"""What goes wrong on clusters, on virtual nodes: what was asked for is reached, or nothing is lost.

Nodes are made anew for each group of tests; within a group one test builds on what the one before left.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import empty_boot, fill_boot, offer_bad_kernel
from user import User

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
SLOW_MKFS = """#!/bin/sh
echo $$ >/run/mkfs-begun
exec sleep 600
"""


def until(condition: Callable[[], bool], seconds: float, what: str, command: subprocess.Popen[str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        assert command.poll() is None, f"{what}: the command ended before: {command.communicate()}"
        time.sleep(0.5)


def seen(user: User, node: str, line: str) -> Callable[[], bool]:
    return lambda: user.lab.node(node).run(line, timeout=30)[0] == 0


def stuck_in_mkfs(user: User, *words: str) -> subprocess.Popen[str]:
    """Start a command; when this returns, it is making a file system and will not come to an end."""
    node = user.lab.node("lab-1")
    node.check("cat >/usr/local/sbin/mkfs.ext4 && chmod +x /usr/local/sbin/mkfs.ext4", stdin=SLOW_MKFS)
    node.check("rm -f /run/mkfs-begun")
    command = user.start(*words)
    until(seen(user, "lab-1", "test -s /run/mkfs-begun"), 300, "mkfs begins", command)
    return command


def free_mkfs(user: User) -> None:
    """Undo ``stuck_in_mkfs``; what still hangs in it is ended."""
    user.on("lab-1", "rm -f /usr/local/sbin/mkfs.ext4; kill $(cat /run/mkfs-begun) 2>/dev/null || true")


def data_without_a_signature(user: User) -> list[str]:
    """Consent to lose what lies behind a signature that was wiped; without it nothing is touched."""
    assert re.search(
        r"add: --consent lab-1:pmem0/data/[0-9a-f]{16}", user.oeprov("bootstrap", "--yes", expect=1)
    )
    return user.consents("bootstrap")


class TestOneNode:
    """A node that holds somebody's data, and then loses its power, its controller, its network."""

    @pytest.fixture(scope="class")
    def user(self, new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> User:
        lab = new_lab(nodes=1, variant="re6p", pmem=1 << 30)
        return User(lab, tmp_path_factory.mktemp("faults"), runtime_extra="none")

    def test_somebodys_raw_data_is_left_alone(self, user: User) -> None:
        """Pitfall 24: blkid finds no signature on it."""
        user.on("lab-1", "head -c 1M /dev/urandom | dd of=/dev/pmem0 bs=4k seek=64 conv=fsync status=none")
        before = user.on("lab-1", "blkid -p /dev/pmem0; echo $?; md5sum /dev/pmem0")
        assert before.startswith("2\n")
        assert data_without_a_signature(user)[1].startswith("lab-1:pmem0/data/")
        assert user.on("lab-1", "blkid -p /dev/pmem0; echo $?; md5sum /dev/pmem0") == before
        user.on("lab-1", "dd if=/dev/zero of=/dev/pmem0 bs=4k seek=64 count=256 conv=fsync status=none")
        assert user.json("bootstrap", "--check", expect=2)["pending"][0]["steps"]
        assert user.consents("bootstrap") == [], "zeros are empty"

    def test_somebodys_file_system_is_left_alone(self, user: User) -> None:
        """Pitfall 6 and safety: namespace0.0 is not ours, and neither is what lies on it."""
        user.on(
            "lab-1", "mkfs.ext4 -q /dev/pmem0 && mount /dev/pmem0 /mnt && seq 100000 >/mnt/theirs && sync"
        )
        before = user.on("lab-1", "md5sum /mnt/theirs; umount /mnt; md5sum /dev/pmem0")
        shown = user.oeprov("bootstrap", "--yes", expect=1)
        assert re.search(
            r"data would be lost; to agree, add: --consent lab-1:pmem0/ext4/[0-9a-f-]{36}", shown
        )
        user.oeprov("bootstrap", "--yes", "--consent", "lab-1:pmem0/ext4/another", expect=1)
        assert (
            user.on("lab-1", "mount -o ro,noload /dev/pmem0 /mnt; md5sum /mnt/theirs; umount /mnt") in before
        )
        assert user.on("lab-1", "md5sum /dev/pmem0") in before
        assert user.on("lab-1", "dpkg -l ndctl 2>&1 | grep -c ^ii || true").strip() == "0", (
            "nothing was touched"
        )

    def test_two_runs_at_once(self, user: User, tmp_path_factory: pytest.TempPathFactory) -> None:
        agreed = user.consents("bootstrap")
        first = user.start("bootstrap", "--yes", *agreed)
        until(seen(user, "lab-1", "test -e /var/lib/oeprov/lease.json"), 120, "the host is taken", first)
        assert "is being changed by pid" in user.oeprov("bootstrap", "--yes", *agreed, expect=1)
        other = User(user.lab, tmp_path_factory.mktemp("other"), runtime_extra="none")
        shown = other.oeprov("bootstrap", "--yes", *agreed, expect=1)
        assert "this host is being changed by bootstrap-" in shown
        user.finish(first)
        assert "converged already" in user.oeprov("bootstrap")
        assert "converged already" in other.oeprov("bootstrap"), "the host was given back"

    def test_power_cut_between_namespace_and_file_system(self, user: User) -> None:
        node = user.lab.node("lab-1")
        user.oeprov("pmem-mode", "system-ram", "--yes", *user.consents("pmem-mode", "system-ram"))
        command = stuck_in_mkfs(user, "pmem-mode", "fsdax", "--yes", *user.consents("pmem-mode", "fsdax"))
        node.power_cut()
        user.finish(command, expect=1)
        node.start()
        node.wait_ssh()
        assert "fsdax" in user.on("lab-1", "ndctl list -N")
        free_mkfs(user)
        shown = user.oeprov("pmem-mode", "fsdax", "--yes")
        assert "make ext4 on pmem0" in shown
        assert "fsdax namespace" not in shown, "it goes on from what is there"
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")

    def test_busy_file_system_is_not_taken_away(self, user: User) -> None:
        agreed = user.consents("pmem-mode", "system-ram")
        user.on("lab-1", "echo precious >/mnt/pmem0/file && sync")
        user.on("lab-1", "nohup sleep 900 </mnt/pmem0/file >/dev/null 2>&1 & echo $! >/run/holder")
        shown = user.oeprov("pmem-mode", "system-ram", "--yes", *agreed, expect=1)
        assert "/mnt/pmem0" in shown
        assert "sleep" in shown, "who holds it is said"
        assert user.on("lab-1", "cat /mnt/pmem0/file") == "precious\n"
        user.on("lab-1", "kill $(cat /run/holder)")
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")
        user.oeprov("bootstrap", "--yes")
        assert user.on("lab-1", "cat /mnt/pmem0/file") == "precious\n"

    def test_controller_killed_in_the_middle(self, user: User) -> None:
        node = user.lab.node("lab-1")
        node.check("umount /mnt/pmem0 && wipefs -qa /dev/pmem0")
        command = stuck_in_mkfs(user, "bootstrap", "--yes", *data_without_a_signature(user))
        os.killpg(command.pid, signal.SIGKILL)
        command.communicate()
        free_mkfs(user)
        shown = user.oeprov("bootstrap", "--yes")
        assert "an earlier run" in shown
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")

    def test_network_cut_in_the_middle(self, user: User) -> None:
        node = user.lab.node("lab-1")
        node.check("umount /mnt/pmem0 && wipefs -qa /dev/pmem0")
        command = stuck_in_mkfs(user, "bootstrap", "--yes", *data_without_a_signature(user))
        node.cable(False)
        user.finish(command, expect=1, seconds=600)
        node.cable(True)
        node.wait_ssh()
        free_mkfs(user)
        user.oeprov("bootstrap", "--yes")
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")


class TestKernels:
    """A new kernel that is no good, and no room for one."""

    @pytest.fixture(scope="class")
    def user(self, new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> User:
        lab = new_lab(nodes=1, variant="re7p", pmem=1 << 30)
        return User(lab, tmp_path_factory.mktemp("kernels"), runtime_extra="none", pmem_mode="system-ram")

    def test_full_boot(self, user: User) -> None:
        user.oeprov("bootstrap", "--yes")
        old = user.on("lab-1", "uname -r; ls /boot; dpkg --audit")
        fill_boot(user.lab.node("lab-1"))
        user.set(kernel_version="newest")
        assert "/boot" in user.oeprov("bootstrap", "--yes", expect=1)
        empty_boot(user.lab.node("lab-1"))
        assert user.on("lab-1", "uname -r; ls /boot; dpkg --audit") == old

    def test_kernel_that_does_not_boot(self, user: User, tmp_path: Path) -> None:
        node = user.lab.node("lab-1")
        old = user.on("lab-1", "uname -r")
        user.set(kernel_version=offer_bad_kernel(node, tmp_path, "panics"))
        shown = user.oeprov("bootstrap", "--yes", expect=1)
        assert "returned to" in shown
        assert user.on("lab-1", "uname -r") == old
        shown = user.oeprov("plan", expect=1)
        assert "failed its trial" in shown
        assert "it is tried again" in user.oeprov("bootstrap", "--check", "--retry-trials", expect=2)
        user.set(kernel_version="keep")
        user.oeprov("bootstrap", "--yes")
        assert user.on("lab-1", "uname -r") == old

    def test_memmap_that_is_not_there(self, user: User) -> None:
        """Pitfall 1: figures of another instance type are refused before anything is touched."""
        before = user.on("lab-1", "cat /etc/default/grub /boot/grub/grub.cfg | md5sum")
        user.set(pmem_mode="fsdax", pmem_memmap="1008G!257G")
        shown = user.oeprov("bootstrap", "--yes", expect=1)
        assert "memmap=1008G!257G" in shown
        assert user.on("lab-1", "cat /etc/default/grub /boot/grub/grub.cfg | md5sum") == before

    def test_arguments_that_do_not_boot(self, user: User) -> None:
        user.set(pmem_mode="system-ram", pmem_memmap="", kernel_arguments=["root=/dev/nowhere"])
        before = user.on("lab-1", "cat /etc/default/grub")
        assert "returned to" in user.oeprov("bootstrap", "--yes", expect=1)
        assert user.on("lab-1", "cat /etc/default/grub") == before
        assert "nowhere" not in user.on("lab-1", "cat /proc/cmdline")
        user.set(kernel_arguments=[])

    def test_memmap_makes_persistent_memory_and_goes_again(self, user: User) -> None:
        panics = "cat /proc/sys/kernel/panic /proc/sys/kernel/panic_on_oops"
        before = user.on("lab-1", panics)
        user.set(pmem_mode="fsdax")
        shown = user.oeprov("bootstrap", "--yes")
        assert "panic=15 oops=panic oeprov.trial=" in user.on("lab-1", "cat /proc/cmdline"), (
            "the trial's boot"
        )
        assert user.on("lab-1", panics) == before, "and it panics as it did before"
        assert "is lost in a stop or restart" in shown, "pitfall 2"
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")
        user.set(pmem_mode="system-ram")
        user.oeprov("bootstrap", "--yes", *user.consents("bootstrap"))
        assert "memmap" not in user.on("lab-1", "cat /proc/cmdline")
        assert "converged already" in user.oeprov("bootstrap")


class TestUnreachable:
    """Of two nodes one is off."""

    def test_reachable_nodes_converge_while_one_is_off(
        self, new_lab: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        lab = new_lab(nodes=2, variant="bare-metal", pmem=1 << 30)
        user = User(lab, tmp_path_factory.mktemp("off"), runtime_extra="none")
        lab.node("lab-2").power_cut()
        shown = user.oeprov("bootstrap", "--yes", expect=1)
        assert re.search(r"lab-2: 127\.0\.0\.1 port \d+ ", shown)
        assert "dax=always" in user.on("lab-1", "grep /mnt/pmem0 /proc/mounts")
        lab.node("lab-2").start()
        lab.node("lab-2").wait_ssh()
        user.oeprov("bootstrap", "--yes")
        assert "converged already" in user.oeprov("bootstrap")
