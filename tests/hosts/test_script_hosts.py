"""A user's script on hosts with a systemd of their own: real SSH, real TensorFlow, oeprov from its wheel.

Each host has an environment of its own. oeprov's wheel is installed there by `oeprov bootstrap`; the packages
that it depends on are links to this environment's files, which the hosts see read-only.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from converged import stand_for_packages
from object_store import BUCKET, ObjectStore
from packaging.requirements import Requirement
from ssh_hosts import SshHost, SshHosts, why_no_systemd

from provision.jobs.store import Job, all_jobs
from provision.node.plan import Desired

WHY_NOT = why_no_systemd()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
REPOSITORY = Path(__file__).parents[2]
OEPROV = [sys.executable, "-m", "provision.cli"]
VENV = "/opt/oeprov/venv"
PACKAGES = "/srv/packages"
SECONDS = 600
SETTINGS = {"oeprov_cluster": "mine", "pmem_mode": "none", "training_checkpoint_steps": 50}
HERE = {"ansible_connection": "local", "oeprov_kind": "local", "parameter_server_count": 2}

# Its batches are the same for any number of workers: each takes its part of every batch.
SCRIPT = '''\
"""Train on clicks; arguments: epochs, seconds that each batch takes longer."""
import sys
import time

import keras
import numpy as np
import oe_runtime.job as job
import oe_runtime.keras as embed
from model import BATCH, ROWS, click_model, clicks

keras.utils.set_random_seed(7)
model = embed.distributed_model(click_model(), job.client())
model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
epochs, pause = int(sys.argv[1]), float(sys.argv[2])


class Losses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        time.sleep(pause)

    def on_epoch_end(self, epoch, logs):
        print("loss of epoch", epoch, "is", float(logs["loss"]).hex(), flush=True)


ids, labels = clicks()
mine = np.arange(ROWS) % BATCH % job.workers == job.rank
model.fit(
    ids[mine], labels[mine], batch_size=BATCH // job.workers, epochs=epochs, shuffle=False, verbose=0,
    callbacks=[embed.JobCallback(job), Losses()],
)
servers = len(job.client().stats()["servers"])
print("rank", job.rank, "of", job.workers, "with", servers, "servers", flush=True)
'''
MODEL = '''\
"""What the script imports: it travels with it."""
import keras
import numpy as np

ROWS, BATCH, IDS = 24000, 240, 300


def clicks():
    random = np.random.default_rng(3)
    ids = random.integers(0, IDS, (ROWS, 3))
    return ids, (np.sin(ids).sum(1) + random.normal(size=ROWS) > 0).astype("float32")


def click_model():
    ids = keras.Input((3,), dtype="int64")
    rows = keras.layers.Flatten()(keras.layers.Embedding(IDS, 8)(ids))
    hidden = keras.layers.Dense(16, activation="relu")(rows)
    return keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
'''


def layer(directory: Path) -> Path:
    """Files of a host before bootstrap: an environment with what oeprov's wheel depends on."""
    venv = directory / VENV.lstrip("/")
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", str(venv)], check=True)
    (there,) = venv.glob("lib/python3*/site-packages")
    for name in sorted(needed_files("oeprov[tensorflow]")):
        (there / name).symlink_to(f"{PACKAGES}/{name}")
    stand_for_packages(
        directory, Desired(kind="cpu", parameter_server=True, runtime_python="/usr/bin/python3")
    )
    return directory


def needed_files(requirement: str) -> set[str]:
    """Names in site-packages of all that a requirement brings, except for its own; pip is one of them."""
    found, waiting, seen = set(), [Requirement(requirement), Requirement("pip")], set()
    while waiting:
        wanted = waiting.pop()
        extras = wanted.extras or {""}
        if (key := (wanted.name.lower(), frozenset(extras))) in seen:
            continue
        seen.add(key)
        try:
            installed = distribution(wanted.name)
        except PackageNotFoundError:
            pytest.skip(f"this environment does not have {wanted.name}")
        if wanted.name != Requirement(requirement).name:
            found |= {path.parts[0] for path in installed.files or [] if path.parts[0] != ".."}
        for line in installed.requires or []:
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(need)
    return found - {"__pycache__"}


class Cluster:
    """Two servers and three workers, a host each, and a directory in which `oeprov` is run."""

    def __init__(self, hosts: SshHosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self.servers, self.workers = list(hosts)[:2], list(hosts)[2:]
        self.state_dir = directory / "state"
        self.started: list[subprocess.Popen[str]] = []
        (directory / "mine").mkdir()
        (directory / "mine" / "train.py").write_text(SCRIPT)
        (directory / "mine" / "model.py").write_text(MODEL)

    def inventory(self, workers: int, *, first: int = 0, **settings: Any) -> str:
        """Write an inventory with that many workers, from the ``first`` host of them on; its name."""

        def entries(hosts: list[SshHost]) -> dict[str, Any]:
            return {"hosts": {host.name: {"ansible_host": host.address} for host in hosts}}

        found = {
            "all": {
                "vars": {
                    **SETTINGS,
                    "ansible_user": "root",
                    "ansible_ssh_private_key_file": str(self.hosts.key),
                    "ansible_ssh_common_args": f"-o UserKnownHostsFile={self.hosts.known_hosts} "
                    "-o IdentitiesOnly=yes",
                    "oeprov_kind": "cpu",
                    "runtime_python": "/usr/bin/python3",
                    "runtime_index": "/srv/packages",
                    **settings,
                },
                "children": {
                    "parameter_servers": entries(self.servers),
                    "workers": entries(self.workers[first : first + workers]),
                },
            }
        }
        name = f"workers-{workers}.yml"
        (self.directory / name).write_text(yaml.safe_dump(found))
        return name

    def one_machine(self) -> str:
        """Write an inventory of this machine, with two servers; its name."""
        groups = {name: {"hosts": {"here": HERE}} for name in ("parameter_servers", "workers")}
        (self.directory / "here.yml").write_text(
            yaml.safe_dump({"all": {"vars": SETTINGS, "children": groups}})
        )
        return "here.yml"

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = subprocess.Popen(
            [*OEPROV, *words],
            cwd=self.directory,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("OEPROV_")},
                "OEPROV_STATE_DIR": str(self.state_dir),
                "PYTHONPATH": str(REPOSITORY),
                "COLUMNS": "400",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(command)
        return command

    def run(self, *words: str, expect: int = 0) -> str:
        return self.finish(self.start(*words), expect)

    def finish(self, command: subprocess.Popen[str], expect: int = 0) -> str:
        out, _ = command.communicate(timeout=SECONDS)
        assert command.returncode == expect, out
        assert "Traceback" not in out
        return out

    def train(self, inventory: str, *words: str, pause: float = 0) -> subprocess.Popen[str]:
        """Launch three epochs of the script in the foreground; ``pause``: seconds after each batch."""
        mine = ["launch-training", "-i", inventory, "--script", "mine/train.py", *words]
        return self.start(*mine, "--", "3", str(pause))

    def begin(self, inventory: str) -> subprocess.Popen[str]:
        """Launch the script so that a run takes half a minute; returns after its checkpoint of step 50."""
        jobs = len(all_jobs(self.state_dir))
        command = self.train(inventory, pause=0.1)
        wait_for(lambda: len(all_jobs(self.state_dir)) > jobs, command)
        wait_for(lambda: self.has_event("checkpoint", 50), command)
        return command

    def has_event(self, kind: str, step: int = 0) -> bool:
        """The newest job has reported such an event, of this step or a later one."""
        try:
            lines = self.job().metrics_file.read_text().splitlines()
        except FileNotFoundError:
            return False
        events = [json.loads(line) for line in lines]
        return any(event["event"] == kind and event.get("step", 0) >= step for event in events)

    def losses(self, workers: int) -> list[list[float]]:
        """Each worker's loss of each epoch of the newest job; of the last attempt if there were several."""
        found = []
        for rank in range(workers):
            lines = [line.split() for line in self.log(f"worker-{rank}") if line.startswith("loss of epoch ")]
            by_epoch = {int(words[3]): float.fromhex(words[-1]) for words in lines}
            found.append([by_epoch[epoch] for epoch in sorted(by_epoch)])
        return found

    def log(self, process: str) -> list[str]:
        """All lines that a process of the newest job has printed."""
        return self.run("logs", self.job().id, "--process", process, "--lines", "1000").splitlines()

    def job(self) -> Job:
        return all_jobs(self.state_dir)[-1]

    def tell(self, host: SshHost, command: str) -> str:
        """Standard output of a command in a login of the host."""
        argv = ["ssh", "-F", "/dev/null", *self.hosts.ssh_options(), f"root@{host.address}", command]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def wait_for(found: Callable[[], object], command: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not found():
        assert command.poll() is None, command.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    files = layer(tmp_path_factory.mktemp("layer"))
    packages = Path(sysconfig.get_path("purelib"))
    directory = tmp_path_factory.mktemp("hosts")
    with SshHosts(directory, 5, layer=files, systemd=True, packages=packages) as hosts:
        found = Cluster(hosts, tmp_path_factory.mktemp("cluster"))
        found.run("bootstrap", "-i", found.inventory(3), "--yes")
        yield found
        for command in found.started:
            if command.poll() is None:
                command.kill()
                command.communicate()


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> list[float]:
    """Losses of one worker with two servers on this machine."""
    cluster.run("bootstrap", "-i", cluster.one_machine(), "--yes")
    cluster.finish(cluster.train(cluster.one_machine()))
    (losses,) = cluster.losses(1)
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    return losses


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(each) / len(losses) for each in zip(*losses, strict=True)]


def test_losses_are_those_of_one_machine(cluster: Cluster, alone: list[float]) -> None:
    """One worker's to the bit; two workers add up their gradients in another order."""
    for workers in (1, 2):
        out = cluster.finish(cluster.train(cluster.inventory(workers)))
        for host in cluster.workers[:workers]:
            assert (f"{host.name}: the script's directory was sent" in out) is (
                host is cluster.workers[workers - 1]
            )
        for host, name in zip(cluster.servers, ("server-0", "server-1"), strict=True):
            assert f"{name} on {host.name} listens on {host.address}:" in out
        losses = cluster.losses(workers)
        assert f"rank {workers - 1} of {workers} with 2 servers" in cluster.log(f"worker-{workers - 1}")
        if workers == 1:
            assert losses == [alone]
        else:
            assert mean(losses) == pytest.approx(alone, rel=1e-3)


def test_a_killed_worker_is_named_and_resumed(cluster: Cluster, alone: list[float]) -> None:
    command = cluster.begin(cluster.inventory(2))
    two = cluster.workers[1]
    cluster.tell(two, "pkill -KILL -f '[o]e_runtime.train'")
    out = cluster.finish(command, expect=1)
    assert f"worker-1 on {two.name} (pid " in out
    assert "was killed by signal 9" in out
    assert f"oeprov resume {cluster.job().id}" in out
    out = cluster.run("resume")
    assert "resumed from step 50" in out
    assert mean(cluster.losses(2)) == pytest.approx(alone, rel=1e-3)


def test_a_killed_server_is_waited_for(cluster: Cluster, alone: list[float]) -> None:
    command = cluster.begin(cluster.inventory(2))
    cluster.tell(cluster.servers[1], "pkill -KILL -f '[o]e_runtime.server'")
    out = cluster.finish(command)
    assert f"training waits up to 300 s for server {cluster.servers[1].address}:" in out
    assert "is back: training resumes from step " in out
    assert mean(cluster.losses(2)) == pytest.approx(alone, rel=1e-3)


def test_a_cut_cable_of_20_s_costs_20_s(cluster: Cluster, alone: list[float]) -> None:
    """Of a worker, then of a server: connections last, and nothing is trained twice."""
    command = cluster.begin(cluster.inventory(2))
    for host in (cluster.workers[1], cluster.servers[0]):
        cluster.hosts.unplug(host)
        time.sleep(20)
        cluster.hosts.plug(host)
        wait_for(lambda: cluster.has_event("checkpoint", 150), command)
    out = cluster.finish(command)
    assert "resumed" not in out
    assert out.count("✓ checkpoint at step") == 7
    assert mean(cluster.losses(2)) == pytest.approx(alone, rel=1e-3)


def test_a_lost_host_is_named_and_the_others_go_on(cluster: Cluster, alone: list[float]) -> None:
    command = cluster.begin(cluster.inventory(2, training_server_wait=10))
    two, job = cluster.workers[1], cluster.job()
    cluster.hosts.unplug(two)  # or its peers would be told that its processes have ended
    two.tell("stop")
    try:
        out = cluster.finish(command, expect=1)
        assert f"{two.name} (worker-1) does not answer, waiting up to 120 s: " in out
        assert f"worker-1 on {two.name} (pid " in out
        assert "cannot be reached any more: " in out
        assert f"when it answers again: oeprov stop {job.id}" in out
        out = cluster.run("status", job.id)
        assert (
            f"its processes may still run; once their host answers, stop them with: oeprov stop {job.id}"
            in out
        )
        assert f"✗ {two.name}: the connection to {two.address} port 22 failed" in cluster.run(
            "stop", job.id, expect=1
        )
        out = cluster.run("resume", job.id, "-i", cluster.inventory(1))
        assert f"{two.name} may still have worker-1 of {job.id}" in out
        assert "resumed from step " in out
        found = cluster.losses(1)[0]  # the first epoch is partly of half the rows
        assert found[1:] == pytest.approx(alone[1:], rel=1e-3)
    finally:
        cluster.hosts.plug(two)
        two.start()
    assert cluster.tell(two, "pgrep -f '[o]e_runtime' || :") == "", (
        "a worker's unit does not start with its host"
    )


def test_a_stopped_job_goes_on_with_three_workers(cluster: Cluster, alone: list[float]) -> None:
    command = cluster.begin(cluster.inventory(2))
    job = cluster.job()
    assert "stopped" in cluster.run("stop")
    cluster.finish(command, expect=130)
    assert job.state().message.endswith("which is saved")
    out = cluster.run("resume", job.id, "-i", cluster.inventory(3))
    assert "resumed from step " in out
    assert "rank 2 of 3 with 2 servers" in cluster.log("worker-2")
    assert mean(cluster.losses(3))[-1] == pytest.approx(alone[-1], rel=1e-3)


def test_a_job_that_uploads_goes_on_without_its_host(cluster: Cluster, alone: list[float]) -> None:
    store, (one, two, _) = ObjectStore(cluster.hosts.controller), cluster.workers
    store.make_bucket()
    uploads = {"training_upload_to": f"s3://{BUCKET}/mine", "worker_environment": store.environment}
    try:
        command = cluster.begin(cluster.inventory(1, **uploads))
        cluster.run("stop")
        out = cluster.finish(command, expect=130)
        cluster.hosts.unplug(one)
        one.tell("stop")
        out = cluster.run("resume", "-i", cluster.inventory(1, first=1, **uploads))
        assert f"the checkpoints of host {one.name} are looked for in s3://{BUCKET}/mine" in out
        assert "resumed from step " in out
        assert f"worker-0 on {two.name} started" in out
        assert cluster.losses(1) == [alone], "also of the epoch that the former host began"
    finally:
        cluster.hosts.plug(one)
        one.start()
        store.stop()


def test_destroy_leaves_nothing(cluster: Cluster) -> None:
    destroy = ["destroy", "-i", cluster.inventory(3)]
    consents = re.findall(r"--consent \S+", cluster.run(*destroy, "--check", expect=2))
    assert consents, "of each job with checkpoints"
    cluster.run(*destroy, "--yes", *" ".join(consents).split())
    for host in cluster.hosts:
        assert cluster.tell(host, "ls /var/lib/oeprov /etc/oeprov 2>/dev/null || :") == ""
        assert cluster.tell(host, "ls /etc/systemd/system | grep -v oeprov-test | grep oeprov || :") == ""
        assert cluster.tell(host, "pgrep -f '[o]e_runtime' || :") == ""
        assert cluster.tell(host, "id oeprov 2>&1 || :").strip().endswith("no such user")
