"""Goals of the modules, against the lab's stand-in for ipmctl, which prints what the real tool prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from provision.node import ipmctl, owned, pmem
from provision.node.command import CommandError, Result, System
from provision.node.state import Dimms, State
from provision.node.step import Desired, Part

TOOL = Path(__file__).parents[3] / "provision" / "lab" / "ipmctl.py"
MEMORY = {"goal": "memorymode=100"}


class Host(System):
    """A root with two modules, whose ipmctl is the stand-in."""

    def __init__(self, root: Path, failure: str = "") -> None:
        super().__init__(str(root))
        for number in (0, 1):
            region = root / f"sys/bus/nd/devices/region{number}"
            region.mkdir(parents=True)
            (region / "size").write_text("2147483648\n")
        (root / "etc").mkdir()
        (root / "etc/ipmctl-lab.conf").write_text(failure)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.boots = 0
        self.boot()

    def boot(self) -> None:
        """A new boot, in which goals take effect."""
        self.boots += 1
        Path(self.path("/proc/sys/kernel/random/boot_id")).write_text(f"boot-{self.boots}\n")

    def which(self, name: str) -> str:
        return "/usr/bin/ipmctl" if name == "ipmctl" else ""

    def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
        assert argv[0] == "ipmctl"
        done = subprocess.run(
            [sys.executable, str(TOOL), *argv[1:]],
            env={"IPMCTL_LAB_ROOT": self.root + "/"},
            capture_output=True,
            text=True,
            check=False,
        )
        return Result(argv, done.returncode, done.stdout, done.stderr)


def create(host: Host, args: dict[str, str]) -> bool:
    return ipmctl.ACTIONS["create_goal"](host, args).changed


def test_a_goal_waits_on_every_socket_and_is_applied_at_boot(tmp_path: Path) -> None:
    host = Host(tmp_path)
    before = ipmctl.observe(host)
    assert (before.sockets, before.goals, before.volatile) == ([0, 1], [], 0)
    assert before.app_direct > 0
    assert create(host, MEMORY) is True
    assert ipmctl.observe(host).goals == ["memorymode", "memorymode"]
    assert owned.observe(host) == ["goal:memorymode=100:boot-1"]
    assert create(host, MEMORY) is False
    host.boot()
    after = ipmctl.observe(host)
    assert (after.goals, after.app_direct) == ([], 0)
    assert after.volatile > 0
    assert not ipmctl.mostly_inaccessible(after)


def test_a_goal_can_be_taken_back(tmp_path: Path) -> None:
    host = Host(tmp_path)
    create(host, MEMORY)
    assert ipmctl.ACTIONS["delete_goal"](host, {}).changed is True
    assert ipmctl.observe(host).goals == []
    assert owned.observe(host) == []
    assert ipmctl.ACTIONS["delete_goal"](host, {}).changed is False


def test_error_18_leads_to_the_module_and_not_to_the_loss_of_all(tmp_path: Path) -> None:
    """Pitfall 20 (#180): one module in a wrong slot is no reason to delete the configuration of all."""
    host = Host(tmp_path, "error-18")
    with pytest.raises(CommandError, match=r"`ipmctl show -topology` and `ipmctl show -dimm`") as raised:
        create(host, MEMORY)
    assert "delete" not in str(raised.value)
    assert "-pcd" not in str(raised.value)
    assert ipmctl.observe(host).goals == []


def test_the_version_that_never_applies_goals_is_refused(tmp_path: Path) -> None:
    """Pitfall 20 (#149, #165)."""
    host = Host(tmp_path, "never-applies")
    with pytest.raises(CommandError, match=r"02.00.00.3809 accepts goals but does not apply them"):
        create(host, MEMORY)
    assert ipmctl.observe(host).goals == []


def test_a_firmware_fixed_to_1lm_is_seen_after_the_boot(tmp_path: Path) -> None:
    """Pitfall 20 (#121)."""
    host = Host(tmp_path, "fixed-1lm")
    create(host, MEMORY)
    host.boot()
    state = State(boot_id="boot-2", dimms=ipmctl.observe(host), owned=owned.observe(host))
    part = pmem.plan(state, Desired(kind="bare_metal_pmem", pmem_mode="memory"))
    assert len(part.problems) == 1
    assert "had no effect" in part.problems[0]


def test_a_goal_that_a_boot_leaves_pending_gets_no_further_boot(tmp_path: Path) -> None:
    """Whoever set it; the first boot is planned, and the second says that the firmware did not take it."""
    host = Host(tmp_path)
    host.run(["ipmctl", "create", "-f", "-goal", "memorymode=100"])  # by hand

    def part() -> Part:
        boot_id = host.read("/proc/sys/kernel/random/boot_id").strip()
        dimms = ipmctl.observe(host)._replace(goals=["memorymode", "memorymode"])  # the firmware ignores it
        state = State(boot_id=boot_id, dimms=dimms, owned=owned.observe(host))
        return pmem.plan(state, Desired(kind="bare_metal_pmem", pmem_mode="memory"))

    (register,) = part().before
    assert (register.id, part().reboot_why, part().problems) == (
        "dimm-goal-register",
        "the goal of the modules waits for a boot",
        [],
    )
    assert ipmctl.ACTIONS["register_goal"](host, register.args).changed is True
    assert ipmctl.ACTIONS["register_goal"](host, register.args).changed is False
    assert (part().before, part().problems) == ([], [])
    host.boots += 1
    Path(host.path("/proc/sys/kernel/random/boot_id")).write_text("boot-2\n")
    assert "is still pending: the firmware did not take it" in part().problems[0]


def test_a_goal_that_is_gone_is_not_registered(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no longer pending"):
        ipmctl.ACTIONS["register_goal"](Host(tmp_path), MEMORY)


def test_a_socket_without_a_goal_is_said(tmp_path: Path) -> None:
    class Half(Host):
        def run(self, argv, timeout=60.0, environment=None):  # type: ignore[no-untyped-def]
            if argv[1] == "create":
                argv = [*argv, "-socket", "0"]
            return super().run(argv)

    host = Half(tmp_path)
    with pytest.raises(CommandError, match="1 of 2 sockets have it waiting"):
        create(host, MEMORY)


def test_regions_decide_only_where_ipmctl_says_nothing() -> None:
    assert ipmctl.needs_app_direct(State(dimms=Dimms(physical=4, volatile=4)))
    assert not ipmctl.needs_app_direct(State(dimms=Dimms(physical=4, app_direct=4)))
    assert ipmctl.needs_app_direct(State())
