"""Persistent memory's part of a plan: what its platform plans, and what holds on every platform."""

from typing import List

from . import cxl, filesystem, inuse, ipmctl, kernel, modules, ndctl, platforms, system_ram, tiering
from .platform_base import MEMORY_NODES
from .state import State
from .step import Desired, Part, Step, join

_MAKES = ("make_filesystem", "create_namespace", "reconfigure_dax", "create_goal")


def plan(state: State, desired: Desired) -> Part:
    """Steps for ``desired.pmem_mode`` on ``desired.kind``; nothing for mode none."""
    platform = platforms.get(desired.kind)
    refusal = platform.refuse(desired.pmem_mode)
    part = Part(problems=[refusal] if refusal else [])
    if desired.pmem_mode == tiering.MODE and not refusal:
        part = tiering.plan(state, desired, platform.plan(state, desired._replace(pmem_mode="system-ram")))
        if not kernel.needs_boot(state, desired):
            part = part._replace(problems=part.problems + tiering.problems(state, desired))
    elif desired.pmem_mode != "none" and not refusal:
        part = platform.plan(state, desired)
        part = part._replace(before=tiering.forget(state) + part.before)
        if desired.pmem_mode not in MEMORY_NODES:
            part = join(part, system_ram.forget_argument(state, desired))
    part = part._replace(before=_sized(state, part.before), after=_sized(state, part.after))
    steps = part.before + part.after
    notes: List[str] = []
    problems = filesystem.problems(state, steps) + ndctl.media_problems(state, steps) if steps else []
    problems += ndctl.foreign_problems(state, steps)
    if desired.pmem_mode in ("fsdax", "system-ram", "tiered", "memory"):
        # Broken modules get nothing new; namespaces and file systems that are there stay in use.
        said, makes = modules.complaints(state), any(step.action in _MAKES for step in steps)
        refused = makes and modules.is_broken(state)
        problems += said if refused else []
        notes += [] if refused else said
    if desired.pmem_mode in ("fsdax", "system-ram", "tiered"):
        notes += filesystem.notes(state, steps, [item.dev for item in ndctl.chosen(state, desired)])
        notes += ndctl.room_notes(state, desired) + ipmctl.notes(state)
        boots = kernel.series(kernel.boots(state, desired))
        notes += cxl.notes(state, kernel.series(state.kernel.running), boots)
    return part._replace(
        notes=part.notes + notes, problems=part.problems + problems + inuse.problems(state, steps)
    )


def _sized(state: State, steps: List[Step]) -> List[Step]:
    """The steps, with the sizes of existing dax devices in their texts."""
    found = []
    for step in steps:
        for item in state.dax:
            if step.args.get("device") == item.chardev:
                sized = filesystem.sized(item.chardev, item.size)
                step = step._replace(what=step.what.replace(item.chardev, sized, 1))
        found.append(step)
    return found
