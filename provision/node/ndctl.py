"""Regions and namespaces of persistent memory, and the way to a DAX file system on them."""

import json
import re
from typing import Any, Dict, List, Tuple

from . import mount
from .command import System
from .state import Namespace, Region, State
from .step import Action, Desired, Step

# UUIDs of namespaces and file systems that oeprov made on this node. Label-less namespaces drop a name
# silently, so names cannot tell whose they are.
OWNED = "/var/lib/oeprov/owned"


def _items(text: str) -> List[Dict[str, Any]]:
    """ndctl prints nothing, one object or an array."""
    if not text.strip():
        return []
    found = json.loads(text)
    items = found if isinstance(found, list) else [found]
    return [item for item in items if isinstance(item, dict)]


def parse_regions(text: str) -> List[Region]:
    """``ndctl list -R -v`` (or ``cxl list -R``)."""
    return [
        Region(
            dev=item.get("dev") or item.get("region", ""),
            size=int(item.get("size", 0)),
            available=int(item.get("available_size", 0)),
            type=item.get("type", "pmem"),
            numa_node=int(item.get("numa_node", -1)),
            persistence=item.get("persistence_domain", ""),
            bus="cxl" if "region" in item else "nvdimm",
        )
        for item in _items(text)
    ]


def parse_namespaces(text: str) -> List[Namespace]:
    """``ndctl list -N -i -v``; a namespace without ``raw_uuid`` and ``uuid`` has no label."""
    found = []
    for item in _items(text):
        chardev = item.get("chardev", "")
        for region in item.get("daxregion", {}).get("devices", []):
            chardev = chardev or region.get("chardev", "")
        found.append(
            Namespace(
                dev=item["dev"],
                mode=item.get("mode", "raw"),
                map=item.get("map", ""),
                size=int(item.get("size", 0)),
                uuid=item.get("uuid", ""),
                name=item.get("name", ""),
                blockdev=item.get("blockdev", ""),
                chardev=chardev,
                region="region" + region_number(item["dev"]),
                numa_node=int(item.get("numa_node", -1)),
                labels=bool(item.get("raw_uuid")),
                enabled=item.get("state") != "disabled",
                alignment=int(item.get("align", 0)),
            )
        )
    return found


def region_number(dev: str) -> str:
    """Region number of a namespace: namespace1.0 → 1."""
    match = re.match(r"namespace(\d+)", dev)
    return match.group(1) if match else "0"


def observe(system: System, trouble: List[str]) -> Tuple[List[Region], List[Namespace]]:
    """Regions of both buses and all namespaces, disabled ones too; nothing when ndctl is not installed."""
    if not system.which("ndctl"):
        return _observe_sysfs(system), []
    texts = []
    for argv in (["ndctl", "list", "-R", "-v"], ["cxl", "list", "-R"], ["ndctl", "list", "-N", "-i", "-v"]):
        result = system.run(argv)
        if not result.ok and argv[0] == "ndctl":
            trouble.append(result.explain())
        texts.append(result.out if result.ok else "")
    seen: Dict[str, Region] = {}
    for region in parse_regions(texts[0]) + parse_regions(texts[1]):
        # A CXL pmem region is listed by both tools; ndctl calls it regionN.
        if region.bus == "nvdimm" or region.type == "ram":
            seen[region.dev] = region
    return list(seen.values()), parse_namespaces(texts[2])


def _observe_sysfs(system: System) -> List[Region]:
    """Regions as far as sysfs tells without tools."""
    base = "/sys/bus/nd/devices"
    return [
        Region(
            dev=name,
            size=int(system.read("{}/{}/size".format(base, name)).strip() or 0),
            available=int(system.read("{}/{}/available_size".format(base, name)).strip() or 0),
            bus="nvdimm",
        )
        for name in system.list(base)
        if re.match(r"region\d+$", name)
    ]


def chosen(state: State, desired: Desired) -> List[Namespace]:
    """The namespaces that are ours to use, in order of region and number."""
    wanted = [
        item
        for item in state.namespaces
        if not desired.pmem_namespaces or item.dev in desired.pmem_namespaces
    ]
    return sorted(wanted, key=lambda item: [int(number) for number in re.findall(r"\d+", item.dev)])


def missing(state: State, desired: Desired) -> List[str]:
    """A problem for each namespace that the inventory names and the host does not have."""
    known = [item.dev for item in state.namespaces]
    return [
        "pmem_namespaces: {} is not there; the host has {}".format(name, ", ".join(known) or "none")
        for name in desired.pmem_namespaces
        if name not in known
    ]


def data_in(state: State, item: Namespace) -> List[str]:
    """Objects that are lost when the namespace is made again.

    A file system always counts. A namespace whose content cannot be looked at (devdax, sector) counts unless
    oeprov made it; a raw one without a signature is empty.
    """
    lost = mount.data_on(state, item.blockdev) if item.blockdev else []
    if not lost and item.mode not in ("raw", "fsdax") and item.uuid not in state.owned:
        lost = ["{}/{}".format(item.dev, item.uuid or "no-uuid")]
    return lost


def convert(state: State, desired: Desired, item: Namespace, mode: str) -> List[Step]:
    """Takes a namespace out of use and makes it again in another mode."""
    steps = mount.unmount_step(state, item.blockdev) if item.blockdev else []
    lost = data_in(state, item)
    why = "it is in mode {}".format(item.mode)
    if lost:
        why += " and holds data: " + ", ".join(lost)
    argv = ["ndctl", "create-namespace", "-f", "-e", item.dev, "--mode=" + mode, "--map=" + desired.pmem_map]
    steps.append(
        Step(
            id="namespace-" + item.dev,
            what="make {} a {} namespace".format(item.dev, mode),
            why=why,
            destroys=lost,
            commands=[argv],
            action="create_namespace",
            args={"namespace": item.dev, "mode": mode, "map": desired.pmem_map},
        )
    )
    return steps


def create(state: State, desired: Desired, region: str, mode: str, why: str) -> Step:
    """Makes the first namespace of a region."""
    argv = ["ndctl", "create-namespace", "--region=" + region, "--mode=" + mode, "--map=" + desired.pmem_map]
    return Step(
        id="namespace-" + region,
        what="create a {} namespace on {}".format(mode, region),
        why=why,
        commands=[argv],
        action="create_namespace",
        args={"region": region, "mode": mode, "map": desired.pmem_map},
    )


def empty_regions(state: State, desired: Desired) -> List[Region]:
    """Regions of persistent memory that have no namespace yet."""
    if desired.pmem_namespaces:
        return []
    used = [item.region for item in state.namespaces]
    return [region for region in state.regions if region.type == "pmem" and region.dev not in used]


def label_note(item: Namespace) -> str:
    """What a namespace without a label means."""
    return "{} has no label: its size cannot change, and ownership is kept in {}".format(item.dev, OWNED)


def nothing_there(state: State, desired: Desired) -> str:
    """Why there is no persistent memory to use."""
    if any(region.type == "ram" for region in state.regions):
        return "the CXL region is volatile (ram) and cannot hold namespaces; use pmem_mode: system-ram"
    if desired.kind == "re6p":
        return "there is no namespace0.0: is this a re6p instance, and is the kernel's nfit driver loaded?"
    if desired.kind == "cxl":
        return "there is no CXL region; create one with `cxl create-region` (it needs to know the decoder)"
    return "there is no persistent memory region: are the modules installed and enabled in the firmware?"


ACTIONS: Dict[str, Action] = {}
