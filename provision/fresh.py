"""What a freshly installed host of each kind looks like, for ``oeprov plan --offline``.

Figures are those that vendors document; nothing here was observed.
"""

from __future__ import annotations

from provision.node import families
from provision.node.family import Family
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
_CMDLINE = "console=tty0 console=ttyS0,115200n8"

_EL8 = OsInfo("rocky", "8.10", "rhel", "Rocky Linux 8.10", "x86_64", "dnf")
_UBUNTU = OsInfo("ubuntu", "22.04", "debian", "Ubuntu 22.04 LTS", "x86_64", "apt")
_UBUNTU24 = OsInfo("ubuntu", "24.04", "debian", "Ubuntu 24.04 LTS", "x86_64", "apt")
_DEBIAN = OsInfo("debian", "12", "debian", "Debian GNU/Linux 12", "x86_64", "apt", "3.11.2", True)
_EL_BASE = State(os=_EL8)
_UBUNTU_BASE = State(os=_UBUNTU, numa=[NumaNode(0, 256 * GIB, 250 * GIB, list(range(64)), [10])])

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


def _on(base: State, os: OsInfo) -> State:
    """The same hardware with a system as its installer leaves it."""
    family = families.of(os)
    if family is None:
        return base
    fresh = family.fresh[families.release(family, os)]
    return base._replace(
        os=os._replace(python=fresh.python, is_root=True),
        kernel=KernelState(
            fresh.kernel, [fresh.kernel], "", fresh.kernel, _CMDLINE.split(), {fresh.kernel: fresh.options}
        ),
        bootloader=_grub(family),
        memory=MemoryPolicy(family.auto_online, 128 * MIB),
        assumed=True,
    )


def _grub(family: Family) -> Bootloader:
    cmdline = _CMDLINE + (" crashkernel=auto" if family.grubby else "")
    return Bootloader(
        kind="grub",
        defaults_file=f'GRUB_DEFAULT={"saved" if family.grubby else "0"}\nGRUB_CMDLINE_LINUX="{cmdline}"\n',
        cmdline=cmdline,
        cmdline_lines=1,
        saved_default=family.grubby,
        grubenv_on="plain",
        has_grubby=family.grubby,
        bls=family.bls,
        mkconfig=f"{family.grub}-mkconfig",
        config_path=f"/boot/{family.grub}/grub.cfg",
    )


def state(desired: Desired, os: OsInfo | None = None) -> State:
    """The assumed state of a freshly installed host of ``desired.kind``; ``os``: with that system."""
    missing = Runtime(venv=desired.runtime_venv, missing=desired.runtime_requirements)
    if desired.kind != "local":
        base = _STATES[desired.kind]
        return _on(base, os or base.os)._replace(hostname=desired.host, runtime=missing)
    return State(
        os=_DEBIAN,
        directories=[Directory(desired.pmem_directory, writable=True, free=100 * GIB)],
        runtime=missing._replace(exists=True, writable=True, python="3.11.2", oeprov="0.1.0"),
        assumed=True,
    )
