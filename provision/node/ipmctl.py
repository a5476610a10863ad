"""Optane modules of bare metal: memory mode and App Direct goals."""

import re
from typing import Any, Dict, List

from . import mount, ndctl, owned, system_ram
from .command import CommandError, System
from .directory import human
from .state import Dimms, Region, State
from .step import Action, Applied, Desired, Part, Step

BROKEN = "02.00.00.3809"  # accepts goals and never applies them
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LOSES = 0.05  # share of the capacity that modules reserve, and report as Inaccessible
_MEMORY_MODE = "memorymode=100"
_APP_DIRECT = "persistentmemorytype=appdirect"
_KINDS = {_MEMORY_MODE: "memorymode", _APP_DIRECT: "appdirect"}
_NO_USABLE = 18  # exit status: there is no module that can be used
_WAITS = "the goal of the modules waits for a boot"
_APPLIES = "the firmware applies the goal at boot"


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


def parse_unhealthy(text: str) -> Dict[str, str]:
    """Modules that are not healthy, or locked, from ``ipmctl show -d …,HealthState,LockState -dimm``."""
    found = {}
    for block in text.split("---DimmID=")[1:]:
        values = dict(re.findall(r"^\s*(\w+)=(.*?)\s*$", block, re.MULTILINE))
        wrong = [values["HealthState"]] if values.get("HealthState", "Healthy") != "Healthy" else []
        wrong += ["Locked"] if "Locked" in values.get("LockState", "").split(", ") else []
        if wrong:
            found[block.split("-")[0]] = ", ".join(wrong)
    return found


def observe(system: System) -> Dimms:
    """Observe capacities and goals; all zero if ipmctl is not installed."""
    if not system.which("ipmctl"):
        return Dimms()
    resources = parse_memory_resources(system.run(["ipmctl", "show", "-memoryresources"]).out)
    listed = system.run(["ipmctl", "show", "-d", "SocketID,HealthState,LockState", "-dimm"]).out
    return Dimms(
        ipmctl=parse_version(system.run(["ipmctl", "version"]).out),
        physical=resources.get("Physical", 0),
        volatile=resources.get("Volatile", 0),
        app_direct=resources.get("AppDirect", 0),
        inaccessible=resources.get("Inaccessible", 0),
        goals=parse_goals(system.run(["ipmctl", "show", "-goal"]).out),
        sockets=parse_sockets(listed),
        unhealthy=parse_unhealthy(listed),
    )


def needs_app_direct(state: State) -> bool:
    """The modules have no App Direct capacity; if ipmctl does not know, regions show that they have."""
    if state.dimms.physical:
        return not state.dimms.app_direct
    return not state.regions


def problems(state: State) -> List[str]:
    """Why goals cannot be trusted on this host."""
    if state.dimms.ipmctl == BROKEN:
        return [f"ipmctl {BROKEN} accepts goals but does not apply them; install another version"]
    return []


def notes(state: State) -> List[str]:
    """A note on capacity that is not App Direct, beyond what modules reserve."""
    dimms = state.dimms
    if dimms.goals or not dimms.app_direct or not (dimms.volatile or mostly_inaccessible(dimms)):
        return []
    return [
        "the modules are configured in part: of {}, {} are App Direct, {} memory mode and {} Inaccessible; "
        "only the first are used, `ipmctl show -memoryresources` and `ipmctl show -region` say which".format(
            *map(human, (dimms.physical, dimms.app_direct, dimms.volatile, dimms.inaccessible))
        )
    ]


def _not_applied(state: State, argument: str) -> List[str]:
    """A problem if the goal was set before this boot and did not take effect."""
    dimms = state.dimms
    if not owned.goal_of_earlier_boot(state.owned, argument, state.boot_id):
        return []
    if _KINDS[argument] in dimms.goals:
        return [
            f"the goal {argument} was set before the last boot and is still pending: the firmware did not "
            "take it, and another boot would not help; `ipmctl show -a -dimm` says why. "
            f"Change the firmware's memory setting, then remove the line goal:{argument}:… from {owned.PATH} "
            "and run this again"
        ]
    if dimms.goals:
        return []  # another goal waits, and replaces this one
    words = (
        f"the goal {argument} was set before the last boot and had no effect: {human(dimms.inaccessible)} of "
        f"{human(dimms.physical)} are Inaccessible"
    )
    return [
        f"{words}; a firmware fixed to 1LM or App Direct does this: change its memory setting, then remove "
        f"the line goal:{argument}:… from {owned.PATH} and run this again"
    ]


def mostly_inaccessible(dimms: Dimms) -> bool:
    """More capacity is Inaccessible than modules reserve."""
    return dimms.inaccessible > _LOSES * dimms.physical


def _goal(what: str, argument: str, why: str, destroys: List[str]) -> Step:
    return Step(
        id="dimm-goal",
        what="set the goal of all modules to " + what,
        why=why,
        destroys=destroys,
        # One command for all sockets: goals of single sockets need one reboot each.
        commands=[["ipmctl", "create", "-f", "-goal", argument]],
        action="create_goal",
        disturbs=True,
        args={"goal": argument},
    )


def _wait(state: State, argument: str) -> Part:
    """Boot for the pending goal; register it first if somebody else set it, so that it is waited for once."""
    step = Step(
        id="dimm-goal-register",
        what=f"enter the pending goal {argument} in {owned.PATH}",
        why="after the boot it shows whether the firmware took the goal",
        commands=[["edit", owned.PATH, f"+goal:{argument}:<this boot>"]],
        action="register_goal",
        args={"goal": argument},
    )
    known = owned.has_goal(state.owned, argument)
    return Part(
        before=[] if known else [step],
        reboot_why=_WAITS,
        problems=problems(state) + _not_applied(state, argument),
    )


def forget_goal(state: State) -> Part:
    """Delete pending goals for memory mode, which would end App Direct at the next boot."""
    if not set(state.dimms.goals) - {"appdirect"}:
        return Part()
    step = Step(
        id="dimm-goal-forget",
        what="delete the pending goal of the modules",
        why="memory mode waits for the next boot and would take the persistent capacity away",
        commands=[["ipmctl", "delete", "-f", "-goal"]],
        action="delete_goal",
    )
    return Part(before=[step])


def plan_memory(state: State, desired: Desired) -> Part:
    """Plan memory mode: DRAM becomes a cache of the modules, and namespaces are destroyed."""
    before = system_ram.forget(state)
    for item in state.namespaces:
        before += mount.unmount_step(state, item.blockdev) if item.blockdev else []
    before += mount.forget_step(state, desired)
    if state.dimms.volatile and not state.dimms.app_direct and not state.dimms.goals:
        found = problems(state)
        if mostly_inaccessible(state.dimms):
            found.append(
                f"memory mode is on, but {human(state.dimms.inaccessible)} of {human(state.dimms.physical)} "
                "are Inaccessible: not all modules took the goal; see `ipmctl show -memoryresources` and "
                "`ipmctl show -dimm`"
            )
        return Part(before=before, problems=found)
    if state.dimms.goals and set(state.dimms.goals) == {"memorymode"}:
        wait = _wait(state, _MEMORY_MODE)
        return wait._replace(before=before + wait.before)
    steps: List[Step] = []
    lost: List[str] = []
    release_why = ""
    for item in state.namespaces:
        release = system_ram.release(state, item)
        steps += release.after
        release_why = release_why or release.reboot_why
    for item in state.namespaces:
        step = ndctl.destroy(state, item, "memory mode leaves no room for namespaces")
        lost += step.destroys
        steps.append(step)
    steps.append(_goal("memory mode", _MEMORY_MODE, "the modules are not in memory mode", lost))
    note = "a firmware fixed to App Direct leaves the capacity Inaccessible: it is checked after the boot"
    found = problems(state) + _not_applied(state, _MEMORY_MODE)
    if release_why:
        # Only a boot releases the namespaces, and the goal needs another boot.
        more = "the goal needs a second reboot: it is planned after the first"
        return Part(before=before, reboot_why=release_why, after=steps, notes=[note, more], problems=found)
    return Part(before=before + steps, reboot_why=_APPLIES, notes=[note], problems=found)


def predicted(state: State) -> State:
    """The state after an App Direct goal was applied: one empty region per socket."""
    count = len(state.dimms.sockets) or 1
    size = state.dimms.physical // count
    regions = [Region(f"region{item}", size=size, available=size) for item in range(count)]
    # Modules reserve a little, and regions are whole GiB.
    regions = [item._replace(size=item.size >> 30 << 30) for item in regions]
    return state._replace(regions=regions)


def plan_app_direct(state: State, later: Part) -> Part:
    """Plan App Direct on all sockets and a boot, then ``later`` on the predicted regions."""
    if state.dimms.goals and set(state.dimms.goals) == {"appdirect"}:
        wait = _wait(state, _APP_DIRECT)
        return later._replace(
            before=wait.before + later.before,
            reboot_why=wait.reboot_why,
            problems=wait.problems + later.problems,
        )
    found = problems(state) + _not_applied(state, _APP_DIRECT) + later.problems
    why = "the modules hold no persistent capacity"
    step = _goal("App Direct", _APP_DIRECT, why, [])
    return later._replace(
        before=[step] + later.before,
        reboot_why=_APPLIES,
        problems=found,
        notes=later.notes + ["one region per socket is expected after the boot"],
    )


def _goals(system: System) -> List[str]:
    result = system.run(["ipmctl", "show", "-goal"])
    # "No goals" comes with any exit status.
    if not result.ok and "no goal" not in result.out + result.err:
        raise CommandError(result.explain())
    return parse_goals(result.out)


def _create_goal(system: System, args: Dict[str, Any]) -> Applied:
    argument = args["goal"]
    wanted = _KINDS[argument]
    version = parse_version(system.check(["ipmctl", "version"]))
    if version == BROKEN:
        raise CommandError(f"ipmctl {BROKEN} accepts goals but does not apply them")
    sockets = parse_sockets(system.check(["ipmctl", "show", "-d", "SocketID", "-dimm"]))
    before = _goals(system)
    changed = False
    if before != [wanted] * len(sockets) or not sockets:
        result = system.run(["ipmctl", "create", "-f", "-goal", argument], timeout=600)
        changed = True
        if not result.ok:
            raise CommandError(_explain_failure(result.code, result.explain()))
    goals = _goals(system)
    if set(goals) != {wanted} or (sockets and len(goals) != len(sockets)):
        raise CommandError(
            "ipmctl took the goal {}, yet {} of {} sockets have it waiting ({})".format(
                argument, goals.count(wanted), len(sockets), ", ".join(goals) or "no goals"
            )
        )
    _register(system, argument)
    return Applied(changed, f"{len(goals)} sockets wait for a boot with {wanted}")


def _register(system: System, argument: str) -> bool:
    """Enter the goal as one of this boot; False if it is there."""
    old = [word for word in owned.observe(system) if word.startswith("goal:")]
    boot_id = system.read("/proc/sys/kernel/random/boot_id").strip()
    return owned.change(system, [owned.goal(argument, boot_id)], old)


def _register_goal(system: System, args: Dict[str, Any]) -> Applied:
    argument = args["goal"]
    if _KINDS[argument] not in _goals(system):
        raise CommandError(f"the goal {argument} is no longer pending: plan again")
    if owned.has_goal(owned.observe(system), argument):
        return Applied(False, f"{owned.PATH} has the goal {argument}")
    return Applied(_register(system, argument), f"{owned.PATH} has the goal {argument} and its boot")


def _explain_failure(code: int, said: str) -> str:
    if code == _NO_USABLE or re.search(r"\bError[: (]*18\b", said):
        return (
            f"{said}; error 18 means that no module is usable: it is not managed, is broken, or is in the "
            "wrong slot. `ipmctl show -topology` and `ipmctl show -dimm` show which (LockState, "
            "HealthState, DeviceLocator); repair that, the modules' data stays"
        )
    return said


def _delete_goal(system: System, args: Dict[str, Any]) -> Applied:
    if not _goals(system):
        return Applied(False, "no goal is waiting")
    system.check(["ipmctl", "delete", "-f", "-goal"], timeout=600)
    left = _goals(system)
    if left:
        raise CommandError(f"ipmctl deleted the goals, yet {', '.join(left)} are waiting")
    words = [word for word in owned.observe(system) if word.startswith("goal:")]
    owned.change(system, [], words)
    return Applied(True, "no goal is waiting")


ACTIONS: Dict[str, Action] = {
    "create_goal": _create_goal,
    "register_goal": _register_goal,
    "delete_goal": _delete_goal,
}
