"""Which way leads to the wanted mode: one entry for every platform and mode."""

from typing import List

from . import daxctl, directory, ipmctl, memmap, mount, ndctl
from .part import Part
from .state import State
from .step import Desired, Step


def plan(state: State, desired: Desired) -> Part:
    """Steps for ``desired.pmem_mode`` on ``desired.kind``; nothing for mode none."""
    mode = desired.pmem_mode
    if mode == "none":
        return Part()
    if mode == "directory":
        return Part(before=directory.plan(state, desired), problems=directory.problems(state, desired))
    if desired.kind == "re7p":
        return memmap.plan(state, desired)
    if mode == "memory":
        return ipmctl.plan_memory(state, desired)
    if desired.kind == "bare_metal_pmem" and ipmctl.needs_app_direct(state):
        return ipmctl.plan_app_direct(state, plan(ipmctl.predicted(state), desired))
    if mode == "system-ram":
        return daxctl.plan_system_ram(state, desired)
    return _fsdax(state, desired)


def _fsdax(state: State, desired: Desired) -> Part:
    """Every namespace in fsdax mode with a file system mounted with DAX."""
    before: List[Step] = []
    after: List[Step] = []
    notes: List[str] = []
    problems = ndctl.missing(state, desired)
    reboot_why = ""
    number = 0
    for item in ndctl.chosen(state, desired):
        where = desired.pmem_mount_prefix + str(number)
        number += 1
        device = item.blockdev or "pmem" + ndctl.region_number(item.dev)
        if item.mode == "fsdax" and item.blockdev:
            after += mount.plan(state, desired, device, where, fresh=False)
        else:
            release = daxctl.release(state, desired, item)
            before += release.before
            after += release.after
            reboot_why = reboot_why or release.reboot_why
            after += ndctl.convert(state, desired, item, "fsdax")
            after += mount.plan(state, desired, device, where, fresh=True)
        if not item.labels:
            notes.append(ndctl.label_note(item))
    for region in ndctl.empty_regions(state, desired):
        device = "pmem" + region.dev.replace("region", "")
        after.append(ndctl.create(state, desired, region.dev, "fsdax", "the region has no namespace"))
        after += mount.plan(state, desired, device, desired.pmem_mount_prefix + str(number), fresh=True)
        number += 1
    if not number and not problems:
        problems.append(ndctl.nothing_there(state, desired))
    return Part(before=before, after=after, notes=notes, problems=problems, reboot_why=reboot_why)
