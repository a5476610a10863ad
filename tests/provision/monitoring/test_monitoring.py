"""Files for Prometheus and Grafana, held to what a real server shows."""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_processes import Servers

from oe_runtime import Client, TableSpec, Worker
from provision.cli import main as cli
from provision.inventory.loader import load
from provision.monitoring import stack

INVENTORY = """\
all:
  vars: {{oeprov_cluster: ads, training_data: generate:100{variables}}}
  children:
    parameter_servers:
      vars: {{parameter_server_metrics_port: 7780}}
      hosts:
        re6p-1:
          oeprov_kind: re6p
          ansible_host: 192.0.2.11
          parameter_server_count: 2
          parameter_server_metrics_host: 0.0.0.0
        re6p-2: {{oeprov_kind: re6p, ansible_host: 192.0.2.12}}
        re6p-3: {{oeprov_kind: re6p, ansible_host: 192.0.2.13, parameter_server_metrics_port: 0}}
        here: {{oeprov_kind: local, ansible_connection: local, pmem_mode: none}}
    workers:
      hosts: {{gpu-1: {{oeprov_kind: gpu}}}}
"""
Labels = dict[str, set[str]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.DASHBOARD_FILE.read_text())
    return found


def inventory_file(directory: Path, variables: str = "") -> Path:
    path = directory / "inventory.yml"
    path.write_text(INVENTORY.format(variables=variables))
    return path


def shown(tmp_path: Path) -> Labels:
    """Names of all samples that a server can show, with their labels."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers = Servers(tmp_path, 1, "--metrics-port", str(port), storage="dram_pmem")
    try:
        # The second of a job with two workers never comes; a job of its own has tables with policies.
        with (
            Client(servers.endpoints, job="many", worker=Worker(0, of=2)),
            Client(servers.endpoints, job="ctr") as client,
        ):
            spec = TableSpec(
                "ids",
                4,
                admission={"name": "counter", "filter_freq": 1},
                eviction=[{"name": "cap", "max_rows": 1000, "policy": "lru"}],
            )
            table = client.create_table(spec)
            pulled = client.pull([np.arange(10)], [(table, 0)])
            client.push(pulled, [np.ones_like(pulled.groups[0].rows)], learning_rate=0.1)
            (tmp_path / "saved").mkdir()
            client.save(tmp_path / "saved")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
    finally:
        servers.end()
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.process
def test_the_dashboard_asks_for_what_servers_show(tmp_path: Path) -> None:
    there = shown(tmp_path)
    expressions = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = [
        item["query"]["query"] for item in dashboard()["templating"]["list"] if item["name"] == "cluster"
    ]
    assert len(expressions) > 20
    asked = set()
    for expression in [*expressions, *variables]:
        names = re.findall(r"\boe_\w+", expression)
        assert names, expression
        asked |= set(names)
        for name in names:
            assert name in there, f"{name} in {expression}: no server shows it"
        labels = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
        }
        # Prometheus itself adds the instance.
        assert labels - {"instance"} <= set().union(*(there[name] for name in names)), expression
        for counter in re.findall(r"rate\((\w+)", expression):
            assert counter.endswith(("_total", "_bucket")), expression
    assert {name.removesuffix("_bucket").removesuffix("_total") for name in asked} <= {
        name.removesuffix("_bucket").removesuffix("_total") for name in there
    }


def test_the_dashboard_is_whole(tmp_path: Path) -> None:
    found = dashboard()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]
        for target in panel["targets"]:
            assert 'cluster=~"$cluster"' in target["expr"]
            assert "{w}" not in target["expr"]


def test_prometheus_finds_every_server(tmp_path: Path) -> None:
    config, notes = stack.prometheus(load(inventory_file(tmp_path)))
    (job,) = config["scrape_configs"]
    found = {item["labels"]["host"]: item["targets"] for item in job["static_configs"]}
    assert found == {
        "re6p-1": ["192.0.2.11:7780", "192.0.2.11:7781"],
        "re6p-2": ["127.0.0.1:7780"],
        "here": ["127.0.0.1:7780"],
    }
    assert {item["labels"]["cluster"] for item in job["static_configs"]} == {"ads"}
    assert len(notes) == 2
    assert notes[0].startswith("re6p-2: its metrics are on loopback only")
    assert notes[1].startswith("re6p-3: exports no metrics")


def test_prometheus_finds_servers_on_kubernetes(tmp_path: Path) -> None:
    from provision.jobs.backends.kubernetes import parts

    variables = ", kubernetes_server_image: x, kubernetes_namespace: training"
    config, _ = stack.prometheus(load(inventory_file(tmp_path, variables)))
    job = config["scrape_configs"][1]
    assert job["kubernetes_sd_configs"][0]["namespaces"]["names"] == ["training"]
    first = job["relabel_configs"][0]
    label = next(
        key for key, value in parts.labels_of("ctr").items() if value == first["regex"] and "managed" in key
    )
    assert first["source_labels"] == ["__meta_kubernetes_pod_label_" + re.sub(r"[^a-z]", "_", label)]


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory_file(tmp_path, ", kubernetes_server_image: x")
    assert cli.run(["monitoring", "-i", str(path), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"import {tmp_path / 'out' / 'grafana-dashboard.json'}" in said
    assert json.loads((tmp_path / "out" / stack.DASHBOARD).read_text()) == dashboard()
    written = tmp_path / "out" / stack.PROMETHEUS
    assert len(yaml.safe_load(written.read_text())["scrape_configs"]) == 2
    if promtool := shutil.which("promtool"):  # Debian's knows no Kubernetes
        assert (
            cli.run(["monitoring", "-i", str(inventory_file(tmp_path)), "--output", str(tmp_path / "out")])
            == 0
        )
        subprocess.run([promtool, "check", "config", str(written)], check=True)


def test_nothing_to_monitor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory_file(tmp_path)
    path.write_text(path.read_text().replace("7780", "0"))
    assert cli.run(["monitoring", "-i", str(path), "--state-dir", str(tmp_path)]) == 1
    assert "no server exports metrics; set parameter_server_metrics_port" in capsys.readouterr().err
    assert not (tmp_path / "monitoring").exists()


def test_a_directory_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ["monitoring", "-i", str(inventory_file(tmp_path)), "--output", str(tmp_path / "file" / "x")]
    assert cli.run(words) == 1
    assert "Not a directory" in capsys.readouterr().err
