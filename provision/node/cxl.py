"""Regions of volatile CXL memory: what the firmware left unused, and making a region of it.

A region lasts until the host is off, so ``daxctl.UNIT`` makes it again at boot. Persistent regions and
those of several expanders are the user's decision.
"""

import re
from typing import Any, Dict, List

from . import devices, families
from .command import CommandError, System
from .directory import human
from .state import CxlBus, State
from .step import Action, Applied, Step


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
