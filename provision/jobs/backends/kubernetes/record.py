"""The files of a job on Kubernetes in ``.oeprov/jobs/JOB/``: its record, manifests and token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.jobs.store import Job, write_json
from provision.node import process
from provision.node.command import replace_file

MANIFESTS = "manifests.yml"
WORK = ("Job", "TFJob", "MPIJob")  # kinds that run workers
Phase = Literal["running", "scaling", "done", "failed", "interrupted"]


class Record(BaseModel):
    """Where a job runs and how it ended; "running" until its end is known."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = 1
    id: str
    created: str
    context: str
    namespace: str
    servers: int
    workers: int
    claim: str
    run: str  # as pods see it
    script: str = ""  # of a job with a script: its path, here or in the claim
    claim_path: str = ""  # where pods mount the claim
    plan: dict[str, Any] = {}  # that its objects were built from; see ``resuming``
    phase: Phase = "running"
    message: str = ""
    scales: int = 0  # how often its objects were made anew while others followed it
    source: str = ""  # of replicas: the job whose model they serve
    model: str = ""  # of replicas: its name in requests
    mark: str = ""  # of replicas: see ``serving.MARK``
    step: str | None = None  # of replicas: that they were told to serve; empty: the newest again
    scaler: tuple[int, int] = (0, 0)  # in phase scaling: pid and start of the command that makes them


def write(job: Job, record: Record) -> None:
    """Write the record atomically."""
    write_json(job.record_file("kubernetes"), record.model_dump(mode="json"))


def read(job: Job) -> Record:
    """The record of a job; TrainingError if it is unusable."""
    file = job.record_file("kubernetes")
    try:
        found = Record.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise TrainingError(store.unreadable(file, error)) from None
    if found.phase == "scaling" and not process.alive(*found.scaler):
        message = f"`oeprov scale` was killed ({found.message}); oeprov stop {job.id} deletes its objects"
        return found.model_copy(update={"phase": "interrupted", "message": message})
    return found


def documents(job: Job) -> list[dict[str, Any]]:
    """The job's objects, without the secret."""
    file = job.directory / MANIFESTS
    try:
        return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise TrainingError(f"{file}: {error}") from None


@contextmanager
def rewritten(job: Job, text: str) -> Iterator[None]:
    """Replace the file of the job's objects atomically; if the block fails, it is as before. Empty: keep it.

    A ``text`` without a head gets that of the file.
    """
    file = job.directory / MANIFESTS
    before = file.read_text(encoding="utf-8")
    lines = [] if text.startswith("#") else before.splitlines(keepends=True)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    try:
        if text:
            replace_file(str(file), (head + text).encode())
        yield
    except BaseException:
        if text:
            replace_file(str(file), before.encode())
        raise


def servers(found: list[dict[str, Any]]) -> int:
    """How many servers the objects have."""
    return sum(int(item["spec"]["replicas"]) for item in found if item["kind"] == "StatefulSet")


def work(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The object that runs the workers."""
    return next(item for item in found if item["kind"] in WORK)


def volume_claims(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims that the StatefulSet makes for its pods, and does not delete."""
    claims = []
    for item in found:
        if item["kind"] != "StatefulSet":
            continue
        for template in item["spec"].get("volumeClaimTemplates", []):
            name, place = template["metadata"]["name"], item["metadata"]
            claims += [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": f"{name}-{place['name']}-{index}", "namespace": place["namespace"]},
                }
                for index in range(item["spec"]["replicas"])
            ]
    return claims
