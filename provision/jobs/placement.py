"""Which process of a job runs where: command lines, units, and what must be prepared on each host."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.settings import MOST_SERVERS
from provision.cluster.training_settings import MODEL_SETTINGS, TrainingSettings
from provision.jobs import gpus, script
from provision.jobs.backends import containers, endpoint
from provision.jobs.backends.runners import runner_of
from provision.jobs.backends.units import Place
from provision.jobs.request import Request
from provision.jobs.storage import (
    CACHED,
    POOLS,
    cpus_of,
    memory_bytes,
    nodes_of,
    place_of,
    servers_of,
)
from provision.jobs.store import LOCAL_RANK, LOCAL_WORLD_SIZE, SERVERS, WORKERS, Job, ProcessSpec
from provision.node import numa
from provision.node.state import State

LEAST_POOL_CHECKPOINTS = 2  # one is kept until the next is durable


def worker_hosts(inventory: Inventory) -> list[Host]:
    """The workers' hosts, that of worker 0 first; TrainingError for a cluster that cannot train."""
    servers = [inventory.hosts[name] for name in inventory.parameter_servers]
    if not servers or not inventory.workers:
        missing = "workers" if servers else "parameter_servers"
        raise TrainingError(f"{inventory.path}: training needs a host of group {missing}; none is selected")
    workers = [inventory.hosts[name] for name in inventory.workers]
    here = next((host for host in workers if host.is_here), None)
    if here is not None and len(workers) > 1:
        others = ", ".join(host.name for host in workers if host is not here)
        raise TrainingError(
            f"{inventory.path}: workers on {others} cannot reach one on {here.name}, which is this machine; "
            "put all workers on hosts reached over ssh, or leave some out with --limit"
        )
    for host in servers:
        if host.is_here and here is None:
            raise TrainingError(
                f"the worker on {workers[0].name} cannot reach parameter servers on {host.name}, which is "
                "this machine; put servers on hosts reached over ssh, or the worker on this machine too"
            )
        check_connection(host)
    return workers


def spread(inventory: Inventory, total: int) -> Inventory:
    """The inventory with ``total`` servers in all (0: as it is), the same number per host or one more.

    Hosts that get none and have no worker are left out. TrainingError for more than the hosts may have.
    """
    if not total:
        return inventory
    names = inventory.parameter_servers
    if total > len(names) * MOST_SERVERS:
        raise TrainingError(
            f"--servers: found {total}; the hosts of group parameter_servers in {inventory.path} may have "
            f"{len(names) * MOST_SERVERS} in all, {MOST_SERVERS} each; nothing was changed"
        )
    counts = {name: total // len(names) + (place < total % len(names)) for place, name in enumerate(names)}
    hosts = dict(inventory.hosts)
    for name, count in counts.items():
        host = hosts[name]
        given = host.given | {"parameter_server_count"}
        if count:
            hosts[name] = replace(host, server=host.server.model_copy(update={"count": count}), given=given)
        elif name not in inventory.workers:
            del hosts[name]
    return replace(inventory, hosts=hosts, parameter_servers=[name for name in names if counts[name]])


def check_connection(host: Host) -> None:
    """Refuse a server's host whose memory its connection cannot use."""
    keeps = "memory is" if host.pmem.mode != "none" else "drives are" if host.ssd.devices else ""
    if host.is_here and host.platform.managed and keeps:
        raise TrainingError(
            f"host {host.name} is of kind {host.kind.value} with ansible_connection local: its {keeps} "
            "used by systemd units, so reach it over ssh (ansible_connection: ssh)"
        )


@dataclass(frozen=True)
class Placement:
    """Every process with its command line, and the units that each host starts; see ``Runner``."""

    processes: list[ProcessSpec]
    units: dict[str, list[dict[str, Any]]]


def place(
    job: Job, inventory: Inventory, states: Mapping[str, State], wanted: Request, *, fresh: bool = True
) -> Placement:
    """Place the servers on their hosts, and the workers on theirs, in the inventory's order.

    ``fresh``: the job is new, so rows in its servers' directories are another's, and hosts refuse them.
    """
    workers = worker_hosts(inventory)
    alone = place_servers(job, inventory, states, wanted, fresh=fresh)
    servers = [inventory.hosts[name] for name in inventory.parameter_servers]
    tls, wire = _tls(wanted.training, servers), not all(host.is_here for host in servers)
    processes = [*alone.processes, *_workers(job, workers, states, wanted, tls, wire)]
    if wanted.on:
        processes = [containers.wrapped(job, inventory, wanted, item) for item in processes]
    return Placement(processes, alone.units)


def place_servers(
    job: Job, inventory: Inventory, states: Mapping[str, State], wanted: Request, *, fresh: bool
) -> Placement:
    """Place the servers alone."""
    servers = [inventory.hosts[name] for name in inventory.parameter_servers]
    counts = {host.name: servers_of(host, wanted) for host in servers}
    total = sum(counts.values())
    processes: list[ProcessSpec] = []
    started: dict[str, list[dict[str, Any]]] = {name: [] for name in inventory.hosts}
    tls = _tls(wanted.training, servers)
    for host in servers:
        state = states.get(host.name)
        places = [
            place_of(host, state, wanted, job.id, f"server-{len(processes) + number}", number)
            for number in range(counts[host.name])
        ]
        places = [
            replace(where, nodes=nodes_of(host, state, where, number, len(places)))
            for number, where in enumerate(places)
        ]
        places = [replace(where, cpus=cpus_of(host, state, where)) for where in places]
        for number, where in enumerate(places):
            spec = _server(job, host, wanted, tls, len(processes), total, number, places, state)
            processes.append(spec)
            port = host.server.port + number if host.server.port else 0
            started[host.name] += runner_of(host).server_start(job, spec, where, port, fresh=fresh)
    return Placement(processes, started)


def unwritable(processes: Sequence[ProcessSpec]) -> list[HostError]:
    """Directories for rows on this machine that this user cannot write to."""
    return [
        HostError(name, f"{path} is not a directory that this user can write to")
        for name, path in dict.fromkeys((item.host, item.storage) for item in processes if not item.unit)
        if path and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))
    ]


def _server(
    job: Job,
    host: Host,
    wanted: Request,
    tls: str,
    index: int,
    total: int,
    number: int,
    places: Sequence[Place],
    state: State | None,
) -> ProcessSpec:
    name, server, runner = f"server-{index}", host.server, runner_of(host)
    where, beside = places[number], len(places)
    cpus = len(where.cpus) or runner.cpus(state)
    sharing = sum(other.cpus == where.cpus for other in places)
    directory = runner.directory(job)
    options: dict[str, Any] = {
        "host": server.host,
        "port": server.port + number if server.port else 0,
        "index": index,
        "count": total,
        "storage": where.storage,
        "threads": server.threads or max(1, cpus // sharing),
        "token-file": directory / "token",
        "tls": tls,
        "ready-file": directory / "ready" / f"{name}.json",
        "metrics-file": directory / "metrics" / f"{name}.json",
        **server.process_options(),
    }
    flags = []
    if where.path:
        options["storage-path"] = where.path
    if where.storage in POOLS:
        options["storage-checkpoints"] = max(LEAST_POOL_CHECKPOINTS, wanted.training.keep_checkpoints)
        flags.append("--storage-recover")  # its own rows: in a new job's directory there are none
    if where.storage in CACHED:
        cache = wanted.storage_cache or server.storage_cache
        options["storage-cache"] = cache or runner.dram(state) // 4 // beside
    size = server.storage_size
    if where.storage == "pmem_memkind" and where.bound and state and not size:
        # The system ends a process that touches more than a node has; so the server refuses before.
        sharing = sum(other.nodes == where.nodes for other in places)
        size = memory_bytes(state, where) // 16 * 15 // sharing
    if size:
        options["storage-size"] = size
    if server.metrics_port:
        options["metrics-host"] = server.metrics_host
        options["metrics-port"] = server.metrics_port + number
    if not host.is_here:
        options["checkpoint-dir"] = directory / "checkpoints" / name
    argv = [runner.python, "-m", "oe_runtime.server", *arguments(options), *flags, *runner.ending]
    return ProcessSpec(
        name=name,
        role="parameter_server",
        host=host.name,
        argv=argv,
        unit=runner.unit(job, name),
        storage=where.mount,
        pools=where.path if where.storage in POOLS else "",
        cpus=numa.list_text(list(where.cpus)),
        start_timeout=server.start_timeout,
    )


def _tls(training: TrainingSettings, servers: Sequence[Host]) -> str:
    """The same for every process of a job: a server that listens everywhere may be reached over loopback."""
    if training.tls != "auto":
        return training.tls
    return "off" if all(_is_loopback(host.server.host) for host in servers) else "on"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _workers(
    job: Job, hosts: Sequence[Host], states: Mapping[str, State], wanted: Request, tls: str, wire: bool
) -> list[ProcessSpec]:
    """All workers, in the order of their ranks."""
    counts = [gpus.worker_count(host, states.get(host.name), wanted) for host in hosts]
    endpoints = WORKERS
    if not hosts[0].is_here:
        endpoints = ",".join(
            endpoint(host.address, "", host.worker.port and host.worker.port + number)
            for host, count in zip(hosts, counts, strict=True)
            for number in range(count)
        )
    elif port := hosts[0].worker.port:
        endpoints = ",".join(f"127.0.0.1:{port + number}" for number in range(counts[0]))
    specs: list[ProcessSpec] = []
    for host, count in zip(hosts, counts, strict=True):
        share = max(1, runner_of(host).cpus(states.get(host.name)) // count) if count > 1 else 0
        for number in range(count):
            rank = len(specs)
            together = ["--workers", endpoints, "--rank", str(rank)] if sum(counts) > 1 else []
            spec = _worker(job, host, wanted.training, tls, wire, rank, share, together)
            if wanted.training.script:
                own = gpus.environment(host, states.get(host.name), wanted.training, number, count)
                own |= {LOCAL_RANK: str(number), LOCAL_WORLD_SIZE: str(count)}
                spec = spec.model_copy(update={"environment": {**own, **spec.environment}})
            specs.append(spec)
    return specs


def _worker(
    job: Job,
    host: Host,
    training: TrainingSettings,
    tls: str,
    wire: bool,
    rank: int,
    threads: int,
    together: Sequence[str],
) -> ProcessSpec:
    runner = runner_of(host)
    directory = runner.directory(job)
    path = runner.sent(job, Path(training.script), "script") if training.script else None
    words = training_words(training, directory / "run", path)
    options: dict[str, Any] = {"servers": SERVERS, "token_file": directory / "token", "tls": tls}
    if wire:
        options["checkpoint_transfer"] = "wire"
    if host.platform.has_gpus and training.device == "auto" and not training.script:
        options["device"] = "gpu"
    argv = [runner.python, "-m", "oe_runtime.train", *words, *arguments(options), *together]
    name = f"worker-{rank}"
    return ProcessSpec(
        name=name,
        role="worker",
        host=host.name,
        argv=[*argv, *runner.ending, *script.words(training)],
        environment=worker_environment(host, threads),
        unit=runner.unit(job, name),
    )


def worker_environment(host: Host, threads: int = 0) -> dict[str, str]:
    """The environment variables of workers; ``threads`` if the host sets none (0: TensorFlow decides)."""
    environment = dict(host.worker.environment)
    if threads := host.worker.threads or threads:
        for variable in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
            environment.setdefault(variable, str(threads))
    return environment


def training_words(training: TrainingSettings, run_dir: Path, script: Path | None = None) -> list[str]:
    """The part of a worker's command line that says what is trained and where the run's files go."""
    own = {"restarts", "tls", "script", "script_arguments"}
    own |= set() if training.workqueue else {"on_worker_lost"}
    if script is not None:
        own |= {*MODEL_SETTINGS, "device"}
    options = training.model_dump(mode="json", exclude=own)
    options["epochs"], options["steps"] = training.epochs or None, training.steps or None
    if script is not None:
        return arguments({"script": script, **options, "run_dir": run_dir})
    options["device"] = None if training.device == "auto" else training.device
    options["export"] = run_dir / "export" if training.export else None
    options["export_rows"] = training.export_rows if training.export else None
    return arguments({**options, "run_dir": run_dir})


def arguments(options: Mapping[str, Any]) -> list[str]:
    """A command line's words for these options; none for one that is not set."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value not in (None, ""):
            words += [f"--{flag}", str(value)]
    return words
