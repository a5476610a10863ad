"""Carries steps of a plan out. Only actions that are known by name; everything else is refused."""

from typing import Dict, Optional

from . import (
    bootloader,
    daxctl,
    directory,
    foreign,
    gpu,
    gpucheck,
    gpufabric,
    ipmctl,
    kernel,
    memmap,
    mount,
    ndctl,
    numa,
    packages,
    removal,
    runtime,
    trial,
)
from .command import CommandError, System
from .step import Action, Applied, Step

ACTIONS: Dict[str, Action] = {}
for _part in (
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
    mount,
    ndctl,
    daxctl,
    numa,
    memmap,
    ipmctl,
    removal,
):
    ACTIONS.update(_part.ACTIONS)


def can_apply(step: Step) -> bool:
    """Whether this version carries the step's action out."""
    return step.action in ACTIONS


def apply(step: Step, system: Optional[System] = None) -> Applied:
    """Carry one step out on this machine; CommandError says what failed.

    Running a step twice is safe: the second time changes nothing.
    """
    if not can_apply(step):
        raise CommandError(
            "step {!r} ({}): this version of oeprov plans {!r} but does not carry it out".format(
                step.id, step.what, step.action
            )
        )
    return ACTIONS[step.action](system or System(), step.args)
