"""Packages of GPU drivers for hosts that nobody looks at: each kind that GPUs of today need."""

from typing import List, NamedTuple

from . import families, gpu, gpufabric, kernelinstall
from .state import Gpu, KernelState, OsInfo, State
from .step import Desired

# One GPU of each kind of kernel modules: an A10, and a V100 for all before Turing.
_GPUS = ("2236", "1db4")


class Driver(NamedTuple):
    """Packages that are installed together, streams of dnf's modules, and repositories beyond the enabled."""

    names: List[str]
    streams: List[str]
    repositories: List[str]


def kernel_packages(os: OsInfo) -> List[str]:
    """How the names of packages begin that a driver needs for one kernel."""
    family = families.of(os)
    return family.gpu.per_kernel if family else []


def drivers(os: OsInfo, desired: Desired) -> List[Driver]:
    """The driver that the inventory asks for, and the fabric manager of the same version."""
    release = "" if desired.kernel_version in ("", "newest") else desired.kernel_version
    desired = desired._replace(kernel_version="")
    elrepo = desired.kernel_source in kernelinstall.ELREPO
    found = []
    for device in _GPUS:
        # A kernel of ELRepo is known by its name.
        state = State(
            os=os,
            kernel=KernelState(running=release or ("newest.elrepo" if elrepo else "newest")),
            gpu=Gpu(["0000:00:07.0"], ids=[device]),
        )
        last, branch = gpu.last_branch(state), gpu.branch_of(state, desired)
        where, packed = gpu.source(state, desired)[0], gpu.packages_of(state, desired)
        if where is None or packed is None or (last and branch and int(branch) > int(last)):
            continue
        streams, names = packed
        fabric = gpufabric.package(where, branch) if desired.gpu_fabric_manager else ""
        # Without a branch in its name it is of the stream that is enabled, as the driver.
        names = [_newest(os, name) for name in names] + ([fabric] if fabric else [])
        item = Driver(names, [argv[-1] for argv in streams if "enable" in argv], where.repositories)
        if item not in found:
            found.append(item)
    return found


def _newest(os: OsInfo, name: str) -> str:
    """Packages of the newest kernel by the name that always means it."""
    if "newest" not in name:
        return name
    if os.package_manager != "apt":
        return name.split("-newest")[0]
    return name.replace("newest", kernelinstall.meta_package(os).rpartition("-")[2])
