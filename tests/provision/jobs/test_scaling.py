"""Running jobs that go on with other servers, with stand-ins for the runtime."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_environment, make_job
from test_training_launch import inventory, ready, state_dir, three_hosts
from test_training_supervisor import assert_nothing_left, until, until_running

from provision.cli import main
from provision.cli.views.training import JobTerminal
from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey
from provision.jobs import drained, draining, going_on, launching, placement, scale_request, scaling, store
from provision.jobs.request import LaunchOptions, Request, ScaleOptions
from provision.jobs.screen import make_console
from provision.jobs.store import Job, JobState
from provision.node import process

__all__ = ["ready", "state_dir"]  # fixtures


def agree(_: str) -> bool:
    return True


def running(job: Job, phase: Any = "running") -> None:
    """Let this process be the job's supervisor."""
    pid = os.getpid()
    job.write_state(JobState(phase=phase, supervisor_pid=pid, supervisor_started=process.start_time(pid)))


@pytest.fixture
def started(state_dir: Path, tmp_path: Path, ready: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job in the background with two servers, whose worker waits in step 3."""
    monkeypatch.chdir(tmp_path)
    venv = make_environment(tmp_path / "venv", worker="waits")
    found = inventory(state_dir, f"runtime_venv: {venv}\n      parameter_server_count: 2")
    assert launching.launch(found, LaunchOptions(detach=True), state_dir=state_dir, screen=JobTerminal()) == 0
    (job,) = store.all_jobs(state_dir)
    until(job.run_dir / "waiting")
    yield job
    if (state := job.state()).supervised and state.supervisor_pid != os.getpid():
        os.kill(state.supervisor_pid, signal.SIGTERM)
        while job.state().supervised:
            time.sleep(0.02)
    assert_nothing_left(job)


@pytest.mark.process
def test_a_running_job_goes_on_with_other_servers(
    started: Job, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its supervisor stays, no step is lost or repeated, and the command says how long training paused."""
    job, flags = started, ["--yes", "--state-dir", str(state_dir)]
    supervisor = job.state().supervisor_pid
    capsys.readouterr()
    assert main.run(["scale", job.id, "--servers", "3", "--json", *flags]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"job": job.id, "servers": 3, "step": 3, "paused_s": 1.25}
    assert "2 servers on localhost → 3 servers on localhost from step 3; training paused 1.2 s" in said.err
    assert job.state().supervisor_pid == supervisor
    while job.state().supervised:
        time.sleep(0.02)
    assert job.state().phase == "done"
    events = [json.loads(line) for line in job.metrics_file.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, 9)]
    (pause,) = (event for event in events if event["event"] == "pause")
    assert (pause["step"], pause["servers"]) == (3, 3)
    assert scale_request.read(job) is None
    assert Request.from_job(job.spec()).total_servers == 3, "later resumes keep it"
    assert main.run(["scale", job.id, "--servers", "2", *flags]) == 1
    assert f"job {job.id} is not running: it is done; nothing was changed" in capsys.readouterr().err


@pytest.mark.process
def test_a_stopped_job_whose_rows_are_in_pools_resumes_with_other_servers(
    started: Job, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with the servers that have the rows; the checkpoint after the first step is in files."""
    job, flags = started, ["--state-dir", str(state_dir)]
    assert main.run(["stop", job.id, *flags]) == 0
    (job.run_dir / "checkpoints" / "step-0000000003" / "manifest.json").write_text('{"pool": {"servers": 2}}')
    (job.run_dir / "waits-again").touch()
    capsys.readouterr()
    assert main.run(["resume", job.id, "--servers", "3", *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"are in the pools of 2 servers: job {job.id} trains with these until it reports" in said
    events = [json.loads(line) for line in job.metrics_file.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, 9)]
    (pause,) = (event for event in events if event["event"] == "pause")
    assert (pause["step"], pause["servers"]) == (4, 3)
    assert Request.from_job(job.spec()).total_servers == 3
    request = scale_request.read(job)
    assert request is not None
    assert request.phase == "done"


@pytest.mark.process
def test_servers_that_cannot_start_leave_the_job_with_its_former_ones(
    started: Job, state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that refuses to be prepared: the directory of its rows has vanished."""
    plan = launching.Launch.plan_scale

    def without_directory(self: launching.Launch, *words: Any) -> scale_request.ScaleRequest:
        request = plan(self, *words)
        changed = [item.model_copy(update={"storage": "/nowhere"}) for item in request.spec.processes]
        spec = request.spec.model_copy(update={"processes": changed})
        return request.model_copy(update={"spec": spec})

    monkeypatch.setattr(launching.Launch, "plan_scale", without_directory)
    assert main.run(["scale", "--servers", "3", "--yes", "--state-dir", str(state_dir)]) == 1
    said = capsys.readouterr().err
    assert "/nowhere is not a directory" in said
    assert "the job goes on with its servers as before" in said
    while started.state().supervised:
        time.sleep(0.02)
    assert started.state().phase == "done"
    assert len(launching.servers_by_host(started.spec().processes)) == 2


@pytest.mark.process
def test_what_cannot_be_scaled_is_refused_and_unchanged(
    started: Job, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--yes", "--state-dir", str(state_dir)]
    before, spec = started.state(), started.spec()

    def refused(words: str, *arguments: str) -> None:
        assert main.run([*arguments, "--state-dir", str(state_dir)]) == 1
        assert words in capsys.readouterr().err
        assert (started.state(), started.spec()) == (before, spec)
        assert scale_request.read(started) is None
        assert not drained.read(state_dir)

    refused("--servers: found", "scale", "--servers", "0", "--yes")
    refused("may have 64 in all, 64 each; nothing was changed", "scale", "--servers", "65", "--yes")
    refused("runs on 2 servers on localhost already; nothing", "scale", "--servers", "2", "--yes")
    refused("no terminal to ask at: add --yes; nothing was changed", "scale", "--servers", "3")
    path = str(state_dir.parent / "inventory.yml")
    refused("no host of group parameter_servers", "drain", "localhost", "--yes", "-i", path)
    refused("has no such host", "drain", "elsewhere", "--yes", "-i", path)
    refused("host localhost is not drained; nothing", "undrain", "localhost", "-i", path)
    assert main.run(["stop", "--state-dir", str(state_dir)]) == 0
    assert main.run(["scale", started.id, "--servers", "3", *flags]) == 1
    assert "is not running: it is interrupted; nothing was changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("starting", "is starting; try again once it trains"),
        ("scaling", "is being scaled already; wait for it"),
        ("stopping", "is being stopped"),
        ("failed", "is not running: it is failed"),
    ],
)
def test_phases_that_refuse(tmp_path: Path, phase: str, words: str) -> None:
    job = make_job(tmp_path)
    running(job, phase)
    with pytest.raises(TrainingError, match=f"job {job.id} {words}; nothing was changed"):
        scaling.check(job, ScaleOptions(agree, 3))


def test_jobs_that_refuse(tmp_path: Path) -> None:
    """A recovery, a script without checkpoints, programs of others, servers alone, a lost launcher."""
    job = make_job(tmp_path)
    running(job)
    job.metrics_file.write_text('{"event": "server_gone", "message": "the connection broke"}\n')
    with pytest.raises(TrainingError, match=r"waits for a lost server .the connection broke.; scale it when"):
        scaling.check(job, ScaleOptions(agree, 3))
    job.metrics_file.unlink()
    scaling.check(job, ScaleOptions(agree, 3))
    spec = job.spec()
    job.write_spec(spec.model_copy(update={"settings": {**spec.settings, "script": "/x/train.py"}}))
    with pytest.raises(TrainingError, match="has reported no checkpoint"):
        scaling.check(job, ScaleOptions(agree, 3))
    others = [item.model_copy(update={"adapted": True}) for item in spec.processes]
    job.write_spec(spec.model_copy(update={"processes": others}))
    with pytest.raises(TrainingError, match="is trained by a program of others"):
        scaling.check(job, ScaleOptions(agree, 3))
    job.write_spec(spec.model_copy(update={"processes": spec.processes[:1]}))
    with pytest.raises(TrainingError, match="are parameter servers alone"):
        scaling.check(job, ScaleOptions(agree, 3))


def request_of(job: Job, servers: int) -> scale_request.ScaleRequest:
    """A request for so many stand-ins."""
    other = make_job(job.directory.parents[1], servers=servers, worker="waits").spec()
    processes = [
        item.model_copy(update={"argv": [word.replace(other.id, job.id) for word in item.argv]})
        for item in other.processes
    ]
    spec = job.spec().model_copy(update={"processes": processes})
    here: scale_request.Units = {"localhost": []}
    return scale_request.ScaleRequest(words="1 → 2", spec=spec, units=here)


@pytest.mark.process
def test_a_stop_while_a_job_is_scaled_ends_it_at_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stop request does not kill the workers, which write their checkpoint."""
    job, stop, events = make_job(tmp_path, worker="waits"), StopRequest(), []
    job.make()

    def ask() -> None:
        until(job.run_dir / "waiting")
        scale_request.write(job, request_of(job, 2))

    prepare = going_on.preparing.prepare

    def stopped(*words: Any, **more: Any) -> None:
        stop.ask()
        prepare(*words, **more)

    monkeypatch.setattr(going_on.preparing, "prepare", stopped)
    thread = threading.Thread(target=ask)
    thread.start()

    outcome = going_on.supervise(job, False, lambda: nullcontext(events.append), make_console(), stop)
    thread.join()
    assert (outcome.phase, outcome.message) == ("interrupted", "stopped at step 3, which is saved")
    assert job.state().phase == "interrupted"
    request = scale_request.read(job)
    assert request is not None
    assert (request.phase, request.message) == ("failed", outcome.message)


@pytest.mark.process
def test_a_launcher_that_dies_in_the_middle_is_told_of(
    started: Job, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`oeprov resume` says with how many servers the job goes on, and the next request is a new one."""
    path = state_dir.parent / "inventory.yml"
    request = request_of(started, 3).model_copy(update={"words": "2 servers → 3 servers"})
    os.kill(until_running(started).supervisor_pid, signal.SIGKILL)
    scale_request.write(started, request, phase="accepted")
    while any(item.alive for item in started.state().processes):
        time.sleep(0.02)
    with pytest.raises(TrainingError, match="is not running: it is interrupted"):
        scaling.check(started, ScaleOptions(agree, 3))
    assert main.run(["resume", started.id, "-i", str(path), "--state-dir", str(state_dir)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "its launcher ended while the job was scaled (2 servers → 3 servers): it resumes with 2" in said
    assert scale_request.read(started) is None


def test_the_supervisor_refuses_what_it_cannot_follow(tmp_path: Path) -> None:
    """Before the first step, while a server is restarted, and after the last step."""
    from provision.jobs.supervisor import Supervisor

    job = make_job(tmp_path)
    job.make()
    supervisor = Supervisor(job, lambda _: None, StopRequest())

    def answer() -> str:
        scale_request.remove(job)
        scale_request.write(job, request_of(job, 2))
        supervisor._seen_request = 0
        assert supervisor._accepted_request() is None
        request = scale_request.read(job)
        assert request is not None
        assert request.phase == "refused"
        return request.message

    assert "has reported no step since its workers started" in answer()
    supervisor.last["step"] = {"event": "step", "step": 1}
    supervisor.last["trained"] = {"event": "trained"}
    assert "has made its last step" in answer()
    del supervisor.last["trained"]
    job.metrics_file.write_text('{"event": "server_gone", "message": "gone"}\n')
    assert "waits for a lost server (gone)" in answer()
    job.metrics_file.unlink()
    scale_request.write(job, request_of(job, 2))
    supervisor._seen_request = 0
    accepted = supervisor._accepted_request()
    assert accepted is not None
    assert accepted.phase == "accepted"


def test_servers_are_spread_evenly(state_dir: Path) -> None:
    found, _, _ = three_hosts(state_dir)

    def counts(total: int) -> dict[str, int]:
        spread = placement.spread(found, total)
        return {name: spread.hosts[name].servers() for name in spread.parameter_servers}

    assert counts(0) == {"a": 1, "b": 1}
    assert counts(5) == {"a": 3, "b": 2}
    assert counts(1) == {"a": 1}
    assert list(placement.spread(found, 1).hosts) == ["a", "w"], "nobody asks a host without processes"
    with pytest.raises(TrainingError, match=r"found 129; the hosts of group parameter_servers in .* 128 in"):
        placement.spread(found, 129)


def moved(
    found: Inventory, job: Job, options: ScaleOptions, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> scale_request.ScaleRequest:
    """The request that the command would make, for hosts that are as they should be."""
    monkeypatch.setattr(launching, "survey", lambda _: ClusterSurvey())
    monkeypatch.setattr("provision.jobs.data.check", lambda *_: None)
    resume = LaunchOptions(resume=job.id)
    launch = launching.Launch(found, resume, state_dir, JobTerminal(), drains=options.without)
    return launch.plan_scale(job, options)


def test_a_drained_host_is_left_and_kept_out(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two hosts with a server each: both servers on the other; and back again."""
    found, job, _ = three_hosts(state_dir)
    running(job)
    request = moved(found, job, ScaleOptions(agree, without="a"), state_dir, monkeypatch)
    assert request.words == "2 servers on a, b → 2 servers on b"
    assert launching.servers_by_host(request.spec.processes) == [("server-0", "b"), ("server-1", "b")]
    assert {name: len(units) for name, units in request.units.items()} == {"b": 2, "w": 0}
    assert "a" not in request.spec.hosts
    with pytest.raises(TrainingError, match=r"without host w, no host of group workers .* is left"):
        moved(found, job, ScaleOptions(agree, without="w"), state_dir, monkeypatch)

    asked: list[str] = []

    def answered(_: launching.Launch, job: Job) -> scale_request.ScaleRequest:
        written = scale_request.read(job)
        assert written is not None
        asked.append(written.words)
        assert drained.hosts_of(state_dir, "three"), "a launch meanwhile would leave it out"
        return scale_request.write(job, written, phase="done", seconds=2.0)

    monkeypatch.setattr(scaling, "_answer", answered)
    screen = JobTerminal()
    assert draining.drain(found, "a", lambda _: False, state_dir=state_dir, screen=screen) == 1
    assert not drained.read(state_dir)
    assert draining.drain(found, "a", agree, state_dir=state_dir, screen=screen) == 0
    assert asked == ["2 servers on a, b → 2 servers on b"]
    assert "host a is drained" in " ".join(capsys.readouterr().out.split())
    left = drained.leave_out(found, state_dir)
    assert (list(left.hosts), left.parameter_servers) == (["b", "w"], ["b"])
    assert main.run(["status", "--state-dir", str(state_dir), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["drained"]["three"]) == ["a"]
    assert main.run(["status", "--state-dir", str(state_dir)]) == 0
    assert "host a of cluster three is drained" in capsys.readouterr().out

    job.write_spec(request.spec)
    assert draining.undrain(found, "a", state_dir=state_dir, screen=screen) == 0
    assert not drained.read(state_dir)
    back = moved(found, job, ScaleOptions(agree, 2), state_dir, monkeypatch)
    assert back.words == "2 servers on b → 2 servers on a, b", "the same number, on other hosts"


def test_a_drain_that_fails_leaves_the_host_as_it_was(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, job, _ = three_hosts(state_dir)
    running(job)
    monkeypatch.setattr(launching, "survey", lambda _: ClusterSurvey(lost=[HostError("b", "no answer")]))
    with pytest.raises(TrainingError, match="host b no answer"):
        draining.drain(found, "a", agree, state_dir=state_dir, screen=JobTerminal())
    assert not drained.read(state_dir)
    assert scale_request.read(job) is None
    (state_dir / "drained.json").write_text("[1]")
    with pytest.raises(TrainingError, match=r"drained.json: this is not a list of drained hosts; repair it"):
        drained.leave_out(found, state_dir)
