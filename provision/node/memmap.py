"""Platform re7p: the kernel argument ``memmap=SIZE!OFFSET`` turns a range of RAM into persistent memory.

With the argument the range is ``/dev/pmem0``, without it a memory node without CPUs.
"""

import re
from typing import Any, Dict, List, Tuple

from . import fsdax, mount, ndctl, numa, owned, system_ram
from .command import System
from .devices import is_memmap, namespaces
from .directory import human
from .numa import coalesce, cpuless
from .state import MemoryRange, State
from .step import Action, Applied, Desired, Part, Step

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_GRAIN = 2 << 20  # the kernel maps memory in such pieces
NOKASLR = "nokaslr"
VOLATILE = (
    "persistent memory of re7p is lost in a stop or restart of the instance: treat its content as volatile, "
    "and keep checkpoints elsewhere"
)


def parse(value: str) -> List[Tuple[int, int]]:
    """(start, size) bytes of ``SIZE!OFFSET[,SIZE!OFFSET]``; ValueError when it is something else."""
    found = []
    for part in value.split(","):
        # As the kernel reads numbers: decimal or 0x…, with a unit.
        match = re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)([KMGT]?)!(0x[0-9a-fA-F]+|\d+)([KMGT]?)", part)
        if match is None:
            raise ValueError(f"{part!r} is not SIZE!OFFSET such as 1008G!257G")
        size, offset = (
            int(match.group(1), 0) * _UNITS[match.group(2)],
            int(match.group(3), 0) * _UNITS[match.group(4)],
        )
        found.append((offset, size))
    return found


def _text(size: int) -> str:
    for unit in ("G", "M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    raise ValueError(f"{size} is no multiple of 1K")


def compute(state: State) -> str:
    """SIZE!OFFSET of the memory of nodes without CPUs; empty if no table shows any.

    The boot log's SRAT is used first, because it has the range even when it is persistent; then the memory
    that is online.
    """
    with_cpus = [node.id for node in state.numa if node.cpus]
    for source in ("srat", "blocks"):
        ranges = [
            item for item in state.ranges if item.source == source and item.node not in with_cpus + [-1]
        ]
        if ranges:
            whole = coalesce([MemoryRange(item.start, item.end, 0, source) for item in ranges])
            return ",".join(f"{_text(item.end - item.start)}!{_text(item.start)}" for item in whole)
    return ""


def _range_problems(state: State, value: str) -> List[str]:
    """Why a range is not usable: it is not RAM, or belongs to a node with CPUs."""
    found = []
    ram = coalesce([item._replace(node=-1) for item in state.ranges if item.source == "firmware"])
    with_cpus = [node.id for node in state.numa if node.cpus]
    dram = [item for item in state.ranges if item.source == "srat" and item.node in with_cpus]
    for start, size in parse(value):
        end = start + size
        if start % _GRAIN or size % _GRAIN:
            found.append(
                f"memmap={value}: size and offset must be multiples of {human(_GRAIN)}, or the kernel makes "
                "no DAX device of the range"
            )
        if ram and not any(item.start <= start and end <= item.end for item in ram):
            found.append(
                "memmap={}: the range is not all RAM in this machine's firmware map ({})".format(
                    value, ", ".join(f"{item.start:#x}-{item.end:#x}" for item in ram)
                )
            )
        if any(item.start < end and start < item.end for item in dram):
            found.append(f"memmap={value}: the range takes memory of a node with CPUs")
    return found


def plan(state: State, desired: Desired) -> Part:
    """Add the argument for fsdax, remove it for system-ram, and plan the rest of the mode."""
    words = list(dict.fromkeys(item for item in _configured(state) + state.kernel.cmdline if is_memmap(item)))
    if desired.pmem_mode == "system-ram":
        return _plan_system_ram(state, desired, words)
    # If the boot log is gone, the running argument stays.
    running = [word for word in state.kernel.cmdline if is_memmap(word)]
    kept = running[0].split("=", 1)[1] if len(running) == 1 else ""
    value = desired.pmem_memmap or compute(state) or kept
    if not value:
        problem = (
            "memmap cannot be computed: neither the boot log nor the memory map shows a node without CPUs; "
            "set pmem_memmap (1008G!257G is for ecs.re7p.16xlarge only)"
        )
        return Part(problems=[problem])
    try:
        parse(value)
    except ValueError as error:
        return Part(problems=[f"memmap={value}: {error}"])
    return _plan_fsdax(state, desired, words, value)


def _configured(state: State) -> List[str]:
    return state.bootloader.cmdline.split()


def _plan_fsdax(state: State, desired: Desired, words: List[str], value: str) -> Part:
    wanted = "memmap=" + value
    others = [word for word in words if word != wanted]
    problems, notes = _range_problems(state, value), [VOLATILE]
    add = [wanted]
    why = "turns the memory node into persistent memory"
    running = wanted in state.kernel.cmdline and not [word for word in state.kernel.cmdline if word in others]
    before = system_ram.forget(state)
    reboot_why = "" if running else "the kernel makes the range persistent at boot"
    devices = [
        item for item in ndctl.chosen(state, desired) if item.enabled and (item.blockdev or item.chardev)
    ]
    if running and not devices:
        if NOKASLR in state.kernel.cmdline:
            problems.append(
                f"{wanted} is on the command line but there is no /dev/pmem*: look for 'persistent' in the "
                "boot log"
            )
        add.append(NOKASLR)
        why = "the kernel may have been placed inside the range, which disables it"
        reboot_why = "without a persistent device, the kernel must start elsewhere"
    if reboot_why and devices:
        before += leave(state, desired, "the range changes")
    if wanted not in state.kernel.cmdline:
        before += _vacant_step(state, value)
    after: List[Step] = []
    count = len(parse(value))
    if reboot_why:
        for number in range(count):
            where = desired.pmem_mount_prefix + str(number)
            size = parse(value)[number][1]
            after += mount.plan(state, mount.pmem_use(desired), f"pmem{number}", where, True, size)
            # The range is a namespace without page structures of its own.
            notes += ndctl.map_notes(desired, f"pmem{number}", size, "mem", making=True)
    else:
        used = fsdax.use_namespaces(state, desired, devices)
        after, reboot_why = used.after, used.reboot_why
        notes += used.notes
        problems += used.problems
    return Part(
        before=before,
        add_arguments=add,
        remove_arguments=others,
        arguments_why=why,
        reboot_why=reboot_why,
        after=after,
        notes=notes,
        problems=problems,
    )


def _vacant_step(state: State, value: str) -> List[Step]:
    """Register the devices that the boot makes of RAM: they are not zero, but hold no data."""
    names = [f"pmem{number}" for number in range(len(parse(value)))]
    if all(owned.vacant(name) in state.owned for name in names):
        return []
    return [
        Step(
            id="range-vacant",
            what=f"mark {', '.join(names)} as empty",
            why=f"after the reboot the range {value} would look like user data and need consent",
            commands=[["edit", owned.PATH] + ["+" + owned.vacant(name) for name in names]],
            action="mark_vacant",
            role="kernel",
            args={"devices": names},
        )
    ]


def _mark_vacant(system: System, args: Dict[str, Any]) -> Applied:
    changed = owned.change(system, [owned.vacant(name) for name in args["devices"]], [])
    return Applied(changed, f"{', '.join(args['devices'])} will be empty")


def leave(state: State, desired: Desired, why: str) -> List[Step]:
    """Give up the content of the persistent range: mounts, entries of /etc/fstab, and data with consent."""
    steps: List[Step] = []
    for item in state.namespaces:
        steps += mount.unmount_step(state, item.blockdev) if item.blockdev else []
    steps += mount.forget_step(state, desired)
    lost = [data for item in state.namespaces for data in ndctl.data_in(state, item)]
    if lost:
        steps.append(
            Step(
                id="give-up-data",
                what="give up what is on "
                + ", ".join(item.blockdev or item.dev for item in state.namespaces),
                why=why + "; its content is lost in the reboot",
                destroys=lost,
                commands=[
                    ["wipefs", "-a", "/dev/" + item.blockdev] for item in state.namespaces if item.blockdev
                ],
                action="give_up_data",
                disturbs=True,
                args={"namespaces": [item.dev for item in state.namespaces], "lose": lost},
            )
        )
    return steps


def _give_up_data(system: System, args: Dict[str, Any]) -> Applied:
    # Erased, because a file system whose range was RAM for a while must not be found again.
    found = [item for item in namespaces(system) if item.dev in args["namespaces"]]
    for item in found:
        ndctl.give_up(system, item, args["lose"])
    return Applied(bool(found), "nothing uses " + ", ".join(args["namespaces"]))


def _plan_system_ram(state: State, desired: Desired, words: List[str]) -> Part:
    running = [word for word in state.kernel.cmdline if is_memmap(word)]
    nodes = [node.id for node in cpuless(state)]
    if not running and not nodes:
        problem = (
            "no memmap argument is set, yet there is no memory node without CPUs: is this a re7p instance?"
        )
        return Part(problems=[problem])
    before = (
        leave(state, desired, "the range becomes a memory node")
        if running
        else mount.forget_step(state, desired)
    )
    return Part(
        before=before,
        remove_arguments=words,
        arguments_why="without memmap the persistent memory is a memory node",
        reboot_why="the kernel gives the range back at boot" if running else "",
        after=numa.plan_memkind(state, [] if running else nodes, []),
        notes=[VOLATILE],
    )


ACTIONS: Dict[str, Action] = {"give_up_data": _give_up_data, "mark_vacant": _mark_vacant}
