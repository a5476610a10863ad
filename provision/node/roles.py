"""Which role carries out which steps, and which steps disturb nobody.

Plans are made for a whole host; roles do their own part of them, in the plan's order around its reboot.
"""

from typing import Dict, List

from .step import Plan, Step

# Actions of the pmem role are not listed: everything else is its own.
_ROLES: Dict[str, str] = {
    "install_packages": "runtime",
    "install_runtime": "runtime",
    "install_foreign": "runtime",
    "get_sources": "runtime",
    "set_saved_default": "kernel",
    "restore_grub_default": "kernel",
    "install_kernel": "kernel",
    "edit_boot_arguments": "kernel",
    "mark_vacant": "kernel",  # of the range that the boot makes: it goes with that boot
    "reboot": "kernel",
    "set_default_kernel": "kernel",
    "install_gpu_driver": "gpu",
    "load_gpu_driver": "gpu",
    "keep_gpu_driver": "gpu",
    "run_gpu_fabric": "gpu",
    "check_gpu": "gpu",
}
# What runs on a host goes on undisturbed: these can be done on all hosts at once.
_PREPARING = (
    "install_packages",
    "install_runtime",
    "install_foreign",
    "get_sources",
    "set_saved_default",
    "install_kernel",
    "make_directory",
)


def role_of(step: Step) -> str:
    """The role of a step."""
    return _ROLES.get(step.action, "pmem")


def prepares(step: Step) -> bool:
    """Whether the step disturbs nothing that runs on the host."""
    return step.action in _PREPARING


def steps_of(plan: Plan, role: str) -> List[Step]:
    """The steps of one role in the plan's order; ``all`` for every role's, ``none`` for no step."""
    if role == "all":
        return plan.steps
    return [step for step in plan.steps if role_of(step) == role]


def doable(plan: Plan, role: str, preparing: bool) -> List[Step]:
    """The steps that a role may do now: up to the plan's reboot, which waits for all steps before it.

    ``preparing``: only those that disturb nothing.
    """
    places = [number for number, step in enumerate(plan.steps) if step.action == "reboot"]
    first = plan.steps[: places[0]] if places else plan.steps
    mine = [step for step in first if role_of(step) == role and (prepares(step) or not preparing)]
    if places and role == "kernel" and not preparing and len(mine) == len(first):
        mine.append(plan.steps[places[0]])
    return mine
