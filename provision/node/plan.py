"""What will be done on a node: a pure function of its state and of what is wanted there.

``make_plan(state, desired)`` looks at nothing and changes nothing; ``provision.node.apply`` carries a
step out. Each mechanism (bootloader, ndctl, mount, …) plans its own part in its own file; here the parts
are put in order around at most one reboot.
"""

from typing import List

from . import bootloader, gpu, kernel, packages, pmem, runtime
from .part import Part
from .state import State
from .step import Desired, Plan, Step

__all__ = ["Desired", "Plan", "Step", "make_plan"]


def make_plan(state: State, desired: Desired) -> Plan:
    """The steps that lead from ``state`` to ``desired``; none when it is there already.

    ``problems`` say why it cannot be reached; steps are then what would be done otherwise.
    """
    part = pmem.plan(state, desired)
    steps = (
        packages.plan(state, desired) + part.before
        if desired.kind == "local"
        else _steps(state, desired, part)
    )
    steps += runtime.plan(state, desired)
    notes, problems = list(part.notes), list(part.problems)
    problems += packages.problems(state, desired) + runtime.problems(state, desired)
    if desired.kind != "local":
        notes += kernel.notes(state, desired) + bootloader.notes(state) + gpu.notes(state, desired)
        problems += kernel.problems(state, desired) + gpu.problems(state, desired)
        notes += ["could not be looked at: " + item for item in state.trouble]
    if state.assumed:
        notes.insert(0, "not observed: planned from a freshly installed host of this kind")
    return Plan(
        desired.host, steps, state.digest(), list(dict.fromkeys(notes)), list(dict.fromkeys(problems))
    )


def _steps(state: State, desired: Desired, part: Part) -> List[Step]:
    add = part.add_arguments + [word for word in desired.kernel_arguments if word not in part.add_arguments]
    whys = [part.arguments_why] if part.add_arguments or part.remove_arguments else []
    whys += ["kernel_arguments asks for it"] if desired.kernel_arguments else []
    change = bootloader.Change(add, part.remove_arguments, "; ".join(whys))
    new_kernel = kernel.needs_boot(state, desired)
    reasons = ["the kernel changes"] if new_kernel else []
    reasons += [part.reboot_why] if part.reboot_why else []
    asked = bootloader.Change(desired.kernel_arguments, [], "")
    reasons += ["kernel arguments change"] if bootloader.reboot_needed(state, asked) else []
    mkconfig = bootloader.mkconfig_command(state) if state.bootloader.mkconfig else []
    steps = packages.plan(state, desired) + gpu.plan(state, desired)
    if new_kernel:
        steps += bootloader.plan_saved_default(state) if desired.kernel_trial_boot else []
    steps += kernel.plan_install(state, desired, mkconfig)
    steps += part.before
    steps += bootloader.plan(state, change)
    if reasons:
        steps.append(_reboot(state, desired, reasons, change))
    return steps + kernel.plan_default(state, desired) + part.after


def _reboot(state: State, desired: Desired, reasons: List[str], change: bootloader.Change) -> Step:
    commands = kernel.trial_command(state, desired) if kernel.needs_boot(state, desired) else []
    args = kernel.reboot_args(state, desired, change.add, change.remove)
    what = "reboot"
    if args["trial"]:
        what = "boot {} once on trial".format(args["release"] or "the new kernel")
    return Step(
        id="reboot",
        what=what,
        why="; ".join(reasons) + (" (an unhealthy boot returns to the old kernel)" if args["trial"] else ""),
        reboots=True,
        commands=commands + [["systemctl", "reboot"]],
        action="reboot",
        args=args,
    )
