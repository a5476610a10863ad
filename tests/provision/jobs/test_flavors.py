"""Flavors of others: what their commands are, with recording stand-ins for the programs that are not here."""

import os
import re
import subprocess
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from recorded import Programs
from test_training_supervisor import assert_nothing_left, until

from provision.cli.views.training import JobTerminal
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts.stop_request import StopRequest
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.jobs import data, flavors, jobspec, launching, store
from provision.jobs.backends import ssh
from provision.jobs.flavors import openembedding
from provision.jobs.metrics import summary
from provision.jobs.request import LaunchOptions
from provision.jobs.store import Job
from provision.jobs.supervisor import Supervisor
from provision.node.state import Mount, NumaNode, OsInfo, State

INVENTORY = """\
all:
  vars:
    runtime_flavor: {flavor}
    training_data: {data}
    training_model: wdl
    training_epochs: 2
    training_batch_size: 64
    {more}
  children:
    parameter_servers: {{hosts: {{localhost: }}}}
    workers: {{hosts: {{localhost: }}}}
  hosts:
    localhost:
      ansible_connection: local
      oeprov_kind: local
      runtime_venv: {venv}
      runtime_sources: /sources
      pmem_mode: none
"""
HEADER = ",".join(["", *("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27)))]) + "\n"
LISTEN = """\
import signal, socket
host, _, port = sys.argv[sys.argv.index("--bind_ip") + 1].rpartition(":")
server = socket.create_server((host, int(port)))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
signal.pause()
"""
KERAS = """\
import time
print("Epoch 1/2")
print("5/5 - 2s - loss: 0.6931 - auc: 0.5000", flush=True)
print("Epoch 2/2")
print("5/5 - 1s - loss: 0.5000 - auc: 0.7500", flush=True)
while os.path.exists(LOG + ".wait"):
    time.sleep(0.05)
if "--export" in sys.argv:
    os.makedirs(sys.argv[sys.argv.index("--export") + 1])
"""
PYTHON = (
    """\
if sys.argv[1].endswith("server.py"):
"""
    + "".join("    " + line + "\n" for line in LISTEN.splitlines())
    + """\
else:
"""
    + "".join("    " + line + "\n" for line in KERAS.splitlines())
)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs(tmp_path / "venv" / "bin")
    monkeypatch.setenv("PATH", f"{found.directory}:{os.environ['PATH']}")
    return found


def inventory(tmp_path: Path, flavor: str = "openembedding", more: str = "", data: str = "") -> Inventory:
    rows = tmp_path / "day.csv"
    rows.write_text(HEADER + "0\n")
    text = INVENTORY.format(flavor=flavor, more=more, venv=tmp_path / "venv", data=data or rows)
    (tmp_path / "inventory.yml").write_text(text)
    return load(tmp_path / "inventory.yml", state_dir=tmp_path / "state")


def made(tmp_path: Path, found: Inventory, options: LaunchOptions | None = None, **states: State) -> Job:
    wanted = jobspec.request(found, options or LaunchOptions())
    job = store.create(tmp_path / "state", "theirs", datetime(2026, 11, 22))
    placed = flavors.get(found.flavor).place(job, found, states, wanted)
    job.write_spec(jobspec.build(job, found, placed, wanted, datetime(2026, 11, 22)))
    return job


def program(job: Job, name: str) -> list[str]:
    """What the adapter runs."""
    argv = next(item.argv for item in job.spec().processes if item.name == name)
    return argv[argv.index("--") + 1 :]


class TestOpenEmbeddingJobs:
    def test_server_and_horovod(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("python", PYTHON)
        programs.add("horovodrun", "os.execv(sys.argv[3], sys.argv[3:])\n")
        job = made(tmp_path, inventory(tmp_path), LaunchOptions(workers=2, optimizer="adam"))
        events: list[dict[str, Any]] = []
        outcome = Supervisor(job, events.append, StopRequest()).run()
        assert (outcome.phase, outcome.message) == ("done", "training is done")
        assert_nothing_left(job)
        (run,) = programs.calls("horovodrun")
        server, worker = programs.calls("python")
        listens = server[server.index("--bind_ip") + 1]
        assert server[1] == "/sources/test/benchmark/server.py"
        assert "--pmem" not in server
        assert run[1:3] == ["-np", "2"]
        assert worker[1] == "/sources/test/benchmark/criteo_deepctr.py"
        assert (
            worker[2:]
            == (
                f"--data {tmp_path}/day.csv --batch_size 32 --optimizer Adam --model WDL --epochs 2 "
                f"--embedding_dim 9 --server --master_endpoint {listens}"
            ).split()
        )
        facts = summary(job.metrics_file)
        assert (facts.step, facts.loss, facts.auc) == (10, 0.5, 0.75)
        assert [item["endpoint"] for item in events if item["event"] == "server"] == [listens]
        assert "Epoch 2/2" in job.log("worker-0").read_text()

    def test_a_stop_ends_the_programs_of_another_flavor(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("python", PYTHON)
        programs.add("horovodrun", "sys.exit(subprocess.call(sys.argv[3:], start_new_session=True))\n")
        Path(f"{programs.log}.wait").touch()
        job = made(tmp_path, inventory(tmp_path))
        stop, outcomes = StopRequest(), []
        thread = threading.Thread(target=lambda: outcomes.append(Supervisor(job, lambda _: None, stop).run()))
        thread.start()
        until(job.metrics_file)
        while summary(job.metrics_file).step != 10:
            assert thread.is_alive()
        stop.ask()
        thread.join()
        assert outcomes[0].message == "stopped after step 10; nothing is saved"
        assert_nothing_left(job)
        # What the programs started in sessions of their own has ended too.
        left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
        assert left.stdout == ""

    @pytest.mark.parametrize(
        ("variant", "words"),
        [
            ("standalone", "/sources/examples/criteo_deepctr_network.py"),
            ("mirrored", "/sources/examples/criteo_deepctr_network_mirrored.py"),
            ("mpi", "/sources/examples/criteo_deepctr_network_mpi.py"),
        ],
    )
    def test_examples_have_their_servers_inside_and_export(
        self, tmp_path: Path, variant: str, words: str
    ) -> None:
        found = inventory(tmp_path, more=f"runtime_variant: {variant}")
        options = LaunchOptions(workers=2 if variant == "mpi" else 1)
        job = made(tmp_path, found, options)
        (spec,) = job.spec().processes
        argv = program(job, "worker-0")
        launcher = ["mpirun", "-np", "2"] if variant == "mpi" else []
        assert argv[: len(launcher) + 2] == [*launcher, f"{tmp_path}/venv/bin/python", words]
        assert argv[-2:] == ["--export", f"{job.run_dir}/export/1"]
        assert f"{job.run_dir}/export/1" == spec.argv[spec.argv.index("--export") + 1]

    def test_export_is_told(self, tmp_path: Path, programs: Programs) -> None:
        programs.add("python", PYTHON)
        job = made(tmp_path, inventory(tmp_path, more="runtime_variant: standalone"))
        assert Supervisor(job, lambda _: None, StopRequest()).run().phase == "done"
        assert summary(job.metrics_file).export == f"{job.run_dir}/export/1"

    def test_persistent_memory_and_hosts(self, tmp_path: Path) -> None:
        found = inventory(tmp_path, more="runtime_package: /srv/openembedding-0.1.2-pmem.tar.gz")
        (host,) = found.hosts.values()
        pmem = host.pmem.model_copy(update={"mode": "fsdax"})
        server = host.server.model_copy(
            update={
                "storage": "pmem_libpmem",
                "host": "192.0.2.11",
                "storage_cache": 2 << 30,
                "start_timeout": 900,
            }
        )
        far = replace(host, name="pm-1", connection="ssh", address="192.0.2.11", pmem=pmem, server=server)
        gpu = replace(far, name="gpu-1", address="192.0.2.21", groups=("workers",))
        other = replace(gpu, name="gpu-2", address="192.0.2.22")
        hosts = {item.name: item for item in (far, gpu, other)}
        found = replace(found, hosts=hosts, parameter_servers=["pm-1"], workers=["gpu-1", "gpu-2"])
        state = State(mounts=[Mount("/dev/pmem0", "/mnt/pmem0")])
        job = made(tmp_path, found, LaunchOptions(workers=4), **{"pm-1": state})
        wanted = jobspec.request(found, LaunchOptions(workers=4))
        placed = flavors.get(found.flavor).place(job, found, {"pm-1": state}, wanted)
        argv = program(job, "server-0")
        assert argv[argv.index("--bind_ip") + 1] == "192.0.2.11:34567"
        assert argv[-4:] == ["--pmem", f"/mnt/pmem0/oeprov/{job.id}/server-0", "--cache_size", "2048"]
        worker = program(job, "worker-0")
        assert worker[worker.index("--pmem") :][:4] == argv[-4:], "its documents want it on both sides"
        assert program(job, "worker-0")[1:5] == ["-np", "8", "-H", "192.0.2.21:4,192.0.2.22:4"]
        mpi = {
            item.name: replace(item, runtime=item.runtime.model_copy(update={"variant": "mpi"}))
            for item in hosts.values()
        }
        rocky = State(os=OsInfo("rocky", "8.10", "rhel"))
        job = made(tmp_path, replace(found, hosts=mpi), LaunchOptions(workers=4), **{"gpu-1": rocky})
        assert program(job, "worker-0")[0] == "/usr/lib64/mpich/bin/mpirun", "EL has it on no PATH"
        (unit,) = placed.units["pm-1"]
        assert unit["files"]["adapter.py"].startswith('"""Run a foreign program')
        assert "mnt-pmem0.mount" in unit["text"]
        assert [item.start_timeout for item in placed.processes] == [900, 180], "its host waits that long"
        begun = ssh.worker_start(job.id, placed.processes[1], placed.processes[1].argv)
        assert set(begun["files"]) == {"adapter.py"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("flavor", "more", "options", "words"),
        [
            ("openembedding", "", {"model": "dlrm"}, "flavor openembedding has deepfm, wdl, xdeepfm"),
            ("openembedding", "", {"optimizer": "lion"}, "scripts have adagrad, adam, ftrl, sgd"),
            ("openembedding", "", {"servers": 2}, "server.py is master and only server"),
            ("openembedding", "", {"workers": 3}, "64 rows cannot be shared out evenly to 3 workers"),
            ("openembedding", "", {"on": "docker"}, "--on docker is for oe_runtime"),
            ("openembedding", "", {"upload_to": "s3://b/x"}, "--upload-to is for oe_runtime"),
            (
                "openembedding",
                "",
                {"data": "s3://b/x.csv"},
                "reads files on the worker's host; copy it there",
            ),
            ("openembedding", "", {"data": "generate:10"}, "criteo_preprocess.py DAY.tsv DAY.csv"),
            ("openembedding", "", {"data": "/etc/passwd"}, "neither a .csv nor a directory of TFRecords"),
            (
                "openembedding",
                "",
                {"storage": "pmem_libpmem"},
                "from PyPI does not support persistent memory",
            ),
            ("openembedding", "", {"storage": "pmem_memkind"}, "deeprec and oe_runtime have pmem_memkind"),
            ("openembedding", "", {"storage": "dram_ssd"}, "OpenEmbedding has no such storage"),
            ("deeprec", "", {"model": "wdl", "storage": "dram_ssd"}, "DeepRec has no such storage"),
            ("openembedding", "runtime_variant: mirrored", {"workers": 2}, "mirrored is one process"),
            ("deeprec", "", {"model": "deepfm"}, "flavor deeprec has wdl, dlrm"),
            ("deeprec", "", {"model": "wdl", "schema": "avazu"}, "--schema: flavor deeprec reads Criteo's"),
            ("deeprec", "", {"workers": 2}, "trains in one process"),
            ("deeprec", "", {"storage": "pmem_libpmem"}, "parameter_server_storage_size"),
            (
                "deeprec",
                "",
                {"model": "dlrm", "storage": "pmem_memkind"},
                "keeps rows in DRAM: use --storage dram",
            ),
            ("deeprec", "", {"model": "dlrm", "optimizer": "ftrl"}, "script of dlrm has adam, adamasync"),
            ("deeprec", "", {}, "has no train.csv"),
        ],
    )
    def test_what_it_cannot_do_is_said_and_nothing_made(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        flavor: str,
        more: str,
        options: dict[str, Any],
        words: str,
    ) -> None:
        monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey())
        with pytest.raises(TrainingError) as caught:
            launching.launch(
                inventory(tmp_path, flavor, more),
                LaunchOptions(**options),
                state_dir=tmp_path / "state",
                screen=JobTerminal(),
            )
        assert words in str(caught.value)
        assert store.all_jobs(tmp_path / "state") == []

    def test_a_csv_without_header(self, tmp_path: Path) -> None:
        found = inventory(tmp_path)
        (tmp_path / "day.csv").write_text("0,1,2\n")
        with pytest.raises(TrainingError, match="its first line does not name column label"):
            data.check(found, jobspec.request(found, LaunchOptions()))


class TestDeepRecJobs:
    def test_storages(self, tmp_path: Path) -> None:
        found = inventory(
            tmp_path,
            "deeprec",
            "parameter_server_storage_size: 64G\n    runtime_preload: /usr/lib/libjemalloc.so.2\n"
            "    runtime_arguments: [--no_eval]",
            data=str(tmp_path),
        )
        (host,) = found.hosts.values()
        far = replace(host, connection="ssh", address="192.0.2.11")
        nodes = [NumaNode(0, 1 << 30, cpus=[0]), NumaNode(2, 1 << 34), NumaNode(3, 1 << 34)]
        state = State(numa=nodes, mounts=[Mount("/dev/pmem0", "/mnt/pmem0")])

        def of(mode: str, storage: str) -> tuple[list[str], dict[str, str]]:
            one = replace(far, pmem=host.pmem.model_copy(update={"mode": mode}))
            job = made(
                tmp_path,
                replace(found, hosts={host.name: one}),
                LaunchOptions(storage=storage),
                localhost=state,
            )
            return program(job, "worker-0"), job.spec().processes[0].environment

        argv, environment = of("none", "dram")
        assert argv[1] == "/sources/modelzoo/features/embedding_variable/wide_and_deep/train.py"
        assert argv[-3:] == ["--ev_storage", "dram", "--no_eval"]
        assert environment["LD_PRELOAD"] == "/usr/lib/libjemalloc.so.2"
        assert "MEMKIND_DAX_KMEM_NODES" not in environment
        argv, _ = of("fsdax", "pmem_libpmem")
        path = argv[argv.index("--ev_storage_path") + 1]
        assert path.startswith("/mnt/pmem0/oeprov/theirs-")
        assert argv[argv.index("--ev_storage_size_gb") + 1] == "64"
        argv, environment = of("system-ram", "pmem_memkind")
        assert argv[-3:-1] == ["--ev_storage", "pmem_memkind"]
        assert environment["MEMKIND_DAX_KMEM_NODES"] == "2,3"

    def test_dlrm(self, tmp_path: Path) -> None:
        found = inventory(tmp_path, "deeprec", "training_precision: bfloat16", data=str(tmp_path))
        job = made(tmp_path, found, LaunchOptions(model="dlrm", optimizer="sgd", storage="dram", seed=7))
        argv = program(job, "worker-0")
        assert argv[1] == "/sources/modelzoo/dlrm/train.py"
        words = " ".join(argv)
        assert "--batch_size 64" in words
        assert "--interaction_op dot --optimizer gradientdescent --bf16" in words
        assert "--seed 7" in words
        assert "--learning_rate" not in words, "the script's own, unless ours is set"
        rated = LaunchOptions(model="dlrm", optimizer="sgd", storage="dram", learning_rate=0.25)
        assert "--learning_rate 0.25" in " ".join(program(made(tmp_path, found, rated), "worker-0"))


@pytest.mark.parametrize(("status", "phase"), [(0, "done"), (4, "failed")])
def test_a_server_that_ends_in_order_is_not_lost(
    tmp_path: Path, programs: Programs, status: int, phase: str
) -> None:
    """OpenEmbedding's ends when its last client has, a moment before that has."""
    ends = f"\nwhile not os.path.exists(LOG + '.over'):\n    time.sleep(0.02)\nsys.exit({status})\n"
    server = LISTEN.replace("signal.pause()", f"child.kill(){ends}")
    worker = KERAS + "open(LOG + '.over', 'w').close()\ntime.sleep(1)\n"
    programs.add(
        "python",
        'if sys.argv[1].endswith("server.py"):\n'
        + "".join(f"    {line}\n" for line in server.splitlines())
        + "else:\n"
        + "".join(f"    {line}\n" for line in worker.splitlines()),
    )
    programs.add("horovodrun", "os.execv(sys.argv[3], sys.argv[3:])\n")
    job = made(tmp_path, inventory(tmp_path))
    outcome = Supervisor(job, lambda _: None, StopRequest()).run()
    assert outcome.phase == phase
    assert phase == "done" or "the program ended with exit status 4" in outcome.message
    assert_nothing_left(job)


def test_adapter_ends_with_its_launcher(tmp_path: Path, programs: Programs) -> None:
    programs.add("python", LISTEN)
    job = made(tmp_path, inventory(tmp_path))
    spec = job.spec().processes[0]
    popen = subprocess.Popen(spec.argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    until(job.ready_file("server-0"))
    assert popen.stdin is not None
    popen.stdin.close()  # which happens when the launcher is killed
    assert popen.wait(20) == 0
    assert not job.ready_file("server-0").exists()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


@pytest.mark.parametrize("prefix", ["", "[0]<stdout>:", "[1,0]<stdout>:", "[0] "])
def test_the_first_process_of_horovodrun_tells_the_progress(prefix: str) -> None:
    found = re.match(openembedding.PROGRESS, prefix + "56/56 - 10s - loss: 0.6606 - auc: 0.4251")
    assert found is not None, "as horovodrun 0.28.1 prints it"
    assert (found["more"], found["loss"], found["auc"]) == ("56", "0.6606", "0.4251")
    assert not re.match(openembedding.PROGRESS, "[1]<stdout>:56/56 - 11s - loss: 0.6637 - auc: 0.4218")
