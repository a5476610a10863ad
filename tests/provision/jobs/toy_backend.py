"""A backend of jobs in one file, as CONTRIBUTING says: it trains at once, by writing what a trainer would."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.jobs import observing, store
from provision.jobs.holding import Holding
from provision.jobs.request import LaunchOptions, ScaleOptions, ServeOptions
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job

FILE = "toy.json"
STAYS = False


def _write(job: Job, phase: str, steps: int) -> None:
    store.write_json(job.directory / FILE, {"phase": phase, "steps": steps})


def _read(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.directory / FILE).read_text())
    return found


def start(inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``."""
    job = store.create(state_dir, options.run_name or "toy", datetime.now())
    _write(job, "running", options.settings.get("steps") or 1)
    screen.console.print(f"{job.id} runs on {', '.join(inventory.workers)}")
    return 0


def resume(
    job: Job,
    inventory: Callable[[], Inventory],
    options: LaunchOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``."""
    del inventory, state_dir, screen
    _write(job, "running", options.settings.get("steps") or _read(job)["steps"])
    return 0


def is_running(job: Job) -> bool:
    """See ``Backend``."""
    return bool(_read(job)["phase"] == "running")


def observe(job: Job) -> dict[str, Any]:
    """See ``Backend``: the keys of a report are those of jobs on hosts."""
    found = _read(job)
    own = {"job": job.id, "state": found["phase"], "message": "a toy", "directory": str(job.directory)}
    return {**observing.UNREADABLE, **own, "step": found["steps"], "steps": found["steps"]}


def stop(job: Job, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``."""
    del state_dir, screen
    _write(job, "interrupted", _read(job)["steps"])
    return 0


def scale(
    job: Job,
    inventory: Callable[[], Inventory],
    options: ScaleOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``."""
    del inventory, options, state_dir, screen
    raise TrainingError(f"job {job.id} has no servers: it is a toy")


def logs(job: Job, *, process: str | None, follow: bool, lines: int) -> int:
    """See ``Backend``."""
    del process, follow, lines
    print(f"step {_read(job)['steps']}")
    return 0


def fetch(job: Job, *, checkpoints: bool, replace: bool) -> int:
    """See ``Backend``."""
    del checkpoints, replace
    raise TrainingError(f"job {job.id} has no results: it is a toy")


def serve(job: Job, options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """See ``Backend``."""
    del options, state_dir, screen
    raise TrainingError(f"job {job.id} cannot be served: it is a toy")


def roll_back(job: Job, step: int | None, *, newest: bool, screen: JobScreen) -> int | None:
    """See ``Backend``."""
    del step, newest, screen
    raise TrainingError(f"job {job.id} has no replicas: it is a toy")


def manifests(job: Job, options: ServeOptions) -> str:
    """See ``Backend``."""
    del options
    raise TrainingError(f"job {job.id} has no manifests: it is a toy")


def results(job: Job) -> str:
    """See ``Backend``."""
    return f"the toy of {job.id}"


def holding(job: Job, size: int) -> Holding:
    """See ``Backend``."""
    return Holding(job, _read(job)["phase"], bytes=size)


def remove(item: Holding, *, here_only: bool) -> None:
    """See ``Backend``."""
