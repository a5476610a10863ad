"""Plan a host: a pure function of its observed state and of what the inventory asks for.

Each mechanism (bootloader, ndctl, mount, …) plans its share in its own file. ``make_plan`` puts the shares in
order around at most one reboot; ``apply`` carries the steps out.
"""

from typing import List

from . import (
    ansible_python,
    bootloader,
    drives,
    environments,
    families,
    flavors,
    gpu,
    gpuconflicts,
    image,
    inuse,
    kernel,
    packages,
    platforms,
    pmem,
    removal,
)
from .state import State
from .step import Desired, Part, Plan, Step, join

__all__ = ["Desired", "Plan", "Step", "make_plan"]


def make_plan(state: State, desired: Desired) -> Plan:
    """Plan the way from ``state`` to ``desired``; no steps if the host is there.

    A plan with ``problems`` has the steps that it would have without them.
    """
    if state.bare:
        problems = ansible_python.problems_first(state)
        steps = ansible_python.plan_first(state, desired)
        notes = ["the other steps are planned once Python is there"]
        notes += packages.archive_notes(state, desired, steps)
        return Plan(desired.host, steps, state.digest(), notes, problems)
    managed, flavor = platforms.get(desired.kind).managed, flavors.get(desired)
    if managed and not state.image.booted:
        return _not_booted(state, desired)
    if desired.remove:
        return _removal(state, desired)
    part = share(state, desired)
    steps = ansible_python.plan(state, desired)
    steps += packages.plan(_with_packages(state, steps), desired)
    if managed:
        steps += flavor.plan(state, desired) + _steps(state, desired, part)
    else:
        steps += part.before + flavor.plan(state, desired)
    notes, problems = part.notes + flavor.notes(state, desired), list(part.problems)
    notes += environments.notes(state.runtime.old)
    problems += packages.problems(state, desired) + flavor.problems(state, desired)
    problems += ansible_python.problems(state, desired)
    if managed:
        notes += packages.notes(state, desired) + packages.archive_notes(state, desired, steps)
        notes += kernel.notes(state, desired)
        notes += _trial_notes(state, desired, part)
        notes += bootloader.notes(state) + gpuconflicts.notes(state, desired)
        problems += kernel.problems(state, desired) + gpuconflicts.problems(state, desired)
        problems += _trial_problems(state, desired, part) + inuse.problems(state, steps)
        problems += image.refusals(state, steps)
        notes += ["could not be observed: " + item for item in state.trouble]
    if state.assumed:
        system = families.title(state.os)
        notes.insert(0, f"not observed: planned from a freshly installed host of this kind ({system})")
    return Plan(
        desired.host, steps, state.digest(), list(dict.fromkeys(notes)), list(dict.fromkeys(problems))
    )


def _not_booted(state: State, desired: Desired) -> Plan:
    """Plan the build of an image: packages, the environment, and arguments for the kernel of its hosts."""
    if desired.remove:
        return Plan(desired.host, [], state.digest(), [], image.not_booted(state))
    part, flavor = image.plan(state, desired), flavors.get(desired)
    steps = ansible_python.plan(state, desired)
    steps += packages.plan(_with_packages(state, steps), desired) + flavor.plan(state, desired) + part.before
    notes = part.notes + flavor.notes(state, desired) + packages.notes(state, desired)
    notes += packages.archive_notes(state, desired, steps)
    problems = part.problems + packages.problems(state, desired) + flavor.problems(state, desired)
    problems += ansible_python.problems(state, desired)
    return Plan(
        desired.host, steps, state.digest(), list(dict.fromkeys(notes)), list(dict.fromkeys(problems))
    )


def share(state: State, desired: Desired) -> Part:
    """What persistent memory and drives need of a plan."""
    return join(pmem.plan(state, desired), drives.plan(state, desired))


def _with_packages(state: State, steps: List[Step]) -> State:
    """The state as it is after earlier steps that install packages."""
    names = [name for step in steps for name in step.args["names"]]
    return state._replace(packages=dict(state.packages, **dict.fromkeys(names, "installed")))


def _removal(state: State, desired: Desired) -> Plan:
    """Plan the removal of what oeprov made; kernel arguments go in a trial boot, like any change of them."""
    part = removal.plan(state, desired)
    bare = _bare(desired)
    if not platforms.get(desired.kind).managed:
        return Plan(desired.host, part.before, state.digest(), part.notes, part.problems)
    steps = _steps(state, bare, part)
    steps = (
        (ansible_python.plan(state, desired) if steps else []) + steps + ansible_python.plan_removal(state)
    )
    notes = part.notes + _trial_notes(state, bare, part)
    problems = part.problems + _trial_problems(state, bare, part) + inuse.problems(state, steps)
    problems += ansible_python.problems(state, desired) if steps else []
    return Plan(desired.host, steps, state.digest(), notes, list(dict.fromkeys(problems)))


def _bare(desired: Desired) -> Desired:
    """Leave out what the inventory asks for: a removal installs nothing."""
    return desired._replace(
        kernel_version="", kernel_arguments=[], gpu_driver="", pmem_mode="none", ssd_devices=[]
    )


def _change(state: State, desired: Desired, part: Part) -> bootloader.Change:
    """The kernel arguments that the mode, the GPU's driver and the inventory ask for."""
    driver = gpu.arguments(state, desired)
    add = list(dict.fromkeys(part.add_arguments + driver + desired.kernel_arguments))
    if state.image.bootc:  # they come with the image, and no file of GRUB's has them
        add = [word for word in add if word not in state.kernel.cmdline]
    whys = [part.arguments_why] if part.add_arguments or part.remove_arguments else []
    whys += ["nouveau must leave the GPU to NVIDIA's driver"] if driver else []
    whys += ["kernel_arguments asks for it"] if desired.kernel_arguments else []
    return bootloader.Change(add, part.remove_arguments, "; ".join(whys))


def _reasons(state: State, desired: Desired, part: Part) -> List[str]:
    """Why the host must reboot; empty when it need not."""
    asked = bootloader.Change(desired.kernel_arguments, [], "")
    found = ["the kernel changes"] if kernel.needs_boot(state, desired) else []
    found += [part.reboot_why] if part.reboot_why else []
    found += ["kernel arguments change"] if bootloader.reboot_needed(state, asked) else []
    return found + gpu.reboot_reasons(state, desired)


def makes_trial(state: State, desired: Desired, part: Part) -> bool:
    """Whether the plan has a trial boot; ``part`` is the share of persistent memory or of the removal."""
    if desired.remove:
        desired = _bare(desired)
    reboots = bool(_reasons(state, desired, part))
    return reboots and kernel.on_trial(state, desired, _change(state, desired, part))


def _steps(state: State, desired: Desired, part: Part) -> List[Step]:
    change = _change(state, desired, part)
    reasons = _reasons(state, desired, part)
    trial = makes_trial(state, desired, part)
    mkconfig = bootloader.mkconfig_command(state) if state.bootloader.mkconfig else []
    steps = bootloader.plan_leftovers(state) + gpu.plan(state, desired)
    if trial:
        steps += bootloader.plan_saved_default(state, kernel.needs_install(state, desired))
    steps += kernel.plan_install(state, desired, mkconfig) + part.before
    arguments = bootloader.plan(state, change)
    # In a trial only the one-time entry has the new arguments; they become permanent after a healthy boot.
    # The default changes before them: the new kernel with the old arguments is safer than the reverse.
    late = trial or not reasons
    steps += [] if late else arguments
    if reasons:
        step = kernel.reboot_step(state, desired, reasons, change, trial, not part.reboot_why)
        # Where the driver is still to be installed, that step asks for it.
        lost = [gpu.NOUVEAU] if gpu.arguments(state, desired) and state.gpu.nouveau else []
        steps.append(step._replace(destroys=[] if gpu.changes(state, desired) else lost))
    return (
        steps
        + kernel.plan_default(state, desired)
        + (arguments if late else [])
        + part.after
        + gpu.plan_loading(state, desired)
    )


def _trial_problems(state: State, desired: Desired, part: Part) -> List[str]:
    """Why the arguments cannot be changed, or a trial cannot be made."""
    change = _change(state, desired, part)
    found = bootloader.problems(state, change)
    add, remove = bootloader.pending(state, change)
    if not kernel.needs_boot(state, desired) and (add or remove):
        found += kernel.failed_before(state, desired, bootloader.key(add, remove))
    if makes_trial(state, desired, part):
        found += kernel.trial_problems(state)
    return found


def _trial_notes(state: State, desired: Desired, part: Part) -> List[str]:
    """Notes on a trial of arguments; ``kernel.notes`` has those on kernels."""
    add, remove = bootloader.pending(state, _change(state, desired, part))
    if kernel.needs_boot(state, desired):
        return []
    return kernel.tried_again(state, desired, bootloader.key(add, remove))
