"""A training script of the user's own on Kubernetes: its directory in a ConfigMap, and what workers run."""

import base64
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, all_jobs
from test_kubernetes_manifests import VERSIONS, Document, inventory_file, made, pod_of, settled

from oe_runtime.run import options as trainer
from provision.cli import main as cli
from provision.cluster.errors import TrainingError
from provision.jobs.backends.kubernetes import follow, manifests, plan, record, run, script
from provision.jobs.store import jobs_dir

kubernetes_validate = pytest.importorskip("kubernetes_validate")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "train.py"
    (path.parent / "parts").mkdir(parents=True)
    path.write_text("print('hello')\n")
    (path.parent / "parts" / "layers.py").write_text("WIDTH = 16\n")
    (path.parent / "notes.txt").write_text("mine\n")
    (path.parent / ".oeprovignore").write_text("notes.txt\n")
    return path


def planned(directory: Path, program: Path, variables: str = "", *arguments: str) -> plan.PodPlan:
    return settled(directory, variables, script=str(program), script_arguments=list(arguments) or None)


def built(directory: Path, program: Path, variables: str = "", *arguments: str) -> dict[str, Document]:
    found = manifests.build(planned(directory, program, variables, *arguments))
    return {item["kind"]: item for item in found}


def templates(found: dict[str, Document]) -> list[Document]:
    """The pods of the workers."""
    for kind, key in (("TFJob", "tfReplicaSpecs"), ("MPIJob", "mpiReplicaSpecs")):
        if kind in found:
            return [item["template"]["spec"] for item in found[kind]["spec"][key].values()]
    return [pod_of(found["Job"])]


def unpacked(document: Document, directory: Path) -> list[str]:
    """What a ConfigMap of a script has."""
    with tarfile.open(
        fileobj=io.BytesIO(base64.b64decode(document["binaryData"][script.ARCHIVE]))
    ) as archive:
        archive.extractall(directory)  # noqa: S202 - our own; Debian 12's Python has no filter
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("form", ["job", "tfjob", "mpijob"])
def test_its_directory_is_an_object_that_every_worker_mounts(
    tmp_path: Path, program: Path, form: str
) -> None:
    found = built(tmp_path, program, f"kubernetes_form: {form}, kubernetes_workers: 2")
    config = found["ConfigMap"]
    for version in VERSIONS:
        kubernetes_validate.validate(config, version, strict=True)
    assert config["immutable"] is True
    assert config["metadata"]["namespace"] == "ads"
    assert config["metadata"]["labels"]["app.kubernetes.io/instance"] == "ctr"
    assert "train.py with its directory, 3 files" in config["metadata"]["annotations"][script.CONTENT]
    assert unpacked(config, tmp_path / "out") == [".oeprovignore", "parts/layers.py", "train.py"]
    for pod in templates(found):
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
        (volume,) = [item for item in pod["volumes"] if "configMap" in item]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        (mount,) = [item for item in pod["containers"][0]["volumeMounts"] if item["name"] == volume["name"]]
        assert (mount["mountPath"], mount["readOnly"]) == (script.ARCHIVE_DIR, True)


def test_the_name_says_which_content(tmp_path: Path, program: Path) -> None:
    first = built(tmp_path, program)["ConfigMap"]
    os.utime(program, (0, 0))
    assert built(tmp_path, program)["ConfigMap"] == first
    program.write_text("print('other')\n")
    second = built(tmp_path, program)["ConfigMap"]
    assert second["metadata"]["name"] != first["metadata"]["name"]
    assert second["binaryData"] != first["binaryData"]


def test_built_in_models_have_none(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert not any(key.startswith("ConfigMap/") for key in found)
    (container,) = pod_of(found["Job/ctr-worker"])["containers"]
    assert not any(item["name"].startswith("LOCAL_") for item in container["env"])


def test_the_trainer_takes_the_command(tmp_path: Path, program: Path) -> None:
    words = ["--rank", "7", "--", "$(JOB_COMPLETION_INDEX) costs 5$", "--resume"]
    found = built(tmp_path, program, "kubernetes_workers: 2", *words)
    (container,) = templates(found)[0]["containers"]
    given = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"][: -len(words)]]
    # What Kubernetes does with the rest: two dollars are one.
    given += [word.replace("$$", "$") for word in container["args"][-len(words) :]]
    assert "$$(JOB_COMPLETION_INDEX) costs 5$$" in container["args"]
    (tmp_path / "train.py").touch()
    given[given.index("--script") + 1] = str(tmp_path / "train.py")
    parsed = trainer.parse(given)
    assert parsed.program == "train.py"
    assert list(parsed.arguments) == words
    assert (parsed.rank, parsed.size, parsed.data) == (1, 2, "/shared/criteo/train.tsv")
    assert (str(parsed.run_dir), parsed.checkpoint_transfer) == ("/shared/oeprov/ctr/run", "shared")


def test_a_container_unpacks_a_copy_and_resumes_before_the_arguments(tmp_path: Path, program: Path) -> None:
    found = built(tmp_path, program, "", "--epochs", "3")
    (container,) = templates(found)[0]["containers"]
    for name in ("etc", "config", "run", "bin", "script", "job/checkpoints/step-0000000010"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc" / "token").write_text("secret\n")
    (tmp_path / "script" / "left.txt").touch()  # by an earlier run of the container
    (tmp_path / "job/checkpoints/step-0000000010/manifest.json").touch()
    packed = base64.b64decode(found["ConfigMap"]["binaryData"][script.ARCHIVE])
    (tmp_path / "config" / script.ARCHIVE).write_bytes(packed)
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {shlex.quote(sys.executable)} "$@"; fi\n'
        'printf "%s\\n" "$@" >"$RUN/words"\n'
    )
    python.chmod(0o755)
    places = {
        script.ARCHIVE_DIR: tmp_path / "config",
        script.UNPACKED_DIR: tmp_path / "script",
        "/etc/oeprov": tmp_path / "etc",
        "/run/oeprov": tmp_path / "run",
    }
    shell = container["command"][2]
    for old, new in places.items():
        shell = shell.replace(f"{old}/", f"{new}/").replace(f" {old}\n", f" {new}\n")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RUN": str(tmp_path / "job")}

    def start() -> subprocess.CompletedProcess[str]:
        argv = ["/bin/sh", "-ec", shell, "worker", *container["args"]]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    assert start().returncode == 0
    words = (tmp_path / "job" / "words").read_text().splitlines()
    assert words == ["-m", "oe_runtime.train", "--resume", *container["args"]]
    assert words[-3:] == ["--", "--epochs", "3"]
    left = sorted(str(path.relative_to(tmp_path / "script")) for path in (tmp_path / "script").rglob("*.*"))
    assert left == [".oeprovignore", "parts/layers.py", "train.py"]

    (tmp_path / "config" / script.ARCHIVE).write_bytes(packed[:100])
    done = start()
    assert done.returncode == 1
    assert done.stderr.startswith("error: the training script cannot be unpacked in ")


def test_a_worker_has_its_pod_and_its_gpus_to_itself(tmp_path: Path, program: Path) -> None:
    def environment(variables: str) -> dict[str, str]:
        (container,) = templates(built(tmp_path, program, variables))[0]["containers"]
        return {item["name"]: item.get("value", "") for item in container["env"]}

    found = environment("kubernetes_workers: 2, kubernetes_worker_gpus: 1")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert found["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in environment("")
    assert environment("training_device: cpu, kubernetes_worker_gpus: 1")["CUDA_VISIBLE_DEVICES"] == "-1"
    launcher = templates(built(tmp_path, program, "kubernetes_form: mpijob"))[0]["containers"][0]
    passed = {item["name"]: item["value"] for item in launcher["env"]}["PASSED"]
    assert "-x LOCAL_RANK -x LOCAL_WORLD_SIZE" in passed


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("", ""),
        ("kubernetes_worker_gpus: 1", ""),
        ("kubernetes_worker_gpus: 4, training_device: cpu", ""),
        (
            "kubernetes_worker_gpus: 4, kubernetes_workers: 2",
            "each worker is one pod with 4 GPUs, all of which its script sees; for one worker per GPU: "
            "kubernetes_worker_gpus: 1 and kubernetes_workers: 8",
        ),
    ],
)
def test_the_plan_says_what_travels_and_who_has_which_gpus(
    tmp_path: Path, program: Path, variables: str, words: str
) -> None:
    first, *others = planned(tmp_path, program, variables).notes
    assert first.startswith("script: train.py with its directory, 3 files (")
    assert first.endswith(" travels in a ConfigMap")
    assert words in "".join(others)
    assert bool(others) == bool(words)


def test_one_in_the_claim_is_run_there(tmp_path: Path) -> None:
    found = built(tmp_path, Path("/shared/mine/train.py"))
    assert "ConfigMap" not in found
    (container,) = templates(found)[0]["containers"]
    assert container["args"][:2] == ["--script", "/shared/mine/train.py"]
    assert "tarfile" not in container["command"][2]
    (note,) = planned(tmp_path, Path("/shared/mine/train.py")).notes
    assert note == "script: /shared/mine/train.py is run where it lies in claim deeprec"


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ("", {"data": "/srv/clicks"}, "--data: /srv/clicks: pods see only what lies in claim deeprec"),
        ("", {"script": "/srv/none.py"}, "--script: there is no file /srv/none.py on this machine"),
        ("training_device: gpu", {}, "training_device: gpu, but kubernetes_worker_gpus is 0"),
        ("training_dim: 8", {}, "training_dim: with script"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, program: Path, variables: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TrainingError) as caught:
        settled(tmp_path, variables, **{"script": str(program), **options})
    assert words in str(caught.value)


def test_data_are_any_word_that_the_script_knows(tmp_path: Path, program: Path) -> None:
    for data in ("", "s3://clicks/day", "generate:nothing"):
        found = settled(tmp_path, f"training_data: '{data}'", script=str(program))
        assert found.request.training.data == data


def test_evaluation_data_lie_in_the_claim(tmp_path: Path) -> None:
    for data in ("/shared/eval.tsv", "0.05", "s3://clicks/eval"):
        assert settled(tmp_path, eval_data=data)
    with pytest.raises(
        TrainingError, match=r"^--eval-data: /srv/eval\.tsv: pods see only what lies in claim"
    ):
        settled(tmp_path, eval_data="/srv/eval.tsv")


def test_packages_come_with_the_image(tmp_path: Path, program: Path) -> None:
    (program.parent / "requirements.txt").write_text("lightgbm\n")
    with pytest.raises(TrainingError) as caught:
        planned(tmp_path, program)
    assert "requirements.txt asks for packages, which come with the image there" in str(caught.value)
    assert "build an image with them (kubernetes_worker_image) and name the file in" in str(caught.value)
    (program.parent / ".oeprovignore").write_text("requirements.txt\n")
    assert planned(tmp_path, program)


def test_a_directory_that_no_object_takes_is_refused(tmp_path: Path, program: Path) -> None:
    (program.parent / "rows.bin").write_bytes(os.urandom(script.MOST_BYTES))
    with pytest.raises(TrainingError) as caught:
        planned(tmp_path, program)
    said = str(caught.value)
    assert "at most 921.6 kB fit into a ConfigMap; the largest files: rows.bin (921.6 kB), " in said
    assert "copy the directory below /shared of the claim" in said
    (program.parent / "rows.bin").write_bytes(os.urandom(script.MOST_BYTES - 4096))
    config = built(tmp_path, program)["ConfigMap"]
    assert sum(len(base64.b64decode(item)) for item in config["binaryData"].values()) < 1 << 20


def test_the_head_says_how_a_large_object_is_applied(tmp_path: Path, program: Path) -> None:
    def head() -> str:
        found = planned(tmp_path, program)
        return manifests.render(found, manifests.build(found)).partition("\n")[0]

    assert head().endswith("kubectl apply -f FILE")
    (program.parent / "rows.bin").write_bytes(os.urandom(256 << 10))
    assert head().endswith("kubectl apply --server-side -f FILE")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train.py", "train"),
        ("Train_Me-2.py", "train-me-2"),
        ("2towers.py", "job-2towers"),
        ("ж.py", "script"),
    ],
)
def test_the_default_name_is_one_of_services(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, name: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).touch()
    words = ["-i", str(inventory_file(tmp_path)), "--script", str(tmp_path / "mine" / file)]
    assert cli.run(["manifests", *words, "--", "--epochs", "3"]) == 0
    found = {item["kind"]: item for item in yaml.safe_load_all(capsys.readouterr().out)}
    assert found["StatefulSet"]["metadata"]["name"] == f"{name}-server"
    assert pod_of(found["Job"])["containers"][0]["args"][-3:] == ["--", "--epochs", "3"]


class TestJobs:
    """On a small API server."""

    @pytest.fixture(autouse=True)
    def _cluster(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("kubernetes")
        monkeypatch.setattr(run, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(follow, "PAUSE_SECONDS", 0.02)
        self.cluster, self.state = FakeCluster(tmp_path), tmp_path / "state"
        monkeypatch.setenv("KUBECONFIG", str(self.cluster.kubeconfig))
        yield
        self.cluster.close()

    def oeprov(self, *words: str) -> int:
        command, *rest = words
        return cli.run([command, "--state-dir", str(self.state), *rest])

    def launch(self, tmp_path: Path, program: Path, *words: str) -> int:
        path = str(inventory_file(tmp_path))
        given = ["-i", path, "--on", "kubernetes", "--script", str(program)]
        return self.oeprov("launch-training", *given, *words)

    def made(self, kind: str) -> Document:
        return next(item for item in self.cluster.objects.values() if item.get("kind") == kind)

    def test_to_its_end(self, tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster.worker = "done"
        assert self.launch(tmp_path, program, "--", "--epochs", "3") == 0
        said = capsys.readouterr().out
        assert "note     script: train.py with its directory, 3 files" in said
        assert "checkpoints and export: /shared/oeprov/train-" in said
        assert "ConfigMap" in self.cluster.posts
        assert self.cluster.kinds() == []

    def test_resume_brings_the_script_as_it_is_now(
        self, tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.launch(tmp_path, program, "--detach", "--", "--epochs", "3") == 0
        first = self.made("ConfigMap")["metadata"]["name"]
        assert self.oeprov("stop") == 0
        assert not [item for item in self.cluster.kinds() if not item.startswith("PersistentVolume")]
        (program.parent / "parts" / "layers.py").write_text("WIDTH = 32\n")
        (program.parent / "more.py").write_text("MORE = 1\n")
        assert self.oeprov("resume", "--detach") == 0
        config = self.made("ConfigMap")
        assert config["metadata"]["name"] != first
        unpacked(config, tmp_path / "out")
        assert (tmp_path / "out" / "parts" / "layers.py").read_text() == "WIDTH = 32\n"
        pod = pod_of(self.made("Job"))
        (volume,) = [item for item in pod["volumes"] if "configMap" in item]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        assert pod["containers"][0]["args"][-3:] == ["--", "--epochs", "3"]
        (job,) = all_jobs(self.state)
        text = (job.directory / record.MANIFESTS).read_text()
        assert text.startswith("# Made by `oeprov manifests` for job train-")
        assert "# Note: script: train.py with its directory, 4 files (" in text
        assert config["metadata"]["name"] in text

        assert self.oeprov("stop") == 0  # what was made last, and nothing else, is deleted
        assert not [item for item in self.cluster.kinds() if not item.startswith("PersistentVolume")]
        assert self.oeprov("resume", "--detach", "--", "--epochs", "5", "$(X)") == 0
        assert pod_of(self.made("Job"))["containers"][0]["args"][-4:] == ["--", "--epochs", "5", "$$(X)"]
        assert self.oeprov("stop") == 0
        capsys.readouterr()
        program.unlink()
        assert self.oeprov("resume") == 1
        assert f"--script: there is no file {program} on this machine" in capsys.readouterr().err
        assert not [item for item in self.cluster.kinds() if not item.startswith("PersistentVolume")]

    def test_a_job_of_an_earlier_version_resumes_with_its_script_as_it_is_now(
        self, tmp_path: Path, program: Path
    ) -> None:
        assert self.launch(tmp_path, program, "--detach", "--", "--epochs", "3") == 0
        assert self.oeprov("stop") == 0
        (job,) = all_jobs(self.state)
        kept = json.loads(job.record_file("kubernetes").read_text())
        del kept["plan"]
        job.record_file("kubernetes").write_text(json.dumps(kept))
        head, dashes, _ = (job.directory / record.MANIFESTS).read_text().partition("---\n")
        program.write_text("print(2)\n")
        assert self.oeprov("resume", "--detach", "--", "--epochs", "5") == 0
        assert pod_of(self.made("Job"))["containers"][0]["args"][-3:] == ["--", "--epochs", "5"]
        text = (job.directory / record.MANIFESTS).read_text()
        assert text.startswith(head + dashes)
        assert self.made("ConfigMap")["metadata"]["name"] in text

    def test_arguments_of_a_built_in_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = str(inventory_file(tmp_path))
        assert self.oeprov("launch-training", "-i", path, "--on", "kubernetes", "--detach") == 0
        assert self.oeprov("stop") == 0
        assert self.oeprov("resume", "--", "--epochs", "5") == 1
        assert "trains a built-in model, which takes none" in capsys.readouterr().err

    def test_a_right_that_is_missing_is_said_before_anything_is_made(
        self, tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.cluster.denied = {("create", "configmaps")}
        assert self.launch(tmp_path, program) == 1
        assert "to create configmaps; nothing was made" in capsys.readouterr().err
        assert self.cluster.posts == []
        assert list(jobs_dir(self.state).iterdir()) == []
