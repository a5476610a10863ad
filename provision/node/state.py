"""The observed state of a host: plain values that travel as JSON.

Sizes are bytes unless a name says otherwise. ``decode(State, encode(state)) == state``.
"""

import hashlib
import json
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Tuple, Type, TypeVar, cast

T = TypeVar("T")
_PLAIN = (str, int, float, bool, type(None))


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
    cpu_level: int = 0  # 3 for x86-64-v3; 0: another architecture, or unknown
    own_python: str = ""  # version of the Python that oeprov installed for Ansible; empty: there is none
    mirrors_gone: bool = False  # its repositories are the installer's, whose mirrors are gone


class KernelState(NamedTuple):
    """Kernels: releases as ``uname -r`` prints them, arguments as in ``/proc/cmdline``."""

    running: str = ""
    installed: List[str] = []  # oldest first
    available: str = ""  # newest release that the package manager offers; empty: unknown
    default: str = ""  # release that the next ordinary boot starts; empty: unknown
    cmdline: List[str] = []
    config: Dict[str, Dict[str, str]] = {}  # release -> option -> "y" or "m"
    failed: List[str] = []  # WHAT, WHEN and WHY of failed trial boots, separated by tabs
    boot_free: int = 0  # bytes free for /boot; 0: unknown
    boot_need: int = 0  # bytes that one more kernel takes there; 0: unknown
    secure_boot: bool = False  # only kernels with a signature known to firmware or shim start
    elrepo_key: bool = False  # they know ELRepo's key; observed with Secure Boot only
    unsigned: List[str] = []  # installed releases without a signature; observed with Secure Boot only


class BootEntry(NamedTuple):
    """One entry of GRUB's menu; ``id`` is what grub-set-default takes, ``release`` is empty for no kernel."""

    id: str
    title: str = ""
    release: str = ""
    arguments: List[str] = []


class Bootloader(NamedTuple):
    """GRUB as it is configured; ``cmdline`` is the value of the one effective GRUB_CMDLINE_LINUX line."""

    kind: str = ""  # "grub" or empty
    defaults_file: str = ""  # text of /etc/default/grub
    cmdline: str = ""
    cmdline_lines: int = 0  # how many GRUB_CMDLINE_LINUX lines the file has
    saved_default: bool = False  # GRUB_DEFAULT=saved
    # "plain" if GRUB can write its environment block, else the obstacle: "lvm", "raid", "cryptodisk" or a
    # file system (btrfs). Empty: grub-probe does not know, or there will be no trial.
    grubenv_on: str = ""
    has_grubby: bool = False
    bls: bool = False
    mkconfig: str = ""  # path of grub-mkconfig or grub2-mkconfig
    config_path: str = ""  # path of grub.cfg
    entries: List[BootEntry] = []  # in the menu's order
    saved_entry: str = ""  # what GRUB's environment block says
    next_entry: str = ""  # the same, for one boot only
    overrides: Dict[str, str] = {}  # text of /etc/default/grub.d/*.cfg by path
    stray_config: str = ""  # path of an unused grub.cfg


class Region(NamedTuple):
    """One region of the nvdimm bus, or a volatile one of the CXL bus; ``type`` pmem, volatile or ram."""

    dev: str
    size: int = 0
    available: int = 0
    type: str = "pmem"
    numa_node: int = -1
    persistence: str = ""
    bus: str = ""  # "nvdimm", "e820" or "cxl"
    align: int = 0  # size of its namespaces is a multiple of it; 0: unknown
    bad_blocks: int = 0  # of 512 bytes, unreadable according to the kernel


class Namespace(NamedTuple):
    """One namespace. ``uuid`` is that of its mode (as ``ndctl list`` prints), ``raw_uuid`` its label's.

    Label-less namespaces have no ``raw_uuid``; a raw one then has no UUID at all.
    """

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
    raw_uuid: str = ""


class FileSystem(NamedTuple):
    """What ``blkid -p`` says is on a block device; ``type`` is empty when it found no signature.

    A partition table counts as a type (``gpt``, ``dos``). ``holders`` are devices built on this one (dm-0).
    ``sample`` says what was read where there is no signature: ``zero``, or a digest (``content``).
    """

    device: str
    type: str = ""
    uuid: str = ""
    label: str = ""
    block_size: int = 0
    holders: List[str] = []
    sample: str = ""
    error: str = ""  # of type "unreadable": what could not be read, and why
    bad_blocks: int = 0  # of 512 bytes, unreadable according to the kernel


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
    """One dax device; ``target_node`` is -1 when the firmware gives none."""

    chardev: str
    size: int = 0
    mode: str = "devdax"  # or "system-ram", or the name of a driver that oeprov does not know
    target_node: int = -1
    align: int = 0
    movable: bool = True
    online_memblocks: int = 0
    total_memblocks: int = 0
    region: str = ""  # region of its bus: region0, cxl_region0
    start: int = 0  # physical address; 0: older kernels do not show it


class NumaNode(NamedTuple):
    """One NUMA node; ``size`` and ``free`` in bytes, ``distances`` by node id order.

    The last three are observed to distinguish nodes without CPUs; see ``numa.tell_apart``.
    """

    id: int
    size: int = 0
    free: int = 0
    cpus: List[int] = []
    distances: List[int] = []
    offline_cpus: bool = False  # it has CPUs that do not run
    origin: str = ""  # of its memory: "firmware" (its memory map) or "driver"; empty: unknown
    bandwidth: int = 0  # MB/s of reads by the nearest CPUs, from the HMAT; 0: unknown


class MemoryRange(NamedTuple):
    """Physical addresses [start, end) of RAM; ``node`` is -1 if unknown."""

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


class Tiering(NamedTuple):
    """What the kernel does between DRAM and slower nodes; empty: it has no such setting, or unobserved."""

    demotion: str = ""  # "true" or "false"
    balancing: str = ""  # kernel.numa_balancing
    weights: Dict[str, str] = {}  # of interleaving, by node
    auto_weights: str = ""  # "true": the kernel sets them by bandwidth, and follows hot-plug; since 6.16
    tiers: Dict[str, List[int]] = {}  # name of a tier -> its nodes


class CxlBus(NamedTuple):
    """What a region of volatile CXL memory can be made of."""

    expanders: Dict[str, int] = {}  # device with volatile memory -> bytes
    decoders: Dict[str, str] = {}  # root decoder that takes it -> name of the next region
    dynamic: List[str] = []  # dax devices of dynamic capacity; they are not in ``State.dax``


class Module(NamedTuple):
    """One persistent memory module as the kernel shows it; ``flags`` are faults (``modules.WORDS``)."""

    dev: str
    flags: List[str] = []


class Dimms(NamedTuple):
    """Facts from ipmctl: its version, capacities in bytes and goals that wait for a reboot."""

    ipmctl: str = ""  # version; empty: not installed
    physical: int = 0
    volatile: int = 0
    app_direct: int = 0
    inaccessible: int = 0
    goals: List[str] = []  # "memorymode" / "appdirect", one per socket with a pending goal
    sockets: List[int] = []
    unhealthy: Dict[str, str] = {}  # module id -> health and lock of unhealthy or locked modules


class Directory(NamedTuple):
    """A directory in place of persistent memory; ``free`` is that of its nearest existing parent."""

    path: str
    exists: bool = False
    is_directory: bool = False
    writable: bool = False  # the directory, or when it does not exist, its nearest existing parent
    free: int = 0
    blocked_by: str = ""  # the path that is a file, or is not writable


class Drive(NamedTuple):
    """What a name in ``ssd_devices`` leads to: a drive, or a directory that is there already."""

    name: str
    device: str = ""  # its name now, such as nvme0n1; empty: a directory, or there is none
    size: int = 0
    rotates: bool = False
    scheduler: str = ""  # of its queue, the active one
    identity: str = ""  # of the hardware, from the kernel; empty: unknown
    used_by: List[str] = []  # swap, and devices that are built on it or on its partitions
    directory: Directory = Directory("")
    filesystem: str = ""  # type of the file system that the directory is on


class Tools(NamedTuple):
    """Versions of external tools; empty: not installed."""

    ndctl: str = ""
    daxctl: str = ""
    cxl: str = ""


class OldEnvironment(NamedTuple):
    """An environment that another one has replaced; ``bytes`` are those that removing it would free."""

    path: str
    bytes: int = 0
    users: List[str] = []  # what runs from it: training jobs, or else processes


class Runtime(NamedTuple):
    """The Python environment of training; empty versions: not installed."""

    venv: str = ""
    exists: bool = False
    writable: bool = False
    python: str = ""
    oeprov: str = ""
    distributions: Dict[str, str] = {}  # normalised name -> version, of the names asked for
    missing: List[str] = []  # requirements that it does not satisfy
    error: str = ""  # why its interpreter cannot be used
    base: str = ""  # version of the Python that would make it; empty: unknown
    wheel: str = ""  # the build of oeprov's wheel in it; empty: none
    made: bool = False  # oeprov made it, and may make it again
    unfinished: bool = False  # an installation was interrupted
    sources: str = ""  # revision of another flavor's sources; empty: none
    image: str = ""  # why the image of its build is not available; empty: it is, or unchecked
    home: str = ""  # where ``venv`` is, after a link of the user's own
    place: str = ""  # the environment that ``home`` is a link to; empty: it is a directory itself
    old: List[OldEnvironment] = []  # beside ``place``
    jobs: List[str] = []  # that run from it, where it has no ``place``


class Gpu(NamedTuple):
    """NVIDIA devices on the PCI bus and the driver in the kernel."""

    devices: List[str] = []  # PCI addresses
    driver: str = ""  # version; empty: not loaded
    names: List[str] = []  # models, from a loaded driver
    ids: List[str] = []  # PCI device ids (1eb8), as devices
    installed: str = ""  # version of the module on disk for the running kernel
    nouveau: bool = False  # the kernel's own driver is loaded
    key_enrolled: bool = False  # the firmware knows DKMS's key
    persistence: bool = False  # our unit keeps the driver loaded
    checked: str = ""  # versions of the last passed test
    toolkits: List[str] = []  # versions of CUDA in /usr/local
    switches: int = 0  # NVSwitches
    fabric: str = ""  # version of nvidia-fabricmanager; empty: not installed, or no switches
    fabric_runs: bool = False  # now, and after the next boot


class JobFiles(NamedTuple):
    """Files of a job that does not run; ``run``: its run directory is not empty."""

    job: str
    units: List[str] = []
    directory: str = ""  # empty: there is none
    checkpoints: int = 0
    run: bool = False
    pools: List[str] = []  # directories with its servers' rows in persistent memory


class Remains(NamedTuple):
    """What oeprov made, beyond the rest of the state; observed for `oeprov destroy` only."""

    jobs: List[JobFiles] = []
    foreign: List[str] = []  # other files where jobs keep rows
    files: List[str] = []
    user: bool = False


class Image(NamedTuple):
    """Whether the system is booted, and of an image."""

    booted: bool = True  # False: a chroot, or the build of an image
    bootc: bool = False  # a host of an image for bootc, or the build of one
    arguments: str = ""  # text of ``image.KARGS``


class State(NamedTuple):
    """Everything that one observation of a host brings."""

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
    tiering: Tiering = Tiering()  # observed for mode tiered only
    cxl: CxlBus = CxlBus()  # observed on kind cxl only
    dimms: Dimms = Dimms()
    modules: List[Module] = []
    directories: List[Directory] = []
    drives: List[Drive] = []  # in the order of ssd_devices
    uring_disabled: str = ""  # kernel.io_uring_disabled; observed with ssd_devices only
    files: Dict[str, str] = {}  # text of configuration files of ours, by path; absent files are left out
    packages: Dict[str, str] = {}  # requested name -> installed version; empty: not installed
    tools: Tools = Tools()
    runtime: Runtime = Runtime()
    gpu: Gpu = Gpu()
    image: Image = Image()
    owned: List[str] = []  # the words of the registry (``owned``)
    jobs: List[str] = []  # training jobs that run here
    users: Dict[str, List[str]] = {}  # mount point that a step unmounts -> "PID NAME" of its users
    remains: Remains = Remains()
    assumed: bool = False  # not observed: `plan --offline`
    bare: str = ""  # why there is no Python that can observe it: then only ``os`` is known
    trouble: List[str] = []  # what could not be observed, and why

    def stable(self) -> "State":
        """The state without what a plan does not depend on.

        That is free memory and space, the boot, the Python that observes, and processes; running jobs and
        users of mounts are checked again on the host. So is data without a signature, by the steps that
        overwrite it.
        """
        return self._replace(
            boot_id="",
            jobs=[],
            users={},
            os=self.os._replace(python="", own_python="", is_root=False),
            kernel=self.kernel._replace(boot_free=0),
            numa=[node._replace(free=0) for node in self.numa],
            filesystems=[
                item._replace(sample="data") if item.sample not in ("", "zero") else item
                for item in self.filesystems
            ],
            directories=[directory._replace(free=0) for directory in self.directories],
            drives=[item._replace(directory=item.directory._replace(free=0)) for item in self.drives],
            runtime=self.runtime._replace(old=[], jobs=[]),
        )

    def digest(self) -> str:
        """SHA-256 of the facts that a plan depends on."""
        text = json.dumps(encode(self.stable()), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def encode(value: Any) -> Any:
    """Named tuples become dictionaries, at any depth: plain values, ready for JSON."""
    if value.__class__ in _PLAIN:  # nearly all
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: encode(getattr(value, name)) for name in value._fields}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: Type[T], data: Any) -> T:
    """The inverse of ``encode`` for a NamedTuple class; ValueError names fields that it does not have."""
    return cast(T, _decode(kind, data))


def _decode(kind: Any, data: Any) -> Any:
    unknown = sorted(set(data) - set(kind._fields))
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    values = dict(data)
    for name, (inner, is_list) in _nested(kind).items():
        value = values.get(name)
        if isinstance(value, list) and is_list:
            values[name] = [_decode(inner, item) for item in value]
        elif name in values and not is_list:
            values[name] = _decode(inner, value)
    return kind(**values)


@lru_cache(maxsize=256)
def _nested(kind: Any) -> Dict[str, Tuple[Any, bool]]:
    """The fields that are NamedTuples, or lists of them: the class, and whether it is a list."""
    found = {}
    for name, hint in kind.__annotations__.items():
        arguments = getattr(hint, "__args__", None)
        if hasattr(hint, "_fields"):
            found[name] = (hint, False)
        elif arguments and hasattr(arguments[0], "_fields"):
            found[name] = (arguments[0], True)
    return found


def difference(before: State, after: State) -> List[str]:
    """The top-level parts that differ for a plan, one line each: name, what it was, what it is."""
    lines = []
    was, now = before.stable(), after.stable()
    for name in State._fields:
        old, new = getattr(was, name), getattr(now, name)
        if old != new:
            lines.append(f"{name}: was {encode(old)!r}, is {encode(new)!r}")
    return lines
