"""What a job holds: its state, the space that it takes, and what would be lost with it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from provision.jobs import store
from provision.jobs.backends import units
from provision.jobs.store import Job, JobSpec


@dataclass
class Holding:
    """One job with the space it takes and what would be lost with it."""

    job: Job
    state: str
    running: bool = False  # it runs, or may still run
    problem: str = ""  # why its files cannot be read
    denied: bool = False  # it is another user's
    bytes: int = 0  # of its directory here
    spec: JobSpec | None = None
    pools: list[tuple[Path, int]] = field(default_factory=list)  # of servers here, with their bytes
    step: int | None = None
    steps: int | None = None
    checkpoint: int | None = None
    claims: list[str] = field(default_factory=list)  # volumes on a cluster of a job that can resume
    left: list[str] = field(default_factory=list)  # where servers left rows that no checkpoint tells of
    stays: list[str] = field(default_factory=list)  # what its removal leaves elsewhere, one line each

    @property
    def changed(self) -> float:
        """When it was last started or ended, in seconds since 1970."""
        record = self.job.record_file(self.job.place)
        return max(map(store.modified, (record, self.job.state_file, self.job.directory))) / 1e9

    @property
    def total(self) -> int:
        """Bytes on this machine."""
        return self.bytes + sum(size for _, size in self.pools)

    @property
    def on_hosts(self) -> dict[str, list[str]]:
        """Its directories by host; those of pools may no longer exist."""
        found: dict[str, list[str]] = {}
        for item in self.spec.units if self.spec else []:
            places = [str(units.job_directory(self.job.id))] if item.role == "worker" else []
            places += [item.pools] if item.pools else []
            known = found.setdefault(item.host, [])
            known += [place for place in places if place not in known]
        return {host: places for host, places in found.items() if places}

    @property
    def only_rows(self) -> str:
        """Where the rows of its newest checkpoint are, if in no file; else empty."""
        if self.claims:
            return f"volumes of its cluster ({', '.join(self.claims)})"
        if self.state == "unreadable" and not self.denied and self.job.pool_servers() is not None:
            return "persistent memory, of which its job.json would say where"
        if self.left:
            return ", ".join(self.left)
        if self.state == "done" or self.checkpoint is None or self.spec is None:
            return ""
        if self.job.checkpoint() is not None and self.job.pool_servers() is None:
            return ""
        places = [f"{path} here" for path, _ in self.pools]
        places += [f"{item.pools} on {item.host}" for item in self.spec.units if item.pools]
        return ", ".join(places)

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {
            "job": self.job.id,
            "name": self.job.name,
            **{name: getattr(self, name) for name in ("state", "problem", "step", "steps", "bytes")},
            "on": self.job.place,
            "started": local_time(self.job.started).isoformat() if self.job.started else None,
            "checkpoint_step": self.checkpoint,
            "pools": [{"path": str(path), "bytes": size} for path, size in self.pools],
            "on_hosts": self.on_hosts,
            "only_rows": self.only_rows,
            "directory": str(self.job.directory),
        }


def local_time(nanoseconds: int) -> datetime:
    """A time in ns since 1970, to the second."""
    return datetime.fromtimestamp(nanoseconds / 1e9).astimezone().replace(microsecond=0)


def disk_bytes(directory: Path) -> int:
    """Bytes of a directory on disk; hard links count once, unreadable files not at all."""
    total, seen, todo = 0, set(), [str(directory)]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                todo.append(entry.path)
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total
