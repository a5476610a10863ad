"""`oeprov history`: what the journal says of earlier runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provision.cli import main as cli
from provision.hosts import runs
from provision.hosts.journal import Journal, cluster_lock

NAMES = [f"re6p-{number:03}" for number in range(1, 97)]


def record(state_dir: Path, run: str, **fields: Any) -> Journal:
    journal = Journal(state_dir / "journal.jsonl", run)
    given = {"cluster": "c", "hosts": NAMES, "pending": NAMES[:-1], "who": "ann@desk"}
    journal.write("run", **{**given, "command": "oeprov bootstrap --yes", **fields})
    return journal


def step(journal: Journal, host: str, name: str = "mount", ok: bool | None = True) -> None:
    journal.begin(host, name, f"{name} it")
    if ok is not None:
        journal.end(host, name, ok=ok, message="" if ok else "no space left", seconds=1.25)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one of an older version that had nothing to do, and one with all outcomes."""
    place = tmp_path_factory.mktemp("recorded")
    old = Journal(place / "journal.jsonl", "bootstrap-20261120-101500")
    old.write("run", cluster="c", hosts=["re6p-001"])
    old.write("finished", outcome="nothing to do", failed=[])
    journal = record(place, "bootstrap-20261124-120000")
    for host in NAMES[:90]:
        step(journal, host, "packages")
        step(journal, host, "mount", ok=host not in NAMES[3:5])
    journal.rebooted(NAMES[0], 231.4)
    journal.write("finished", outcome="failed", failed=NAMES[3:5])
    return place


@pytest.fixture
def state_dir(tmp_path: Path, recorded: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "state"))


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def history(state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("OEPROV_STATE_DIR", str(state_dir))

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.run(["history", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_runs_with_who_what_and_hosts_by_outcome(history: Call) -> None:
    code, out, _ = history()
    assert code == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    (old,) = [line for line in lines if "20261120" in line]
    assert "– nothing to do 0:0" in old
    start = next(number for number, line in enumerate(lines) if "20261124" in line)
    assert "ann@desk 2 failed" in lines[start]
    assert lines[start].endswith("oeprov bootstrap --yes")
    assert lines[start + 1 : start + 4] == ["5 not reached", "88 done", "1 unchanged"]


def test_the_last_runs(history: Call) -> None:
    _, out, _ = history("--last", "1")
    assert "20261120" not in out
    assert "1 older run(s): --last 0 shows all" in out
    assert "20261120" in history("--last", "0")[1]


def test_a_run_by_its_hosts(history: Call) -> None:
    code, out, _ = history("bootstrap-20261124")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("bootstrap-20261124-120000: failed; began 20")
    assert " by ann@desk, took 0:" in lines[0]
    assert [line.split() for line in lines[1:6]] == [
        ["oeprov", "bootstrap", "--yes"],
        ["failed", "2", "hosts:", "re6p-[004-005]"],
        ["not", "reached", "5", "hosts:", "re6p-[091-095]"],
        ["done", "88", "hosts:", "re6p-[001-003,006-090]"],
        ["unchanged", "1", "host:", "re6p-096"],
    ]
    assert "✗ re6p-[004-005] (2 hosts): mount it: no space left" in lines
    assert len(lines) < 12


def test_steps_of_one_host(history: Call) -> None:
    out = history("bootstrap-20261124", "--host", "re6p-004")[1]
    rows = [line.replace("│", " ").split() for line in out.splitlines() if "it" in line]
    assert [row[:2] + row[3:] for row in rows] == [
        ["packages", "it", "1.2", "s", "✓", "done"],
        ["mount", "it", "1.2", "s", "✗", "no", "space", "left"],
    ]
    assert "re6p-004: failed" in out
    assert "a reboot took 231.4 s" not in out
    assert "a reboot took 3:51" in history("--host", "re6p-001")[1], "without a run: the last one with steps"


def test_json(history: Call) -> None:
    found = json.loads(history("--json")[1])["runs"]
    assert [run["id"] for run in found] == ["bootstrap-20261120-101500", "bootstrap-20261124-120000"]
    assert found[1]["hosts"] == {"done": 88, "failed": 2, "not reached": 5, "unchanged": 1}
    assert (found[1]["who"], found[1]["state"]) == ("ann@desk", "failed")
    run = json.loads(history("bootstrap-20261124", "--json")[1])
    assert run["outcome_by_host"]["re6p-004"] == "failed"
    host = json.loads(history("bootstrap-20261124", "--host", "re6p-001", "--json")[1])
    assert host["reboot_seconds"] == [231.4]
    assert [(item["id"], item["ok"], item["seconds"]) for item in host["steps"]] == [
        ("packages", True, 1.25),
        ("mount", True, 1.25),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["bootstrap"],
            "bootstrap is 2 runs: bootstrap-20261120-101500, bootstrap-20261124-120000; give more",
        ),
        (["boostrap-20261124-120000"], "did you mean bootstrap-20261124-120000?"),
        (["bootstrap-20261124", "--host", "re6p-0004"], "no host re6p-0004; did you mean re6p-0"),
        (["--host", "nix"], "journal.jsonl has no host nix"),
        (["--host", "re6p-096"], "has no step on host re6p-096: nothing was changed there"),
    ],
)
def test_names_that_are_not_known(history: Call, words: list[str], message: str) -> None:
    code, out, err = history(*words)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_journal(tmp_path: Path, history: Call) -> None:
    code, out, _ = history("--state-dir", str(tmp_path / "other"))
    assert code == 0
    assert "nothing was changed from this state directory yet\n" in out
    assert history("x", "--state-dir", str(tmp_path / "other"))[0] == 1


def test_a_run_that_goes_on_is_no_interrupted_one(state_dir: Path, history: Call) -> None:
    journal = record(state_dir, "bootstrap-20261125-080000")
    step(journal, NAMES[0])
    step(journal, NAMES[1], ok=None)
    with cluster_lock(state_dir, "c"):
        run = runs.read(state_dir)[-1]
        assert run.state == "running"
        assert [run.host_outcome(name) for name in NAMES[:3]] == ["done", "running", "running"]
        assert "running" in history("bootstrap-20261125", "--host", NAMES[1])[1]
    run = runs.read(state_dir)[-1]
    assert run.state == "interrupted"
    assert [run.host_outcome(name) for name in NAMES[:3]] == ["done", "interrupted", "not reached"]


def test_damaged_entries_are_left_out(state_dir: Path, history: Call) -> None:
    with (state_dir / "journal.jsonl").open("a") as file:
        file.write('{"event": "end", "run": "bootstrap-20261124-120000", "time": 3, "seconds": "x"}\n')
        file.write('{"event": "run", "run": "odd", "hosts": 7, "pending": "x"}\n{"event": "finished"\n')
    code, out, _ = history()
    assert code == 0
    assert "odd" in out
    assert history("odd")[0] == 0
