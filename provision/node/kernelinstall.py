"""Install a kernel beside the running one, which stays the default."""

import os as operating_system
import platform
import re
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import bootentry, bootloader, families, repositories, secureboot
from .command import CommandError, System
from .family import KernelSource
from .packages import first_errors
from .state import OsInfo
from .step import Applied

# Options that decide whether a mode is possible.
OPTIONS = (
    "CONFIG_DEV_DAX_CXL",
    "CONFIG_DEV_DAX_KMEM",
    "CONFIG_FS_DAX",
    "CONFIG_NUMA",
    "CONFIG_NUMA_BALANCING",
    "CONFIG_X86_PMEM_LEGACY",
)
ELREPO = ("elrepo-lt", "elrepo-ml")
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive"}
_LOCK_SECONDS = 300


def version(release: str) -> Tuple[int, ...]:
    """All numbers of a release, for comparing: 5.15.0-91-generic → (5, 15, 0, 91)."""
    return tuple(int(number) for number in re.findall(r"\d+", release))


def parse_config(text: str) -> Dict[str, str]:
    """The ``OPTIONS`` that a ``/boot/config-*`` file sets."""
    found = {}
    for match in re.finditer(r"^(CONFIG_\w+)=([ym])$", text, re.MULTILINE):
        if match.group(1) in OPTIONS:
            found[match.group(1)] = match.group(2)
    return found


def running_release(system: System) -> str:
    """Release of the kernel that runs."""
    return system.read("/proc/sys/kernel/osrelease").strip() or platform.release()


def initial_ramdisks(release: str) -> List[str]:
    """Names in /boot that a kernel's initial ramdisk may have."""
    return ["initrd.img-" + release, f"initramfs-{release}.img", "initrd-" + release]


def installed_releases(system: System) -> List[str]:
    """Releases of the complete kernels in /boot, oldest first."""
    names = system.list("/boot")
    found = [name[8:] for name in names if name.startswith("vmlinuz-") and "rescue" not in name]
    running = running_release(system)
    whole = [item for item in found if item == running or set(initial_ramdisks(item)) & set(names)]
    return sorted(whole, key=version)


def meta_package(os: OsInfo) -> str:
    """The package that depends on the distribution's newest kernel; empty for unknown systems."""
    family = families.find(os)
    return "" if family is None else _filled(family.kernels["distribution"].newest, os, "")


def _filled(name: str, os: OsInfo, release: str) -> str:
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.architecture, os.architecture)
    return name.format(architecture=architecture, release=release)


class Package(NamedTuple):
    """The kernel to install; ``release`` is empty for the newest one of unknown name."""

    release: str
    source: str = "distribution"
    repositories: Dict[str, str] = {}  # of the inventory; KERNEL is the kernel's own


KERNEL = "kernel"


def given(kernel_url: str, archive_url: str, others: Dict[str, str]) -> Dict[str, str]:
    """The repositories that the inventory names, as ``Package`` has them."""
    named = {repositories.ARCHIVE: archive_url, KERNEL: kernel_url}
    found = {name: url for name, url in named.items() if url}
    found.update(others)
    return found


def _source(os: OsInfo, name: str) -> Optional[KernelSource]:
    family = families.find(os)
    return None if family is None else family.kernels.get(name, family.kernels["distribution"])


def names(os: OsInfo, release: str, source_name: str) -> List[str]:
    """Packages of a kernel; of the newest when ``release`` is empty."""
    source = _source(os, source_name)
    if source is None:
        return []
    found = source.pinned if release else [source.newest]
    for end, more in source.by_suffix.items():
        found = found + (more if release.endswith(end) else [])
    return [_filled(name, os, package_release(os, release)) for name in found]


def package_release(os: OsInfo, release: str) -> str:
    """A release as package names have it; rpm leaves the architecture out: kernel-lt-5.4.278-1.el7.elrepo."""
    return release if os.package_manager == "apt" else re.sub(r"\.(x86_64|aarch64)$", "", release)


def address(os: OsInfo, source_name: str) -> str:
    """Address of a source's packages for ``repositories.use``; empty: in the distribution's own."""
    source = _source(os, source_name)
    return "" if source is None else source.address


def install_commands(os: OsInfo, wanted: Package) -> List[List[str]]:
    """Command lines that install the wanted kernel."""
    source = _source(os, wanted.source)
    if source is None:
        return []
    use = repositories.use(os, wanted.repositories, [])
    found = names(os, wanted.release, wanted.source)
    if os.package_manager == "apt":
        install = ["install", "-y", "--no-install-recommends"]
        return use.commands + [
            ["apt-get"] + use.options + ["update"],
            ["apt-get"] + use.options + install + found,
        ]
    commands, options = list(use.commands), list(use.options)
    if source.release_rpm and KERNEL not in wanted.repositories:
        commands.append([os.package_manager, "install", "-y", source.release_rpm])
        options.append("--enablerepo=" + source.repository)
    return commands + [[os.package_manager, "install", "-y"] + options + found]


def room(system: System, release: str) -> Tuple[int, int]:
    """(bytes free for /boot, bytes that one more kernel takes), estimated by the running kernel.

    If /boot is not a file system of its own, the modules count too.
    """
    boot, modules = system.path("/boot"), system.path("/lib/modules/" + release)
    try:
        space = operating_system.statvfs(boot)
        paths = [operating_system.path.join(boot, name) for name in system.list("/boot") if release in name]
        if operating_system.path.isdir(modules) and _device(modules) == _device(boot):
            for directory, _, names in operating_system.walk(modules):
                paths += [operating_system.path.join(directory, name) for name in names]
        used = sum(operating_system.lstat(path).st_size for path in paths)
    except OSError:
        return 0, 0
    # Newer kernels are usually larger.
    return space.f_bavail * space.f_frsize, used * 5 // 4


def _device(path: str) -> int:
    return operating_system.stat(path).st_dev


def room_problem(free: int, need: int, installed: List[str]) -> str:
    """Why another kernel does not fit; empty when it does."""
    if free >= need:
        return ""
    return (
        f"/boot has {free >> 20} MiB free and another kernel needs about {(need >> 20) + 1} MiB: remove one "
        f"that is no longer used (installed: {', '.join(installed)})"
    )


def check_installed(system: System, release: str, options: List[str]) -> None:
    """CommandError unless the kernel is complete and has the options, and a signature if it needs one."""
    names = {name: _size(system, "/boot/" + name) for name in system.list("/boot")}
    if not names.get("vmlinuz-" + release):
        raise CommandError(f"kernel {release}: /boot/vmlinuz-{release} is missing or empty")
    if not any(names.get(name) for name in initial_ramdisks(release)):
        raise CommandError(f"kernel {release}: it has no initial ramdisk in /boot")
    if "config-" + release in names:
        config = parse_config(system.read("/boot/config-" + release))
        missing = [option for option in options if option not in config]
        if missing:
            raise CommandError(
                f"kernel {release} was built without {', '.join(missing)}, which the wanted mode needs; "
                "it is installed but will not be booted"
            )

    if secureboot.is_on(system) and secureboot.is_unsigned(system, "/boot/vmlinuz-" + release):
        raise CommandError(unsigned(release) + "; it is installed but will not be booted")


def unsigned(release: str) -> str:
    """The message about a kernel that Secure Boot refuses."""
    return (
        f"kernel {release} has no signature, and Secure Boot is on: GRUB would refuse it and wait at the "
        "console; take a signed kernel, or turn Secure Boot off"
    )


def _size(system: System, path: str) -> int:
    try:
        return operating_system.stat(system.path(path)).st_size
    except OSError:
        return 0


def install_kernel(system: System, args: Dict[str, Any]) -> Applied:
    """Install a kernel; the running one stays the default. A failure leaves nothing half installed."""
    release, running = args["release"], running_release(system)
    before = installed_releases(system)
    if release not in before:
        problem = room_problem(*(room(system, running) + (before,)))
        if problem:
            raise CommandError(problem)
        wanted = Package(release, args["source"], args["repositories"])
        _run_install(system, OsInfo(**args["os"]), wanted)
    elif args["os"]["package_manager"] == "apt":
        _finish_earlier(system)
    added = [item for item in installed_releases(system) if item not in before]
    release = release or (added or before)[-1]
    loader = bootloader.observe(system)
    if loader.kind and not loader.has_grubby and bootentry.find(loader.entries, release) is None:
        bootloader.regenerate(system, loader)
        loader = bootloader.observe(system)
        if bootentry.find(loader.entries, release) is None:
            raise CommandError(f"{loader.config_path} has no entry of kernel {release}")
    # The package makes its kernel the default, but a failed trial must return to the running one.
    if loader.has_grubby or (loader.kind and bootloader.default_release(loader) == release != running):
        bootloader.set_default(system, running)
    # On EL the package copies the arguments of the running boot, which may be a trial.
    copied = bootloader.leftovers(bootloader.observe(system)) if added else []
    if copied:
        bootloader.edit_boot_arguments(system, {"add": [], "remove": copied})
    check_installed(system, release, args["options"])
    if not added:
        return Applied(False, f"kernel {release} is installed")
    return Applied(True, f"installed kernel {release}; {running} stays the default")


def _run_install(system: System, os: OsInfo, wanted: Package) -> None:
    """Run the package manager; a CommandError leaves no half-installed package behind."""
    apt = os.package_manager == "apt"
    if apt:
        _finish_earlier(system)
    loader = bootloader.observe(system)
    menu = system.read(loader.config_path) if loader.kind else ""
    use = repositories.use(os, wanted.repositories, [])
    for argv in install_commands(os, wanted):
        if argv[0] == "write":
            system.write(argv[1], argv[2], use.mode)
            continue
        extra = ["-o", f"DPkg::Lock::Timeout={_LOCK_SECONDS}"] if apt else []
        result = system.run(argv[:1] + extra + argv[1:], timeout=3600, environment=_ENVIRONMENT)
        # Without network the index cannot be refreshed, but may suffice.
        if result.ok or argv[-1] == "update":
            continue
        untrusted = repositories.signature_problem(result.err + "\n" + result.out, use)
        if untrusted:
            raise CommandError(untrusted)
        free = room(system, running_release(system))[0]
        said = "{} ({}; /boot had {} MiB free)".format(
            result._replace(argv=argv, err="", out="").explain(), first_errors(result), free >> 20
        )
        left = _remove_half_installed(system) if apt else ""
        if menu and not bootloader.observe(system).entries:
            system.write(loader.config_path, menu, 0o444)
        raise CommandError(said + left)


def _finish_earlier(system: System) -> None:
    """Let dpkg finish an installation of kernels that was killed; CommandError for other packages.

    A package that was killed while unpacking is installed again later.
    """
    deadline = time.time() + _LOCK_SECONDS
    while True:
        broken = _half_installed(system)
        if not broken:
            return
        if not all(name.startswith("linux-") for name in broken):
            raise CommandError(
                f"dpkg has half-installed packages already: {', '.join(broken)}; repair them first (dpkg "
                "--configure -a)"
            )
        done = system.run(["dpkg", "--configure", "-a"], timeout=3600, environment=_ENVIRONMENT)
        # The package manager of the killed run may still be running.
        if "lock" not in done.err or time.time() > deadline:
            return
        time.sleep(5)


def _half_installed(system: System) -> List[str]:
    """Packages that dpkg has half installed."""
    text = system.run(["dpkg-query", "-W", "-f", "${Package}\\t${db:Status-Status}\\n"]).out
    rows = [line.split("\t") for line in text.splitlines()]
    done = ("installed", "config-files", "not-installed", "triggers-awaited", "triggers-pending")
    return [row[0] for row in rows if len(row) == 2 and row[1] not in done]


def _remove_half_installed(system: System) -> str:
    """Remove what a failed installation left; returns the end of a message about it."""
    names = _half_installed(system)
    if not names:
        return "; nothing was left half-installed"
    # apt cannot remove a package that is not fully unpacked.
    for argv in (["apt-get", "purge", "-y"], ["dpkg", "--purge", "--force-remove-reinstreq"]):
        if _half_installed(system):
            system.run(argv + names, timeout=1800, environment=_ENVIRONMENT)
    left = _half_installed(system)
    if left:
        return f"; half-installed packages are left: {', '.join(left)} (dpkg --purge them)"
    return "; half-installed packages were removed: " + ", ".join(names)
