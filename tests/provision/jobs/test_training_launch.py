import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_processes import make_environment, make_job
from test_training_supervisor import assert_nothing_left, until

from oe_runtime.run import options as trainer_options
from oe_runtime.run.optimizers import LEARNING_RATES
from provision.cli import main
from provision.cli.views import ending
from provision.cli.views.training import JobTerminal
from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.hosts.survey import ClusterSurvey
from provision.inventory.loader import load
from provision.jobs import jobspec, launching, placement, servers, stopping, store
from provision.jobs.backends import registry
from provision.jobs.placement import Placement
from provision.jobs.request import LaunchOptions, Request
from provision.jobs.store import JobState
from provision.node import process
from provision.node.answer import MARKER
from provision.node.jobfiles import TAKEN
from provision.node.step import Plan, Step

INVENTORY = """\
all:
  vars:
    oeprov_cluster: test
    training_data: generate:800
  children:
    parameter_servers: {{hosts: {{localhost: }}}}
    workers: {{hosts: {{localhost: }}}}
  hosts:
    localhost:
      ansible_connection: local
      oeprov_kind: {kind}
      {more}
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "state" / "pmem0").mkdir(parents=True)
    return tmp_path / "state"


def inventory(state_dir: Path, more: str = "", kind: str = "local") -> Inventory:
    path = state_dir.parent / "inventory.yml"
    path.write_text(INVENTORY.format(kind=kind, more=more))
    return load(path, state_dir=state_dir)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey())


def refused(state_dir: Path, options: LaunchOptions, words: str, more: str = "") -> None:
    with pytest.raises(TrainingError) as caught:
        launching.launch(inventory(state_dir, more), options, state_dir=state_dir, screen=JobTerminal())
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert [job for job in store.all_jobs(state_dir) if job.id.startswith(("deepfm", "wdl"))] == []
    assert not list(state_dir.glob("lock-*"))


def planned(found: Inventory, job: store.Job, options: LaunchOptions) -> store.JobSpec:
    wanted = jobspec.request(found, options)
    placed = placement.place(job, found, {}, wanted)
    return jobspec.build(job, found, placed, wanted, jobspec.datetime(2026, 11, 21))


@pytest.mark.usefixtures("ready")
class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"data": "generate:"},
                "--data: found 'generate:'; expected generate:ROWS or generate:ROWS:SEED",
            ),
            ({"data": "generate:0"}, "expected generate:ROWS"),
            (
                {"data": "/nonexistent/day_0.tsv"},
                "--data: there is no file or directory /nonexistent/day_0.tsv",
            ),
            ({"data": "s3://me:secret@bucket/x.tsv"}, "--data: the URL has credentials in it"),
            ({"data": "s3://me:sec/ret@bucket/x.tsv"}, "--data: the URL has credentials in it"),
            ({"upload_to": "s3://me:secret@bucket/x"}, "--upload-to: the URL has credentials in it"),
            ({"data": "ftp://host/x.tsv"}, "--data: ftp://host/x.tsv: ftp:// is not one of s3://"),
            ({"data": "/nonexistent/day_*"}, "--data: no file matches /nonexistent/day_*"),
            ({"data": "/etc/passwd"}, "--data: /etc/passwd line 1: found 1 columns, expected 40"),
            (
                {"model": "deepfn"},
                "--model: found 'deepfn'; allowed: deepfm, dlrm, wdl, xdeepfm; did you mean deepfm?",
            ),
            ({"optimizer": "adagradd"}, "--optimizer: found 'adagradd'"),
            ({"dim": 0}, "--dim: found 0"),
            ({"micro_batch": 0}, "--micro-batch: found 0"),
            ({"staleness": 2}, "--staleness: found 2; without --workqueue it is 0 or 1"),
            ({"staleness": 1, "workers": 2}, "--staleness: found 1; 2 workers train each batch together"),
            ({"staleness": 1, "pipeline": False}, "--staleness 1 is a part of the pipeline"),
            ({"workqueue": True, "optimizer": "ftrl"}, "--workqueue does not go with optimizer ftrl"),
            ({"data": "-"}, "--data -: workers have no standard input"),
            (
                {"follow": True, "data": "/inbox", "workers": 2},
                "--follow is for one worker, and this job has",
            ),
            (
                {"follow": True, "data": "/inbox", "workqueue": True},
                "this job has --workqueue",
            ),
            ({"follow": True, "data": "/inbox", "epochs": 2}, "--epochs does not go with --follow"),
            ({"follow": True, "data": "/inbox", "eval_data": ".1"}, "--follow holds out no rows"),
            ({"follow": True}, "--follow: generate:"),
            ({"follow": True, "data": "/etc/passwd"}, "--data: --follow: /etc/passwd is no directory"),
            ({"learning_rate": -1.0}, "--learning-rate: found -1.0"),
            ({"storage": "pmem"}, "--storage: found 'pmem'; allowed: dram, pmem_libpmem"),
            ({"servers": 65}, "--servers: found 65"),
            ({"run_name": "../x"}, "--name: found '../x'"),
            ({"resume": ""}, "no job in"),
            ({"resume": "", "servers": 65}, "--servers: found 65"),
        ],
    )
    def test_invalid_options_are_refused(
        self, state_dir: Path, options: dict[str, object], words: str
    ) -> None:
        refused(state_dir, LaunchOptions(**options), words)  # type: ignore[arg-type]

    def test_no_data(self, state_dir: Path) -> None:
        refused(state_dir, LaunchOptions(), "no data to train on: give --data", more='training_data: ""')

    def test_unreadable_directory_for_rows(self, state_dir: Path) -> None:
        os.rmdir(state_dir / "pmem0")
        (state_dir / "pmem0").touch()
        refused(state_dir, LaunchOptions(), f"pmem_directory {state_dir / 'pmem0'} is not a directory")

    def test_port_that_is_taken(self, state_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            words = f"port {port} on 127.0.0.1 cannot be used (Address already in use)"
            refused(state_dir, LaunchOptions(), words, more=f"parameter_server_port: {port}")

    def test_other_job_in_the_same_storage(self, state_dir: Path) -> None:
        other = make_job(state_dir, storage=str(state_dir / "pmem0"))
        me = os.getpid()
        running = JobState(phase="running", supervisor_pid=me, supervisor_started=process.start_time(me))
        other.write_state(running)
        refused(state_dir, LaunchOptions(), f"job {other.id} is running with the same storage directory")
        in_dram = planned(inventory(state_dir), other, LaunchOptions(storage="dram"))
        jobspec.check_storage_is_free(in_dram, state_dir)
        in_same_place = planned(inventory(state_dir), other, LaunchOptions())
        in_same_place = in_same_place.model_copy(update={"id": "another"})
        with pytest.raises(TrainingError, match="same storage directory"):
            jobspec.check_storage_is_free(in_same_place, state_dir)
        other.write_state(running.model_copy(update={"phase": "done"}))
        jobspec.check_storage_is_free(in_same_place, state_dir)

    @pytest.mark.parametrize("what", ["job", "servers"])
    def test_rows_of_another_job_with_this_id(
        self, state_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """Of another state directory, launched in the same second, with the same directories for rows."""
        create, kept = store.create, []

        def also_elsewhere(place: Path, name: str, now: datetime) -> store.Job:
            job = create(place, name, now)
            pool = state_dir / "pmem0" / job.id / "server-0" / "oe-1-super.pool"
            pool.parent.mkdir(parents=True)
            pool.write_bytes(b"OE" + bytes(30) + b'{"server": 0, "table": {"name": "C1"}}' + bytes(60))
            kept.append(pool)
            return job

        monkeypatch.setattr(store, "create", also_elsewhere)
        words = "server-0 belongs to another job of the same name and second, of another controller or state "
        words += "directory, and holds rows of tables C1; launch this one again: it gets another id"
        if what == "job":
            refused(state_dir, LaunchOptions(), words)
        else:
            with pytest.raises(TrainingError, match=f"host localhost: .*{words}"):
                servers.up(inventory(state_dir), LaunchOptions(), state_dir=state_dir, screen=JobTerminal())
        assert store.all_jobs(state_dir) == []
        assert [path.exists() for path in kept] == [True]

    def test_consent_names_the_job(self, state_dir: Path) -> None:
        make_job(state_dir)
        words = "--consent fake: it is none of these jobs"
        refused(state_dir, LaunchOptions(resume="fake", consent=["fake"]), words)

    def test_resume_keeps_its_settings(self, state_dir: Path) -> None:
        words = "--resume keeps the settings of the job; leave out --dim, --storage"
        refused(state_dir, LaunchOptions(resume="", dim=16, storage="dram", servers=2), words)


def test_host_that_is_not_ready(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step("a", "install tensorflow", "why"), Step("b", "make /x", "why")]
    plan = Plan("localhost", steps)
    monkeypatch.setattr(launching, "survey", lambda inventory: ClusterSurvey(plans={"localhost": plan}))
    words = "host localhost is not ready: install tensorflow (and 1 more); run: oeprov bootstrap -i"
    refused(state_dir, LaunchOptions(), words)


def test_command_lines(state_dir: Path) -> None:
    more = "parameter_server_storage_size: 2G\n      parameter_server_port: 7000\n      worker_threads: 2"
    more += "\n      parameter_server_metrics_port: 9500"
    found = inventory(state_dir, more)
    job = make_job(state_dir)
    wanted = jobspec.request(found, LaunchOptions(servers=2, dim=16, export=False))
    spec = planned(found, job, LaunchOptions(servers=2, dim=16, export=False))
    first, second, worker = spec.processes
    assert first.argv[1:3] == ["-m", "oe_runtime.server"]
    flags = dict(zip(second.argv, second.argv[1:], strict=False))
    assert (flags["--port"], flags["--index"], flags["--count"]) == ("7001", "1", "2")
    assert flags["--storage-path"] == str(state_dir / "pmem0" / job.id / "server-1")
    assert flags["--storage-size"] == str(2 << 30)
    assert (flags["--metrics-host"], flags["--metrics-port"]) == ("127.0.0.1", "9501")
    assert flags["--tls"] == "off"
    flags = dict(zip(worker.argv, worker.argv[1:], strict=False))
    assert flags["--dim"] == "16"
    assert flags["--servers"] == store.SERVERS
    assert "--export" not in flags
    assert "--steps" not in flags
    assert worker.environment["TF_NUM_INTRAOP_THREADS"] == "2"
    assert Request.from_job(spec).training == wanted.training


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
def test_a_learning_rate_that_is_not_set_is_the_optimizers(state_dir: Path, optimizer: str) -> None:
    found, job = inventory(state_dir), make_job(state_dir)
    spec = planned(found, job, LaunchOptions(optimizer=optimizer))
    options = trainer_options.parser().parse_args(spec.processes[-1].argv[3:])
    assert (options.optimizer, options.learning_rate) == (optimizer, None)
    assert Request.from_job(spec).training.learning_rate is None
    words = planned(found, job, LaunchOptions(optimizer=optimizer, learning_rate=0.3)).processes[-1].argv
    assert words[words.index("--learning-rate") + 1] == "0.3"


def test_how_steps_follow_each_other(state_dir: Path) -> None:
    found, job = inventory(state_dir), make_job(state_dir)
    options = LaunchOptions(workers=2, workqueue=True, staleness=3, pipeline=False, micro_batch=4)
    options = replace(options, on_worker_lost="continue")
    jobspec.check(found, jobspec.request(found, options))
    spec = planned(found, job, options)
    for rank, worker in enumerate(spec.processes[-2:]):
        flags = dict(zip(worker.argv, worker.argv[1:], strict=False))
        assert (flags["--staleness"], flags["--micro-batch"], flags["--rank"]) == ("3", "4", str(rank))
        assert flags["--on-worker-lost"] == "continue"
        assert {"--workqueue", "--no-pipeline"} <= set(worker.argv)
    again = Request.from_job(spec)  # as `resume` has it
    assert (again.training.workqueue, again.training.staleness) == (True, 3)
    words = planned(found, job, LaunchOptions(workqueue=False)).processes[-1].argv
    assert not {"--staleness", "--workqueue", "--pipeline", "--no-pipeline", "--on-worker-lost"} & set(words)


def test_workers_of_several_hosts_share_a_queue(state_dir: Path) -> None:
    path = state_dir.parent / "two.yml"
    hosts = "".join(
        f"    {name}: {{ansible_host: 192.0.2.{number}, oeprov_kind: cpu}}\n"
        for number, name in enumerate(("a", "b"), 1)
    )
    path.write_text(
        "all:\n  vars: {oeprov_cluster: two, training_data: /d.tsv, training_workqueue: true}\n"
        "  children:\n    parameter_servers: {hosts: {a: }}\n    workers: {hosts: {a: , b: }}\n"
        "  hosts:\n" + hosts
    )
    found = load(path, state_dir=state_dir)
    jobspec.check(found, jobspec.request(found, LaunchOptions()))
    spec = planned(found, make_job(state_dir), LaunchOptions())
    workers = [item for item in spec.processes if "--rank" in item.argv]
    assert [item.host for item in workers] == ["a", "b"]
    assert all("--workqueue" in item.argv for item in workers)


@pytest.mark.parametrize(
    ("host", "setting", "wanted"),
    [
        ("127.0.0.1", "auto", "off"),
        ("'::1'", "auto", "off"),
        ("0.0.0.0", "auto", "on"),  # noqa: S104
        ("192.0.2.1", "auto", "on"),
        ("0.0.0.0", "off", "off"),  # noqa: S104 - YAML reads it as false
        ("127.0.0.1", "on", "on"),
    ],
)
def test_a_whole_job_encrypts_or_none_of_it(state_dir: Path, host: str, setting: str, wanted: str) -> None:
    found = inventory(state_dir, f"parameter_server_host: {host}\n      training_tls: {setting}")
    spec = planned(found, make_job(state_dir), LaunchOptions(servers=2))
    for item in spec.processes:
        assert dict(zip(item.argv, item.argv[1:], strict=False))["--tls"] == wanted


def three_hosts(state_dir: Path) -> tuple[Inventory, store.Job, Placement]:
    """Two hosts with servers and one with the worker, and a job there."""
    path = state_dir.parent / "three.yml"
    path.write_text(
        "all:\n  vars: {oeprov_cluster: three, training_data: /d.tsv, parameter_server_storage: dram}\n"
        "  children:\n    parameter_servers: {hosts: {a: , b: }}\n    workers: {hosts: {w: }}\n  hosts:\n"
        + "".join(
            f"    {name}: {{ansible_host: 192.0.2.{number}, oeprov_kind: cpu}}\n"
            for number, name in enumerate("abw", 1)
        )
    )
    found = load(path, state_dir=state_dir)
    job = store.create(state_dir, "mine", datetime(2026, 11, 21, 12, 15))
    wanted = jobspec.request(found, LaunchOptions())
    placed = placement.place(job, found, {}, wanted)
    job.write_spec(jobspec.build(job, found, placed, wanted, datetime(2026, 11, 21)))
    return found, job, placed


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ({"a": TAKEN}, {"b"}),  # `w` was not asked
        ({"a": TAKEN, "b": TAKEN, "w": TAKEN}, set()),
        ({"w": TAKEN}, {"a", "b"}),
        ({"a": TAKEN, "b": "unreachable"}, {"b"}),
    ],
)
def test_a_job_whose_id_is_anothers_leaves_that_one_alone(
    state_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    told: dict[str, str],
    asked: set[str],
) -> None:
    """Two controllers launch jobs of one name in one second; ``told``: what hosts answer to the start."""
    found, job, placed = three_hosts(state_dir)

    def run(host: Host, errand: str, args: dict[str, Any], longest: int, *_: object) -> dict[str, Any]:
        if errand == "observe":
            return {"events": ""}
        assert (errand, args["token"]) == ("start", job.token_file.read_text().strip())
        # It ends earlier units (TimeoutStopSec=120), waits for the new ones and ends those that fail, and may
        # wait for another start that does so.
        assert longest >= 2 * (120 + 2 * args["seconds"] + 120)
        if words := told.get(host.name, ""):
            raise HostError(host.name, words)
        listens = {"host": "0.0.0.0", "port": 7000, "pid": 1, "started": 1}  # noqa: S104
        return {"servers": [{**listens, "name": item["name"]} for item in args["units"]], "boot": "b"}

    reached: set[str] = set()

    def on_all(hosts: dict[str, object], what: str, *_: object) -> dict[str, object]:
        reached.update(hosts)
        lost = [name for name in hosts if what == "stop" and told.get(name) == "unreachable"]
        return {
            name: HostError(name, "it does not answer") if name in lost else {"stopped": {}, "rows": {}}
            for name in hosts
        }

    monkeypatch.setattr("provision.hosts.errands.run", run)
    monkeypatch.setattr("provision.hosts.errands.on_all", on_all)
    with pytest.raises(TrainingError, match="belongs to another job"):
        launching.Launch(found, LaunchOptions(), state_dir, JobTerminal()).prepare(job, placed)
    assert reached == asked
    assert job.directory.exists() == ("unreachable" in told.values())
    if not job.directory.exists():
        return
    with pytest.raises(TrainingError, match="has never begun: host a has another job of this id"):
        launching.launch(found, LaunchOptions(resume=job.id), state_dir=state_dir, screen=JobTerminal())
    told["b"] = ""
    job.write_state(job.state().model_copy(update={"supervisor_pid": 0}))  # the launch has ended
    flag = ["--state-dir", str(state_dir)]
    assert main.run(["stop", job.id, *flag]) == 0
    capsys.readouterr()
    assert main.run(["jobs", "rm", job.id, "--yes", *flag]) == 0
    assert "on host a" not in capsys.readouterr().out
    assert reached == asked
    assert not job.directory.exists()


LISTENS = {"host": "192.0.2.2", "port": 7000, "pid": 1, "started": 1}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"ok": {"servers": [], "boot": "b"}}', "where its servers listen: expected server-1, found none"),
        (json.dumps({"ok": {"servers": [{**LISTENS, "name": "x"}], "boot": "b"}}), "server-1, found x"),
        ('{"ok": {"servers": [{"name": "server-1"}], "boot": "b"}}', "cannot be read: KeyError('host')"),
        (json.dumps({"ok": {"servers": [{**LISTENS, "name": "server-1"}]}}), "be read: KeyError('boot')"),
        ('{"ok": ', "sent an answer that cannot be read: Expecting value"),
        ("5", "cannot be read: int instead of an object"),
        ("{}", "cannot be read: it has neither `ok` nor `error`"),
    ],
)
def test_a_host_that_does_not_tell_where_its_servers_listen_is_named_and_the_launch_undone(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, answer: str, words: str
) -> None:
    """Else workers would begin without the address of a server."""
    found, job, placed = three_hosts(state_dir)
    fine = json.dumps({"ok": {"servers": [{**LISTENS, "name": "server-0"}], "boot": "b"}})
    stopped: set[str] = set()

    def run(host: Host, *_: object, **__: object) -> tuple[int, str, str]:
        return 0, f"hello\n{MARKER}{fine if host.name == 'a' else answer}\n", ""

    def on_all(hosts: dict[str, object], *_: object) -> dict[str, object]:
        stopped.update(hosts)
        return {name: {"stopped": {}, "rows": {}} for name in hosts}

    monkeypatch.setattr("provision.hosts.remote.run", run)
    monkeypatch.setattr("provision.hosts.errands.on_all", on_all)
    with pytest.raises(TrainingError) as caught:
        launching.Launch(found, LaunchOptions(), state_dir, JobTerminal()).prepare(job, placed)
    assert str(caught.value).startswith("the hosts could not be prepared: host b: ")
    assert words in str(caught.value)
    assert stopped == {"a", "b", "w"}
    assert not job.directory.exists()


@pytest.mark.parametrize("how", ["refused here", "stopped"])
def test_a_launch_that_never_began_stops_nothing_of_another_job(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Refused here, it asks no host; after Ctrl-C a host may say only to the stop whose job it has."""
    found, job, placed = three_hosts(state_dir)
    launch = launching.Launch(found, LaunchOptions(), state_dir, JobTerminal())
    tokens: list[str] = []

    def run(host: Host, errand: str, *_: object) -> dict[str, Any]:
        launch.stop_request.ask()
        raise HostError(host.name, "was not waited for: a stop request")

    def on_all(hosts: dict[str, object], _: str, args: dict[str, Any], *more: object) -> dict[str, object]:
        tokens.extend(args["token"] for _ in hosts)
        return {name: HostError(name, TAKEN) for name in hosts}

    monkeypatch.setattr("provision.hosts.errands.run", run)
    monkeypatch.setattr("provision.hosts.errands.on_all", on_all)
    token = job.token()
    if how == "refused here":
        monkeypatch.setattr(placement, "unwritable", lambda *_: [HostError("w", "/d is no directory")])
    with pytest.raises(TrainingError) as caught:
        launch.prepare(job, placed)
    if how == "refused here":
        assert str(caught.value) == "the hosts could not be prepared: host w: /d is no directory"
        assert tokens == []
    else:
        assert str(caught.value) == "stopped before training began; nothing was started"
        assert set(tokens) == {token}
    assert not job.directory.exists()


@pytest.mark.parametrize("here", [True, False])
def test_nothing_starts_on_rows_that_could_not_be_removed(
    state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, here: bool
) -> None:
    """The new servers would recover them; ``here``: they are on this machine."""
    found, job, _ = three_hosts(state_dir)
    spec = job.spec()
    processes = []
    for item in spec.processes:
        if item.role == "parameter_server":
            place = str(state_dir / "pmem0" / job.id / item.name)
            item = item.model_copy(update={"pools": place, "unit": "" if here else item.unit})
        processes.append(item)
    spec = spec.model_copy(update={"processes": processes})
    job.write_spec(spec)
    job.write_state(JobState(phase="interrupted"))
    lost = {"b"}

    def on_all(hosts: dict[str, object], what: str, *_: object) -> dict[str, object]:
        return {name: HostError(name, "no answer in 180 s") if name in lost else {} for name in hosts}

    monkeypatch.setattr("provision.hosts.errands.on_all", on_all)
    monkeypatch.setattr("provision.hosts.errands.run", lambda *_, **__: {"events": ""})
    monkeypatch.setattr(launching.Launch, "_check", lambda *_: {})
    launch = launching.Launch(found, LaunchOptions(resume=job.id, consent=[job.id]), state_dir, JobTerminal())
    words = f"^b: no answer in 180 s; rows of former servers stay there, and nothing was started; .* {place}$"
    if here:
        words = "server-0, with rows of former servers, could not be removed, and nothing was started; check"
        (state_dir / "pmem0" / job.id / "server-0").mkdir(parents=True)
        (state_dir / "pmem0" / job.id / "server-0" / "oe-1-super.pool").touch()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            with pytest.raises(TrainingError, match=words):
                launch._resumed()
        assert job.spec() == spec
    lost.clear()
    assert "were removed" not in capsys.readouterr().out
    launch._resumed()
    assert f"job {job.id}: its rows in persistent memory were removed" in capsys.readouterr().out
    assert job.spec() != spec


def refuse_storage(*_: object) -> None:
    raise TrainingError("job other is running with the same storage directory")


@pytest.mark.process
@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("consent", [False, True])
def test_launch_stop_and_resume(
    state_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    consent: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    venv = make_environment(tmp_path / "venv", worker="waits")
    found = inventory(state_dir, f"runtime_venv: {venv}\n      parameter_server_count: 2")
    assert launching.launch(found, LaunchOptions(detach=True), state_dir=state_dir, screen=JobTerminal()) == 0
    (job,) = store.all_jobs(state_dir)
    shown = capsys.readouterr().out
    assert f"job {job.id} runs in the background" in shown
    assert "checkpoints: every 1000 steps or 10 minutes, whichever comes first (--checkpoint-st" in shown
    until(job.run_dir / "waiting")
    with pytest.raises(TrainingError, match=f"job {job.id} is running; stop it first"):
        launching.launch(found, LaunchOptions(resume=job.id), state_dir=state_dir, screen=JobTerminal())
    assert (
        stopping.stop(
            registry.find_running(state_dir, None), state_dir=state_dir, screen=JobTerminal(as_json=True)
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["state"], report["checkpoint_step"]) == ("interrupted", 3)
    assert report["message"] == "stopped at step 3, which is saved"
    assert_nothing_left(job)

    command = ending.resume_command(job, state_dir)
    assert command == f"oeprov resume {job.id} --state-dir {state_dir}"
    manifest = job.run_dir / "checkpoints" / "step-0000000003" / "manifest.json"
    files = manifest.read_text()
    for path in manifest.parent.parent.glob("step-*/manifest.json"):
        path.write_text(json.dumps({"pool": {"servers": 1}}))
    with pytest.raises(TrainingError, match="are in the pools of 1 server, which 3 cannot open"):
        launching.launch(
            found, LaunchOptions(resume="", servers=3), state_dir=state_dir, screen=JobTerminal()
        )
    if consent:
        with pytest.raises(TrainingError, match=f"has no checkpoint in files: .* jobs rm {job.id} --consent"):
            launching.launch(
                found, LaunchOptions(resume="", consent=[job.id]), state_dir=state_dir, screen=JobTerminal()
            )
    manifest.write_text(files)
    rows = tmp_path / job.id / "server-0"
    rows.mkdir(parents=True)
    before = job.spec()
    kept = [
        item.model_copy(update={"pools": str(rows)}) if item.name == "server-0" else item
        for item in before.processes
    ]
    job.write_spec(before.model_copy(update={"processes": kept}))
    (rows / "oe-1-super.pool").touch()
    with monkeypatch.context() as patch:
        patch.setattr(store.Job, "has_checkpoint", lambda job: False)
        words = f"has reported no checkpoint, but there are rows in {rows} here, .* add: --consent {job.id}"
        with pytest.raises(TrainingError, match=words):
            launching.launch(
                found, LaunchOptions(resume="", servers=3), state_dir=state_dir, screen=JobTerminal()
            )
    with monkeypatch.context() as patch:
        patch.setattr(jobspec, "check_storage_is_free", refuse_storage)
        with pytest.raises(TrainingError, match="the same storage directory"):
            launching.launch(
                found, LaunchOptions(resume="", servers=3), state_dir=state_dir, screen=JobTerminal()
            )
    assert rows.exists(), "a refused resume removes no rows"
    assert job.spec().processes == kept
    if consent:
        options = LaunchOptions(resume="", consent=[job.id])
        words = f"job {job.id}: its rows in persistent memory were removed"
    else:
        options, words = LaunchOptions(resume="", servers=3), ""
    capsys.readouterr()
    assert launching.launch(found, options, state_dir=state_dir, screen=JobTerminal()) == 0
    assert not rows.exists()
    argvs = [item.argv for item in job.spec().processes if item.role == "parameter_server"]
    count = 2 if consent else 3
    assert [argv[argv.index("--count") + 1] for argv in argvs] == [str(count)] * count
    shown = capsys.readouterr().out
    assert words in shown.replace("\n", " ")
    assert "resumed from step 3" in shown
    assert f"{job.id} is done" in shown
    assert "0.7500" in shown
    assert_nothing_left(job)
    token = job.token_file.read_text().strip()
    for path in state_dir.rglob("*"):
        if path.is_file() and path != job.token_file:
            assert token not in path.read_text(errors="replace"), f"the token is in {path}"
    assert not (state_dir / "ansible").exists(), "a launch leaves no private files"


def ctrl_c_when(condition: Callable[[], object]) -> threading.Thread:
    """Interrupt this process as a terminal does, as soon as that holds."""

    def wait_and_interrupt() -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    return thread


@pytest.mark.process
@pytest.mark.usefixtures("ready")
def test_ctrl_c_is_130_also_when_the_job_is_done(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = inventory(state_dir, f"runtime_venv: {make_environment(tmp_path / 'venv', worker='ends-slowly')}")
    thread = ctrl_c_when(lambda: list(store.jobs_dir(state_dir).glob("*/run/waiting")))
    assert launching.launch(found, LaunchOptions(), state_dir=state_dir, screen=JobTerminal()) == 130
    thread.join()
    (job,) = store.all_jobs(state_dir)
    assert job.state().phase == "done"
    assert f"{job.id} is done" in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.usefixtures("ready")
def test_ctrl_c_before_the_supervisor_in_the_background_says_anything(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = inventory(state_dir, f"runtime_venv: {make_environment(tmp_path / 'venv', worker='waits')}")
    start = launching.start_detached

    def start_and_interrupt(*words: Any) -> int:
        pid = start(*words)
        os.kill(os.getpid(), signal.SIGINT)
        return pid

    monkeypatch.setattr(launching, "start_detached", start_and_interrupt)
    options = LaunchOptions(detach=True)
    assert launching.launch(found, options, state_dir=state_dir, screen=JobTerminal()) == 130
    (job,) = store.all_jobs(state_dir)
    assert job.state().phase == "interrupted"
    assert_nothing_left(job)


def test_stop_asks_the_supervisor_to_which_a_launch_has_handed_over(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, asked = make_job(state_dir), []
    both = {one.pid: one for one in (subprocess.Popen(["sleep", "600"]) for _ in range(2))}
    launch, background = both

    def supervised_by(pid: int) -> None:
        started = process.start_time(pid)
        job.write_state(JobState(phase="running", supervisor_pid=pid, supervisor_started=started))

    def send(pid: int, _: int) -> None:
        asked.append(pid)
        if pid == launch:
            supervised_by(background)
        both[pid].kill()
        both[pid].wait()

    monkeypatch.setattr(process, "send", send)
    supervised_by(launch)
    assert stopping._ask_supervisor(job)
    assert asked == [launch, background]


@pytest.mark.usefixtures("ready")
def test_ctrl_c_while_an_earlier_run_still_ends(state_dir: Path) -> None:
    found = inventory(state_dir)
    job = make_job(state_dir)
    spec = job.spec()
    settings = jobspec.request(found, LaunchOptions()).settings()
    job.write_spec(spec.model_copy(update={"cluster": found.cluster, "settings": settings}))
    mine = store.ProcessState(
        name="worker-0",
        role="worker",
        host="localhost",
        pid=os.getpid(),
        started=process.start_time(os.getpid()),
    )
    job.write_state(JobState(phase="interrupted", processes=[mine]))
    before = signal.getsignal(signal.SIGINT)
    thread = ctrl_c_when(lambda: signal.getsignal(signal.SIGINT) != before)
    with pytest.raises(Interrupted, match=r"worker-0 of job .* still runs"):
        launching.launch(found, LaunchOptions(resume=job.id), state_dir=state_dir, screen=JobTerminal())
    thread.join()


@pytest.mark.process
@pytest.mark.usefixtures("ready")
def test_a_job_that_is_done_trains_longer(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = make_environment(tmp_path / "venv")
    found = inventory(state_dir, f"runtime_venv: {venv}")
    assert launching.launch(found, LaunchOptions(), state_dir=state_dir, screen=JobTerminal()) == 0
    (job,) = store.all_jobs(state_dir)
    newest = job.run_dir / "checkpoints" / "step-0000000008"  # the stand-in does not write the last one
    newest.mkdir()
    position = {"training": {"position": {"step": 8, "epoch": 1, "batch": 0}}}
    (newest / "manifest.json").write_text(json.dumps(position))
    (job.run_dir / "export").mkdir()

    def resume(**end: int) -> int:
        return launching.launch(
            found, LaunchOptions(resume=job.id, **end), state_dir=state_dir, screen=JobTerminal()
        )

    def end_of(name: str) -> str | None:
        argv = next(item.argv for item in job.spec().processes if item.role == "worker")
        return dict(pairwise(argv)).get(name)

    before = job.metrics_file.read_text()
    done = (
        f"job {job.id} is done: it has trained 1 epoch, 8 steps; to train it longer: oeprov resume {job.id} "
    )
    for given, words in (
        ({}, done),
        ({"epochs": 1}, "--epochs 1: {}; use a number above 1"),
        ({"steps": 8}, "--steps 8: {}; use a number above 8"),
        ({"steps": 7, "epochs": 3}, "--epochs 3 and --steps 7: {}; use a number above 8 for --steps"),
        ({"steps": 0}, "--steps 0: {}; use a number above 8"),
    ):
        words = words.format(f"job {job.id} has trained 1 epoch, 8 steps already")
        with pytest.raises(TrainingError, match=f"^{re.escape(words)}"):
            resume(**given)
    assert job.metrics_file.read_text() == before
    assert (end_of("--epochs"), end_of("--steps")) == (None, None), "the trainer decides"

    capsys.readouterr()
    assert resume(epochs=2) == 0
    shown = capsys.readouterr().out
    assert "resumed from step 8" in shown
    assert f"{job.id} is done" in shown
    assert (end_of("--epochs"), end_of("--steps")) == ("2", None)
    assert job.metrics_file.read_text().startswith(before), "its events go on"
    assert job.state().events_from == len(before), "and those of this run begin there"
    assert (job.run_dir / "export").is_dir(), "it stays until there is another"
    with pytest.raises(TrainingError, match=r"--epochs 2: job .* has trained 2 epochs, 8 steps already"):
        resume(epochs=2)
    assert resume(steps=20) == 0
    assert (end_of("--epochs"), end_of("--steps")) == (None, "20"), "over as many epochs as it takes"
    assert resume(steps=30, epochs=9) == 0
    assert (end_of("--epochs"), end_of("--steps")) == ("9", "30")
    for path in (job.run_dir / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    job.metrics_file.write_text("")
    with pytest.raises(TrainingError, match="has no checkpoint to resume from; start a new job"):
        resume(epochs=99)
    assert job.metrics_file.exists()


@pytest.mark.process
@pytest.mark.usefixtures("ready")
def test_a_resume_to_train_longer_that_was_broken_off_goes_on(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inventory(state_dir, f"runtime_venv: {make_environment(tmp_path / 'venv')}")
    assert launching.launch(found, LaunchOptions(), state_dir=state_dir, screen=JobTerminal()) == 0
    (job,) = store.all_jobs(state_dir)
    size = job.metrics_file.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(placement, "unwritable", lambda *_: os.kill(os.getpid(), signal.SIGINT) or [])
        with pytest.raises(Interrupted, match="before training began"):
            launching.launch(
                found, LaunchOptions(resume=job.id, epochs=2), state_dir=state_dir, screen=JobTerminal()
            )
    assert (job.state().phase, job.is_done()) == ("interrupted", False), "the end was that of the run before"
    assert (
        launching.launch(found, LaunchOptions(resume=job.id), state_dir=state_dir, screen=JobTerminal()) == 0
    )
    assert (job.state().phase, job.state().events_from) == ("done", size)


@pytest.mark.usefixtures("ready")
def test_resume_without_a_name_is_of_the_last_job_on_hosts(state_dir: Path) -> None:
    job = make_job(state_dir)
    job.write_state(JobState(phase="done"))
    later = store.create(state_dir, "on-a-cluster", datetime(2026, 11, 21, 12, 15))
    later.record_file("kubernetes").write_text("{}")
    assert store.find(state_dir, None).id == later.id
    with pytest.raises(TrainingError, match=f"^job {job.id} is done"):
        launching.launch(
            inventory(state_dir), LaunchOptions(resume=""), state_dir=state_dir, screen=JobTerminal()
        )


@pytest.mark.process
@pytest.mark.usefixtures("ready")
def test_launch_whose_hosts_cannot_be_prepared_leaves_no_job(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inventory(state_dir)
    monkeypatch.setattr(jobspec, "check", lambda *_: os.rmdir(state_dir / "pmem0"))
    with pytest.raises(TrainingError, match=r"pmem0 is not a directory that this user can write to$"):
        launching.launch(found, LaunchOptions(), state_dir=state_dir, screen=JobTerminal())
    assert store.all_jobs(state_dir) == []
    assert not list(store.jobs_dir(state_dir).iterdir())


@pytest.mark.usefixtures("ready")
def test_stop_without_a_running_job(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="no job is running"):
        stopping.stop(registry.find_running(state_dir, None), state_dir=state_dir, screen=JobTerminal())
    job = make_job(state_dir)
    job.write_state(JobState(phase="done"))
    assert stopping.stop(job, state_dir=state_dir, screen=JobTerminal()) == 0
    assert f"job {job.id} is not running: it is done" in capsys.readouterr().out


def test_stop_waits_for_processes_whose_launcher_was_killed(state_dir: Path) -> None:
    job = make_job(state_dir)
    item = store.ProcessState(name="worker-0", role="worker", host="localhost", pid=os.getpid(), started=1)
    job.write_state(
        JobState(phase="running", supervisor_pid=os.getpid(), supervisor_started=1, processes=[item])
    )
    thread = threading.Thread(
        target=stopping.stop, args=(job,), kwargs={"state_dir": state_dir, "screen": JobTerminal()}
    )
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "a process with another start time is not one of ours"


def test_options_that_are_not_settings() -> None:
    assert replace(LaunchOptions(dim=4), detach=True, resume="x").given() == {"dim": 4}
