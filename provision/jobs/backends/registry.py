"""The backend of a job, or of the word after ``--on``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.jobs.backends import Backend
from provision.jobs.backends.containers import ENGINES
from provision.jobs.store import Job

PLACES = ("hosts", "kubernetes", *ENGINES)  # that --on names; engines run processes of hosts in containers


def named(place: str) -> Backend:
    """The backend of one of ``PLACES``."""
    if place == "kubernetes":
        from provision.jobs.backends.kubernetes import backend

        return backend
    from provision.jobs.backends import hosts

    return hosts


def backend_of(job: Job) -> Backend:
    """The backend that a job runs on."""
    return named("kubernetes" if job.on_kubernetes else "hosts")


def asked(known: list[Job], most: int) -> list[Job]:
    """The last of the jobs that are asked about where they run although they may have ended, oldest first."""
    return [job for job in known if backend_of(job).STAYS][-most:]


def find_running(state_dir: Path, name: str | None) -> Job:
    """The job to stop: the named one, or the last that runs, or the last if something of it may be left."""
    if name is not None:
        return store.find(state_dir, name)
    known = store.directories(state_dir)
    for job in reversed(known):
        with contextlib.suppress(TrainingError):  # `status` says what is wrong with it
            if backend_of(job).is_running(job):
                return job
    if known and backend_of(known[-1]).STAYS:
        return known[-1]
    raise TrainingError(f"no job is running in {store.jobs_dir(state_dir)}")
