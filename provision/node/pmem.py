"""Which way leads to the wanted mode: one entry for every platform and mode."""

from typing import List

from . import directory, inuse, ipmctl, memmap, mount, ndctl, system_ram
from .part import Part, join
from .state import State
from .step import Desired, Step


def plan(state: State, desired: Desired) -> Part:
    """Steps for ``desired.pmem_mode`` on ``desired.kind``; nothing for mode none."""
    part = _plan(state, desired)
    return part._replace(problems=part.problems + inuse.problems(state, part.before + part.after))


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
        after += mount.plan(state, desired, device, where, fresh=not ready)
        problems += mount.problems(state, device, where)
        if not item.labels:
            notes.append(ndctl.label_note(item))
    for region in ndctl.empty_regions(state, desired):
        device = region.dev.replace("region", "pmem")
        where = desired.pmem_mount_prefix + str(number)
        number += 1
        after.append(ndctl.create(state, desired, region.dev, "fsdax", "the region has no namespace"))
        after += mount.plan(state, desired, device, where, fresh=True)
        problems += mount.problems(state, device, where)
    if not number and not problems:
        problems.append(ndctl.nothing_there(state, desired))
    problems += ndctl.alignment_problems(state, after)
    return Part(before=before, after=after, notes=notes, problems=problems, reboot_why=reboot_why)
