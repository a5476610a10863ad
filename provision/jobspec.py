"""From an inventory and options to a job file: what is checked before anything starts, and command lines.

Everything here refuses before anything was made; nothing is left half-done.
"""

from __future__ import annotations

import gzip
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from provision.errors import TrainingError
from provision.jobs import ACTIVE, SERVERS, Job, JobSpec, ProcessSpec, all_jobs
from provision.settings import Kind, TrainingSettings

if TYPE_CHECKING:
    from provision.inventory import Host, Inventory  # imports Ansible: slow

_GENERATE = re.compile(r"generate:([1-9]\d*)(:\d+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
COLUMNS = 40  # of a line of Criteo data
STORAGES = ("dram", "pmem_libpmem")
STEADY = ("resume", "detach", "as_json")  # options that do not change what is trained


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says; None leaves the inventory's value.

    ``resume`` is a job id, or "" for the last job; such a run takes all other settings from that job.
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
    export: bool | None = None
    storage: str | None = None
    servers: int | None = None
    run_name: str | None = None
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
    storage: str
    servers: int
    name: str

    def settings(self) -> dict[str, Any]:
        """For the job file."""
        return {**self.training.model_dump(mode="json"), "storage": self.storage, "servers": self.servers}

    @classmethod
    def of_job(cls, spec: JobSpec) -> Request:
        """What a job was made from."""
        values = dict(spec.settings)
        try:
            storage, servers = str(values.pop("storage")), int(values.pop("servers"))
            return cls(TrainingSettings.model_validate(values), storage, servers, spec.id)
        except (KeyError, ValueError) as error:
            raise TrainingError(f"job {spec.id}: its job.json has unusable settings: {error}") from None


def request(inventory: Inventory, options: LaunchOptions) -> Request:
    """Settle every setting; TrainingError names the flag or the inventory's key, and what is allowed."""
    given = options.given()
    storage, servers = given.pop("storage", None), given.pop("servers", None)
    name = given.pop("run_name", None)
    base = inventory.training.model_dump()
    try:
        training = TrainingSettings.model_validate({**base, **given})
    except ValidationError as error:
        from provision.inventory import explain

        item = error.errors()[0]
        raise TrainingError(f"{flag(str(item['loc'][0]))}: {explain(item)}") from None
    if storage not in (None, *STORAGES):
        raise TrainingError(f"--storage: found {storage!r}; allowed: {', '.join(STORAGES)}")
    if servers is not None and not 1 <= servers <= 64:
        raise TrainingError(f"--servers: found {servers}; expected a number from 1 to 64")
    if name is not None and not _NAME.fullmatch(name):
        raise TrainingError(
            f"--name: found {name!r}; it becomes the name of a directory: up to 64 letters, digits, "
            "dots, dashes and underscores"
        )
    host = only_host(inventory)
    if training.data and not training.data.startswith("generate:"):
        path = str(Path(training.data).expanduser().absolute())
        training = training.model_copy(update={"data": path})
    return Request(
        training, storage or host.server.storage, servers or host.server.count, name or training.model
    )


def only_host(inventory: Inventory) -> Host:
    """The one local host that this version trains on; TrainingError otherwise."""
    for host in inventory.hosts.values():
        if host.kind is not Kind.local:
            raise TrainingError(
                f"host {host.name} is of kind {host.kind.value}: this version plans for such hosts "
                "but does not launch training there; launch on an inventory of kind local"
            )
    both = [name for name in inventory.parameter_servers if name in inventory.workers]
    if len(both) != 1 or len(inventory.hosts) != 1:
        raise TrainingError(
            f"{inventory.path}: training on kind local needs one host that is in both groups, "
            f"parameter_servers and workers; found {len(inventory.hosts)} hosts"
        )
    return inventory.hosts[both[0]]


def check(host: Host, wanted: Request, state_dir: Path) -> None:
    """Refuse what cannot work: data, storage directory, ports, another job in the same place."""
    _check_data(wanted.training.data)
    if wanted.storage != "dram":
        _check_storage(host, Path(storage_directory(host)))
        busy = _job_with_storage(state_dir, storage_directory(host))
        if busy is not None:
            raise TrainingError(
                f"job {busy.id} is running with the same storage directory {storage_directory(host)}; "
                f"stop it first: oeprov stop {busy.id} (or use --storage dram)"
            )
    if host.server.port:
        _check_ports(host.server.host, host.server.port, wanted.servers)


def storage_directory(host: Host) -> str:
    """Where the host's servers keep rows in persistent memory."""
    if not host.pmem.directory:
        raise TrainingError(
            f"host {host.name}: storage pmem_libpmem needs pmem_mode directory, found {host.pmem.mode}; "
            "use --storage dram or set pmem_mode: directory"
        )
    return host.pmem.directory


def _check_data(data: str) -> None:
    if not data:
        raise TrainingError(
            "no data to train on: give --data FILE (Criteo TSV), --data generate:ROWS, "
            "or set training_data in the inventory"
        )
    if data.startswith("generate:"):
        if not _GENERATE.fullmatch(data):
            raise TrainingError(f"--data: found {data!r}; expected generate:ROWS or generate:ROWS:SEED")
        return
    path = Path(data)
    files = [path]
    if path.is_dir():
        files = [item for item in path.iterdir() if item.is_file()]
    elif not path.exists() and any(sign in path.name for sign in "*?["):
        files = list(path.parent.glob(path.name))
    if not files:
        raise TrainingError(f"--data: {path}: there are no files")
    for item in files:
        try:
            with gzip.open(item) if item.suffix == ".gz" else item.open("rb") as file:
                line = file.readline(1 << 20)
        except (OSError, EOFError) as error:
            raise TrainingError(f"--data: {item}: {getattr(error, 'strerror', None) or error}") from None
        if not line:
            raise TrainingError(f"--data: {item} is empty")
        columns = line.count(b"\t") + 1
        if columns != COLUMNS and item.suffix in (".gz", ".tsv", ".txt", ""):
            raise TrainingError(
                f"--data: {item} has {columns} tab-separated columns in its first line; Criteo data has "
                f"{COLUMNS}: a label, 13 numbers and 26 categories"
            )


def _check_storage(host: Host, path: Path) -> None:
    if not path.is_dir():
        raise TrainingError(f"host {host.name}: pmem_directory {path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise TrainingError(f"host {host.name}: pmem_directory {path} is not writable by this user")


def _check_ports(address: str, first: int, count: int) -> None:
    for port in range(first, first + count):
        if port > 65535:
            raise TrainingError(f"parameter_server_port {first}: {count} servers need ports beyond 65535")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise TrainingError(
                    f"port {port} on {address} cannot be used ({error.strerror}): choose another "
                    "parameter_server_port, or 0 for free ones"
                ) from None


def _job_with_storage(state_dir: Path, directory: str) -> Job | None:
    for job in reversed(all_jobs(state_dir)):
        if job.state().phase in ACTIVE and directory in job.spec().storage_paths.values():
            return job
    return None


def build(job: Job, inventory: Inventory, host: Host, wanted: Request, now: datetime) -> JobSpec:
    """The job file: every process with its whole command line."""
    python = str(Path(host.runtime.venv) / "bin" / "python")
    if Path(host.runtime.venv) == Path(sys.prefix):
        python = sys.executable
    storage = storage_directory(host) if wanted.storage != "dram" else ""
    processes = [_server(job, host, wanted, python, index) for index in range(wanted.servers)]
    processes.append(_worker(job, host, wanted.training, python))
    return JobSpec(
        id=job.id,
        created=now.astimezone().isoformat(timespec="seconds"),
        cluster=inventory.cluster,
        inventory=str(inventory.path),
        storage_paths={host.name: storage} if storage else {},
        settings=wanted.settings(),
        processes=processes,
    )


def _server(job: Job, host: Host, wanted: Request, python: str, index: int) -> ProcessSpec:
    name, server = f"server-{index}", host.server
    threads = server.threads or max(1, (os.cpu_count() or 1) // wanted.servers)
    options: dict[str, Any] = {
        "host": server.host,
        "port": server.port + index if server.port else 0,
        "index": index,
        "count": wanted.servers,
        "storage": wanted.storage,
        "threads": threads,
        "token-file": job.token_file,
        "ready-file": job.ready_file(name),
        "metrics-file": job.server_metrics(name),
    }
    if wanted.storage != "dram":
        options["storage-path"] = Path(storage_directory(host)) / name
    if server.storage_size:
        options["storage-size"] = server.storage_size
    argv = [python, "-m", "oe_runtime.server", *_arguments(options), "--exit-with-parent"]
    return ProcessSpec(name=name, role="parameter_server", host=host.name, argv=argv)


def _worker(job: Job, host: Host, training: TrainingSettings, python: str) -> ProcessSpec:
    options: dict[str, Any] = training.model_dump(mode="json", exclude={"export", "steps"})
    if training.steps:
        options["steps"] = training.steps
    if training.export:
        options["export"] = job.run_dir / "export"
    options.update({"servers": SERVERS, "token_file": job.token_file, "run_dir": job.run_dir})
    environment = dict(host.worker.environment)
    if host.worker.threads:
        for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
            environment.setdefault(variable, str(host.worker.threads))
    argv = [python, "-m", "oe_runtime.train", *_arguments(options), "--exit-with-parent"]
    return ProcessSpec(name="worker-0", role="worker", host=host.name, argv=argv, environment=environment)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (flag(name), str(value))]
