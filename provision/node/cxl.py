"""Regions of volatile CXL memory: what the firmware left unused, and making a region of it.

A region lasts until the host is off, so ``daxctl.UNIT`` makes it again at boot. Persistent regions and
those of several expanders are the user's decision.
"""

import re
from typing import Any, Dict, List, Tuple

from . import daxctl, devices, families
from .command import CommandError, System
from .directory import human
from .state import CxlBus, DaxDevice, State
from .step import Action, Applied, Step

# Since this kernel the drivers decide when they bind whether a CXL region or dax_hmem owns memory that the
# firmware reserved; before, the kernel decided at boot.
_OWNER_AT_BIND = (7, 1)


def observe(system: System) -> CxlBus:
    """Expanders with volatile memory, and the root decoders that take it."""
    names = sorted(system.list(devices.CXL), key=devices.order)
    sizes = {
        name: devices.number(system.read(f"{devices.CXL}/{name}/ram/size"))
        for name in names
        if re.fullmatch(r"mem\d+", name)
    }
    # Only root decoders have this file. It shows the name that the next region gets.
    decoders = {
        name: system.read(f"{devices.CXL}/{name}/create_ram_region").strip()
        for name in names
        if re.fullmatch(r"decoder\d+\.\d+", name)
    }
    return CxlBus(
        expanders={name: size for name, size in sizes.items() if size},
        decoders={name: region for name, region in decoders.items() if region},
    )


def is_dynamic(system: System, dax: DaxDevice) -> bool:
    """The device lies in a region of dynamic capacity, whose mode is dynamic_ram_a, dynamic_ram_1, …"""
    inside = f"/{dax.region}/dax_{dax.region}/" in system.link(f"{devices.DAX}/{dax.chardev}")
    mode = system.read(f"{devices.CXL}/{dax.region}/mode") if dax.region and inside else ""
    return mode.startswith("dynamic")


def notes(state: State, runs: Tuple[int, ...], boots: Tuple[int, ...]) -> List[str]:
    """What the user must know of devices without a namespace, from this kernel's version to the next."""
    found = [
        f"{name} has dynamic CXL capacity, which the fabric can take away at any time: oeprov does not use it"
        for name in state.cxl.dynamic
    ]
    of_namespaces = [item.chardev for item in state.namespaces]
    others = [dax.chardev for dax in state.dax if dax.start and dax.chardev not in of_namespaces]
    if made_by(state.files.get(daxctl.UNIT, "")):
        others = []  # the firmware reserved nothing there
    if others and runs < _OWNER_AT_BIND <= boots:
        found.append(
            f"the next kernel can give {', '.join(others)} another name: from Linux 7.1 on, memory that the "
            "firmware reserved belongs to a CXL region or to dax_hmem as their drivers bind; oeprov's unit "
            "finds the memory by its address"
        )
    return found


def create_command(decoder: str, expander: str) -> List[str]:
    """The command that makes a region of all of an expander's volatile memory."""
    return ["cxl", "create-region", "-t", "ram", "-d", decoder, "-m", expander]


def made_by(unit: str) -> List[str]:
    """Decoder and expander of the region that the text of ``daxctl.UNIT`` makes; []: none."""
    found = re.search(r"cxl create-region -t ram -d (decoder[\d.]+) -m (mem\d+)", unit)
    return list(found.groups()) if found else []


def why_not(state: State) -> str:
    """Why no region can be made; empty if one can."""
    if not state.cxl.expanders:
        return "the kernel shows no CXL device with volatile memory"
    if not state.cxl.decoders:
        return "no root decoder takes volatile memory, or the kernel is older than 6.3"
    several = [*state.cxl.expanders] if len(state.cxl.expanders) > 1 else [*state.cxl.decoders]
    if len(several) > 1:
        return f"there is a choice ({', '.join(several)}), which is yours"
    if families.lacks(state.os, "cxl") and not state.tools.cxl:
        return f"{families.title(state.os)} has no package of `cxl`"
    return ""


def create(state: State) -> Step:
    """Make a region of the only expander."""
    ((expander, size),) = state.cxl.expanders.items()
    (decoder,) = state.cxl.decoders
    return Step(
        id="cxl-region",
        what=f"create a region of {expander} ({human(size)})",
        why="the firmware made no region of the CXL memory",
        commands=[create_command(decoder, expander)],
        action="create_cxl_region",
        args={"decoder": decoder, "expander": expander},
    )


def dax_device(region: str) -> str:
    """The dax device of a region: region0 → dax0.0."""
    return region.replace("region", "dax") + ".0"


def _create_cxl_region(system: System, args: Dict[str, Any]) -> Applied:
    there = [region for region in devices.regions(system) if region.type == "ram"]
    if there:
        return Applied(False, f"{there[0].dev} is there")
    region = observe(system).decoders.get(args["decoder"], "")
    if not region:
        raise CommandError(f"{args['decoder']} takes no volatile memory: plan again")
    result = system.run(create_command(args["decoder"], args["expander"]))
    made = [item for item in devices.regions(system) if item.type == "ram"]
    if not result.ok or not made:
        raise CommandError(f"there is no region of {args['expander']}: {result.explain()}")
    # The driver that makes its device is loaded by udev.
    name = dax_device(made[0].dev)
    if not devices.wait_for(lambda: [dax for dax in devices.dax_devices(system) if dax.chardev == name]):
        raise CommandError(
            f"{made[0].dev} is there and has no device {name}: is the kernel's dax_cxl driver there "
            "(6.3 or newer)?"
        )
    return Applied(True, f"{made[0].dev} has {human(made[0].size)}")


ACTIONS: Dict[str, Action] = {"create_cxl_region": _create_cxl_region}
