"""Memory of more kinds: two sockets with their modules, kernel tiering, and CXL memory.

Tests of one node build on each other. ``-s`` shows what each command took.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from test_training import Trainer, far
from user import bring_wheel

from provision.lab.node import BOOT_SECONDS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * 3600)]
NODE = ("--limit", "lab-1")
WEIGHTS = "cat /sys/kernel/mm/mempolicy/weighted_interleave/node[01]"
TIERING = "cat /sys/kernel/mm/numa/demotion_enabled /proc/sys/kernel/numa_balancing"


def trainer(lab: Any, directory: Any, **settings: Any) -> Trainer:
    return Trainer(
        lab,
        directory,
        training_data="generate:3000000:7",
        training_batch_size=512,
        training_checkpoint_steps=20,
        training_max_cardinality=2000,
        **settings,
    )


def boot_again(user: Trainer) -> None:
    node = user.lab.node("lab-1")
    node.shutdown(seconds=BOOT_SECONDS)
    node.start()
    node.wait_ssh()
    # ssh may be there before the units that set the mode.
    user.on("lab-1", "systemctl is-system-running --wait || :", timeout=BOOT_SECONDS)


def of_server(user: Trainer, number: int, file: str) -> str:
    """A file of /proc of a server of the running job."""
    unit = f"oeprov-{user.job.id}-server-{number}.service"
    return user.on("lab-1", f"cat /proc/$(systemctl show -p MainPID --value {unit})/{file}")


def pages(numa_maps: str) -> dict[int, int]:
    """Pages per node."""
    found: dict[int, int] = {}
    for node, number in re.findall(r" N(\d+)=(\d+)", numa_maps):
        found[int(node)] = found.get(int(node), 0) + int(number)
    return found


@pytest.fixture(scope="module")
def sockets(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A node with two sockets: nodes 0 and 1 have a CPU each; their modules are nodes 2 and 3 as memory."""
    lab = new_lab(nodes=1, pmem=512 << 20, memory=2 << 30, sockets=2)
    found = trainer(lab, tmp_path_factory.mktemp("sockets"), parameter_server_count=2)
    yield found
    print("\n" + found.told())


@pytest.fixture(scope="module")
def before(sockets: Trainer) -> str:
    """What the kernel did between nodes before oeprov came."""
    return sockets.on("lab-1", TIERING)


def test_servers_on_fsdax_beside_their_module(sockets: Trainer, before: str) -> None:
    assert before.startswith("false\n")
    sockets.oeprov("bootstrap", "--yes")
    sockets.oeprov("launch-training", "--detach")
    sockets.until(far)
    for number in (0, 1):
        assert f"Cpus_allowed_list:\t{number}\n" in of_server(sockets, number, "status")
        maps = of_server(sockets, number, "maps")
        assert f"/mnt/pmem{number}/oeprov/" in maps
        assert f"/mnt/pmem{1 - number}/" not in maps
        region = f"/sys/bus/nd/devices/region{number}"
        assert sockets.on("lab-1", f"cat {region}/numa_node {region}/target_node").split() == [
            str(number),
            str(number + 2),
        ]
    sockets.say("stop")
    sockets.say("jobs", "rm", sockets.job.id, "--yes", "--consent", sockets.job.id)


def test_the_modules_become_memory_nodes(sockets: Trainer) -> None:
    sockets.oeprov(
        "pmem-mode", "system-ram", "--yes", *sockets.consents("pmem-mode", "system-ram", *NODE), *NODE
    )
    sockets.set(pmem_mode="system-ram")
    assert sockets.on("lab-1", "cat /etc/oeprov/memory.env") == "MEMKIND_DAX_KMEM_NODES=2,3\n"
    assert sockets.on("lab-1", "cat /sys/devices/system/node/node[23]/cpulist").strip() == ""


def test_servers_on_memory_nodes_beside_their_socket(sockets: Trainer) -> None:
    sockets.oeprov("launch-training", "--detach")
    sockets.until(far)
    for number in (0, 1):
        assert f"Cpus_allowed_list:\t{number}\n" in of_server(sockets, number, "status")
        maps = of_server(sockets, number, "numa_maps")
        (heap,) = [line for line in maps.splitlines() if " heap" in line]
        assert f" bind:{number + 2} " in heap
        assert set(pages(heap)) == {number + 2}
    sockets.say("stop")


def test_tiered_survives_a_boot_and_is_undone(sockets: Trainer, before: str) -> None:
    sockets.oeprov("pmem-mode", "tiered", "--yes", *NODE)
    sockets.set(pmem_mode="tiered")
    sockets.oeprov("bootstrap", "--yes", *NODE)
    assert sockets.on("lab-1", TIERING) == "true\n2\n"
    assert sockets.on("lab-1", "ls /etc/oeprov 2>/dev/null || :") == ""
    boot_again(sockets)
    assert sockets.on("lab-1", TIERING) == "true\n2\n"
    tiers = sockets.on("lab-1", "cat /sys/devices/virtual/memory_tiering/memory_tier*/nodelist")
    assert sorted(tiers.split()) == ["0-1", "2-3"]
    assert "converged already" in sockets.oeprov("bootstrap", *NODE)
    assert "lab-1: nothing wrong" in sockets.oeprov("doctor", *NODE)

    sockets.on("lab-1", "sysctl -q kernel.numa_balancing=1")
    said = sockets.oeprov("doctor", *NODE, expect=1)
    assert "/proc/sys/kernel/numa_balancing is 1 instead of 2" in said
    assert "systemctl restart oeprov-tiering.service" in said
    sockets.on("lab-1", "systemctl restart oeprov-tiering.service")
    assert "lab-1: nothing wrong" in sockets.oeprov("doctor", *NODE)

    sockets.oeprov("launch-training", "--detach")
    sockets.until(far)
    for number in (0, 1):
        assert " bind:" not in of_server(sockets, number, "numa_maps")
        assert "Cpus_allowed_list:\t0-1\n" in of_server(sockets, number, "status")
    sockets.say("stop")
    sockets.oeprov("pmem-mode", "system-ram", "--yes", *NODE)
    assert sockets.on("lab-1", TIERING) == before
    assert "oeprov-tiering" not in sockets.on("lab-1", "ls -R /etc/systemd/system /run")


def test_destroy_undoes_tiering(sockets: Trainer, before: str) -> None:
    """All of it: also the memory nodes, once the namespaces are named."""
    sockets.oeprov("pmem-mode", "tiered", "--yes", *NODE)
    assert sockets.on("lab-1", TIERING) == "true\n2\n"
    sockets.oeprov("destroy", "--yes", *NODE)
    assert sockets.on("lab-1", TIERING) == before
    agreed = re.findall(r"--consent|lab-1:\S+/\S+", sockets.oeprov("destroy", *NODE, "--check"))
    assert {word.partition("/")[0] for word in agreed} >= {"lab-1:namespace0.0", "lab-1:namespace1.0"}
    sockets.oeprov("destroy", "--yes", *NODE, *agreed)
    assert sockets.on("lab-1", TIERING) == before
    assert sockets.on("lab-1", "ndctl list -N").strip() in ("", "[]")
    assert sockets.on("lab-1", "cat /sys/devices/system/node/has_memory") == "0-1\n"
    assert "memhp_default_state" not in sockets.on("lab-1", "cat /proc/cmdline /etc/default/grub")
    assert sockets.on("lab-1", "ls -d /opt/oeprov /etc/oeprov /var/lib/oeprov 2>/dev/null || :") == ""
    assert "oeprov" not in sockets.on("lab-1", "ls -R /etc/systemd/system")


@pytest.fixture(scope="module")
def cxl(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A type 3 device with volatile memory, on Debian 13; no firmware has made a region of it."""
    lab = new_lab(nodes=1, pmem=2 << 30, variant="cxl")
    found = trainer(lab, tmp_path_factory.mktemp("cxl"))
    yield found
    print("\n" + found.told())


def test_a_cxl_region_becomes_a_tier(cxl: Trainer) -> None:
    before = cxl.on("lab-1", TIERING)
    assert before == "false\n0\n"

    cxl.set(pmem_mode="tiered", pmem_dram_weight=3)
    assert "create a region of mem0 (2 GiB)" in cxl.oeprov("plan", *NODE, expect=2)
    cxl.oeprov("pmem-mode", "tiered", "--yes", *NODE)
    assert '"memdev":"mem0"' in cxl.on("lab-1", "cxl list -M")
    assert '"decode_state":"commit"' in cxl.on("lab-1", "cxl list -R")
    assert '"movable":true' in cxl.on("lab-1", "daxctl list")
    tiers = cxl.on("lab-1", "cat /sys/devices/virtual/memory_tiering/memory_tier*/nodelist")
    assert sorted(tiers.split()) == ["0", "1"]
    assert (cxl.on("lab-1", TIERING), cxl.on("lab-1", WEIGHTS)) == ("true\n2\n", "3\n1\n")


def test_the_cxl_region_comes_back_at_boot(cxl: Trainer) -> None:
    boot_again(cxl)
    assert '"movable":true' in cxl.on("lab-1", "daxctl list"), "the unit made the region again"
    assert (cxl.on("lab-1", TIERING), cxl.on("lab-1", WEIGHTS)) == ("true\n2\n", "3\n1\n")
    assert "converged already" in cxl.oeprov("pmem-mode", "tiered", "--yes", *NODE)


def test_training_beside_a_cxl_tier(cxl: Trainer) -> None:
    """The server is bound to nothing. QEMU emulates each access to CXL memory as one to a device."""
    bring_wheel(cxl)
    cxl.set(parameter_server_start_timeout=BOOT_SECONDS)
    cxl.oeprov("bootstrap", "--yes")
    cxl.oeprov("launch-training", "--detach")
    cxl.until(far)
    assert " bind:" not in of_server(cxl, 0, "numa_maps")
    cxl.say("stop")


def test_the_cxl_tier_is_undone(cxl: Trainer) -> None:
    cxl.oeprov("pmem-mode", "system-ram", "--yes", *NODE)
    cxl.set(pmem_mode="system-ram", pmem_dram_weight=0)
    assert (cxl.on("lab-1", TIERING), cxl.on("lab-1", WEIGHTS)) == ("false\n0\n", "1\n1\n")
    assert cxl.on("lab-1", "cat /etc/oeprov/memory.env") == "MEMKIND_DAX_KMEM_NODES=1\n"
