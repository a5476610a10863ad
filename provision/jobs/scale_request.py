"""The request that a running job go on with other servers: ``scale.json`` of its directory.

The command that asks (``scaling``) plans the processes and writes the file. The job's supervisor answers in
it, and its launcher (``going_on``) starts what was planned. So nobody else plans, and a killed process leaves
a file that says what was under way.
"""

from __future__ import annotations

import signal
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from provision.cluster.errors import TrainingError
from provision.jobs import store
from provision.jobs.store import Job, JobSpec

_FILE = "scale.json"
SIGNAL = signal.SIGUSR1  # to workers: as SIGTERM, with the checkpoint's rows in files
Units = dict[str, list[dict[str, Any]]]  # what hosts start; see ``Fleet.prepare``


class ScaleRequest(BaseModel):
    """What is asked, and the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    phase: Literal["asked", "accepted", "done", "refused", "failed"] = "asked"
    words: str  # what happens, such as "2 servers on a → 3 servers on a, b"
    spec: JobSpec  # the job as it is to go on
    units: Units
    waits: bool = False  # for the first step of a job that was resumed
    message: str = ""  # why not
    seconds: float | None = None  # that training paused, once it goes on

    @property
    def is_open(self) -> bool:
        """Whether it has no final answer yet."""
        return self.phase in ("asked", "accepted")


def modified(job: Job) -> int:
    """When the file was last written; 0 without one."""
    return store.modified(job.directory / _FILE)


def read(job: Job) -> ScaleRequest | None:
    """The newest request; None without one. TrainingError if it cannot be read."""
    path = job.directory / _FILE
    try:
        return ScaleRequest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise TrainingError(store.unreadable(path, error)) from None


def write(job: Job, request: ScaleRequest, **changes: Any) -> ScaleRequest:
    """Write a request, with these changes; returns what was written."""
    changed = request.model_copy(update=changes)
    store.write_json(job.directory / _FILE, changed.model_dump(mode="json"))
    return changed


def remove(job: Job) -> None:
    """Remove the file, if there is one."""
    (job.directory / _FILE).unlink(missing_ok=True)
