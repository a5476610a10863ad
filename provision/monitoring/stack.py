"""Files for Prometheus and Grafana: a configuration that scrapes the cluster, and a dashboard.

The queries of ``grafana-dashboard.json`` name metrics of ``oe_runtime/server/metrics.py``; a test compares
them.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import yaml

from provision.cluster.errors import OeprovError
from provision.cluster.inventory import Host, Inventory

Document = dict[str, Any]
PROMETHEUS, DASHBOARD = "prometheus.yml", "grafana-dashboard.json"
# For Grafana 9 and later; its user chooses data source and clusters.
DASHBOARD_FILE = Path(__file__).with_name(DASHBOARD)


class MonitoringError(OeprovError):
    """No server has metrics, or the files cannot be written."""


def write(inventory: Inventory, directory: Path) -> list[str]:
    """Write both files; return notes for the user, one line each."""
    config, notes = prometheus(inventory)
    files = {
        PROMETHEUS: "# Made by oeprov from the inventory; use it as it is, or take its scrape_configs.\n"
        + yaml.safe_dump(config, sort_keys=False),
        DASHBOARD: DASHBOARD_FILE.read_text(encoding="utf-8"),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MonitoringError(f"{error.filename}: {error.strerror}") from None
    return notes


def has_metrics(inventory: Inventory) -> bool:
    """Whether any server of the inventory exports metrics."""
    return any(inventory.hosts[name].server.metrics_port for name in inventory.parameter_servers)


def prometheus(inventory: Inventory) -> tuple[Document, list[str]]:
    """Prometheus's configuration, and notes on servers that it cannot scrape."""
    static, notes = [], []
    for name in inventory.parameter_servers:
        host = inventory.hosts[name]
        if not host.server.metrics_port:
            notes.append(f"{name}: exports no metrics; set parameter_server_metrics_port")
            continue
        if not host.is_here and _loopback(host.server.metrics_host):
            notes.append(
                f"{name}: its metrics are on loopback only; set parameter_server_metrics_host to an address "
                "that Prometheus can reach"
            )
        static.append({"targets": _targets(host), "labels": {"cluster": inventory.cluster, "host": name}})
    jobs: list[Document] = []
    if static:
        jobs.append({"job_name": f"oeprov-{inventory.cluster}", "static_configs": static})
    if inventory.kubernetes.server_image:
        jobs.append(_kubernetes(inventory))
    if not jobs:
        raise MonitoringError(
            f"{inventory.path}: no server exports metrics; set parameter_server_metrics_port, such as 7780"
        )
    return {"global": {"scrape_interval": "15s"}, "scrape_configs": jobs}, notes


def _targets(host: Host) -> list[str]:
    listens = host.server.metrics_host
    address = host.address if listens in ("0.0.0.0", "::", "") else listens  # noqa: S104 - compared with
    address = f"[{address}]" if ":" in address else address
    return [f"{address}:{host.server.metrics_port + number}" for number in range(host.servers())]


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _kubernetes(inventory: Inventory) -> Document:
    """The scrape job for servers on Kubernetes, for a Prometheus inside that cluster."""

    def keep(label: str, value: str) -> Document:
        return {"action": "keep", "source_labels": [f"__meta_kubernetes_{label}"], "regex": value}

    def take(label: str, name: str) -> Document:
        return {"source_labels": [f"__meta_kubernetes_{label}"], "target_label": name}

    return {
        "job_name": f"oeprov-{inventory.cluster}-kubernetes",
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [inventory.kubernetes.namespace]}}],
        "relabel_configs": [
            keep("pod_label_app_kubernetes_io_managed_by", "oeprov"),
            keep("pod_container_port_name", "metrics"),
            take("pod_name", "instance"),
            take("pod_node_name", "host"),
            take("pod_label_app_kubernetes_io_instance", "training"),
            {"target_label": "cluster", "replacement": inventory.cluster},
        ],
    }
