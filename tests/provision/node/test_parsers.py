"""Parsers on the formats that the tools print, as far as they are documented."""

import pytest

from provision.node import (
    daxctl,
    filesystem,
    fstab,
    gpu,
    ipmctl,
    kernel,
    memmap,
    mount,
    numa,
    observe,
    packages,
)
from provision.node.state import MemoryRange, State

GIB = 1 << 30
# From the documentation of ipmctl: a healthy App Direct machine.
RESOURCES = """
 MemoryType   | DDR         | PMemModule   | Total
==========================================================
 Volatile     | 256.000 GiB | 0.000 GiB    | 256.000 GiB
 AppDirect    | -           | 1008.000 GiB | 1008.000 GiB
 Cache        | 0.000 GiB   | -            | 0.000 GiB
 Inaccessible | 0.000 GiB   | 5.937 GiB    | 5.937 GiB
 Physical     | 256.000 GiB | 1013.937 GiB | 1269.937 GiB
"""


def test_ipmctl_memory_resources() -> None:
    found = ipmctl.parse_memory_resources(RESOURCES)
    assert found["AppDirect"] == 1008 * GIB
    assert found["Volatile"] == 0
    assert round(found["Physical"] / GIB, 3) == 1013.937
    assert "Cache" not in found


def test_ipmctl_goals_are_told_apart() -> None:
    text = """
 SocketID | DimmID | MemorySize  | AppDirect1Size | AppDirect2Size
==================================================================
 0x0000   | 0x0001 | 0.000 GiB   | 126.000 GiB    | 0.000 GiB
 0x0000   | 0x0011 | 0.000 GiB   | 126.000 GiB    | 0.000 GiB
 0x0001   | 0x1001 | 126.000 GiB | 0.000 GiB      | 0.000 GiB
"""
    assert ipmctl.parse_goals(text) == ["appdirect", "memorymode"]
    assert ipmctl.parse_goals("There are no goal configs defined in the system.") == []


def test_ipmctl_version() -> None:
    text = "Intel(R) Optane(TM) Persistent Memory Command Line Interface Version 02.00.00.3885\n"
    assert ipmctl.parse_version(text) == "02.00.00.3885"


def test_versions_of_daxctl() -> None:
    assert [daxctl.tool_version(text) for text in ("v66", "76.1", "65", "")] == [66, 76, 65, 0]


def test_mounts_and_fstab() -> None:
    text = "proc /proc proc rw 0 0\n/dev/pmem0 /mnt/my\\040pmem ext4 rw,dax=always 0 0\n"
    assert [(item.where, item.options) for item in mount.parse_mounts(text)] == [
        ("/mnt/my pmem", ["rw", "dax=always"])
    ]
    entries = fstab.parse("# /dev/old /old ext4 rw 0 0\n\nUUID=1 /mnt/pmem0 ext4 dax,nofail 0 0\n")
    assert [(item.spec, item.options) for item in entries] == [("UUID=1", ["dax", "nofail"])]


def test_file_systems() -> None:
    text = "DEVNAME=/dev/pmem0\nUUID=1234-a\nLABEL=my data\nTYPE=ext4\nUSAGE=filesystem\n"
    found = filesystem.parse_blkid("pmem0", text)
    assert (found.type, found.uuid, found.label) == ("ext4", "1234-a", "my data")
    table = filesystem.parse_blkid("pmem0", "DEVNAME=/dev/pmem0\nPTUUID=77\nPTTYPE=gpt\n")
    assert (table.type, table.uuid) == ("gpt", "77")
    assert filesystem.parse_blkid("pmem0", "").type == ""
    assert (
        filesystem.parse_block_size("Inode count: 1\nBlock size:               4096\nBlock size: 1\n") == 4096
    )


def test_numa_lists_and_sizes() -> None:
    assert numa.parse_list("0-2,8\n") == [0, 1, 2, 8]
    assert numa.parse_list("\n") == []
    assert numa.parse_meminfo("Node 1 MemTotal:  1024 kB\nNode 1 MemFree:  512 kB\n") == (1 << 20, 1 << 19)


def test_srat_lines_of_the_documented_16xlarge_give_its_memmap() -> None:
    log = """
[    0.005] ACPI: SRAT: Node 0 PXM 0 [mem 0x00000000-0xbfffffff]
[    0.005] ACPI: SRAT: Node 0 PXM 0 [mem 0x100000000-0x403fffffff]
[    0.005] ACPI: SRAT: Node 1 PXM 1 [mem 0x4040000000-0x13c3fffffff]
"""
    ranges = numa.parse_srat(log)
    assert ranges[-1] == MemoryRange(257 * GIB, 1265 * GIB, 1, "srat")
    cpus = [numa.NumaNode(0, 1, 1, [0])]
    assert memmap.compute(State(ranges=ranges, numa=cpus)) == "1008G!257G"


def test_memmap_keeps_units_exact() -> None:
    assert memmap.parse("1008G!257G") == [(257 * GIB, 1008 * GIB)]
    assert memmap.parse("0x40000000!4096M") == [(4 * GIB, GIB)]
    for text in ("1008G", "1008G$257G", "1008Q!257G", "08G!1G"):
        with pytest.raises(ValueError, match=r"!|literal"):
            memmap.parse(text)
    assert memmap.parse("512M!4G,1G!8G") == [(4 * GIB, GIB // 2), (8 * GIB, GIB)]
    ranges = [MemoryRange(4 * GIB, 4 * GIB + (128 << 20), 1, "srat")]
    assert memmap.compute(State(ranges=ranges, numa=[numa.NumaNode(0, 1, 1, [0])])) == "128M!4G"


def test_kernel_releases_compare_by_number() -> None:
    names = ["6.1.0-9-amd64", "6.1.0-28-amd64", "5.10.0-30-amd64"]
    assert sorted(names, key=kernel.version)[-1] == "6.1.0-28-amd64"
    assert (
        kernel.parse_apt_candidate("linux-image-amd64\n  Depends: linux-image-6.1.0-28-amd64\n")
        == "6.1.0-28-amd64"
    )
    assert kernel.parse_config("CONFIG_DEV_DAX_KMEM=m\n# CONFIG_FS_DAX is not set\nCONFIG_X=y\n") == {
        "CONFIG_DEV_DAX_KMEM": "m"
    }


def test_packages() -> None:
    assert packages.parse_dpkg("a\tinstalled\t1\nb\tconfig-files\t2\n") == {"a": "1"}
    assert packages.parse_rpm("a\t1-2\npackage b is not installed\n") == {"a": "1-2"}


def test_nvidia_driver() -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n"
    assert gpu.parse_version(text) == "550.90.07"
    assert gpu.parse_version("") == ""


def test_os_release() -> None:
    found = observe.parse_os_release('ID="rocky"\nVERSION_ID="8.10"\nID_LIKE="rhel centos fedora"\n')
    assert (found["ID"], found["ID_LIKE"].split()[0]) == ("rocky", "rhel")
