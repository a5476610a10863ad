"""Manifests: against the published schemas, and by what they must say."""

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.cli import main as cli
from provision.cluster.errors import TrainingError
from provision.inventory.loader import load
from provision.jobs.backends.kubernetes import manifests, parts, plan, servers, serving, workers
from provision.jobs.request import LaunchOptions, ServeOptions

kubernetes_validate = pytest.importorskip("kubernetes_validate")

INVENTORY = """\
all:
  vars:
    training_data: /shared/criteo/train.tsv
    kubernetes_namespace: ads
    kubernetes_claim: deeprec
    kubernetes_server_image: registry.example/oeprov-server:0.1.0
    kubernetes_worker_image: registry.example/oeprov-worker:0.1.0
{variables}
  children:
    parameter_servers:
      hosts:
        re6p-1: {{oeprov_kind: re6p, parameter_server_count: 2}}
        re6p-2: {{oeprov_kind: re6p}}
    workers:
      hosts: {{gpu-1: {{oeprov_kind: gpu, worker_threads: 4}}}}
"""
VARIANTS = {
    "local volumes": "",
    "PMem CSI": "kubernetes_storage_class: pmem-csi-sc-ext4, kubernetes_storage_size: 400G, "
    "parameter_server_storage: dram_pmem",
    "dram": "parameter_server_storage: dram, kubernetes_server_nodes: {pool: big}, kubernetes_servers: 5",
    "memory nodes": "parameter_server_storage: pmem_memkind, kubernetes_pull_secret: registry",
    "several workers": "kubernetes_workers: 3, kubernetes_worker_gpus: 1, kubernetes_worker_nodes: {gpu: x}",
    "monitoring": "kubernetes_monitoring_namespace: monitoring, kubernetes_server_cpus: 0.5",
    "tfjob": "kubernetes_form: tfjob, kubernetes_workers: 2",
    "mpijob": "kubernetes_form: mpijob, kubernetes_workers: 2",
}
VERSIONS = ("1.30", "1.34", "1.37")
Document = dict[str, Any]


def inventory_file(directory: Path, variables: str = "") -> Path:
    path = directory / "inventory.yml"
    given = yaml.safe_load("{" + variables + "}")
    lines = yaml.safe_dump(given, default_flow_style=False)
    text = "".join(f"    {line}\n" for line in lines.splitlines() if line != "{}")
    kept = [line for line in INVENTORY.splitlines() if line.strip().partition(":")[0] not in given]
    path.write_text("\n".join([*kept, ""]).format(variables=text))
    return path


def settled(directory: Path, variables: str = "", **options: Any) -> plan.PodPlan:
    return plan.settle(load(inventory_file(directory, variables)), LaunchOptions(**options), "ctr")


def made(directory: Path, variables: str = "", token: str = "") -> dict[str, Document]:
    found = manifests.build(settled(directory, variables), token)
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


def pod_of(document: Document) -> Document:
    found: Document = document["spec"]["template"]["spec"]
    return found


def test_the_number_of_workers_may_be_an_option(tmp_path: Path) -> None:
    assert settled(tmp_path, VARIANTS["several workers"], workers=2).settings.workers == 2


def closed(schema: Any) -> Any:
    """The schema, refusing properties that it does not know, as an API server does with --validate=strict."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **found} if isinstance(schema.get("properties"), dict) else found


def check_kubeflow(document: Document) -> None:
    """Against the operator's own definition of the kind; its pods' are those of Kubernetes."""
    jsonschema = pytest.importorskip("jsonschema")
    published = json.loads(Path(__file__).with_name("kubeflow-crds.json").read_text())[document["kind"]]
    assert document["apiVersion"] == published["apiVersion"]
    jsonschema.validate(document, closed(published["schema"]))
    for replica in next(v for k, v in document["spec"].items() if k.endswith("ReplicaSpecs")).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **replica["template"]}
        pod = {**pod, "metadata": {**pod["metadata"], "name": "x"}}
        kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
    wrong = {**document, "spec": {**document["spec"], "cleanPodPolicy": "None"}}  # it belongs in runPolicy
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, closed(published["schema"]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_schemas_accept_them(tmp_path: Path, variant: str) -> None:
    found = manifests.build(settled(tmp_path, VARIANTS[variant]), "secret")
    for document in found:
        if "kubeflow" in document["apiVersion"]:
            check_kubeflow(document)
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**found[1], "spec": {"ports": "x"}, "extra": 1}, VERSIONS[-1], strict=True
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_text_is_the_same_each_time_and_reads_back(tmp_path: Path, variant: str) -> None:
    job = settled(tmp_path, VARIANTS[variant])
    found = manifests.build(job)
    text = manifests.render(job, found)
    assert text == manifests.render(job, manifests.build(settled(tmp_path, VARIANTS[variant])))
    assert list(yaml.safe_load_all(text)) == found
    assert "&id" not in text


def test_servers_are_bound_to_their_nodes_persistent_memory(tmp_path: Path) -> None:
    found = made(tmp_path)
    volumes = [item for key, item in found.items() if key.startswith("PersistentVolume/")]
    where = []
    for index, item in enumerate(volumes):
        spec = item["spec"]
        (term,) = spec["nodeAffinity"]["required"]["nodeSelectorTerms"]
        where.append((*term["matchExpressions"][0]["values"], spec["local"]["path"]))
        assert spec["claimRef"]["name"] == f"pool-ctr-server-{index}"
        assert spec["claimRef"]["namespace"] == "ads"
    assert where == [("re6p-1", "/mnt/pmem0"), ("re6p-1", "/mnt/pmem1"), ("re6p-2", "/mnt/pmem0")]
    stateful = found["StatefulSet/ctr-server"]
    assert stateful["spec"]["replicas"] == 3
    (template,) = stateful["spec"]["volumeClaimTemplates"]
    assert template["spec"]["storageClassName"] == ""
    words = pod_of(stateful)["containers"][0]["args"]
    assert words[words.index("--storage-path") + 1].startswith(parts.POOL_DIR)
    assert not [word for word in words if word in ("--storage-recover", "--storage-fresh")]
    assert words[words.index("--count") + 1] == "3"


def test_a_class_makes_the_volumes(tmp_path: Path) -> None:
    found = made(tmp_path, VARIANTS["PMem CSI"])
    assert not any(key.startswith("PersistentVolume/") for key in found)
    (template,) = found["StatefulSet/ctr-server"]["spec"]["volumeClaimTemplates"]
    assert template["spec"]["storageClassName"] == "pmem-csi-sc-ext4"
    assert template["spec"]["resources"]["requests"]["storage"] == "400Gi"
    words = pod_of(found["StatefulSet/ctr-server"])["containers"][0]["args"]
    assert words[words.index("--storage-cache") + 1] == str(4 << 30)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_container_may_more_than_it_needs(tmp_path: Path, variant: str) -> None:
    found = made(tmp_path, VARIANTS[variant])
    pods = [pod_of(item) for item in found.values() if "template" in item.get("spec", {})]
    for item in found.values():
        for key in ("tfReplicaSpecs", "mpiReplicaSpecs"):
            pods += [replica["template"]["spec"] for replica in item.get("spec", {}).get(key, {}).values()]
    assert len(pods) >= 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            limits = container["securityContext"]
            assert limits["allowPrivilegeEscalation"] is False
            assert limits["readOnlyRootFilesystem"] is True
            assert limits["capabilities"]["drop"] == ["ALL"]
            added = limits["capabilities"].get("add", [])
            assert added == (
                ["SYS_NICE"] if variant == "memory nodes" and container["name"] == "server" else []
            )
            assert container["resources"]["requests"]["memory"]
            assert container["resources"]["limits"]["memory"]
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"  # for status


def test_readiness_is_the_servers_own_page(tmp_path: Path) -> None:
    container = pod_of(made(tmp_path)["StatefulSet/ctr-server"])["containers"][0]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    words = container["args"]
    for probe in ("readinessProbe", "startupProbe"):
        page = container[probe]["httpGet"]
        assert page["path"] == "/metrics"
        assert str(ports[page["port"]]) == words[words.index("--metrics-port") + 1]
    assert str(ports[container["livenessProbe"]["tcpSocket"]["port"]]) == words[words.index("--port") + 1]


def test_policies_let_in_the_jobs_workers_alone(tmp_path: Path) -> None:
    found = made(tmp_path, VARIANTS["monitoring"])
    worker = (
        pod_of(found["Job/ctr-worker"]),
        found["Job/ctr-worker"]["spec"]["template"]["metadata"]["labels"],
    )
    first, second = found["NetworkPolicy/ctr-servers"]["spec"]["ingress"]
    assert first["ports"] == [{"protocol": "TCP", "port": plan.SERVER_PORT}]
    (source,) = first["from"]
    assert source["podSelector"]["matchLabels"].items() <= worker[1].items()
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in second[
        "from"
    ]
    budget = found["PodDisruptionBudget/ctr-servers"]["spec"]
    labels = found["StatefulSet/ctr-server"]["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_workers_find_each_other_and_know_their_rank(tmp_path: Path) -> None:
    found = made(tmp_path, VARIANTS["several workers"])
    job, service = found["Job/ctr-worker"], found["Service/ctr-workers"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 3)
    assert job["spec"]["parallelism"] == 3
    assert job["spec"]["backoffLimit"] == 3 * workers.RETRIES  # the loss of one ends all
    pod = pod_of(job)
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    words = pod["containers"][0]["args"]
    # A pod of an Indexed Job has the host name JOB-INDEX.
    expected = ",".join(f"ctr-worker-{rank}.ctr-workers:{parts.WORKER_PORT}" for rank in range(3))
    assert words[words.index("--workers") + 1] == expected
    assert words[words.index("--rank") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {"gpu": "x"}
    one = pod_of(made(tmp_path)["Job/ctr-worker"])
    assert "--rank" not in one["containers"][0]["args"]


def test_the_workers_command_is_one_that_the_trainer_takes(tmp_path: Path) -> None:
    from oe_runtime.run import options

    words = pod_of(made(tmp_path)["Job/ctr-worker"])["containers"][0]["args"]
    found = options.parse(words)
    assert list(found.servers) == [f"{name}:{plan.SERVER_PORT}" for name in servers.names(settled(tmp_path))]
    assert str(found.run_dir) == "/shared/oeprov/ctr/run"
    assert (found.model, found.tls, found.checkpoint_transfer) == ("deepfm", "on", "shared")


@pytest.mark.parametrize("form", ["job", "tfjob", "mpijob"])
def test_lost_workers_start_again_whatever_was_chosen(tmp_path: Path, form: str) -> None:
    chosen = "training_on_worker_lost: continue, training_workqueue: true"
    planned = settled(tmp_path, f"{chosen}, kubernetes_form: {form}, kubernetes_workers: 2")
    found = manifests.render(planned, manifests.build(planned))
    assert "- --workqueue" in found
    assert "- continue" not in found
    assert "oeprov/worker-lost: A lost pod is started again" in found


def test_the_servers_command_is_one_that_the_server_takes(tmp_path: Path) -> None:
    from oe_runtime.server import cli

    for variant in VARIANTS.values():
        words = pod_of(made(tmp_path, variant)["StatefulSet/ctr-server"])["containers"][0]["args"]
        assert cli._parser().parse_args(words).tls == "on"


def test_replicas_are_a_deployment_that_readiness_leads(tmp_path: Path) -> None:
    from oe_runtime import serve

    options = ServeOptions(replicas=3, grpc_port=8500, arguments=["--refresh-seconds", "1"])
    found = serving.documents(settled(tmp_path), options)
    for document in found:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    service, deployment = found
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]) == (3, {"maxSurge": 1, "maxUnavailable": 0})
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    pod = pod_of(deployment)
    (container,) = pod["containers"]
    words = serve._parser().parse_args(container["args"])
    assert (words.model, words.name, words.refresh_seconds) == ("/shared/oeprov/ctr/run", "ctr", 1)
    assert {item["name"]: item["containerPort"] for item in container["ports"]} == {
        "http": words.port,
        "grpc": words.grpc_port,
    }
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    for secure in (
        ServeOptions(arguments=["--tls-cert=/tls/tls.crt", "--tls-key", "/tls/tls.key"]),
        ServeOptions(files={"tls_cert": "/tls/tls.crt", "tls_key": "/tls/tls.key"}),
    ):
        (container,) = pod_of(serving.documents(settled(tmp_path), secure)[1])["containers"]
        words = serve._parser().parse_args(container["args"])
        assert (str(words.tls_cert), str(words.tls_key)) == ("/tls/tls.crt", "/tls/tls.key")
        probes = [container[name]["httpGet"]["scheme"] for name in ("readinessProbe", "startupProbe")]
        assert probes == ["HTTPS"] * 2
    with pytest.raises(TrainingError, match=r"--tls-cert tls\.crt: the replicas run elsewhere"):
        serving.documents(settled(tmp_path), ServeOptions(files={"tls_cert": "tls.crt"}))
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > words.drain_seconds
    assert all(item["readOnly"] for item in container["volumeMounts"] if item["name"] == "shared")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_pods_write_the_step_that_they_are_told_to_serve(tmp_path: Path) -> None:
    """Only a kept one, where training sees it too, so that it keeps the checkpoint."""
    found = serving.pinned(
        serving.documents(settled(tmp_path), ServeOptions()), "/shared/oeprov/ctr/run", "7"
    )
    assert serving.pinned(found, "/shared/oeprov/ctr/run", "7") == found
    for version in VERSIONS:
        kubernetes_validate.validate(found[1], version, strict=True)
    pod = pod_of(found[1])
    (container,) = pod["containers"]
    mounts = {
        item["mountPath"]: (item.get("subPath"), item.get("readOnly")) for item in container["volumeMounts"]
    }
    assert mounts["/shared"] == (None, True)
    assert mounts["/shared/oeprov/ctr"] == ("oeprov/ctr", None)
    file = container["args"][container["args"].index("--step-file") + 1]
    assert Path(file).parent == Path("/shared/oeprov/ctr")

    run = tmp_path / "run"
    for step in (2, 10):
        (run / "checkpoints" / f"step-{step:010d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step:010d}" / "manifest.json").touch()
    (tmp_path / "python").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "python").chmod(0o755)

    def start(step: str) -> tuple[int, str, str]:
        place = tmp_path / "serving-step"
        given = {"OEPROV_STEP": step, "OEPROV_STEP_FILE": str(place), "HOSTNAME": "pod"}
        done = subprocess.run(
            [*container["command"], str(run)],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **given},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, place.read_text() if place.exists() else "", done.stderr

    assert start("7") == (1, "", "error: step 7 is not kept; kept are 2 10\n")
    assert start("10")[:2] == (5, "10\n")
    assert start("")[:2] == (5, "\n")


class TestScripts:
    """The shell scripts of the containers, run here with other places."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        for name in ("etc", "run", "pool", "job", "bin"):
            (tmp_path / name).mkdir()
        (tmp_path / "etc" / "token").write_text("secret\n")
        python = tmp_path / "bin" / "python"
        python.write_text(
            "#!/bin/sh\n"
            "trap 'exit 3' TERM\n"
            f"printf '%s\\n' \"$@\" >{tmp_path}/words.new; mv {tmp_path}/words.new {tmp_path}/words\n"
            f"[ ! -e {tmp_path}/stay ] || while :; do sleep 0.05; done\n"
        )
        python.chmod(0o755)
        return tmp_path

    def start(self, place: Path, container: Document) -> subprocess.Popen[bytes]:
        words = [*container["command"], *container["args"]]
        words[2] = (
            words[2]
            .replace(parts.SECRET_DIR, str(place / "etc"))
            .replace(parts.PRIVATE_DIR, str(place / "run"))
        )
        values = {item["name"]: item.get("value", "ctr-server-12") for item in container["env"]}
        values.update(
            PATH=f"{place / 'bin'}:{os.environ['PATH']}", RUN=str(place / "job"), POOL=str(place / "pool")
        )
        return subprocess.Popen(words, env=values)

    def said(self, place: Path) -> list[str]:
        while not (place / "words").exists():
            time.sleep(0.01)
        return (place / "words").read_text().splitlines()

    @pytest.mark.parametrize("variant", ["local volumes", "dram"])
    def test_a_server_gets_its_index_and_a_private_token(self, place: Path, variant: str) -> None:
        (place / "stay").touch()
        container = pod_of(made(place, VARIANTS[variant])["StatefulSet/ctr-server"])["containers"][0]
        with self.start(place, container) as running:
            words = self.said(place)
            assert words[:4] == ["-m", "oe_runtime.server", "--index", "12"]
            more = ["--storage-recover"] if variant == "local volumes" else []
            assert words[4:] == [*container["args"], *more]
            token = place / "run" / "token"
            assert token.read_text() == "secret\n"
            assert stat.S_IMODE(token.stat().st_mode) == 0o600
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 3  # what the server itself ended with
        assert (place / "pool").is_dir()

    def test_rows_of_a_job_that_is_done_go(self, place: Path) -> None:
        container = pod_of(made(place)["StatefulSet/ctr-server"])["containers"][0]
        (place / "pool" / "rows").touch()
        (place / "job" / "metrics.jsonl").write_text(json.dumps({"event": "step", "end": 1}) + "\n")
        assert self.start(place, container).wait(20) == 0
        assert (place / "pool" / "rows").exists()
        (place / "job" / "metrics.jsonl").write_text(json.dumps({"event": "end", "steps": 1}) + "\n")
        assert self.start(place, container).wait(20) == 0
        assert not (place / "pool").exists()

    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("begun", [False, True])
    def test_a_server_takes_only_rows_of_a_job_that_has_begun(
        self, place: Path, *, begun: bool, rows: bool
    ) -> None:
        container = pod_of(made(place)["StatefulSet/ctr-server"])["containers"][0]
        (place / "pool" / "oe.lock").touch()  # of a server before
        if rows:
            (place / "pool" / "oe-0123456789abcdef-super.pool").touch()
        if begun:
            (place / "job" / "metrics.jsonl").write_text(json.dumps({"event": "start"}) + "\n")
        assert self.start(place, container).wait(20) == 0
        more = ["--storage-recover"] if begun or not rows else []  # without it, no checkpoint stays in pools
        assert self.said(place)[4:] == [*container["args"], *more]
        assert (place / "pool").exists()

    def test_rows_of_a_job_that_trains_longer_stay(self, place: Path) -> None:
        """Its events have the end of the run before."""
        container = pod_of(made(place)["StatefulSet/ctr-server"])["containers"][0]
        lines = [json.dumps({"event": name}) for name in ("start", "end", "report", "start", "checkpoint")]
        (place / "job" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert self.start(place, container).wait(20) == 0
        assert (place / "pool").exists()

    def test_a_worker_goes_on_from_a_checkpoint(self, place: Path) -> None:
        container = pod_of(made(place)["Job/ctr-worker"])["containers"][0]
        assert self.start(place, container).wait(20) == 0
        assert self.said(place) == ["-m", "oe_runtime.train", *container["args"]]
        (place / "job" / "checkpoints" / "step-0000000010").mkdir(parents=True)
        assert self.start(place, container).wait(20) == 0
        assert "--resume" not in self.said(place)
        (place / "job" / "checkpoints" / "step-0000000010" / "manifest.json").touch()
        assert self.start(place, container).wait(20) == 0
        # In front: the end of a script's arguments is the script's.
        assert self.said(place) == ["-m", "oe_runtime.train", "--resume", *container["args"]]

    def test_a_worker_is_asked_to_end_while_it_begins(self, place: Path) -> None:
        (place / "stay").touch()
        with self.start(place, pod_of(made(place)["Job/ctr-worker"])["containers"][0]) as running:
            self.said(place)
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 3

    def test_a_worker_that_waits_ends_when_it_is_asked(self, tmp_path: Path) -> None:
        import socket

        (init,) = pod_of(made(tmp_path)["Job/ctr-worker"])["initContainers"]
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            there = ",".join(f"127.0.0.1:{place.getsockname()[1]}" for place in (listening, closed))
            with subprocess.Popen([sys.executable, *init["command"][1:3], "60", there]) as waiting:
                listening.accept()[0].close()
                waiting.terminate()
                assert waiting.wait(20) == 143

    def test_workers_wait_for_servers(self, tmp_path: Path) -> None:
        import socket

        (init,) = pod_of(made(tmp_path)["Job/ctr-worker"])["initContainers"]
        assert init["command"][0] == "python"  # the image's
        wait = [sys.executable, *init["command"][1:3]]
        with socket.create_server(("127.0.0.1", 0)) as listening:
            there = f"127.0.0.1:{listening.getsockname()[1]}"
            assert subprocess.run([*wait, "5", f"{there},{there}"], check=False).returncode == 0
        done = subprocess.run([*wait, "0", there], capture_output=True, text=True, check=False)
        assert f"error: server {there} cannot be reached" in done.stderr
        assert done.returncode == 1

    def test_shells_take_them(self, tmp_path: Path) -> None:
        for script in (
            servers._RECOVER + servers._START + servers._EMPTY,
            workers._SCRIPT,
            workers._MPI_LAUNCHER,
        ):
            subprocess.run(["sh", "-n", "-c", script], check=True)


def test_the_mpi_launcher_names_the_workers_of_its_host_file(tmp_path: Path) -> None:
    job = made(tmp_path, VARIANTS["mpijob"])["MPIJob/ctr"]
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    (tmp_path / "hosts").write_text("ctr-worker-0.ctr.ads.svc slots=1\nctr-worker-1.ctr.ads.svc:1\n")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    mpirun.chmod(0o755)
    script = launcher["command"][2].replace("/etc/mpi/hostfile", shlex.quote(str(tmp_path / "hosts")))
    script = script.replace("/tmp/ssh_config", str(tmp_path / "ssh_config"))
    values = {item["name"]: item["value"] for item in launcher["env"]}
    done = subprocess.run(
        ["/bin/sh", "-ec", script, "launcher", *launcher["args"]],
        env={**values, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    port = parts.WORKER_PORT
    own = words.index("worker") + 1
    assert words[own] == "--workers"
    assert words[own + 1] == f"ctr-worker-0.ctr.ads.svc:{port},ctr-worker-1.ctr.ads.svc:{port}"
    assert words[own + 2 :] == launcher["args"]
    # ssh, which starts the others, passes on no environment.
    assert {words[place + 1] for place, word in enumerate(words) if word == "-x"} >= {
        "RUN",
        "OMP_NUM_THREADS",
        "PATH",
        "HOME",
    }
    assert words[words.index("--bind-to") + 1] == "none"
    assert words[words.index("-n") + 1] == "2"
    assert '--rank "$OMPI_COMM_WORLD_RANK"' in done.stdout


def test_the_mpi_launcher_reaches_the_workers_sshd_and_no_other(tmp_path: Path) -> None:
    """With the keys of the operator alone: no right to low ports, no known hosts, no configuration."""
    for program in ("sshd", "ssh", "ssh-keygen"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{program} is not installed")
    replicas = made(tmp_path, VARIANTS["mpijob"])["MPIJob/ctr"]["spec"]["mpiReplicaSpecs"]
    launcher, worker = (
        replicas[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker")
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def here(text: str) -> str:
        text = text.replace(workers._HOME, str(tmp_path)).replace(str(workers._SSH_PORT), port)
        return text.replace("/tmp/ssh_config", str(tmp_path / "ssh_config"))

    keys = tmp_path / ".ssh"
    keys.mkdir()
    for name in ("id_rsa", "other"):
        words = [
            "ssh-keygen",
            "-q",
            "-t",
            "ecdsa",
            "-b",
            "521",
            "-m",
            "PEM",
            "-N",
            "",
            "-f",
            str(keys / name),
        ]
        subprocess.run(words, check=True)
    (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
    config = here(launcher["command"][2]).partition("mpirun")[0].replace("/etc/mpi/hostfile", "/dev/null")
    subprocess.run(["/bin/sh", "-ec", config], env={**os.environ, "PORT": "1"}, check=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root needs it; a pod's is not root's
    words = ["ssh", "-F", str(tmp_path / "ssh_config"), "-i", str(keys / "id_rsa"), "-o", "BatchMode=yes"]
    sshd = subprocess.Popen([here(word) for word in worker["command"]], stderr=subprocess.DEVNULL)
    try:
        said = subprocess.run(
            [*words, "127.0.0.1", "echo reached"], capture_output=True, text=True, check=False
        )
        assert said.stdout == "reached\n", said.stderr
        (keys / "authorized_keys").write_text((keys / "other.pub").read_text())
        said = subprocess.run(
            [*words, "127.0.0.1", "echo reached"], capture_output=True, text=True, check=False
        )
        assert "Host key verification failed" in said.stderr
    finally:
        sshd.terminate()
        sshd.wait(timeout=60)


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ("kubernetes_claim: ''", {}, "kubernetes_claim is missing: the ReadWriteMany claim"),
        ("kubernetes_server_image: ''", {}, "kubernetes_server_image is missing: containers/"),
        (
            "",
            {"data": "/srv/day_0.gz"},
            "pods see only what lies in claim deeprec: give a path below /shared",
        ),
        ("", {"data": "generate:0"}, "--data: found 'generate:0'"),
        ("training_data: ''", {}, "no data to train on"),
        ("training_tls: off", {}, "training_tls: off"),
        ("kubernetes_storage_class: fast", {}, "kubernetes_storage_size is missing"),
        ("kubernetes_servers: 2", {}, "parameter_server_count makes 3 of the hosts' mount points"),
        ("kubernetes_server_nodes: {a: b}", {}, "kubernetes_storage_class is missing"),
        ("", {"storage": "pmem"}, "--storage: found 'pmem'"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, variables: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        settled(tmp_path, variables, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "servers", "volumes"),
    [
        ("", 4, ["/data/a", "/data/b", "/data/a", "/data/b"]),
        ("kubernetes_servers: 3", 3, ["/data/a", "/data/b", "/data/a"]),
        ("kubernetes_servers: 4", 4, ["/data/a", "/data/b", "/data/a", "/data/b"]),
        ("kubernetes_storage_class: fast, kubernetes_storage_size: 1T", 3, []),
    ],
)
def test_drives_say_how_many_servers_there_are_where_they_are_the_volumes(
    tmp_path: Path, variables: str, servers: int, volumes: list[str]
) -> None:
    # re6p-1 has parameter_server_count: 2, and re6p-2 has none.
    drives = "parameter_server_storage: dram_ssd, ssd_devices: [/data/a, /data/b]"
    found = settled(tmp_path, f"{drives}, {variables}" if variables else drives)
    assert (found.servers, [path for _, path in found.local]) == (servers, volumes)


@pytest.mark.parametrize("name", ["Big", "9lives", "a.b", "x" * 49, "-x"])
def test_names_that_cannot_be_services(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory_file(tmp_path)
    assert cli.run(["manifests", "-i", str(path), f"--name={name}"]) == 1
    assert "--name: found" in capsys.readouterr().err


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory_file(tmp_path)
    assert cli.run(["manifests", "-i", str(path)]) == 0
    plain = capsys.readouterr().out
    assert "create secret generic deepfm-token" in plain
    assert "Secret" not in [item["kind"] for item in yaml.safe_load_all(plain)]
    (tmp_path / "token").write_text("abc\n")
    words = ["manifests", "-i", str(path), "--form", "tfjob", "--token-file", str(tmp_path / "token")]
    assert cli.run(words) == 0
    kinds = [item["kind"] for item in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds[0] == "Secret"
    assert kinds[-1] == "TFJob"
    assert cli.run(["manifests", "-i", str(path), "--form", "mpi"]) == 1
    assert "--form: found 'mpi'; allowed: job, tfjob, mpijob" in capsys.readouterr().err
    assert cli.run(["manifests", "-i", str(path), "--token-file", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
