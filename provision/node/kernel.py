"""Kernels: the installed ones, their options, and the way to another one."""

import re
from typing import Any, Dict, List, Optional, Tuple

from . import bootloader, families, grubdefaults, kernelinstall, platforms, repositories, secureboot
from .command import System
from .kernelinstall import (
    ELREPO,
    Package,
    install_commands,
    installed_releases,
    meta_package,
    parse_config,
    room,
    room_problem,
    running_release,
    version,
)
from .platform_base import KernelOption
from .state import Bootloader, KernelState, OsInfo, State
from .step import Action, Applied, Desired, Step

# Failed trial boots, one per line: WHAT, WHEN and WHY, separated by tabs; WHAT is a release or arguments.
FAILED = "/var/lib/oeprov/failed-kernels"  # kernels and arguments that failed their trial boot


def series(release: str) -> Tuple[int, ...]:
    """(major, minor)."""
    return version(release)[:2]


def parse_apt_candidate(text: str) -> str:
    """The release in ``apt-cache depends`` of the distribution's kernel package."""
    found = re.findall(r"Depends: linux-image-(?:unsigned-)?(\d\S+)", text)
    return str(max(found, key=version)) if found else ""


def observe(system: System, os: OsInfo, desired: Desired, loader: Bootloader) -> KernelState:
    """Observe the running kernel and those in /boot."""
    config = {}
    for name in system.list("/boot"):
        if name.startswith("config-"):
            config[name[7:]] = parse_config(system.read("/boot/" + name))
    found = system.run(["grubby", "--default-kernel"])
    default = found.out.strip().rsplit("vmlinuz-", 1)[-1] if found.ok else bootloader.default_release(loader)
    available = ""
    if desired.kernel_version == "newest" and os.package_manager == "apt":
        available = parse_apt_candidate(system.run(["apt-cache", "depends", meta_package(os)]).out)
    running, secure = running_release(system), secureboot.is_on(system)
    # A kernel without a menu entry was not installed completely.
    entered = [item.release for item in loader.entries] + [running]
    state = KernelState(
        running=running,
        installed=[item for item in installed_releases(system) if item in entered or not loader.entries],
        available=available,
        default=default,
        cmdline=system.read("/proc/cmdline").split(),
        config=config,
        failed=[line for line in system.read(FAILED).splitlines() if line.strip()],
        secure_boot=secure,
    )
    if secure and desired.kernel_version:
        state = state._replace(
            elrepo_key="elrepo" in secureboot.keys(system).lower(),
            unsigned=[
                item for item in state.installed if secureboot.is_unsigned(system, "/boot/vmlinuz-" + item)
            ],
        )
    if not needs_install(State(kernel=state), desired):
        return state
    free, need = room(system, state.running)
    return state._replace(boot_free=free, boot_need=need)


def target(state: State, desired: Desired) -> str:
    """Release that should run; empty: the running one, or the newest, whose name is unknown yet."""
    if desired.kernel_version == "newest":
        return state.kernel.available
    return desired.kernel_version


def needs_install(state: State, desired: Desired) -> bool:
    """The wanted kernel is not installed; for an unknown newest one: no kernel of its source is."""
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


def boots(state: State, desired: Desired) -> str:
    """Release that the next boot starts; empty if it is unknown before the installation."""
    wanted = target(state, desired)
    if wanted or needs_install(state, desired):
        return wanted
    return ([item for item in state.kernel.installed if _from_source(item, desired)] or [""])[-1]


def _from_source(release: str, desired: Desired) -> bool:
    """The release may come from the wanted source; ELRepo's have its name in theirs."""
    return "elrepo" in release if desired.kernel_source in ELREPO else True


def _given(os: OsInfo, desired: Desired) -> Dict[str, str]:
    """The repositories for the kernel: the inventory's, and the archives of sources that have moved."""
    family = families.find(os)
    source = None if family is None else family.kernels.get(desired.kernel_source)
    url = desired.kernel_repository_url
    if not url and source is not None and kernelinstall.KERNEL not in desired.runtime_repositories:
        url = source.archive
    archive = repositories.archive(os, desired.kernel_archive_url)
    return kernelinstall.given(url, archive, desired.runtime_repositories)


def plan_install(state: State, desired: Desired, mkconfig: List[str]) -> List[Step]:
    """The step that installs the wanted kernel; ``mkconfig`` regenerates the menu (may be empty)."""
    if not needs_install(state, desired):
        return []
    wanted = target(state, desired)
    given = _given(state.os, desired)
    commands = install_commands(state.os, Package(wanted, desired.kernel_source, given))
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
            role="kernel",
            preparing=True,
            args={
                "release": wanted,
                "source": desired.kernel_source,
                "repositories": given,
                "options": required_options(state, desired),
                "os": {
                    "id": state.os.id,
                    "version": state.os.version,
                    "family": state.os.family,
                    "architecture": state.os.architecture,
                    "package_manager": state.os.package_manager,
                },
            },
        )
    ]


def plan_default(state: State, desired: Desired) -> List[Step]:
    """The step that makes the wanted kernel the default once it is healthy."""
    if not desired.kernel_version:
        return []
    wanted = target(state, desired)
    if not needs_boot(state, desired) and state.kernel.default in ("", wanted or state.kernel.running):
        return []
    why = "it runs, another is the default"
    if needs_boot(state, desired):
        why = "it booted on trial and is healthy"
    return [
        Step(
            id="kernel-default",
            what="make {} the default".format(wanted or "the new kernel"),
            why=why,
            commands=[_default_command(state, wanted)],
            action="set_default_kernel",
            role="kernel",
            args={"release": wanted},
        )
    ]


def on_trial(state: State, desired: Desired, change: bootloader.Change) -> bool:
    """The next reboot is a trial: of another kernel, or of arguments that no boot has had."""
    add, remove = bootloader.pending(state, change)
    new_arguments = bool(add or remove) and bootloader.reboot_needed(state, change)
    return desired.kernel_trial_boot and (needs_boot(state, desired) or new_arguments)


def reboot_step(
    state: State,
    desired: Desired,
    reasons: List[str],
    change: bootloader.Change,
    trial: bool,
    pmem_stays: bool,
) -> Step:
    """The reboot, with what is checked after it; ``pmem_stays``: it does not change persistent memory."""
    add, remove = bootloader.pending(state, change)
    new = needs_boot(state, desired)
    release = boots(state, desired) if new else state.kernel.running
    what, commands = "reboot", []
    if trial:
        what = "boot {} once on trial".format(release or "the new kernel")
        if not new:
            what = f"boot once on trial: {bootloader.describe(add, remove)}"
        words = " ".join(["<entry of {}>".format(release or "the new kernel")] + bootloader.signed(change))
        commands.append(["write", bootloader.trial_path(state.bootloader), words])
        commands.append([bootloader.tool(state.bootloader, "reboot"), "oeprov-trial"])
    elif new:
        commands.append(_default_command(state, release))
    return Step(
        id="reboot",
        what=what,
        why="; ".join(reasons) + (" (an unhealthy boot returns to the old kernel)" if trial else ""),
        reboots=True,
        commands=commands + [["systemctl", "reboot"]],
        action="reboot",
        role="kernel",
        disturbs=True,
        args={
            "release": release,
            "trial": trial,
            "arguments": change.add,
            "absent_arguments": change.remove,
            "pmem_stays": pmem_stays,
            # Half of kernel_reboot_timeout, which must suffice for the way back too.
            "trial_limit": max(120, min(900, desired.kernel_reboot_timeout // 2)),
            "failure_key": release if new else bootloader.key(add, remove),
        },
    )


def _default_command(state: State, release: str) -> List[str]:
    if state.bootloader.has_grubby:
        return ["grubby", "--set-default", "/boot/vmlinuz-" + (release or "<new>")]
    entry = "<entry of {}>".format(release or "the new kernel")
    return [bootloader.tool(state.bootloader, "set-default"), entry]


def required_options(state: State, desired: Desired) -> List[str]:
    """Kernel options that the wanted mode depends on."""
    return [item.name for item in platforms.get(desired.kind).needed_options(state, desired)]


def problems(state: State, desired: Desired) -> List[str]:
    """Why the kernel that will run lacks something, or why the way to it is not safe."""
    found = []
    release = boots(state, desired) if needs_boot(state, desired) else state.kernel.running
    if release:
        found += _lacking(release, state, desired)
    if desired.kernel_version:
        found += _source_problems(state, desired) + _signature_problems(state, desired)
    if desired.kernel_repository_url and desired.kernel_version and state.os.package_manager == "apt":
        found.append(
            f"kernel_repository_url is for EL hosts; on {state.os.id} add the repository to "
            "/etc/apt/sources.list.d yourself"
        )
    if needs_boot(state, desired) and not state.bootloader.kind:
        found.append(f"there is no {grubdefaults.DEFAULTS}: oeprov boots another kernel through GRUB only")
    if needs_install(state, desired):
        problem = room_problem(state.kernel.boot_free, state.kernel.boot_need, state.kernel.installed)
        found += [problem] if problem else []
    loader = state.bootloader
    if plan_default(state, desired) and not loader.has_grubby and not loader.saved_default:
        problem = bootloader.default_problem(loader)
        found += [problem] if problem else []
    if release and (needs_boot(state, desired) or plan_default(state, desired)):
        found += failed_before(state, desired, release)
    return found


def _source_problems(state: State, desired: Desired) -> List[str]:
    """Why the wanted source has no kernels for this system."""
    family, source = families.find(state.os), desired.kernel_source
    if family is None:
        return []
    if source not in family.kernels:
        return [
            f"kernel_source {source}: ELRepo is for EL hosts, this is {families.title(state.os)}; use one "
            f"of: {', '.join(family.kernels)}"
        ]
    return []


def _signature_problems(state: State, desired: Desired) -> List[str]:
    """Why Secure Boot would refuse the wanted kernel and wait at the console."""
    if not state.kernel.secure_boot or not needs_boot(state, desired):
        return []
    release = boots(state, desired)
    if release in state.kernel.unsigned:
        return [kernelinstall.unsigned(release)]
    if state.kernel.elrepo_key or not ("elrepo" in release or desired.kernel_source in ELREPO):
        return []
    return [
        "Secure Boot is on, and this machine does not know ELRepo's key: GRUB would refuse {} and wait at "
        "the console; enroll the key first (mokutil --import SECURE-BOOT-KEY-elrepo.org.der, from "
        "https://elrepo.org, and a reboot at the console), turn Secure Boot off, or take kernel_source: "
        "distribution".format("kernel " + release if release else "its kernels")
    ]


def notes(state: State, desired: Desired) -> List[str]:
    """What only the installation will show, and trials that are repeated."""
    found = []
    family = families.find(state.os)
    source = None if family is None else family.kernels.get(desired.kernel_source)
    moved = "" if source is None or desired.kernel_repository_url else source.archive
    if (
        moved
        and moved == _given(state.os, desired).get(kernelinstall.KERNEL)
        and needs_install(state, desired)
    ):
        found.append(
            f"kernel_source {desired.kernel_source}: its kernels for {families.title(state.os)} are archived "
            f"and come from {moved}; set kernel_repository_url to use another mirror of that archive"
        )
    if desired.kernel_version == "newest" and not state.kernel.available and not needs_boot(state, desired):
        found.append(
            f"kernel_version is newest, but no package list is available: kernel {state.kernel.running} stays"
        )
    if state.kernel.secure_boot and needs_install(state, desired) and desired.kernel_repository_url:
        found.append(
            f"Secure Boot is on: a kernel of {desired.kernel_repository_url} must be signed with a key that "
            "this machine knows; before the boot oeprov only checks that it has a signature"
        )
    need = _needed(state, desired)
    release = boots(state, desired)
    if need and needs_install(state, desired) and _is_backported(release) and series(release) < need.since:
        found.append(
            f"kernel {release} may have {need.name} as a vendor backport; oeprov checks this after "
            "installation, before the boot"
        )
    return found + (tried_again(state, desired, release) if needs_boot(state, desired) else [])


def _needed(state: State, desired: Desired) -> Optional[KernelOption]:
    """The option that decides how new the kernel must be."""
    found = [item for item in platforms.get(desired.kind).needed_options(state, desired) if item.since]
    return max(found, key=lambda item: item.since) if found else None


def _is_backported(release: str) -> bool:
    """The vendor backports features of later kernels, as EL does since 8, so the number says little.

    ELRepo does not, though its releases have EL's name in them.
    """
    vendor = re.search(r"\.(el|al|an)\d", release) and "elrepo" not in release
    return bool(vendor) and series(release) >= (4, 18)


def _lacking(release: str, state: State, desired: Desired) -> List[str]:
    """Why this kernel cannot do the mode: by its options, or by its number if they are unknown."""
    need, config = _needed(state, desired), state.kernel.config.get(release)
    since = ".".join(map(str, need.since)) if need else ""
    found = []
    if config is not None:
        missing = [option for option in required_options(state, desired) if option not in config]
        found = [
            "kernel {} was built without {}, which {} needs; set kernel_version: newest or a "
            "release{}".format(release, option, desired.pmem_mode, f" from {since} on" if since else "")
            for option in missing
        ]
    known = config is not None and not (need and need.feature)  # the options say all
    if known or need is None or series(release) >= need.since or _is_backported(release):
        return found
    wants = f"{need.feature} needs" if need.feature else "needs"
    return found + [
        f"kernel {release} is too old for {desired.pmem_mode} on {desired.kind} ({wants} {since} or newer); "
        "set kernel_version: newest or a release"
    ]


_UNWRITABLE = {"lvm": "LVM", "raid": "MD RAID"}


def trial_problems(state: State) -> List[str]:
    """Why a host would not return from a trial boot."""
    loader = state.bootloader
    if not loader.kind or loader.grubenv_on == "plain":
        return []
    without = "set kernel_trial_boot: false to do without the trial"
    if not loader.grubenv_on:
        return [
            (
                f"{bootloader.tool(loader, 'probe')} cannot tell what /boot/grub*/grubenv lies on, so GRUB "
                f"may be unable to clear a one-time entry; run {bootloader.tool(loader, 'probe')} "
                f"--target=fs on it, which says why, or {without}"
            )
        ]
    if loader.grubenv_on == "cryptodisk":
        return [
            "/boot is encrypted: GRUB asks for a passphrase at each boot, so a trial boot cannot return "
            "without you; " + without
        ]
    return [
        f"/boot/grub*/grubenv lies on {_UNWRITABLE.get(loader.grubenv_on, loader.grubenv_on)}, where GRUB "
        "cannot clear a one-time entry: a trial boot that panics would be repeated for ever; put /boot on a "
        f"plain ext4 or xfs partition, or {without}"
    ]


def _failure(state: State, what: str) -> str:
    """When and why an earlier trial of this release or these arguments failed; empty: none did."""
    for line in state.kernel.failed:
        name, when, why = (line.split("\t") + ["", ""])[:3]
        if name == what:
            return "{} failed its trial boot on {}: {}".format(
                what, when or "an unknown day", why or "no reason is recorded"
            )
    return ""


def failed_before(state: State, desired: Desired, what: str) -> List[str]:
    """A problem if that trial failed before, unless it is to be repeated."""
    failure = _failure(state, what)
    if not failure or desired.retry_trials:
        return []
    return [f"{failure}; to try again, add --retry-trials (or remove its line from {FAILED} on the host)"]


def tried_again(state: State, desired: Desired, what: str) -> List[str]:
    """A note on a failed trial that is repeated."""
    failure = _failure(state, what)
    return [failure + "; it is tried again"] if failure and desired.retry_trials else []


def _set_default_kernel(system: System, args: Dict[str, Any]) -> Applied:
    release = args["release"] or running_release(system)
    changed = bootloader.set_default(system, release)
    return Applied(changed, f"an ordinary boot starts {release}")


ACTIONS: Dict[str, Action] = {
    "install_kernel": kernelinstall.install_kernel,
    "set_default_kernel": _set_default_kernel,
}
