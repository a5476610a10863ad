"""What each backend of jobs can do, through the interface that commands use."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import toy_backend
from fake_processes import make_job

from provision.cli import main
from provision.cluster.errors import HostError, TrainingError
from provision.dashboard.watch import Watch
from provision.hosts.stop_request import StopRequest
from provision.inventory import loader
from provision.jobs import cleanup, store
from provision.jobs.backends import Backend, registry, runners, ssh
from provision.jobs.backends.kubernetes import api, record
from provision.jobs.backends.units import Place
from provision.jobs.store import BACKENDS, Job, JobSpec, JobState, ProcessSpec
from provision.jobs.supervisor import Supervisor

Make = Callable[[Path], Job]
_HOST = {"name": "w", "address": "192.0.2.1", "port": 22, "user": "", "kind": "cpu", "groups": []}
_HOST |= {"private_key": "", "ssh_arguments": [], "become": False, "python": "python3", "login": "key"}


def local(state_dir: Path) -> Job:
    """A job that trained on this machine, with stand-ins for the runtime's processes."""
    job = make_job(state_dir)
    assert Supervisor(job, lambda _: None, StopRequest()).run().phase == "done"
    return job


def over_ssh(state_dir: Path) -> Job:
    """A stopped job whose worker is a unit of a host that does not answer."""
    job = store.create(state_dir, "far", datetime(2026, 11, 21, 12, 15))
    unit = f"oeprov-{job.id}-worker-0.service"
    process = ProcessSpec(name="worker-0", role="worker", host="w", argv=["train"], unit=unit)
    job.write_spec(
        JobSpec(
            id=job.id,
            created="2026-11-21T12:15:00+00:00",
            cluster="c",
            inventory="i.yml",
            settings={},
            hosts={"w": {**_HOST, "connection": "ssh"}},
            processes=[process],
        )
    )
    state = process.state(pid=1, started=0, exit_code=130)
    job.write_state(JobState(phase="interrupted", message="stopped at step 3", processes=[state]))
    job.log("worker-0").write_text("step 3\n")
    return job


def on_kubernetes(state_dir: Path) -> Job:
    """A stopped job on a cluster that does not answer."""
    job = store.create(state_dir, "pods", datetime(2026, 11, 21, 12, 15))
    kept = {"servers": 1, "workers": 1, "claim": "data", "run": "/shared/oeprov/pods/run"}
    found = record.Record(
        id=job.id, created="now", context="c", namespace="n", phase="interrupted", message="stopped", **kept
    )
    record.write(job, found)
    (job.directory / record.MANIFESTS).write_text(
        "{kind: Job, apiVersion: batch/v1, metadata: {name: pods-worker, namespace: n}}\n"
    )
    return job


INVENTORY = Path(__file__).parents[3] / "inventory" / "local.yml"
MAKERS = [local, over_ssh, on_kubernetes]  # containers: as local; see test_containers.py


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """An ended job of each kind, whose host or cluster does not answer."""

    def silent(*_: object, **__: object) -> Any:
        raise HostError("w", "does not answer")

    def no_cluster(*_: object, **__: object) -> Any:
        raise TrainingError("the cluster does not answer")

    monkeypatch.setattr("provision.hosts.errands.run", silent)
    monkeypatch.setattr(api.Api, "__init__", no_cluster)
    make: Make = request.param
    return make(tmp_path / "state")


@pytest.mark.parametrize("connection", ["local", "ssh"])
def test_each_runner_has_the_whole_interface(
    connection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What placement asks of a host: either the supervisor starts its processes, or systemd does."""
    asked = []

    def answer(_: object, errand: str, *__: object, **___: object) -> dict[str, Any]:
        asked.append(errand)
        return {"problem": "error: no such file", "missing": False, "made": False}

    monkeypatch.setattr("provision.hosts.errands.run", answer)
    host, job = ssh.restored({**_HOST, "connection": connection}), make_job(tmp_path)
    runner, name = runners.runner_of(host), "server-0"
    script = Path(__file__)
    server = ProcessSpec(
        name=name, role="parameter_server", host="w", argv=["serve"], unit=runner.unit(job, name)
    )
    started = runner.server_start(job, server, Place(), 0, fresh=True)
    assert [item["unit"] for item in started] == ([server.unit] if server.unit else [])
    assert bool(server.unit) != bool(runner.ending), "a child ends with its launcher, a unit does not"
    assert runner.sent(job, script, "script").name == script.name
    assert runner.sent(job, script).is_relative_to(runner.directory(job)) == bool(server.unit)
    assert runner.check([sys.executable, "-c", "raise SystemExit('error: no such file')"], 60) == (
        "error: no such file"
    )
    assert runner.cpus(None) >= 1
    assert runner.environments(tmp_path)
    assert asked == (["check_data"] if server.unit else [])


@pytest.mark.parametrize("place", registry.places())
def test_each_place_has_the_whole_interface(place: str) -> None:
    backend = registry.named(place)
    for name, wanted in inspect.getmembers(Backend, inspect.isfunction):
        if name.startswith("_"):
            continue
        asked, found = (inspect.signature(item).parameters for item in (wanted, getattr(backend, name)))
        keywords = [item for item, how in asked.items() if how.kind is how.KEYWORD_ONLY]
        assert keywords == [item for item, how in found.items() if how.kind is how.KEYWORD_ONLY], name
        assert len(found) == len(asked) - 1, "all but `self`"
    assert isinstance(backend.STAYS, bool)


def test_an_ended_job_is_observed_held_and_removed(job: Job) -> None:
    """By any backend, without an answer from where it ran."""
    backend = registry.backend_of(job)
    assert not backend.is_running(job)
    report = backend.observe(job)
    assert report["job"] == job.id
    assert report["state"] in ("done", "interrupted")
    held = cleanup.holding(job)
    assert (held.state, held.running, held.problem) == (report["state"], False, "")
    assert registry.named(held.to_json()["on"]) is backend
    backend.remove(held, here_only=True)
    assert job.directory.is_dir(), "the directory here is the caller's to remove"


def test_commands_find_it_by_name(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    flag = ["--state-dir", str(job.directory.parents[1])]
    assert main.run(["status", job.id, *flag]) == 0
    assert job.id in capsys.readouterr().out
    assert main.run(["jobs", *flag]) == 0
    assert job.name in capsys.readouterr().out
    here = registry.backend_of(job).results(job)
    assert main.run(["fetch", job.id, *flag]) == (1 if here else 0), "what cannot be fetched says why"
    said = capsys.readouterr()
    assert bool(here) == ("error: " in said.err)
    assert main.run(["jobs", "rm", job.id, "--yes", "--here-only", *flag]) == 0
    assert not job.directory.exists()


def test_a_new_backend_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``toy_backend`` is registered by its line in BACKENDS, and every command and view works with it."""
    monkeypatch.setitem(BACKENDS, "toy", (toy_backend.FILE, toy_backend.__name__))
    flag, inventory = ["--state-dir", str(tmp_path)], ["-i", str(INVENTORY)]

    def oeprov(*words: str, code: int = 0) -> str:
        assert main.run([*words, *flag]) == code, words
        said = capsys.readouterr()
        return said.out + said.err

    assert "runs on" in oeprov("launch-training", *inventory, "--on", "toy", "--name", "t", "--steps", "3")
    assert "3/3" in oeprov("status")
    assert "3/3" in oeprov("status", "t", *inventory), "it names no cluster"
    (report,) = json.loads(oeprov("status", "--json"))["jobs"]
    assert report["state"] == "running"
    assert oeprov("logs", "t") == "step 3\n"
    assert "stop it first" in oeprov("jobs", "rm", "t", "--yes", code=1)
    oeprov("stop")
    assert "resume with" not in oeprov("status"), "it has told of no checkpoint"
    oeprov("resume", "t", "--steps", "5")
    assert "5/5" in oeprov("status")
    oeprov("stop", "t")
    assert "it is a toy" in oeprov("fetch", "t", code=1)
    assert "the toy of t-" in oeprov("serve-export", "t", "--print", code=1)
    assert "cannot be served: it is a toy" in oeprov("serve", "t", code=1)
    assert "the toy of t-" in oeprov("checkpoint", "inspect", "t", code=1)
    (listed,) = json.loads(oeprov("jobs", "--json"))["jobs"]
    assert (listed["on"], listed["state"]) == ("toy", "interrupted")
    (shown,) = Watch(loader.load(INVENTORY), tmp_path).jobs()
    assert (shown["job"], shown["active"]) == (report["job"], False)
    oeprov("jobs", "rm", "t", "--yes")
    assert not list((tmp_path / "jobs").iterdir())
