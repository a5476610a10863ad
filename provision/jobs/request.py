"""What is asked of a job: the command line's options, and the inventory's settings under them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host
from provision.cluster.training_settings import TrainingSettings
from provision.jobs import units
from provision.jobs.store import JobSpec

_GENERATE = re.compile(r"generate:([1-9]\d*)(:\d+)?")
STEADY = ("resume", "detach", "as_json")  # options that do not change what is trained


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says; None leaves the inventory's value.

    ``resume`` is a job id, or "" for the last job; such a run takes all other settings from that job, but may
    have another number of ``servers`` and ``workers``.
    """

    model: str | None = None
    data: str | None = None
    dim: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    seed: int | None = None
    max_cardinality: int | None = None
    checkpoint_steps: int | None = None
    micro_batch: int | None = None
    pipeline: bool | None = None
    workqueue: bool | None = None
    staleness: int | None = None
    on_worker_lost: str | None = None
    export: bool | None = None
    storage: str | None = None
    storage_cache: str | None = None
    servers: int | None = None
    workers: int | None = None
    run_name: str | None = None
    on: str | None = None  # an engine of containers; None: processes
    resume: str | None = None
    detach: bool = False
    as_json: bool = False

    def given(self) -> dict[str, Any]:
        """The options that change what is trained, by name, as far as they were given."""
        names = [item.name for item in fields(self) if item.name not in STEADY]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def flag(name: str) -> str:
    """The command-line flag of an option or setting."""
    return "--name" if name == "run_name" else "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Request:
    """What is to be trained and with which servers: the inventory's settings under the options."""

    training: TrainingSettings
    storage: str  # empty: what each host says
    storage_cache: int  # bytes; 0: what each host says
    servers: int  # on each host; 0: as many as it says
    workers: int  # the same of them
    name: str
    on: str = ""  # an engine of containers; empty: processes

    def settings(self) -> dict[str, Any]:
        """For the job file."""
        own: dict[str, Any] = {
            "storage": self.storage,
            "storage_cache": self.storage_cache,
            "servers": self.servers,
            "workers": self.workers,
        }
        if self.on:
            own["on"] = self.on
        return {**self.training.model_dump(mode="json"), **own}

    @classmethod
    def of_job(cls, spec: JobSpec) -> Request:
        """What a job was made from."""
        values = dict(spec.settings)
        try:
            storage, servers = str(values.pop("storage")), int(values.pop("servers"))
            cache = int(values.pop("storage_cache", 0))  # jobs of earlier versions have none
            workers, on = int(values.pop("workers", 0)), str(values.pop("on", ""))
            return cls(TrainingSettings.model_validate(values), storage, cache, servers, workers, spec.id, on)
        except (KeyError, ValueError) as error:
            raise TrainingError(f"job {spec.id}: its job.json has unusable settings: {error}") from None


def check_counts(servers: int | None, workers: int | None) -> None:
    """Refuse numbers of servers and workers on each host that cannot be."""
    for name, count in (("servers", servers), ("workers", workers)):
        if count is not None and not 1 <= count <= 64:
            raise TrainingError(f"--{name}: found {count}; expected a number from 1 to 64")


def check_generated(data: str) -> bool:
    """Whether rows are generated; refuses none at all, and a wrong number of generated ones."""
    if not data:
        raise TrainingError(
            "no data to train on: give --data FILE (Criteo TSV), --data generate:ROWS, "
            "or set training_data in the inventory"
        )
    if data.startswith("generate:"):
        if not _GENERATE.fullmatch(data):
            raise TrainingError(f"--data: found {data!r}; expected generate:ROWS or generate:ROWS:SEED")
        return True
    return False


def check_data(data: str, workers: Sequence[Host]) -> None:
    """Refuse data that has no name, or one that hosts cannot know; ``training.data`` looks at the files."""
    if check_generated(data):
        return
    for worker in workers:
        if units.on_host(worker) and not Path(data).is_absolute():
            raise TrainingError(
                f"--data: {data}: the worker reads it on host {worker.name}: give its whole path there"
            )
