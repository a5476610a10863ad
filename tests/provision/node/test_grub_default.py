"""GRUB_DEFAULT comes back with `oeprov destroy`, unless another kernel would be started then."""

from pathlib import Path

import pytest
from boot_machine import NEW, OLD, Machine

from provision.node import bootloader, removal
from provision.node.apply import apply
from provision.node.command import CommandError
from provision.node.grubdefaults import DEFAULTS
from provision.node.state import KernelState, State


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Its default is the running kernel, by name."""
    found = Machine(tmp_path)
    bootloader.set_default(found, OLD)
    return found


def state(machine: Machine) -> State:
    return State(kernel=KernelState(machine.running), bootloader=bootloader.observe(machine))


def words(machine: Machine) -> str:
    return next(line for line in machine.read(DEFAULTS).splitlines() if line.startswith("GRUB_DEFAULT"))


def test_destroy_restores_grub_default_if_the_same_kernel_boots(machine: Machine) -> None:
    assert words(machine) == "GRUB_DEFAULT=saved"
    [step] = removal.plan_grub_default(state(machine), "0").after
    assert step.what == "set GRUB_DEFAULT=0 again"
    assert apply(step, machine).message == f"GRUB_DEFAULT=0 again; an ordinary boot starts {OLD}"
    assert words(machine) == "GRUB_DEFAULT=0"
    machine.boot()
    assert machine.running == OLD
    assert not apply(step, machine).changed
    part = removal.plan_grub_default(state(machine), "0")
    assert (part.after, part.notes) == ([], [])


def test_destroy_removes_a_grub_default_line_that_bootstrap_added(machine: Machine) -> None:
    [step] = removal.plan_grub_default(state(machine), "").after
    assert step.what == "remove GRUB_DEFAULT=saved"
    apply(step, machine)
    assert "GRUB_DEFAULT" not in machine.read(DEFAULTS)


def test_grub_default_stays_if_unknown_or_saved_before(machine: Machine) -> None:
    assert removal.plan_grub_default(state(machine), "saved").after == []


def test_grub_default_stays_if_another_kernel_would_boot(machine: Machine) -> None:
    machine.add_kernel(NEW)
    bootloader.regenerate(machine, bootloader.observe(machine))
    part = removal.plan_grub_default(state(machine), "0")
    assert part.after == []
    assert part.notes == [
        f"left: GRUB_DEFAULT=saved in {DEFAULTS}; before oeprov it was 0, with which the next boot would "
        f"start kernel {NEW}, and {OLD} runs"
    ]


def test_a_kernel_installed_after_the_plan_stops_the_restore(machine: Machine) -> None:
    [step] = removal.plan_grub_default(state(machine), "0").after
    machine.add_kernel(NEW)
    with pytest.raises(CommandError, match=f"would start kernel {NEW} instead of {OLD}; it is saved again"):
        apply(step, machine)
    assert words(machine) == "GRUB_DEFAULT=saved"
    machine.boot()
    assert machine.running == OLD


def test_grub_default_is_unchanged_when_grub_mkconfig_fails(machine: Machine) -> None:
    [step] = removal.plan_grub_default(state(machine), "0").after
    machine.mkconfig_fails = True
    with pytest.raises(CommandError, match="no such disk"):
        apply(step, machine)
    assert words(machine) == "GRUB_DEFAULT=saved"
