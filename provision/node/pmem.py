"""Which way leads to the wanted mode: one entry for every platform and mode."""

from typing import List

from . import directory, filesystem, inuse, ipmctl, memmap, modules, mount, ndctl, system_ram
from .part import Part, join
from .state import State
from .step import Desired, Step

_MAKES = ("make_filesystem", "create_namespace", "reconfigure_dax", "create_goal")


def plan(state: State, desired: Desired) -> Part:
    """Steps for ``desired.pmem_mode`` on ``desired.kind``; nothing for mode none."""
    part = _plan(state, desired)
    part = part._replace(before=_sized(state, part.before), after=_sized(state, part.after))
    steps = part.before + part.after
    notes: List[str] = []
    problems = filesystem.problems(state, steps) + ndctl.media_problems(state, steps) if steps else []
    if desired.pmem_mode in ("fsdax", "system-ram", "memory"):
        # Nothing is made on modules that cannot keep it; what works goes on, a file system of ours too.
        said, makes = modules.complaints(state), any(step.action in _MAKES for step in steps)
        refused = makes and modules.is_broken(state)
        problems += said if refused else []
        notes += [] if refused else said
    if desired.pmem_mode in ("fsdax", "system-ram"):
        notes += filesystem.notes(state, steps, [item.dev for item in ndctl.chosen(state, desired)])
        notes += ndctl.room_notes(state, desired) + ipmctl.notes(state)
    return part._replace(
        notes=part.notes + notes, problems=part.problems + problems + inuse.problems(state, steps)
    )


def _sized(state: State, steps: List[Step]) -> List[Step]:
    """The same steps, with the sizes of dax devices that are there."""
    found = []
    for step in steps:
        for item in state.dax:
            if step.args.get("device") == item.chardev:
                sized = filesystem.sized(item.chardev, item.size)
                step = step._replace(what=step.what.replace(item.chardev, sized, 1))
        found.append(step)
    return found


def _plan(state: State, desired: Desired) -> Part:
    mode = desired.pmem_mode
    if mode == "none":
        return Part()
    if mode == "directory":
        return Part(before=directory.plan(state, desired), problems=directory.problems(state, desired))
    if desired.kind == "re7p":
        return memmap.plan(state, desired)
    if mode == "memory":
        return ipmctl.plan_memory(state, desired)
    nodes = system_ram.handed_out(state, desired)
    if nodes:
        return system_ram.plan_handed_out(state, desired, nodes)
    part = Part()
    if desired.kind == "bare_metal_pmem":
        if ipmctl.needs_app_direct(state):
            return ipmctl.plan_app_direct(state, _namespaces(ipmctl.predicted(state), desired))
        part = ipmctl.forget_goal(state)
    return join(part, _namespaces(state, desired))


def _namespaces(state: State, desired: Desired) -> Part:
    return system_ram.plan(state, desired) if desired.pmem_mode == "system-ram" else _fsdax(state, desired)


def _fsdax(state: State, desired: Desired) -> Part:
    """Every namespace in fsdax mode with a file system mounted with DAX."""
    before: List[Step] = system_ram.forget(state)
    after: List[Step] = []
    notes: List[str] = []
    problems = ndctl.missing(state, desired)
    reboot_why = ""
    number = 0
    for item in ndctl.chosen(state, desired):
        where = desired.pmem_mount_prefix + str(number)
        number += 1
        device = item.blockdev or ndctl.block_device(item.dev)
        ready = item.mode == "fsdax" and item.blockdev != ""
        if not ready:
            release = system_ram.release(state, item)
            after += release.after
            reboot_why = reboot_why or release.reboot_why
            after += ndctl.convert(state, desired, item, "fsdax")
        steps = mount.plan(state, desired, device, where, not ready, item.size)
        after += steps
        problems += mount.problems(state, device, where)
        location = item.map if ready else ndctl.map_of(desired, "fsdax", item)
        making = any(step.action == "make_filesystem" for step in steps)
        notes += ndctl.map_notes(desired, item.dev, item.size, location, making)
        if not item.labels:
            notes.append(ndctl.label_note(item))
    for region in ndctl.empty_regions(state, desired):
        device = region.dev.replace("region", "pmem")
        where = desired.pmem_mount_prefix + str(number)
        number += 1
        after.append(ndctl.create(state, desired, region, "fsdax", "the region has no namespace"))
        after += mount.plan(state, desired, device, where, True, region.size)
        location = ndctl.map_of(desired, "fsdax")
        notes += ndctl.map_notes(desired, region.dev, region.size, location, making=True)
        problems += mount.problems(state, device, where)
    if not number and not problems:
        problems.append(ndctl.nothing_there(state, desired))
    problems += ndctl.alignment_problems(state, after)
    return Part(before=before, after=after, notes=notes, problems=problems, reboot_why=reboot_why)
