"""What is asked of a job: the command line's options, and the inventory's settings under them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host
from provision.cluster.settings import LAUNCH_FLAGS, ServerSettings, WorkerSettings
from provision.cluster.training_settings import TrainingSettings
from provision.inventory.loader import explain
from provision.jobs import units
from provision.jobs.store import JobSpec

_GENERATE = re.compile(r"generate:([1-9]\d*)(:\d+)?")


@dataclass(frozen=True, init=False)
class LaunchOptions:
    """What the command line says.

    ``resume`` is a job id, or "" for the last job; such a run takes all other settings from that job, but may
    have another number of ``servers`` and ``workers``.
    """

    settings: Mapping[str, Any]  # by the flag's name; what is not here is the inventory's
    run_name: str | None = None
    on: str | None = None  # an engine of containers; None: processes
    resume: str | None = None
    detach: bool = False
    as_json: bool = False

    def __init__(self, settings: Mapping[str, Any] = MappingProxyType({}), **words: Any) -> None:
        """Take settings as a mapping, by name, or both."""
        own = {item.name: words.pop(item.name, item.default) for item in fields(self)[1:]}
        found = {name: value for name, value in {**settings, **words}.items() if value is not None}
        if unknown := found.keys() - set(LAUNCH_FLAGS):
            raise TypeError(f"no flags of launch-training: {', '.join(sorted(unknown))}")
        for name, value in {"settings": found, **own}.items():
            object.__setattr__(self, name, value)

    def given(self) -> dict[str, Any]:
        """The options that change what is trained, by name, as far as they were given."""
        own = {"run_name": self.run_name, "on": self.on}
        return {**self.settings, **{name: value for name, value in own.items() if value is not None}}


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
    for name, count, model in (("servers", servers, ServerSettings), ("workers", workers, WorkerSettings)):
        try:
            model.model_validate({} if count is None else {"count": count})
        except ValidationError as error:
            raise TrainingError(f"--{name}: {explain(error.errors()[0])}") from None


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


def is_url(name: str) -> bool:
    """Return whether data lies in an object store, and so on no host."""
    return "://" in name and not name.startswith("file://")


def check_url(flag: str, name: str) -> None:
    """Refuse a URL with credentials, before it is written to a job file; the message does not show it."""
    if is_url(name) and "@" in name.partition("://")[2].partition("/")[0]:
        raise TrainingError(
            f"{flag}: the URL has credentials in it, which would end up in job files and logs; remove them "
            "there and set them up for the user that workers run as (docs/guides/object-stores.md)"
        )


def check_data(data: str, workers: Sequence[Host]) -> None:
    """Refuse data that has no name, or one that hosts cannot know; ``training.data`` looks at the files."""
    if check_generated(data):
        return
    for worker in workers:
        if units.on_host(worker) and not (is_url(data) or Path(data).is_absolute()):
            raise TrainingError(
                f"--data: {data}: the worker reads it on host {worker.name}: give its whole path there"
            )
