"""The request of a job: the inventory's settings, overridden by the command line's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from provision.cluster.errors import TrainingError, did_you_mean
from provision.cluster.inventory import Host
from provision.cluster.setting_types import explain
from provision.cluster.settings import LAUNCH_FLAGS, ServerSettings, WorkerSettings
from provision.cluster.training_settings import MODEL_SETTINGS, TrainingSettings
from provision.jobs.store import JobSpec

_GENERATE = re.compile(r"generate:([1-9]\d*)(:\d+)?")


@dataclass(frozen=True, init=False)
class LaunchOptions:
    """The options of ``launch-training`` and ``resume``.

    ``resume`` is a job id, or "" for the last job. A resumed job keeps its settings, but ``servers``,
    ``workers``, ``epochs`` and ``steps`` may change.
    """

    settings: Mapping[str, Any]  # by the flag's name; the inventory has the others
    run_name: str | None = None
    on: str | None = None  # an engine of containers; None: processes
    script_arguments: Sequence[str] | None = None  # None: the inventory's, or those of the job
    resume: str | None = None
    consent: Sequence[str] = ()  # ids of jobs whose rows in persistent memory may be lost
    detach: bool = False

    def __init__(self, settings: Mapping[str, Any] = MappingProxyType({}), **words: Any) -> None:
        """Take settings as a mapping, by name, or both."""
        own = {item.name: words.pop(item.name, item.default) for item in fields(self)[1:]}
        found = {name: value for name, value in {**settings, **words}.items() if value is not None}
        if unknown := found.keys() - set(LAUNCH_FLAGS):
            raise TypeError(f"no flags of launch-training: {', '.join(sorted(unknown))}")
        for name, value in {"settings": found, **own}.items():
            object.__setattr__(self, name, value)

    def given(self) -> dict[str, Any]:
        """The given options that change what is trained, by name."""
        own = {"run_name": self.run_name, "on": self.on, "script_arguments": self.script_arguments}
        return {**self.settings, **{name: value for name, value in own.items() if value is not None}}


@dataclass(frozen=True)
class ScaleOptions:
    """What is asked of a running job's servers."""

    confirm: Callable[[str], bool]  # asks the user; TrainingError where that is impossible
    servers: int | None = None  # in all; None: as many as now
    without: str = ""  # a host that the job is to leave


@dataclass(frozen=True)
class ServeOptions:
    """What is asked of replicas; ``model`` and ``rows`` are directories, URLs or jobs."""

    model: str | None = None  # None: the last job's
    rows: str | None = None
    replicas: int = 1
    name: str | None = None  # in requests, and of the job
    host: str = "127.0.0.1"
    port: int = 8501  # of the first one; 0: any
    grpc_port: int | None = None
    start_timeout: int = 600
    files: Mapping[str, str] = field(default_factory=dict)  # of each process, by its flag's name
    arguments: Sequence[str] = ()  # likewise, as they are
    confirm: Callable[[str], bool] | None = None  # asks the user before replicas that run are changed

    def with_paths(self, *, here: bool) -> ServeOptions:
        """Turn the files into arguments, for processes on this machine or elsewhere. Raises TrainingError."""
        words = []
        for name, value in self.files.items():
            path = Path(value)
            if not here and not path.is_absolute():
                raise TrainingError(
                    f"{flag(name)} {value}: the replicas run elsewhere; name the whole path that it has there"
                )
            words += [flag(name), str(path.expanduser().absolute() if here else path)]
        return replace(self, files={}, arguments=(*words, *self.arguments))


def scheme(arguments: Sequence[str]) -> str:
    """How replicas with these arguments are asked: http or https."""
    return "https" if any(word.partition("=")[0] == "--tls-cert" for word in arguments) else "http"


def flag(name: str) -> str:
    """The command-line flag of an option or setting."""
    if name == "script_arguments":
        return "arguments after --"
    return "--name" if name == "run_name" else "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Request:
    """What is trained and with how many servers: the inventory's settings, overridden by the options."""

    training: TrainingSettings
    storage: str  # empty: as the inventory says of each host
    storage_cache: int  # bytes; 0: as the inventory says of each host
    servers: int  # per host; 0: as its inventory says
    workers: int  # per host; 0: as its inventory says
    name: str
    on: str = ""  # an engine of containers; empty: processes
    total_servers: int = 0  # in all, spread over the hosts, as `oeprov scale` says; 0: ``servers`` per host

    def settings(self) -> dict[str, Any]:
        """For the job file."""
        names = ("storage", "storage_cache", "servers", "workers", *(["on"] if self.on else []))
        names += ("total_servers",) if self.total_servers else ()
        # Of a job with a script, what the script decides is not known here.
        unknown = set(MODEL_SETTINGS if self.training.script else ("script", "script_arguments"))
        settings = self.training.model_dump(mode="json", exclude=unknown)
        return {**settings, **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_job(cls, spec: JobSpec) -> Request:
        """What a job was made from."""
        values = dict(spec.settings)
        try:
            storage, servers = str(values.pop("storage")), int(values.pop("servers"))
            cache = int(values.pop("storage_cache", 0))  # jobs of earlier versions have none
            workers, on = int(values.pop("workers", 0)), str(values.pop("on", ""))
            total = int(values.pop("total_servers", 0))
            training = TrainingSettings.model_validate(values)
            return cls(training, storage, cache, servers, workers, spec.id, on, total)
        except (KeyError, ValueError) as error:
            raise TrainingError(f"job {spec.id}: its job.json has unusable settings: {error}") from None


def checkpoint_words(training: TrainingSettings) -> str:
    """When the job takes checkpoints, and what a lost server costs; for oeprov's own trainer."""
    training = training.decided()
    by = [f"{training.checkpoint_steps} steps"] if training.checkpoint_steps else []
    by += [f"{training.checkpoint_minutes} minutes"] if training.checkpoint_minutes else []
    if not by:
        return "checkpoints: only at the end, so a lost server costs all steps (--checkpoint-minutes)"
    more = ", whichever comes first" if by[1:] else ""
    return f"checkpoints: every {' or '.join(by)}{more} (--checkpoint-steps, --checkpoint-minutes)"


def check_counts(servers: int | None, workers: int | None) -> None:
    """Refuse numbers of servers and workers per host that are out of bounds."""
    for name, count, model in (("servers", servers, ServerSettings), ("workers", workers, WorkerSettings)):
        try:
            model.model_validate({} if count is None else {"count": count})
        except ValidationError as error:
            raise TrainingError(f"--{name}: {explain(error.errors()[0])}") from None


def check_generated(data: str) -> bool:
    """Whether the rows are generated; TrainingError for no data or a malformed ``generate:``."""
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


def is_path(name: str) -> bool:
    """Return whether data are files that hosts have under this name."""
    return bool(name) and not name.startswith("generate:") and not is_url(name)


def is_share(eval_data: str) -> bool:
    """Return whether evaluation data are a share of the training data, as the trainer reads it."""
    try:
        return 0 < float(eval_data) < 1
    except ValueError:
        return False


def files_of_hosts(training: TrainingSettings) -> dict[str, str]:
    """The settings that name files of the workers' hosts, with their paths or patterns."""
    named = {"data": training.data, "eval_data": training.eval_data or ""}
    return {key: name for key, name in named.items() if is_path(name) and not is_share(name)}


def check_url(flag: str, name: str) -> None:
    """Refuse a URL with credentials, before it is written to a job file; the message does not show it."""
    # A secret may have slashes in it, so the part before the first slash need not have the "@".
    place = name.partition("://")[2].partition("/")[0]
    before, colon, port = place.rpartition(":")
    if is_url(name) and ("@" in place or (colon and not port.isdigit() and "[" not in before)):
        raise TrainingError(
            f"{flag}: the URL has credentials in it, which would end up in job files and logs; remove them "
            "there and set them up for the user that workers run as (docs/guides/object-stores.md)"
        )


def check_data(key: str, data: str, workers: Sequence[Host]) -> None:
    """Refuse an empty or relative path of the setting ``key``; ``provision.jobs.data`` checks the files."""
    if not check_generated(data):
        check_path(key, data, workers)


def check_path(key: str, data: str, workers: Sequence[Host], reader: str = "worker") -> None:
    """Refuse a relative path of the setting ``key``, which means nothing on another host."""
    for worker in workers:
        if not worker.is_here and not (is_url(data) or Path(data).is_absolute()):
            raise TrainingError(
                f"{flag(key)}: {data}: the {reader} reads it on host {worker.name}: give its whole path there"
            )


def check_consent(consent: Collection[str], ids: Collection[str], place: Path) -> None:
    """Refuse a consent that names none of the jobs ``ids`` of the directory ``place``."""
    for name in consent:
        if name not in ids:
            hint = did_you_mean(name, ids)
            raise TrainingError(
                f"--consent {name}: it is none of these jobs of {place}: {', '.join(ids) or 'none'}{hint}; "
                "nothing was removed"
            )
