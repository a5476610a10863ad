"""The training script of a job on Kubernetes: how its directory comes to the pods, and what they are told.

The directory travels as one packed archive in a ConfigMap, and each worker unpacks a copy of its own. A
script below the claim's path is run where it lies. See docs/design/decisions/scripts-in-config-maps.md.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from rich.filesize import decimal

from provision.cluster.errors import TrainingError
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.training_settings import TrainingSettings
from provision.jobs import gpus, script, script_files, script_packages
from provision.jobs.script_files import ScriptFiles
from provision.jobs.store import LOCAL_RANK, LOCAL_WORLD_SIZE

ARCHIVE = "script.tar.gz"  # the key of the ConfigMap
ARCHIVE_DIR = "/etc/oeprov-script"  # in pods: where it is mounted
UNPACKED_DIR = "/tmp/script"  # noqa: S108 - in a volume of the pod's own
CONTENT = "oeprov/script"  # an annotation
MOST_BYTES = 900 << 10  # packed: a ConfigMap takes 1 MiB
APPLIED_BYTES = 180 << 10  # packed: `kubectl apply` keeps an object in an annotation of at most 256 KiB
_NAME_LENGTH = 30  # the time of the launch comes after it

# Debian 12's Python has no filters yet. What is unpacked is what this program has packed.
_UNPACK_PROGRAM = """\
import sys, tarfile
try:
    with tarfile.open(sys.argv[1]) as packed:
        packed.extractall(sys.argv[2], **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
except (OSError, EOFError, tarfile.TarError) as error:
    sys.exit(f"error: the training script cannot be unpacked in {sys.argv[2]}: {error}")
"""
# A container that starts again in its pod finds what the last run has written there.
UNPACK = f"""\
rm -rf {UNPACKED_DIR}
python -c '{_UNPACK_PROGRAM}' {ARCHIVE_DIR}/{ARCHIVE} {UNPACKED_DIR}
"""


@dataclass(frozen=True)
class PodScript:
    """A script as pods run it; ``files`` are None where it lies in the claim."""

    path: PurePosixPath  # as pods see it
    files: ScriptFiles | None = None

    @cached_property
    def packed(self) -> bytes:
        """The archive of its directory, the same for the same content."""
        return gzip.compress(self.files.archive, 9, mtime=0) if self.files is not None else b""

    @property
    def name(self) -> str:
        """The end of the ConfigMap's name; empty where there is none. It names the content."""
        return f"script-{self.files.digest[:12]}" if self.files is not None else ""

    @property
    def content(self) -> str:
        """What the ConfigMap holds, in words."""
        if self.files is None:
            return ""
        count = len(self.files.entries)
        sizes = f"{decimal(self.files.size)}, packed {decimal(len(self.packed))}"
        return f"{self.path.name} with its directory, {count} file{'s' * (count > 1)} ({sizes})"

    def data(self) -> dict[str, str]:
        """The ConfigMap's ``binaryData``."""
        return {ARCHIVE: base64.b64encode(self.packed).decode()}


def settle(training: TrainingSettings, settings: KubernetesSettings) -> PodScript | None:
    """The job's script; None for a built-in model. TrainingError names what cannot be."""
    if not training.script:
        return None
    if training.device == "gpu" and not settings.worker_gpus:
        raise TrainingError("training_device: gpu, but kubernetes_worker_gpus is 0; set it, or use auto")
    return found(training.script, settings.claim_path)


def found(name: str, claim_path: str) -> PodScript:
    """The script of that path; TrainingError for a directory that is too large or asks for packages."""
    if PurePosixPath(claim_path) in PurePosixPath(name).parents:
        return PodScript(PurePosixPath(name))
    path = Path(name)
    if not path.is_file():
        raise TrainingError(f"--script: there is no file {path} on this machine")
    script_packages.check_image(path.parent, "kubernetes", "kubernetes_worker_image")
    files = script_files.collect(path)
    pods = PodScript(PurePosixPath(UNPACKED_DIR) / path.name, files)
    if len(pods.packed) > MOST_BYTES:
        raise TrainingError(
            f"--script: {path.parent} has {decimal(files.size)}, packed {decimal(len(pods.packed))}, and at "
            f"most {decimal(MOST_BYTES)} fit into a ConfigMap; the largest files: {files.largest()}; name "
            f"what the script does not need in {path.parent / script_files.IGNORE}, or copy the directory "
            f"below {claim_path} of the claim and give its path there (--script {claim_path}/…)"
        )
    return pods


def job_name(training: TrainingSettings) -> str:
    """The name of a job that got none, as names of services are."""
    name = re.sub(r"[^a-z0-9]+", "-", script.job_name(training).lower())[:_NAME_LENGTH].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def words(arguments: Sequence[str]) -> list[str]:
    """The end of a worker's arguments: the script's own, in which Kubernetes replaces nothing."""
    return ["--", *(word.replace("$", "$$") for word in arguments)] if arguments else []


def environment(training: TrainingSettings, settings: KubernetesSettings) -> dict[str, str]:
    """What a worker of a script is told, which has its pod to itself."""
    return {LOCAL_RANK: "0", LOCAL_WORLD_SIZE: "1", **gpus.alone(training, settings.worker_gpus)}


def notes(pods: PodScript | None, training: TrainingSettings, settings: KubernetesSettings) -> list[str]:
    """What the plan says of a script: where its files are, and who has which GPUs."""
    if pods is None:
        return []
    lines = [f"script: {pods.content} travels in a ConfigMap"]
    if pods.files is None:
        lines = [f"script: {pods.path} is run where it lies in claim {settings.claim}"]
    if settings.worker_gpus > 1 and training.device != "cpu":
        lines.append(
            f"GPUs: each worker is one pod with {settings.worker_gpus} GPUs, all of which its script sees; "
            f"for one worker per GPU: kubernetes_worker_gpus: 1 and kubernetes_workers: "
            f"{settings.workers * settings.worker_gpus}"
        )
    return lines


def renewed(
    documents: list[dict[str, Any]], pods: PodScript, arguments: Sequence[str] | None
) -> list[dict[str, Any]]:
    """A job's objects with its script as it is now, and with other arguments where they were given."""
    old = next((item["metadata"]["name"] for item in documents if item["kind"] == "ConfigMap"), "")
    new = f"{old.rpartition('script-')[0]}{pods.name}"

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("kind") == "ConfigMap":
            head = {**value["metadata"], "name": new, "annotations": {CONTENT: pods.content}}
            return {**value, "metadata": head, "binaryData": pods.data()}
        changed = {key: replaced(item) for key, item in value.items()}
        if "configMap" in changed:
            changed["configMap"] = {**changed["configMap"], "name": new}
        if arguments is not None and "--script" in changed.get("args", []):
            own = changed["args"]
            changed["args"] = [*(own[: own.index("--")] if "--" in own else own), *words(arguments)]
        return changed

    return [replaced(item) for item in documents]
