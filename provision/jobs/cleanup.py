"""What ``oeprov jobs`` removes: the disk space of jobs, which of them are old, and the removal of one.

Listing asks no host and no cluster. Removal takes a job's directory, its rows in persistent memory and what
it has on its hosts; a job is refused while anything of it may still run.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.hosts.journal import cluster_lock
from provision.jobs.backends import registry
from provision.jobs.holding import Holding, disk_bytes
from provision.jobs.store import Job

INCOMPLETE = "incomplete"  # a directory without job.json
ENDED = ("done", "failed", "interrupted", "unreadable", INCOMPLETE)
_LAUNCH_SECONDS = 3600.0  # a younger directory without job.json may be a launch in progress


def holding(job: Job) -> Holding:
    """What a job holds, from its files; never raises for what is in them."""
    size = disk_bytes(job.directory)
    if job.broken:
        denied = not os.access(job.directory, os.R_OK | os.X_OK)
        state = "unreadable" if denied else INCOMPLETE
        return Holding(job, state, bytes=size, problem=job.broken, denied=denied)
    backend, running = registry.backend_of(job), False
    try:
        running = backend.is_running(job)
        return replace(backend.holding(job, size), running=running)
    except TrainingError as error:
        return Holding(job, "unreadable", running=running, problem=str(error), bytes=size)


def select(
    found: Iterable[Holding], *, states: Collection[str], older_than: float, keep: int
) -> list[Holding]:
    """The jobs that ``prune`` removes, oldest first: not running, in one of ``states``.

    No ``states``: all but "unreadable" and "incomplete". ``older_than``: seconds since they were started or
    ended. ``keep``: the number of newest jobs that stay.
    """
    now = time.time()
    mine = [item for item in found if not item.running and not item.denied]
    wanted = states or [state for state in ENDED if state not in ("unreadable", INCOMPLETE)]
    ended = [item for item in mine if item.state in wanted]
    least = {INCOMPLETE: max(older_than, _LAUNCH_SECONDS)}
    return [
        item
        for item in ended[: max(0, len(ended) - keep)]
        if now - item.changed >= least.get(item.state, older_than)
    ]


def remove(item: Holding, state_dir: Path, *, here_only: bool) -> None:
    """Remove a job, on its hosts first: if one does not answer, the job stays and can be removed later."""
    with (
        cluster_lock(state_dir, item.spec.cluster) if item.spec else nullcontext()
    ):  # nobody may resume it now
        if not item.job.broken:
            registry.backend_of(item.job).remove(item, here_only=here_only)
        _remove_directory(item.job)


def _remove_directory(job: Job) -> None:
    if job.directory.is_symlink():
        raise TrainingError(f"{job.directory} is a link; remove it and what it points to yourself")
    # First the file that makes it a job: the rest must not look like a whole one.
    job.record_file(job.place).unlink(missing_ok=True)
    shutil.rmtree(job.directory)
