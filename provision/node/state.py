"""What was seen on a node: plain values that travel as JSON.

Sizes are bytes unless a name says otherwise. ``State.from_dict(state.to_dict()) == state``.
"""

import hashlib
import json
from typing import Any, Dict, List, NamedTuple, Type, TypeVar, cast

T = TypeVar("T")


class OsInfo(NamedTuple):
    """The distribution; ``family`` is ``debian``, ``rhel`` or ``other``; ``package_manager`` may be empty."""

    id: str = ""
    version: str = ""
    family: str = "other"
    name: str = ""
    architecture: str = ""
    package_manager: str = ""
    python: str = ""
    is_root: bool = False


class KernelState(NamedTuple):
    """Kernels: releases as ``uname -r`` prints them, arguments as in ``/proc/cmdline``."""

    running: str = ""
    installed: List[str] = []  # oldest first
    available: str = ""  # newest release that the package manager offers; empty: not known
    default: str = ""  # release that the next ordinary boot starts; empty: not known
    cmdline: List[str] = []
    config: Dict[str, Dict[str, str]] = {}  # release -> option -> "y" or "m"


class Bootloader(NamedTuple):
    """GRUB as it is configured; ``cmdline`` is the value of the one effective GRUB_CMDLINE_LINUX line."""

    kind: str = ""  # "grub" or empty
    defaults_file: str = ""  # text of /etc/default/grub
    cmdline: str = ""
    cmdline_lines: int = 0  # how many GRUB_CMDLINE_LINUX lines the file has
    saved_default: bool = False  # GRUB_DEFAULT=saved
    grubenv_on: str = ""  # "plain", "lvm" or "raid"
    has_grubby: bool = False
    bls: bool = False
    mkconfig: str = ""  # path of grub-mkconfig or grub2-mkconfig
    config_path: str = ""  # path of grub.cfg


class Region(NamedTuple):
    """One region of ``ndctl list -R`` (or ``cxl list -R``)."""

    dev: str
    size: int = 0
    available: int = 0
    type: str = "pmem"  # "pmem", "ram"
    numa_node: int = -1
    persistence: str = ""
    bus: str = ""  # "nvdimm", "e820" or "cxl"


class Namespace(NamedTuple):
    """One namespace of ``ndctl list -N``; ``uuid`` is empty on label-less ones."""

    dev: str
    mode: str = "raw"
    map: str = ""
    size: int = 0
    uuid: str = ""
    name: str = ""
    blockdev: str = ""
    chardev: str = ""
    region: str = ""
    numa_node: int = -1
    labels: bool = True
    enabled: bool = True
    alignment: int = 0


class FileSystem(NamedTuple):
    """What blkid says is on a block device; ``type`` is empty when it found no signature."""

    device: str
    type: str = ""
    uuid: str = ""
    label: str = ""
    block_size: int = 0


class Mount(NamedTuple):
    """One line of ``/proc/mounts``."""

    device: str
    where: str
    type: str = ""
    options: List[str] = []


class FstabEntry(NamedTuple):
    """One line of ``/etc/fstab``."""

    spec: str
    where: str
    type: str = ""
    options: List[str] = []


class DaxDevice(NamedTuple):
    """One device of ``daxctl list``; ``target_node`` is -1 when the firmware gives none."""

    chardev: str
    size: int = 0
    mode: str = "devdax"
    target_node: int = -1
    align: int = 0
    movable: bool = True
    online_memblocks: int = 0
    total_memblocks: int = 0
    region: str = ""  # region of the bus it hangs on: region0, cxl_region0


class NumaNode(NamedTuple):
    """One NUMA node; ``size`` and ``free`` in bytes, ``distances`` by node id order."""

    id: int
    size: int = 0
    free: int = 0
    cpus: List[int] = []
    distances: List[int] = []


class MemoryRange(NamedTuple):
    """Physical addresses [start, end) of RAM; ``node`` is -1 when no table says whose they are."""

    start: int
    end: int
    node: int = -1
    source: str = "firmware"  # "firmware" (e820), "srat" or "blocks" (memory that is online now)


class MemoryPolicy(NamedTuple):
    """Kernel policy for hot-added memory."""

    auto_online: str = ""  # /sys/devices/system/memory/auto_online_blocks
    block_size: int = 0
    page_size: int = 4096
    dax_model: str = "bus"  # "bus", or "class" where `daxctl migrate-device-model` was never run


class Dimms(NamedTuple):
    """What ipmctl says: tool version, capacities in bytes and goals that wait for a reboot."""

    ipmctl: str = ""  # version; empty: not installed
    physical: int = 0
    volatile: int = 0
    app_direct: int = 0
    inaccessible: int = 0
    goals: List[str] = []  # "memorymode" / "appdirect", one per socket with a pending goal
    sockets: List[int] = []


class Directory(NamedTuple):
    """A directory that stands in for persistent memory; ``free`` is that of its nearest existing parent."""

    path: str
    exists: bool = False
    is_directory: bool = False
    writable: bool = False  # the directory, or when it does not exist, its nearest existing parent
    free: int = 0
    blocked_by: str = ""  # the path that is a file, or is not writable


class Tools(NamedTuple):
    """Versions of external tools; empty: not installed."""

    ndctl: str = ""
    daxctl: str = ""
    cxl: str = ""
    grubby: str = ""
    pip: str = ""


class Runtime(NamedTuple):
    """A Python environment: versions of what training needs there; empty: not installed."""

    venv: str = ""
    exists: bool = False
    writable: bool = False
    python: str = ""
    oeprov: str = ""
    distributions: Dict[str, str] = {}  # normalised name -> version, of the names asked for
    missing: List[str] = []  # requirements of the wanted extra that the environment does not satisfy
    error: str = ""  # why its interpreter cannot be used


class Gpu(NamedTuple):
    """NVIDIA devices on the PCI bus and the driver in the kernel."""

    devices: List[str] = []  # PCI addresses
    driver: str = ""  # version; empty: not loaded
    names: List[str] = []


class State(NamedTuple):
    """All that one round trip brings back from a node."""

    hostname: str = ""
    boot_id: str = ""
    os: OsInfo = OsInfo()
    kernel: KernelState = KernelState()
    bootloader: Bootloader = Bootloader()
    regions: List[Region] = []
    namespaces: List[Namespace] = []
    filesystems: List[FileSystem] = []
    mounts: List[Mount] = []
    fstab: List[FstabEntry] = []
    dax: List[DaxDevice] = []
    numa: List[NumaNode] = []
    ranges: List[MemoryRange] = []
    memory: MemoryPolicy = MemoryPolicy()
    dimms: Dimms = Dimms()
    directories: List[Directory] = []
    files: Dict[str, str] = {}  # text of configuration files of ours, by path; absent files are left out
    packages: Dict[str, str] = {}  # name -> installed version, of the names asked for; empty: not installed
    tools: Tools = Tools()
    runtime: Runtime = Runtime()
    gpu: Gpu = Gpu()
    owned: List[str] = []  # UUIDs of namespaces and file systems that oeprov made on this node
    assumed: bool = False  # not seen but assumed: `plan --offline`
    trouble: List[str] = []  # what could not be looked at, and why

    def to_dict(self) -> Dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, ready for JSON."""
        return encode_fields(self)

    @classmethod
    def from_dict(cls, data: Dict[str, Any]) -> "State":
        """The State of ``to_dict``; unknown keys raise ValueError, missing ones take their defaults."""
        return decode(cls, data)

    def stable(self) -> "State":
        """The state without what a plan does not depend on.

        Free memory and free space may move, a boot may pass, and another Python may be the one that looks.
        """
        return self._replace(
            boot_id="",
            os=self.os._replace(python="", is_root=False),
            numa=[node._replace(free=0) for node in self.numa],
            directories=[directory._replace(free=0) for directory in self.directories],
        )

    def digest(self) -> str:
        """SHA-256 of what a plan depends on."""
        text = json.dumps(self.stable().to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def encode_fields(value: Any) -> Dict[str, Any]:
    """A named tuple as a dictionary, and all named tuples in it."""
    return {name: encode(getattr(value, name)) for name in value._fields}


def encode(value: Any) -> Any:
    """Named tuples become dictionaries, at any depth."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return encode_fields(value)
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: Type[T], data: Any) -> T:
    """The inverse of ``encode`` for a NamedTuple class; ValueError names fields that it does not have."""
    return cast(T, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    """The inverse of ``encode`` for a NamedTuple class or a ``List`` of one; others pass as they are."""
    if hasattr(kind, "_fields"):
        unknown = sorted(set(data) - set(kind._fields))
        if unknown:
            raise ValueError("{} has no field {}".format(kind.__name__, ", ".join(unknown)))
        hints = kind.__annotations__
        return kind(**{name: _decode(hints[name], value) for name, value in data.items()})
    arguments = getattr(kind, "__args__", None)
    if isinstance(data, list) and arguments and hasattr(arguments[0], "_fields"):
        return [_decode(arguments[0], item) for item in data]
    return data


def difference(before: State, after: State) -> List[str]:
    """The top-level parts that differ for a plan, one line each: name, what it was, what it is."""
    lines = []
    was, now = before.stable(), after.stable()
    for name in State._fields:
        old, new = getattr(was, name), getattr(now, name)
        if old != new:
            lines.append("{}: was {!r}, is {!r}".format(name, encode(old), encode(new)))
    return lines
