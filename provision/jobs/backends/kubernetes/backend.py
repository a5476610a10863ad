"""Jobs on Kubernetes, as ``provision.jobs.backends.Backend`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.jobs.backends.kubernetes import record, run, serving, view
from provision.jobs.holding import Holding
from provision.jobs.request import LaunchOptions, ScaleOptions, ServeOptions
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job

STAYS = True  # volumes and objects, until `oeprov stop` has deleted them
start = run.launch
stop = run.stop
observe = view.report
logs = view.logs
manifests = serving.text


def resume(
    job: Job,
    _: Callable[[], Inventory],
    options: LaunchOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``: with the inventory of the launch."""
    return run.resume(job, options, state_dir=state_dir, screen=screen)


def scale(
    job: Job,
    _: Callable[[], Inventory],
    options: ScaleOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``."""
    return run.scale(job, options, state_dir=state_dir, screen=screen)


def is_running(job: Job) -> bool:
    """See ``Backend``, as far as is known here: no cluster is asked."""
    return record.read(job).phase in ("running", "scaling")


def fetch(job: Job, *, checkpoints: bool, replace: bool) -> int:
    """See ``Backend``: nothing here reads a claim."""
    del checkpoints, replace
    raise TrainingError(
        f"job {job.id} has its results in {results(job)}: a claim is read by pods, or where its volume is "
        "mounted"
    )


def serve(job: Job, options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """See ``Backend``: only pods read the run, and their objects are applied by hand."""
    del options, state_dir, screen
    raise TrainingError(
        f"job {job.id} has its run in {results(job)}, which only pods read; for replicas there: oeprov serve "
        f"{job.id} --print | kubectl apply -f -"
    )


def results(job: Job) -> str:
    """See ``Backend``."""
    found = record.read(job)
    return f"claim {found.claim}: {found.run}"


def holding(job: Job, size: int) -> Holding:
    """See ``Backend``."""
    found = record.read(job)
    claims = [] if found.phase == "done" else _claims(job)
    stays = [f"its run stays in {results(job)}"]
    if claims:
        stays.append(f"its volumes stay in namespace {found.namespace}: {', '.join(claims)}")
    return Holding(job, found.phase, bytes=size, claims=claims, stays=stays)


def remove(item: Holding, *, here_only: bool) -> None:
    """See ``Backend``: claims stay, as ``holding`` says; nothing else is left of a job that has ended."""


def _claims(job: Job) -> list[str]:
    try:
        return [str(item["metadata"]["name"]) for item in record.volume_claims(record.documents(job))]
    except (TrainingError, KeyError, TypeError):
        return []
