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
    return "{}={}*".format(name, version) if manager == "apt" else "{}-{}".format(name, version)


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
    use = repositories.use(state.os, packages.given(desired), where.repositories)
    install = packages.install_command(state.os, [_exactly(manager, name, driver)], use.options)
    start = ["systemctl", "enable", "--now", SERVICE]
    there = "{} is there".format(gpu.fabric) if gpu.fabric else "it is not installed"
    return [
        Step(
            id="gpu-fabric",
            what="start nvidia-fabricmanager"
            if right
            else "install nvidia-fabricmanager of driver {} and start it".format(driver),
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
    said = "{} NVSwitch(es): CUDA needs nvidia-fabricmanager {} with them".format(gpu.switches, driver)
    if not desired.gpu_fabric_manager:
        return ["{}, and gpu_fabric_manager is false".format(said)]
    if not where.fabric:
        return ["{}, of which {} has no package".format(said, families.title(state.os))]
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
        raise CommandError("{0} does not stay up: see journalctl -u {0}".format(SERVICE))
    return Applied(True, "nvidia-fabricmanager {} runs, at the next boot too".format(driver))


def _install(system: System, args: Dict[str, Any], driver: str) -> None:
    manager, use = args["manager"], repositories.Use(**args["repositories"])
    if use.path:
        system.write(use.path, use.text)
    name = args["package"].format(branch=driver.split(".")[0])
    command = packages.install_command(
        OsInfo(package_manager=manager), [_exactly(manager, name, driver)], use.options
    )
    result = packages.run_install(system, manager, command, use.options)
    if not result.ok:
        raise CommandError(
            "{}: it must have exactly the driver's version, {}: if no repository has that, update the driver "
            "(gpu_driver: newest)".format(packages.first_errors(result), driver)
        )
    if _version(system) != driver:
        raise CommandError(
            "{} said that it installed {} {}, but {} --version says {!r}".format(
                manager, name, driver, _PROGRAM, _version(system)
            )
        )


ACTIONS: Dict[str, Action] = {"run_gpu_fabric": _run}
