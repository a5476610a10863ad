"""``oeprov jobs``: what is listed, what is removed, and what must never be."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_job

from provision.cli import main as cli
from provision.cluster.errors import HostError
from provision.hosts import errands
from provision.hosts.journal import is_locked
from provision.jobs import store
from provision.jobs.store import Job, JobState, ProcessState
from provision.node import process
from provision.node.command import System
from provision.node.job import stop as stop_units

DAY = 86400.0
CONNECTION = {
    "kind": "re6p",
    "address": "127.0.0.1",
    "port": 1,
    "user": "",
    "connection": "ssh",
    "private_key": "",
    "ssh_arguments": [],
    "become": False,
    "python": "python3",
    "groups": [],
}


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OEPROV_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state"


@pytest.fixture
def make(state_dir: Path) -> Callable[..., Job]:
    """A job that ended so many days ago; with ``pools`` its newest checkpoint has its rows there."""
    template = make_job(state_dir.parent / "template").spec()

    def job(name: str, days: float, phase: str = "done", *, pools: bool = False, host: str = "") -> Job:
        made = store.create(state_dir, name, datetime(2026, 11, 1, 12, 15))
        processes = []
        for item in template.processes:
            more = {"host": host, "unit": f"oeprov-{made.id}-{item.name}.service"} if host else {}
            if pools and item.role == "parameter_server":
                place = Path("/mnt/pmem0/oeprov") if host else state_dir / "pmem"
                more |= {"storage": str(place), "pools": str(place / made.id / item.name)}
                if not host:
                    Path(more["pools"]).mkdir(parents=True)
                    (Path(more["pools"]) / "rows").write_bytes(bytes(100_000))
            processes.append(item.model_copy(update=more))
        connection = {host: {**CONNECTION, "name": host}} if host else {}
        made.write_spec(
            template.model_copy(update={"id": made.id, "processes": processes, "hosts": connection})
        )
        made.write_state(JobState.model_validate({"phase": phase}))
        checkpoint = made.run_dir / "checkpoints" / "step-0000000100"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"pool": {"servers": 1}} if pools else {}))
        (checkpoint / "rows.oet").write_bytes(bytes(200_000))
        events = [{"event": "start", "steps": 500}, {"event": "step", "step": 100, "loss": 0.5}]
        made.metrics_file.write_text("".join(json.dumps(event) + "\n" for event in events))
        then = time.time() - days * DAY
        for path in (made.job_file, made.state_file, made.directory):
            os.utime(path, (then, then))
        return made

    return job


def left(state_dir: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (state_dir / "jobs").iterdir())


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert cli.run(["jobs", "--json"]) == 0
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)["jobs"]}


def test_jobs_are_listed_with_what_they_take(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["jobs"]) == 0
    assert "no jobs in" in capsys.readouterr().out
    one, _ = make("j1", 3), make("wdl", 2, "interrupted", pools=True)
    os.link(one.run_dir / "checkpoints/step-0000000100/rows.oet", one.run_dir / "again")
    (state_dir / "jobs" / "half-20261101-121500").mkdir()
    assert cli.run(["jobs"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"{one.id} +done .* 100/500 +100 ", shown)
    assert "half-20261101-121500: it has no job.json" in shown
    assert "3 jobs, " in shown
    found = listed(capsys)
    assert list(found) == ["j1", "wdl", "half"], "oldest first"
    assert 200_000 <= found["j1"]["bytes"] < 300_000, "a file with two names takes its place once"
    assert found["wdl"]["pools"][0]["bytes"] >= 100_000
    assert found["half"]["state"] == "incomplete"


def test_rm_asks_and_removes_what_was_named(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    make("j1", 3), make("j2", 2), make("j3", 1)
    assert cli.run(["jobs", "rm", "j1"]) == 1
    assert "no terminal to ask at: add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: "")
    assert cli.run(["jobs", "rm", "j1"]) == 1
    assert "nothing was removed" in capsys.readouterr().out
    assert left(state_dir) == ["j1", "j2", "j3"]
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert cli.run(["jobs", "rm", "j1"]) == 0
    assert "removed 1 job, " in capsys.readouterr().out
    assert cli.run(["jobs", "rm", "j2", "nosuch", "--yes"]) == 1
    assert "no job nosuch" in capsys.readouterr().err
    assert left(state_dir) == ["j2", "j3"], "all or none of the names"
    assert cli.run(["jobs", "rm", "j2", "j2", "j3", "--yes", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 2
    assert left(state_dir) == []


def test_a_job_that_runs_is_not_removed(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job, me = make("j1", 3), os.getpid()
    job.write_state(JobState(phase="running", supervisor_pid=me, supervisor_started=process.start_time(me)))
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    assert (
        f"job {job.id} is running, or may be; stop it first: oeprov stop {job.id}" in capsys.readouterr().err
    )
    assert cli.run(["jobs", "prune", "--keep", "0", "--yes"]) == 0
    job.job_file.write_text("{")
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1, "nobody knows what it is, but it runs"
    assert left(state_dir) == ["j1"]
    unit = ProcessState(name="server-0", role="parameter_server", host="h", pid=1, started=1, unit="u")
    left_behind = make("j2", 1, "interrupted", host="h")
    left_behind.write_state(JobState(phase="interrupted", processes=[unit]))
    assert cli.run(["jobs", "rm", "j2", "--yes"]) == 1
    assert "stop it first" in capsys.readouterr().err


def test_rows_that_only_persistent_memory_has_are_named_and_stay(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make("j1", 3, "interrupted", pools=True)
    pool = state_dir / "pmem" / job.id / "server-0"
    words = f"the rows of the newest checkpoint of job {job.id} are only in {pool} here"
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    assert words in capsys.readouterr().err
    assert cli.run(["jobs", "prune", "--older-than", "1d", "--yes", "--json"]) == 0
    captured = capsys.readouterr()
    assert "are only in" in captured.err
    assert json.loads(captured.out)["removed"] == []
    for words in (["prune", "--older-than", "1d"], ["rm", "j1"]):
        assert cli.run(["jobs", *words, "--yes", "--consent", "j1"]) == 1, "not its id"
        assert "--consent j1: it is none of these jobs of " in capsys.readouterr().err
    assert (pool / "rows").exists()
    job.job_file.write_text("{")
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    assert "are only in persistent memory" in capsys.readouterr().err


@pytest.mark.parametrize("known", [True, False])
def test_the_rows_of_a_job_that_trained_longer_stay(
    state_dir: Path,
    make: Callable[..., Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    known: bool,
) -> None:
    """Its launcher was killed before the new start came here; ``known``: and had said where that would be."""

    def lines(*events: dict[str, object]) -> str:
        return "".join(json.dumps(event) + "\n" for event in events)

    job = make("j1", 3, "running", pools=True, host="h1")
    earlier = lines({"event": "start"}, {"event": "end", "steps": 20})
    there = earlier + lines(
        {"event": "start", "steps": 40},
        {"event": "checkpoint", "step": 31, "path": "/c/step-31", "rows": "pool"},
        {"event": "interrupted", "step": 31, "path": "/c/step-31"},
    )
    job.metrics_file.write_text(earlier)
    processes = [
        ProcessState(name=item.name, role=item.role, host="h1", pid=1, started=1, unit=item.unit)
        for item in job.spec().processes
    ]
    begins = {"events_from": len(earlier)} if known else {}
    job.write_state(JobState.model_validate({"phase": "running", "processes": processes, **begins}))
    if known:
        assert listed(capsys)["j1"]["state"] == "interrupted", "not done: that was the run before"
    kept: dict[str, bool] = {}

    def on_all(hosts: Any, what: str, args: Any, _timeout: int) -> dict[str, Any]:
        assert what == "stop"
        kept[args["role"]] = args["keep_pools"]
        return {"h1": {"stopped": {}, "rows": {}}}

    monkeypatch.setattr(errands, "on_all", on_all)
    monkeypatch.setattr(errands, "run", lambda _host, _what, args, _s: {"events": there[args["offset"] :]})
    assert cli.run(["stop", "j1"]) == 0
    assert kept["parameter_server"]
    assert (job.state().phase, job.state().message) == ("interrupted", "stopped at step 31, which is saved")
    capsys.readouterr()
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    words = f"the rows of the newest checkpoint of job {job.id} are only in /mnt/pmem0/oeprov/"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("mounted", [True, False])
def test_rows_of_servers_whose_units_are_gone_stay_without_consent(
    tmp_path: Path,
    make: Callable[..., Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    mounted: bool,
) -> None:
    """As after a start of them that their host refused, or after playbooks/stop_training.yml."""
    made = make("j1", 3, "running", pools=True, host="h1")
    spec = made.spec().model_copy(update={"processes": made.spec().processes[:1]})
    made.write_spec(spec)
    (server,) = spec.processes
    made.write_state(JobState(phase="interrupted", processes=[server.state(pid=0, started=0)]))
    root = tmp_path / "host"
    root.mkdir()
    if mounted:
        (root / server.pools.lstrip("/")).mkdir(parents=True)
        (root / server.pools.lstrip("/") / "oe-1-super.pool").touch()
    monkeypatch.setattr(
        errands, "on_all", lambda _hosts, _what, args, _seconds: {"h1": stop_units(System(str(root)), args)}
    )
    assert cli.run(["stop", "j1"]) == 0
    assert f"rows that have a checkpoint stay in {server.pools} on h1" in capsys.readouterr().out
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    words = f"are only in {server.pools} on h1; to lose them, add: --consent {made.id}"
    assert words in capsys.readouterr().err


def test_rows_of_which_no_checkpoint_was_reported_need_a_consent(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a script that took checkpoints by itself and then failed."""
    job = make("j1", 3, "failed", pools=True)
    shutil.rmtree(job.run_dir / "checkpoints")
    assert cli.run(["jobs", "prune", "--yes"]) == 1
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    pools = state_dir / "pmem" / job.id / "server-0"
    assert f"are only in {pools} here; to lose them, add: --consent {job.id}" in capsys.readouterr().err
    assert (pools / "rows").exists()
    assert cli.run(["jobs", "rm", "j1", "--yes", "--consent", job.id]) == 0
    assert not pools.exists()


def test_with_consent_the_rows_go_too(state_dir: Path, make: Callable[..., Job]) -> None:
    job = make("j1", 3, "interrupted", pools=True)
    assert cli.run(["jobs", "rm", "j1", "--yes", "--consent", job.id]) == 0
    assert left(state_dir) == []
    assert not (state_dir / "pmem" / job.id).exists()


def test_prune_takes_what_all_options_choose(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, days, phase in (("a", 50, "done"), ("b", 40, "failed"), ("c", 35, "done"), ("d", 1, "done")):
        make(name, days, phase)
    assert cli.run(["jobs", "prune", "--yes"]) == 1
    assert capsys.readouterr().err == (
        "error: jobs prune: no jobs were selected; add --older-than AGE, --keep N or --state STATE\n"
    )
    assert cli.run(["jobs", "prune", "--older-than", "30x", "--yes"]) == 1
    assert "found '30x'; expected a number and m, h, d or w, such as 30d" in capsys.readouterr().err
    assert cli.run(["jobs", "prune", "--state", "doen", "--yes"]) == 1
    assert "--state: found 'doen'; allowed: done, failed" in capsys.readouterr().err
    assert left(state_dir) == ["a", "b", "c", "d"]
    assert cli.run(["jobs", "prune", "--older-than", "30d", "--keep", "2", "--state", "done", "--yes"]) == 0
    assert left(state_dir) == ["b", "c", "d"]
    assert cli.run(["jobs", "prune", "--older-than", "30d", "--yes"]) == 0
    assert left(state_dir) == ["d"]
    (state_dir / "jobs" / "half-20261101-121500").mkdir()
    assert cli.run(["jobs", "prune", "--state", "incomplete", "--yes"]) == 0
    assert left(state_dir) == ["d", "half"], "it may be a launch that has just begun"
    assert cli.run(["jobs", "rm", "half", "--yes"]) == 0


def test_prune_leaves_what_it_cannot_read(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = make("newer", 50, "interrupted")
    state = json.loads(job.state_file.read_text())
    job.state_file.write_text(json.dumps({**state, "phase": "running", "of_a_newer_oeprov": 1}))
    mine = state_dir / "jobs" / "my-saved-checkpoints"
    mine.mkdir()
    (mine / "step-1.tar").touch()
    then = time.time() - 50 * DAY
    for path in (mine, job.state_file, job.directory):
        os.utime(path, (then, then))
    assert listed(capsys)["newer"]["state"] == "unreadable"
    assert cli.run(["jobs", "prune", "--older-than", "30d", "--yes"]) == 0
    assert left(state_dir) == ["my", "newer"]


def test_packages_of_scripts_are_listed_and_go_with_their_jobs(
    state_dir: Path, make: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [make("one", 2), make("two", 1)]
    for job in jobs:
        spec = job.spec()
        worker = spec.processes[-1]
        argv = [f"{state_dir}/environments/{job.name}/bin/python", *worker.argv[1:]]
        worker = worker.model_copy(update={"argv": argv})
        job.write_spec(spec.model_copy(update={"processes": [*spec.processes[:-1], worker]}))
    for name in ("one", "two", "launching"):
        (state_dir / "environments" / name).mkdir(parents=True)
        (state_dir / "environments" / name / "package").write_bytes(b"x" * 5000)
        if name != "launching":
            os.utime(state_dir / "environments" / name, (1, 1))
    assert cli.run(["jobs"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"packages of scripts: 3 in {state_dir}/environments, [0-9.]+ [KM]iB; 1 of no job", said)
    assert cli.run(["jobs", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["environments"]
    assert [(item["path"].rpartition("/")[2], item["jobs"]) for item in made] == [
        ("launching", []), ("one", [jobs[0].id]), ("two", [jobs[1].id])
    ]  # fmt: skip
    assert cli.run(["jobs", "rm", jobs[0].id, "--yes"]) == 0
    assert "removed packages of scripts that no job uses: 1" in capsys.readouterr().out
    assert sorted(os.listdir(state_dir / "environments")) == [".lock", "launching", "two"]


def test_what_a_job_has_on_hosts_goes_first(
    state_dir: Path,
    make: Callable[..., Job],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make("j1", 3, "done", host="h1", pools=True)
    asked: list[tuple[str, dict[str, Any]]] = []
    answer: dict[str, Any] = {"h1": HostError("h1", "does not answer")}

    def on_all(hosts: Any, what: str, args: Any, _timeout: int) -> dict[str, Any]:
        assert list(hosts) == ["h1"]
        asked.append((what, args))
        return answer

    monkeypatch.setattr(errands, "on_all", on_all)
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    shown = capsys.readouterr().out
    assert f"on host h1: /mnt/pmem0/oeprov/{job.id}/server-0, /var/lib/oeprov/jobs/{job.id} is " in shown
    assert "h1: does not answer; the job stays" in shown
    assert left(state_dir) == ["j1"]
    answer["h1"] = {}
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 0
    what, args = asked[-1]
    assert (what, args["directory"]) == ("remove", f"/var/lib/oeprov/jobs/{job.id}")
    assert [item["name"] for item in args["servers"]] == ["server-0", "worker-0"]
    assert left(state_dir) == []
    make("j2", 3, "done", host="h1")
    assert cli.run(["jobs", "rm", "j2", "--yes", "--here-only"]) == 0
    assert len(asked) == 2, "no host was asked"


@pytest.mark.parametrize("host", ["", "h1"])
def test_nobody_resumes_a_job_while_its_directory_goes(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    job = make("wdl", 1.0, host=host)
    held: list[bool] = []
    monkeypatch.setattr(errands, "on_all", lambda hosts, *_: {name: {} for name in hosts})
    removed = shutil.rmtree

    def rmtree(path: Path, *more: Any, **named: Any) -> None:
        if path == job.directory:
            held.append(is_locked(job.directory.parents[1], job_cluster))
        removed(path, *more, **named)

    job_cluster = job.spec().cluster
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert cli.run(["jobs", "rm", job.id, "--yes"]) == 0
    assert held == [True]


def test_a_link_is_not_followed(state_dir: Path, make: Callable[..., Job], tmp_path: Path) -> None:
    job = make("j1", 3)
    job.directory.rename(tmp_path / "elsewhere")
    job.directory.symlink_to(tmp_path / "elsewhere")
    assert cli.run(["jobs", "rm", "j1", "--yes"]) == 1
    assert (tmp_path / "elsewhere/run/checkpoints/step-0000000100/manifest.json").exists()
    assert job.job_file.exists()
