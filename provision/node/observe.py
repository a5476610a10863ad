"""Observe a whole host once: everything that its plan depends on."""

import os as operating_system
import re
import sys
from typing import Any, Dict, List

from . import (
    ansible_python,
    bootloader,
    build,
    daxctl,
    devices,
    drives,
    families,
    filesystem,
    flavors,
    fstab,
    gpu,
    image,
    inuse,
    kernel,
    modules,
    mount,
    numa,
    owned,
    packages,
    plan,
    platforms,
    removal,
    repositories,
    tiering,
)
from .command import System
from .family import manager_name
from .state import OsInfo, State, Tools, decode, encode
from .step import Desired

# Our files whose text decides whether a step is needed.
FILES = (mount.FSTAB, daxctl.UNIT, daxctl.ENABLED, numa.ENVIRONMENT, tiering.UNIT, tiering.ENABLED)


def parse_os_release(text: str) -> Dict[str, str]:
    """Parse KEY=value lines and remove the quotes."""
    pairs = re.findall(r"""^(\w+)=["']?([^"'\n]*)""", text, re.MULTILINE)
    return dict(pairs)


def observe_os(system: System) -> OsInfo:
    """The distribution; a derivative counts as the one that it is like."""
    release = parse_os_release(system.read("/etc/os-release"))
    name = release.get("ID", "")
    lineage = families.lineage(name, release.get("ID_LIKE", "").split())
    found = OsInfo(
        id=name, version=release.get("VERSION_ID", ""), family=lineage, name=release.get("PRETTY_NAME", name)
    )
    family = families.find(found)
    managers = [] if family is None else family.managers
    manager = next((item for item in managers if system.which(item)), "")
    return found._replace(
        architecture=operating_system.uname().machine,
        package_manager=manager_name(manager),
        python=sys.version.split()[0],
        is_root=operating_system.geteuid() == 0,
        cpu_level=build.cpu_level(system.read("/proc/cpuinfo")),
        own_python=ansible_python.observe(system),
        mirrors_gone=repositories.observe_gone(system, found),
    )


def observe(system: System, desired: Desired) -> State:
    """The state of this machine as far as ``desired`` depends on it."""
    os = observe_os(system)
    state = State(
        hostname=operating_system.uname().nodename,
        boot_id=system.read("/proc/sys/kernel/random/boot_id").strip(),
        os=os,
        packages=packages.observe(
            system, os, packages.needed(desired, os) + ansible_python.names(os, desired)
        ),
        runtime=flavors.get(desired).observe(system, os, desired),
    )
    platform = platforms.get(desired.kind)
    state = state._replace(
        drives=drives.observe(system, desired), uring_disabled=drives.observe_disabled(system, desired)
    )
    if not platform.managed:
        # Nothing else of this machine is ours to change, so nothing else is observed.
        return _with_remains(system, desired, platform.observe(system, state, desired))
    state = state._replace(image=image.observe(system))
    if not state.image.booted:
        return state  # the hardware is that of the machine where the image is built
    trouble: List[str] = []
    namespaces = devices.namespaces(system)
    blocks = [item.blockdev for item in namespaces if item.blockdev]
    blocks += [item.device for item in state.drives if item.device]
    loader = bootloader.observe(system)
    state = state._replace(
        kernel=kernel.observe(system, os, desired, loader),
        bootloader=loader,
        regions=devices.regions(system),
        namespaces=namespaces,
        filesystems=filesystem.observe(system, blocks, trouble),
        mounts=mount.parse_mounts(system.read("/proc/mounts")),
        fstab=fstab.parse(system.read(fstab.PATH)),
        dax=devices.dax_devices(system),
        numa=numa.observe_nodes(system),
        memory=numa.observe_policy(system),
        tiering=tiering.observe(system) if desired.pmem_mode == tiering.MODE else state.tiering,
        modules=modules.observe(system),
        files={path: system.read(path) for path in FILES if system.exists(path)},
        tools=observe_tools(system) if platform.has_memory else state.tools,
        gpu=gpu.observe(system, whole=platform.has_gpus),
        owned=owned.observe(system),
        jobs=inuse.observe_jobs(system),
        trouble=trouble,
    )
    state = _with_remains(system, desired, platform.observe(system, state, desired))
    # Looking for a mount's users takes long, so only mounts that the plan ends are looked at.
    part = removal.plan(state, desired) if desired.remove else plan.share(state, desired)
    users = {
        where: inuse.observe_users(system, where) for where in inuse.unmounted_by(part.before + part.after)
    }
    if loader.kind and plan.makes_trial(state, desired, part):
        state = state._replace(bootloader=loader._replace(grubenv_on=bootloader.grubenv_on(system, loader)))
    return state._replace(users={where: found for where, found in users.items() if found})


def _with_remains(system: System, desired: Desired, state: State) -> State:
    return state._replace(remains=removal.observe(system, desired, state)) if desired.remove else state


def observe_tools(system: System) -> Tools:
    """Versions of the tools for persistent memory; empty if not installed."""
    return Tools(
        ndctl=_version(system, "ndctl"), daxctl=_version(system, "daxctl"), cxl=_version(system, "cxl")
    )


def _version(system: System, tool: str) -> str:
    result = system.run([tool, "--version"])
    return result.out.strip() if result.ok else ""


def observe_node(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """``observe`` from and to plain JSON values; ``wanted`` are the fields of a Desired."""
    found: Dict[str, Any] = encode(observe(System(), decode(Desired, wanted)))
    return found
