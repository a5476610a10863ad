"""The plan of a job on Kubernetes, from an inventory: names, servers, nodes, volumes.

Refuses what cannot work before the cluster is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from provision.cluster import flavor_facts
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.kubernetes_settings import KubernetesSettings
from provision.cluster.setting_types import ProcessFlag, explain
from provision.cluster.settings import ServerSettings
from provision.jobs import jobspec, placement, request
from provision.jobs.backends.kubernetes import differences, script
from provision.jobs.backends.kubernetes.script import PodScript
from provision.jobs.request import LaunchOptions, Request, flag
from provision.jobs.storage import CACHED, POOLS, are_on_pmem, no_drive, servers_of, storage_of
from provision.node import drives

# Names of pods and services are DNS labels of up to 63; "-worker-1023" comes after this one.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
# Settings of servers that are alike in all pods; the flags reach their command lines by themselves.
_OF_SERVERS = ("storage_cache", "storage_size", "threads", "port", "metrics_port")
_FLAGS = ServerSettings.marked(ProcessFlag())

SERVER_PORT = 7700
METRICS_PORT = 7701


@dataclass(frozen=True)
class PodPlan:
    """A job with all that its manifests need. Sizes are in bytes."""

    name: str
    settings: KubernetesSettings
    request: Request
    storage: str
    servers: int
    hosts: int  # for --servers, which is per host; 1 with kubernetes_servers, which is the whole number
    threads: int
    cache: int  # of a storage with one
    size: int  # most that a server may use; 0: no limit
    server_options: dict[str, Any]  # ProcessFlags of servers; None: not set
    port: int
    metrics_port: int
    server_hosts: tuple[str, ...]  # names of nodes; empty: server_nodes says where
    local: tuple[tuple[str, str], ...]  # of each server: node and mount point, where volumes are local
    environment: dict[str, str]
    script: PodScript | None = None
    unused: tuple[str, ...] = ()  # notes on variables of the inventory without effect

    @property
    def pools(self) -> bool:
        """Servers have volumes that outlive their pods."""
        return self.storage in POOLS

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the job is otherwise than on hosts."""
        return (*self.unused, *script.notes(self.script, self.request.training, self.settings))

    @property
    def directory(self) -> PurePosixPath:
        """The job's directory in the claim, as pods see it."""
        return PurePosixPath(self.settings.claim_path) / "oeprov" / self.name


def settle(inventory: Inventory, options: LaunchOptions, name: str | None = None) -> PodPlan:
    """The plan of a job; TrainingError names the key or flag that cannot be, and what would work.

    ``name``: of all objects; default: the option's, else the model's.
    """
    if inventory.flavor != flavor_facts.DEFAULT:
        raise TrainingError(
            f"runtime_flavor: {inventory.flavor} runs on hosts only; leave out --on, or set runtime_flavor: "
            "oe_runtime"
        )
    settings = inventory.kubernetes
    wanted = jobspec.request(inventory, options, settings.claim_path)
    if wanted.workers:
        settings = settings.model_copy(update={"workers": wanted.workers})
    _check_settings(inventory, wanted)
    jobspec.check_together(wanted.training, settings.workers)
    pods = script.settle(wanted.training, settings)
    if pods is not None and not options.run_name:
        wanted = replace(wanted, name=script.job_name(wanted.training))
    name = name or wanted.name
    if not _NAME.fullmatch(name):
        raise TrainingError(
            f"--name: found {name!r}; on Kubernetes it becomes the name of services: up to 48 lower-case "
            "letters, digits and dashes, a letter first"
        )
    hosts = [inventory.hosts[item] for item in inventory.parameter_servers]
    workers = [inventory.hosts[item] for item in inventory.workers]
    storage = _storage(hosts, wanted)
    servers_as = _alike(hosts, "server", (*_OF_SERVERS, *_FLAGS))
    _alike(workers, "worker", ("threads", "environment"))
    port, metrics_port = servers_as["port"] or SERVER_PORT, servers_as["metrics_port"] or METRICS_PORT
    if port == metrics_port:
        raise TrainingError(
            f"parameter_server_port and parameter_server_metrics_port: both are {port}; set different ones "
            f"(defaults: {SERVER_PORT} and {METRICS_PORT})"
        )
    counts = [servers_of(host, wanted) for host in hosts]
    # Drives say how many there are only where they are the servers' volumes, and nobody says another number.
    if settings.storage_class or settings.servers not in (0, sum(counts)):
        counts = [wanted.servers or host.server.count for host in hosts]
    servers = settings.servers or sum(counts)
    if wanted.servers and settings.servers:
        servers = wanted.servers
    cache = wanted.storage_cache or servers_as["storage_cache"] or settings.server_memory // 2
    named = () if settings.server_nodes else tuple(h.name for h in hosts if h.platform.managed)
    return PodPlan(
        name=name,
        settings=settings,
        request=wanted,
        storage=storage,
        servers=servers,
        hosts=1 if settings.servers else len(hosts),
        threads=servers_as["threads"] or max(1, int(settings.server_cpus)),
        cache=cache if storage in CACHED else 0,
        size=servers_as["storage_size"],
        server_options={name: servers_as[name] for name in _FLAGS},
        port=port,
        metrics_port=metrics_port,
        server_hosts=named,
        local=_local(settings, hosts, counts, servers, storage) if storage in POOLS else (),
        environment={
            **(script.environment(wanted.training, settings) if pods is not None else {}),
            **placement.worker_environment(workers[0]),
        },
        script=pods,
        unused=tuple(differences.notes(inventory, wanted, storage)),
    )


def _check_settings(inventory: Inventory, wanted: Request) -> None:
    settings, training = inventory.kubernetes, wanted.training
    for key, what in (
        ("server_image", "containers/README.md says how to build it"),
        ("worker_image", "containers/README.md says how to build it"),
        ("claim", "the ReadWriteMany claim for data and checkpoints"),
    ):
        if not getattr(settings, key):
            raise TrainingError(f"{inventory.path}: kubernetes_{key} is missing: {what}")
    if not training.script:
        request.check_generated(training.data)
    root = PurePosixPath(settings.claim_path)
    for key, path in request.files_of_hosts(training).items():
        if root not in PurePosixPath(path).parents:
            raise TrainingError(
                f"{flag(key)}: {path}: pods see only what lies in claim {settings.claim}: give a path below "
                f"{root} (kubernetes_claim_path)"
            )
    if training.tls == "off":
        raise TrainingError(
            "training_tls: off: pods of other jobs may share the network of these; leave it at auto"
        )


def _alike(hosts: list[Host], part: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Settings that pods have in common; TrainingError where hosts differ, because pods of one set cannot."""
    found = {}
    for name in names:
        values = {host.name: getattr(getattr(host, part), name) for host in hosts}
        first = hosts[0].name
        if odd := next((item for item in values if values[item] != values[first]), ""):
            raise TrainingError(
                f"{getattr(hosts[0], part).prefix}{name}: pods of one job are alike, but it is "
                f"{values[first]!r} on {first} and {values[odd]!r} on {odd}: set it once for all, or use "
                "--limit"
            )
        found[name] = values[first]
    return found


def _storage(hosts: list[Host], wanted: Request) -> str:
    found = {storage_of(host, wanted): host.name for host in hosts}
    if len(found) > 1:
        (first, one), (second, two) = list(found.items())[:2]
        raise TrainingError(
            f"servers of one StatefulSet are alike, but storage is {first} on {one} and {second} on {two}: "
            "give --storage, or --limit"
        )
    return next(iter(found))


def _local(
    settings: KubernetesSettings, hosts: list[Host], counts: list[int], servers: int, storage: str
) -> tuple[tuple[str, str], ...]:
    """Of each server the node and the mount point of its local volume; empty where a class makes volumes."""
    if settings.storage_class:
        if not settings.storage_size:
            raise TrainingError(
                f"kubernetes_storage_size is missing: a volume of class {settings.storage_class} has a size"
            )
        return ()
    if not all(host.platform.managed for host in hosts) or settings.server_nodes:
        raise TrainingError(
            "kubernetes_storage_class is missing: without one, each server's volume is the mount point of a "
            "host of parameter_servers (not of kind local, and without kubernetes_server_nodes)"
        )
    if sum(counts) != servers:
        raise TrainingError(
            f"kubernetes_servers is {servers}, but parameter_server_count makes {sum(counts)} of the hosts' "
            "mount points: leave one of them out, or set kubernetes_storage_class"
        )
    return tuple(
        (host.name, _volume(host, number, storage))
        for host, count in zip(hosts, counts, strict=True)
        for number in range(count)
    )


def _volume(host: Host, number: int, storage: str) -> str:
    """The mount point of a host's server: of its persistent memory, or one of ``ssd_devices``."""
    names = host.ssd.devices
    if storage == "dram_ssd" and not names:
        raise no_drive(host)
    if are_on_pmem(host, storage) or not names:
        return f"{host.pmem.mount_prefix}{number}"
    if number >= len(names):
        raise TrainingError(
            f"host {host.name}: on Kubernetes each server needs a drive of its own, and ssd_devices names "
            f"{len(names)}; name more, or set kubernetes_storage_class"
        )
    return drives.place(host.desired(), names[number])


def with_form(inventory: Inventory, form: str | None) -> Inventory:
    """The inventory with another ``kubernetes_form``, if one is given."""
    if form is None:
        return inventory
    try:
        settings = KubernetesSettings.model_validate({**inventory.kubernetes.model_dump(), "form": form})
    except ValidationError as error:
        raise TrainingError(f"--form: {explain(error.errors()[0])}") from None
    return replace(inventory, kubernetes=settings)


def read_token(path: Path) -> str:
    """The token in a file; TrainingError when there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TrainingError(f"--token-file: {path}: {reason}") from None
    if not token:
        raise TrainingError(f"--token-file: {path} is empty")
    return token
