"""GRUB_DEFAULT goes back to what it was before oeprov made it ``saved``: a part of `oeprov destroy`."""

from typing import Any, Dict

from . import bootentry, bootloader, grubdefaults
from .command import CommandError, System
from .grubdefaults import DEFAULTS
from .part import Part
from .state import State
from .step import Action, Applied, Step


def plan_back(state: State, before: str) -> Part:
    """One step that sets it to ``before`` (empty: no line), where the running kernel stays the default.

    Else a note: a kernel that no trial has proven must not become the default by a removal.
    """
    loader = state.bootloader
    if loader.has_grubby or not loader.saved_default or before == "saved":
        return Part()
    starts = bootentry.default_release(loader.entries, before, loader.saved_entry)
    if starts != state.kernel.running:
        note = (
            "left: GRUB_DEFAULT=saved in {}; before oeprov it was {}, with which the next boot would start "
            "{}, and {} runs"
        )
        then = "kernel " + starts if starts else "what cannot be told"
        return Part(notes=[note.format(DEFAULTS, before or "not set", then, state.kernel.running)])
    return Part(
        after=[
            Step(
                id="boot-default-back",
                what="set GRUB_DEFAULT={} again".format(before) if before else "remove GRUB_DEFAULT=saved",
                why="oeprov set it to saved; kernel {} stays the default".format(starts),
                commands=[
                    ["edit", DEFAULTS, "-GRUB_DEFAULT=saved"] + ["+GRUB_DEFAULT=" + before] * bool(before),
                    bootloader.mkconfig_command(state),
                ],
                action="restore_grub_default",
                role="kernel",
                args={"value": before, "release": starts},
            )
        ]
    )


def _restore(system: System, args: Dict[str, Any]) -> Applied:
    value, release = args["value"], args["release"]
    said = "GRUB_DEFAULT={}".format(value) if value else "no GRUB_DEFAULT"
    loader = bootloader.observe(system)
    if not loader.saved_default:
        return Applied(False, "GRUB_DEFAULT is not saved any more")
    bootloader.edit_defaults(system, loader, grubdefaults.edit_default(bootloader.defaults_of(loader), value))
    now = bootloader.default_release(bootloader.observe(system))
    if now != release:
        bootloader.set_default(system, release)
        raise CommandError(
            "with {} the next boot would start kernel {} instead of {}; it is saved again".format(
                said, now or "that cannot be told", release
            )
        )
    return Applied(True, "{} again; an ordinary boot starts {}".format(said, release))


ACTIONS: Dict[str, Action] = {"restore_grub_default": _restore}
