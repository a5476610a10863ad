"""Training on a real Kubernetes cluster, as a user with few rights; ``make test-kubernetes`` runs this."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kube_cluster
import kube_image
import own_script
import pytest
import yaml
from kube_cluster import NODE, Cluster, until

from provision.cluster.training_settings import MODEL_SETTINGS

REPOSITORY = Path(__file__).parents[2]
NAMESPACE, CLAIM = "ads", "deeprec"
CORE, RBAC = f"/api/v1/namespaces/{NAMESPACE}", "/apis/rbac.authorization.k8s.io/v1"

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(kube_cluster.why_not()), reason=kube_cluster.why_not() or "never"),
]


class User:
    """Runs `oeprov` in a directory with an inventory, as the cluster's user trainer."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        self.claim, self.pmem = directory / "claim", directory / "mnt" / "pmem"
        self.inventory = directory / "inventory.yml"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OEPROV_")},
            "KUBECONFIG": str(cluster.kubeconfig("trainer")),
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "300",
        }
        directory.mkdir()

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command."""
        return subprocess.Popen(
            self.cluster.inside(sys.executable, "-m", "provision.cli", *words, directory=self.directory),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def oeprov(self, *words: str, expect: int = 0) -> str:
        """What a command says that must end with ``expect``."""
        command = self.start(*words)
        said, _ = command.communicate(timeout=600)
        assert command.returncode == expect, f"exit status {command.returncode}: {said}{self.news()}"
        assert "Traceback" not in said
        return said

    def launch(self, *words: str, expect: int = 0) -> str:
        return self.oeprov(
            "launch-training", "-i", str(self.inventory), "--on", "kubernetes", *words, expect=expect
        )

    def status(self, name: str) -> dict[str, Any]:
        """That of the youngest job with a name; empty while there is none."""
        jobs = json.loads(self.oeprov("status", "--json"))["jobs"]
        found: list[dict[str, Any]] = [item for item in jobs if item["job"].startswith(f"{name}-")]
        return found[-1] if found else {}

    def step(self, name: str) -> int:
        """The last step that a job's worker told of."""
        status = self.status(name)
        if not status:
            return 0
        assert status["state"] == "running", f"{status}{self.news()}"
        found = re.match(r"step (\d+)", status["progress"])
        return int(found[1]) if found else 0

    def reaches(self, name: str, step: int) -> None:
        """Wait until a job is beyond a step."""
        until(lambda: self.step(name) > step, 300, self.news)

    def pods(self) -> dict[str, dict[str, Any]]:
        found = self.cluster.ask("GET", f"{CORE}/pods")["items"]
        return {item["metadata"]["name"]: item for item in found}

    def kinds(self) -> list[str]:
        """Kinds of which the namespace has something that a job made."""
        places = {
            "pods": CORE,
            "configmaps": CORE,
            "secrets": CORE,
            "services": CORE,
            "persistentvolumeclaims": CORE,
            "statefulsets": f"/apis/apps/v1/namespaces/{NAMESPACE}",
            "jobs": f"/apis/batch/v1/namespaces/{NAMESPACE}",
            "networkpolicies": f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}",
            "persistentvolumes": "/api/v1",
        }
        ours = "labelSelector=app.kubernetes.io/managed-by=oeprov"
        return [
            kind for kind, root in places.items() if self.cluster.ask("GET", f"{root}/{kind}?{ours}")["items"]
        ]

    def news(self) -> str:
        """What the cluster says of its pods, for a test that fails."""
        lines = [f"{name}: {json.dumps(item.get('status', {}))[:1500]}" for name, item in self.pods().items()]
        events = self.cluster.ask("GET", f"{CORE}/events")["items"]
        lines += [f"{item.get('reason')}: {item.get('message')}" for item in events[-20:]]
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = self.start("logs", "-n", "20").communicate(timeout=60)[0]
            lines.append(said)
        return "\n" + "\n".join(lines)

    def rights(self) -> None:
        """What README says that a user needs, for the namespace; volumes are not of a namespace."""
        everything = [
            {"apiGroups": [""], "resources": ["pods", "pods/log", "events"], "verbs": ["get", "list"]},
            {
                "apiGroups": ["", "apps", "batch", "policy", "networking.k8s.io"],
                "resources": [
                    "configmaps",
                    "secrets",
                    "services",
                    "persistentvolumeclaims",
                    "statefulsets",
                    "jobs",
                    "poddisruptionbudgets",
                    "networkpolicies",
                ],
                "verbs": ["get", "create", "delete"],
            },
        ]
        wide = [
            {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get", "create", "delete"]},
            {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]},
        ]
        for kind, place, rules in (
            ("Role", f"{RBAC}/namespaces/{NAMESPACE}", everything),
            ("ClusterRole", RBAC, wide),
        ):
            self.cluster.make(f"{place}/{kind.lower()}s", {**_head(RBAC, kind, "training"), "rules": rules})
            binding = {
                **_head(RBAC, f"{kind}Binding", "training"),
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "training"},
                "subjects": [
                    {"kind": "User", "name": "trainer", "apiGroup": "rbac.authorization.k8s.io"}
                ],
            }  # fmt: skip
            self.cluster.make(f"{place}/{kind.lower()}bindings", binding)


def _head(place: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": place.removeprefix("/apis/"), "kind": kind, "metadata": {"name": name}}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """On a cluster whose namespace keeps Pod Security's strictest level, with a claim."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        found = User(cluster, tmp_path_factory.mktemp("user") / "home")
        _furnish(cluster, found)
        yield found
        print("\n" + "\n".join(f"{seconds:7.1f} s  {what}" for what, seconds in cluster.times))


def _furnish(cluster: Cluster, user: User) -> None:
    levels = {"pod-security.kubernetes.io/enforce": "restricted"}
    place = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": levels}}
    cluster.make("/api/v1/namespaces", place)
    user.claim.mkdir()
    os.chown(user.claim, kube_image.USER, kube_image.USER)
    for number in range(2):
        user.pmem.with_name(f"pmem{number}").mkdir(parents=True)
    volume = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(user.claim), "type": "Directory"},
        "claimRef": {"namespace": NAMESPACE, "name": CLAIM},
    }
    cluster.make(
        "/api/v1/persistentvolumes",
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": CLAIM}, "spec": volume},
    )
    claim = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": CLAIM,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    cluster.make(
        f"{CORE}/persistentvolumeclaims",
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": claim},
    )
    variables = {
        "kubernetes_namespace": NAMESPACE,
        "kubernetes_claim": CLAIM,
        "kubernetes_server_image": kube_image.NAME,
        "kubernetes_worker_image": kube_image.NAME,
        "kubernetes_server_cpus": 0.1,
        "kubernetes_server_memory": "512M",
        "kubernetes_worker_cpus": 0.1,
        "kubernetes_worker_memory": "2G",
        "training_model": "wdl",
        "training_data": "generate:20000",
        "training_dim": 4,
        "training_batch_size": 64,
        "training_max_cardinality": 1000,
        "training_epochs": 1000,
        "training_checkpoint_steps": 20,
    }
    server = {
        "oeprov_kind": "bare_metal_pmem",
        "parameter_server_count": 2,
        "parameter_server_storage": "pmem_libpmem",
        "pmem_mount_prefix": str(user.pmem),
    }
    groups = {
        "parameter_servers": {"hosts": {NODE: server}},
        "workers": {"hosts": {"worker-1": {"oeprov_kind": "cpu"}}},
    }
    user.inventory.write_text(yaml.safe_dump({"all": {"vars": variables, "children": groups}}))


def test_what_is_missing_is_said_before_anything_is_made(user: User) -> None:
    said = user.launch(expect=1)
    assert "no right in namespace ads to" in said
    assert "create/delete persistentvolumes" in said
    user.rights()
    assert user.kinds() == []


def test_a_job_is_watched_loses_a_server_is_stopped_and_resumed(user: User) -> None:
    said = user.launch("--name", "ctr", "--detach")
    assert "made in namespace ads" in said
    user.reaches("ctr", 40)
    status = user.status("ctr")
    assert status["state"] == "running"
    assert [(pod["role"], pod["state"], pod["ready"], pod["node"]) for pod in status["pods"]] == [
        ("server", "runs", True, NODE),
        ("server", "runs", True, NODE),
        ("worker", "runs", True, NODE),
    ]
    job = status["job"]
    assert "step " in user.oeprov("logs", "--process", "worker", "-n", "5")
    assert re.search(rf"^{job}-server-1 +\| ", user.oeprov("logs"), re.MULTILINE)

    lost = f"{job}-server-1"
    before, workers = user.pods()[lost]["metadata"]["uid"], _workers(user)
    step = user.step("ctr")
    user.cluster.ask("DELETE", f"{CORE}/pods/{lost}")
    until(
        lambda: user.pods().get(lost, {}).get("metadata", {}).get("uid") not in (None, before), 120, user.news
    )
    user.reaches("ctr", step + 40)
    assert _workers(user) == workers, "the worker waited, and was not begun again"
    run = user.claim / "oeprov" / job / "run"
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (gone,) = [item for item in events if item.get("event") == "server_gone"]
    (back,) = [item for item in events if item.get("event") == "server_back"]
    assert gone["endpoint"].startswith(lost)
    assert back["step"] > 0

    said = user.oeprov("stop")
    assert "the workers finish their step and write a checkpoint" in said
    assert "is left on the cluster but its volumes" in said
    assert user.kinds() == ["persistentvolumeclaims", "persistentvolumes"]
    stopped = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert stopped > step

    user.oeprov("resume", "--detach")
    user.reaches("ctr", stopped)
    user.oeprov("stop")


def test_a_job_is_followed_to_its_end_and_nothing_is_left(user: User) -> None:
    _forget(user)
    said = user.launch("--name", "short", "--data", "generate:4000", "--steps", "50")
    assert "2 of 2 servers are ready" in said
    assert re.search(r"^step 50", said, re.MULTILINE)
    assert "training is done; checkpoints and export: /shared/oeprov/short-" in said
    until(lambda: user.kinds() == [], 60, user.news)
    (run,) = (user.claim / "oeprov").glob("short-*/run")
    assert (run / "export").is_dir()


def test_a_script_is_trained_stopped_and_resumed_with_other_arguments(user: User) -> None:
    _forget(user)
    program = own_script.write(user.directory / "mine")
    said = user.oeprov(*_of_script(user, program), "--detach", "--", "100000", "$(RUN)")
    assert "script: train_mine.py with its directory, 2 files" in said
    user.reaches("train-mine", 40)
    assert "configmaps" in user.kinds()
    assert "told ['0', '1', '0', '1'] ['100000', '$(RUN)'] False" in user.oeprov("logs", "-n", "1000")
    user.oeprov("stop")
    assert user.kinds() == ["persistentvolumeclaims", "persistentvolumes"]
    (run,) = (user.claim / "oeprov").glob("train-mine-*/run")
    stopped = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert stopped > 40

    program.write_text(own_script.SCRIPT.replace("told", "is told"))
    epochs = str(stopped // 100 + 2)
    said = user.oeprov("resume", "--", epochs)
    assert f"is told ['0', '1', '0', '1'] ['{epochs}'] True" in said
    assert "training is done" in said
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [item["step"] for item in events if item.get("event") == "resume"] == [stopped]
    assert max(item.get("step", 0) for item in events) == int(epochs) * 100
    until(lambda: user.kinds() == [], 60, user.news)


def test_a_script_in_the_claim_runs_where_it_lies(user: User) -> None:
    _forget(user)
    program = own_script.write(user.claim / "mine")
    os.chown(program.parent, kube_image.USER, kube_image.USER)
    said = user.oeprov(*_of_script(user, Path("/shared/mine") / program.name), "--storage", "dram", "--", "2")
    assert "script: /shared/mine/train_mine.py is run where it lies in claim deeprec" in said
    assert "training is done" in said
    assert (program.parent / "written.txt").exists()
    until(lambda: user.kinds() == [], 60, user.news)


def test_two_workers_find_each_other(user: User) -> None:
    if user.cluster.minor < 22:
        pytest.skip("this version has no Indexed Jobs")
    said = user.launch(
        "--name", "pair", "--workers", "2", "--storage", "dram", "--data", "generate:4000", "--steps", "30"
    )
    assert "training is done" in said
    (run,) = (user.claim / "oeprov").glob("pair-*/run")
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [item["step"] for item in events if item.get("event") == "step"][-1] == 30
    until(lambda: user.kinds() == [], 60, user.news)


def test_ctrl_c_stops_it_with_a_checkpoint(user: User) -> None:
    command = user.start(
        "launch-training",
        "-i",
        str(user.inventory),
        "--on",
        "kubernetes",
        "--storage",
        "dram",
        "--name",
        "quick",
    )
    user.reaches("quick", 20)
    # nsenter does not pass it on.
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text()
    os.kill(int(children), signal.SIGINT)
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 130, said
    assert "resume with: oeprov resume quick" in said
    assert user.kinds() == []
    assert list((user.claim / "oeprov").glob("quick-*/run/checkpoints/step-*/manifest.json"))


def test_what_keeps_pods_from_starting_is_said(user: User) -> None:
    _forget(user)
    cases = [
        ("no image", {"kubernetes_server_image": "oeprov.test/none:1"}, [], "ImagePull"),
        ("no mount point", {"pmem_mount_prefix": str(user.directory / "none")}, [], "FailedMount: "),
        ("no node", {"kubernetes_server_memory": "64T"}, [], "no node takes it yet: 0/1 nodes"),
    ]
    if user.cluster.minor >= 23:
        # The level restricted does not allow the capability that memkind needs.
        cases.append(("no right", {}, ["--storage", "pmem_memkind"], "FailedCreate: "))
    for name, variables, words, expected in cases:
        inventory = yaml.safe_load(user.inventory.read_text())
        inventory["all"]["vars"].update(variables)
        if "pmem_mount_prefix" in variables:
            inventory["all"]["children"]["parameter_servers"]["hosts"][NODE].update(variables)
        path = user.directory / "other.yml"
        path.write_text(yaml.safe_dump(inventory))
        job = name.replace(" ", "-")
        user.oeprov(
            "launch-training", "-i", str(path), "--on", "kubernetes", "--name", job, "--detach", *words
        )
        until(lambda job=job, expected=expected: expected in json.dumps(user.status(job)), 120, user.news)
        said = user.oeprov("status")
        assert expected in said
        user.oeprov("stop")
        _forget(user)


def _of_script(user: User, program: Path) -> list[str]:
    """The launch of a script, with an inventory that does not say what the script decides."""
    inventory = yaml.safe_load(user.inventory.read_text())
    others = {f"training_{name}" for name in MODEL_SETTINGS}
    variables = inventory["all"]["vars"].items()
    inventory["all"]["vars"] = {name: value for name, value in variables if name not in others}
    path = user.directory / "script.yml"
    path.write_text(yaml.safe_dump(inventory))
    return ["launch-training", "-i", str(path), "--on", "kubernetes", "--script", str(program)]


def _workers(user: User) -> dict[str, int]:
    """Pods of workers and how often their container began."""
    return {
        name: item["status"]["containerStatuses"][0]["restartCount"]
        for name, item in user.pods().items()
        if "-worker-" in name
    }


def _forget(user: User) -> None:
    """Take away the volumes that a stopped job keeps: their places are wanted for the next."""
    for item in user.cluster.ask("GET", f"{CORE}/persistentvolumeclaims")["items"]:
        if item["metadata"]["name"] != CLAIM:
            user.cluster.ask("DELETE", f"{CORE}/persistentvolumeclaims/{item['metadata']['name']}")
    for item in user.cluster.ask("GET", "/api/v1/persistentvolumes")["items"]:
        if item["metadata"]["name"] != CLAIM:
            user.cluster.ask("DELETE", f"/api/v1/persistentvolumes/{item['metadata']['name']}")
