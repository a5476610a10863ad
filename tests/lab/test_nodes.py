"""The lab itself: what its nodes have, also over power cuts and new starts; and the faults that tests use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faults
import pytest

from provision.lab import Lab, Node
from provision.node import kernel

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * 3600)]
GIB = 1 << 30


@pytest.fixture(scope="module")
def node(new_lab: Callable[..., Lab]) -> Node:
    return new_lab(nodes=1, pmem=GIB).nodes[0]


def again(node: Node) -> None:
    node.start()
    node.wait_ssh()


def test_a_fresh_node(node: Node) -> None:
    running = node.check("uname -r").strip()
    assert node.check("hostname").strip() == "lab-1"
    newest = node.check("apt-cache depends linux-image-amd64").split("linux-image-")[-1].strip()
    assert kernel.version(running) < kernel.version(newest)
    assert "GRUB_DEFAULT=0" in node.check("cat /etc/default/grub")
    assert "console=ttyS0" in node.check("cat /proc/cmdline")
    assert node.run("command -v ndctl daxctl ipmctl numactl")[0] != 0, "it is for us to install them"
    assert not node.check("systemctl list-units --failed --no-legend --plain").strip()
    code, _, said = node.run("timeout 5 bash -c '</dev/tcp/192.0.2.1/80'")
    assert code != 0, f"nodes reach nothing outside: {said}"


def test_host_keys_are_checked(node: Node) -> None:
    command = node.ssh_command()
    assert "StrictHostKeyChecking=yes" in command
    known = Path(node.directory.parents[1] / "known_hosts")
    text = known.read_text()
    try:
        known.write_text(text.replace("AAAAC3NzaC1lZDI1NTE5AAAAI", "AAAAC3NzaC1lZDI1NTE5AAAAJ"))
        code, _, said = node.run("true")
        assert (code, "verification failed" in said) == (255, True), said
    finally:
        known.write_text(text)
    assert node.run("true")[0] == 0


def test_a_region_without_namespaces(node: Node) -> None:
    node.check("apt-get update -q && apt-get install -y -q ndctl daxctl ipmctl numactl", timeout=300)
    regions = node.check("cat /sys/bus/nd/devices/region0/size /sys/bus/nd/devices/region0/available_size")
    assert regions.split() == [str(GIB), str(GIB)]
    assert node.check("ndctl list -N").strip() in ("", "[]")


def test_memory_mode_is_reported_after_a_boot(node: Node) -> None:
    assert "stand-in" in node.check("ipmctl help")
    node.check("ipmctl create -f -goal memorymode=100")
    assert "0x0000   | 0x0001 | 1.000 GiB" in node.check("ipmctl show -goal")
    node.power_cut()
    again(node)
    assert "no goal configs" in node.check("ipmctl show -goal")
    assert "Volatile     | 0.000 GiB | 1.000 GiB" in node.check("ipmctl show -memoryresources")
    node.check("rm -r /var/lib/ipmctl-lab")


def test_what_is_flushed_outlives_a_power_cut(node: Node) -> None:
    digest = faults.plant(node)
    assert "dax=always" in node.check("grep /mnt/foreign /proc/mounts")
    node.check("echo kept >/root/flushed && sync /root/flushed")
    before = node.boot_id()
    node.power_cut()
    assert not node.pid
    assert node.run("true")[0] == 255
    again(node)
    assert node.boot_id() != before
    assert faults.planted(node) == digest
    assert node.check("cat /root/flushed") == "kept\n"


def test_system_ram_is_a_node_without_cpus(node: Node) -> None:
    node.check("umount /mnt/foreign; ndctl create-namespace -f -e namespace0.0 -m devdax -M mem", timeout=300)
    node.check("daxctl reconfigure-device -m system-ram dax0.0", timeout=300)
    assert node.check("cat /sys/devices/system/node/node1/cpulist").strip() == ""
    total = int(node.check("grep MemTotal /sys/devices/system/node/node1/meminfo").split()[3])
    assert total == (GIB >> 10) - (128 << 10), "all but the block that holds the namespace's own data"


def test_shut_down_and_start(node: Node) -> None:
    node.shutdown()
    assert not node.pid
    again(node)
    assert "node1" not in node.check("ls /sys/devices/system/node"), (
        "system-ram lasts until the next boot only"
    )


def test_a_node_answers_again_after_its_cable_is_plugged_in(node: Node) -> None:
    node.cable(False)
    assert node.run("true", timeout=15)[0] != 0
    node.cable(True)
    node.wait_ssh()


def test_a_killed_sshd_ends_the_ssh_command(node: Node) -> None:
    code, _, _ = node.run("systemd-run -q --collect pkill -KILL -f 'sshd: root'; sleep 100", timeout=90)
    assert code == 255, "ssh noticed: it did not wait for the sleep"
    node.wait_ssh()


def test_full_boot(node: Node) -> None:
    faults.fill_boot(node)
    assert node.run("head -c 4000000 /dev/zero >/boot/more")[0] != 0
    faults.empty_boot(node)
    node.check("rm -f /boot/more")


@pytest.mark.parametrize("how", faults.KERNELS)
def test_a_kernel_that_does_not_boot(node: Node, tmp_path: Path, how: str) -> None:
    """The package installs like any other, gets a menu entry, and does not come up."""
    running = node.check("uname -r").strip()
    assert faults.offer_bad_kernel(node, tmp_path, how) == faults.BAD_RELEASE
    node.check("apt-get update -q && apt-get install -y -q linux-image-amd64", timeout=600)
    assert faults.BAD_RELEASE in node.check("apt-cache depends linux-image-amd64")
    assert f"vmlinuz-{faults.BAD_RELEASE}" in node.check("cat /boot/grub/grub.cfg")
    settings = 's/GRUB_DEFAULT=0/GRUB_DEFAULT=saved/; s/ttyS0"/ttyS0 panic=5"/'
    node.check(f"sed -i '{settings}' /etc/default/grub && update-grub")
    entry = "Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux "
    node.check(["grub-set-default", entry + running])
    node.check(["grub-reboot", entry + faults.BAD_RELEASE])
    size, boot = node.console.stat().st_size, node.boot_id()
    node.run("systemctl reboot")
    node.wait_ssh(after=boot)
    assert node.check("uname -r").strip() == running, "it came back with the kernel from before"
    said = node.console.read_bytes()[size:].decode(errors="replace")
    assert f"Loading Linux {faults.BAD_RELEASE}" in said
    assert ("Kernel panic" if how == "panics" else "/dev/gone does not exist") in said
    packages = f"linux-image-{faults.BAD_RELEASE} linux-image-amd64"
    node.check(f"apt-get purge -y -q {packages} && rm /srv/apt/kernel.deb /srv/apt/meta.deb", timeout=300)


def test_nodes_of_re6p(new_lab: Callable[..., Lab]) -> None:
    node = new_lab(nodes=1, pmem=GIB, variant="re6p").nodes[0]
    assert node.check(
        "cat /sys/bus/nd/devices/namespace0.0/size /sys/bus/nd/devices/namespace0.0/nstype"
    ).split() == [
        str(GIB),
        "4",
    ]
    digest = faults.plant(node)
    node.power_cut()
    again(node)
    assert faults.planted(node) == digest


def test_nodes_of_re7p(new_lab: Callable[..., Lab]) -> None:
    node = new_lab(nodes=1, pmem=GIB, variant="re7p").nodes[0]
    assert node.check("cat /sys/devices/system/node/node1/cpulist").strip() == ""
    assert "pmem" not in node.check("ls /dev")
    node.check("sed -i 's/ttyS0\"/ttyS0 memmap=1G!4G nokaslr\"/' /etc/default/grub && update-grub")
    node.shutdown()
    again(node)
    assert int(node.check("cat /sys/block/pmem0/size")) * 512 == GIB
    assert "node1" not in node.check("ls /sys/devices/system/node")


def test_two_sockets(new_lab: Callable[..., Lab]) -> None:
    node = new_lab(nodes=1, pmem=512 << 20, sockets=2).nodes[0]
    assert node.check("cat /sys/bus/nd/devices/region*/size").split() == [str(512 << 20)] * 2
    assert node.check("cat /sys/bus/nd/devices/region*/target_node").split() == ["2", "3"]
