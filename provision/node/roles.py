"""Which role carries out which steps: plans are made for a whole host, roles do their own part of them."""

from typing import Dict, List

from .step import Plan, Step

# Actions of the pmem role are not listed: everything else is its own.
_ROLES: Dict[str, str] = {
    "install_packages": "runtime",
    "install_runtime": "runtime",
    "set_saved_default": "kernel",
    "install_kernel": "kernel",
    "edit_boot_arguments": "kernel",
    "reboot": "kernel",
    "set_default_kernel": "kernel",
    "install_gpu_driver": "gpu",
}


def role_of(step: Step) -> str:
    """The role of a step."""
    return _ROLES.get(step.action, "pmem")


def steps_of(plan: Plan, role: str) -> List[Step]:
    """The steps of one role in the plan's order; ``all`` for every role's, ``none`` for no step."""
    if role == "all":
        return plan.steps
    return [step for step in plan.steps if role_of(step) == role]
