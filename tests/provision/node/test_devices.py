"""sysfs of real kernels, beside what ndctl and daxctl printed on the same machine at the same moment.

The samples are of virtual nodes (Debian 12, kernel 6.1, ndctl 76) with QEMU's NVDIMMs, and with RAM that
``memmap`` made persistent.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pmem_host import MemoryFiles

from provision.node import devices
from provision.node.command import System

SAMPLES = sorted(Path(__file__).parent.joinpath("samples").glob("*.json"))


def sample(path: Path) -> tuple[System, dict[str, Any]]:
    """The machine, and what the tools said, as lists."""
    found = json.loads(path.read_text())
    said: dict[str, Any] = {}
    for name in ("regions", "namespaces", "dax"):
        # Pitfall 18: the tools print nothing, an object, an array, or an array in an object.
        value = json.loads(found["tools"][name] or "[]")
        value = value.get(name, value) if isinstance(value, dict) else value
        said[name] = value if isinstance(value, list) else [value]
    return MemoryFiles("/nowhere", found["files"], found["links"]), said


def test_there_are_samples_of_each_mode() -> None:
    assert len(SAMPLES) >= 4


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_regions_are_those_of_ndctl(path: Path) -> None:
    system, said = sample(path)
    assert [
        (item.dev, item.size, item.available, item.type, item.numa_node, item.align)
        for item in devices.regions(system)
    ] == [
        (
            item["dev"],
            item["size"],
            item["available_size"],
            item["type"],
            item.get("numa_node", -1),
            item["align"],
        )
        for item in said["regions"]
    ]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_namespaces_are_those_of_ndctl(path: Path) -> None:
    system, said = sample(path)

    def device(item: dict[str, Any]) -> str:
        regions = item.get("daxregion", {}).get("devices", [])
        return regions[0]["chardev"] if regions else item.get("chardev", "")

    assert [
        (item.dev, item.mode, item.map, item.size, item.uuid, item.raw_uuid, item.blockdev, item.chardev)
        for item in devices.namespaces(system)
    ] == [
        (
            item["dev"],
            item["mode"],
            item.get("map", ""),
            item["size"],
            item.get("uuid", ""),
            item.get("raw_uuid", ""),
            item.get("blockdev", ""),
            device(item),
        )
        for item in said["namespaces"]
        if item["size"]  # without seeds
    ]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_dax_devices_are_those_of_daxctl(path: Path) -> None:
    system, said = sample(path)
    assert [
        (
            item.chardev,
            item.size,
            item.mode,
            item.target_node,
            item.align,
            item.online_memblocks,
            item.total_memblocks,
            item.movable,
        )
        for item in devices.dax_devices(system)
    ] == [
        (
            item["chardev"],
            item["size"],
            item["mode"],
            item["target_node"],
            item["align"],
            item.get("online_memblocks", 0),
            item.get("total_memblocks", 0),
            item.get("movable", True),
        )
        for item in said["dax"]
    ]


def test_a_range_made_persistent_by_memmap_is_fsdax_without_a_label() -> None:
    """What re7p shows: no label, no UUID, and DAX is possible without ndctl."""
    system, _ = sample(Path(__file__).parent / "samples" / "re7p-memmap.json")
    region = devices.regions(system)[0]
    item = devices.namespaces(system)[0]
    assert (region.bus, region.available) == ("e820", 0)
    assert (item.mode, item.blockdev, item.labels, item.uuid, item.enabled) == (
        "fsdax",
        "pmem0",
        False,
        "",
        True,
    )
