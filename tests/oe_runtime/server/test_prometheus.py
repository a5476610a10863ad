"""The page for Prometheus, read by its own client's parser."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import urllib.error
import urllib.request

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_processes import Server, Servers, held_port
from test_client import train

from oe_runtime import Client, TableSpec
from oe_runtime.server import metrics
from oe_runtime.support import prometheus

pytestmark = pytest.mark.process


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels; each family is declared, once, with a known type."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
        text = answer.read().decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.type in ("counter", "gauge", "histogram"), family
        assert family.documentation
        assert family.samples or family.name == "oe_table_rows", family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def histogram(samples, name):
    """Count and sum, after checking that the buckets grow to the count."""
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (key, labels), value in samples.items()
        if key == f"{name}_bucket"
    )
    values = [value for _, value in buckets]
    assert values == sorted(values)
    assert buckets[-1][0] == math.inf
    assert values[-1] == samples[f"{name}_count", frozenset()]
    return values[-1], samples[f"{name}_sum", frozenset()]


@pytest.mark.parametrize("storage", ["dram", "dram_pmem"])
def test_the_page_tells_what_the_server_did(tmp_path, storage):
    port = held_port()
    servers = Servers(tmp_path, 1, "--metrics-port", str(port), storage=storage)
    server = servers.servers[0]
    try:
        server.ready()
        fresh = scrape(port)
        assert fresh["oe_pulls_total", frozenset()] == 0
        assert ("oe_last_checkpoint_timestamp_seconds", frozenset()) not in fresh
        with Client(servers.endpoints) as client:
            train(client, steps=3)
            with socket.create_connection(("127.0.0.1", int(servers.endpoints[0].split(":")[1]))) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\nUser-Agent: a stranger\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
            directory = tmp_path / "saved"
            directory.mkdir()
            client.save(directory)
            stats = client.stats()["servers"][0]
            samples = scrape(port)
        plain = {name: value for (name, labels), value in samples.items() if not labels}
        assert plain["oe_pulls_total"] == plain["oe_pushes_total"] == 3
        assert plain["oe_pulled_keys_total"] == stats["pulls"]["keys"] > 0
        assert plain["oe_received_bytes_total"] == stats["traffic"]["bytes_in"]
        assert plain["oe_open_connections"] == 1
        assert plain["oe_sharing_connections"] == stats["connections"]["sharing_memory"]
        assert plain["oe_queued_requests"] == plain["oe_requests_in_flight_bytes"] == 0
        assert samples["oe_refusals_total", frozenset({("reason", "foreign")})] == 1
        assert samples["oe_refusals_total", frozenset({("reason", "token")})] == 0
        tier = "dram" if storage == "dram" else "pmem"
        assert samples["oe_memory_bytes", frozenset({("tier", tier)})] == stats["memory"][tier] > 0
        for name, table in stats["tables"].items():
            labels = frozenset({("table", name)})
            assert samples["oe_table_rows", labels] == table["rows"]
            if storage == "dram":
                continue
            reads = [samples[f"oe_cache_{what}_total", labels] for what in ("hits", "misses")]
            assert reads == [table["cache"]["hits"], table["cache"]["misses"]]
        if storage == "dram_pmem":
            assert sum(value for (name, _), value in samples.items() if name == "oe_cache_misses_total") > 0
        for name in ("pull", "push"):
            count, seconds = histogram(samples, f"oe_{name}_duration_seconds")
            assert count == 3
            assert 0 < seconds < 3 * 300
        assert histogram(samples, "oe_queue_wait_seconds")[0] == 3 + 3 + 4 + 2  # four tables, a save, its cut
        age = plain["oe_last_checkpoint_age_seconds"]
        assert 0 <= age < 3600
        assert {value for (name, _), value in samples.items() if name == "oe_checkpoint_lag_pushes"} == {0}
        server.process.send_signal(signal.SIGTERM)
        assert server.wait()[0] == 0
    finally:
        servers.end()


def test_names_of_tables_are_escaped():
    stats = {
        "index": 0,
        "count": 1,
        "storage": "dram",
        "tables": [
            {"name": 'a"b\\c\nd', "job": "j", "rows": 5, "pushes_at_risk": 6, "nonfinite_gradients": 7}
        ],
        "memory": {"dram": 1, "pmem": 2, "index": 3, "rss": 4},
        "pulls": {"requests": 1, "keys": 2},
        "pushes": {"requests": 1, "keys": 2},
        "traffic": {"requests": 1, "bytes_in": 2, "bytes_out": 3},
        "connections": {"open": 1, "sharing_memory": 0, "accepted": 1, "refused": {"token": 2}},
        "queue": {"requests": 0, "bytes": 0, "waiting_for_memory": 0},
        "workers": [],
        "times": {
            name: {"bounds": [0.5], "counts": [1, 2], "sum_seconds": 3.5}
            for name in ("pull", "push", "queue_wait")
        },
        "saved": 90,
    }
    families = {family.name: family for family in text_string_to_metric_families(metrics.text(stats, 100.0))}
    (sample,) = families["oe_table_rows"].samples
    assert sample.labels == {"training_job": "j", "table": 'a"b\\c\nd'}
    assert families["oe_checkpoint_lag_pushes"].samples[0].value == 6
    assert families["oe_nonfinite_gradients"].samples[0].value == 7
    assert families["oe_last_checkpoint_age_seconds"].samples[0].value == 10
    pull = {(s.name, s.labels.get("le")): s.value for s in families["oe_pull_duration_seconds"].samples}
    assert pull["oe_pull_duration_seconds_bucket", "0.5"] == 1
    assert pull["oe_pull_duration_seconds_bucket", "+Inf"] == 3


def test_checkpoints_in_the_storage_and_bad_gradients(tmp_path):
    port = held_port()
    servers = Servers(tmp_path, 1, "--metrics-port", str(port), storage="pmem_libpmem")
    mine = frozenset({("table", "t")})
    try:
        with Client(servers.endpoints) as client:
            table = client.create_table(TableSpec("t", 4, nonfinite_gradients="skip"))

            def push(value):
                pulled = client.pull([np.arange(3)], [(table, 0)])
                client.push(pulled, [np.full((3, 4), value, np.float32)], learning_rate=0.1)

            push(1.0)
            push(float("nan"))
            samples = scrape(port)
            assert samples["oe_checkpoint_lag_pushes", mine] == 2
            assert samples["oe_nonfinite_gradients_total", mine] == 3
            assert ("oe_last_checkpoint_age_seconds", frozenset()) not in samples
            client.checkpoint(1, wait=True)
            push(1.0)
            samples = scrape(port)
            assert samples["oe_checkpoint_lag_pushes", mine] == 1
            assert 0 <= samples["oe_last_checkpoint_age_seconds", frozenset()] < 3600
            client.recover(1)
            assert scrape(port)["oe_checkpoint_lag_pushes", mine] == 0
    finally:
        servers.end()


def test_other_pages_and_silent_readers(tmp_path):
    port = held_port()
    server = Server(tmp_path, "--metrics-port", str(port))
    try:
        server.ready()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(7)]
        assert (
            scrape(port)["oe_server_info", frozenset({("index", "0"), ("count", "1"), ("storage", "dram")})]
            == 1
        )
        for connection in silent:
            connection.close()
    finally:
        server.end()


def test_a_metrics_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(tmp_path, "--metrics-port", str(port))
        try:
            status, errors = server.wait()
        finally:
            server.end()
    assert status == 1
    assert errors.startswith(f"error: cannot serve metrics on 127.0.0.1:{port}: ")
    assert errors.count("\n") == 1
    assert not server.ready_file.exists()
