import shutil
import subprocess
from pathlib import Path

import pytest
from boot_machine import BLS, NEW, OLD, SYSCTL, El, Machine, PowerCut, Stuck

from provision.node import bootloader, kernel, observe, trial
from provision.node.apply import apply
from provision.node.command import CommandError, Result
from provision.node.plan import make_plan
from provision.node.state import OsInfo, State
from provision.node.step import Desired, Plan

DEBIAN = OsInfo("debian", "12", "debian", "Debian", "x86_64", "apt", "3.11.2", True)
ARGUMENT = "memmap=1G!4G"
PMEM = {"/sys/bus/nd/devices/region0/size": "1", "/sys/class/block/pmem0/size": "1"}
LEFTOVERS = (
    "/boot/grub/custom.cfg",
    "/var/lib/oeprov/reboot.json",
    "/var/lib/oeprov/trial-expired",
    "/etc/systemd/system/oeprov-trial.timer",
    "/etc/systemd/system/oeprov-trial.service",
    "/etc/systemd/system/sysinit.target.wants/oeprov-trial.timer",
)


def reboot_args(release: str, **other: object) -> dict[str, object]:
    args = {"release": release, "trial": True, "arguments": [], "absent_arguments": [], "pmem_stays": True}
    return {**args, "trial_limit": 300, "failure_key": release, **other}


class Refused(Exception):
    """The plan has problems."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SETTLE_SECONDS", 0)
    monkeypatch.setattr(trial, "_PMEM_SECONDS", 0)


def sysctls(machine: Machine) -> tuple[str, str]:
    """kernel.panic and kernel.panic_on_oops now."""
    return machine.read(SYSCTL + "panic").strip(), machine.read(SYSCTL + "panic_on_oops").strip()


def trial_id(machine: Machine) -> str:
    """The argument of the boot that runs that says which trial it is."""
    return next(word for word in machine.cmdline if word.startswith("oeprov.trial="))


def copy_into_defaults(machine: Machine, words: list[str]) -> None:
    """What a kernel's package does where it makes entries from /proc/cmdline."""
    machine.put("/etc/default/grub", f'GRUB_DEFAULT=saved\nGRUB_CMDLINE_LINUX="{" ".join(words)}"\n')
    machine.grub_mkconfig(["-o", "/boot/grub/grub.cfg"])


def wanted(release: str = "", *arguments: str) -> Desired:
    return Desired(
        "h", "cpu", kernel_version=release, kernel_arguments=list(arguments), kernel_reboot_timeout=600
    )


def plan(machine: Machine, desired: Desired) -> Plan:
    loader = bootloader.observe(machine)
    loader = loader._replace(grubenv_on=bootloader.grubenv_on(machine, loader))
    seen = State(os=DEBIAN, kernel=kernel.observe(machine, DEBIAN, desired, loader), bootloader=loader)
    return make_plan(seen, desired)


def module(machine: Machine, desired: Desired) -> bool:
    """What one run of the module does; whether a reboot is prepared."""
    trial.confirm_if_pending(machine)
    made = plan(machine, desired)
    if made.problems:
        raise Refused(made.problems[0])
    for step in made.steps:
        if step.role == "kernel":
            apply(step, machine)
            if step.action == "reboot":
                return True
    return False


def bootstrap(machine: Machine, desired: Desired) -> None:
    for _ in range(3):
        if not module(machine, desired):
            return
        machine.boot()
    raise AssertionError("it reboots again and again")


def kernel_steps(made: Plan) -> list[str]:
    return [step.id for step in made.steps if step.role == "kernel"]


def assert_nothing_left(machine: Machine) -> None:
    assert [path for path in LEFTOVERS if machine.exists(path)] == []
    assert not machine.timer
    assert bootloader.observe(machine).next_entry == ""


def test_a_kernel_and_arguments_that_pass_their_trial_stay(machine: Machine) -> None:
    bootstrap(machine, wanted(NEW, ARGUMENT))
    assert machine.running == NEW
    assert_nothing_left(machine)
    machine.boot()
    assert machine.running == NEW
    assert ARGUMENT in machine.cmdline
    assert "console=ttyS0" in machine.cmdline
    assert not any(word.startswith(("oeprov.trial", "panic=")) for word in machine.cmdline)
    assert kernel_steps(plan(machine, wanted(NEW, ARGUMENT))) == []


def test_before_the_trial_nothing_of_an_ordinary_boot_changes(machine: Machine) -> None:
    assert module(machine, wanted(NEW, ARGUMENT))
    defaults = machine.read("/etc/default/grub")
    assert ARGUMENT not in defaults + machine.read("/boot/grub/grub.cfg")
    assert ARGUMENT in machine.read("/boot/grub/custom.cfg")
    machine.grub_editenv(["grubenv", "unset", "next_entry"])
    machine.boot()
    assert (machine.running, ARGUMENT in machine.cmdline) == (OLD, False)


def test_a_kernel_that_panics_leads_back_and_is_not_tried_again(machine: Machine) -> None:
    machine.panics = {NEW}
    desired = wanted(NEW)
    assert module(machine, desired)
    machine.boot()
    assert machine.running == OLD
    with pytest.raises(CommandError, match=f"{NEW} failed its trial boot, .* to kernel {OLD}"):
        module(machine, desired)
    assert_nothing_left(machine)
    machine.boot()
    assert machine.running == OLD
    (problem,) = plan(machine, desired).problems
    assert f"{NEW} failed its trial boot on 20" in problem
    assert "remove its line from /var/lib/oeprov/failed-kernels" in problem
    machine.panics = set()
    machine.remove(kernel.FAILED)
    bootstrap(machine, desired)
    assert machine.running == NEW


def test_a_kernel_that_cannot_be_loaded_leads_back(machine: Machine) -> None:
    machine.unloadable = {NEW}
    assert module(machine, wanted(NEW))
    machine.boot()
    assert machine.running == OLD
    with pytest.raises(CommandError, match="returned to kernel"):
        trial.confirm_if_pending(machine)
    assert_nothing_left(machine)


def test_arguments_that_panic_are_gone_at_the_next_boot(machine: Machine) -> None:
    machine.panics = {ARGUMENT}
    desired = wanted("", ARGUMENT)
    assert kernel_steps(plan(machine, desired)) == ["reboot", "boot-arguments"]
    assert module(machine, desired)
    machine.boot()
    assert ARGUMENT not in machine.cmdline
    with pytest.raises(CommandError, match=r"\+memmap=1G!4G failed its trial boot"):
        module(machine, desired)
    (problem,) = plan(machine, desired).problems
    assert problem.startswith("+memmap=1G!4G failed its trial boot")
    # Another argument is another trial.
    bootstrap(machine, wanted("", "memmap=1G!8G"))
    assert "memmap=1G!8G" in machine.cmdline


def test_arguments_alone_leave_the_default_entry_as_it_is(machine: Machine) -> None:
    bootstrap(machine, wanted("", ARGUMENT))
    assert bootloader.observe(machine).saved_default is False
    machine.boot()
    assert ARGUMENT in machine.cmdline


def test_a_boot_that_nobody_confirms_ends_by_itself(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    assert (machine.running, machine.timer) == (NEW, True)
    machine.expire()
    assert machine.running == OLD
    with pytest.raises(CommandError, match="it came up, but was not confirmed within 300 s"):
        trial.confirm_if_pending(machine)
    assert_nothing_left(machine)


@pytest.mark.parametrize(("boot_on", "below"), [("btrfs", ""), ("zfs", ""), ("ext2", "lvm\n")])
def test_where_grub_cannot_clear_the_entry_there_is_no_trial(
    machine: Machine, boot_on: str, below: str
) -> None:
    machine.boot_on, machine.below = boot_on, below
    machine.panics = {ARGUMENT}
    with pytest.raises(Refused, match="where GRUB cannot clear a one-time entry"):
        module(machine, wanted("", ARGUMENT))
    machine.boot()
    # Without the refusal:
    trial.prepare_reboot(machine, reboot_args(OLD, arguments=[ARGUMENT]))
    with pytest.raises(Stuck, match="again and again"):
        machine.boot()


@pytest.mark.parametrize(
    "desired", [wanted("", ARGUMENT), wanted(NEW), wanted()], ids=["word", "kernel", "no"]
)
def test_grub_probe_is_asked_before_a_trial_only(machine: Machine, desired: Desired) -> None:
    """Two processes per host, for nothing where no trial is made."""
    machine.asked.clear()
    state = observe.observe(machine, desired)
    asked = any(argv[0] == "grub-probe" for argv in machine.asked)
    assert (asked, state.bootloader.grubenv_on) == ((False, "") if desired == wanted() else (True, "plain"))
    assert asked is any(step.reboots for step in make_plan(state, desired).steps)


def test_a_trial_that_nobody_confirmed_is_made_again_when_asked(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.expire()
    with pytest.raises(CommandError, match="the controller went away, or could not reach it"):
        trial.confirm_if_pending(machine)
    others = "6.1.0-1-amd64\t2026-11-01\tpanic\n"
    machine.put(kernel.FAILED, others + machine.read(kernel.FAILED))
    with pytest.raises(Refused, match="to try again, add --retry-trials"):
        module(machine, wanted(NEW))
    bootstrap(machine, wanted(NEW)._replace(retry_trials=True))
    machine.boot()
    assert machine.running == NEW
    assert machine.read(kernel.FAILED) == others, "it has passed"
    assert kernel_steps(plan(machine, wanted(NEW))) == []


def test_a_kernel_that_fails_again_is_written_down_again(machine: Machine) -> None:
    machine.panics = {NEW}
    for again in (False, True):
        assert module(machine, wanted(NEW)._replace(retry_trials=again))
        machine.boot()
        with pytest.raises(CommandError, match="failed its trial boot"):
            trial.confirm_if_pending(machine)
    assert machine.read(kernel.FAILED).count(NEW) == 1
    assert machine.running == OLD


def test_a_machine_that_has_passed_panics_as_before(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    assert sysctls(machine) == ("15", "1")
    trial.confirm(machine)
    assert sysctls(machine) == ("0", "0")


def test_a_panic_that_somebody_else_set_stays(machine: Machine) -> None:
    machine.put(SYSCTL + "panic_on_oops", "1\n")
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.put(SYSCTL + "panic", "30\n")  # /etc/sysctl.d
    trial.confirm(machine)
    assert sysctls(machine) == ("30", "1")


def test_an_unhealthy_trial_boot_keeps_its_panic_settings(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.system_state = "maintenance"
    with pytest.raises(CommandError, match="not healthy"):
        trial.confirm(machine)
    assert sysctls(machine) == ("15", "1")


def test_a_copied_argument_of_an_earlier_trial_ends_no_boot(machine: Machine) -> None:
    bootstrap(machine, wanted(NEW))
    copied = [trial_id(machine), "panic=15", "oops=panic"]
    copy_into_defaults(machine, copied)
    machine.boot()
    assert trial_id(machine) == copied[0]
    assert not machine.timer
    # Nor while another trial is prepared, which GRUB then does not start.
    trial.prepare_reboot(machine, reboot_args(NEW, arguments=[ARGUMENT]))
    machine.grub_editenv(["grubenv", "unset", "next_entry"])
    machine.boot()
    assert (trial_id(machine), machine.timer) == (copied[0], False)


def test_an_argument_that_is_copied_during_its_trial_ends_one_boot_only(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    copy_into_defaults(machine, [trial_id(machine)])
    machine.expire()
    assert not machine.timer
    assert machine.running == OLD


def test_copied_arguments_are_taken_out_of_entries(machine: Machine) -> None:
    bootstrap(machine, wanted(NEW))
    copy_into_defaults(machine, ["console=ttyS0", trial_id(machine), "panic=15", "oops=panic"])
    assert kernel_steps(plan(machine, wanted(NEW))) == ["trial-leftovers"]
    boots = machine.boots
    bootstrap(machine, wanted(NEW))
    assert machine.boots == boots, "it needs no reboot"
    assert kernel_steps(plan(machine, wanted(NEW))) == []
    machine.boot()
    assert not any(word.startswith(("oeprov.trial", "panic=", "oops=")) for word in machine.cmdline)
    assert "console=ttyS0" in machine.cmdline


def test_a_kernel_that_is_installed_during_a_trials_boot_copies_nothing_of_it(tmp_path: Path) -> None:
    """EL 9 makes the entries of new kernels from /proc/cmdline."""
    system = El(tmp_path)
    system.copies_cmdline = True
    Path(system.path(f"{BLS}/1b2c-{NEW}.conf")).unlink()
    own = "root=/dev/sda1 ro memmap=1G!4G"
    system.put(
        "/proc/cmdline", own + " panic=15 oops=panic oeprov.trial=5f3c rd.shell=0 rd.emergency=reboot\n"
    )
    for name in (f"vmlinuz-{OLD}", f"initramfs-{OLD}.img"):
        system.put("/boot/" + name, "x")
    os = OsInfo("rocky", "9", "rhel", "Rocky", "x86_64", "yum")
    kernel.ACTIONS["install_kernel"](
        system,
        {"release": NEW, "source": "distribution", "repositories": {}, "options": [], "os": os._asdict()},
    )
    entry = next(item for item in bootloader.observe(system).entries if item.release == NEW)
    assert " ".join(entry.arguments) == own


def test_systemd_starts_the_timer_of_this_trial_only(machine: Machine) -> None:
    """systemd's own reading of the condition."""
    program = machine_program("systemd-analyze")
    assert module(machine, wanted(NEW))
    machine.boot()
    unit = machine.read("/etc/systemd/system/oeprov-trial.timer")
    condition = next(line for line in unit.splitlines() if line.startswith("ConditionKernelCommandLine="))
    mine = trial_id(machine)
    for cmdline, starts in ((mine, True), ("oeprov.trial=0", False), (mine + "0", False), ("quiet", False)):
        done = subprocess.run(
            [program, "condition", condition],
            env={"SYSTEMD_PROC_CMDLINE": "ro " + cmdline},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is starts, done.stderr


def machine_program(name: str) -> str:
    """Where a program of this machine is; the test is skipped where there is none."""
    found = shutil.which(name)
    if not found:
        pytest.skip("there is no " + name)
    return found


def test_another_controller_can_confirm(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    assert kernel_steps(plan(machine, wanted(NEW))) == ["kernel-default"]
    assert trial.confirm_if_pending(machine) == f"rebooted: kernel {NEW} runs, trial passed"
    assert trial.confirm_if_pending(machine) == ""
    machine.boot()
    assert machine.running == OLD  # it is not the default yet


@pytest.mark.parametrize("changes", range(1, 7))
def test_a_power_cut_after_the_confirmation_is_no_failed_trial(machine: Machine, changes: int) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.changes_left = changes
    with pytest.raises(PowerCut):
        trial.confirm(machine)
    machine.power()
    assert machine.running == OLD
    trial.confirm_if_pending(machine)
    assert not machine.exists(kernel.FAILED)
    bootstrap(machine, wanted(NEW))
    machine.boot()
    assert machine.running == NEW
    assert_nothing_left(machine)


def test_an_unhealthy_boot_is_not_confirmed(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.system_state = "maintenance"
    for _ in range(2):
        with pytest.raises(CommandError, match=r"systemd says 'maintenance'; .* within 280 s"):
            trial.confirm_if_pending(machine)
    assert machine.timer
    assert NEW in plan(machine, wanted(NEW)).problems[0]
    machine.expire()
    machine.system_state = "running"
    assert trial.confirm_if_pending(machine) == f"kernel {OLD} runs again"
    assert_nothing_left(machine)


def test_nobody_waits_longer_than_the_trial_lasts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SETTLE_SECONDS", 1e9)
    assert module(machine, wanted(NEW))
    machine.boot()
    machine.system_state = "starting"
    machine.put("/proc/uptime", "285.00 1.00\n")
    assert trial.confirm_if_pending(machine).endswith("trial passed")


def test_persistent_memory_must_come_back(machine: Machine) -> None:
    for path, text in PMEM.items():
        machine.put(path, text)
    assert module(machine, wanted(NEW))
    machine.boot()
    Path(machine.path("/sys/class/block/pmem0/size")).unlink()
    Path(machine.path("/sys/class/block/pmem0")).rmdir()
    with pytest.raises(CommandError, match="persistent memory has disappeared: pmem0"):
        trial.confirm_if_pending(machine)


def test_a_reboot_without_a_trial_is_checked_too(machine: Machine) -> None:
    args = reboot_args(OLD, trial=False, arguments=["quiet"], absent_arguments=["console=ttyS0"])
    trial.prepare_reboot(machine, args)
    with pytest.raises(CommandError, match="has not rebooted"):
        trial.confirm(machine)
    assert trial.confirm_if_pending(machine) == ""
    machine.boot()
    with pytest.raises(
        CommandError, match=r"missing: quiet; kernel arguments are still there: console=ttyS0"
    ):
        trial.confirm_if_pending(machine)
    assert not machine.exists(kernel.FAILED)


def test_a_one_time_entry_that_grub_did_not_take_is_no_failed_kernel(machine: Machine) -> None:
    assert module(machine, wanted(NEW))
    machine.put("/proc/sys/kernel/random/boot_id", "another\n")
    with pytest.raises(CommandError, match="GRUB did not start the one-time entry"):
        trial.confirm_if_pending(machine)
    assert not machine.exists(kernel.FAILED)
    assert_nothing_left(machine)


def test_a_menu_that_reads_no_custom_entries_is_refused(machine: Machine) -> None:
    menu = machine.read("/boot/grub/grub.cfg").split("### BEGIN /etc/grub.d/41_custom")[0]
    machine.put("/boot/grub/grub.cfg", menu)
    with pytest.raises(CommandError, match=r"does not read custom\.cfg"):
        module(machine, wanted("", ARGUMENT))


def test_an_entry_that_grub_would_not_read_is_taken_back(machine: Machine) -> None:
    machine.grub_script_check = lambda words: Result(words, 1, "", "syntax error")  # type: ignore[attr-defined]
    with pytest.raises(CommandError, match=r"one-time entry for GRUB: `grub-script-check .* syntax error"):
        module(machine, wanted("", ARGUMENT))
    assert machine.read("/boot/grub/custom.cfg") == ""
    assert bootloader.observe(machine).next_entry == ""


def test_what_others_wrote_into_the_custom_menu_stays(machine: Machine) -> None:
    mine = "menuentry 'memory test' {\n\tlinux16 /memtest\n}\n"
    machine.put("/boot/grub/custom.cfg", mine)
    bootstrap(machine, wanted(NEW))
    assert machine.read("/boot/grub/custom.cfg") == mine


def test_where_entries_are_files_the_trial_is_one_more(tmp_path: Path) -> None:
    system = El(tmp_path)
    for name in ("vmlinuz-", "initramfs-"):
        system.write(f"/boot/{name}{NEW}" + (".img" if name == "initramfs-" else ""), "x")
    trial.prepare_reboot(system, reboot_args(NEW, arguments=["memmap=1G!4G"]))
    text = system.read(f"{BLS}/oeprov-trial.conf")
    assert f"linux /vmlinuz-{NEW}\n" in text
    assert "options root=/dev/sda1 ro memmap=1G!4G panic=15 oops=panic oeprov.trial=" in text
    assert "rd.shell=0 rd.emergency=reboot" in text
    assert ["grub2-reboot", "oeprov-trial"] in system.asked
    assert "oeprov-trial" not in [item.id for item in bootloader.observe(system).entries]
    words = text.split("options ")[1]
    system.put("/proc/cmdline", words)
    system.put("/proc/sys/kernel/osrelease", NEW)
    system.put("/proc/sys/kernel/random/boot_id", "two")
    assert trial.confirm_if_pending(system).endswith("trial passed")
    assert not system.exists(f"{BLS}/oeprov-trial.conf")
    assert bootloader.observe(system).next_entry == ""


def finishes(machine: Machine, desired: Desired, panics: set[str]) -> bool:
    """Whether a run comes to its end, which is a refusal where something panics."""
    try:
        bootstrap(machine, desired)
    except PowerCut:
        return False
    except (CommandError, Refused):
        # A trial in which the power was cut counts as failed too.
        return bool(panics)
    return True


@pytest.mark.parametrize("panics", [set(), {NEW}, {ARGUMENT}], ids=["healthy", "kernel", "argument"])
def test_a_power_cut_anywhere_leaves_a_machine_that_boots_and_goes_on(
    tmp_path: Path, panics: set[str]
) -> None:
    desired = wanted(NEW, ARGUMENT)
    for changes in range(100):
        machine = Machine(tmp_path / str(changes))
        machine.panics = panics
        machine.changes_left = changes
        cut = not finishes(machine, desired, panics)
        machine.power()
        for _ in range(4):
            if finishes(machine, desired, panics):
                break
            machine.remove(kernel.FAILED)
        machine.boot()
        assert machine.running == (OLD if panics else NEW)
        assert (ARGUMENT in machine.cmdline) is not bool(panics)
        if not cut:
            break
    assert changes > 12
    assert not cut


@pytest.mark.parametrize("late", [True, False])
def test_a_mount_whose_device_came_too_late_for_the_boot_is_made_up_for(machine: Machine, late: bool) -> None:
    mounted = "/dev/pmem0 /mnt/pmem0 ext4 rw,dax=always 0 0\n/dev/pmem1 /mnt/mine ext4 rw 0 0\n"
    machine.put("/proc/mounts", mounted)
    machine.put("/etc/fstab", "UUID=f-1 /mnt/pmem0 ext4 dax,nofail 0 0\n")
    trial.prepare_reboot(machine, reboot_args(OLD))
    machine.boot()
    machine.put("/proc/mounts", "" if late else mounted)
    assert trial.confirm(machine).changed
    assert (["mount", "/mnt/pmem0"] in machine.asked) is late
    assert ["mount", "/mnt/mine"] not in machine.asked, "it is not in fstab"


def test_what_a_change_unmounts_stays_unmounted(machine: Machine) -> None:
    machine.put("/proc/mounts", "/dev/pmem0 /mnt/pmem0 ext4 rw,dax=always 0 0\n")
    machine.put("/etc/fstab", "UUID=f-1 /mnt/pmem0 ext4 dax,nofail 0 0\n")
    trial.prepare_reboot(machine, reboot_args(OLD, pmem_stays=False))
    machine.boot()
    machine.put("/proc/mounts", "")
    trial.confirm(machine)
    assert not [argv for argv in machine.asked if argv[0] == "mount"]
