"""Launchers that are killed at every event, with servers on hosts: real SSH and Ansible."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_processes import make_environment
from kill_sweep import run_apart
from ssh_hosts import SshHosts, why_not
from test_training_hosts import LOCAL_WORKER, Cluster, runtime_layer, with_systemd

from provision.cli.views.training import JobTerminal
from provision.cluster.errors import OeprovError
from provision.hosts.survey import ClusterSurvey
from provision.jobs import launching, servers, stopping, store
from provision.jobs.request import LaunchOptions

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
_ROUNDS = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    layer = with_systemd(runtime_layer(tmp_path_factory.mktemp("layer")))
    with SshHosts(tmp_path_factory.mktemp("hosts"), 2, layer=layer) as found:
        yield found


@pytest.fixture
def cluster(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey())
    found = Cluster(hosts, tmp_path, worker="good")
    yield found
    for jobs in tmp_path.glob("*/jobs"):
        for job in store.all_jobs(jobs.parent):
            if any(item.alive for item in job.state().processes):
                stopping.stop(job, state_dir=jobs.parent, screen=JobTerminal())


def fails_at_first(cluster: Cluster) -> None:
    """Servers on both hosts, and a worker here that is killed after its first checkpoint."""
    cluster.venv = make_environment(cluster.directory / "killed", worker="kills-itself")
    cluster.worker = LOCAL_WORKER.format(venv=cluster.venv)


def sweep(
    cluster: Cluster,
    command: Callable[[], int],
    prepare: Callable[[], object],
    again: Callable[[], object],
    *,
    except_for: str = "\n",
) -> list[str]:
    """Kill the command at every event, each time in a new state directory; what went wrong afterwards.

    ``except_for``: what the names of events have that another sweep goes through.
    """
    wrong: list[str] = []
    events: list[str] | None = None
    places: list[int | None] = [None]  # first without a kill
    while places:
        at = places.pop(0)
        cluster.state_dir = cluster.directory / f"killed-{at}"
        prepare()
        _, seen = run_apart(command, cluster.state_dir, at=at)
        if events is None:
            events = seen
            places = [number for number, event in enumerate(events) if except_for not in event]
            assert len(places) > 5
        try:
            again()
            cluster.assert_clean()
            assert not list(cluster.state_dir.glob("ansible/*")), "copies of the environment"
        except (AssertionError, OeprovError) as error:
            wrong.append(f"killed before {events[at] if at is not None else 'nothing'!r}: {error}")
    return wrong


def follow(cluster: Cluster, command: Callable[[], int]) -> None:
    """Run a command until it succeeds, and after a refusal the stop that it names."""
    for _ in range(_ROUNDS):
        try:
            if command() == 0:
                return
            said = store.all_jobs(cluster.state_dir)[-1].state().message
        except OeprovError as error:
            said = str(error)
        if " is done: it has trained " in said:
            return
        advice = re.findall(r"oeprov (?:stop|servers down) ([^;`()\s]*)", said)
        assert advice, f"names no command: {said}"
        assert (
            stopping.stop(
                store.find(cluster.state_dir, shlex.split(advice[-1])[0]),
                state_dir=cluster.state_dir,
                screen=JobTerminal(),
            )
            == 0
        )
    raise AssertionError(said)


def go_on(cluster: Cluster) -> None:
    """What a user does whose launch or resume was killed."""
    jobs = store.all_jobs(cluster.state_dir)
    if not jobs or jobs[-1].state().phase != "done":
        follow(cluster, lambda: cluster.launch(**({"resume": ""} if jobs else {})))
    job = cluster.job()
    assert job.state().phase == "done", job.state()
    if any(item.alive for item in job.state().processes):  # `status` says so
        assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0


def test_launch(cluster: Cluster) -> None:
    assert sweep(cluster, cluster.launch, lambda: None, lambda: go_on(cluster)) == []


def test_resume(cluster: Cluster) -> None:
    fails_at_first(cluster)
    prepare = lambda: cluster.launch()  # noqa: E731 - it fails
    resume = lambda: cluster.launch(resume="")  # noqa: E731
    assert sweep(cluster, resume, prepare, lambda: go_on(cluster), except_for="/ansible/") == []


def test_stop_of_servers_whose_launcher_was_killed(cluster: Cluster) -> None:
    def up() -> int:
        servers.up(cluster.inventory(), LaunchOptions(), state_dir=cluster.state_dir, screen=JobTerminal())
        return 0

    def stop() -> int:
        return stopping.stop(cluster.job(), state_dir=cluster.state_dir, screen=JobTerminal())

    assert sweep(cluster, stop, up, stop) == []


def test_servers_up(cluster: Cluster) -> None:
    def up() -> int:
        servers.up(cluster.inventory(), LaunchOptions(), state_dir=cluster.state_dir, screen=JobTerminal())
        return 0

    def again() -> None:
        follow(cluster, up)
        for job in store.all_jobs(cluster.state_dir):
            assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0

    assert sweep(cluster, up, lambda: None, again) == []
