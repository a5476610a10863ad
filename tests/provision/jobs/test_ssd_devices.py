"""ssd_devices in an inventory, and where servers then keep their rows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provision.cluster.errors import InventoryError, TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.settings import (
    ContainerSettings,
    KubernetesSettings,
    RolloutSettings,
    TrainingSettings,
)
from provision.inventory.loader import host_of
from provision.jobs import jobspec, readiness
from provision.jobs.backends.kubernetes import plan
from provision.jobs.request import Request
from provision.jobs.storage import place_of, servers_of
from provision.node.state import Mount, State
from provision.node.step import Plan

NAME = "/dev/disk/by-id/nvme-VENDOR_1"
NVME = {"oeprov_kind": "nvme", "parameter_server_storage": "dram_pmem", "ssd_devices": [NAME, "/data/rows"]}


def asked(storage: str = "") -> Request:
    return Request(
        training=TrainingSettings(), storage=storage, storage_cache=0, servers=0, workers=0, name=""
    )


def host(tmp_path: Path, variables: dict[str, Any]) -> Host:
    return host_of("h", ["parameter_servers"], variables, state_dir=tmp_path)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"oeprov_kind": "nvme"}, "ssd_devices: kind nvme keeps rows on drives: name them"),
        (
            {"oeprov_kind": "cpu", "ssd_devices": ["/dev/nvme0n1"]},
            "/dev/nvme0n1 may be another drive after a reboot: name it by /dev/disk/by-id/",
        ),
        ({"oeprov_kind": "cpu", "ssd_devices": ["rows"]}, "'rows': name a drive as /dev/disk/by-id/"),
        ({"oeprov_kind": "cpu", "ssd_devices": ["/a", "/a"]}, "a drive or directory is named twice"),
        (
            {"oeprov_kind": "local", "ansible_connection": "local", "ssd_devices": [NAME]},
            "ssd_devices: on kind local oeprov makes no file systems: name a directory",
        ),
    ],
)
def test_names_that_cannot_work_are_refused(variables: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=re.escape(why)):
        host(tmp_path, variables)


MOUNTED = State(mounts=[Mount("/dev/nvme0n1", "/mnt/ssd0", "ext4"), Mount("/dev/b", "/data", "xfs")])


def test_servers_take_turns_on_drives_and_directories(tmp_path: Path) -> None:
    places = [
        place_of(host(tmp_path, NVME), MOUNTED, asked(), "job", f"server-{number}", number)
        for number in range(3)
    ]
    assert [(item.path, item.mount) for item in places] == [
        ("/mnt/ssd0/oeprov/job/server-0", "/mnt/ssd0"),
        ("/data/rows/oeprov/job/server-1", "/data"),  # its mount point is what the unit waits for
        ("/mnt/ssd0/oeprov/job/server-2", "/mnt/ssd0"),
    ]
    root = MOUNTED._replace(mounts=[Mount("/dev/a", "/", "ext4")])
    only = host(tmp_path, {**NVME, "ssd_devices": ["/data/rows"]})
    assert place_of(only, root, asked(), "job", "server-0", 0).mount == ""


def test_a_drive_that_is_not_mounted_is_named(tmp_path: Path) -> None:
    one = host(tmp_path, {**NVME, "ssd_devices": [NAME]})
    with pytest.raises(TrainingError, match="nothing is mounted at /mnt/ssd0; run: oeprov bootstrap"):
        place_of(one, State(), asked(), "job", "server-0", 0)


def test_without_drives_both_ways_are_named(tmp_path: Path) -> None:
    cpu = host(tmp_path, {"oeprov_kind": "cpu", "parameter_server_storage": "dram_pmem"})
    with pytest.raises(TrainingError, match="needs pmem_mode fsdax, found none, or a drive in ssd_devices"):
        place_of(cpu, State(), asked(), "job", "server-0", 0)


def test_persistent_memory_comes_first(tmp_path: Path) -> None:
    both = host(
        tmp_path,
        {"oeprov_kind": "re6p", "pmem_mode": "fsdax", "ssd_devices": [NAME]},
    )
    state = MOUNTED._replace(mounts=[*MOUNTED.mounts, Mount("/dev/pmem0", "/mnt/pmem0", "ext4", ["dax"])])
    assert place_of(both, state, asked(), "job", "server-0", 0).mount == "/mnt/pmem0"


def test_local_servers_take_turns_on_the_directories(tmp_path: Path) -> None:
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    local = host(tmp_path, {"oeprov_kind": "local", "ansible_connection": "local", "ssd_devices": names})
    places = [place_of(local, None, asked("dram_pmem"), "job", f"server-{n}", n) for n in range(3)]
    assert [place.mount for place in places] == [*names, names[0]]
    assert places[1].path == f"{names[1]}/job/server-1"


def test_dram_ssd_is_on_drives_whatever_the_mode(tmp_path: Path) -> None:
    facts = {"oeprov_kind": "re6p", "pmem_mode": "fsdax"}
    both = host(tmp_path, {**facts, "ssd_devices": ["/data/rows"]})
    assert place_of(both, State(), asked("dram_ssd"), "job", "s", 0).path == "/data/rows/oeprov/job/s"
    with pytest.raises(TrainingError, match="dram_ssd needs a drive, and ssd_devices names none"):
        place_of(host(tmp_path, facts), State(), asked("dram_ssd"), "job", "s", 0)
    local = host(tmp_path, {"oeprov_kind": "local", "ansible_connection": "local", "pmem_mode": "none"})
    with pytest.raises(TrainingError, match="names none; name a directory on one"):
        place_of(local, None, asked("dram_ssd"), "job", "s", 0)


def test_a_local_job_uses_the_directory(tmp_path: Path) -> None:
    local = {"oeprov_kind": "local", "ansible_connection": "local", "ssd_devices": [str(tmp_path)]}
    place = place_of(host(tmp_path, local), None, asked("dram_pmem"), "job", "server-0", 0)
    assert (place.path, place.mount) == (f"{tmp_path}/job/server-0", str(tmp_path))


def cluster(path: Path, server: Host) -> Inventory:
    return Inventory(
        path / "c.yml",
        "c",
        {"h": server},
        ["h"],
        [],
        RolloutSettings(),
        TrainingSettings(),
        ContainerSettings(),
        KubernetesSettings(),
    )


def test_rows_go_to_the_drives_that_are_named(tmp_path: Path) -> None:
    bare = {"oeprov_kind": "nvme", "ssd_devices": [NAME, "/data/rows"]}
    found = host(tmp_path, bare)
    assert (found.server.storage, found.servers(), found.servers("dram")) == ("dram_ssd", 2, 1)
    assert found.variables()["parameter_server_count"] == 2
    assert host(tmp_path, {**bare, "parameter_server_count": 1}).servers() == 1
    assert servers_of(host(tmp_path, NVME), asked()) == 1
    assert servers_of(host(tmp_path, NVME), asked("dram_ssd")) == 2
    assert servers_of(host(tmp_path, NVME), replace(asked("dram_ssd"), servers=3)) == 3
    with_pmem = {"oeprov_kind": "bare_metal_pmem", "pmem_mode": "fsdax", "ssd_devices": [NAME]}
    assert host(tmp_path, with_pmem).server.storage == "pmem_libpmem"
    assert host(tmp_path, {**with_pmem, "pmem_mode": "system-ram"}).server.storage == "dram"
    assert host(tmp_path, {"oeprov_kind": "cpu"}).server.storage == "dram"


def test_ports_of_as_many_servers_as_drives_do_not_overlap(tmp_path: Path) -> None:
    ports = {"parameter_server_port": 7700, "parameter_server_metrics_port": 7701}
    bare = {"oeprov_kind": "nvme", "ssd_devices": [NAME, "/data/rows"], **ports}
    with pytest.raises(TrainingError, match="7701 are too close for 2 servers; set them 2 apart at least"):
        jobspec.check_servers(cluster(tmp_path, host(tmp_path, bare)), asked())
    jobspec.check_servers(cluster(tmp_path, host(tmp_path, {**bare, "parameter_server_count": 1})), asked())
    jobspec.check_servers(
        cluster(tmp_path, host(tmp_path, {**bare, "parameter_server_metrics_port": 7702})), asked()
    )
    for name in ports:
        last = cluster(tmp_path, host(tmp_path, {**bare, name: 65535}))
        with pytest.raises(TrainingError, match=f"{name} 65535: 2 servers need ports beyond 65535"):
            jobspec.check_servers(last, asked())


def test_drives_without_a_server_are_named(tmp_path: Path) -> None:
    names = ["/a", "/b", "/c"]
    local = {
        "oeprov_kind": "local",
        "ansible_connection": "local",
        "ssd_devices": names,
        "parameter_server_count": 1,
    }
    one = cluster(tmp_path, host(tmp_path, local))
    assert readiness.idle(one, {}, asked("dram_ssd")) == [
        "h: no server keeps rows in /b, /c; to use all, run 3 servers per host (parameter_server_count)"
    ]
    three = cluster(tmp_path, host(tmp_path, {**local, "parameter_server_count": 3}))
    assert readiness.idle(three, {}, asked("dram_ssd")) == []
    assert readiness.idle(one, {}, asked("dram")) == []
    given = {"oeprov_kind": "re6p", "pmem_mode": "fsdax", "ssd_devices": [NAME]}
    (said,) = readiness.idle(cluster(tmp_path, host(tmp_path, given)), {}, asked())
    assert said.startswith(
        "h: no server keeps rows on the drives of ssd_devices, since they are in pmem_libpmem;"
    )
    modules = cluster(tmp_path, host(tmp_path, {"oeprov_kind": "bare_metal_pmem", "pmem_mode": "fsdax"}))
    mounts = [Mount(f"/dev/pmem{n}", f"/mnt/pmem{n}") for n in range(2)]
    said = readiness.idle(modules, {"h": State(mounts=mounts)}, asked("pmem_libpmem"))
    assert [line.partition(";")[0] for line in said] == ["h: no server keeps rows in /mnt/pmem1"]
    # The mode that the job needs counts, not the inventory's.
    other = cluster(tmp_path, host(tmp_path, {"oeprov_kind": "bare_metal_pmem", "pmem_mode": "system-ram"}))
    needed = readiness.needed(other, asked("pmem_libpmem"))
    assert readiness.idle(needed, {"h": State(mounts=mounts)}, asked("pmem_libpmem")) == said


def test_a_host_that_is_not_ready_is_told_to_bootstrap(tmp_path: Path) -> None:
    # A machine with modules whose rows are to be on drives: its persistent memory is left alone.
    metal = host(tmp_path, {**NVME, "oeprov_kind": "bare_metal_pmem", "pmem_mode": "none"})
    inventory = cluster(tmp_path, metal)
    assert readiness.needed(inventory, asked()).hosts["h"].pmem.mode == "none"
    assert readiness.differences(inventory, asked()) == []
    said = readiness.why_not(inventory, asked(), Plan("h", problems=["a drive is gone"]), [], State())
    assert said == f"host h is not ready: a drive is gone; run: oeprov bootstrap -i {tmp_path}/c.yml"


def test_on_kubernetes_each_server_has_a_drive_of_its_own(tmp_path: Path) -> None:
    two = host(tmp_path, NVME)
    volumes = plan._local(KubernetesSettings(), [two], [2], 2, "dram_ssd")
    assert volumes == (("h", "/mnt/ssd0"), ("h", "/data/rows"))
    with pytest.raises(TrainingError, match="needs a drive of its own, and ssd_devices names 2"):
        plan._local(KubernetesSettings(), [two], [3], 3, "dram_ssd")
    both = host(tmp_path, {"oeprov_kind": "re6p", "pmem_mode": "fsdax", "ssd_devices": [NAME]})
    assert plan._local(KubernetesSettings(), [both], [1], 1, "dram_pmem") == (("h", "/mnt/pmem0"),)
    assert plan._local(KubernetesSettings(), [both], [1], 1, "dram_ssd") == (("h", "/mnt/ssd0"),)
    none = host(tmp_path, {"oeprov_kind": "re6p", "pmem_mode": "fsdax"})
    with pytest.raises(
        TrainingError, match="host h: storage dram_ssd needs a drive, and ssd_devices names none"
    ):
        plan._local(KubernetesSettings(), [none], [1], 1, "dram_ssd")
