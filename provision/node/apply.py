"""Carry out the steps of a plan, by the registered actions only."""

from typing import Dict, Optional

from . import (
    ansible_python,
    bootloader,
    cxl,
    daxctl,
    directory,
    drives,
    filesystem,
    foreign,
    gpu,
    gpucheck,
    gpufabric,
    image,
    ipmctl,
    kernel,
    memmap,
    mount,
    ndctl,
    numa,
    packages,
    removal,
    runtime,
    tiering,
    trial,
)
from .command import CommandError, System
from .step import Action, Applied, Step

ACTIONS: Dict[str, Action] = {}
for _part in (
    ansible_python,
    packages,
    runtime,
    foreign,
    directory,
    kernel,
    bootloader,
    trial,
    gpu,
    gpucheck,
    gpufabric,
    image,
    mount,
    filesystem,
    drives,
    ndctl,
    cxl,
    daxctl,
    numa,
    tiering,
    memmap,
    ipmctl,
    removal,
):
    ACTIONS.update(_part.ACTIONS)


def can_apply(step: Step) -> bool:
    """This version has the step's action."""
    return step.action in ACTIONS


def apply(step: Step, system: Optional[System] = None) -> Applied:
    """Carry out one step on this host; the second time it changes nothing. Raises CommandError."""
    if not can_apply(step):
        raise CommandError(
            f"step {step.id!r} ({step.what}): this version of oeprov plans {step.action!r} but does not "
            "carry it out"
        )
    return ACTIONS[step.action](system or System(), step.args)
