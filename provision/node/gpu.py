"""NVIDIA devices and their driver."""

import re
from typing import Dict, List

from . import families
from .command import System
from .state import Gpu, State
from .step import Action, Desired, Step

_PCI = "/sys/bus/pci/devices"


def parse_version(text: str) -> str:
    """Driver version of /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else ""


def observe(system: System) -> Gpu:
    """NVIDIA display and 3D controllers on the PCI bus."""
    devices = []
    for name in system.list(_PCI):
        base = _PCI + "/" + name
        display = system.read(base + "/class").startswith("0x03")
        if display and system.read(base + "/vendor").strip() == "0x10de":
            devices.append(name)
    return Gpu(devices=devices, driver=parse_version(system.read("/proc/driver/nvidia/version")))


def plan(state: State, desired: Desired) -> List[Step]:
    """Installs the wanted driver; none when it runs, or when the inventory leaves the driver alone."""
    if desired.kind != "gpu" or not desired.gpu_driver or not state.gpu.devices:
        return []
    branch = state.gpu.driver.split(".")[0]
    if state.gpu.driver and desired.gpu_driver in ("newest", branch):
        return []
    commands = _install_commands(state, "" if desired.gpu_driver == "newest" else desired.gpu_driver)
    # A first driver can be loaded at once.
    if not state.gpu.driver:
        commands.append(["modprobe", "nvidia"])
    found = "version {} is loaded".format(state.gpu.driver) if state.gpu.driver else "no driver is loaded"
    return [
        Step(
            id="gpu-driver",
            what="install NVIDIA driver " + desired.gpu_driver,
            why="{} NVIDIA device(s), {}".format(len(state.gpu.devices), found),
            commands=commands,
            action="install_gpu_driver",
            args={"driver": desired.gpu_driver},
        )
    ]


def reboot_reasons(state: State, desired: Desired) -> List[str]:
    """Why the host must reboot for its driver: a loaded one stays until then."""
    return ["the loaded NVIDIA driver changes"] if plan(state, desired) and state.gpu.driver else []


def _install_commands(state: State, branch: str) -> List[List[str]]:
    family = families.of(state.os)
    if family is None:
        return []
    words = family.gpu.branch if branch and family.gpu.branch else family.gpu.newest
    filled = [word.format(branch=branch, running=state.kernel.running) for word in words]
    if state.os.package_manager == "apt":
        return [["apt-get", "update"], ["apt-get"] + filled]
    return [[state.os.package_manager] + filled]


def problems(state: State, desired: Desired) -> List[str]:
    """A GPU host without a GPU."""
    if desired.kind != "gpu":
        return []
    if not state.gpu.devices:
        return ["kind gpu, but there is no NVIDIA device on the PCI bus; correct oeprov_kind (cpu?)"]
    family = families.of(state.os)
    if family is not None and desired.gpu_driver.isdigit() and not family.gpu.branch:
        return [
            "gpu_driver {}: {} has one driver branch only; use newest".format(desired.gpu_driver, family.name)
        ]
    return []


def notes(state: State, desired: Desired) -> List[str]:
    """A GPU that cannot be used as things are."""
    if desired.kind == "gpu" and state.gpu.devices and not state.gpu.driver and not desired.gpu_driver:
        return ["no NVIDIA driver is loaded and gpu_driver is keep: training would run on the CPUs"]
    return []


ACTIONS: Dict[str, Action] = {}
