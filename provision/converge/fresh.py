"""What a freshly installed host of each kind looks like, for ``oeprov plan --offline``.

Figures are those that vendors document; nothing here was observed.
"""

from __future__ import annotations

from provision.node import families
from provision.node.state import (
    Bootloader,
    DaxDevice,
    Dimms,
    Directory,
    FileSystem,
    Gpu,
    KernelState,
    MemoryPolicy,
    MemoryRange,
    Namespace,
    NumaNode,
    OsInfo,
    Region,
    Runtime,
    State,
)
from provision.node.step import Desired

GIB = 1 << 30
MIB = 1 << 20

_EL8 = OsInfo("rocky", "8.10", "rhel", "Rocky Linux 8.10", "x86_64", "dnf", "3.6.8", True)
_UBUNTU = OsInfo("ubuntu", "22.04", "debian", "Ubuntu 22.04 LTS", "x86_64", "apt", "3.10.12", True)
_UBUNTU24 = OsInfo("ubuntu", "24.04", "debian", "Ubuntu 24.04 LTS", "x86_64", "apt", "3.12.3", True)
_DEBIAN = OsInfo("debian", "12", "debian", "Debian GNU/Linux 12", "x86_64", "apt", "3.11.2", True)
_CXL_RAM = {"CONFIG_DEV_DAX_CXL": "m"}  # since 6.3
_ALL = {"CONFIG_DEV_DAX_KMEM": "m", "CONFIG_FS_DAX": "y", "CONFIG_X86_PMEM_LEGACY": "m"}


def _kernel(release: str, config: dict[str, str]) -> KernelState:
    cmdline = ["console=tty0", "console=ttyS0,115200n8"]
    return KernelState(release, [release], "", release, cmdline, {release: config})


def _grub(name: str, *, grubby: bool) -> Bootloader:
    cmdline = "console=tty0 console=ttyS0,115200n8" + (" crashkernel=auto" if grubby else "")
    text = f'GRUB_DEFAULT={"saved" if grubby else "0"}\nGRUB_CMDLINE_LINUX="{cmdline}"\n'
    return Bootloader(
        "grub",
        text,
        cmdline,
        1,
        grubby,
        "plain",
        grubby,
        grubby,
        f"{name}-mkconfig",
        f"/boot/{name}/grub.cfg",
    )


_EL_BASE = State(
    os=_EL8,
    # EL 8's own kernel is 4.18 with much taken over from later ones, KMEM DAX too.
    kernel=_kernel("4.18.0-553.el8_10.x86_64", _ALL),
    bootloader=_grub("grub2", grubby=True),
    memory=MemoryPolicy("offline", 128 * MIB),
    assumed=True,
)
_UBUNTU_BASE = State(
    os=_UBUNTU,
    kernel=_kernel("5.15.0-119-generic", _ALL),
    bootloader=_grub("grub", grubby=False),
    memory=MemoryPolicy("online", 128 * MIB),
    numa=[NumaNode(0, 256 * GIB, 250 * GIB, list(range(64)), [10])],
    assumed=True,
)

_RE6P = _EL_BASE._replace(
    numa=[NumaNode(0, 192 * GIB, 180 * GIB, list(range(52)), [10])],
    regions=[Region("region0", 1008 * GIB, 0, "pmem", 0, "memory_controller", "nvdimm")],
    namespaces=[
        Namespace("namespace0.0", "raw", "", 1008 * GIB, blockdev="pmem0", region="region0", labels=False)
    ],
    filesystems=[FileSystem("pmem0", sample="zero")],
)

# ecs.re7p.16xlarge: node 1 shows 1,016,062 MB, which is 1008 GiB less its own page structures (1/64).
_RE7P = _EL_BASE._replace(
    numa=[
        NumaNode(0, 249_568 * MIB, 240_000 * MIB, list(range(64)), [10, 17]),
        NumaNode(1, 1_016_062 * MIB, 1_016_000 * MIB, [], [17, 10]),
    ],
    ranges=[
        MemoryRange(0, 640 << 10),
        MemoryRange(1 * MIB, 3 * GIB),
        MemoryRange(4 * GIB, 1265 * GIB),
        MemoryRange(0, 640 << 10, 0, "srat"),
        MemoryRange(1 * MIB, 3 * GIB, 0, "srat"),
        MemoryRange(4 * GIB, 257 * GIB, 0, "srat"),
        MemoryRange(257 * GIB, 1265 * GIB, 1, "srat"),
    ],
)

# Two sockets, each with four 128 GiB modules; no goal was ever set.
_BARE_METAL = _EL_BASE._replace(
    numa=[
        NumaNode(0, 192 * GIB, 185 * GIB, list(range(26)), [10, 21]),
        NumaNode(1, 192 * GIB, 185 * GIB, list(range(26, 52)), [21, 10]),
    ],
    dimms=Dimms("02.00.00.3885", int(1013.937 * GIB), 0, 0, int(1013.937 * GIB), [], [0, 1]),
)

# Since 6.3 the kernel hands a volatile CXL region to kmem, and Ubuntu brings such memory online by itself.
_CXL = _UBUNTU_BASE._replace(
    os=_UBUNTU24,
    kernel=_kernel("6.8.0-41-generic", {**_ALL, **_CXL_RAM}),
    numa=[
        NumaNode(0, 256 * GIB, 250 * GIB, list(range(64)), [10, 20]),
        NumaNode(1, 252 * GIB, 252 * GIB, [], [20, 10]),
    ],
    regions=[Region("region0", 256 * GIB, 0, "ram", 1, "", "cxl")],
    dax=[DaxDevice("dax0.0", 256 * GIB, "system-ram", 1, 2 * MIB, False, 2048, 2048, "region0")],
)

_GPU = _UBUNTU_BASE._replace(gpu=Gpu(["0000:00:07.0"], ids=["2236"]))  # an A10, as on gn7i

_STATES = {
    "re6p": _RE6P,
    "re7p": _RE7P,
    "bare_metal_pmem": _BARE_METAL,
    "cxl": _CXL,
    "gpu": _GPU,
    "cpu": _UBUNTU_BASE,
}


# Of the systems as their installers leave them: family and release -> kernel, Python, options of the kernel.
_SYSTEMS: dict[tuple[str, str], tuple[str, str, dict[str, str]]] = {
    ("CentOS 7", "7"): ("3.10.0-1127.el7.x86_64", "3.6.8", {"CONFIG_FS_DAX": "y"}),
    ("EL 8", "8"): ("4.18.0-553.el8_10.x86_64", "3.6.8", _ALL),
    ("EL 9", "9"): ("5.14.0-427.13.1.el9_4.x86_64", "3.9.18", _ALL),
    ("Alibaba Cloud Linux 3", "3"): ("5.10.134-16.3.al8.x86_64", "3.6.8", _ALL),
    ("Ubuntu", "20.04"): ("5.4.0-190-generic", "3.8.10", _ALL),
    ("Ubuntu", "22.04"): ("5.15.0-119-generic", "3.10.12", _ALL),
    ("Ubuntu", "24.04"): ("6.8.0-41-generic", "3.12.3", {**_ALL, **_CXL_RAM}),
    ("Debian", "11"): ("5.10.0-31-amd64", "3.9.2", _ALL),
    ("Debian", "12"): ("6.1.0-25-amd64", "3.11.2", _ALL),
    ("Debian", "13"): ("6.12.38+deb13-amd64", "3.13.5", {**_ALL, **_CXL_RAM}),
}


def _on(base: State, os: OsInfo) -> State:
    """The same hardware with another system."""
    family = families.of(os)
    if family is None:
        return base
    release, python, config = _SYSTEMS[family.name, families.release(family, os)]
    rpm = family.lineage == "rhel"
    loader = _grub("grub2" if rpm else "grub", grubby=rpm)
    return base._replace(
        os=os._replace(python=python, is_root=True),
        kernel=_kernel(release, config),
        # CentOS 7 has no BLS entries.
        bootloader=loader._replace(bls=rpm and family.name != "CentOS 7"),
        memory=base.memory._replace(auto_online="online" if os.id == "ubuntu" else "offline"),
    )


def state(desired: Desired, os: OsInfo | None = None) -> State:
    """The assumed state of a freshly installed host of ``desired.kind``; ``os``: with that system."""
    missing = Runtime(venv=desired.runtime_venv, missing=desired.runtime_requirements)
    if desired.kind != "local":
        base = _STATES[desired.kind]
        return (_on(base, os) if os else base)._replace(hostname=desired.host, runtime=missing)
    return State(
        os=_DEBIAN,
        directories=[Directory(desired.pmem_directory, writable=True, free=100 * GIB)],
        runtime=missing._replace(exists=True, writable=True, python="3.11.2", oeprov="0.1.0"),
        assumed=True,
    )
