"""NUMA nodes, physical memory ranges, the policy for hot-added memory, and memkind's nodes."""

import os
import re
from typing import Any, Dict, List, Tuple

from .command import CommandError, System
from .devices import DAX, DAX_CLASS, MEMORY, block_size, dax_devices
from .state import MemoryPolicy, MemoryRange, NumaNode, State
from .step import Action, Applied, Step

_NODES = "/sys/devices/system/node"
AUTO_ONLINE = MEMORY + "/auto_online_blocks"
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_SIZE = re.compile(r"\bkernelpagesize_kB=(\d+)")
_SRAT = re.compile(r"SRAT: Node (\d+) PXM \d+ \[mem (0x[0-9a-f]+)-(0x[0-9a-f]+)\]")


def parse_list(text: str) -> List[int]:
    """Numbers of a kernel list: ``0-2,8``."""
    numbers: List[int] = []
    for part in text.strip().split(","):
        if "-" in part:
            first, last = part.split("-")
            numbers += range(int(first), int(last) + 1)
        elif part:
            numbers.append(int(part))
    return numbers


def list_text(numbers: List[int]) -> str:
    """The kernel's list of these numbers: ``0-2,8``."""
    runs: List[List[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_meminfo(text: str) -> Tuple[int, int]:
    """(total, free) bytes of a node's meminfo."""
    values: Dict[str, int] = {}
    for match in re.finditer(r"(MemTotal|MemFree):\s+(\d+) kB", text):
        values[match.group(1)] = int(match.group(2)) * 1024
    return values.get("MemTotal", 0), values.get("MemFree", 0)


def parse_srat(text: str) -> List[MemoryRange]:
    """Ranges of the boot log's SRAT lines, in order of address."""
    found = [
        MemoryRange(int(match.group(2), 16), int(match.group(3), 16) + 1, int(match.group(1)), "srat")
        for match in _SRAT.finditer(text)
    ]
    return sorted(found)


def coalesce(ranges: List[MemoryRange]) -> List[MemoryRange]:
    """Join adjacent ranges of the same node and source."""
    merged: List[MemoryRange] = []
    for item in sorted(ranges):
        if merged and merged[-1].end == item.start and merged[-1][2:] == item[2:]:
            merged[-1] = merged[-1]._replace(end=item.end)
        else:
            merged.append(item)
    return merged


def observe_nodes(system: System) -> List[NumaNode]:
    """Observe the nodes in sysfs."""
    nodes = []
    for name in system.list(_NODES):
        if not re.fullmatch(r"node\d+", name):
            continue
        base = f"{_NODES}/{name}"
        size, free = parse_meminfo(system.read(base + "/meminfo"))
        nodes.append(
            NumaNode(
                id=int(name[4:]),
                size=size,
                free=free,
                cpus=parse_list(system.read(base + "/cpulist")),
                distances=[int(word) for word in system.read(base + "/distance").split()],
            )
        )
    return sorted(nodes)


def _firmware_ranges(system: System) -> List[MemoryRange]:
    """RAM in the firmware's memory map, without memory that a driver added."""
    ranges = []
    for name in system.list("/sys/firmware/memmap"):
        base = "/sys/firmware/memmap/" + name
        if system.read(base + "/type").strip() == "System RAM":
            start, end = (int(system.read(base + "/" + part).strip() or "0", 16) for part in ("start", "end"))
            ranges.append(MemoryRange(start, end + 1))
    return coalesce(ranges)


def tell_apart(system: System, nodes: List[NumaNode]) -> List[NumaNode]:
    """Add the facts that distinguish nodes without CPUs; unchanged if every node has CPUs."""
    if not without_cpus(nodes):
        return nodes
    ram = _firmware_ranges(system)
    size = block_size(system)
    found = []
    for node in nodes:
        base = f"{_NODES}/node{node.id}"
        names = system.list(base)
        starts = [int(name[6:]) * size for name in names if re.fullmatch(r"memory\d+", name)]
        inside = [any(item.start < start + size and start < item.end for item in ram) for start in starts]
        bandwidth = system.read(base + "/access0/initiators/read_bandwidth").strip()
        found.append(
            node._replace(
                offline_cpus=not node.cpus and any(re.fullmatch(r"cpu\d+", name) for name in names),
                origin=("firmware" if all(inside) else "driver") if ram and starts else "",
                bandwidth=int(bandwidth) if bandwidth.isdigit() else 0,
            )
        )
    return found


def observe_ranges(system: System, boot_log: str) -> List[MemoryRange]:
    """Firmware's RAM, SRAT's nodes and the memory blocks that are online, in that order."""
    ranges = _firmware_ranges(system)
    blocks = []
    size = block_size(system)
    for node in observe_nodes(system):
        for name in system.list(f"{_NODES}/node{node.id}"):
            if re.fullmatch(r"memory\d+", name):
                start = int(name[6:]) * size
                blocks.append(MemoryRange(start, start + size, node.id, "blocks"))
    return ranges + coalesce(parse_srat(boot_log)) + coalesce(blocks)


def observe_policy(system: System) -> MemoryPolicy:
    """Hot-add policy and sizes."""
    dax_model = "class" if system.list(DAX_CLASS) and not system.list(DAX) else "bus"
    return MemoryPolicy(
        auto_online=system.read(AUTO_ONLINE).strip(),
        block_size=block_size(system),
        page_size=os.sysconf("SC_PAGE_SIZE"),
        dax_model=dax_model,
    )


def without_cpus(nodes: List[NumaNode]) -> List[NumaNode]:
    """Nodes that have memory and no CPUs: persistent or CXL memory as system RAM, for most."""
    return [node for node in nodes if node.size and not node.cpus]


def cpuless(state: State) -> List[NumaNode]:
    """Those of a host that was observed."""
    return without_cpus(state.numa)


def parse_numa_maps(text: str) -> Dict[int, int]:
    """Bytes per node, from /proc/PID/numa_maps."""
    found: Dict[int, int] = {}
    for line in text.splitlines():
        size = _PAGE_SIZE.search(line)
        page = int(size.group(1)) * 1024 if size else os.sysconf("SC_PAGE_SIZE")
        for node, pages in _PAGES.findall(line):
            found[int(node)] = found.get(int(node), 0) + int(pages) * page
    return found


def process_bytes(system: System, pid: int) -> Dict[str, int]:
    """Bytes that a process holds on each node; the keys are node numbers as text, ready for JSON."""
    found = parse_numa_maps(system.read(f"/proc/{pid}/numa_maps"))
    return {str(node): size for node, size in sorted(found.items())}


def other_memory(state: State, node: NumaNode) -> str:
    """Why a node without CPUs is not persistent or CXL memory; empty if it may be."""
    hiding = [word for word in state.kernel.cmdline if word.startswith(("nr_cpus=", "possible_cpus="))]
    if node.offline_cpus or hiding:
        return "its CPUs are offline" if node.offline_cpus else hiding[0] + " may hide its CPUs"
    if node.origin == "driver":
        return "a driver added it, as for the memory of a GPU"
    dram = max([item.bandwidth for item in state.numa if item.cpus], default=0)
    if dram and node.bandwidth > dram:
        return f"it is faster than DRAM ({node.bandwidth} MB/s to {dram} MB/s), as HBM"
    return ""


def cpus_near(state: State, node: int) -> List[int]:
    """CPUs of a node, or of the nearest nodes if it has none; empty for an unknown node."""
    ids = [item.id for item in state.numa]
    for item in state.numa:
        if item.id != node:
            continue
        if item.cpus:
            return item.cpus
        distances = dict(zip(ids, item.distances))  # noqa: B905 - Python 3.6
        near = [other for other in state.numa if other.cpus and other.id in distances]
        least = min((distances[other.id] for other in near), default=0)
        return sorted(cpu for other in near if distances[other.id] == least for cpu in other.cpus)
    return []


def node_of_mount(state: State, where: str) -> int:
    """The node of the persistent memory at a mount point; -1 if unknown."""
    for mount in state.mounts:
        if mount.where != where:
            continue
        for namespace in state.namespaces:
            device = "/dev/" + namespace.blockdev
            if not namespace.blockdev or not re.fullmatch(re.escape(device) + r"(p\d+)?", mount.device):
                continue
            if namespace.numa_node >= 0:
                return namespace.numa_node
            return max([item.numa_node for item in state.regions if item.dev == namespace.region], default=-1)
    return -1


def cpu_count(state: State) -> int:
    """CPUs of all nodes."""
    return sum(len(node.cpus) for node in state.numa)


def dram(state: State) -> int:
    """Bytes of memory on nodes with CPUs."""
    return sum(node.size for node in state.numa if node.cpus)


# The parameter server's unit reads it, for memkind.
ENVIRONMENT = "/etc/oeprov/memory.env"


def environment_text(nodes: List[int]) -> str:
    """Text of ``ENVIRONMENT`` for these memory nodes."""
    return f"MEMKIND_DAX_KMEM_NODES={','.join(map(str, sorted(nodes)))}\n"


def plan_memkind(state: State, nodes: List[int], devices: List[str]) -> List[Step]:
    """One step that writes memkind's nodes; ``nodes`` is empty if only earlier steps make them known.

    They are then the nodes of the dax ``devices``, or without devices, all nodes without CPUs.
    """
    if nodes and state.files.get(ENVIRONMENT) == environment_text(nodes):
        return []
    value = ",".join(map(str, sorted(nodes))) or "<node of the new memory>"
    return [
        Step(
            id="memkind-nodes",
            what="memory nodes: " + value,
            why="parameter servers allocate from the nodes that were found, never from a fixed number",
            commands=[["write", ENVIRONMENT, "MEMKIND_DAX_KMEM_NODES=" + value]],
            action="write_memkind_nodes",
            args={"devices": devices, "nodes": [] if devices else sorted(nodes)},
        )
    ]


def forget_memkind(state: State, why: str = "there will be no such memory node any more") -> List[Step]:
    """One step that removes memkind's nodes; none if there are none."""
    if ENVIRONMENT not in state.files:
        return []
    return [
        Step(
            id="memkind-forget",
            what="remove " + ENVIRONMENT,
            why=why,
            commands=[["rm", ENVIRONMENT]],
            action="forget_memkind_nodes",
        )
    ]


def _write_memkind_nodes(system: System, args: Dict[str, Any]) -> Applied:
    there = [node.id for node in without_cpus(observe_nodes(system))]
    if args["devices"]:
        devices = [item for item in dax_devices(system) if item.chardev in args["devices"]]
        wanted = sorted({item.target_node for item in devices if item.mode == "system-ram"})
    else:
        wanted = args.get("nodes") or there
    fit = [node for node in there if node in wanted]
    if not fit or fit != wanted:
        raise CommandError(
            "memkind can have no memory nodes: {} should be nodes with memory and without CPUs, but those "
            "are {}".format(
                ", ".join(args["devices"]) or ", ".join(map(str, wanted)) or "some",
                ", ".join(map(str, there)) or "none",
            )
        )
    changed = system.write(ENVIRONMENT, environment_text(fit))
    return Applied(changed, "memory nodes: " + ",".join(map(str, fit)))


def _forget_memkind_nodes(system: System, args: Dict[str, Any]) -> Applied:
    return Applied(system.remove(ENVIRONMENT), f"{ENVIRONMENT} is gone")


def _set_online_policy(system: System, args: Dict[str, Any]) -> Applied:
    changed = (
        system.write(AUTO_ONLINE, args["policy"])
        if system.read(AUTO_ONLINE).strip() != args["policy"]
        else False
    )
    found = system.read(AUTO_ONLINE).strip()
    if found != args["policy"]:
        raise CommandError(f"{AUTO_ONLINE} says {found} instead of {args['policy']}")
    return Applied(changed, f"hot-added memory stays {found}")


ACTIONS: Dict[str, Action] = {
    "write_memkind_nodes": _write_memkind_nodes,
    "forget_memkind_nodes": _forget_memkind_nodes,
    "set_online_policy": _set_online_policy,
}
