"""Variables of an inventory without effect on Kubernetes, so that no setting is dropped in silence.

Each variable is in the manifests, is refused by name, gets a note here, or is in ``NO_MEANING``.
"""

from __future__ import annotations

from collections.abc import Iterable

from provision.cluster import settings
from provision.cluster.container_settings import ContainerSettings
from provision.cluster.inventory import Inventory
from provision.cluster.runtime_settings import RuntimeSettings
from provision.cluster.setting_types import Settings
from provision.jobs.request import Request
from provision.jobs.storage import CACHED, POOLS, are_on_pmem

# Variables of the job without effect there, and what decides instead.
_INSTEAD = {
    "parameter_server_host": "servers listen on every address of their pod; only its workers reach them",
    "parameter_server_cpus": "the kubelet gives pods their CPUs (its static CPU manager: near the memory)",
    "parameter_server_start_timeout": "a server has an hour to start there; its startupProbe says so",
    "parameter_server_metrics_host": "kubernetes_monitoring_namespace says who may read the metrics",
    "worker_count": "kubernetes_workers says how many there are",
    "worker_port": "workers listen on one port of their own pods",
    "training_on_worker_lost": "workers that are lost are started again, from the last checkpoint",
    "training_restarts": "workers that are lost are started again, from the last checkpoint",
}

_HOSTS = "it is for hosts: oeprov bootstrap and pmem-mode apply it to nodes"
_IMAGES = "it makes the hosts' environment; pods have that of their images"


def _all_but(model: type[Settings], *names: str) -> Iterable[str]:
    return (model.prefix + name for name in model.model_fields if name not in names)


# Variables that concern no job on Kubernetes, and what they are for.
NO_MEANING: dict[str, str] = {
    "oeprov_cluster": "it names the cluster for this machine",
    "oeprov_connection": "it is for SSH to hosts",
    "training_tls": "connections are always encrypted there; off is refused",
    "kubernetes_context": "it says which cluster launch-training asks; manifests go where kubectl sends them",
    **dict.fromkeys(_all_but(settings.RolloutSettings), _HOSTS),
    **dict.fromkeys(_all_but(settings.KernelSettings), _HOSTS),
    **dict.fromkeys(_all_but(settings.PmemSettings, "mode", "mount_prefix"), _HOSTS),
    **dict.fromkeys(_all_but(settings.SsdSettings, "devices", "mount_prefix"), _HOSTS),
    **dict.fromkeys(_all_but(settings.GpuSettings), _HOSTS),
    **dict.fromkeys(_all_but(RuntimeSettings, "flavor"), _IMAGES),
    **dict.fromkeys(_all_but(ContainerSettings), "it is for --on docker and --on podman"),
}


def notes(inventory: Inventory, wanted: Request, storage: str) -> list[str]:
    """One line for each variable that is set and has no effect on this job."""
    servers = [inventory.hosts[name] for name in inventory.parameter_servers]
    workers = [inventory.hosts[name] for name in inventory.workers]
    given = {key for host in [*servers, *workers] for key in host.given}
    mine = {**_INSTEAD, **_by_settings(inventory, wanted, storage)}
    return [f"{key} has no effect on Kubernetes: {why}" for key, why in mine.items() if key in given]


def _by_settings(inventory: Inventory, wanted: Request, storage: str) -> dict[str, str]:
    """Variables that have an effect only together with others."""
    found = {}
    if inventory.kubernetes.servers:
        found["parameter_server_count"] = "kubernetes_servers says how many there are"
    if wanted.workers:
        found["kubernetes_workers"] = "--workers says how many there are"
    if storage not in CACHED:
        found["parameter_server_storage_cache"] = f"it is for storage {' and '.join(CACHED)}, not {storage}"
    if storage not in POOLS:
        for key in ("kubernetes_storage_class", "kubernetes_storage_size", "ssd_devices", "ssd_mount_prefix"):
            found[key] = f"servers with storage {storage} have no volumes"
    elif inventory.kubernetes.storage_class:
        found.update(dict.fromkeys(("ssd_devices", "ssd_mount_prefix"), "a class makes the servers' volumes"))
    elif all(are_on_pmem(inventory.hosts[name], storage) for name in inventory.parameter_servers):
        found.update(dict.fromkeys(("ssd_devices", "ssd_mount_prefix"), "volumes are persistent memory"))
    return found
