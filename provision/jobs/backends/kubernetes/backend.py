"""Jobs on Kubernetes, as ``provision.jobs.backends.Backend`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.jobs.backends.kubernetes import record, replicas, run, serving, view
from provision.jobs.holding import Holding
from provision.jobs.request import LaunchOptions, ScaleOptions, ServeOptions
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job

STAYS = True  # volumes and objects, until `oeprov stop` has deleted them
start = run.launch
logs = view.logs


def observe(job: Job) -> dict[str, Any]:
    """See ``Backend``."""
    return replicas.report(job) if job.served else view.report(job)


def stop(job: Job, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``."""
    end = replicas.stop if job.served else run.stop
    return end(job, state_dir=state_dir, screen=screen)


def manifests(job: Job, options: ServeOptions) -> str:
    """See ``Backend``."""
    _check_trains(job, "serve")
    return serving.text(job, options)


def _check_trains(job: Job, command: str) -> None:
    """TrainingError for replicas, which have no run of their own."""
    if job.served:
        source = record.read(job).source
        raise TrainingError(
            f"{job.id} are replicas that answer requests, which `oeprov {command}` is not for; they serve "
            f"job {source}; to change them, or to start them again: oeprov serve {source}"
        )


def resume(
    job: Job,
    _: Callable[[], Inventory],
    options: LaunchOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``: with the inventory of the launch."""
    _check_trains(job, "resume")
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
    _check_trains(job, "scale")
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
    """See ``Backend``: as pods, which alone read the run."""
    _check_trains(job, "serve")
    return replicas.serve(job, options, state_dir=state_dir, screen=screen)


def roll_back(job: Job, step: int | None, *, newest: bool, screen: JobScreen) -> int | None:
    """See ``Backend``."""
    return replicas.roll_back(job, step, newest=newest, screen=screen)


def results(job: Job) -> str:
    """See ``Backend``."""
    found = record.read(job)
    return f"claim {found.claim}: {found.run}"


def holding(job: Job, size: int) -> Holding:
    """See ``Backend``."""
    found = record.read(job)
    if job.served:
        return Holding(job, found.phase, bytes=size)
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
