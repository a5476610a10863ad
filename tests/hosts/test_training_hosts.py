"""Training with parameter servers on hosts: real SSH and Ansible, stand-ins for systemd and the runtime."""

import base64
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fake_processes import WORKER, make_environment
from kill_sweep import run_apart
from rich.console import Console
from sample_wheel import wheel
from ssh_hosts import SshHost, SshHosts, why_not
from test_training_supervisor import until

from provision.cli import main
from provision.cli.views import jobs as views
from provision.cli.views.ending import last_screen
from provision.cli.views.servers import show as show_servers
from provision.cli.views.training import JobTerminal
from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts import errands
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.jobs import (
    fetching,
    launching,
    observing,
    script_files,
    script_packages,
    servers,
    serving,
    stopping,
    store,
)
from provision.jobs.backends import registry, ssh
from provision.jobs.backends.ssh import Fleet
from provision.jobs.request import LaunchOptions
from provision.jobs.store import Job, JobSpec, JobState, ProcessSpec
from provision.node import jobscript
from provision.node.state import DaxDevice, Mount, State

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SYSTEM_PYTHON = "/usr/bin/python3"

SERVER = '''#!/usr/bin/python3 -IS
"""Stands in for oe_runtime.server: listens, says so, counts. With /run/real it is the real one."""
import json, os, signal, socket, stat, sys, time
words = sys.argv[3:]
flags = dict(zip(words, words[1:]))
if os.path.exists("/run/real"):
    run = ("import runpy, site, sys; site.addsitedir(sys.argv.pop(1)); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")
    os.execv(sys.executable, [sys.executable, "-c", run, open("/run/real").read(), sys.argv[2], *words])
if sys.argv[2] == "oe_runtime.serve":  # it serves the newest step, 3, or that of its step file
    listening = socket.create_server((flags["--host"], int(flags["--port"])))
    while True:
        text = open(flags["--step-file"]).read() if os.path.exists(flags["--step-file"]) else ""
        step = int(text) if text else None
        with open(flags["--ready-file"] + ".tmp", "w") as file:
            json.dump({"pid": os.getpid(), "host": flags["--host"], "port": listening.getsockname()[1],
                "storage": "dram", "is_pmem": False, "version": step or 3, "step": step,
                "problem": "rows are damaged" if step == 1 else ""}, file)
        os.rename(flags["--ready-file"] + ".tmp", flags["--ready-file"])
        time.sleep(0.02)
assert flags["--tls"] == "on", "all hosts are reached over a network"
if "--workers" in flags:  # they listen, as TensorFlow's do
    port = flags["--workers"].split(",")[int(flags["--rank"])].rpartition(":")[2]
    try:
        among = socket.create_server(("", int(port)))
    except OSError:
        sys.exit("error: Could not start gRPC server (is the port taken?)")
    if flags["--rank"] != "0":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
        while True:
            signal.pause()
if sys.argv[2] == "oe_runtime.train":
    worker = open("/opt/oeprov/worker.py").read()
    resume = ["--resume"] * ("--resume" in words)
    sys.argv = ["train", flags["--servers"], flags["--run-dir"], "waits", *resume]
    exec(worker)
    sys.exit()
assert sys.argv[1:3] == ["-m", "oe_runtime.server"], sys.argv
assert "--exit-with-parent" not in words
assert os.geteuid() != 0
token = os.stat(flags["--token-file"])
assert stat.S_IMODE(token.st_mode) == 0o600 and token.st_uid == os.geteuid()
for name in ("--storage-path", "--checkpoint-dir"):
    if name in flags:
        open(os.path.join(flags[name], "scratch"), "w").close()
if os.path.exists("/run/refuse"):
    sys.exit("error: " + open("/run/refuse").read())
while os.path.exists("/run/slow"):
    time.sleep(0.1)
listening = socket.create_server((flags["--host"], int(flags["--port"])))
index = int(flags["--index"])
def put(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
    os.rename(path + ".tmp", path)
put(flags["--metrics-file"], {"storage": flags["--storage"], "memory": {"dram": 3 << 20, "pmem": 5 << 20,
    "index": 1 << 20, "rss": 0}, "tables": [{"name": "C1", "rows": 1000 + index}],
    "rates": {"pulled_keys_per_s": 2345.0, "pushed_keys_per_s": 1234.0}})
put(flags["--ready-file"], {"pid": os.getpid(), "host": flags["--host"],
    "port": listening.getsockname()[1], "index": index, "count": int(flags["--count"]),
    "storage": flags["--storage"], "is_pmem": False})
print("server", index, "listens", flush=True)
def end(*_):
    print("server", index, "ends: SIGTERM", flush=True)
    os.unlink(flags["--ready-file"])
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
while True:
    signal.pause()
'''
INVENTORY = """\
all:
  vars:
    oeprov_cluster: hosts
    training_data: generate:800
    training_server_wait: 0
    ansible_user: root
    ansible_ssh_common_args: >-
      -o UserKnownHostsFile={known_hosts} -o IdentityFile={key} -o IdentitiesOnly=yes
  children:
    parameter_servers:
      vars: {{parameter_server_host: 0.0.0.0}}
      hosts:
        {servers}
    workers:
      hosts:
        {worker}
"""
NUMACTL = '#!/bin/sh\nshift\nexec "$@"'
LOCAL_WORKER = (
    "controller: {{ansible_connection: local, oeprov_kind: local, pmem_mode: none, runtime_venv: {venv}}}"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    layer = with_systemd(runtime_layer(tmp_path_factory.mktemp("layer")))
    with SshHosts(tmp_path_factory.mktemp("hosts"), 2, layer=layer) as found:
        yield found


def with_systemd(layer: Path) -> Path:
    """The layer with a stand-in for systemd."""
    for name in ("systemctl", "journalctl"):
        path = layer / "usr" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "systemd_standin.py", path)
        path.chmod(0o755)
    return layer


def runtime_layer(layer: Path) -> Path:
    """Files of a host on which bootstrap has put a runtime: a stand-in for servers and workers."""
    python = layer / "opt" / "oeprov" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SERVER)
    python.chmod(0o755)
    end_with_parent = next(line for line in WORKER.splitlines() if "os.read(0, 1)" in line)
    (layer / "opt" / "oeprov" / "worker.py").write_text(WORKER.replace(end_with_parent, ""))
    layer.chmod(0o755)
    return layer


class Cluster:
    """Two hosts for servers, the worker here, and a state directory."""

    def __init__(self, hosts: SshHosts, directory: Path, worker: str = "waits") -> None:
        self.hosts = hosts
        self.directory = directory
        self.state_dir = directory / "state"
        self.venv = make_environment(directory / "venv", worker=worker)
        self.more: dict[str, str] = {}
        self.text = INVENTORY
        self.worker = LOCAL_WORKER.format(venv=self.venv)
        self.servers: list[SshHost] = list(hosts)
        self.states: dict[str, State] = {}

    def inventory(self) -> Inventory:
        lines = [
            f"{host.name}: {{ansible_host: {host.address}, oeprov_kind: re6p, "
            f"{self.more.get(host.name, 'pmem_mode: none')}}}"
            for host in self.servers
        ]
        path = self.directory / "inventory.yml"
        text = self.text.format(
            known_hosts=self.hosts.known_hosts,
            key=self.hosts.key,
            servers="\n        ".join(lines),
            worker=self.worker,
        )
        path.write_text(text)
        return load(path, state_dir=self.state_dir)

    def launch(self, *, as_json: bool = False, **options: Any) -> int:
        screen, given = JobTerminal(as_json=as_json), LaunchOptions(**options)
        return launching.launch(self.inventory(), given, state_dir=self.state_dir, screen=screen)

    def stop(self) -> int:
        """Stop the last job."""
        found = registry.find_running(self.state_dir, None)
        return stopping.stop(found, state_dir=self.state_dir, screen=JobTerminal())

    def refused(self, **options: Any) -> str:
        with pytest.raises(TrainingError) as caught:
            self.launch(**options)
        assert store.all_jobs(self.state_dir) == []
        self.assert_clean()
        return str(caught.value)

    def tell(self, host: SshHost, command: str) -> str:
        """Standard output of a command in a login of the host."""
        argv = ["ssh", "-F", "/dev/null", *self.hosts.ssh_options(), f"root@{host.address}", command]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def job(self) -> Job:
        return store.all_jobs(self.state_dir)[-1]

    def report(self) -> dict[str, Any]:
        return observing.report(self.job())

    def assert_clean(self) -> None:
        """No unit, directory or process of a job is left on any host."""
        for host in self.hosts:
            left = self.tell(host, "ls /etc/systemd/system/oeprov-* /var/lib/oeprov/jobs 2>/dev/null || :")
            assert left.replace("/var/lib/oeprov/jobs:", "").strip() == "", left
            assert self.tell(host, "pgrep -f '[o]e_runtime.server' || :").strip() == ""


@pytest.fixture
def cluster(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    found = Cluster(hosts, tmp_path)
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey(states=found.states))
    yield found
    for job in store.all_jobs(found.state_dir):
        (job.run_dir / "waiting").unlink(missing_ok=True)
        if any(item.alive for item in job.state().processes):
            stopping.stop(job, state_dir=found.state_dir, screen=JobTerminal())
    for host in hosts:
        host.enter("sh", "-c", "rm -rf /run/refuse /run/no-restart /run/slow /run/real")


def test_launch_status_stop_and_resume(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = cluster.hosts
    cluster.more[one.name] = "pmem_mode: none, parameter_server_count: 2"
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    shown = capsys.readouterr().out
    assert f"server-0 on {one.name} listens on {one.address}:" in shown
    token = job.token_file.read_text().strip()
    for host, names in ((one, ["server-0", "server-1"]), (two, ["server-2"])):
        where = f"/var/lib/oeprov/jobs/{job.id}"
        assert host.enter("cat", f"{where}/token").strip() == token
        listed = host.enter("ls", "/etc/systemd/system/multi-user.target.wants")
        for name in names:
            assert f"oeprov-{job.id}-{name}.service" in listed, "it comes back after a reboot"
            assert token not in host.enter("cat", f"/etc/systemd/system/oeprov-{job.id}-{name}.service")
        commands = cluster.tell(host, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "oe_runtime.server" in commands
        assert token not in commands
    worker = next(item for item in job.spec().processes if item.role == "worker")
    flags = dict(zip(worker.argv, worker.argv[1:], strict=False))
    assert flags["--checkpoint-transfer"] == "wire"
    assert flags["--tls"] == "on"
    started = next(line for line in job.metrics_file.read_text().splitlines() if '"start"' in line)
    endpoints = json.loads(started)["servers"].split(",")
    assert [item.rpartition(":")[0] for item in endpoints] == [one.address, one.address, two.address]

    report = cluster.report()
    assert report["state"] == "running"
    assert report["rows"] == {"C1": 3003}
    server = report["processes"][0]
    assert (server["state"], server["endpoint"]) == ("runs", endpoints[0])
    assert (server["pulled_keys_per_s"], server["pushed_keys_per_s"]) == (2345.0, 1234.0)
    assert (server["dram_bytes"], server["pmem_bytes"]) == (4 << 20, 5 << 20)
    assert views.status(cluster.state_dir) == 0
    shown = capsys.readouterr().out
    for words in ("server-2", two.name, "2,345", "1,234", "4 MiB", "5 MiB", "1,002"):
        assert words in shown

    assert cluster.stop() == 0
    shown = capsys.readouterr().out
    assert f"{one.name}: stopped server-0, server-1" in shown
    assert f"oeprov resume {job.id}" in shown
    assert job.state().message == "stopped at step 3, which is saved"
    cluster.assert_clean()
    assert "server 0 ends: SIGTERM" in job.log("server-0").read_text()
    assert cluster.report()["rows"] == {"C1": 3003}, "the last counters are kept"
    assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
    assert "is not running: it is interrupted" in capsys.readouterr().out

    assert cluster.launch(resume=job.id) == 0
    shown = capsys.readouterr().out
    assert "resumed from step 3" in shown
    assert f"{job.id} is done" in shown
    cluster.assert_clean()


@pytest.mark.slow
def test_real_servers_train_over_encrypted_connections(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    use_real_runtime(cluster)
    cluster.worker = LOCAL_WORKER.format(venv=sys.prefix)
    assert cluster.launch(detach=True, batch_size=16, epochs=20, max_cardinality=5000) == 0
    job = cluster.job()
    deadline = time.monotonic() + 240
    for host, name in zip(cluster.hosts, ("server-0", "server-1"), strict=True):
        told: dict[str, Any] = {}
        while not sum(table["rows"] for table in told.get("tables", [])):  # written every few seconds
            assert time.monotonic() < deadline, job.log("worker-0").read_text()
            time.sleep(0.5)
            told = json.loads(host.enter("cat", f"/var/lib/oeprov/jobs/{job.id}/metrics/{name}.json"))
        assert (told["connections"]["encrypted"], told["connections"]["open"]) == (True, 1)
    assert cluster.report()["state"] == "running"
    assert cluster.stop() == 0
    assert job.state().message.endswith("which is saved"), job.log("worker-0").read_text()
    cluster.assert_clean()
    assert cluster.launch(resume=job.id) == 0
    assert f"{job.id} is done" in capsys.readouterr().out
    cluster.assert_clean()


def use_real_runtime(cluster: Cluster) -> None:
    """Servers and workers on the hosts are this environment's from now on."""
    # The interpreter of this environment may lie where a job's user has no access.
    asked = [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info[:2])"]
    if subprocess.run(asked, capture_output=True, text=True).stdout.strip() != str(sys.version_info[:2]):
        pytest.skip(f"{SYSTEM_PYTHON} is another version than {sys.executable}")
    for host in cluster.hosts:
        cluster.tell(host, f"printf %s '{sysconfig.get_path('purelib')}' >/run/real")


def test_place_follows_what_the_host_has(cluster: Cluster) -> None:
    one, two = cluster.hosts
    cluster.tell(one, "mkdir -p /mnt/pmem0 && mount -t tmpfs none /mnt/pmem0")  # where its logins see it
    two.enter("sh", "-c", "mkdir -p /etc/oeprov; echo MEMKIND_DAX_KMEM_NODES=1 >/etc/oeprov/memory.env")
    cluster.states[one.name] = State(mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", [])])
    cluster.states[two.name] = State(dax=[DaxDevice(chardev="dax0.0")])
    cluster.more[one.name] = "pmem_mode: fsdax"
    try:
        two.enter("sh", "-c", f"echo '{NUMACTL}' >/usr/bin/numactl; chmod 755 /usr/bin/numactl")
        cluster.more[two.name] = "pmem_mode: system-ram"
        assert cluster.launch(detach=True) == 0
        job = cluster.job()
        until(job.run_dir / "waiting")
        unit = one.enter("cat", f"/etc/systemd/system/oeprov-{job.id}-server-0.service")
        assert "--storage pmem_libpmem" in unit
        assert f"--storage-path /mnt/pmem0/oeprov/{job.id}/server-0" in unit
        assert "systemctl start mnt-pmem0.mount" in unit
        assert "scratch" in cluster.tell(one, f"ls /mnt/pmem0/oeprov/{job.id}/server-0")
        unit = two.enter("cat", f"/etc/systemd/system/oeprov-{job.id}-server-1.service")
        assert "numactl --membind=${MEMKIND_DAX_KMEM_NODES} " in unit
        assert "daxdev-reconfigure@dax0.0.service" in unit
        # The same storage is refused to another job, also by its host when it is not known here.
        with pytest.raises(TrainingError, match=f"job {job.id} is running with the same storage directory"):
            cluster.launch()
        (cluster.directory / "other").mkdir()
        other = Cluster(cluster.hosts, cluster.directory / "other")
        other.more = cluster.more
        with pytest.raises(TrainingError) as caught:
            other.launch()
        assert f"host {one.name}: job {job.id} runs on /mnt/pmem0 already (server-0)" in str(caught.value)
        assert store.all_jobs(other.state_dir) == []
        assert [item["state"] for item in cluster.report()["processes"]] == ["runs"] * 3, "the first goes on"
    finally:
        cluster.stop()
        left = cluster.tell(one, "ls /mnt/pmem0/oeprov").strip()
        cluster.tell(one, "umount /mnt/pmem0")
        two.enter("rm", "/etc/oeprov/memory.env")
    assert left == job.id, "the rows of a stopped job stay for who goes on with it"
    cluster.assert_clean()


def test_fewer_servers_leave_no_rows_of_the_former_ones(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cluster.hosts[0]
    cluster.tell(one, "mkdir -p /mnt/pmem0 && mount -t tmpfs none /mnt/pmem0")
    cluster.states[one.name] = State(mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", [])])
    cluster.more[one.name] = "pmem_mode: fsdax"
    cluster.servers = [one]
    try:
        assert cluster.launch(detach=True, servers=2) == 0
        job = cluster.job()
        until(job.run_dir / "waiting")
        cluster.stop()
        assert cluster.tell(one, f"ls /mnt/pmem0/oeprov/{job.id}").split() == ["server-0", "server-1"]
        with monkeypatch.context() as patched:  # killed before the new server starts
            patched.setattr(Fleet, "prepare", lambda *_: os._exit(9))
            code, _ = run_apart(lambda: cluster.launch(resume=job.id, servers=1), cluster.state_dir)
            assert code == 9
        assert cluster.tell(one, "ls /mnt/pmem0/oeprov") == "", "the next resume would recover them"
        assert cluster.launch(resume=job.id) == 0
        assert cluster.tell(one, "ls /mnt/pmem0/oeprov") == "", "also those of the server that is no more"
    finally:
        cluster.tell(one, "umount /mnt/pmem0")
    cluster.assert_clean()


def test_what_a_host_lacks_is_said_and_nothing_is_left(cluster: Cluster) -> None:
    two = cluster.hosts[1]
    cluster.more[two.name] = "pmem_mode: system-ram"
    words = cluster.refused()
    assert f"host {two.name}: /etc/oeprov/memory.env is missing; run: oeprov bootstrap" in words
    cluster.more[two.name] = "pmem_mode: fsdax"
    assert f"host {two.name}: nothing is mounted at /mnt/pmem0; run: oeprov bootstrap" in cluster.refused()
    cluster.states[two.name] = State(mounts=[Mount("/dev/pmem0", "/mnt/pmem0", "ext4", [])])
    assert f"host {two.name}: /mnt/pmem0 is not mounted; run: oeprov bootstrap" in cluster.refused()
    cluster.more[two.name] = "pmem_mode: none, runtime_venv: /opt/none"
    assert f"host {two.name}: /opt/none/bin/python is missing" in cluster.refused()


def test_busy_port_is_named_with_who_has_it(cluster: Cluster) -> None:
    two = cluster.hosts[1]
    cluster.more[two.name] = "pmem_mode: none, parameter_server_port: 22"
    words = cluster.refused()
    assert f"host {two.name}: server-1: port 22 on 0.0.0.0 cannot be used: sshd (pid " in words
    assert "listens there; free it, or choose another parameter_server_port" in words


def test_server_that_does_not_start_says_why(cluster: Cluster) -> None:
    two = cluster.hosts[1]
    two.enter("sh", "-c", "echo table C1 is cursed >/run/refuse")
    words = cluster.refused()
    assert (
        f"host {two.name}: server-1 did not start: it ended with exit status 1: table C1 is cursed" in words
    )


def test_unreachable_host(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two = cluster.hosts[1]
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    two.stop()
    try:
        report = cluster.report()
        states = {item["name"]: item["state"] for item in report["processes"]}
        assert states == {"server-0": "runs", "server-1": "does not answer", "worker-0": "runs"}
        assert views.status(cluster.state_dir) == 0
        shown = capsys.readouterr().out
        assert f"{two.name}: {two.address} port 22 refuses connections" in shown
        assert cluster.stop() == 1
        shown = capsys.readouterr().out
        assert "node001: stopped server-0" in shown
        assert f"{two.name}: server-1 could not be stopped and may still run" in shown
        message = job.state().message
        assert f"{two.name} could not be told to stop its part: {two.address} port 22 refuses" in message
        assert f"when it answers again: oeprov stop {job.id}" in message
        assert [item.alive for item in job.state().processes] == [False, True, False]
    finally:
        two.start()
    cluster.tell(two, "systemctl boot")
    assert [item["state"] for item in cluster.report()["processes"]] == ["ended", "came back", "ended"]
    assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
    assert f"{two.name}: stopped server-1" in capsys.readouterr().out
    assert job.state().message == "stopped at step 3, which is saved"
    cluster.assert_clean()


def test_lost_server_ends_the_job_with_its_name(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two = cluster.hosts[1]
    cluster.venv = make_environment(cluster.directory / "again", worker="loses-server")
    cluster.worker = LOCAL_WORKER.format(venv=cluster.venv)
    thread = threading.Thread(target=lambda: kill_server(cluster, two))
    thread.start()
    assert cluster.launch() == 1
    thread.join()
    job = cluster.job()
    message = job.state().message
    assert f"server-1 on {two.name} (pid " in message
    assert "was lost: it was killed by signal 9; the worker says: lost server" in message
    assert f"oeprov resume {job.id}" in capsys.readouterr().out
    cluster.assert_clean()


def kill_server(cluster: Cluster, host: SshHost) -> None:
    deadline = time.monotonic() + 60
    while not (found := list(cluster.state_dir.glob("jobs/*/run/waiting"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.tell(host, "pkill -KILL -f '[o]e_runtime.server'")
    time.sleep(1.5)
    found[0].unlink()


def test_killed_launcher(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = cluster.hosts
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    os.kill(job.state().supervisor_pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while job.state().processes[-1].alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    report = cluster.report()
    assert (report["state"], report["message"]) == ("interrupted", "its launcher was killed")
    assert [item["state"] for item in report["processes"]] == ["runs", "runs", "ended"]
    views.status(cluster.state_dir)
    assert f"its servers still run; stop them with: oeprov stop {job.id}" in capsys.readouterr().out
    assert cluster.stop() == 0
    shown = capsys.readouterr().out
    assert f"{one.name}: stopped server-0" in shown
    assert f"{two.name}: stopped server-1" in shown
    cluster.assert_clean()
    assert cluster.launch(resume="") == 0, "from the checkpoint that the worker wrote when its launcher died"
    assert "resumed from step 3" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_launcher_that_ends_while_servers_start(cluster: Cluster, number: int) -> None:
    """Asked to stop it takes back what it began; killed, `oeprov stop` does."""
    two = cluster.hosts[1]
    cluster.tell(two, "touch /run/slow")
    pid = launch_apart(cluster)
    wait_for(lambda: "server-1" in cluster.tell(two, "ls /etc/systemd/system"), 60)
    os.killpg(pid, number)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (130 if number == signal.SIGINT else -number)
    cluster.tell(two, "rm /run/slow")
    if number == signal.SIGKILL:
        job = cluster.job()
        assert cluster.report()["state"] == "interrupted"
        assert cluster.stop() == 0
        assert [item.alive for item in job.state().processes] == [False, False]
    else:
        assert store.all_jobs(cluster.state_dir) == []
    assert not (cluster.state_dir / "ansible").exists(), "nothing with the environment in it"
    cluster.assert_clean()


def launch_apart(cluster: Cluster) -> int:
    """Launch in the foreground of a process group of its own, as in a terminal; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 3
        gc.disable()  # it would free objects of threads that this process lacks
        try:
            os.setpgid(0, 0)
            code = cluster.launch()
        except Interrupted:
            code = 130
        finally:
            os._exit(code)
    return pid


def test_servers_are_stopped_by_plain_ansible_too(cluster: Cluster) -> None:
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    os.kill(job.state().supervisor_pid, signal.SIGKILL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    command = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        *(
            "-i",
            str(cluster.directory / "inventory.yml"),
            str(REPOSITORY / "playbooks" / "stop_training.yml"),
        ),
        *("-e", f"training_job_directory=/var/lib/oeprov/jobs/{job.id}"),
    ]
    for changed in (1, 0):
        done = subprocess.run(
            command,
            env={
                **environment,
                "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
                "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
                "PYTHONPATH": str(REPOSITORY),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.count(f"changed={changed} ") == 2 + (not changed), done.stdout
    cluster.assert_clean()
    assert [item["state"] for item in cluster.report()["processes"]] == ["gone", "gone", "ended"]
    assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0


def test_logs_of_all_hosts_are_followed_to_the_end(cluster: Cluster) -> None:
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    follow = subprocess.Popen(
        [sys.executable, "-m", "provision.cli", "logs", "-f", "--state-dir", str(cluster.state_dir)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follow.stdout is not None
    while "server 0 listens" not in follow.stdout.readline():
        assert follow.poll() is None
    wait_for(lambda: tails(cluster) == 2)
    (
        interrupted := subprocess.Popen(
            [
                sys.executable,
                "-m",
                "provision.cli",
                "logs",
                "-f",
                "-p",
                "server-1",
                "--state-dir",
                str(cluster.state_dir),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert interrupted.stdout is not None
    assert interrupted.stdout.readline() == "server 1 listens\n", "one process alone has no name before it"
    wait_for(lambda: tails(cluster) == 3)
    interrupted.send_signal(signal.SIGINT)
    interrupted.wait(20)
    wait_for(lambda: tails(cluster) == 2)
    assert cluster.stop() == 0
    rest, _ = follow.communicate(timeout=20)
    assert follow.returncode == 0
    assert "server-0   | server 0 ends: SIGTERM" in rest
    assert "server-1   | server 1 ends: SIGTERM" in rest
    wait_for(lambda: tails(cluster) == 0)


def tails(cluster: Cluster) -> int:
    """How many commands follow a log on the hosts."""
    found = [cluster.tell(host, "pgrep -x tail || :").split() for host in cluster.hosts]
    return sum(map(len, found))


def wait_for(found: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_worker_on_a_host(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = cluster.hosts
    cluster.servers = [one]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    run = f"/var/lib/oeprov/jobs/{job.id}/run"
    wait_for(lambda: "waiting" in cluster.tell(two, f"ls {run}"))
    wait_for(lambda: cluster.report()["step"] == 3, 60)
    report = cluster.report()
    assert (report["state"], report["checkpoint_step"]) == ("running", 2)
    worker = report["processes"][-1]
    assert (worker["name"], worker["host"], worker["state"]) == ("worker-0", two.name, "runs")
    assert worker["pid"] > 0
    unit = cluster.tell(two, f"cat /etc/systemd/system/oeprov-{job.id}-worker-0.service")
    assert f"--servers {one.address}:" in unit
    assert "Restart" not in unit, "a worker that failed is resumed by people"
    assert cluster.stop() == 0
    shown = capsys.readouterr().out
    assert f"{two.name}: stopped worker-0" in shown
    assert job.state().message == "stopped at step 3, which is saved"
    assert cluster.tell(two, f"ls {run}/checkpoints").split() == ["step-0000000002", "step-0000000003"]
    assert cluster.tell(two, "ls /etc/systemd/system | grep oeprov || :") == ""

    assert cluster.launch(resume="", as_json=True) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["state"], report["step"]) == ("done", 8)
    assert report["eval"]["auc"] == 0.75
    cluster.tell(two, f"rm -r /var/lib/oeprov/jobs/{job.id}")
    cluster.assert_clean()


def test_a_running_job_leaves_a_drained_host(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Its worker, on the other host, goes on with two servers there; the next launch leaves the host out."""
    one, two = cluster.hosts
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    assert [host for _, host in launching.servers_by_host(job.spec().processes)] == [one.name, two.name]
    wait_for(lambda: cluster.report()["step"] == 3, 60)
    flags = ["-i", str(cluster.directory / "inventory.yml"), "--state-dir", str(cluster.state_dir)]
    capsys.readouterr()
    assert main.run(["drain", one.name, "--yes", *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"2 servers on {one.name}, {two.name} → 2 servers on {two.name} from step 3" in shown
    assert "training paused 1.2 s" in shown
    assert [host for _, host in launching.servers_by_host(job.spec().processes)] == [two.name] * 2
    wait_for(lambda: job.state().phase == "done", 60)
    events = [json.loads(line) for line in job.metrics_file.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, 9)]
    cluster.tell(two, f"rm -r /var/lib/oeprov/jobs/{job.id}")
    cluster.assert_clean()

    assert cluster.launch(detach=True) == 0
    left = cluster.job()
    assert {item.host for item in left.spec().processes} == {two.name}
    assert cluster.stop() == 0
    cluster.tell(two, f"rm -r /var/lib/oeprov/jobs/{left.id}")
    assert main.run(["undrain", one.name, *flags]) == 0


def test_a_host_whose_servers_do_not_start_leaves_the_job_as_it_was(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = cluster.hosts
    cluster.servers = [one]
    assert cluster.launch(detach=True) == 0
    job = cluster.job()
    until(job.run_dir / "waiting")
    cluster.servers = [one, two]
    cluster.inventory()
    two.enter("sh", "-c", "echo no room > /run/refuse")
    assert main.run(["scale", "--servers", "2", "--yes", "--state-dir", str(cluster.state_dir)]) == 1
    said = capsys.readouterr().err
    assert "no room" in said
    assert "the job goes on with its servers as before" in said
    wait_for(lambda: job.state().phase == "done", 60)
    assert [host for _, host in launching.servers_by_host(job.spec().processes)] == [one.name]
    cluster.assert_clean()


def test_replicas_where_the_run_is(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two = cluster.hosts[1]
    cluster.servers = [cluster.hosts[0]]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    assert cluster.launch(detach=True) == 0
    trained = cluster.job()
    run = f"/var/lib/oeprov/jobs/{trained.id}/run"
    wait_for(lambda: "waiting" in cluster.tell(two, f"ls {run}"))
    assert cluster.stop() == 0
    for step in (1, 2, 3):
        checkpoint = f"{run}/checkpoints/step-000000000{step}"
        cluster.tell(two, f"mkdir -p {checkpoint} && echo '{{\"step\": {step}}}' >{checkpoint}/manifest.json")

    def oeprov(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main.run([*words, "--state-dir", str(cluster.state_dir)]) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    def versions() -> list[int]:
        found = json.loads(oeprov("status", job.id, "--json"))["jobs"][0]["processes"]
        assert [item["state"] for item in found] == ["runs", "runs"]
        return [item["version"] for item in found]

    shown = oeprov("serve", "--replicas", "2", "--port", "0", "--host", "0.0.0.0")  # noqa: S104
    job = cluster.job()
    assert job.name == f"{trained.name}-serving"
    assert f"http://{two.address}:" in shown
    assert versions() == [3, 3]
    unit = f"oeprov-{job.id}-replica-1.service"
    assert unit in two.enter("ls", "/etc/systemd/system/multi-user.target.wants"), "it survives a reboot"
    assert f"oe_runtime.serve {run} " in cluster.tell(two, f"cat /etc/systemd/system/{unit}")

    assert "2 replicas serve step 2" in oeprov("serve", "rollback")
    assert versions() == [2, 2]
    assert "rows are damaged; the earlier step stays" in oeprov("serve", "rollback", code=1)
    wait_for(lambda: versions() == [2, 2])
    assert "step 9 is not kept; kept are 1, 2, 3" in oeprov("serve", "rollback", "--step", "9", code=1)
    owner = cluster.tell(two, f"stat -c %U /var/lib/oeprov/jobs/{job.id}/step")
    assert owner.strip() == "oeprov"
    assert "2 replicas serve step 3" in oeprov("serve", "rollback", "--newest")

    assert f"{two.name}: stopped replica-0, replica-1" in oeprov("stop")
    assert job.state().phase == "done"
    assert cluster.tell(two, "ls /etc/systemd/system | grep oeprov || :") == ""
    assert "manifest.json" in cluster.tell(two, f"ls {run}/checkpoints/step-0000000002")
    cluster.tell(two, f"rm -r /var/lib/oeprov/jobs/{trained.id}")
    cluster.assert_clean()


def launched_with_two_workers(cluster: Cluster, host: SshHost) -> Job:
    assert cluster.launch(detach=True, workers=2) == 0
    job = cluster.job()
    wait_for(lambda: cluster.tell(host, f"ls /var/lib/oeprov/jobs/{job.id}/run").find("waiting") >= 0, 30)
    return job


def test_jobs_of_several_workers_share_a_host(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = cluster.hosts
    cluster.servers = [one]
    workers = f"{two.name}: {{{{ansible_host: {two.address}, oeprov_kind: cpu{{more}}}}}}"
    cluster.worker = workers.format(more="")
    jobs = [launched_with_two_workers(cluster, two) for _ in range(2)]
    for job in jobs:
        states = {item["name"]: item["state"] for item in observing.report(job)["processes"]}
        assert states == dict.fromkeys(("server-0", "worker-0", "worker-1"), "runs")
        assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
        assert job.state().message == "stopped at step 3, which is saved"

    # Ports that the inventory sets are for one job at a time: the other one starts no worker.
    cluster.worker = workers.format(more=", worker_port: 7600")
    first = launched_with_two_workers(cluster, two)
    assert cluster.launch(workers=2) == 1
    assert "worker-0: port 7600 on 0.0.0.0 cannot be used: python" in cluster.job().state().message
    assert "listens there; free it, or choose another worker_port" in cluster.job().state().message
    assert first.state().phase == "running"
    assert stopping.stop(first, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
    for job in store.all_jobs(cluster.state_dir):
        cluster.tell(two, f"rm -rf /var/lib/oeprov/jobs/{job.id}")
    cluster.assert_clean()


def test_a_job_that_uploads_is_resumed_on_another_host(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer fetches its checkpoint from the store; here it is copied."""
    one, two = cluster.hosts
    cluster.servers = [one]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    assert cluster.launch(detach=True, upload_to="s3://models/mine") == 0
    job = cluster.job()
    run = f"/var/lib/oeprov/jobs/{job.id}/run"
    wait_for(lambda: cluster.report()["step"] == 3, 60)
    assert cluster.stop() == 0
    found = cluster.tell(two, f"tar -c -C {run} checkpoints | base64")
    cluster.tell(one, f"mkdir -p {run} && echo '{found}' | base64 -d | tar -x -C {run}")
    capsys.readouterr()
    cluster.worker = f"{one.name}: {{ansible_host: {one.address}, oeprov_kind: cpu}}"
    two.stop()  # what it reported last is not needed
    try:
        assert cluster.launch(resume=job.id) == 0
    finally:
        two.start()
    shown = capsys.readouterr().out
    assert f"{two.address} port 22 refuses connections" in shown
    assert f"the checkpoints of host {two.name} are looked for in s3://models/mine" in shown
    assert "resumed from step 3" in shown
    assert f"{job.id} is done" in shown
    assert job.has_checkpoint()
    assert (job.run_dir / f"metrics-{two.name}.jsonl").exists()
    for host in cluster.hosts:
        cluster.tell(host, f"rm -r /var/lib/oeprov/jobs/{job.id}")
    cluster.assert_clean()


def test_script_travels_to_its_worker(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = cluster.hosts
    cluster.servers = [one]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    script = cluster.directory / "mine" / "train.py"
    script.parent.mkdir()
    script.write_text("print('first')\n")
    (script.parent / "notes").symlink_to("train.py")
    assert cluster.launch(script=str(script), script_arguments=["--rows", "9"], detach=True) == 0
    assert f"{two.name}: the script's directory was sent" in capsys.readouterr().out
    job = cluster.job()
    assert job.name == "train"
    there = f"/var/lib/oeprov/jobs/{job.id}"
    assert cluster.tell(two, f"ls -l {there}/script | grep -c oeprov").strip() == "2"
    assert cluster.tell(two, f"cat {there}/script/notes") == "print('first')\n"
    unit = cluster.tell(two, f"cat /etc/systemd/system/oeprov-{job.id}-worker-0.service")
    assert f"-m oe_runtime.train --script {there}/script/train.py" in unit
    assert unit.split("ExecStart=")[1].splitlines()[0].endswith(" -- --rows 9")
    wait_for(lambda: cluster.report()["step"] == 3, 60)
    assert cluster.stop() == 0
    capsys.readouterr()

    # It goes on with the script as it is now; what has not changed is not sent again.
    for text, sent in (("print('first')\n", False), ("print('second')\n", True)):
        script.write_text(text)
        assert cluster.launch(resume="", script_arguments=["--rows", "10"], as_json=True) == 0
        printed = capsys.readouterr()
        assert ("the script's directory was sent" in printed.err) is sent
        assert json.loads(printed.out)["state"] == "done"
        assert cluster.tell(two, f"cat {there}/script/train.py") == text
    cluster.tell(two, f"rm -r {there} /var/lib/oeprov/scripts")
    cluster.assert_clean()


def test_script_that_cannot_travel_starts_nothing(cluster: Cluster) -> None:
    one, two = cluster.hosts
    cluster.servers = [one]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    script = cluster.directory / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    os.mkfifo(script.parent / "pipe")
    assert "pipe is a named pipe" in cluster.refused(script=str(script))
    (script.parent / "pipe").unlink()
    data = "clicks.tsv"
    assert f"the script reads it on host {two.name}: give its whole path" in cluster.refused(
        script=str(script), data=data
    )
    missing = cluster.refused(script=str(script), data="/nowhere/*.tsv")
    assert missing == f"host {two.name}: --data: no file matches /nowhere/*.tsv; nothing was started"


def test_packages_of_a_script_on_a_host(cluster: Cluster) -> None:
    """pip runs as the jobs' user; the system's Python stands in for the runtime's environment."""
    two = cluster.hosts[1]
    wheel(cluster.directory / "wheels", "oeprov_sample", "1.0", 7)
    (sample,) = (cluster.directory / "wheels").iterdir()
    content = base64.b64encode(sample.read_bytes()).decode()
    cluster.tell(two, f"mkdir /srv/wheels && echo {content} | base64 -d >/srv/wheels/{sample.name}")
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    host = cluster.inventory().hosts[two.name]
    script = cluster.directory / "mine" / "train.py"
    script.parent.mkdir()
    script.touch()
    (script.parent / "requirements.txt").write_text("oeprov-sample\n")
    files, packages = script_files.collect(script), script_packages.collect(script.parent)
    assert packages is not None
    path = f"{jobscript.ENVIRONMENTS}/key"
    environment = packages.environment(path, SYSTEM_PYTHON, "/srv/wheels")
    archive = base64.b64encode(zlib.compress(files.archive)).decode()
    args = {"digest": files.digest, "archive": archive, "environment": environment, "user": "oeprov"}
    assert errands.run(host, "deliver_script", args, 300) == {"missing": False, "made": True}
    program = "import pip, oeprov_sample; print(oeprov_sample.VALUE)"
    as_user = f"runuser -u oeprov -- {path}/bin/python -c"
    assert cluster.tell(two, f"cd / && {as_user} '{program}'").strip() == "7"
    assert (
        cluster.tell(two, f"stat -c %U {path}/lib/python*/site-packages/oeprov_sample.py").strip() == "oeprov"
    )
    assert errands.run(host, "deliver_script", args, 300) == {"missing": False, "made": False}

    wrong = {**environment, "files": {"requirements.txt": "oeprov-sample==2\n"}, "path": path + "2"}
    with pytest.raises(HostError, match=r"the packages of requirements.txt cannot be installed: "):
        errands.run(host, "deliver_script", {**args, "environment": wrong}, 300)
    assert cluster.tell(two, f"ls {jobscript.ENVIRONMENTS}").split() == ["key", "key.d"]
    assert cluster.tell(two, f"stat -c %U {path} {path}.d").split() == ["root", "root"]
    cluster.tell(two, "rm -r /var/lib/oeprov/scripts /var/lib/oeprov/environments /srv/wheels")


def test_a_running_job_keeps_its_environment_when_another_controller_installs_one(cluster: Cluster) -> None:
    """As an installation does it: made beside the one in use, then the link is moved."""
    one, two = cluster.hosts
    enter = "cd /opt/oeprov && "
    for host in (one, two):
        cluster.tell(host, enter + "mkdir venv.d && mv venv venv.d/first && ln -s venv.d/first venv")
    try:
        assert cluster.launch(detach=True) == 0
        job = cluster.job()
        until(job.run_dir / "waiting")
        cluster.tell(one, enter + "cp -a venv.d/first venv.d/second && ln -sfn venv.d/second venv")
        unit = f"/etc/systemd/system/oeprov-{job.id}-server-0.service"
        assert "ExecStart=/opt/oeprov/venv.d/first/bin/python " in cluster.tell(one, f"cat {unit}")
        assert "/opt/oeprov/venv.d/first/bin/python" in cluster.tell(
            one, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
        )
        assert stopping.stop(job, state_dir=cluster.state_dir, screen=JobTerminal()) == 0
        assert cluster.tell(one, enter + "ls venv.d").split() == ["second"], "the old one goes with the job"
        assert cluster.tell(two, enter + "ls venv.d").split() == ["first"]
        assert cluster.launch(resume="") == 0, "a resumed job takes the newest"
    finally:
        for host in (one, two):
            cluster.tell(host, enter + 'new=$(readlink venv) && rm venv && mv "$new" venv && rm -r venv.d')


def test_servers_alone(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    screen = JobTerminal(as_json=True)
    job = servers.up(cluster.inventory(), LaunchOptions(), state_dir=cluster.state_dir, screen=screen)
    assert show_servers(job, cluster.state_dir, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert job.id == cluster.job().id
    assert found["state"] == "running"
    for endpoint, host in zip(found["endpoints"], cluster.hosts, strict=True):
        assert endpoint.startswith(f"{host.address}:")
        token = cluster.tell(host, f"cat {found['token_files'][host.name]}")
        assert token == Path(found["token_file"]).read_text()
    assert found["tls"] == "on"
    # Nothing here watches them; what systemd starts again is what status shows.
    assert not job.state().supervised
    one = cluster.hosts[0]
    cluster.tell(one, "pkill -KILL -f '[o]e_runtime.server'")
    wait_for(lambda: cluster.report()["processes"][0]["state"] == "came back", 60)
    assert job.state().phase == "running"
    # As a launcher that is killed before its last word leaves it.
    job.write_state(job.state().model_copy(update={"phase": "prepared", "supervisor_pid": 0}))
    assert show_servers(servers.find(cluster.state_dir, None), cluster.state_dir, as_json=False) == 0
    assert f"its servers still run; stop them with: oeprov stop {job.id}" in capsys.readouterr().out
    assert servers.down(cluster.state_dir, None, screen=JobTerminal()) == 0
    assert job.state().phase == "done"
    assert "parameter servers are down" in capsys.readouterr().out
    cluster.assert_clean()


@pytest.fixture
def far_job(cluster: Cluster) -> Iterator[Job]:
    """A job whose worker has ended on the second host, with an export, a report and two checkpoints there."""
    two = cluster.hosts[1]
    cluster.worker = f"{two.name}: {{ansible_host: {two.address}, oeprov_kind: cpu}}"
    host = cluster.inventory().hosts[two.name]
    job = store.create(cluster.state_dir, "far", datetime(2026, 11, 23))
    worker = ProcessSpec(name="worker-0", role="worker", host=two.name, argv=[], unit="oeprov-far.service")
    spec = JobSpec(
        id=job.id,
        created="2026-11-23T12:15:00+00:00",
        cluster="hosts",
        inventory="inventory.yml",
        settings={"model": "deepfm"},
        hosts={two.name: ssh.connection(host)},
        processes=[worker],
    )
    job.write_spec(spec)
    run = f"/var/lib/oeprov/jobs/{job.id}/run"
    job.metrics_file.write_text(json.dumps({"event": "export", "path": f"{run}/export"}) + "\n")
    job.write_state(JobState(phase="done", message="training is done"))
    names = ["report.html", "export/saved_model.pb", "export/variables/v", "export/.half"]
    names += [f"checkpoints/{name}/manifest.json" for name in ("step-0000000002", ".partial-3")]
    for name in names:
        cluster.tell(two, f"mkdir -p $(dirname {run}/{name}); head -c 300000 /dev/urandom >{run}/{name}")
    yield job
    cluster.tell(two, f"rm -r /var/lib/oeprov/jobs/{job.id}")


def files_of(job: Job) -> list[str]:
    return sorted(str(path.relative_to(job.run_dir)) for path in job.run_dir.rglob("*") if path.is_file())


def test_results_are_fetched(cluster: Cluster, far_job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    two, job = cluster.hosts[1], far_job
    last_screen(job, cluster.state_dir, Console(width=300))
    shown = capsys.readouterr().out
    assert f"{two.name}:/var/lib/oeprov/jobs/{job.id}/run/report.html" in shown
    assert f"oeprov fetch {job.id}" in shown
    with pytest.raises(TrainingError, match=f"has it: oeprov fetch {job.id}"):
        serving.find(cluster.state_dir, job.id)
    assert fetching.fetch(job) == 0
    results = ["export/saved_model.pb", "export/variables/v", "report.html"]
    assert files_of(job) == ["export/saved_model.pb", "export/variables/v", "metrics.jsonl", "report.html"]
    for name in results:
        there = cluster.tell(two, f"sha256sum </var/lib/oeprov/jobs/{job.id}/run/{name}").split()[0]
        assert hashlib.sha256((job.run_dir / name).read_bytes()).hexdigest() == there
    assert f"run/export (2 files, 600.0 kB from {two.name})" in capsys.readouterr().out
    assert serving.find(cluster.state_dir, job.id).export == job.run_dir / "export"
    last_screen(job, cluster.state_dir, Console(width=300))
    assert f"oeprov serve-export {job.id}" in capsys.readouterr().out

    before = (job.run_dir / "report.html").read_bytes()
    with pytest.raises(TrainingError, match=f"export exists already.*: oeprov fetch {job.id} --replace"):
        fetching.fetch(job)
    cluster.tell(two, f"echo new >/var/lib/oeprov/jobs/{job.id}/run/report.html")
    cluster.tell(two, f"ln -s /etc/passwd /var/lib/oeprov/jobs/{job.id}/run/export/passwd")
    assert (job.run_dir / "report.html").read_bytes() == before
    assert fetching.fetch(job, replace=True, checkpoints=True) == 0
    assert "only plain files of the job's user are fetched: export/passwd\n" in capsys.readouterr().out
    assert (job.run_dir / "report.html").read_bytes() == b"new\n"
    assert "checkpoints/step-0000000002/manifest.json" in files_of(job)
    assert len(files_of(job)) == 5
    assert job.checkpoint() is None, "resume goes by what the worker's host has"

    # The job goes on and exports again.
    export = f"/var/lib/oeprov/jobs/{job.id}/run/export"
    with job.metrics_file.open("a") as file:
        for event in ({"event": "resume", "step": 8}, {"event": "export", "path": export}, {"event": "end"}):
            file.write(json.dumps(event) + "\n")
    last_screen(job, cluster.state_dir, Console(width=300))
    shown = capsys.readouterr().out
    assert "run/export, run/report.html here was fetched before the job went on, and is old" in shown
    assert f"oeprov fetch {job.id} --replace" in shown
    assert "serve-export" not in shown
    with pytest.raises(
        TrainingError, match=f"exported again; fetch the new one: oeprov fetch {job.id} --rep"
    ):
        serving.find(cluster.state_dir, job.id)
    assert fetching.fetch(job, replace=True) == 0
    last_screen(job, cluster.state_dir, Console(width=300))
    shown = capsys.readouterr().out
    assert "is old" not in shown
    assert f"oeprov serve-export {job.id}" in shown
    assert serving.find(cluster.state_dir, job.id).export == job.run_dir / "export"


def test_a_fetch_that_is_cut_leaves_nothing(
    cluster: Cluster, far_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, job = cluster.hosts[1], far_job
    extract = fetching._extract

    def cut(archive: Any, name: str, *more: Any) -> None:
        if name == "export/variables/v":
            cluster.tell(two, "pkill -KILL -f '[i]mport gc, os'")
        extract(archive, name, *more)

    cluster.tell(two, f"head -c 20000000 /dev/zero >/var/lib/oeprov/jobs/{job.id}/run/export/variables/v")
    monkeypatch.setattr(fetching, "_extract", cut)
    with pytest.raises(HostError, match=two.name):
        fetching.fetch(job)
    assert files_of(job) == ["metrics.jsonl"]
    monkeypatch.setattr(fetching, "_extract", extract)
    two.stop()
    try:
        with pytest.raises(HostError, match="refuses connections"):
            fetching.fetch(job)
    finally:
        two.start()
    assert [path.name for path in job.run_dir.iterdir()] == ["metrics.jsonl"]


def test_workers_that_cannot_reach_each_other_are_refused(cluster: Cluster) -> None:
    cluster.worker += "\n        gpu-2: {ansible_host: 192.0.2.9, oeprov_kind: cpu}"
    words = cluster.refused()
    assert "workers on gpu-2 cannot reach one on controller, which is this machine; put all workers" in words
