"""Kernels: which are there, what they can do, and the way to another one."""

import re
from typing import Any, Dict, List, Tuple

from .command import System
from .state import KernelState, OsInfo, State
from .step import Action, Desired, Step

# Options that decide whether a mode is possible at all.
OPTIONS = ("CONFIG_DEV_DAX_KMEM", "CONFIG_FS_DAX", "CONFIG_X86_PMEM_LEGACY")
KMEM_SINCE = (5, 1)
CXL_RAM_SINCE = (6, 3)
_ELREPO = {"elrepo-lt": "kernel-lt", "elrepo-ml": "kernel-ml"}
_META = {"debian": "linux-image-{}", "ubuntu": "linux-image-generic"}


def version(release: str) -> Tuple[int, ...]:
    """All numbers of a release, for comparing: 5.15.0-91-generic → (5, 15, 0, 91)."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def series(release: str) -> Tuple[int, ...]:
    """(major, minor)."""
    return version(release)[:2]


def parse_config(text: str) -> Dict[str, str]:
    """The options that matter of a ``/boot/config-*`` file; those that are off are left out."""
    found = {}
    for match in re.finditer(r"^(CONFIG_\w+)=([ym])$", text, re.MULTILINE):
        if match.group(1) in OPTIONS:
            found[match.group(1)] = match.group(2)
    return found


def parse_apt_candidate(text: str) -> str:
    """Release that the distribution's kernel package depends on, from ``apt-cache depends``."""
    found = re.findall(r"Depends: linux-image-(?:unsigned-)?(\d\S+)", text)
    return str(max(found, key=version)) if found else ""


def observe(system: System, os: OsInfo, desired: Desired) -> KernelState:
    """Kernels of /boot and the one that runs."""
    import platform

    running = system.read("/proc/sys/kernel/osrelease").strip() or platform.release()
    names = system.list("/boot")
    installed = [name[8:] for name in names if name.startswith("vmlinuz-") and "rescue" not in name]
    config = {}
    for name in names:
        if name.startswith("config-"):
            config[name[7:]] = parse_config(system.read("/boot/" + name))
    default = ""
    found = system.run(["grubby", "--default-kernel"])
    if found.ok:
        default = found.out.strip().rsplit("vmlinuz-", 1)[-1]
    available = ""
    if desired.kernel_version == "newest" and os.package_manager == "apt":
        available = parse_apt_candidate(system.run(["apt-cache", "depends", meta_package(os)]).out)
    return KernelState(
        running=running,
        installed=sorted(installed, key=version),
        available=available,
        default=default,
        cmdline=system.read("/proc/cmdline").split(),
        config=config,
    )


def meta_package(os: OsInfo) -> str:
    """The package that always means the distribution's newest kernel."""
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.architecture, os.architecture)
    return _META.get(os.id, _META["debian"]).format(architecture)


def target(state: State, desired: Desired) -> str:
    """Release that should run; empty: the running one stays, or the newest, whose name is not known yet."""
    if desired.kernel_version == "newest":
        return state.kernel.available
    return desired.kernel_version


def needs_install(state: State, desired: Desired) -> bool:
    """The wanted kernel is not installed (for newest with an unknown name: none of its source is)."""
    if not desired.kernel_version:
        return False
    wanted = target(state, desired)
    if wanted:
        return wanted not in state.kernel.installed
    return not any(_from_source(release, desired) for release in state.kernel.installed)


def needs_boot(state: State, desired: Desired) -> bool:
    """The wanted kernel is not the one that runs."""
    if not desired.kernel_version:
        return False
    wanted = target(state, desired)
    if wanted:
        return wanted != state.kernel.running
    return needs_install(state, desired) or not _from_source(state.kernel.running, desired)


def _from_source(release: str, desired: Desired) -> bool:
    """Whether the release may come from the wanted source; ELRepo's carry its name."""
    return "elrepo" in release if desired.kernel_source in _ELREPO else True


def install_commands(state: State, desired: Desired) -> List[List[str]]:
    """Command lines that install the wanted kernel and leave the old one the default."""
    wanted = target(state, desired) if desired.kernel_version != "newest" else ""
    if state.os.package_manager == "apt":
        name = "linux-image-" + wanted if wanted else meta_package(state.os)
        return [["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", name]]
    manager = state.os.package_manager or "dnf"
    package = _ELREPO.get(desired.kernel_source, "kernel")
    # kernel-lt-5.4.278-1.el7.elrepo: the release without its architecture is what packages are named by.
    name = package + "-" + re.sub(r"\.(x86_64|aarch64)$", "", wanted) if wanted else package
    argv = [manager, "install", "-y"]
    commands = []
    if desired.kernel_source in _ELREPO:
        major = state.os.version.split(".")[0]
        url = "https://www.elrepo.org/elrepo-release-{0}.el{0}.elrepo.noarch.rpm".format(major)
        if desired.kernel_repository_url:
            argv += ["--repofrompath=oeprov-kernel," + desired.kernel_repository_url]
            argv += ["--enablerepo=oeprov-kernel"]
        else:
            commands.append([manager, "install", "-y", url])
            argv += ["--enablerepo=elrepo-kernel"]
    elif desired.kernel_repository_url:
        argv += ["--repofrompath=oeprov-kernel," + desired.kernel_repository_url]
    return commands + [argv + [name]]


def plan_install(state: State, desired: Desired, mkconfig: List[str]) -> List[Step]:
    """Installs the wanted kernel if it is not there; ``mkconfig`` regenerates the menu (may be empty)."""
    if not needs_install(state, desired):
        return []
    wanted = target(state, desired)
    commands = install_commands(state, desired)
    if state.bootloader.has_grubby and state.kernel.running:
        # The package makes itself the default; a trial must be able to fall back to the old one.
        commands.append(["grubby", "--set-default", "/boot/vmlinuz-" + state.kernel.running])
    elif mkconfig:
        commands.append(mkconfig)
    return [
        Step(
            id="kernel-install",
            what="install kernel " + wanted
            if wanted
            else "install the newest kernel of " + desired.kernel_source,
            why="{} runs; the old kernel stays the default for now".format(state.kernel.running or "another"),
            commands=commands,
            action="install_kernel",
            args={
                "release": target(state, desired),
                "source": desired.kernel_source,
                "repository_url": desired.kernel_repository_url,
                "archive_url": desired.kernel_archive_url,
                "options": required_options(desired),
            },
        )
    ]


def plan_default(state: State, desired: Desired) -> List[Step]:
    """Makes the wanted kernel the default once it runs well."""
    if not desired.kernel_version:
        return []
    wanted = target(state, desired)
    if not needs_boot(state, desired) and state.kernel.default in ("", wanted or state.kernel.running):
        return []
    release = wanted or "the new kernel"
    path = "/boot/vmlinuz-" + (wanted or "<new>")
    why = "it runs, another is the default"
    if needs_boot(state, desired):
        why = "it booted on trial and is healthy"
    if state.bootloader.has_grubby:
        command = ["grubby", "--set-default", path]
    else:
        command = [_tool(state, "set-default"), "<entry of {}>".format(release)]
    return [
        Step(
            id="kernel-default",
            what="make {} the default".format(release),
            why=why,
            commands=[command],
            action="set_default_kernel",
            args={"release": wanted},
        )
    ]


def _tool(state: State, name: str) -> str:
    return ("grub2-" if "grub2" in state.bootloader.mkconfig else "grub-") + name


def trial_command(state: State, desired: Desired) -> List[List[str]]:
    """The command that boots the wanted kernel once; none when the default changes at once."""
    release = target(state, desired) or "the new kernel"
    if not desired.kernel_trial_boot:
        if state.bootloader.has_grubby:
            return [["grubby", "--set-default", "/boot/vmlinuz-" + release]]
        return [[_tool(state, "set-default"), "<entry of {}>".format(release)]]
    return [[_tool(state, "reboot"), "<entry of {}>".format(release)]]


def required_options(desired: Desired) -> List[str]:
    """Kernel options that the wanted mode depends on."""
    if desired.pmem_mode == "system-ram" and desired.kind != "re7p":
        return ["CONFIG_DEV_DAX_KMEM"]
    if desired.pmem_mode == "fsdax":
        return ["CONFIG_FS_DAX"] + (["CONFIG_X86_PMEM_LEGACY"] if desired.kind == "re7p" else [])
    return []


def problems(state: State, desired: Desired) -> List[str]:
    """Why no kernel that will run can do what is wanted, or why the way there is not safe."""
    found = []
    release = target(state, desired) or ("" if desired.kernel_version else state.kernel.running)
    if release:
        found += _too_old(release, state, desired)
        config = state.kernel.config.get(release)
        for option in required_options(desired) if config is not None else []:
            if config is not None and option not in config:
                found.append(
                    "kernel {} was built without {}, which {} needs".format(
                        release, option, desired.pmem_mode
                    )
                )
    if desired.kernel_source in _ELREPO and desired.kernel_version and state.os.family == "debian":
        found.append(
            "kernel_source {}: ELRepo is for EL hosts, this is {}".format(desired.kernel_source, state.os.id)
        )
    if (
        desired.kernel_source in _ELREPO
        and needs_install(state, desired)
        and state.os.version.startswith("7")
        and not desired.kernel_repository_url
    ):
        found.append(
            "kernel_source {}: ELRepo has archived its el7 kernels; set kernel_repository_url to a mirror "
            "of the archive".format(desired.kernel_source)
        )
    where = {"lvm": "LVM", "raid": "MD RAID"}.get(state.bootloader.grubenv_on, "")
    if where and needs_boot(state, desired) and desired.kernel_trial_boot:
        found.append(
            "/boot/grub*/grubenv lies on {}, where GRUB cannot clear a one-time entry: a kernel on trial "
            "would stay the default; set kernel_trial_boot: false to do without the trial".format(where)
        )
    return found


def notes(state: State, desired: Desired) -> List[str]:
    """Whether newest is really the newest cannot always be told."""
    if desired.kernel_version != "newest" or state.kernel.available or needs_boot(state, desired):
        return []
    return [
        "kernel_version is newest, but what is on offer is not known: {} stays".format(state.kernel.running)
    ]


def _too_old(release: str, state: State, desired: Desired) -> List[str]:
    need: Tuple[int, ...] = ()
    if desired.pmem_mode == "system-ram" and desired.kind in ("re6p", "bare_metal_pmem"):
        need = KMEM_SINCE
    ram_region = any(region.type == "ram" for region in state.regions)
    if desired.pmem_mode == "system-ram" and desired.kind == "cxl":
        need = CXL_RAM_SINCE if ram_region or not state.regions else KMEM_SINCE
    if not need or series(release) >= need:
        return []
    return [
        "kernel {} is too old for {} on {} (needs {} or newer); set kernel_version: newest or a "
        "release".format(release, desired.pmem_mode, desired.kind, ".".join(map(str, need)))
    ]


def reboot_args(state: State, desired: Desired, arguments: List[str], absent: List[str]) -> Dict[str, Any]:
    """What must hold after the reboot: the kernel, and which arguments it was given."""
    return {
        "release": target(state, desired) if needs_boot(state, desired) else state.kernel.running,
        "trial": needs_boot(state, desired) and desired.kernel_trial_boot,
        "arguments": arguments,
        "absent_arguments": absent,
        "timeout": desired.kernel_reboot_timeout,
    }


ACTIONS: Dict[str, Action] = {}
