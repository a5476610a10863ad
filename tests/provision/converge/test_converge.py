import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job
from one_host import how
from rich.console import Console

from provision.cli import main as cli
from provision.cli.views.steps import StepView
from provision.cluster.errors import ConvergeError, HostError, OeprovError
from provision.cluster.host_names import named_objects
from provision.cluster.inventory import Inventory
from provision.converge import assumed_state, changes
from provision.converge.changes import Consent
from provision.hosts import playbook
from provision.hosts.journal import Journal, cluster_lock
from provision.hosts.playbook import TaskResult
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.jobs.store import JobState
from provision.node import numa, process
from provision.node.state import State
from provision.node.step import Plan, Step

INVENTORY = """\
all:
  vars: {{oeprov_cluster: test}}
  children:
    parameter_servers: {{hosts: {{one: }}}}
    workers: {{hosts: {{one: }}}}
  hosts:
    one: {{{host}}}
"""
LOCAL = "ansible_connection: local, oeprov_kind: local, runtime_extra: none"
MAKE = Step(
    "directory", "make /data", "it is missing", action="make_directory", args={"path": "/data", "size": 0}
)
WIPE = Step("fs", "make ext4 on /dev/pmem0", "fsdax", destroys=["/dev/pmem0"], action="make_filesystem")


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


def inventory(state_dir: Path, host: str = LOCAL) -> Inventory:
    path = state_dir.parent / "inventory.yml"
    path.write_text(INVENTORY.format(host=host))
    return load(path, state_dir=state_dir)


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Stand in for the hosts: what is seen first, and after Ansible ran; gives the playbook runs."""

    def arrange(first: Plan | HostError, then: Plan | None = None) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = []

        def survey(_: Inventory) -> ClusterSurvey:
            seen = first if not runs or then is None else then
            if isinstance(seen, HostError):
                return ClusterSurvey(lost=[seen])
            return ClusterSurvey(states={"one": State()}, plans={"one": seen})

        def run(name: str, found: Inventory, **arguments: Any) -> playbook.PlaybookRun:
            runs.append({"name": name, **arguments})
            return playbook.PlaybookRun("ok", Path("ansible.log"), [])

        monkeypatch.setattr(changes, "survey", survey)
        monkeypatch.setattr(playbook, "run", run)
        return runs

    return arrange


def bootstrap(state_dir: Path, host: str = LOCAL, **arguments: Any) -> int:
    bundle = arguments.pop("bundle", None)
    arguments.setdefault("consent", Consent(yes=True))
    return changes.bootstrap(inventory(state_dir, host), how(state_dir, **arguments), bundle=bundle)


def test_converged_host_needs_no_ansible(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = see(Plan("one"))
    assert bootstrap(state_dir, consent=Consent()) == 0
    assert "converged already: nothing to do" in capsys.readouterr().out
    assert runs == []


def test_files_for_prometheus_come_with_metrics(state_dir: Path, see: Any) -> None:
    see(Plan("one"))
    assert bootstrap(state_dir) == 0
    assert not (state_dir / "monitoring").exists()
    assert bootstrap(state_dir, f"{LOCAL}, parameter_server_metrics_port: 7780", check=True) == 0
    assert not (state_dir / "monitoring").exists()
    assert bootstrap(state_dir, f"{LOCAL}, parameter_server_metrics_port: 7780") == 0
    assert "127.0.0.1:7780" in (state_dir / "monitoring" / "prometheus.yml").read_text()


def test_plan_is_applied_with_its_digest(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = see(Plan("one", [MAKE], digest="d1"), then=Plan("one"))
    assert bootstrap(state_dir, as_json=True) == 0
    (run,) = runs
    approved = run["host_variables"]["one"]["oeprov_plan"]
    assert (approved["digest"], approved["steps"]) == ("d1", ["directory"])
    assert approved["desired"]["host"] == "one"
    assert json.loads(capsys.readouterr().out)["converged"] is True


def test_steps_left_after_a_change_are_reported(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    see(Plan("one", [MAKE]), then=Plan("one", [MAKE]))
    assert bootstrap(state_dir) == 1
    shown = capsys.readouterr().out
    assert "✗ one: still to do: make /data" in shown
    assert "ansible.log" in shown


def test_check_changes_nothing(state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = see(Plan("one", [MAKE]))
    assert bootstrap(state_dir, consent=Consent(), check=True) == 2
    assert "make /data" in capsys.readouterr().out
    assert runs == []
    assert not state_dir.exists()
    see(Plan("one"))
    assert bootstrap(state_dir, consent=Consent(), check=True) == 0
    see(HostError("one", "no route"))
    assert bootstrap(state_dir, consent=Consent(), check=True) == 1


@pytest.mark.parametrize(("answer", "applied"), [("", False), ("n", False), ("y", True), ("Yes", True)])
def test_prompt_means_no_unless_told(
    state_dir: Path,
    see: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    applied: bool,
) -> None:
    runs = see(Plan("one", [MAKE]), then=Plan("one"))
    monkeypatch.setattr("sys.stdin", io.StringIO(answer + "\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert bootstrap(state_dir, consent=Consent()) == (0 if applied else 1)
    assert bool(runs) is applied
    assert "Apply these steps? [y/N] " in capsys.readouterr().out


def test_nobody_to_ask(state_dir: Path, see: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = see(Plan("one", [MAKE]))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConvergeError, match="no terminal to ask at: add --yes"):
        bootstrap(state_dir, consent=Consent())
    assert runs == []


def test_data_is_lost_only_with_consent_by_name(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = see(Plan("one", [MAKE, WIPE]), then=Plan("one"))
    for consent in (Consent(yes=True), Consent(True, ["one:/dev/pmem1"])):
        with pytest.raises(ConvergeError, match=r"data would be lost.*add: --consent one:/dev/pmem0"):
            bootstrap(state_dir, consent=consent)
    assert runs == []
    assert "one:/dev/pmem1 was named, but no step of this plan destroys it" in capsys.readouterr().out
    assert bootstrap(state_dir, consent=Consent(True, ["one:/dev/pmem0"])) == 0
    assert "was named, but" not in capsys.readouterr().out
    assert runs[0]["host_variables"]["one"]["oeprov_plan"]["consent"] == ["/dev/pmem0"]


def test_the_flags_that_agree_to_many_objects_are_folded_and_can_be_given_so(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"re6p-{number:03d}" for number in range(1, 97)]
    found = ClusterSurvey(dict.fromkeys(names, State()), {name: Plan(name, [MAKE, WIPE]) for name in names})
    monkeypatch.setattr(changes, "survey", lambda _: found)
    with pytest.raises(ConvergeError) as caught:
        bootstrap(state_dir, consent=Consent(yes=True))
    flag = "re6p-[001-096]:/dev/pmem0"
    assert str(caught.value) == f"data would be lost; to agree, add: --consent '{flag}'"
    assert named_objects([flag, "one:/dev/a,b"]) == [
        *(f"{name}:/dev/pmem0" for name in names),
        "one:/dev/a,b",
    ]
    with pytest.raises(OeprovError, match=r"--consent re6p-\[1:/dev/pmem0: its hosts cannot be read"):
        named_objects(["re6p-[1:/dev/pmem0"])


def test_what_is_seen_only_after_a_reboot_is_planned_again(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [[MAKE], [WIPE], []]
    runs: list[dict[str, Any]] = []

    def run(name: str, found: Inventory, **arguments: Any) -> playbook.PlaybookRun:
        runs.append(arguments)
        return playbook.PlaybookRun("ok", Path("ansible.log"), [])

    monkeypatch.setattr(
        changes, "survey", lambda _: ClusterSurvey({"one": State()}, {"one": Plan("one", seen[len(runs)])})
    )
    monkeypatch.setattr(playbook, "run", run)
    with pytest.raises(ConvergeError, match=r"data would be lost.*--consent one:/dev/pmem0"):
        bootstrap(state_dir)
    assert len(runs) == 1, "the first round destroyed nothing, the second needs consent of its own"
    assert "Steps that only became visible now:" in capsys.readouterr().out
    runs.clear()
    assert bootstrap(state_dir, consent=Consent(True, ["one:/dev/pmem0"])) == 0
    assert [run["host_variables"]["one"]["oeprov_plan"]["steps"] for run in runs] == [["directory"], ["fs"]]
    assert len({run["run_id"] for run in runs}) == 2
    assert len({run["variables"]["oeprov_run"]["id"] for run in runs}) == 1


def test_a_round_that_changes_nothing_is_the_last(state_dir: Path, see: Any) -> None:
    runs = see(Plan("one", [MAKE]), then=Plan("one", [MAKE]))
    assert bootstrap(state_dir) == 1
    assert len(runs) == 1


def test_many_hosts_are_shown_on_one_screen_before_the_prompt(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans, consent and results of many hosts; the journal says who changed what."""
    path = state_dir.parent / "inventory.yml"
    names = [f"re6p-{number:04}" for number in range(1, 201)]
    hosts = "".join(f"        {name}: {{ansible_host: {name}}}\n" for name in names)
    path.write_text(
        "all:\n  vars: {oeprov_cluster: test, oeprov_kind: re6p}\n  children:\n"
        f"    parameter_servers:\n      hosts:\n{hosts}    workers:\n      hosts:\n        {names[0]}:\n"
    )
    reboot = Step("reboot", "boot it", "a new kernel", reboots=True, action="reboot", role="kernel")
    plans = {name: Plan(name, [reboot, MAKE], notes=["a note"]) for name in names}
    seen = ClusterSurvey({name: State() for name in names}, plans)

    def run(name: str, found: Inventory, **arguments: Any) -> playbook.PlaybookRun:
        failed = [
            TaskResult(name, "pmem", "Make it", "failed", {"msg": f"192.0.2.{number}: no space"}, 1.0)
            for number, name in enumerate(names[:40])
        ]
        return playbook.PlaybookRun("failed", Path("ansible.log"), failed)

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(changes, "survey", lambda _: seen)
    monkeypatch.setattr(changes.history, "write", lambda *_: None)
    monkeypatch.setattr(playbook, "run", run)
    monkeypatch.setattr("sys.argv", ["/usr/bin/oeprov", "bootstrap", "--limit", ",".join(names)])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert changes.bootstrap(load(path, state_dir=state_dir), how(state_dir)) == 1
    before, after = capsys.readouterr().out.split("Apply these steps? [y/N] ")
    shown = before.splitlines()
    assert len(shown) <= 15
    assert "re6p-[0001-0200] (200 hosts): 2 steps" in [line.rstrip() for line in shown]
    assert [line.rstrip() for line in shown[:2]] == [
        "destroys  nothing",
        "reboots   200 hosts in 7 turns, about 35 min (5 min per reboot is assumed):",
    ]
    (left,) = (state_dir / "left").iterdir()
    assert len(left.read_text().splitlines()) == 200
    assert after.splitlines() == [
        "✗ re6p-[0001-0040] (40 hosts): Make it: 192.0.2.…: no space",
        "Ansible's log: ansible.log",
        "✗ the change stopped: re6p-0001, which is changed first, failed; nothing was changed on 160 host(s) "
        "after that: re6p-0041, re6p-0042, re6p-0043, re6p-0044, re6p-0045 and 155 more; repair re6p-0001, "
        "re6p-0002, re6p-0003, re6p-0004, re6p-0005 and 35 more, or leave it out with --limit "
        "'all:!re6p-0001:!re6p-0002:!re6p-0003:!re6p-0004:!re6p-0005', and run this again",
        f"200 hosts are left; to go on with these alone, add: --limit @{left}",
        "✗ re6p-[0001-0200] (200 hosts): still to do: boot it",
        "✗ re6p-[0001-0200] (200 hosts): still to do: make /data",
    ]
    begun = next(Journal(state_dir / "journal.jsonl", "x").read())
    assert begun["pending"] == begun["hosts"] == names
    assert begun["command"].startswith("oeprov bootstrap --limit re6p-0001,re6p-0002,")
    assert len(begun["command"]) == 501, "a command line of 2,000 letters is cut in the journal"
    assert "@" in begun["who"]


def test_problems_stop_everything(state_dir: Path, see: Any) -> None:
    runs = see(Plan("one", [MAKE], problems=["pmem_directory /data: is a file"]))
    with pytest.raises(ConvergeError, match="host one: pmem_directory /data: is a file; nothing was changed"):
        bootstrap(state_dir)
    assert runs == []


def test_problem_without_a_step_is_not_success(state_dir: Path, see: Any) -> None:
    see(Plan("one", problems=["the system is unknown"]))
    assert bootstrap(state_dir) == 1


def test_host_that_is_not_seen(state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = see(HostError("one", "connection refused"))
    assert bootstrap(state_dir) == 1
    assert "one: connection refused" in capsys.readouterr().out
    assert runs == []


def test_running_job_is_not_disturbed(state_dir: Path, see: Any) -> None:
    runs = see(Plan("one", [MAKE]))
    job = make_job(state_dir)
    me = os.getpid()
    job.write_state(JobState(phase="running", supervisor_pid=me, supervisor_started=process.start_time(me)))
    with pytest.raises(ConvergeError, match=f"training job {job.id} is running .* oeprov stop {job.id}"):
        bootstrap(state_dir)
    assert runs == []


def test_interrupted_step_is_named(state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]) -> None:
    earlier = Journal(state_dir / "journal.jsonl", "bootstrap-1")
    earlier.write("run", cluster="test")
    earlier.begin("one", "runtime", "install tensorflow")
    see(Plan("one"))
    assert bootstrap(state_dir) == 0
    assert (
        "one: an earlier run (bootstrap-1) was interrupted during or before: install"
        in capsys.readouterr().out
    )
    assert bootstrap(state_dir) == 0
    assert "interrupted" not in capsys.readouterr().out


def test_a_host_lost_during_its_change_keeps_the_others_unchanged(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each run would try the next host: a canary that is lost is no reason to take another one."""
    path = state_dir.parent / "inventory.yml"
    path.write_text(
        "all:\n  vars: {oeprov_cluster: test, oeprov_kind: cpu}\n  children:\n"
        "    parameter_servers: {hosts: {one: , two: }}\n    workers: {hosts: {one: }}\n"
    )
    plans = {name: Plan(name, [MAKE]) for name in ("one", "two")}
    gone = HostError("one", "refuses connections")
    seen = ClusterSurvey({name: State() for name in plans}, plans)
    runs: list[list[str]] = []

    def run(name: str, found: Inventory, **arguments: Any) -> playbook.PlaybookRun:
        nonlocal seen
        runs.append(list(found.hosts))
        arguments["on_start"](runs[-1][0], "pmem", "Bring persistent memory to its mode")
        failed = TaskResult(runs[-1][0], "kernel", "Reboot", "failed", {"msg": "timed out"}, 60.0)
        seen = ClusterSurvey({"two": State()}, {"two": plans["two"]}, [gone])
        return playbook.PlaybookRun("failed", Path("ansible.log"), [failed])

    monkeypatch.setattr(changes, "survey", lambda _: seen)
    monkeypatch.setattr(playbook, "run", run)
    agreed = how(state_dir, Consent(yes=True))
    assert changes.bootstrap(load(path, state_dir=state_dir), agreed) == 1
    with pytest.raises(
        ConvergeError, match=r"host one became unreachable while bootstrap-.* leave it out with"
    ):
        changes.bootstrap(load(path, state_dir=state_dir), agreed)
    assert len(runs) == 1
    seen = ClusterSurvey({"two": State()}, {"two": plans["two"]})
    assert changes.bootstrap(load(path, "two", state_dir=state_dir), agreed) == 1
    assert runs == [["one", "two"], ["two"]]


def test_second_run_is_refused(state_dir: Path, see: Any) -> None:
    see(Plan("one"))
    with cluster_lock(state_dir, "test"), pytest.raises(ConvergeError, match=f"by pid {os.getpid()} "):
        bootstrap(state_dir)


def test_pmem_mode_that_a_kind_cannot_do(state_dir: Path, see: Any) -> None:
    runs = see(Plan("one"))
    with pytest.raises(ConvergeError, match="host one: mode fsdax: kind local is this machine"):
        changes.pmem_mode(inventory(state_dir), "fsdax", how(state_dir, Consent(True)))
    assert runs == []


def test_pmem_mode_leaves_out_hosts_without_persistent_memory(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "provision.hosts.observe.observe",
        lambda found: {name: assumed_state.state(host.desired()) for name, host in found.hosts.items()},
    )
    path = state_dir.parent / "two.yml"
    path.write_text(
        "all:\n  children:\n    parameter_servers: {hosts: {ps: {oeprov_kind: re6p}}}\n"
        "    workers: {hosts: {w: {oeprov_kind: cpu}}}\n"
    )
    found = load(path, state_dir=state_dir)
    checked = how(state_dir, as_json=True, check=True)
    assert changes.pmem_mode(found, "system-ram", checked) == 1, "too much movable memory for its DRAM"
    assert [plan["host"] for plan in json.loads(capsys.readouterr().out)["pending"]] == ["ps"]
    with pytest.raises(ConvergeError, match="host w: mode system-ram: kind cpu has no persistent memory"):
        changes.pmem_mode(load(path, "w", state_dir=state_dir), "system-ram", checked)


def test_retry_trials_repeats_failed_trials_on_all_hosts(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = "5.15.0-130-generic\t2026-11-21\tit came up, but was not confirmed within 300 s"

    def observe(found: Inventory) -> dict[str, State]:
        seen = {name: assumed_state.state(host.desired()) for name, host in found.hosts.items()}
        return {
            name: state._replace(kernel=state.kernel._replace(failed=[failed]))
            for name, state in seen.items()
        }

    monkeypatch.setattr("provision.hosts.observe.observe", observe)
    path = state_dir.parent / "two.yml"
    hosts = "{hosts: {ps: {oeprov_kind: cpu, kernel_version: 5.15.0-130-generic}}}"
    path.write_text(f"all:\n  children:\n    parameter_servers: {hosts}\n    workers: {hosts}\n")
    command = ["bootstrap", "-i", str(path), "--check", "--json", "--state-dir", str(state_dir)]
    assert cli.run(command) == 1
    (shown,) = json.loads(capsys.readouterr().out)["pending"]
    assert "not confirmed within 300 s; to try again, add --retry-trials" in shown["problems"][0]
    assert cli.run([*command, "--retry-trials"]) == 2
    (shown,) = json.loads(capsys.readouterr().out)["pending"]
    assert shown["problems"] == []
    assert any(line.endswith("it is tried again") for line in shown["notes"])


def test_pmem_mode_does_its_own_part_only(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = Step("packages", "install libpmem1", "missing", role="runtime", scope="training")
    runs = see(Plan("one", [packages, MAKE]), then=Plan("one", [packages]))
    found = inventory(state_dir, LOCAL + ", pmem_mode: none")
    code = changes.pmem_mode(found, "directory", how(state_dir, Consent(True)))
    assert code == 0
    assert runs[0]["name"] == "pmem_mode"
    approved = runs[0]["host_variables"]["one"]["oeprov_plan"]
    assert approved["steps"] == ["directory"]
    assert approved["desired"]["pmem_mode"] == "directory"
    assert approved["desired"]["pmem_directory"] == str(state_dir / "pmem0")
    said = capsys.readouterr().out
    assert (
        "inventory.yml still has another pmem_mode for one: the next bootstrap would plan to undo this change"
        in said
    )
    assert "  +    one: {ansible_connection: local, oeprov_kind: local, " in said
    flags = f"-i {found.path} --state-dir {state_dir} --write-inventory"
    assert f"to write it: oeprov pmem-mode directory {flags}" in said


def test_the_advice_of_pmem_mode_names_the_same_hosts(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state_dir.parent / "inventory.yml"
    hosts = dict.fromkeys(("one", "two", "three"), f"{{{LOCAL}, pmem_mode: none}}")
    lines = "".join(f"        {name}: {host}\n" for name, host in hosts.items())
    path.write_text(
        f"all:\n  children:\n    parameter_servers:\n      hosts:\n{lines}"
        "    workers:\n      hosts:\n        cpu: {oeprov_kind: cpu, ansible_host: 192.0.2.7}\n"
    )
    for limit, flag in (
        ("one,two", " --limit one,two"),
        (None, ""),
        ("one:two:three", ""),  # the mode is for no other host
    ):
        see(Plan("one"))
        found = load(path, limit, state_dir=state_dir)
        assert changes.pmem_mode(found, "directory", how(state_dir)) == 0
        words = f"oeprov pmem-mode directory -i {path}{flag} --state-dir {state_dir} --write-inventory"
        assert f"to write it: {words}\n" in capsys.readouterr().out


NONE = f"{LOCAL}, pmem_mode: none"


def to_directory(state_dir: Path, see: Any, **arguments: Any) -> tuple[int, str]:
    """Exit code, and what the inventory says then."""
    found = inventory(state_dir, NONE)
    see(Plan("one"))
    write = arguments.pop("write_inventory", False)
    code = changes.pmem_mode(found, "directory", how(state_dir, **arguments), write_inventory=write)
    return code, load(found.path, state_dir=state_dir).hosts["one"].pmem.mode


def test_pmem_mode_writes_the_inventory(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert to_directory(state_dir, see, write_inventory=True, check=True) == (0, "none")
    said = capsys.readouterr().out
    assert "pmem_mode: directory}" in said, "--check shows it and does not do it"
    assert "note:" not in said
    assert to_directory(state_dir, see, write_inventory=True) == (0, "directory")
    said = capsys.readouterr().out
    assert "pmem_mode: directory}" in said
    assert "✓ wrote" in said
    assert "still has another" not in said
    assert to_directory(state_dir, see, write_inventory=True, as_json=True) == (0, "directory")
    assert json.loads(capsys.readouterr().out)["converged"] is True
    found = load(state_dir.parent / "inventory.yml", state_dir=state_dir)
    see(Plan("one"))
    assert changes.pmem_mode(found, "directory", how(state_dir)) == 0
    assert "still says" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "arguments", "asked", "mode"),
    [
        ("", {}, True, "none"),
        ("n", {}, True, "none"),
        ("y", {}, True, "directory"),
        ("y", {"consent": Consent(yes=True)}, False, "none"),
        ("y", {"as_json": True}, False, "none"),
        ("y", {"check": True}, False, "none"),
    ],
)
def test_pmem_mode_asks_before_it_writes(
    state_dir: Path,
    see: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    arguments: dict[str, Any],
    asked: bool,
    mode: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer + "\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert to_directory(state_dir, see, **arguments) == (0, mode)
    assert ("Write this into the inventory? [y/N]" in capsys.readouterr().out) is asked


def test_an_inventory_that_cannot_be_edited(
    state_dir: Path, see: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state_dir.parent / "inventory.yml"
    path.write_text(INVENTORY.format(host=LOCAL + ", pmem_mode: '{{ mode }}', mode: none"))
    see(Plan("one"))
    found = load(path, state_dir=state_dir)
    for write, code in ((False, 0), (True, 1)):
        found_code = changes.pmem_mode(found, "directory", how(state_dir), write_inventory=write)
        assert found_code == code, "the flag asks for it"
        assert "inventory.yml was not edited: " in capsys.readouterr().out


def test_pmem_mode_plans_arguments_and_reboot_but_no_upgrade(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "provision.hosts.observe.observe",
        lambda found: {name: assumed_state.state(host.desired()) for name, host in found.hosts.items()},
    )
    host = "ansible_host: 192.0.2.7, oeprov_kind: re7p, kernel_version: newest, kernel_arguments: [quiet]"
    code = changes.pmem_mode(inventory(state_dir, host), "fsdax", how(state_dir, as_json=True, check=True))
    assert code == 2
    [plan] = json.loads(capsys.readouterr().out)["pending"]
    words = " ".join(step["what"] for step in plan["steps"])
    assert "kernel arguments: add memmap=1008G!257G" in words
    reboots = [step["what"] for step in plan["steps"] if step["reboots"]]
    assert reboots == ["boot once on trial: add memmap=1008G!257G"]
    assert "quiet" not in words
    assert "newest kernel" not in words
    assert "wheel" not in words


def test_steps_are_journalled_before_and_after(state_dir: Path) -> None:
    out = io.StringIO()
    journal = Journal(state_dir / "journal.jsonl", "run-1")
    progress = StepView(Console(file=out, width=120), journal, {"one": Plan("one", [MAKE])})
    progress.start("one", "", "Refuse a plan that no longer fits its host")
    progress.start("one", "kernel", "Bring the kernel")
    assert list(journal.read()) == []
    progress.start("one", "pmem", "Validating arguments")
    progress.start("one", "pmem", "Bring persistent memory to its mode")
    assert [entry["event"] for entry in journal.read()] == ["begin"]
    step = {"id": "directory", "what": "make /data", "ok": False, "message": "no space", "seconds": 1.25}
    progress.result(TaskResult("one", "pmem", "Bring …", "failed", {"steps": [step], "msg": "no space"}, 1.3))
    assert [(entry["event"], entry.get("ok")) for entry in journal.read()] == [
        ("begin", None),
        ("end", False),
    ]
    assert out.getvalue() == "✗ one: make /data (1.2 s)\n"


def test_a_finished_step_prints_what_it_found(state_dir: Path) -> None:
    [step] = numa.plan_memkind(State(), [], ["dax0.0"])
    assert step.what == "memory nodes: <node of the new memory>"
    out = io.StringIO()
    view = StepView(Console(file=out, width=120), Journal(state_dir / "journal.jsonl", "run-1"), {})
    done = {"id": step.id, "what": step.what, "ok": True, "message": "memory nodes: 1", "seconds": 0.1}
    failed = {**done, "ok": False, "message": "memkind can have no memory nodes"}
    for item in (done, failed):
        view.result(TaskResult("one", "pmem", "Bring …", "ok", {"steps": [item]}, 0.1))
    assert out.getvalue().splitlines() == [
        "✓ one: memory nodes: 1 (0.1 s)",
        "✗ one: memory nodes: <node of the new memory> (0.1 s)",
    ]


@pytest.mark.process
def test_bootstrap_for_real(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap(state_dir) == 0
    shown = capsys.readouterr().out
    assert f"✓ one: make {state_dir / 'pmem0'}" in shown.replace("\n", "")
    assert (state_dir / "pmem0").is_dir()
    kinds = [entry["event"] for entry in Journal(state_dir / "journal.jsonl", "x").read()]
    assert kinds == ["run", "begin", "end", "finished"]
    assert list((state_dir / "ansible").iterdir()) == [], "the copy of the environment is gone"
    assert bootstrap(state_dir, consent=Consent()) == 0
    assert "converged already" in capsys.readouterr().out


@pytest.mark.process
def test_stale_plan_is_refused_with_the_difference(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def agree_while_the_host_changes(*_: object) -> bool:
        (state_dir / "pmem0").mkdir()
        (state_dir / "pmem0" / "somebody's").touch()
        return True

    monkeypatch.setattr(changes._Change, "_has_consent", agree_while_the_host_changes)
    assert bootstrap(state_dir) == 1
    shown = capsys.readouterr().out
    assert "the host has changed since the plan was made; nothing was done" in shown
    assert "directories: was" in shown
    assert "'exists': True" in shown
    kinds = [entry["event"] for entry in Journal(state_dir / "journal.jsonl", "x").read()]
    assert "begin" not in kinds
    assert (state_dir / "pmem0" / "somebody's").exists()
