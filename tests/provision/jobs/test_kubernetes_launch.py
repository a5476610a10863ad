"""Jobs on a small API server: what is asked before anything is made, and what is left afterwards."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import Document, FakeCluster, all_jobs
from test_kubernetes_manifests import VARIANTS, inventory_file

from provision.cli import main as cli
from provision.cli.views.training import JobTerminal
from provision.cluster.errors import TrainingError
from provision.hosts.stop_request import StopRequest
from provision.jobs import store
from provision.jobs.backends.kubernetes import follow, record, run
from provision.jobs.backends.kubernetes.api import Api, collection
from provision.jobs.store import Job, jobs_dir

pytest.importorskip("kubernetes")

MADE = [
    "Job",
    "NetworkPolicy",
    "PersistentVolume",
    "PersistentVolume",
    "PersistentVolume",
    "PodDisruptionBudget",
    "Secret",
    "Service",
    "StatefulSet",
]
VOLUMES = ["PersistentVolume"] * 3 + ["PersistentVolumeClaim"] * 3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    monkeypatch.setattr(run, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(follow, "PAUSE_SECONDS", 0.02)
    found = FakeCluster(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig))
    yield found
    found.close()


@pytest.fixture
def oeprov(tmp_path: Path) -> Callable[..., int]:
    def call(*words: str, variables: str = "") -> int:
        more = (
            ["-i", str(inventory_file(tmp_path, variables)), "--on", "kubernetes"]
            if words[0] == "launch-training"
            else []
        )
        end = words.index("--") if "--" in words else len(words)
        return cli.run([*words[:end], *more, "--state-dir", str(tmp_path / "state"), *words[end:]])

    return call


def states(tmp_path: Path) -> list[str]:
    return [record.read(job).phase for job in all_jobs(tmp_path / "state")]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_to_its_end(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.worker = "done"
    assert oeprov("launch-training", "--name", "ctr") == 0
    said = capsys.readouterr().out
    assert "step 40/40  loss 0.52" in said
    assert "checkpoints and export: /shared/oeprov/ctr-" in said
    assert sorted(cluster.posts) == MADE
    assert cluster.kinds() == []
    assert states(tmp_path) == ["done"]
    assert oeprov("resume") == 1
    assert "is done; there is nothing to resume" in capsys.readouterr().err


def test_two_commands_write_the_record_of_a_job_at_once(tmp_path: Path) -> None:
    """As two `oeprov status` do; and a reader meanwhile sees one record or the other."""
    job = Job(tmp_path / "ctr")
    job.directory.mkdir()
    fields = {"id": "ctr", "created": "", "context": "", "namespace": "", "claim": "", "run": ""}
    records = [record.Record(servers=n, workers=n, message="x" * n * 5_000, **fields) for n in (1, 2)]
    record.write(job, records[0])
    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(record.write, job, one) for one in records * 30]
        while not all(one.done() for one in writing):
            assert record.read(job) in records
        for one in writing:
            one.result()
    assert [path.name for path in job.directory.iterdir()] == ["kubernetes.json"]


def test_an_old_cluster_gets_the_budget_that_it_knows(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path
) -> None:
    cluster.objects["/version"] = {"gitVersion": "v1.20.2"}
    assert oeprov("launch-training", "--detach") == 0
    budget = next(path for path in cluster.objects if "/poddisruptionbudgets/" in path)
    assert budget.startswith("/apis/policy/v1beta1/")
    (job,) = all_jobs(tmp_path / "state")
    assert "PodDisruptionBudget" in [item["kind"] for item in record.documents(job)]
    assert oeprov("stop") == 0
    assert cluster.kinds() == VOLUMES


def test_a_job_that_fails_keeps_its_volumes(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.worker = "failed"
    assert oeprov("launch-training", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["state"] == "failed"
    assert "backoff limit" in result["message"]
    assert cluster.kinds() == VOLUMES
    assert oeprov("resume", "--servers", "2") == 1
    assert "has a server for each of 3 local volumes; launch a new one" in capsys.readouterr().err
    cluster.worker = "done"
    assert oeprov("resume") == 0
    assert cluster.kinds() == []
    assert states(tmp_path) == ["done"]


def arguments_of(cluster: FakeCluster, kind: str) -> list[str]:
    """Of the container of the object that was made last."""
    found = [item for item in cluster.objects.values() if item.get("kind") == kind][-1]
    words: list[str] = found["spec"]["template"]["spec"]["containers"][0]["args"]
    return words


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1] if flag in words else ""


def test_a_done_job_is_trained_longer(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.worker = "done"
    assert oeprov("launch-training", "--epochs", "2") == 0
    (job,) = all_jobs(tmp_path / "state")
    capsys.readouterr()
    for epochs in ("1", "2"):
        assert oeprov("resume", "--epochs", epochs) == 1
        said = f"job {job.id} has trained 2 epochs already; use a number above 2"
        assert said in capsys.readouterr().err
    assert cluster.kinds() == []
    assert states(tmp_path) == ["done"]
    cluster.worker = "runs"
    assert oeprov("resume", "--epochs", "5", "--detach") == 0
    assert value(arguments_of(cluster, "Job"), "--epochs") == "5"
    assert oeprov("resume", "--steps", "100") == 1
    assert "is running; stop it first" in capsys.readouterr().err
    assert oeprov("stop") == 0
    assert oeprov("resume", "--steps", "100", "--detach") == 0
    words = arguments_of(cluster, "Job")
    assert (value(words, "--epochs"), value(words, "--steps")) == ("", "100")
    (document,) = [item for item in record.documents(job) if item["kind"] == "Job"]
    assert document["spec"]["template"]["spec"]["containers"][0]["args"] == words


def test_a_job_that_is_done_after_its_steps_is_trained_longer(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a number of epochs, its steps alone were its end."""
    cluster.worker = "done"
    assert oeprov("launch-training", "--steps", "100") == 0
    (job,) = all_jobs(tmp_path / "state")
    capsys.readouterr()
    for steps in ("50", "100"):
        assert oeprov("resume", "--steps", steps) == 1
        said = f"job {job.id} has trained 100 steps already; use a number above 100"
        assert said in capsys.readouterr().err
    assert states(tmp_path) == ["done"]
    assert oeprov("resume", "--steps", "101") == 0


@pytest.mark.parametrize("variables", ["", "kubernetes_workers: 3"])
def test_a_job_resumes_with_other_numbers_of_workers(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, variables: str
) -> None:
    """From one to two, and from three: with the service and the policy that several workers need."""
    assert oeprov("launch-training", "--detach", variables=variables) == 0
    assert oeprov("stop") == 0
    cluster.posts.clear()
    assert oeprov("resume", "--workers", "2", "--detach") == 0
    assert [cluster.posts.count(kind) for kind in ("Service", "NetworkPolicy")] == [2, 2]
    assert len(value(arguments_of(cluster, "Job"), "--workers").split(",")) == 2
    (job,) = all_jobs(tmp_path / "state")
    assert record.read(job).workers == 2
    assert oeprov("stop") == 0
    assert cluster.kinds() == VOLUMES
    cluster.posts.clear()
    assert oeprov("resume", "--workers", "1", "--detach") == 0
    assert [cluster.posts.count(kind) for kind in ("Service", "NetworkPolicy")] == [1, 1]
    assert "--workers" not in arguments_of(cluster, "Job")
    assert oeprov("stop") == 0


def test_a_job_resumes_with_other_numbers_of_servers(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its rows are in files: in DRAM, or when it is done. The number is per host, as at the launch."""
    dram = "parameter_server_storage: dram"
    assert oeprov("launch-training", "--detach", "--servers", "1", variables=dram) == 0
    assert value(arguments_of(cluster, "StatefulSet"), "--count") == "2"
    assert oeprov("stop") == 0
    for number in ("1", "2"):
        servers = 2 * int(number)
        assert oeprov("resume", "--servers", number, "--detach") == 0
        assert value(arguments_of(cluster, "StatefulSet"), "--count") == str(servers)
        assert len(value(arguments_of(cluster, "Job"), "--servers").split(",")) == servers
        assert len([name for name in cluster.pods if "-server-" in name]) == servers
        assert oeprov("stop") == 0
    assert cluster.kinds() == []

    whole = f"{dram}, kubernetes_servers: 5"  # of the job, and so is --servers
    assert oeprov("launch-training", "--detach", variables=whole) == 0
    assert oeprov("stop") == 0
    assert oeprov("resume", all_jobs(tmp_path / "state")[-1].id, "--servers", "4", "--detach") == 0
    assert value(arguments_of(cluster, "StatefulSet"), "--count") == "4"
    assert oeprov("stop", all_jobs(tmp_path / "state")[-1].id) == 0

    variables = "kubernetes_storage_class: pmem, kubernetes_storage_size: 10G"
    assert oeprov("launch-training", "--detach", variables=variables) == 0
    job = all_jobs(tmp_path / "state")[-1]
    assert oeprov("stop") == 0
    capsys.readouterr()
    assert oeprov("resume", job.id, "--servers", "2") == 1
    said = capsys.readouterr().err
    assert f"job {job.id}: the volumes of 3 servers may have its rows, which 4 servers cannot open" in said
    assert "resume it without --servers, or to lose these rows: kubectl delete pvc -n ads -l " in said
    cluster.worker = "done"
    assert oeprov("resume", job.id, "--workers", "2") == 0
    cluster.worker = "runs"
    assert oeprov("resume", job.id, "--servers", "1", "--epochs", "9", "--detach") == 0
    assert value(arguments_of(cluster, "StatefulSet"), "--count") == "2"


def test_a_done_job_that_could_not_be_made_again_is_as_before(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its record says no number of servers that it never had, and another one may follow."""
    monkeypatch.setattr("provision.jobs.backends.kubernetes.checks.rehearse", lambda *_: None)
    cluster.worker = "done"
    variables = "kubernetes_storage_class: pmem, kubernetes_storage_size: 10G"
    assert oeprov("launch-training", "--epochs", "2", variables=variables) == 0
    (job,) = all_jobs(tmp_path / "state")
    before, manifests = record.read(job), (job.directory / record.MANIFESTS).read_text()
    cluster.refused["Job"] = (403, "exceeded quota")
    assert oeprov("resume", "--servers", "50", "--workers", "2", "--epochs", "9") == 1
    assert "could not be made: exceeded quota" in capsys.readouterr().err
    assert cluster.kinds() == []
    after = record.read(job)
    assert "what had been made was deleted" in after.message
    assert after.model_copy(update={"message": before.message}) == before
    assert (job.directory / record.MANIFESTS).read_text() == manifests
    assert oeprov("resume", "--epochs", "2") == 1
    assert f"job {job.id} has trained 2 epochs already" in capsys.readouterr().err
    cluster.refused.clear()
    assert oeprov("resume", "--servers", "2", "--epochs", "9") == 0


def test_a_job_without_volumes_resumes_with_other_numbers_of_servers(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path
) -> None:
    """Whatever its phase: rows that were lost on purpose are in no volume."""
    variables = "kubernetes_storage_class: pmem, kubernetes_storage_size: 10G"
    assert oeprov("launch-training", "--detach", variables=variables) == 0
    assert oeprov("stop") == 0
    assert oeprov("resume", "--servers", "2", "--detach") == 1
    for path in [path for path, item in cluster.objects.items() if item.get("kind") == VOLUMES[-1]]:
        del cluster.objects[path]
    assert oeprov("resume", "--servers", "2", "--detach") == 0
    (job,) = all_jobs(tmp_path / "state")
    assert record.read(job).servers == 4


def test_a_running_job_goes_on_with_other_servers(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who follows it goes on following; objects that the cluster would refuse leave it as it was."""
    cluster.errors = ["training paused 4.2 s, from the end of step 40 to that of the next one"]
    assert oeprov("launch-training", "--detach", variables=VARIANTS["dram"]) == 0
    (job,) = all_jobs(tmp_path / "state")
    before = record.read(job)
    scale = ("scale", "--yes", "--servers")
    assert oeprov(*scale, str(before.servers)) == 1
    assert f"runs on {before.servers} servers already; nothing was changed" in capsys.readouterr().err

    def refuse(*_: object) -> None:
        raise TrainingError("the cluster would refuse StatefulSet")

    with monkeypatch.context() as patch:
        patch.setattr(run.checks, "rehearse", refuse)
        assert oeprov(*scale, "4") == 1
    assert "refuse StatefulSet; job" in (said := capsys.readouterr().err)
    assert "goes on with its servers as before" in said
    assert (record.read(job).phase, record.read(job).servers) == ("running", before.servers)

    make = run._Run._make

    def slowly(*arguments: Any, **options: Any) -> None:
        time.sleep(0.5)  # in which who follows the job must not take its objects for deleted ones
        make(*arguments, **options)

    stop = StopRequest()
    watcher = run._Run(Api(before.context), job, JobTerminal(), tmp_path / "state", stop)
    thread = threading.Thread(target=watcher._watch)
    thread.start()
    capsys.readouterr()
    monkeypatch.setattr(run._Run, "_make", slowly)
    assert oeprov(*scale, "4") == 0
    assert f"{job.id}: {before.servers} → 4 servers; training paused 4.2 s" in capsys.readouterr().out
    now = record.read(job)
    assert (now.phase, now.servers, now.scales) == ("running", 4, 2)
    sets = [item for item in cluster.objects.values() if item.get("kind") == "StatefulSet"]
    assert [item["spec"]["replicas"] for item in sets] == [4]
    until(lambda: watcher.record.servers == 4)
    assert thread.is_alive()
    stop.ask()  # as Ctrl-C where it is followed
    thread.join()
    assert states(tmp_path) == ["interrupted"]
    assert oeprov(*scale, "3") == 1
    assert "is not running: it is interrupted" in capsys.readouterr().err


def test_a_job_with_rows_in_volumes_is_not_scaled(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    assert oeprov("scale", "--servers", "2", "--yes") == 1
    assert "has a server for each of 3 local volumes, and no more or fewer" in capsys.readouterr().err
    assert states(tmp_path) == ["running"]
    (job,) = all_jobs(tmp_path / "state")
    dead = {"phase": "scaling", "message": "3 → 2 servers", "scaler": (os.getpid(), 1)}
    record.write(job, record.read(job).model_copy(update=dead))
    assert record.read(job).phase == "interrupted"
    assert "`oeprov scale` was killed (3 → 2 servers)" in record.read(job).message


def test_a_job_resumes_with_its_manifests_as_they_were_changed_by_hand(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def grace() -> int:
        found = [item for item in cluster.objects.values() if item.get("kind") == "StatefulSet"][-1]
        seconds: int = found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return seconds

    assert oeprov("launch-training", "--detach") == 0
    assert oeprov("stop") == 0
    (job,) = all_jobs(tmp_path / "state")
    file = job.directory / record.MANIFESTS
    text = file.read_text().replace("PeriodSeconds: 120", "PeriodSeconds: 777  # slow disks")
    file.write_text(text)
    capsys.readouterr()
    assert oeprov("resume", "--detach") == 0
    assert grace() == 777
    assert file.read_text() == text
    assert "changes made in it by hand" not in capsys.readouterr().out
    assert oeprov("stop") == 0
    assert oeprov("resume", "--workers", "2", "--detach") == 0
    assert grace() == 120
    assert "is written anew, without changes made in it by hand" in capsys.readouterr().out
    assert oeprov("stop") == 0


def test_a_job_of_an_earlier_version_resumes_as_it_was(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    assert oeprov("stop") == 0
    (job,) = all_jobs(tmp_path / "state")
    kept = json.loads(job.record_file("kubernetes").read_text())
    del kept["plan"]
    job.record_file("kubernetes").write_text(json.dumps(kept))
    assert oeprov("resume", "--workers", "2", "--steps", "9") == 1
    assert f"--workers, --steps: job {job.id} was launched by an earlier version" in capsys.readouterr().err
    cluster.worker = "done"
    assert oeprov("resume") == 0
    assert states(tmp_path) == ["done"]


def test_status_logs_and_stop(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    (job,) = all_jobs(tmp_path / "state")
    token = job.token_file.read_text().strip()
    for file in job.directory.iterdir():
        if file.is_file() and file != job.token_file:
            assert token not in file.read_text()
    capsys.readouterr()
    assert oeprov("status", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (found["job"], found["state"], found["progress"]) == (job.id, "running", "step 40/40  loss 0.52")
    assert [(pod["role"], pod["ready"]) for pod in found["pods"]] == [("server", True)] * 3 + [
        ("worker", False)
    ]
    assert oeprov("status") == 0
    assert "step 40/40" in capsys.readouterr().out
    assert oeprov("logs", "--process", "worker-0", "-n", "1") == 0
    assert capsys.readouterr().out == "step 40/40  loss 0.52\n"
    assert oeprov("logs", "--process", "worker-7") == 1
    assert "has no pod 'worker-7'; there are: " in capsys.readouterr().err
    assert oeprov("resume") == 1
    assert "is running; stop it first" in capsys.readouterr().err
    assert oeprov("stop") == 0
    assert "stopped (SIGTERM) after step 40" in capsys.readouterr().out
    assert cluster.kinds() == VOLUMES
    assert states(tmp_path) == ["interrupted"]
    assert oeprov("stop") == 0  # twice does no harm
    assert oeprov("logs") == 1
    assert "has no pods any more" in capsys.readouterr().err
    cluster.worker = "done"
    assert oeprov("resume", job.id) == 0
    assert states(tmp_path) == ["done"]


def test_logs_do_not_garble_the_terminal(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    (name,) = [name for name in cluster.pods if "-worker-" in name]
    cluster.logs[name] = ["a\x1b]0;title\x07b \x1b[1m8/8\x1b[0m"]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert oeprov("logs", "--process", "worker-0") == 0
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffdb \x1b[1m8/8\x1b[0m\n"


def test_what_could_not_be_deleted_is_not_said_to_be_gone(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    (job,) = all_jobs(tmp_path / "state")
    cluster.denied = {("delete", "services")}
    assert oeprov("stop") == 1
    said = capsys.readouterr().out
    assert f"service/{job.id}-servers could not be deleted: services is forbidden" in said
    assert f"try again with: oeprov stop {job.id}" in said
    assert "is left on the cluster" not in said
    cluster.denied = set()
    assert oeprov("stop") == 0
    assert cluster.kinds() == VOLUMES


def test_progress_is_that_of_the_worker_that_runs(
    cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert oeprov("launch-training", "--detach") == 0
    (name,) = [name for name in cluster.pods if "-worker-" in name]
    lost = name.replace("x7k2p", "a1b2c")
    cluster.pods[lost] = {
        **cluster.pods[name],
        "metadata": {**cluster.pods[name]["metadata"], "name": lost},
        "status": {"phase": "Failed"},
    }
    cluster.logs[lost] = ["step 7/40  loss 0.9"]
    capsys.readouterr()
    assert oeprov("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["progress"] == "step 40/40  loss 0.52"


def test_the_last_job_is_the_youngest_and_not_the_one_that_ended_last(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path
) -> None:
    assert oeprov("launch-training", "--name", "old", "--detach") == 0
    assert oeprov("launch-training", "--name", "young", "--detach") == 0
    names = [job.id for job in all_jobs(tmp_path / "state")]
    assert names[0].startswith("old-")
    assert oeprov("stop", names[0]) == 0
    assert [job.id for job in all_jobs(tmp_path / "state")] == names
    assert store.find(tmp_path / "state", None).id == names[1]


def test_ctrl_c_while_the_job_is_scaled_stops_it_afterwards(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the launcher, while another command makes its objects: none may be left."""
    cluster.errors = ["training paused 4.2 s, from the end of step 40 to that of the next one"]
    assert oeprov("launch-training", "--detach", variables=VARIANTS["dram"]) == 0
    (job,) = all_jobs(tmp_path / "state")
    make, making = run._Run._make, threading.Event()

    def slowly(*arguments: Any, **options: Any) -> None:
        making.set()
        time.sleep(0.3)
        make(*arguments, **options)

    class Pressed(StopRequest):
        def wait(self, seconds: float) -> bool:
            assert making.wait(20)
            self.ask()
            return True

    monkeypatch.setattr(run._Run, "_make", slowly)
    watcher = run._Run(Api(record.read(job).context), job, JobTerminal(), tmp_path / "state", Pressed())
    thread = threading.Thread(target=watcher._watch)
    thread.start()
    assert oeprov("scale", "--yes", "--servers", "4") == 0
    thread.join(20)
    assert not thread.is_alive()
    assert cluster.kinds() == []
    assert states(tmp_path) == ["interrupted"]


def test_ctrl_c_stops_it(cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path) -> None:
    def interrupt() -> None:
        until(lambda: "Job" in cluster.posts)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert oeprov("launch-training") == 130
    thread.join()
    assert cluster.kinds() == VOLUMES
    assert states(tmp_path) == ["interrupted"]


def test_an_image_that_is_missing(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "HOPELESS_SECONDS", 0)
    cluster.images = False
    assert oeprov("launch-training") == 1
    assert (
        'ImagePullBackOff: Back-off pulling image "registry.example/oeprov-server:0.1.0"'
        in capsys.readouterr().out
    )
    assert cluster.kinds() == []
    assert states(tmp_path) == ["failed"]


def test_what_could_not_be_made_is_taken_back(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("provision.jobs.backends.kubernetes.checks.rehearse", lambda *_: None)
    cluster.refused["Job"] = (500, "etcdserver: request timed out")
    assert oeprov("launch-training") == 1
    assert "job/deepfm-" in (said := capsys.readouterr().err)
    assert "could not be made: etcdserver: request timed out" in said
    assert cluster.kinds() == []
    assert states(tmp_path) == ["failed"]


def test_a_resume_that_fails_keeps_the_rows(
    cluster: FakeCluster,
    oeprov: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "HOPELESS_SECONDS", 0)
    cluster.worker = "failed"
    cluster.errors = ["error: table C1: dim is 9 here and 16 in the checkpoint"]
    assert oeprov("launch-training") == 1
    assert "dim is 9 here and 16 in the checkpoint" in capsys.readouterr().out
    assert cluster.kinds() == VOLUMES
    cluster.images = False
    assert oeprov("resume") == 1
    assert cluster.kinds() == VOLUMES
    cluster.refused["Job"] = (500, "etcdserver: request timed out")
    assert oeprov("resume") == 1
    assert cluster.kinds() == VOLUMES
    assert states(tmp_path) == ["failed"]


def test_a_busy_api_is_asked_again(
    cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def finish() -> None:
        until(lambda: "Job" in cluster.posts)
        cluster.busy = 50
        until(lambda: not cluster.busy)
        with cluster.lock:
            job = next(item for item in cluster.objects.values() if item.get("kind") == "Job")
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            cluster.worker = "done"

    thread = threading.Thread(target=finish)
    thread.start()
    assert oeprov("launch-training") == 0
    thread.join()
    assert "apiserver is shutting down; trying again" in capsys.readouterr().out


class TestBeforeAnythingIsMade:
    @pytest.fixture(autouse=True)
    def _nothing(self, cluster: FakeCluster, tmp_path: Path) -> Iterator[None]:
        yield
        assert cluster.posts == []
        directory = jobs_dir(tmp_path / "state")
        assert not directory.exists() or list(directory.iterdir()) == []

    def refused(
        self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str], words: str, variables: str = ""
    ) -> None:
        assert oeprov("launch-training", variables=variables) == 1
        assert words in capsys.readouterr().err

    def test_missing_rights_are_listed_before_anything_is_made(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.denied = {("create", "statefulsets"), ("delete", "statefulsets"), ("get", "pods")}
        words = "to create/delete statefulsets.apps, get pods, get pods/log; nothing was made"
        self.refused(oeprov, capsys, words)

    def test_volumes_are_the_clusters(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.denied = {("create", "persistentvolumes")}
        self.refused(oeprov, capsys, "create persistentvolumes; nothing was made: let an administrator")

    def test_no_such_namespace(self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        words = "the cluster has no namespace other; make it with: kubectl create namespace other"
        self.refused(oeprov, capsys, words, "kubernetes_namespace: other")

    def test_no_claim(self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(oeprov, capsys, "namespace ads has no claim fast", "kubernetes_claim: fast")

    def test_claim_of_one_node(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.objects[cluster.claim_path]["spec"]["accessModes"] = ["ReadWriteOnce"]
        self.refused(oeprov, capsys, "claim deeprec has access mode ReadWriteOnce")

    @pytest.mark.parametrize("kind", ["persistentvolumeclaim", "persistentvolume"])
    def test_volumes_of_an_earlier_job_of_this_name(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str], kind: str
    ) -> None:
        class Left(dict[str, Document]):
            def get(self, key: str, default: Any = None) -> Any:
                return {} if f"/{kind}s/" in key and "deepfm" in key else super().get(key, default)

        cluster.objects = Left(cluster.objects)
        self.refused(oeprov, capsys, "is there already, with the rows of an earlier job of this name; launch")
        assert cluster.posts == []

    def test_no_pull_secret(self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(
            oeprov, capsys, "namespace ads has no secret registry", "kubernetes_pull_secret: registry"
        )

    def test_no_operator(self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        words = "the cluster has no TFJob (kubeflow.org/v1); install Kubeflow's training operator"
        self.refused(oeprov, capsys, words, "kubernetes_form: tfjob")

    @pytest.mark.parametrize(
        ("version", "words"),
        [
            (
                "v1.20.2",
                "several workers are an Indexed Job, and the cluster is Kubernetes v1.20.2, before 1.22",
            ),
            ("v1.19.4-aliyun.1", "the cluster is Kubernetes v1.19.4-aliyun.1; jobs need 1.20 or later"),
        ],
    )
    def test_an_old_cluster(
        self,
        cluster: FakeCluster,
        oeprov: Callable[..., int],
        capsys: pytest.CaptureFixture[str],
        version: str,
        words: str,
    ) -> None:
        cluster.objects["/version"] = {"gitVersion": version}
        self.refused(oeprov, capsys, words, "kubernetes_workers: 2")

    def test_a_refused_object_is_reported_and_nothing_is_kept(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.refused["StatefulSet"] = (403, "exceeded quota: compute")
        self.refused(oeprov, capsys, "-server: exceeded quota: compute; nothing was made")

    def test_a_refused_login_is_reported(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cluster.kubeconfig.write_text(cluster.kubeconfig.read_text().replace('"abc"', '"old"'))
        self.refused(oeprov, capsys, "refused your credentials: Unauthorized")

    def test_an_unreachable_api_server_is_reported(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = str(closed.getsockname()[1])
            text = cluster.kubeconfig.read_text().replace(str(cluster.server.server_address[1]), port)
            cluster.kubeconfig.write_text(text)
            self.refused(oeprov, capsys, f"the Kubernetes API at http://127.0.0.1:{port} cannot be reached: ")

    def test_no_kubeconfig(
        self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KUBECONFIG", "/nonexistent")
        self.refused(oeprov, capsys, "no usable kubeconfig file (KUBECONFIG)")

    @pytest.mark.parametrize("text", ["a: [", "[]"])
    def test_a_kubeconfig_that_is_none(
        self, cluster: FakeCluster, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        cluster.kubeconfig.write_text(text)
        self.refused(oeprov, capsys, "the kubeconfig file (KUBECONFIG) cannot be read: ")

    def test_no_such_context(self, oeprov: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(oeprov, capsys, "kubernetes_context is production", "kubernetes_context: production")


def test_an_unknown_target_of_on_is_refused(
    oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["launch-training", "-i", str(inventory_file(tmp_path)), "--on", "moon"]) == 1
    assert "--on: found 'moon'; allowed: hosts, kubernetes, docker, podman" in capsys.readouterr().err


DRAM = "parameter_server_storage: dram"


def served_job(oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """A running job whose model can be served."""
    assert oeprov("launch-training", "--name", "ctr", "--detach", variables=DRAM) == 0
    capsys.readouterr()
    return all_jobs(tmp_path / "state")[-1]


def test_replicas_are_made_changed_observed_and_stopped(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = served_job(oeprov, tmp_path, capsys)
    cluster.posts.clear()
    assert oeprov("serve", "--replicas", "2", "--port", "80", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    stamp = source.id.removeprefix("ctr")
    assert (made["job"], made["state"]) == (f"ctr-serving{stamp}", "running")
    assert made["progress"] == "2 of 2 replicas are ready"
    assert made["urls"] == [f"http://ctr-serving{stamp}.ads.svc:80/v1/models/{source.id}"]
    assert cluster.posts == ["Service", "Deployment"]
    first = {pod["name"] for pod in made["pods"]}
    assert len(first) == 2

    # The same again changes nothing; another number keeps pods, another flag replaces them.
    serve = ("serve", source.id, "--port", "80")
    assert oeprov(*serve, "--replicas", "2") == 0
    assert "nothing of it changes" in capsys.readouterr().out
    assert oeprov(*serve, "--replicas", "3") == 1
    assert "no terminal to ask at: add --yes; nothing was changed" in capsys.readouterr().err
    assert cluster.patches == []
    assert oeprov(*serve, "--replicas", "3", "--yes") == 0
    pods = {name for name in cluster.pods if "serving" in name}
    assert (len(pods), pods > first) == (3, True)
    assert oeprov(*serve, "--replicas", "3", "--name", "new", "--yes") == 0
    assert "/v1/models/new" in capsys.readouterr().out
    assert not pods & cluster.pods.keys()

    # They are a job of their own, beside the training one.
    assert oeprov("status", "--json") == 0
    training, replicas = json.loads(capsys.readouterr().out)["jobs"]
    assert (training["job"], replicas["job"]) == (source.id, made["job"])
    assert {pod["role"] for pod in training["pods"]} == {"server", "worker"}
    assert {pod["role"] for pod in replicas["pods"]} == {"replica"}
    assert oeprov("logs", "ctr-serving") == 0
    assert "serving /shared/run" in capsys.readouterr().out
    for words in (("resume",), ("scale", "--servers", "1", "--yes"), ("serve",), ("serve", "--print")):
        assert oeprov(words[0], "ctr-serving", *words[1:]) == 1
        assert f"they serve job {source.id}; to change them" in " ".join(capsys.readouterr().err.split())
    assert oeprov("jobs", "rm", "ctr-serving", "--yes") == 1
    assert "stop it first" in capsys.readouterr().err
    assert oeprov("stop") == 0
    assert "its replicas are down" in capsys.readouterr().out
    assert "Deployment" not in cluster.kinds()
    assert not [name for name in cluster.pods if "serving" in name]
    assert [name for name in cluster.pods if "-worker" in name], "the job trains on"
    assert oeprov("status", "ctr-serving") == 0
    assert "done" in capsys.readouterr().out
    assert oeprov("serve") == 0, "without a name the job that trains is meant"
    assert oeprov("stop", "ctr-serving") == 0
    assert oeprov("jobs", "rm", "ctr-serving", "--yes") == 0


def test_replicas_that_cannot_be_leave_nothing(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = served_job(oeprov, tmp_path, capsys)
    kinds, name = cluster.kinds(), f"ctr-serving{source.id.removeprefix('ctr')}"

    def refused(*words: str) -> str:
        assert oeprov("serve", "ctr", *words) == 1
        assert cluster.kinds() == kinds
        assert [job.id for job in all_jobs(tmp_path / "state")] == [source.id]
        return " ".join(capsys.readouterr().err.split())

    cluster.denied = {("patch", "deployments"), ("create", "services")}
    said = refused()
    assert "no right in namespace ads to create services, patch deployments.apps; nothing was made" in said
    cluster.denied = set()
    cluster.refused = {"Deployment": (403, "exceeded quota: count/deployments.apps=0")}
    assert f"the cluster would refuse deployment/{name}: exceeded quota" in refused()
    cluster.refused = {}
    cluster.broken = {"--refresh-seconds": "/shared/run has no checkpoint"}
    said = refused("--", "--refresh-seconds", "1")
    assert "ended with exit status 1: /shared/run has no checkpoint; nothing is left of it" in said
    assert "--host ::: on Kubernetes a Service has the address" in refused("--host", "::")

    # Objects of its names that another made stay as they are.
    assert oeprov("serve", "ctr", "--print") == 0
    *_, deployment = yaml.safe_load_all(capsys.readouterr().out)
    Api().ask("POST", collection(deployment), deployment)
    kinds = cluster.kinds()
    said = refused()
    assert f"deployment/{name} is in namespace ads already, and none of these replicas" in said
    assert f"kubectl delete -n ads deployment/{name}; nothing was changed" in said


def test_replicas_that_cannot_be_changed_go_on(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = served_job(oeprov, tmp_path, capsys)
    assert oeprov("serve", "--replicas", "2") == 0
    before = {name for name in cluster.pods if "serving" in name}
    cluster.broken = {"--refresh-seconds": "no such flag"}
    capsys.readouterr()
    assert oeprov("serve", source.id, "--replicas", "2", "--yes", "--", "--refresh-seconds", "1") == 1
    assert "no such flag; its replicas go on as before" in " ".join(capsys.readouterr().err.split())
    assert {name for name in cluster.pods if "serving" in name} == before
    assert oeprov("serve", source.id, "--replicas", "2") == 0
    assert "nothing of it changes" in capsys.readouterr().out

    # What was deleted from outside is told, and made again.
    (path,) = [path for path in cluster.objects if "/deployments/" in path]
    cluster.deleted(path)
    assert oeprov("status", "ctr-serving") == 0
    assert f"is no longer on the cluster; start it again: oeprov serve {source.id}" in capsys.readouterr().out
    assert oeprov("serve", source.id, "--replicas", "2", "--yes") == 0
    assert len([name for name in cluster.pods if "serving" in name]) == 2
    cluster.objects[path]["metadata"]["annotations"] = {}
    capsys.readouterr()
    assert oeprov("serve", source.id, "--yes") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "is in namespace ads already, and none of these replicas" in said
    assert oeprov("stop", "ctr-serving") == 0
    assert "was made by another meanwhile; it stays" in capsys.readouterr().out
    assert path in cluster.objects


def test_replicas_on_kubernetes_serve_another_step(
    cluster: FakeCluster, oeprov: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the newest is asked for, also when they are changed; a step that is not kept changes nothing."""
    source = served_job(oeprov, tmp_path, capsys)
    serve = ("serve", source.id, "--yes", "--replicas")
    assert oeprov(*serve, "2") == 0
    rollback = ("serve", "rollback", "ctr-serving")

    def step() -> str | None:
        (found,) = [item for item in cluster.objects.values() if item.get("kind") == "Deployment"]
        (container,) = found["spec"]["template"]["spec"]["containers"]
        given: dict[str, str] = {item["name"]: item["value"] for item in container["env"]}
        assert ("--step-file" in container["args"]) == ("OEPROV_STEP" in given)
        return given.get("OEPROV_STEP")

    assert oeprov(*rollback) == 1
    assert "name the step, --step N" in capsys.readouterr().err
    cluster.broken = {"3": "step 3 is not kept; kept are 2 4"}
    assert oeprov(*rollback, "--step", "3") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "step 3 is not kept; kept are 2 4; its replicas go on as before" in said
    assert step() is None
    assert oeprov(*rollback, "--step", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert oeprov(*serve, "4") == 0
    assert (step(), len([name for name in cluster.pods if "serving" in name])) == ("2", 4)
    assert oeprov("serve", "rollback", source.id, "--newest") == 0, "by the name of the model"
    assert "its replicas serve the newest step" in capsys.readouterr().out
    assert step() == ""
    assert oeprov("stop", "ctr-serving") == 0
    assert oeprov(*rollback, "--step", "2") == 1
    assert "does not run: it is done" in capsys.readouterr().err
