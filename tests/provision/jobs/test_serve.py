"""``oeprov serve``: real replicas of a real run on this machine, and the step that they serve."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_processes import SERVER, make_job, python
from test_backends import over_ssh

from provision.cli import main
from provision.cluster.errors import TrainingError
from provision.hosts.stop_request import StopRequest
from provision.jobs import background, store
from provision.jobs.job_run import Limits
from provision.jobs.metrics import Event
from provision.jobs.request import ServeOptions
from provision.jobs.servers_run import ServersRun
from provision.jobs.store import JobState
from provision.node import process
from provision.node.command import System
from provision.node.replicas import kept_steps, pin

STEPS = [2, 4, 6, 8]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a short run that keeps checkpoints of STEPS."""
    directory = tmp_path_factory.mktemp("run") / "ctr"
    flags = "--data generate:4000 --in-process --batch-size 512 --checkpoint-steps 2 --keep-checkpoints 4"
    argv = [sys.executable, "-m", "oe_runtime.train", *flags.split(), "--run-dir", str(directory)]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    assert kept_steps(System(), str(directory)) == STEPS
    return directory


def test_the_first_step_is_a_kept_one(tmp_path: Path) -> None:
    for step in (0, 5):
        (tmp_path / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:010d}" / "manifest.json").write_text('{"files": {}}')
    assert kept_steps(System(), str(tmp_path)) == [0, 5]
    args = {"directory": str(tmp_path), "run": str(tmp_path), "names": ["replica-0"], "newest": False}
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "replica-0.json").write_text('{"version": 0, "step": 0}')
    assert pin(System(), {**args, "step": 0, "seconds": 1}) == {"version": 0}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OEPROV_STATE_DIR", str(tmp_path / "state"))
    yield tmp_path / "state"
    for job in store.all_jobs(tmp_path / "state"):
        if job.state().supervised:
            assert main.run(["stop", job.id]) == 0


@pytest.fixture
def oeprov(state: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str, code: int = 0) -> Any:
        """What a command says: its JSON, or the error with which it fails."""
        end = words.index("--") if "--" in words else len(words)
        assert main.run([*words[:end], *([] if code else ["--json"]), *words[end:]]) == code
        found = capsys.readouterr()
        return " ".join(found.err.split()) if code else json.loads(found.out)

    return call


def served(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:  # noqa: S310
        return str(json.load(reply)["model_version_status"][0]["version"])


@pytest.mark.process
def test_replicas_answer_go_back_and_come_back(run: Path, oeprov: Any, state: Path) -> None:
    found = oeprov("serve", str(run), "--replicas", "2", "--port", "0", "--", "--refresh-seconds", "0.2")
    assert (found["state"], len(found["urls"])) == ("running", 2)
    assert [served(url) for url in found["urls"]] == ["8", "8"]
    assert {item["version"] for item in oeprov("status")["jobs"][0]["processes"]} == {8}

    ended, seen = threading.Event(), []

    def ask() -> None:
        while not ended.is_set():
            seen.append(served(found["urls"][0]))

    def until_answered(step: int) -> None:
        deadline = time.monotonic() + 60
        while seen[-1:] != [str(step)]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        until_answered(8)
        for words, step in (
            ([], 6),
            (["ctr"], 4),  # from the step that is served
            (["--newest"], 8),
            (["--step", "2"], 2),
        ):
            assert oeprov("serve", "rollback", *words)["step"] == step
            until_answered(step)
    finally:
        ended.set()
        asking.join()
    assert [step for step, _ in itertools.groupby(seen)] == ["8", "6", "4", "8", "2"]
    assert [served(url) for url in found["urls"]] == ["2", "2"]
    assert "none before it is kept; kept are 2, 4, 6, 8" in oeprov("serve", "rollback", code=1)
    assert "step 3 is not kept; kept are 2, 4, 6, 8" in oeprov("serve", "rollback", "--step", "3", code=1)

    # One that was killed comes back at its address, with the step that was chosen.
    victim = found["processes"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    job = store.find(state, "ctr-serving")
    deadline = time.monotonic() + 120
    while job.ready("replica-0").get("pid", victim) == victim:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert served(found["urls"][0]) == "2"

    # A checkpoint that cannot be loaded changes nothing.
    dense = next((run / "checkpoints" / "step-0000000004").glob("*.oets"))
    whole = dense.read_bytes()
    dense.write_bytes(whole[: len(whole) // 2])
    try:
        assert "the earlier step stays" in oeprov("serve", "rollback", "--step", "4", code=1)
    finally:
        dense.write_bytes(whole)
    assert [served(url) for url in found["urls"]] == ["2", "2"]
    assert job.step_file.read_text() == "2\n"

    states = job.state().processes
    assert oeprov("stop")["state"] == "done"
    assert not any(process.alive(item.pid, item.started) for item in states)
    assert "does not run: it is done; start it: oeprov serve" in oeprov("serve", "rollback", code=1)
    assert "which have no training to resume" in oeprov("resume", code=1)


@pytest.mark.process
def test_replicas_end_with_a_killed_supervisor(run: Path, oeprov: Any, state: Path) -> None:
    oeprov("serve", str(run), "--port", "0")
    job = store.find(state, None)
    found = job.state()
    os.kill(found.supervisor_pid, signal.SIGKILL)
    assert process.wait_gone(found.processes[0].pid, found.processes[0].started, 60)
    assert oeprov("status")["jobs"][0]["state"] == "interrupted"


@pytest.mark.process
@pytest.mark.parametrize("ends", ["stopped", "killed", "never started"])
def test_a_supervisor_that_ends_while_replicas_load_is_not_waited_for(
    ends: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(state, server="silent")
    replica = job.spec().processes[0].model_copy(update={"role": "replica"})
    job.write_spec(job.spec().model_copy(update={"processes": [replica]}))
    job.write_state(JobState.supervised_here())
    if ends == "never started":
        monkeypatch.setattr(sys, "executable", "/bin/false")
    errors: list[str] = []

    def start() -> None:
        try:
            background.start_and_wait(job, StopRequest(), "oeprov stop m")
        except TrainingError as error:
            errors.append(str(error))
        finally:
            job.state_file.unlink()  # the fixture stops what runs, also this process, which began it

    thread = threading.Thread(target=start)
    thread.start()
    if ends != "never started":
        while job.state().phase != "starting":
            time.sleep(0.02)
        supervisor = job.state().supervisor_pid
        os.kill(supervisor, signal.SIGTERM if ends == "stopped" else signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    why = {"stopped": "stopped before training began", "killed": "its launcher was killed"}
    assert f"{job.id} does not run: {why.get(ends, 'its supervisor has ended')}; its logs: " in errors[0]


@pytest.mark.process
def test_the_others_answer_when_one_cannot_come_back(tmp_path: Path) -> None:
    """As where the pinned checkpoint is not kept any more; the job ends with the last."""
    job = make_job(tmp_path, servers=2)
    names = ["replica-0", "replica-1"]
    broken = [python(SERVER, str(job.ready_file(name)), "comes-back-broken") for name in names]
    replicas = [
        job.spec().processes[0].model_copy(update={"name": name, "role": "replica", "argv": argv})
        for name, argv in zip(names, broken, strict=True)
    ]
    job.write_spec(job.spec().model_copy(update={"processes": replicas}))
    limits, ended = Limits(server=20, restarts=2, restart_pause=0.01), []
    events: list[Event] = []
    supervisor = ServersRun(job, events.append, StopRequest(), limits)
    thread = threading.Thread(target=lambda: ended.append(supervisor.run()))
    thread.start()

    def kill(number: int) -> None:
        os.kill(job.state().processes[number].pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while sum(e["event"] == "server_lost" and e["name"] == names[number] for e in events) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    while job.state().phase != "running":
        time.sleep(0.02)
    kill(0)
    thread.join(1)
    assert thread.is_alive()
    other = job.state().processes[1]
    assert (job.state().phase, process.alive(other.pid, other.started)) == ("running", True)
    kill(1)
    thread.join(20)
    assert ended[0].phase == "failed"
    assert "pool of table C1 is damaged" in ended[0].message


@pytest.mark.process
def test_what_cannot_be_served_says_why_and_leaves_nothing(oeprov: Any, state: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = oeprov("serve", "./empty", "--port", "0", code=1)
    assert "replica-0 on localhost" in said
    assert "is neither a model to serve nor the directory of a run" in said
    (process_state,) = store.find(state, None).state().processes
    assert not process_state.alive


def test_refusals(oeprov: Any, state: Path, tmp_path: Path) -> None:
    assert "no job in" in oeprov("serve", code=1)
    assert "nothing is served in" in oeprov("serve", "rollback", code=1)
    assert "there is no such directory" in oeprov("serve", "./none", code=1)
    said = oeprov("serve", "nobody", code=1)
    assert "no job nobody" in said
    assert said.endswith("; nor is there a directory nobody here")
    assert "--print: . is no job on Kubernetes" in oeprov("serve", ".", "--print", code=1)
    job = make_job(state)
    assert "has neither a checkpoint with its rows in files nor an export" in oeprov("serve", code=1)
    (job.run_dir / "checkpoints" / "step-0000000002").mkdir(parents=True)
    (job.run_dir / "checkpoints" / "step-0000000002" / "manifest.json").write_text('{"step": 2}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port, or 0" in oeprov("serve", "--port", port, code=1)
    assert "2 replicas need ports beyond 65535" in oeprov(
        "serve", "--replicas", "2", "--port", "0", "--grpc-port", "65535", code=1
    )
    files = ServeOptions(files={"tls_cert": "x.crt"}, arguments=["--tls", "off"]).with_paths(here=True)
    assert files.arguments == ("--tls-cert", str(Path("x.crt").absolute()), "--tls", "off")
    assert "--name: found 'a b'" in oeprov("serve", "--name", "a b", "--port", "0", code=1)
    far = over_ssh(state)
    said = oeprov("serve", str(job.run_dir), "--rows", "far", "--port", "0", code=1)
    assert f"the checkpoints of job {far.id} are not here, but on host w: /var/lib/oeprov/jobs/" in said
    assert "has rows of its own on host w" in oeprov("serve", "far", "--rows", str(job.run_dir), code=1)
    assert {item.id for item in store.all_jobs(state)} == {job.id, far.id}, "no refusal leaves a job"
