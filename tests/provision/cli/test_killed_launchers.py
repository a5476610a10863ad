"""Commands that are killed at every event: the next one goes on, or names the command that does."""

import contextlib
import io
import json
import re
import shlex
import signal
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
from fake_cluster import FakeCluster, all_jobs
from fake_processes import make_environment
from kill_sweep import run_apart
from test_kubernetes_manifests import inventory_file
from test_training_launch import INVENTORY
from test_training_supervisor import until

from provision.cli import main
from provision.cli.views.training import JobTerminal
from provision.hosts import runs
from provision.hosts.journal import Journal
from provision.hosts.survey import ClusterSurvey
from provision.jobs import launching, stopping, store
from provision.jobs.backends.kubernetes import follow as follow_pods
from provision.jobs.backends.kubernetes import record, run
from provision.node import process

SECRET = "of-the-environment"


pytestmark = [pytest.mark.process, pytest.mark.slow]
LAUNCH = ("launch-training", "-i", "inventory.yml")
SERVERS = ("servers", "up", "-i", "inventory.yml")
_ROUNDS = 4  # commands that a user may have to run


class Place:
    """An inventory of this machine, and state directories; each command runs in one of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, more: str = "parameter_server_storage: dram", **behaviour: str) -> None:
        """The inventory, and stand-ins for servers and workers."""
        venv = make_environment(self.directory / "-".join(["venv", *behaviour.values()]), **behaviour)
        text = INVENTORY.format(kind="local", more=f"runtime_venv: {venv}\n      {more}")
        (self.directory / "inventory.yml").write_text(text)

    def sweep(
        self,
        words: Sequence[str],
        prepare: Callable[[Path], None] = lambda directory: None,
        again: Callable[[Path], None] | None = None,
    ) -> list[str]:
        """Kill the command at every event, each time in a new state directory; what went wrong afterwards."""
        whole = self.directory / "whole"
        prepare(whole)
        code, events = run_apart(lambda: oeprov(whole, *words), whole)
        assert code == 0
        assert events
        (again or go_on)(whole)
        wrong = []
        for number, event in enumerate(events):
            directory = self.directory / f"killed-{number}"
            prepare(directory)
            code, _ = run_apart(partial(oeprov, directory, *words), directory, at=number)
            try:
                assert code in (0, -signal.SIGKILL), code  # 0: it depends on time whether that event comes
                (again or go_on)(directory)
                assert_clean(directory)
            except AssertionError as error:
                wrong.append(f"killed before {event!r}: {error}")
        return wrong


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMEBODYS_TOKEN", SECRET)
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey())
    monkeypatch.setattr(ansible_runner, "run", without_ansible)
    yield Place(tmp_path)
    for jobs in tmp_path.glob("*/jobs"):
        for job in store.all_jobs(jobs.parent):
            if job.state().supervised:
                stopping.stop(job, state_dir=jobs.parent, screen=JobTerminal())


def without_ansible(**settings: Any) -> object:
    """What ansible-runner leaves in its directory after a playbook without a task: Ansible needs seconds."""
    directory = Path(settings["private_data_dir"]) / "artifacts" / settings["ident"]
    directory.mkdir(parents=True)
    (directory / "command").write_text(SECRET)
    (directory / "stdout").write_text("nothing to do")
    return types.SimpleNamespace(status="successful", rc=0)


def make_the_directory(**settings: Any) -> object:
    """In place of Ansible: carry out the only step of a bootstrap of this machine."""
    found = json.loads((Path(settings["private_data_dir"]) / "hosts.json").read_text())
    plan = found["all"]["hosts"]["localhost"]["oeprov_plan"]
    assert plan["steps"] == ["directory"]
    settings["event_handler"]({"event": "runner_on_start", "event_data": _task({})})
    Path(plan["desired"]["pmem_directory"]).mkdir()
    step = {"id": "directory", "what": "make it", "ok": True, "message": "", "seconds": 0.1}
    settings["event_handler"]({"event": "runner_on_ok", "event_data": _task({"steps": [step]})})
    return without_ansible(**settings)


def _task(result: dict[str, Any]) -> dict[str, Any]:
    return {"host": "localhost", "role": "pmem", "task": "Bring persistent memory to its mode", "res": result}


def oeprov(directory: Path, *words: str) -> int:
    if words[0] != "bootstrap":
        (directory / "pmem0").mkdir(parents=True, exist_ok=True)
    return main.run([*words, "--state-dir", str(directory)])


def told(directory: Path, *words: str) -> tuple[int, str]:
    """Exit status of a command and all that it says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        return oeprov(directory, *words), said.getvalue()


def follow(directory: Path, words: Sequence[str]) -> str:
    """Run a command until it succeeds, and after each refusal the command that it names."""
    for _ in range(_ROUNDS):
        code, said = told(directory, *words)
        if code == 0 or re.search(r"job \S+ is done[:;]", said):
            return said
        advice = re.findall(r"oeprov ((?:launch|resume|stop|servers|jobs rm)[^;`()\n]*)", said)
        assert advice, f"{shlex.join(words)} names no command: {said}"
        code, more = told(directory, *shlex.split(advice[-1]), *(["--yes"] if "rm" in advice[-1] else []))
        assert code == 0, f"{advice[-1]}: {more}"
        if advice[-1].split()[0] == words[0]:
            return more
    raise AssertionError(f"{shlex.join(words)} and what it names do not help: {said}")


def go_on(directory: Path) -> None:
    """What a user does whose launch or resume was killed: resume the job, or launch one if there is none."""
    if not store.all_jobs(directory):
        follow(directory, LAUNCH)
    elif store.all_jobs(directory)[-1].state().phase != "done":
        follow(directory, ["resume"])
    assert store.all_jobs(directory)[-1].state().phase == "done"


def assert_clean(directory: Path) -> None:
    for job in store.all_jobs(directory):
        for item in job.state().processes:  # children of a killed launcher end by themselves
            assert process.wait_gone(item.pid, item.started, 20), f"{item.name} still runs"
    assert not list(directory.glob("lock-*"))
    left = [path for path in directory.rglob("*") if path.is_file() and SECRET in path.read_text()]
    assert not left, f"copies of the environment: {left}"


def stop_and_go_on(directory: Path) -> None:
    """What a user does whose stop was killed."""
    for job in store.all_jobs(directory):
        assert follow(directory, ["stop", job.id])
    go_on(directory)


def test_launch(place: Place) -> None:
    place.write()
    assert place.sweep(LAUNCH) == []


def test_launch_in_the_background(place: Place) -> None:
    place.write()
    assert place.sweep([*LAUNCH, "--detach"], again=stop_and_go_on) == []


@pytest.mark.parametrize("more", [(), ("--servers", "2")])
def test_resume(place: Place, more: tuple[str, ...]) -> None:
    place.write(worker="kills-itself")

    def fail(directory: Path) -> None:
        assert told(directory, *LAUNCH)[0] == 1

    assert place.sweep(["resume", *more], fail) == []


def test_stop(place: Place) -> None:
    place.write(worker="waits")

    def launch(directory: Path) -> None:
        assert told(directory, *LAUNCH, "--detach")[0] == 0
        until(store.all_jobs(directory)[-1].run_dir / "waiting")

    assert place.sweep(["stop"], launch, stop_and_go_on) == []


def test_servers_up(place: Place) -> None:
    place.write("parameter_server_storage: pmem_libpmem")

    def again(directory: Path) -> None:
        follow(directory, SERVERS)
        assert store.all_jobs(directory)[-1].state().phase == "running"
        assert told(directory, "servers", "down")[0] == 0

    assert place.sweep(SERVERS, again=again) == []


def test_bootstrap(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ansible_runner, "run", make_the_directory)
    text = INVENTORY.format(kind="local", more="runtime_extra: none")
    (place.directory / "inventory.yml").write_text(text)
    words = ["bootstrap", "-i", "inventory.yml", "--yes"]

    def again(directory: Path) -> None:
        """The same command goes on; nothing is left to do, and no host counts as unfinished."""
        follow(directory, words)
        assert (directory / "pmem0").is_dir()
        assert "nothing to do" in told(directory, *words)[1]
        assert told(directory, "history")[0] == 0
        assert runs.unsettled(Journal(directory / "journal.jsonl", ""), "test") == {}

    assert place.sweep(words, again=again) == []


def test_launch_on_kubernetes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kubernetes")
    monkeypatch.setattr(run, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(follow_pods, "PAUSE_SECONDS", 0.02)
    cluster = FakeCluster(place.directory, worker="done")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    words = ["launch-training", "-i", str(inventory_file(place.directory, "")), "--on", "kubernetes"]

    def again(directory: Path) -> None:
        """Resume the job, or launch one if there is none; in the end nothing of it is on the cluster."""
        if not (jobs := all_jobs(directory)):
            follow(directory, words)
        elif record.read(jobs[-1]).phase != "done":
            follow(directory, ["resume", jobs[-1].id])
        assert record.read(all_jobs(directory)[-1]).phase == "done"
        assert cluster.kinds() == []

    try:
        assert place.sweep(words, again=again) == []
    finally:
        cluster.close()
