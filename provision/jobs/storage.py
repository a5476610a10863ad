"""Where a parameter server keeps its rows on its host, and its CPUs and DRAM."""

from __future__ import annotations

import re
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host
from provision.jobs.backends.units import Place
from provision.jobs.request import Request
from provision.node import drives, numa, tiering
from provision.node.state import NumaNode, State

POOLS = ("pmem_libpmem", "dram_pmem", "dram_ssd")  # storages whose rows persist
CACHED = ("dram_pmem", "dram_ssd")  # those with a cache in DRAM
MODES = {
    "pmem_libpmem": "fsdax",
    "dram_pmem": "fsdax",
    "pmem_memkind": "system-ram",
}  # that they need


def are_on_pmem(host: Host, storage: str) -> bool:
    """Rows of a storage of ``POOLS`` are on persistent memory; otherwise on the drives of ``ssd_devices``."""
    return host.pmem.mode == "fsdax" and storage != "dram_ssd"


def no_drive(host: Host, cure: str = "") -> TrainingError:
    """The refusal of dram_ssd on a host without drives."""
    return TrainingError(
        f"host {host.name}: storage dram_ssd needs a drive, and ssd_devices names none{cure}"
    )


def check_storage(host: Host, storage: str) -> None:
    """Refuse a storage for which the host's inventory has no memory and no drive; see TrainingError."""
    if host.is_here:
        if storage != "dram":
            storage_directories(host, storage)
        return
    other = "dram" if host.server.storage == storage else host.server.storage
    if storage == "pmem_memkind" and host.pmem.mode != "system-ram":
        raise TrainingError(
            f"host {host.name}: storage pmem_memkind needs memory nodes without CPUs (pmem_mode system-ram), "
            f"found {host.pmem.mode}; use --storage {other}"
        )
    if storage not in POOLS or are_on_pmem(host, storage) or host.ssd.devices:
        return
    if storage == "dram_ssd":
        raise no_drive(host, f"; name one, or use --storage {other}")
    raise TrainingError(
        f"host {host.name}: storage {storage} needs pmem_mode fsdax, found {host.pmem.mode}, or a drive "
        "in ssd_devices; use --storage dram"
    )


def unused_drives(host: Host, storage: str) -> str:
    """What to say of drives of the inventory on which no server keeps rows; empty: there are none."""
    if not host.ssd.devices or (storage in POOLS and not are_on_pmem(host, storage)):
        return ""
    return (
        f"no server keeps rows on the drives of ssd_devices, since they are in {storage}; to use them, set "
        "parameter_server_storage: dram_ssd"
    )


def place_of(host: Host, state: State | None, wanted: Request, job: str, name: str, number: int) -> Place:
    """Where server ``number`` of a host keeps its rows; TrainingError if the host cannot hold them so."""
    storage = storage_of(host, wanted)
    check_storage(host, storage)
    if host.is_here:
        places = [""] if storage == "dram" else places_of(host, state, storage)
        path = mount = places[number % len(places)]
        if storage in POOLS:  # a directory of this job: those of others are neither used nor removed
            path = str(Path(path) / job / name)
        return Place(storage=storage, path=path, mount=mount)
    if storage == "pmem_memkind":
        _check_memory_nodes(host, state)
    if storage not in POOLS:
        bound = host.pmem.mode == "system-ram"
        devices = tuple(dax.chardev for dax in state.dax) if bound and state else ()
        return Place(storage=storage, bound=bound, tiered=host.pmem.mode == tiering.MODE, devices=devices)
    if are_on_pmem(host, storage):
        missing = f"{host.pmem.mount_prefix}0"
    else:
        missing = ", ".join(drives.place(host.desired(), name) for name in host.ssd.devices)
    places = places_of(host, state, storage)
    if not places:
        raise TrainingError(f"host {host.name}: nothing is mounted at {missing}; run: oeprov bootstrap")
    where = places[number % len(places)]
    return Place(storage=storage, path=f"{where}/oeprov/{job}/{name}", mount=_mount_under(where, state))


def places_of(host: Host, state: State | None, storage: str) -> list[str]:
    """Directories on which the host's servers take turns, with a storage of ``POOLS``."""
    if host.is_here:
        return storage_directories(host, storage)
    return mounts_of(host, state) if are_on_pmem(host, storage) else drives_of(host, state)


def _mount_under(where: str, state: State | None) -> str:
    """The mount point that a directory is on, which its server starts; empty: the root's."""
    above = [item.where for item in state.mounts if drives.is_below(where, item.where)] if state else []
    return max((item for item in above if item != "/"), key=len, default="")


def nodes_of(host: Host, state: State | None, where: Place, number: int, count: int) -> tuple[int, ...]:
    """The memory nodes of server ``number`` of ``count`` on a host: those beside one socket.

    Empty for all of the host's, if the servers could not share the memory evenly: one that gets too little
    would be killed.
    """
    if not where.bound or state is None or host.server.cpus == "all":
        return ()
    sockets: dict[tuple[int, ...], list[NumaNode]] = {}
    for node in _memory_nodes(state):
        sockets.setdefault(tuple(numa.cpus_near(state, node.id)), []).append(node)
    sizes = {sum(node.size for node in nodes) for nodes in sockets.values()}
    if () in sockets or len(sockets) < 2 or count % len(sockets) or len(sizes) > 1:
        return ()
    return tuple(node.id for node in list(sockets.values())[number % len(sockets)])


def memory_bytes(state: State, where: Place) -> int:
    """Bytes of the memory nodes of a server."""
    return sum(node.size for node in _memory_nodes(state) if not where.nodes or node.id in where.nodes)


def _memory_nodes(state: State) -> list[NumaNode]:
    """The nodes that bootstrap entered for servers, or without an entry, all without CPUs."""
    text = state.files.get(numa.ENVIRONMENT, "").partition("=")[2]
    entered = numa.parse_list(text) if text.strip() else []
    return [node for node in numa.cpuless(state) if not entered or node.id in entered]


def cpus_of(host: Host, state: State | None, where: Place) -> tuple[int, ...]:
    """The CPUs near a server's memory; empty for all CPUs of the host."""
    if host.server.cpus == "all" or state is None or host.is_here:
        return ()
    nodes = [node.id for node in _memory_nodes(state)] if where.bound else []
    if where.nodes:
        nodes = list(where.nodes)
    if where.mount:
        nodes = [numa.node_of_mount(state, where.mount)]
    near = [numa.cpus_near(state, node) for node in nodes]
    found = sorted({cpu for cpus in near for cpu in cpus})
    return tuple(found) if all(near) and len(found) < numa.cpu_count(state) else ()


def _check_memory_nodes(host: Host, state: State | None) -> None:
    """Refuse pmem_memkind where there is no memory node for it."""
    if state is not None and not numa.cpuless(state):
        raise TrainingError(
            f"host {host.name}: storage pmem_memkind needs memory nodes without CPUs, and it has none; "
            f"run: oeprov pmem-mode system-ram --limit {host.name}"
        )


def storage_of(host: Host, wanted: Request) -> str:
    """The storage of the host's servers."""
    return wanted.storage or host.server.storage


def servers_of(host: Host, wanted: Request) -> int:
    """How many servers the host has."""
    return wanted.servers or host.servers(storage_of(host, wanted))


def mounts_of(host: Host, state: State | None) -> list[str]:
    """Mount points of persistent memory on the host, by number."""
    pattern = re.compile(re.escape(host.pmem.mount_prefix) + r"(\d+)")
    found = {}
    for item in state.mounts if state else []:
        if match := pattern.fullmatch(item.where):
            found[int(match[1])] = item.where
    return [found[number] for number in sorted(found)]


def drives_of(host: Host, state: State | None) -> list[str]:
    """Directories of ``ssd_devices`` in its order: mount points of drives that are there, and others."""
    mounted = {item.where for item in state.mounts} if state else set()
    desired = host.desired()
    places = {name: drives.place(desired, name) for name in host.ssd.devices}
    return [where for name, where in places.items() if where in mounted or not drives.is_drive(name)]


def storage_directories(host: Host, storage: str) -> list[str]:
    """Where servers of this machine keep rows, in turns: drives, or a stand-in for persistent memory."""
    if host.ssd.devices:
        return list(host.ssd.devices)
    if not host.pmem.directory:
        if storage == "dram_ssd":
            raise no_drive(host, "; name a directory on one, or use --storage dram")
        raise TrainingError(
            f"host {host.name}: storage {storage} needs pmem_mode directory, found {host.pmem.mode}; "
            "use --storage dram or set pmem_mode: directory"
        )
    return [host.pmem.directory]
