"""Files for Prometheus and Grafana: a configuration that scrapes the cluster, and a dashboard.

The dashboard's queries name metrics of ``oe_runtime/server/metrics.py``; a test compares them.
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import yaml

from provision.cluster.errors import OeprovError
from provision.cluster.inventory import Host, Inventory

Document = dict[str, Any]
PROMETHEUS, DASHBOARD = "prometheus.yml", "grafana-dashboard.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WHERE = '{cluster=~"$cluster"}'
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns

# Title, unit, what it says, and the queries with their legends; {w} stands for the chosen cluster, {r} for a
# rate's window.
Panel = tuple[str, str, str, list[tuple[str, str]]]
_PANELS: tuple[Panel, ...] = (
    (
        "Keys pulled and pushed",
        "ops",
        "Keys whose rows were read and updated, per second.",
        [
            ("sum by (instance) (rate(oe_pulled_keys_total{w}{r}))", "pulled {{instance}}"),
            ("sum by (instance) (rate(oe_pushed_keys_total{w}{r}))", "pushed {{instance}}"),
        ],
    ),
    (
        "Time of a pull and of a push, 99th percentile",
        "s",
        "Serving time in the server, without the network and the queue.",
        [
            ("histogram_quantile(0.99, sum by (le) (rate(oe_pull_duration_seconds_bucket{w}{r})))", "pull"),
            ("histogram_quantile(0.99, sum by (le) (rate(oe_push_duration_seconds_bucket{w}{r})))", "push"),
            (
                "histogram_quantile(0.99, sum by (le) (rate(oe_queue_wait_seconds_bucket{w}{r})))",
                "waiting before",
            ),
        ],
    ),
    (
        "Memory by tier",
        "bytes",
        "Rows in DRAM (with a cache: those in it), rows in persistent memory or on drives, and indexes.",
        [("sum by (tier) (oe_memory_bytes{w})", "{{tier}}")],
    ),
    (
        "Resident memory of servers",
        "bytes",
        "Mapped persistent memory counts too.",
        [("oe_resident_memory_bytes{w}", "{{instance}}")],
    ),
    (
        "Rows",
        "short",
        "Rows of all tables on each server.",
        [("sum by (instance) (oe_table_rows{w})", "{{instance}}")],
    ),
    (
        "New rows that pools have room for",
        "short",
        "Until new rows are refused, about: the least of any server, by table; and refusals per second.",
        [
            ("min by (training_job, table) (oe_pool_headroom_rows{w})", "{{training_job}} {{table}}"),
            ("sum by (table) (rate(oe_pool_refused_rows_total{w}{r})) > 0", "refused: {{table}}"),
        ],
    ),
    (
        "Cache hits",
        "percentunit",
        "Of the rows that were read with storage dram_pmem or dram_ssd, the part that came from DRAM.",
        [
            (
                "sum by (instance) (rate(oe_cache_hits_total{w}{r})) / (sum by (instance) "
                "(rate(oe_cache_hits_total{w}{r})) + sum by (instance) (rate(oe_cache_misses_total{w}{r})))",
                "{{instance}}",
            )
        ],
    ),
    (
        "Admission and eviction",
        "ops",
        "Rows that were made and evicted, and keys that got none, per second.",
        [
            ("sum(rate(oe_admitted_rows_total{w}{r}))", "admitted rows"),
            ("sum by (policy) (rate(oe_evicted_rows_total{w}{r}))", "evicted by {{policy}}"),
            ("sum by (by) (rate(oe_refused_keys_total{w}{r}))", "keys refused by {{by}}"),
        ],
    ),
    (
        "Traffic",
        "Bps",
        "Bytes of requests and of replies.",
        [
            ("sum by (instance) (rate(oe_received_bytes_total{w}{r}))", "in {{instance}}"),
            ("sum by (instance) (rate(oe_sent_bytes_total{w}{r}))", "out {{instance}}"),
        ],
    ),
    (
        "Requests that wait",
        "short",
        "To be served, and connections that wait for memory.",
        [
            ("sum by (instance) (oe_queued_requests{w})", "queued {{instance}}"),
            ("sum by (instance) (oe_waiting_connections{w})", "for memory {{instance}}"),
        ],
    ),
    (
        "Connections, and what was refused",
        "short",
        "Open connections; refusals by their reason, per second.",
        [
            ("sum by (instance) (oe_open_connections{w})", "open {{instance}}"),
            ("sum by (reason) (rate(oe_refusals_total{w}{r})) > 0", "refused: {{reason}}"),
        ],
    ),
    (
        "Workers of jobs",
        "short",
        "Of jobs with several workers: all, connected and lost; requests that wait for other workers.",
        [
            ("max by (training_job, state) (oe_job_workers{w})", "{{training_job}} {{state}}"),
            ("sum by (training_job) (oe_worker_waiting_requests{w})", "{{training_job}} waiting"),
        ],
    ),
    (
        "Time since all tables were saved",
        "s",
        "The oldest of all servers, since a checkpoint has all of them.",
        [("max(oe_last_checkpoint_age_seconds{w})", "since the last checkpoint")],
    ),
    (
        "Pushes that no checkpoint has",
        "short",
        "What would be lost if the servers were, by table: the most of any server.",
        [("max by (training_job, table) (oe_checkpoint_lag_pushes{w})", "{{training_job}} {{table}}")],
    ),
    (
        "Gradients that are not finite",
        "ops",
        "Of rows, that were refused or skipped, per second.",
        [("sum by (table) (rate(oe_nonfinite_gradients_total{w}{r})) > 0", "{{table}}")],
    ),
    (
        "Damaged rows",
        "short",
        "Of pools, that were removed because their checksum was wrong, since the servers started.",
        [("sum by (training_job, table) (oe_quarantined_rows_total{w}) > 0", "{{training_job}} {{table}}")],
    ),
)


class MonitoringError(OeprovError):
    """No server has metrics, or the files cannot be written."""


def write(inventory: Inventory, directory: Path) -> list[str]:
    """Write both files; return notes for the user, one line each."""
    config, notes = prometheus(inventory)
    files = {
        PROMETHEUS: "# Made by oeprov from the inventory; use it as it is, or take its scrape_configs.\n"
        + yaml.safe_dump(config, sort_keys=False),
        DASHBOARD: json.dumps(dashboard(), indent=2) + "\n",
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
        if host.connection != "local" and _loopback(host.server.metrics_host):
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


def dashboard() -> Document:
    """A dashboard for Grafana 9 and later; its user chooses data source and clusters."""
    panels = [_panel(number, panel) for number, panel in enumerate(_PANELS)]
    return {
        "uid": "oeprov-servers",
        "title": "oeprov: parameter servers",
        "tags": ["oeprov"],
        "schemaVersion": 37,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "cluster",
                    "type": "query",
                    "label": "Cluster",
                    "datasource": _SOURCE,
                    "query": {"query": "label_values(oe_server_info, cluster)", "refId": "cluster"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel) -> Document:
    title, unit, description, queries = panel
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": _SOURCE,
        "gridPos": {"x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": expression.replace("{w}", _WHERE).replace("{r}", _RATE),
                "legendFormat": legend,
            }
            for place, (expression, legend) in enumerate(queries)
        ],
    }
