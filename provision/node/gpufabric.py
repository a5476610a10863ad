"""NVIDIA's fabric manager: without it, CUDA does not start on GPUs behind NVSwitches (HGX, DGX).

Its version must be that of the driver to the last digit (NVIDIA's Fabric Manager User Guide).
"""

import re
from typing import Any, Dict, List

from . import families, packages, repositories
from .command import CommandError, System
from .family import GpuDriver
from .state import Gpu, OsInfo, State
from .step import Action, Applied, Desired, Step

SERVICE = "nvidia-fabricmanager.service"
_PROGRAM = "nv-fabricmanager"
_LOADED = "/sys/module/nvidia/version"


def observe(system: System, found: Gpu) -> Gpu:
    """Add the fabric manager to ``found``, if there are switches."""
    if not found.switches:
        return found
    words = ["is-active", "is-enabled"]
    runs = all(system.run(["systemctl", word, "--quiet", SERVICE]).ok for word in words)
    return found._replace(fabric=_version(system), fabric_runs=runs)


def _version(system: System) -> str:
    """Version of the installed program; empty without one."""
    said = system.run([_PROGRAM, "--version"])
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", said.out)
    return match.group(1) if said.ok and match else ""


def package(where: GpuDriver, branch: str) -> str:
    """Name of its package for a branch of the driver; empty: there is none."""
    return where.fabric.format(branch=branch)


def _exactly(manager: str, name: str, version: str) -> str:
    """The package of a version, or of any version if only the branch is known."""
    if "." not in version:
        return name
    return f"{name}={version}*" if manager == "apt" else f"{name}-{version}"


def plan(state: State, desired: Desired, where: GpuDriver, driver: str) -> List[Step]:
    """One step that installs and starts it; ``driver``: the future version or branch, or newest."""
    gpu = state.gpu
    if not (gpu.switches and desired.gpu_fabric_manager and driver):
        return []
    right = gpu.fabric == driver
    if right and gpu.fabric_runs:
        return []
    manager, name = state.os.package_manager, package(where, driver.split(".")[0])
    if not (right or name):
        return []
    use = repositories.use(state.os, packages.given(desired, state.os), where.repositories)
    install = packages.install_command(state.os, [_exactly(manager, name, driver)], use.options)
    start = ["systemctl", "enable", "--now", SERVICE]
    there = f"{gpu.fabric} is there" if gpu.fabric else "it is not installed"
    return [
        Step(
            id="gpu-fabric",
            what="start nvidia-fabricmanager"
            if right
            else f"install nvidia-fabricmanager of driver {driver} and start it",
            why="CUDA does not start behind {} NVSwitches without it; {}".format(
                gpu.switches, "it does not run" if right else there
            ),
            commands=[start] if right else use.commands + [install, start],
            action="run_gpu_fabric",
            role="gpu",
            args={"manager": manager, "package": where.fabric, "repositories": use._asdict()},
        )
    ]


def notes(state: State, desired: Desired, where: GpuDriver, driver: str) -> List[str]:
    """Why it will not run."""
    gpu = state.gpu
    if not gpu.switches or not driver or gpu.fabric == driver:
        return []
    said = f"{gpu.switches} NVSwitch(es): CUDA needs nvidia-fabricmanager {driver} with them"
    if not desired.gpu_fabric_manager:
        return [f"{said}, and gpu_fabric_manager is false"]
    if not where.fabric:
        return [f"{said}, of which {families.title(state.os)} has no package"]
    return []


def _run(system: System, args: Dict[str, Any]) -> Applied:
    driver = system.read(_LOADED).strip()
    if not driver:
        raise CommandError("the NVIDIA driver is not loaded, and nvidia-fabricmanager needs it")
    there = _version(system)
    if there != driver:
        _install(system, args, driver)
    system.check(["systemctl", "enable", "--quiet", SERVICE])
    system.check(["systemctl", "start" if there == driver else "restart", SERVICE], timeout=600)
    if not system.run(["systemctl", "is-active", "--quiet", SERVICE]).ok:
        raise CommandError(f"{SERVICE} does not stay up: see journalctl -u {SERVICE}")
    return Applied(True, f"nvidia-fabricmanager {driver} runs, at the next boot too")


def _install(system: System, args: Dict[str, Any], driver: str) -> None:
    manager, use = args["manager"], repositories.Use(**args["repositories"])
    if use.path:
        system.write(use.path, use.text, use.mode)
    name = args["package"].format(branch=driver.split(".")[0])
    command = packages.install_command(
        OsInfo(package_manager=manager), [_exactly(manager, name, driver)], use.options
    )
    result = packages.run_install(system, manager, command, use.options)
    if not result.ok:
        raise CommandError(
            f"{packages.first_errors(result)}: it must have exactly the driver's version, {driver}: if no "
            "repository has that, update the driver (gpu_driver: newest)"
        )
    if _version(system) != driver:
        raise CommandError(
            f"{manager} said that it installed {name} {driver}, but {_PROGRAM} --version says "
            f"{_version(system)!r}"
        )


ACTIONS: Dict[str, Action] = {"run_gpu_fabric": _run}
