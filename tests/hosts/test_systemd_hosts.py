"""How jobs end on hosts with a real systemd, which forgets how units ended; the runtime is a stand-in."""

import ast
import os
import platform
import shlex
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from ssh_hosts import SshHosts, why_no_systemd
from test_training_hosts import Cluster, launch_apart, runtime_layer, use_real_runtime, wait_for

from provision.cli.views.training import JobTerminal
from provision.cluster.errors import TrainingError
from provision.hosts.survey import ClusterSurvey
from provision.jobs import fetching, launching, stopping, store
from provision.jobs.backends import units
from provision.jobs.backends.units import Place
from provision.jobs.store import Job
from provision.node.state import Mount, State

WHY_NOT = why_no_systemd()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
FSDAX = State(mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", [])])


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_layer(tmp_path_factory.mktemp("layer"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, layer: Path) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("hosts"), 2, layer=layer, systemd=True) as found:
        yield found


@pytest.fixture
def cluster(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A server on the first host, with rows in persistent memory (a tmpfs), and the worker on the second."""
    monkeypatch.chdir(tmp_path)
    found = halves(hosts, tmp_path)
    two = hosts[1]
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey(states=found.states))
    yield found
    for job in store.all_jobs(found.state_dir):
        if any(item.alive for item in job.state().processes):
            stopping.stop(job, state_dir=found.state_dir, screen=JobTerminal())
        found.tell(two, f"rm -rf /var/lib/oeprov/jobs/{job.id}")


def halves(hosts: SshHosts, directory: Path) -> Cluster:
    """Servers with persistent memory on the first half of the hosts, workers on the others."""
    found = Cluster(hosts, directory)
    everyone = list(hosts)
    found.servers, workers = everyone[: len(everyone) // 2], everyone[len(everyone) // 2 :]
    found.worker = "\n        ".join(
        f"{host.name}: {{ansible_host: {host.address}, oeprov_kind: cpu}}" for host in workers
    )
    for host in found.servers:
        found.tell(host, "mkdir -p /mnt/pmem0; mountpoint -q /mnt/pmem0 || mount -t tmpfs none /mnt/pmem0")
        found.states[host.name] = FSDAX
        found.more[host.name] = "pmem_mode: fsdax"
    return found


def begin(cluster: Cluster) -> Job:
    """A job in the background whose worker has written a checkpoint of step 2 and waits at step 3."""
    assert cluster.launch(detach=True) == 0
    wait_for_worker(cluster)
    return cluster.job()


def wait_for_worker(cluster: Cluster) -> None:
    wait_for(lambda: cluster.tell(cluster.hosts[1], "ls /var/lib/oeprov/jobs/*/run/waiting || :") != "", 60)


def rows(cluster: Cluster, job: Job) -> str:
    """What persistent memory has of the job."""
    return cluster.tell(cluster.hosts[0], f"ls /mnt/pmem0/oeprov/{job.id}/server-0 2>/dev/null || :").strip()


def goes_on_from(step: int, cluster: Cluster, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(cluster, job) == "scratch", "the rows of the checkpoint are there"
    capsys.readouterr()
    assert cluster.launch(resume=job.id) == 0
    shown = capsys.readouterr().out
    assert f"resumed from step {step}" in shown
    assert f"{job.id} is done" in shown
    assert job.state().message == "training is done"
    assert rows(cluster, job) == "", "nobody needs them after the end"
    for host in cluster.hosts:
        assert cluster.tell(host, "ls /etc/systemd/system | grep ^oeprov-fake || :") == ""


def test_a_stopped_job_goes_on(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    job = begin(cluster)
    assert cluster.stop() == 0
    state = job.state()
    assert (state.phase, state.message) == ("interrupted", "stopped at step 3, which is saved")
    assert [item.exit_code for item in state.processes] == [0, 130]
    assert state.processes[-1].pid > 0
    goes_on_from(3, cluster, job, capsys)


def test_a_job_of_another_controller_with_the_same_id_is_left_alone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two teams launched jobs of one name in one second: their units and directories have the same names."""
    job = begin(cluster)
    (tmp_path / "other").mkdir()
    other = halves(cluster.hosts, tmp_path / "other")

    def create(place: Path, name: str, now: datetime) -> Job:
        found = Job(store.jobs_dir(place) / job.id)
        found.make()
        return found

    monkeypatch.setattr(store, "create", create)
    one, token = cluster.hosts[0], job.token_file.read_text()
    look = f"systemctl show -p MainPID oeprov-{job.id}-server-0; cat /var/lib/oeprov/jobs/{job.id}/token"
    before = cluster.tell(one, look)
    assert before.endswith(token)
    with pytest.raises(TrainingError) as caught:
        other.launch(detach=True)
    assert f"host {one.name}: /var/lib/oeprov/jobs/{job.id} belongs to another job of the" in str(
        caught.value
    )
    assert store.all_jobs(other.state_dir) == []
    assert cluster.tell(one, look) == before, "its server still runs, with its token"

    assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
    assert job.state().message == "stopped at step 3, which is saved"
    with pytest.raises(TrainingError) as caught:
        other.launch(detach=True)
    words = f"host {one.name}: /mnt/pmem0/oeprov/{job.id}/server-0 belongs to another job of the same name"
    assert words in str(caught.value)
    assert f"removes them by: oeprov jobs rm {job.id}" in str(caught.value)
    assert store.all_jobs(other.state_dir) == []
    goes_on_from(3, cluster, job, capsys)


EVIL = """
import json, os, pathlib, sys
d = pathlib.Path(sys.argv[1])
mine = f"oeprov-{d.name}-worker-0.service"
more = {"role": "worker", "directories": [], "mount": ""}
units = [{"name": "worker-0", "unit": mine, **more}, {"name": "worker-9", "unit": "victim.service", **more}]
(d / "units.json").unlink(missing_ok=True)
(d / "units.json").write_text(json.dumps(units))
(d / "logs").rmdir()
(d / "logs").symlink_to("/srv/victim")
(d / "ready").rmdir()
(d / "ready").symlink_to("/srv/victim")
"""
VICTIM = """
printf '[Service]\nExecStart=/bin/sleep infinity\n' > /etc/systemd/system/victim.service
systemctl daemon-reload && systemctl start victim && mkdir -p /srv/victim && touch /srv/victim/worker-0.json
"""


def test_a_script_that_was_taken_over_does_not_drive_root(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """What tests/provision/node/test_hostile_jobs.py does for each act, on a host with a real systemd."""
    two = cluster.hosts[1]
    cluster.tell(two, VICTIM)
    unit = "/etc/systemd/system/victim.service"
    check = f"systemctl is-active victim; ls {unit} /srv/victim; stat -c '%U %a' /srv/victim"
    before = cluster.tell(two, check)
    assert before.split() == ["active", unit, "/srv/victim:", "worker-0.json", "root", "755"]
    job = begin(cluster)
    directory = units.job_directory(job.id)
    cluster.tell(two, f"runuser -u oeprov -- /usr/bin/python3 -c {shlex.quote(EVIL)} {directory}")
    assert cluster.stop() == 0
    assert job.state().message == "stopped at step 3, which is saved"
    assert cluster.tell(two, check) == before
    with pytest.raises(TrainingError, match=f"{directory}/ready: is a symbolic link"):
        cluster.launch(resume=job.id)
    assert cluster.tell(two, check) == before
    cluster.tell(two, f"rm {directory}/ready {directory}/logs")
    goes_on_from(3, cluster, job, capsys)
    assert cluster.tell(two, check) == before
    cluster.tell(two, "systemctl stop victim; rm -r /etc/systemd/system/victim.service /srv/victim")


PROBE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "sysfs": (139, 3),  # obsolete, harmless: how many file systems the kernel knows
    "unshare": (272, 0x10000000),  # a user namespace
    "set_mempolicy": (238, 0, None, 0),  # numactl and memkind
    "ptrace": (101, 0, 0, 0, 0),
}
denied = {name: libc.syscall(*words) < 0 and ctypes.get_errno() == 1 for name, words in calls.items()}
print(sorted(name for name in denied if denied[name]))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are x86-64's")
def test_units_deny_calls_that_jobs_do_not_need(hosts: SshHosts, tmp_path: Path) -> None:
    host, cluster = hosts[0], Cluster(hosts, tmp_path)
    directory = units.job_directory("j")
    cluster.tell(host, f"id -u oeprov >/dev/null 2>&1 || useradd oeprov; install -d -o oeprov {directory}")
    found = {}
    for role, text in {
        "server": units.server_unit("j", "server-0", ["/usr/bin/python3", "-c", PROBE], Place()),
        "worker": units.worker_unit("j", "worker-0", ["/usr/bin/python3", "-c", PROBE], {}, seconds=9),
    }.items():
        unit = f"oeprov-j-{role}.service"
        cluster.tell(host, f"cat >/etc/systemd/system/{unit} <<'END'\n{text}\nEND")
        cluster.tell(host, f"systemctl daemon-reload; systemctl start {unit}")
        wait_for(lambda unit=unit: "inactive" in cluster.tell(host, f"systemctl is-active {unit} || :"))
        printed = cluster.tell(host, f"journalctl --no-pager -o cat _SYSTEMD_UNIT={unit}")
        found[role] = ast.literal_eval(printed)
        devices = cluster.tell(host, f"systemctl show -P DevicePolicy -P DeviceAllow {unit}").split()
        assert (devices == ["auto"]) == (role == "worker"), "a GPU is a device"
        cluster.tell(host, f"rm /etc/systemd/system/{unit}")
    assert found == {"server": ["ptrace", "sysfs", "unshare"], "worker": ["sysfs", "unshare"]}


@pytest.mark.slow
def test_ctrl_c_in_training_is_a_stop(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    pid = launch_apart(cluster)
    wait_for_worker(cluster)
    os.killpg(pid, signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    job = cluster.job()
    assert (job.state().phase, job.state().message) == ("interrupted", "stopped at step 3, which is saved")
    goes_on_from(3, cluster, job, capsys)


@pytest.mark.slow
def test_a_job_whose_launcher_was_killed_goes_on(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job = begin(cluster)
    os.kill(job.state().supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not job.state().supervised)
    job.metrics_file.unlink()  # nothing of the run was read before
    assert cluster.stop() == 0
    state = job.state()
    assert (state.phase, state.message) == ("interrupted", "stopped at step 3, which is saved")
    goes_on_from(3, cluster, job, capsys)


def test_a_job_whose_worker_lost_power_goes_on(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    job, two = begin(cluster), cluster.hosts[1]
    two.stop()
    two.start()
    wait_for(lambda: job.state().phase not in store.ACTIVE, 60)
    state = job.state()
    assert state.phase == "failed"
    assert state.message.startswith(f"worker-0 on {two.name} (pid ")
    assert "ended: its host rebooted" in state.message
    goes_on_from(2, cluster, job, capsys)


@pytest.mark.slow
def test_a_server_comes_back_after_a_power_cut(cluster: Cluster) -> None:
    one = cluster.hosts[0]
    cluster.more[one.name] = "pmem_mode: none"  # what stands for persistent memory does not last
    job = begin(cluster)
    one.stop()
    one.start()
    unit = f"oeprov-{job.id}-server-0.service"
    wait_for(lambda: cluster.tell(one, f"systemctl is-active {unit} || :").strip() == "active")
    assert cluster.stop() == 0
    assert job.state().message == "stopped at step 3, which is saved"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workqueue", [None, True])
def test_real_workers_on_hosts_stop_resume_and_are_fetched(
    layer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workqueue: bool | None,
) -> None:
    """Two servers with pools and two workers, a host each, in step or with a work queue."""
    monkeypatch.chdir(tmp_path)
    with SshHosts(tmp_path / "hosts", 4, layer=layer, systemd=True) as hosts:
        cluster = halves(hosts, tmp_path)
        monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey(states=cluster.states))
        use_real_runtime(cluster)
        first = list(hosts)[2]
        small = {"data": "generate:20000", "batch_size": 16, "max_cardinality": 5000, "dim": 4}
        small["steps"] = 1000 if workqueue else 250
        lost = "continue" if workqueue else None
        assert cluster.launch(detach=True, workqueue=workqueue, on_worker_lost=lost, **small) == 0
        job = cluster.job()
        log = f"journalctl --no-pager -u oeprov-{job.id}-worker-0.service"
        deadline = time.monotonic() + 300
        while not cluster.report()["step"]:
            assert job.state().phase in store.ACTIVE, job.state().message
            assert time.monotonic() < deadline, cluster.tell(first, log)
            time.sleep(1)
        if workqueue:  # the other worker takes over
            unit = f"oeprov-{job.id}-worker-1.service"
            cluster.tell(list(hosts)[3], f"systemctl kill --kill-who=main --signal=KILL {unit}")
            reached = cluster.report()["step"]
            wait_for(lambda: cluster.report()["step"] > reached + 20, 120)
            assert job.state().phase in store.ACTIVE, job.state().message
        assert cluster.stop() == 0
        state = job.state()
        assert state.phase == "interrupted", state.message
        assert state.message.endswith("which is saved"), state.message
        assert job.pool_servers() == 2
        pools = f"ls /mnt/pmem0/oeprov/{job.id} 2>/dev/null || :"
        assert [cluster.tell(host, pools).strip() for host in cluster.servers] == ["server-0", "server-1"]
        capsys.readouterr()

        assert cluster.launch(resume=job.id) == 0, cluster.job().state().message
        shown = capsys.readouterr().out
        assert "resumed from step" in shown
        assert f"oeprov fetch {job.id}" in shown
        assert [cluster.tell(host, pools).strip() for host in cluster.servers] == ["", ""]
        assert fetching.fetch(job) == 0
        assert "held-out" in (job.run_dir / "report.html").read_text()
        assert (job.run_dir / "export" / "saved_model.pb").stat().st_size > 0
