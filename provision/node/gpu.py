"""NVIDIA GPUs and their driver: observe them, and install another driver.

``cuda`` has compatible versions, ``gpuconflicts`` reports incompatible ones, ``gpucheck`` tests the result.
"""

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import (
    cuda,
    families,
    gpucheck,
    gpufabric,
    kernel,
    kernelinstall,
    packages,
    platforms,
    repositories,
    secureboot,
)
from .command import CommandError, System
from .family import DriverPackages, GpuDriver
from .state import Gpu, KernelState, OsInfo, State
from .step import Action, Applied, Desired, Step

_PCI = "/sys/bus/pci/devices"
_DKMS_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")
REPOSITORY = "nvidia"  # what runtime_repositories calls NVIDIA's own
# Packages of NVIDIA's repositories for apt; rpm families have their own.
_VENDOR = GpuDriver(
    DriverPackages("cuda-drivers", "cuda-drivers-{branch}"),
    DriverPackages("nvidia-open", "nvidia-open-{branch}"),
    headers={"": "linux-headers-{release}"},
    fabric="nvidia-fabricmanager-{branch}",
)
NOUVEAU = "nouveau"  # what consent calls it
# The second is dracut's; both also act in the initial ramdisk, and go if a trial boot fails.
_WITHOUT_NOUVEAU = ["modprobe.blacklist=nouveau", "rd.driver.blacklist=nouveau"]


def parse_version(text: str) -> str:
    """Driver version of /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else ""


def observe(system: System, whole: bool = True) -> Gpu:
    """NVIDIA's GPUs on the PCI bus; ``whole``: their driver too. Needs no tool of NVIDIA's."""
    found = Gpu(devices=[], ids=[])
    for name in system.list(_PCI):
        base = _PCI + "/" + name
        if system.read(base + "/vendor").strip() != "0x10de":
            continue
        group = system.read(base + "/class")
        if group.startswith("0x03"):
            found.devices.append(name)
            found.ids.append(system.read(base + "/device").strip().replace("0x", ""))
        found = found._replace(switches=found.switches + group.startswith("0x0680"))
    if not whole or not found.devices:
        return found
    loaded = parse_version(system.read("/proc/driver/nvidia/version"))
    keys = [key for key in (system.read(path, "latin-1") for path in _DKMS_KEYS) if key]
    enrolled = secureboot.keys(system) if keys else ""
    return gpufabric.observe(system, found)._replace(
        driver=loaded or system.read("/sys/module/nvidia/version").strip(),
        names=_names(system, found.devices),
        installed=_installed(system),
        nouveau=system.exists("/sys/module/nouveau"),
        key_enrolled=any(key in enrolled for key in keys),
        persistence=gpucheck.is_persistent(system),
        checked=system.read(gpucheck.CHECKED).strip(),
        toolkits=[item[5:] for item in system.list("/usr/local") if re.match(r"cuda-\d+\.\d+$", item)],
    )


def _names(system: System, devices: List[str]) -> List[str]:
    """Models by the driver; empty without it."""
    texts = [system.read(f"/proc/driver/nvidia/gpus/{name}/information") for name in devices]
    models = [re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) for text in texts]
    return [match.group(1).strip() for match in models if match]


def _installed(system: System, release: str = "") -> str:
    """Version of the driver's module on the disk, for the kernel that runs or another."""
    found = system.run(["modinfo", "-F", "version"] + (["-k", release] if release else []) + ["nvidia"])
    return found.out.strip() if found.ok else ""


def is_used(state: State, desired: Desired) -> bool:
    """The host is to train on its GPUs, and has some."""
    return platforms.get(desired.kind).has_gpus and bool(state.gpu.devices)


def source(state: State, desired: Desired) -> Tuple[Optional[GpuDriver], str]:
    """Packages of the driver, and the newest branch among them (empty: unknown).

    If there is a choice, it is the last branch that supports the GPUs.
    """
    family = families.find(state.os)
    if family is None:
        return None, ""
    last = last_branch(state)
    if state.os.package_manager == "apt" and REPOSITORY in desired.runtime_repositories:
        return _VENDOR, last
    newest = family.gpu.branches.get(families.release_of(state.os), "")
    beyond = last and (not newest or int(newest) > int(last))
    return family.gpu, last if beyond and family.gpu.proprietary.branch else newest


def last_branch(state: State) -> str:
    """The last branch that supports all the GPUs; empty: current branches do."""
    ends = [item.last_driver for item in cuda.architectures(state.gpu.ids) if item.last_driver]
    return min(ends, key=int) if ends else ""


def branch_of(state: State, desired: Desired) -> str:
    """The branch to install; empty: unknown."""
    return desired.gpu_driver if desired.gpu_driver.isdigit() else source(state, desired)[1]


def fits(state: State, desired: Desired, version: str, least: str) -> bool:
    """A driver is the wanted one; ``least``: the oldest for TensorFlow, or empty."""
    if not version or desired.gpu_driver.isdigit():
        return bool(version) and version.split(".")[0] == desired.gpu_driver
    last = last_branch(state)
    enough = not least or cuda.numbers(version) >= cuda.numbers(least)
    return enough and (not last or cuda.numbers(version)[0] <= int(last))


def changes(state: State, desired: Desired) -> bool:
    """Another driver is to be installed."""
    if not desired.gpu_driver or not is_used(state, desired):
        return False
    build = gpucheck.build(state, desired)
    there = state.gpu.installed or state.gpu.driver
    return not fits(state, desired, there, build.driver if build else "")


def plan(state: State, desired: Desired) -> List[Step]:
    """One step that installs the wanted driver; none if it is installed, or if the driver is kept."""
    packed = packages_of(state, desired) if changes(state, desired) else None
    if packed is None:
        return []
    streams, names = packed
    given = packages.given(desired, state.os)
    where, _ = source(state, desired)
    use = repositories.use(state.os, given, where.repositories if where else [])
    there = state.gpu.driver or state.gpu.installed
    why = f"version {there} is there" if there else "no driver is there"
    if state.gpu.nouveau:
        why += "; nouveau drives the GPU, and a display on it ends with its programs"
    install = packages.install_command(state.os, names, use.options)
    refresh = [["apt-get"] + use.options + ["update"]] if state.os.package_manager == "apt" else []
    return [
        Step(
            id="gpu-driver",
            what="install NVIDIA driver " + (branch_of(state, desired) or desired.gpu_driver),
            why=f"{len(state.gpu.devices)} NVIDIA device(s), {why}",
            destroys=[NOUVEAU] if state.gpu.nouveau else [],
            commands=use.commands + refresh + streams + [install],
            action="install_gpu_driver",
            role="gpu",
            args={
                "manager": state.os.package_manager,
                "names": names,
                "streams": streams,
                "repositories": use._asdict(),
                "kernels": _kernels(state, desired)[:1],
            },
        )
    ]


def _kernels(state: State, desired: Desired) -> List[str]:
    """Releases that need the module: the kernel that runs and the one that will."""
    after = kernel.boots(state, desired) if kernel.needs_boot(state, desired) else ""
    return list(dict.fromkeys(item for item in (state.kernel.running, after) if item))


def packages_of(state: State, desired: Desired) -> Optional[Tuple[List[List[str]], List[str]]]:
    """Commands for dnf's module stream, and packages; None for unknown systems."""
    where, _ = source(state, desired)
    if where is None or not state.os.package_manager:
        return None
    branch = branch_of(state, desired)
    chosen = where.open if where.open and _open(state, branch) else where.proprietary
    # By name, if the newest branch does not support the GPU.
    named = desired.gpu_driver.isdigit() or (branch and branch == last_branch(state) != "")
    text = chosen.branch if named and chosen.branch else chosen.newest
    stream = chosen.branch_stream if named else chosen.newest_stream
    words = {"branch": branch, "flavour": state.kernel.running.rsplit("-", 1)[-1]}
    names: List[str] = []
    for release in _kernels(state, desired):
        source_of = desired.kernel_source if "elrepo" in release else ""
        header = where.headers.get(source_of, where.headers.get("", ""))
        plain = kernelinstall.package_release(state.os, release)
        for word in [header] + text.split():
            names += [word.format(release=plain, **words)] if word else []
    manager = [state.os.package_manager, "module"]
    module = "nvidia-driver:" + stream.format(**words)
    streams = (
        [manager + ["reset", "-y", "nvidia-driver"], manager + ["enable", "-y", module]] if stream else []
    )
    return streams, list(dict.fromkeys(names))


def _open(state: State, branch: str) -> bool:
    """NVIDIA's open kernel modules support the GPUs."""
    known = cuda.architectures(state.gpu.ids)
    return all(item.open_modules for item in known) and (not branch or int(branch) >= cuda.OPEN_SINCE)


def builds_modules(state: State, desired: Desired) -> bool:
    """The driver's modules are built on the host, with its own key at best."""
    where, _ = source(state, desired)
    return where is not None and not where.signed


def arguments(state: State, desired: Desired) -> List[str]:
    """Kernel arguments that keep nouveau from the GPU."""
    if not desired.gpu_driver or not is_used(state, desired):
        return []
    return [word for word in _WITHOUT_NOUVEAU if state.gpu.nouveau or word in state.kernel.cmdline]


def reboot_reasons(state: State, desired: Desired) -> List[str]:
    """Why the host must reboot for its driver."""
    if not desired.gpu_driver or not is_used(state, desired):
        return []
    found = []
    if state.gpu.nouveau:
        found.append("nouveau has the GPU until then")
    if state.gpu.driver and changes(state, desired):
        found.append("the loaded NVIDIA driver changes")
    elif state.gpu.driver and state.gpu.installed not in ("", state.gpu.driver):
        found.append(f"NVIDIA driver {state.gpu.installed} is installed and {state.gpu.driver} loaded")
    return found


def plan_loading(state: State, desired: Desired) -> List[Step]:
    """Steps that load the driver without a reboot, keep it loaded, and test it."""
    if not is_used(state, desired):
        return []
    coming = changes(state, desired) and packages_of(state, desired) is not None
    if not (coming or state.gpu.driver or (desired.gpu_driver and state.gpu.installed)):
        return []
    reboots = bool(reboot_reasons(state, desired))
    steps = gpucheck.plan_load() if not state.gpu.driver and not reboots else []
    where, _ = source(state, desired)
    driver = will_run(state, desired) or desired.gpu_driver
    fabric = gpufabric.plan(state, desired, where, driver) if where else []
    return steps + fabric + gpucheck.plan(state, desired, again=coming or reboots or bool(fabric))


def will_run(state: State, desired: Desired) -> str:
    """Version of the future driver: 550.90.07, or 550 for any of a branch."""
    if changes(state, desired):
        return branch_of(state, desired)
    return state.gpu.installed or state.gpu.driver


# One GPU per kind of kernel modules: an A10, and a V100 for those before Turing.
_BUNDLED_GPUS = ("2236", "1db4")


class BundledDriver(NamedTuple):
    """Packages of one driver, streams of dnf's modules, and repositories to enable."""

    names: List[str]
    streams: List[str]
    repositories: List[str]


def kernel_packages(os: OsInfo) -> List[str]:
    """How the names of packages begin that a driver needs for one kernel."""
    family = families.find(os)
    return family.gpu.per_kernel if family else []


def bundle_drivers(os: OsInfo, desired: Desired) -> List[BundledDriver]:
    """Drivers of the inventory's choice for unobserved hosts, with fabric managers of the same version."""
    release = "" if desired.kernel_version in ("", "newest") else desired.kernel_version
    desired = desired._replace(kernel_version="")
    elrepo = desired.kernel_source in kernelinstall.ELREPO
    found = []
    for device in _BUNDLED_GPUS:
        # A kernel of ELRepo is known by its name.
        state = State(
            os=os,
            kernel=KernelState(running=release or ("newest.elrepo" if elrepo else "newest")),
            gpu=Gpu(["0000:00:07.0"], ids=[device]),
        )
        last, branch = last_branch(state), branch_of(state, desired)
        where, packed = source(state, desired)[0], packages_of(state, desired)
        if where is None or packed is None or (last and branch and int(branch) > int(last)):
            continue
        streams, names = packed
        fabric = gpufabric.package(where, branch) if desired.gpu_fabric_manager else ""
        # Without a branch in its name it is of the stream that is enabled, as the driver.
        names = [_newest(os, name) for name in names] + ([fabric] if fabric else [])
        item = BundledDriver(names, [argv[-1] for argv in streams if "enable" in argv], where.repositories)
        if item not in found:
            found.append(item)
    return found


def _newest(os: OsInfo, name: str) -> str:
    """Name packages of the newest kernel by their metapackage."""
    if "newest" not in name:
        return name
    if os.package_manager != "apt":
        return name.split("-newest")[0]
    return name.replace("newest", kernelinstall.meta_package(os).rpartition("-")[2])


def _install_gpu_driver(system: System, args: Dict[str, Any]) -> Applied:
    use = repositories.Use(**args["repositories"])
    names: List[str] = args["names"]
    before = packages.observe(system, OsInfo(package_manager=args["manager"]), names)
    if args["streams"] and not all(before.values()):
        if use.path:
            system.write(use.path, use.text, use.mode)
        for argv in args["streams"]:
            system.check(argv[:1] + use.options + argv[1:], timeout=600)
    installed = packages.apply(system, args["manager"], names, use)
    for release in args["kernels"]:
        if not _installed(system, release):
            raise CommandError(
                f"the packages of the driver are installed, but kernel {release} has no module nvidia: if it "
                "is built here, see /var/lib/dkms/nvidia/*/build/make.log; if its headers or modules are no "
                "longer available, take a newer kernel (kernel_version: newest)"
            )
    return Applied(bool(installed), "installed " + ", ".join(installed) if installed else "all are installed")


ACTIONS: Dict[str, Action] = {"install_gpu_driver": _install_gpu_driver}
