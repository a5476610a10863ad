"""Progress over many hosts: on a terminal, and as lines of a log."""

import io
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from provision.cli.views import steps as stepview
from provision.cli.views.steps import StepView
from provision.cluster import share
from provision.converge.outlook import Pace
from provision.hosts.journal import Journal
from provision.hosts.playbook import TaskResult
from provision.node.step import Plan, Step

PACKAGES = Step("packages", "install it", "missing", role="runtime", preparing=True)
REBOOT = Step("reboot", "boot it", "a new kernel", reboots=True, action="reboot", role="kernel")
MOUNT = Step("mount", "mount it", "missing")
STEPS = [PACKAGES, REBOOT, MOUNT]


class Rollout:
    """A simulated run of Ansible over hosts, in turns, on a clock of its own."""

    def __init__(self, count: int, journal: Journal, *, terminal: bool = False) -> None:
        self.now = 0.0
        self.names = [f"re6p-{number:04}" for number in range(1, count + 1)]
        self.turns = [self.names[:1], *(self.names[start : start + 200] for start in range(1, count, 200))]
        self.out = io.StringIO()
        plans = {name: Plan(name, STEPS) for name in self.names}
        console = Console(file=self.out, width=200, force_terminal=terminal)
        pace = Pace({}, 240.0, is_assumed=False)
        self.view = StepView(console, journal, plans, self.turns, pace, clock=lambda: self.now)
        self.expected = sum(seconds for seconds, _ in self.view._phases)

    def step(self, host: str, step: Step, ok: bool = True) -> None:
        item = {"id": step.id, "what": step.what, "ok": ok, "message": "no space", "seconds": 1.0}
        status: Any = "ok" if ok else "failed"
        self.view.result(TaskResult(host, step.role, "a task", status, {"steps": [item]}, 1.0))

    def task(self, host: str, task: str, role: str = "", status: Any = "ok", seconds: float = 0.0) -> None:
        self.view.result(TaskResult(host, role, task, status, {}, seconds))

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 10):
            self.now += 10
            self.view.beat()

    def prepare(self) -> None:
        for name in self.names:
            self.view.start(name, "runtime", "Install packages")
        self.wait(300)
        for name in self.names:
            self.step(name, PACKAGES)
            self.task(name, stepview.PREPARED)

    def turn(self, names: list[str], fails: Callable[[str], bool] = lambda _: False) -> None:
        for name in names:
            self.view.start(name, "kernel", "Set up the kernel")
            self.view.start(name, "kernel", stepview.REBOOT)
        self.wait(4 * 240)  # 200 hosts, 50 at once
        for name in names:
            self.step(name, REBOOT)
            self.task(name, stepview.REBOOT, "kernel", seconds=231.0)
            self.view.start(name, "pmem", "Set the mode")
        for name in names:
            self.step(name, MOUNT, ok=not fails(name))
            if not fails(name):
                self.task(name, stepview.DONE)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


class Memory(Journal):
    """A journal that is not written to disk: thousands of entries, each flushed, take a while."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"), "run")
        self.entries: list[dict[str, Any]] = []

    def write_all(self, entries: Iterable[Mapping[str, Any]], *, wait: bool = True) -> None:
        self.entries += map(dict, entries)


def test_a_thousand_hosts_fit_into_few_lines() -> None:
    rollout = Rollout(1000, Memory())
    some = random.Random(5)  # noqa: S311
    bad = set(some.sample(rollout.names[1:], 60))
    rollout.prepare()
    for turn in rollout.turns:
        rollout.turn(turn, lambda name: name in bad)
    minutes = rollout.now / 60
    assert len(rollout.lines) <= minutes + len(rollout.turns) + 21 + 1
    assert sum(line.startswith("✗ re6p-") for line in rollout.lines) == 20
    assert sum("further failures are counted" in line for line in rollout.lines) == 1
    assert "1,000 hosts: 940 done, 60 failed; 6 of 6 turns done, ETA 0:00" in rollout.lines[-1]
    ends = [line for line in rollout.lines if "rebooting" not in line and "of 6 turns done" in line]
    assert [line.split("; ")[1].split(" of")[0] for line in ends][-6:] == ["1", "2", "3", "4", "5", "6"]


def test_states_slowest_hosts_and_the_remaining_time() -> None:
    rollout = Rollout(401, Memory())
    assert rollout.view.lines()[:1] == ["401 hosts: 401 waiting"]
    rollout.prepare()
    rollout.turn(rollout.turns[0])
    second = rollout.turns[1]
    for name in second:
        rollout.view.start(name, "kernel", "Set up the kernel")
    rollout.view.start(second[7], "kernel", stepview.REBOOT)
    rollout.now += 100
    rollout.view.start(second[3], "kernel", stepview.REBOOT)
    rollout.view.start(second[4], "kernel", stepview.REBOOT)
    rollout.task(second[4], stepview.REBOOT, "kernel", status="skipped")  # nothing to reboot for
    rollout.now += 20
    states, eta, slowest = rollout.view.lines()
    assert states == "401 hosts: 1 done, 2 rebooting, 198 changing, 200 prepared"
    assert eta.startswith("1 of 3 turns done, ETA ")
    assert slowest.startswith("slowest: re6p-0002 changing 2:00, ")
    for name in second:
        rollout.task(name, stepview.DONE)
    assert "2 of 3 turns done" in rollout.view.lines()[1]


def test_the_remaining_time_is_about_right_all_along() -> None:
    """When everything takes as long as expected, spent and remaining time add up to the whole."""
    rollout = Rollout(601, Memory())
    seen = []

    def look() -> None:
        left = rollout.view._remaining()
        assert left is not None
        seen.append(rollout.now + left)

    beat = rollout.view.beat

    def looking() -> None:
        beat()
        look()

    rollout.view.beat = looking  # type: ignore[method-assign]
    rollout.prepare()
    for turn in rollout.turns:
        rollout.turn(turn)
        look()
    assert rollout.view._remaining() == 0
    assert rollout.expected == pytest.approx(13 * 10 + 250 + 3 * 4 * 250)
    assert min(seen) > 0.6 * rollout.now
    assert max(seen) < 1.6 * rollout.now


def test_a_lost_host_has_failed_and_a_task_outside_a_role_changes_none() -> None:
    rollout = Rollout(20, Memory())
    one, two = rollout.names[:2]
    rollout.task(one, "Stop if an earlier host failed", status="failed")
    rollout.task(two, "Refuse a plan that no longer fits its host", status="unreachable")
    rollout.view.start(two, "kernel", "Set up the kernel")
    assert rollout.view.lines()[0] == "20 hosts: 1 failed, 19 waiting"
    rollout.task("localhost", "Build a wheel", "runtime")  # a host of no plan


def test_reboots_and_durations_are_in_the_journal() -> None:
    journal = Memory()
    rollout = Rollout(2, journal)
    rollout.prepare()
    rollout.turn(rollout.names[:1])
    took = [entry for entry in journal.entries if "seconds" in entry]
    assert {"event": "rebooted", "host": "re6p-0001", "seconds": 231.0} in took
    assert [entry["step"] for entry in took if entry["event"] == "end"] == [
        "packages",
        "packages",
        "reboot",
        "mount",
    ]


def test_few_hosts_have_a_line_per_step() -> None:
    rollout = Rollout(stepview.FEW, Memory())
    rollout.prepare()
    assert len(rollout.lines) == stepview.FEW
    assert rollout.lines[0] == "✓ re6p-0001: install it (1.0 s)"


def test_a_terminal_has_a_summary_that_is_drawn_once_per_second() -> None:
    rollout = Rollout(401, Memory(), terminal=True)
    drawn: list[Any] = []
    with rollout.view.show_by(drawn.append):
        rollout.prepare()
        rollout.now += 5
        rollout.turn(rollout.turns[0])
        text = rollout.view.__rich__().plain
        rollout.now += 0.5
        assert rollout.view.__rich__().plain == text
        rollout.now += 1
        assert rollout.view.__rich__().plain != text
    assert drawn == [rollout.view]
    assert [line.strip()[:20] for line in text.splitlines()] == [
        "21:05  401 hosts: 1 ",
        "1 of 3 turns done, E",
    ]


def test_the_tasks_that_are_followed_are_those_of_the_playbooks() -> None:
    for name in ("bootstrap", "pmem_mode"):
        text = (share.root() / "playbooks" / f"{name}.yml").read_text()
        tasks = [task["name"] for play in yaml.safe_load(text) for task in play.get("tasks", [])]
        assert stepview.PREPARED in tasks
        assert tasks[-1] == stepview.DONE
    kernel = yaml.safe_load((share.root() / "roles" / "kernel" / "tasks" / "main.yml").read_text())
    (reboot,) = [task for task in kernel if "ansible.builtin.reboot" in task]
    assert reboot["name"] == stepview.REBOOT
