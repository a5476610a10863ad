"""Mode fsdax: each namespace gets a file system that is mounted with DAX."""

from typing import List

from . import mount, ndctl, system_ram
from .state import Namespace, State
from .step import Desired, Part


def plan(state: State, desired: Desired, absent: str) -> Part:
    """Use each namespace, and create one on each region without; ``absent``: why there is no memory."""
    part = use_namespaces(state, desired, ndctl.chosen(state, desired))
    number = len(ndctl.chosen(state, desired))
    after, notes = part.after, part.notes
    problems = ndctl.missing(state, desired) + part.problems
    for region in ndctl.empty_regions(state, desired):
        device = region.dev.replace("region", "pmem")
        where = desired.pmem_mount_prefix + str(number)
        number += 1
        after.append(ndctl.create(state, desired, region, "fsdax", "the region has no namespace"))
        after += mount.plan(state, mount.pmem_use(desired), device, where, True, region.available)
        location = ndctl.map_of(desired, "fsdax")
        notes += ndctl.map_notes(desired, region.dev, region.available, location, making=True)
        problems += mount.problems(state, device, where)
    full = ndctl.regions_without_room(state, desired)
    if number:
        notes += full
    elif not problems:
        problems += full or [absent]
    problems += ndctl.alignment_problems(state, after)
    return part._replace(before=system_ram.forget(state), after=after, notes=notes, problems=problems)


def use_namespaces(state: State, desired: Desired, items: List[Namespace]) -> Part:
    """Put ``items`` into mode fsdax and mount them; a namespace that is already right stays as it is."""
    part = Part(after=[], notes=[], problems=[])
    reboot_why = ""
    for number, item in enumerate(items):
        where = desired.pmem_mount_prefix + str(number)
        device = item.blockdev or ndctl.block_device(item.dev)
        ready = item.mode == "fsdax" and item.blockdev != ""
        if not ready:
            release = system_ram.release(state, item)
            part.after.extend(release.after + ndctl.convert(state, desired, item, "fsdax"))
            reboot_why = reboot_why or release.reboot_why
        steps = mount.plan(state, mount.pmem_use(desired), device, where, not ready, item.size)
        part.after.extend(steps)
        part.problems.extend(mount.problems(state, device, where))
        location = item.map if ready else ndctl.map_of(desired, "fsdax", item)
        making = any(step.action == "make_filesystem" for step in steps)
        part.notes.extend(ndctl.map_notes(desired, item.dev, item.size, location, making))
        if not item.labels:
            part.notes.append(ndctl.label_note(item))
    return part._replace(reboot_why=reboot_why)
