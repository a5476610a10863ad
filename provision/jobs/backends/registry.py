"""The backend of a job, or of the word after ``--on``."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path
from typing import cast

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.jobs.backends import Backend
from provision.jobs.backends.containers import ENGINES
from provision.jobs.store import BACKENDS, Job


def places() -> tuple[str, ...]:
    """What --on names; engines run processes of hosts in containers."""
    return (*BACKENDS, *ENGINES)


def named(place: str) -> Backend:
    """The backend of one of ``places``."""
    return cast(Backend, import_module(BACKENDS["hosts" if place in ENGINES else place][1]))


def backend_of(job: Job) -> Backend:
    """The backend that a job runs on."""
    return named(job.place)


def split(known: list[Job], most: int) -> tuple[list[Job], list[Job]]:
    """The jobs of which files here tell, and the last of those that are asked about where they run, even if
    they have ended; each oldest first.
    """
    there = [job for job in known if backend_of(job).STAYS]
    return [job for job in known if job not in there], there[-most:]


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
