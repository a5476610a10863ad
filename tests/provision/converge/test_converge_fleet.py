"""A change of many hosts, some of which are bad: who is changed, who is left out, and what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from one_host import how

from provision.cluster.errors import ConvergeError, HostError
from provision.cluster.inventory import Host, Inventory
from provision.converge import changes
from provision.converge.changes import Consent
from provision.converge.rolling import Failures
from provision.hosts import carrier, playbook
from provision.hosts.carrier import Carried
from provision.hosts.playbook import PlaybookRun, TaskResult
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.node.ansible_python import CARRIED
from provision.node.state import State
from provision.node.step import Plan, Step

PYTHON = Step("python", "install a Python", "none", role=CARRIED, preparing=True)
REBOOT = Step("reboot", "reboot", "a new kernel", reboots=True, action="reboot", role="kernel")


@dataclass
class Fleet:
    """Simulated hosts, which a run of the playbook converges unless they are told to fail."""

    inventory: Inventory
    state_dir: Path
    problems: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    fails: dict[str, set[str]] = field(default_factory=dict)  # phase → hosts
    old: set[str] = field(default_factory=set)  # hosts without a Python for Ansible
    bare: set[str] = field(default_factory=set)  # of these: hosts whose other steps are only known with it
    carried: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    runs: list[tuple[str, list[str]]] = field(default_factory=list)

    def survey(self, inventory: Inventory) -> ClusterSurvey:
        found = ClusterSurvey()
        for name in inventory.hosts:
            if name in self.lost:
                found.lost.append(HostError(name, "refuses connections"))
                continue
            steps = [] if name in self.done else [REBOOT]
            if name in self.old and name not in self.carried:
                steps = [PYTHON] if name in self.bare else [PYTHON, *steps]
            found.states[name] = State()
            why = self.problems.get(name)
            found.plans[name] = Plan(name, steps, problems=[why] if why else [])
        return found

    def play(self, name: str, inventory: Inventory, **arguments: Any) -> PlaybookRun:
        phase, hosts = arguments["variables"]["oeprov_phase"], list(inventory.hosts)
        self.runs.append((phase, hosts))
        failed = [host for host in hosts if host in self.fails.get(phase, ())]
        if phase != "prepare":
            self.done.update(set(hosts).difference(failed))
        results = [TaskResult(host, "kernel", "Reboot", "failed", {"msg": "no"}, 1.0) for host in failed]
        return PlaybookRun("failed" if failed else "ok", Path("ansible.log"), results)

    def carry_out(
        self,
        hosts: Mapping[str, Host],
        steps: Mapping[str, Step],
        run: Mapping[str, Any],
        on_start: Callable[[str, Step], None],
    ) -> list[Carried]:
        found = []
        for name, step in steps.items():
            on_start(name, step)
            ok = name not in self.fails.get("carry", ())
            self.carried |= {name} if ok else set()
            found.append(Carried(name, step, ok, "" if ok else "no space left", 1.0))
        return found

    def bootstrap(self, failures: Failures = Failures.limited) -> int:
        consent = Consent(yes=True, failures=failures)
        return changes.bootstrap(self.inventory, how(self.state_dir, consent))

    @property
    def turned(self) -> set[str]:
        """Hosts that had a turn."""
        return {host for phase, hosts in self.runs if phase != "prepare" for host in hosts}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Fleet]:
    def build(count: int) -> Fleet:
        path = tmp_path / "inventory.yml"
        lines = "".join(f"        n{number}: {{oeprov_kind: cpu}}\n" for number in range(count))
        path.write_text(
            "all:\n  children:\n    workers: {hosts: {n0: }}\n    parameter_servers:\n      hosts:\n" + lines
        )
        fleet = Fleet(load(path), tmp_path / "state")
        monkeypatch.setattr(changes, "survey", fleet.survey)
        monkeypatch.setattr(playbook, "run", fleet.play)
        monkeypatch.setattr(carrier, "carry_out", fleet.carry_out)
        return fleet

    return build


def names(numbers: Collection[int]) -> set[str]:
    return {f"n{number}" for number in numbers}


def test_a_bad_host_of_each_sort_does_not_stop_the_others(
    make: Callable[[int], Fleet], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make(100)
    fleet.problems = {"n40": "/data: is a file"}
    fleet.lost = {"n41"}
    fleet.fails = {"prepare": {"n42"}, "turn": {"n43"}}
    assert fleet.bootstrap() == 1
    assert fleet.turned == names(range(100)) - {"n40", "n41", "n42"}
    said = " ".join(capsys.readouterr().out.split())
    assert "1 host is left out for problems: n40" in said
    assert "n41: refuses connections" in said
    assert "the change stopped" not in said
    assert "4 hosts are left; to go on with these alone, add: --limit @" in said
    (left,) = (fleet.state_dir / "left").iterdir()
    assert left.read_text().split() == ["n40", "n42", "n43", "n41"]
    # The rest alone, once they are repaired.
    fleet.problems, fleet.lost, fleet.fails, fleet.runs = {}, set(), {}, []
    fleet.inventory = load(fleet.inventory.path, f"@{left}")
    assert fleet.bootstrap() == 0
    assert fleet.turned == {"n40", "n41", "n42", "n43"}


@pytest.mark.parametrize("phase", ["prepare", "turn"])
def test_a_failed_canary_stops_the_others(
    make: Callable[[int], Fleet], capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    fleet = make(30)
    fleet.fails = {phase: {"n0"}}
    assert fleet.bootstrap() == 1
    assert fleet.turned == ({"n0"} if phase == "turn" else set())
    said = " ".join(capsys.readouterr().out.split())
    assert "n0, which is changed first, failed; nothing was changed on 29 host(s)" in said
    assert fleet.bootstrap(failures=Failures.keep_going) == 1
    assert fleet.turned == names(range(30)) - ({"n0"} if phase == "prepare" else set())


def test_a_host_that_gets_no_python_does_not_stop_the_others(
    make: Callable[[int], Fleet], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make(30)
    fleet.old = names(range(20, 30))
    fleet.bare = names(range(25, 30))
    fleet.fails = {"carry": {"n21", "n26"}}
    assert fleet.bootstrap() == 1
    assert fleet.done == names(range(30)) - {"n21", "n26"}
    rounds = [set(hosts) for phase, hosts in fleet.runs if phase == "prepare"]
    assert rounds == [names(range(25)) - {"n21"}, names(range(25, 30)) - {"n26"}]
    said = " ".join(capsys.readouterr().out.split())
    assert "✗ n21: no space left" in said
    assert "the change stopped" not in said
    assert "2 hosts are left" in said
    assert said.count("Ansible's log: ansible.log") == 1  # the others converged


def test_a_canary_that_gets_no_python_stops_the_others(
    make: Callable[[int], Fleet], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make(30)
    fleet.old, fleet.fails = {"n0", "n5"}, {"carry": {"n0"}}
    assert fleet.bootstrap() == 1
    assert fleet.runs == []
    assert "n0, which is changed first, failed; nothing was changed on 29 host(s)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert fleet.bootstrap(failures=Failures.keep_going) == 1
    assert fleet.done == names(range(1, 30))


def test_a_canary_that_is_lost_is_no_reason_to_take_another_one(make: Callable[[int], Fleet]) -> None:
    fleet = make(30)
    fleet.fails = {"turn": {"n0"}}
    play = fleet.play

    def start_and_play(name: str, inventory: Inventory, **arguments: Any) -> PlaybookRun:
        for host in inventory.hosts:
            arguments["on_start"](host, "kernel", "Reboot")
        return play(name, inventory, **arguments)

    playbook.run = start_and_play  # type: ignore[assignment]  # the fixture puts it back
    assert fleet.bootstrap() == 1
    fleet.lost, fleet.fails = {"n0"}, {}
    with pytest.raises(ConvergeError, match="host n0 became unreachable while bootstrap-"):
        fleet.bootstrap()
    assert fleet.bootstrap(failures=Failures.keep_going) == 1
    assert fleet.done == names(range(1, 30))
    assert fleet.bootstrap() == 1  # n0 is known, and was gone on without


def test_problems_are_no_failures_of_the_run(make: Callable[[int], Fleet]) -> None:
    """They were known before the user agreed."""
    fleet = make(100)
    fleet.problems = dict.fromkeys(names(range(50, 70)), "/data: is a file")
    fleet.fails = {"turn": {"n30"}}
    assert fleet.bootstrap() == 1
    assert fleet.turned == names(range(100)) - names(range(50, 70))


def test_fail_fast(make: Callable[[int], Fleet]) -> None:
    fleet = make(30)
    strict = {"failures": Failures.fail_fast}
    fleet.problems = {"n7": "/data: is a file", "n8": "no"}
    with pytest.raises(ConvergeError, match=r"^host n7: /data: is a file \(and 1 more hosts\); nothing was"):
        fleet.bootstrap(**strict)
    fleet.problems, fleet.lost = {}, {"n7"}
    with pytest.raises(ConvergeError, match=r"^n7 cannot be reached; nothing was changed \(--fail-fast\)"):
        fleet.bootstrap(**strict)
    assert fleet.runs == []
    fleet.lost, fleet.fails = set(), {"turn": {"n1"}}
    assert fleet.bootstrap(**strict) == 1
    assert fleet.turned == {"n0", "n1"}


def test_problems_of_all_hosts_are_an_error(make: Callable[[int], Fleet]) -> None:
    fleet = make(3)
    fleet.problems = dict.fromkeys(fleet.inventory.hosts, "the system is unknown")
    with pytest.raises(ConvergeError, match=r"^host n0: the system is unknown \(and 2 more hosts\); nothing"):
        fleet.bootstrap()


def test_many_failures_stop_the_others(
    make: Callable[[int], Fleet], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make(100)
    fleet.fails = {"turn": names(range(1, 30))}
    assert fleet.bootstrap() == 1
    assert len(fleet.turned) == 26
    said = " ".join(capsys.readouterr().out.split())
    assert "25 hosts failed, and 10 may (rollout_failures)" in said
    assert "nothing was changed on 74 host(s) after that: n26, n27, n28, n29, n30 and 69 more" in said


def test_the_hosts_of_a_run_are_no_argument(
    make: Callable[[int], Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6,000 names are more than the kernel takes as one argument (128 KiB)."""
    monkeypatch.undo()
    count = 6000
    lines = "".join(f"        host-with-a-long-name-{number}: {{oeprov_kind: cpu}}\n" for number in range(60))
    path = tmp_path / "inventory.yml"
    path.write_text(
        f"all:\n  children:\n    parameter_servers:\n      hosts:\n{lines}"
        "    workers: {hosts: {host-with-a-long-name-0: }}\n"
    )
    found = load(path)
    one = next(iter(found.hosts.values()))
    hosts = {f"host-with-a-long-name-{number}": one for number in range(count)}
    seen: dict[str, Any] = {}

    def run(**arguments: Any) -> Any:
        seen.update(arguments)
        seen["hosts"] = json.loads(Path(arguments["inventory"][1]).read_text())["all"]
        return type("Result", (), {"status": "successful", "rc": 0})

    monkeypatch.setattr("ansible_runner.run", run)
    inventory = Inventory(**{**vars(found), "hosts": hosts})
    options: dict[str, Any] = {"state_dir": tmp_path, "run_id": "r", "variables": {}}
    assert playbook.run("bootstrap", inventory, stop=StopRequest(), **options).outcome == "ok"
    words = [str(value) for key, value in seen.items() if key in ("limit", "tags", "cmdline", "playbook")]
    assert all(len(word) < 1000 for word in words)
    assert list(seen["hosts"]["children"][seen["limit"]]["hosts"]) == list(hosts)


def test_steps_of_many_hosts_cost_few_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are in the file at once, which outlives this process, and are flushed to the disk together."""
    from provision.hosts import journal as journals

    flushed = 0

    def fsync(descriptor: int) -> None:
        nonlocal flushed
        flushed += 1

    monkeypatch.setattr(journals.os, "fsync", fsync)
    journal = journals.Journal(tmp_path / "journal.jsonl", "run")
    journal.write_all({"event": "before", "host": f"n{number}"} for number in range(1000))
    assert flushed <= 2  # the file and its directory
    for number in range(1000):
        journal.begin(f"n{number}", "reboot", "reboot")
        assert re.search(rf'"host": "n{number}", "step"', journal.path.read_text()[-200:])
    assert len(list(journal.read())) == 2000
    assert 2 <= flushed < 1000
