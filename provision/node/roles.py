"""Which role carries out which steps: plans are made for a whole host, roles do their own part of them."""

from typing import List

from .step import Plan, Step

_ACTIONS = {
    "install_packages": "runtime",
    "install_runtime": "runtime",
    "make_directory": "pmem",
}


def role_of(step: Step) -> str:
    """The role of a step."""
    if step.action in _ACTIONS:
        return _ACTIONS[step.action]
    words = (step.id + "-" + step.action).replace("_", "-").split("-")
    for part in ("gpu", "kernel"):
        if part in words:
            return part
    return "kernel" if "reboot" in words or "arguments" in words else "pmem"


def steps_of(plan: Plan, role: str) -> List[Step]:
    """The steps of one role in the plan's order; ``all`` for every role's, ``none`` for no step."""
    if role == "all":
        return plan.steps
    return [step for step in plan.steps if role_of(step) == role]
