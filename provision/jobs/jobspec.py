"""From an inventory and options to a job file, with the checks before anything is made."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.setting_types import explain, parse_size
from provision.cluster.settings import Storage
from provision.cluster.training_settings import TrainingSettings
from provision.inventory import vault
from provision.jobs import flavors, placement, script
from provision.jobs.backends import ssh
from provision.jobs.placement import Placement
from provision.jobs.request import LaunchOptions, Request, check_counts, check_url, files_of_hosts, flag
from provision.jobs.storage import CACHED, servers_of, storage_directories, storage_of
from provision.jobs.store import ACTIVE, Job, JobSpec, ProcessSpec, all_jobs
from provision.node import jobfiles
from provision.node.command import System

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
STORAGES: tuple[str, ...] = get_args(Storage)


def request(inventory: Inventory, options: LaunchOptions, claim: str = "") -> Request:
    """The request with every setting; TrainingError names the flag or key, and what is allowed.

    ``claim``: where pods have files of their own.
    """
    given = options.given()
    wanted = server_request(inventory, options)
    for own in ("storage", "servers", "workers", "storage_cache", "run_name"):
        given.pop(own, None)
    on = given.pop("on", "")
    base = inventory.training.model_dump()
    script.check_settings(inventory, given)
    try:
        training = TrainingSettings.model_validate({**base, **given})
    except ValidationError as error:
        item = error.errors()[0]
        raise TrainingError(f"{flag(str(item['loc'][0]))}: {explain(item)}") from None
    label = "--script" if "script" in given else f"{inventory.path}: training_script"
    training = script.settled(training, label, claim)
    for key in ("data", "eval_data", "upload_to"):
        check_url(flag(key), getattr(training, key) or "")
    if training.data == "-":
        raise TrainingError(
            "--data -: workers have no standard input; give a directory that grows, with --follow, or run "
            "python -m oe_runtime.train --data - by hand"
        )
    for key, name in files_of_hosts(training).items():
        path = name.removeprefix("file://")
        if placement.worker_hosts(inventory)[0].is_here:
            path = str(Path(path).expanduser().absolute())
        training = training.model_copy(update={key: path})
    wanted = replace(wanted, training=training, name=wanted.name or script.job_name(training), on=on)
    return flavors.get(inventory.flavor).settle(inventory, wanted)


def server_request(inventory: Inventory, options: LaunchOptions) -> Request:
    """What is asked of the servers; TrainingError names the flag. The name is empty where none was given."""
    given = options.given()
    storage, servers, workers = (given.get(name) for name in ("storage", "servers", "workers"))
    cache, name = given.get("storage_cache"), given.get("run_name")
    if storage not in (None, *STORAGES):
        raise TrainingError(f"--storage: found {storage!r}; allowed: {', '.join(STORAGES)}")
    check_counts(servers, workers)
    if name is not None:
        check_name(name)
    check_secrets(inventory, options.settings)
    wanted = Request(inventory.training, storage or "", 0, servers or 0, workers or 0, name or "")
    return wanted if cache is None else replace(wanted, storage_cache=_cache(inventory, wanted, cache))


def check_name(name: str) -> None:
    """Refuse a name that a job cannot have."""
    if not _NAME.fullmatch(name):
        raise TrainingError(
            f"--name: found {name!r}; it becomes the name of a directory: up to 64 letters, digits, "
            "dots, dashes and underscores"
        )


def check_secrets(inventory: Inventory, given: Mapping[str, Any]) -> None:
    """Refuse settings with a secret of a vault: job files and command lines would show it to others."""
    parts: list[tuple[str, Any]] = [
        (f"{inventory.path}: training_", inventory.training),
        (f"{inventory.path}: containers_", inventory.containers),
        (f"{inventory.path}: kubernetes_", inventory.kubernetes),
    ]
    for host in inventory.hosts.values():
        parts += [
            (f"host {host.name}: parameter_server_", host.server),
            (f"host {host.name}: worker_", host.worker),
        ]
    for prefix, part in parts:
        for name, value in part.model_dump(mode="json").items():
            if name not in given and vault.has_secret(value):
                raise TrainingError(
                    f"{prefix}{name}: is a secret of the vault, which the job's file and command lines would "
                    "show to other users: put it in a file that only the job's user can read, and name that"
                )


def _cache(inventory: Inventory, wanted: Request, text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise TrainingError(f"--storage-cache: found {text!r}; {error}") from None
    storages = [storage_of(inventory.hosts[name], wanted) for name in inventory.parameter_servers]
    if not set(CACHED) & set(storages):
        found = ", ".join(dict.fromkeys(storages)) or "none"
        raise TrainingError(
            f"--storage-cache goes with --storage {' or '.join(CACHED)}; the storage here is {found}"
        )
    return size


def check_together(training: TrainingSettings, workers: int) -> None:
    """Refuse settings that the trainer would refuse for a job of ``workers`` workers."""
    if training.epochs == 0 and not training.steps:
        raise TrainingError(
            "training_epochs and training_steps are both 0, so training has no end; set one of them"
        )
    staleness = training.staleness or 0
    if training.follow and (training.workqueue or workers > 1):
        raise TrainingError(
            f"--follow is for one worker, and this job has {'--workqueue' if training.workqueue else workers}"
            ": several would not know which rows the others have seen arrive"
        )
    if training.workqueue:
        if training.optimizer in ("adamw", "ftrl"):
            raise TrainingError(
                f"--workqueue does not go with optimizer {training.optimizer}, whose updates depend on the "
                "weight; use another --optimizer"
            )
    elif staleness > 1:
        raise TrainingError(f"--staleness: found {staleness}; without --workqueue it is 0 or 1")
    elif staleness and workers > 1:
        raise TrainingError(
            f"--staleness: found {staleness}; {workers} workers train each batch together: use 0, or add "
            "--workqueue"
        )
    elif staleness and training.pipeline is False:
        raise TrainingError("--staleness 1 is a part of the pipeline; leave out --no-pipeline")


def check(inventory: Inventory, wanted: Request, own: Collection[int] = ()) -> None:
    """Refuse settings, storage directories and ports that cannot work, as far as this machine knows.

    ``own``: ports of this machine that the running job has.
    """
    hosts = placement.worker_hosts(inventory)
    counts = [wanted.workers or host.worker.count for host in hosts]
    check_together(wanted.training, sum(counts))
    for host, count in zip(hosts, counts, strict=True):
        port = host.worker.port
        if port and port + count - 1 > 65535:
            raise TrainingError(
                f"host {host.name}: worker_port {port}: {count} workers need ports beyond 65535"
            )
        if port and count > 1 and host.is_here:
            check_free("127.0.0.1", port, count, "worker_port", own)
    check_servers(inventory, wanted, own)


def check_servers(inventory: Inventory, wanted: Request, own: Collection[int] = ()) -> None:
    """Refuse servers whose storage directory or ports cannot be used, as far as this machine knows."""
    for name in inventory.parameter_servers:
        host = inventory.hosts[name]
        storage, here = storage_of(host, wanted), host.is_here
        if here and storage != "dram":
            setting = "ssd_devices" if host.ssd.devices else "pmem_directory"
            for path in storage_directories(host, storage):
                if not os.path.isdir(path):
                    raise TrainingError(f"host {host.name}: {setting} {path} is not a directory")
                if not os.access(path, os.W_OK | os.X_OK):
                    raise TrainingError(f"host {host.name}: {setting} {path} is not writable by this user")
        count, port = servers_of(host, wanted), host.server.port
        check_ports(host, count)
        if port and here:
            check_free(host.server.host, port, count, "parameter_server_port", own)


def check_ports(host: Host, count: int) -> None:
    """Refuse ports that so many servers of a host cannot have."""
    port, metrics = host.server.port, host.server.metrics_port
    if port and metrics and abs(port - metrics) < count:
        raise TrainingError(
            f"host {host.name}: parameter_server_port {port} and parameter_server_metrics_port {metrics} "
            f"are too close for {count} servers; set them {count} apart at least, or one of them to 0"
        )
    for setting, first in (("parameter_server_port", port), ("parameter_server_metrics_port", metrics)):
        if first and first + count - 1 > 65535:
            raise TrainingError(
                f"host {host.name}: {setting} {first}: {count} servers need ports beyond 65535"
            )


def check_storage_is_free(spec: JobSpec, state_dir: Path) -> None:
    """Refuse a job whose servers would share persistent memory with those of a running job."""
    mine = {_where(spec, item): item for item in spec.processes if item.storage}
    for job in reversed(all_jobs(state_dir)) if mine else []:
        if job.id == spec.id or job.state().phase not in ACTIVE:
            continue
        other = job.spec()
        for item in other.processes:
            if item.storage and _where(other, item) in mine:
                raise TrainingError(
                    f"job {job.id} is running with the same storage directory {item.storage} on {item.host}; "
                    f"stop it first: oeprov stop {job.id} (or use --storage dram)"
                )


def check_storage_is_new(job: Job, spec: JobSpec) -> None:
    """Refuse a new job whose directories for rows on this machine hold some; hosts refuse their own.

    They are of another state directory's job, launched in the same second, and are neither used nor removed.
    """
    for item in spec.processes:
        if job.has_rows(item):
            raise TrainingError(f"host {item.host}: {jobfiles.foreign_rows(System(), job.id, item.pools)}")


def _where(spec: JobSpec, item: ProcessSpec) -> tuple[str, str, str]:
    """The machine and the directory of a process's rows."""
    host = spec.hosts.get(item.host, {})
    return str(host.get("address", "")), str(host.get("port", "")), item.storage


def check_free(address: str, first: int, count: int, setting: str, own: Collection[int] = ()) -> None:
    """Refuse ports of this machine that others have; not those of ``own``."""
    for port in range(first, first + count):
        if port in own:
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((address, port))
            except OSError as error:
                raise TrainingError(
                    f"port {port} on {address} cannot be used ({error.strerror}): choose another {setting}, "
                    "or 0 for free ones"
                ) from None


def build(job: Job, inventory: Inventory, placed: Placement, wanted: Request, now: datetime) -> JobSpec:
    """The job file: every process with its whole command line, and how its hosts are reached."""
    used = {item.host for item in placed.processes}
    return JobSpec(
        id=job.id,
        created=now.astimezone().isoformat(timespec="seconds"),
        cluster=inventory.cluster,
        inventory=str(inventory.path),
        settings=wanted.settings(),
        hosts={
            name: ssh.connection(host)
            for name, host in inventory.hosts.items()
            if name in used and not host.is_here
        },
        processes=placed.processes,
    )
