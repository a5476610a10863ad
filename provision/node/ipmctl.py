"""Optane modules of bare metal: memory mode and App Direct goals."""

import re
from typing import Dict, List

from . import mount, ndctl
from .command import System
from .part import Part
from .state import Dimms, Region, State
from .step import Action, Desired, Step

BROKEN = "02.00.00.3809"  # accepts goals and never applies them
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LOSES = 0.05  # modules keep a little for themselves: that much Inaccessible is no sign of trouble


def parse_version(text: str) -> str:
    """Version of ``ipmctl version``."""
    match = re.search(r"Version\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else ""


def parse_memory_resources(text: str) -> Dict[str, int]:
    """PMemModule column of ``ipmctl show -memoryresources``, in bytes: Volatile, AppDirect, …"""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 4:
            match = re.fullmatch(r"([\d.]+) (\w+)", cells[2])
            if match and match.group(2) in _UNITS:
                found[cells[0]] = int(float(match.group(1)) * _UNITS[match.group(2)])
    return found


def parse_goals(text: str) -> List[str]:
    """Pending goals of ``ipmctl show -goal``, one per socket: memorymode, appdirect or mixed."""
    found: Dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) >= 5 and cells[0].startswith("0x"):
            volatile, direct = not cells[2].startswith("0"), not cells[3].startswith("0")
            found[cells[0]] = "mixed" if volatile and direct else "memorymode" if volatile else "appdirect"
    return [found[socket] for socket in sorted(found)]


def parse_sockets(text: str) -> List[int]:
    """Sockets with modules, from ``ipmctl show -d SocketID -dimm``."""
    found = re.findall(r"SocketID=(?:0x)?([0-9a-fA-F]+)", text)
    return sorted({int(number, 16) for number in found})


def observe(system: System) -> Dimms:
    """Capacities and goals; all zero when ipmctl is not installed."""
    if not system.which("ipmctl"):
        return Dimms()
    resources = parse_memory_resources(system.run(["ipmctl", "show", "-memoryresources"]).out)
    sockets = parse_sockets(system.run(["ipmctl", "show", "-d", "SocketID", "-dimm"]).out)
    return Dimms(
        ipmctl=parse_version(system.run(["ipmctl", "version"]).out),
        physical=resources.get("Physical", 0),
        volatile=resources.get("Volatile", 0),
        app_direct=resources.get("AppDirect", 0),
        inaccessible=resources.get("Inaccessible", 0),
        goals=parse_goals(system.run(["ipmctl", "show", "-goal"]).out),
        sockets=sockets,
    )


def needs_app_direct(state: State) -> bool:
    """The modules hold no App Direct capacity, and no region shows that they do."""
    return not state.dimms.app_direct and not state.regions


def problems(state: State) -> List[str]:
    """Why goals cannot be trusted on this host."""
    if state.dimms.ipmctl == BROKEN:
        return ["ipmctl {} accepts goals but does not apply them; install another version".format(BROKEN)]
    return []


def _goal(what: str, argument: str, why: str, destroys: List[str]) -> Step:
    return Step(
        id="dimm-goal",
        what="set the goal of all modules to " + what,
        why=why,
        destroys=destroys,
        # One command for the modules of all sockets: goals of single sockets need a reboot each.
        commands=[["ipmctl", "create", "-f", "-goal", argument]],
        action="create_goal",
        args={"goal": argument},
    )


def plan_memory(state: State, desired: Desired) -> Part:
    """Memory mode: DRAM becomes a cache of the modules; every namespace goes."""
    if state.dimms.volatile and not state.dimms.app_direct and not state.dimms.goals:
        return Part(problems=problems(state))
    if state.dimms.goals and set(state.dimms.goals) == {"memorymode"}:
        return Part(reboot_why="the goal of the modules waits for a boot", problems=problems(state))
    before: List[Step] = []
    lost: List[str] = []
    for item in state.namespaces:
        before += mount.unmount_step(state, item.blockdev) if item.blockdev else []
    before += mount.forget_step(state, desired)
    for item in state.namespaces:
        data = ndctl.data_in(state, item)
        lost += data
        before.append(
            Step(
                id="destroy-" + item.dev,
                what="destroy " + item.dev,
                why="memory mode leaves no room for namespaces",
                destroys=data,
                commands=[["ndctl", "destroy-namespace", "-f", item.dev]],
                action="destroy_namespace",
                args={"namespace": item.dev},
            )
        )
    before.append(_goal("memory mode", "memorymode=100", "the modules are not in memory mode", lost))
    return Part(
        before=before,
        reboot_why="the firmware applies the goal at boot",
        notes=[
            "a firmware fixed to App Direct leaves the capacity Inaccessible: it is checked after the boot"
        ],
        problems=problems(state),
    )


def predicted(state: State) -> State:
    """The state after an App Direct goal was applied: one empty region a socket."""
    count = len(state.dimms.sockets) or 1
    size = state.dimms.physical // count
    regions = [Region("region{}".format(item), size=size, available=size) for item in range(count)]
    return state._replace(regions=regions)


def plan_app_direct(state: State, later: Part) -> Part:
    """App Direct on all sockets and a boot, then ``later``: what follows on the predicted regions."""
    found = problems(state) + later.problems
    if state.dimms.goals and set(state.dimms.goals) == {"appdirect"}:
        return later._replace(reboot_why="the goal of the modules waits for a boot", problems=found)
    why = "the modules hold no persistent capacity"
    step = _goal("App Direct", "persistentmemorytype=appdirect", why, [])
    return later._replace(
        before=[step] + later.before,
        reboot_why="the firmware applies the goal at boot",
        problems=found,
        notes=later.notes + ["regions are one per socket, as far as can be told before the boot"],
    )


ACTIONS: Dict[str, Action] = {}
