"""Regions, namespaces and dax devices from sysfs, which needs neither ndctl nor daxctl."""

import re
import time
from typing import Callable, List, NamedTuple, TypeVar

from .command import System
from .state import DaxDevice, Namespace, Region

T = TypeVar("T")

ND = "/sys/bus/nd/devices"
DAX = "/sys/bus/dax/devices"
DAX_CLASS = "/sys/class/dax"  # before 5.1, or with the module dax_pmem_compat
CXL = "/sys/bus/cxl/devices"
MEMORY = "/sys/devices/system/memory"
WAIT = 30.0  # seconds that a device may take to appear
_MODES = {"memory": "fsdax", "dax": "devdax", "safe": "sector", "raw": "raw"}
_MAPS = {"ram": "mem", "pmem": "dev"}
# Drivers of dax devices. A device of the class model, or one that is disabled, has none.
_DAX_MODES = {"kmem": "system-ram", "device_dax": "devdax", "": "devdax"}
_NO_UUID = "00000000-0000-0000-0000-000000000000"


def number(text: str) -> int:
    """Parse a number of sysfs, decimal or 0x…; 0 for anything else."""
    try:
        return int(text.strip() or "0", 0)
    except ValueError:
        return 0


def order(name: str) -> List[int]:
    """Sort key that puts namespace0.2 before namespace0.10."""
    return [int(part) for part in re.findall(r"\d+", name)]


def bad_blocks(text: str) -> int:
    """Count the blocks of 512 bytes in a badblocks file; a line has the first block and the number."""
    rows = [line.split() for line in text.splitlines()]
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit())


def is_memmap(argument: str) -> bool:
    """The kernel argument makes a range of RAM persistent (``!``); other forms of memmap do not."""
    return argument.startswith("memmap=") and "!" in argument


def is_on(source: str, device: str) -> bool:
    """The path (a mount's source) is the block device or one of its partitions."""
    if not source.startswith("/dev/" + device):
        return False
    rest = source[len("/dev/" + device) :]
    # sda1, but pmem0p1 and nvme0n1p1.
    number = rest[1:] if device[-1:].isdigit() and rest.startswith("p") else rest
    return not rest or (number.isdigit() and (number != rest or not device[-1:].isdigit()))


def _node(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d+\s*", text) else -1


def _uuid(text: str) -> str:
    return "" if text.strip() == _NO_UUID else text.strip()


def regions(system: System) -> List[Region]:
    """Regions of the nvdimm bus, and volatile CXL regions, which that bus does not have."""
    found = []
    for name in sorted((item for item in system.list(ND) if re.fullmatch(r"region\d+", item)), key=order):
        base = f"{ND}/{name}/"
        provider = system.read(base + "../provider").strip()
        found.append(
            Region(
                dev=name,
                size=number(system.read(base + "size")),
                available=number(system.read(base + "available_size")),
                type="pmem" if system.read(base + "devtype").strip() in ("nd_pmem", "") else "volatile",
                numa_node=_node(system.read(base + "numa_node")),
                persistence=system.read(base + "persistence_domain").strip(),
                bus="e820" if provider == "e820" else "nvdimm",
                align=number(system.read(base + "align")),
                bad_blocks=bad_blocks(system.read(base + "badblocks")),
            )
        )
    for name in sorted((item for item in system.list(CXL) if re.fullmatch(r"region\d+", item)), key=order):
        base = f"{CXL}/{name}/"
        if system.read(base + "mode").strip() == "ram":
            found.append(Region(name, number(system.read(base + "size")), type="ram", bus="cxl"))
    return found


def namespaces(system: System) -> List[Namespace]:
    """All namespaces, also disabled ones; seeds (size 0) do not count."""
    names = [item for item in system.list(ND) if re.fullmatch(r"namespace\d+\.\d+", item)]
    dax = [(item.chardev, _dax_path(system, item.chardev)) for item in _dax_names(system)]
    found = []
    for name in sorted(names, key=order):
        base = f"{ND}/{name}/"
        size = number(system.read(base + "size"))
        if not size:
            continue
        # A pfn, dax or btt device on the namespace has the block or dax device, and a UUID of its own.
        holder = system.read(base + "holder").strip()
        held = f"{ND}/{holder}/" if holder else base
        mode = _MODES.get(system.read(base + "mode").strip(), "raw")
        raw_uuid = _uuid(system.read(base + "uuid"))
        location = system.read(held + "mode").strip() if holder else ""
        found.append(
            Namespace(
                dev=name,
                mode=mode,
                map=_MAPS.get(location, "mem" if mode in ("fsdax", "devdax") else ""),
                size=number(system.read(held + "size")) or size,
                uuid=_uuid(system.read(held + "uuid")),
                name=system.read(base + "alt_name").strip(),
                blockdev="".join(system.list(held + "block")[:1]),
                chardev="".join([item for item, path in dax if holder and "/" + holder + "/" in path][:1]),
                region=f"region{order(name)[0]}",
                numa_node=_node(system.read(base + "numa_node")),
                labels=bool(raw_uuid),
                enabled=system.exists(base + "driver") or system.exists(held + "driver"),
                alignment=number(system.read(held + "align")) if holder else 0,
                raw_uuid=raw_uuid,
            )
        )
    return found


class _DaxName(NamedTuple):
    chardev: str
    base: str


def _dax_names(system: System) -> List[_DaxName]:
    found: List[_DaxName] = []
    for base in (DAX, DAX_CLASS):
        for name in system.list(base):
            if re.fullmatch(r"dax\d+\.\d+", name) and name not in [item.chardev for item in found]:
                found.append(_DaxName(name, f"{base}/{name}/"))
    return sorted(found, key=lambda item: order(item.chardev))


def _dax_path(system: System, name: str) -> str:
    return system.link(f"{DAX}/{name}") or system.link(f"{DAX_CLASS}/{name}")


class MemoryBlock(NamedTuple):
    """A block of hot-added memory: its directory in sysfs, whether it is online, and in which zone."""

    path: str
    online: bool
    zone: str


def block_size(system: System) -> int:
    """Bytes of a block of hot-added memory; 0 if the kernel has none."""
    return int(system.read(MEMORY + "/block_size_bytes").strip() or "0", 16)


def memory_blocks(system: System, chardev: str) -> List[MemoryBlock]:
    """The memory blocks of a dax device in mode system-ram."""
    base = f"{DAX}/{chardev}/"
    block = block_size(system)
    start, size = number(system.read(base + "resource")), number(system.read(base + "size"))
    if block and start:
        paths = [
            f"{MEMORY}/memory{item}"
            for item in range(-(-start // block), (start + size) // block)
            if system.exists(f"{MEMORY}/memory{item}")
        ]
    else:  # older kernels do not show its address, but its node has no other memory
        node = "/sys/devices/system/node/node" + system.read(base + "target_node").strip()
        paths = [f"{node}/{item}" for item in system.list(node) if re.fullmatch(r"memory\d+", item)]
    return [
        MemoryBlock(
            path,
            system.read(path + "/state").strip() == "online",
            (system.read(path + "/valid_zones").split() or [""])[0],
        )
        for path in paths
    ]


def dax_devices(system: System) -> List[DaxDevice]:
    """All dax devices; ``movable`` says whether all online memory of one is in the zone Movable."""
    found = []
    for name, base in _dax_names(system):
        path = _dax_path(system, name)
        driver = system.link(base + "driver").rsplit("/", 1)[-1]
        mode = _DAX_MODES.get(driver, driver)
        blocks = memory_blocks(system, name) if mode == "system-ram" else []
        online = [item for item in blocks if item.online]
        size = number(system.read(base + "size"))
        if not size:
            continue
        found.append(
            DaxDevice(
                chardev=name,
                size=size,
                mode=mode,
                target_node=_node(system.read(base + "target_node")),
                align=number(system.read(base + "align")),
                movable=all(item.zone == "Movable" for item in online),
                online_memblocks=len(online),
                total_memblocks=len(blocks),
                region="".join(re.findall(r"/((?:cxl_)?region\d+)/", path)[-1:]),
                start=number(system.read(base + "resource")),
            )
        )
    return found


def wait_for(look: Callable[[], T], seconds: float = -1.0) -> T:
    """Call ``look`` until its result is true, for at most ``seconds`` (WAIT); return the last result."""
    deadline = time.monotonic() + (WAIT if seconds < 0 else seconds)
    while True:
        found = look()
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(0.1)


def settle(system: System) -> None:
    """Let udev finish with the devices that have just appeared."""
    system.run(["udevadm", "settle", "--timeout=30"])
