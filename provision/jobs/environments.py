"""Environments with the packages of scripts on this machine: their jobs, and the removal of unused ones.

A launch makes a missing one again, so they may go at any time that no job needs them. Hosts clean their own.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.node import environments

LAUNCH_SECONDS = 3600.0  # a younger one may be of a launch that has not written its job yet


@dataclass(frozen=True)
class Environment:
    """One environment, and the ids of the jobs whose workers run in it."""

    path: Path
    jobs: Collection[str]


def directory(state_dir: Path) -> Path:
    """Where they lie."""
    return state_dir.absolute() / "environments"


def found(state_dir: Path) -> list[Environment]:
    """All of them here, with the jobs that name them; empty without a script that asked for packages."""
    paths = [path for path in sorted(directory(state_dir).glob("*")) if path.is_dir() and path.suffix != ".d"]
    users: dict[str, list[str]] = {}
    for job in store.directories(state_dir) if paths else ():
        with suppress(TrainingError):
            for program in {process.argv[0] for process in job.spec().processes if process.argv}:
                users.setdefault(program, []).append(job.id)
    return [Environment(path, users.get(f"{path}/bin/python", ())) for path in paths]


def remove_unused(state_dir: Path) -> list[Path]:
    """Remove those that no job names; return their paths. A launch that is making one keeps all."""
    unused = [item.path for item in found(state_dir) if not item.jobs]
    old = [path for path in unused if time.time() - path.stat().st_mtime > LAUNCH_SECONDS]
    if not old:
        return []
    with (directory(state_dir) / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return []
        for path in old:
            with suppress(OSError):
                path.unlink()  # of one that an earlier version made, a directory
            for made in (path, environments.folder(str(path))):
                shutil.rmtree(made, ignore_errors=True)
    return [path for path in old if not path.exists()]
