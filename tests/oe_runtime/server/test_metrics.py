"""The metrics file of a server, from which `oeprov status` tells memory and speed."""

import json
import signal
import time

import pytest
from server_processes import Servers
from test_client import train

from oe_runtime import Client
from oe_runtime.server import metrics as metrics_module
from oe_runtime.spec import CACHED, STORAGES

pytestmark = pytest.mark.process


def await_upkeep(client):
    """Rows are cached after the reply, when nobody waits: so look again until they are."""
    for _ in range(600):
        if any(table["cache"]["rows"] for table in client.stats()["servers"][0]["tables"].values()):
            return
        time.sleep(0.1)


@pytest.mark.parametrize("storage", STORAGES)
def test_metrics_tell_memory_by_kind_and_what_was_moved(tmp_path, storage):
    servers = Servers(tmp_path, 1, storage=storage)
    server = servers.servers[0]
    try:
        with Client(servers.endpoints) as client:
            train(client, steps=3)
            if storage == "dram_pmem":
                await_upkeep(client)
            stats = client.stats()["servers"][0]
            server.process.send_signal(signal.SIGTERM)
            assert server.wait()[0] == 0
    finally:
        servers.end()
    metrics = json.loads(server.metrics_file.read_text())
    rows, other = ("dram", "pmem") if storage == "dram" else ("pmem", "dram")
    assert metrics["memory"][rows] == sum(table["bytes"] for table in metrics["tables"]) > 0
    caches = [table["cache"] for table in metrics["tables"]]
    assert metrics["memory"][other] == sum(cache["bytes"] for cache in caches)
    cached = storage in CACHED
    assert [sum(cache[field] for cache in caches) > 0 for field in ("bytes", "rows", "misses")] == [
        cached
    ] * 3
    assert metrics["memory"]["index"] == sum(table["index_bytes"] for table in metrics["tables"]) > 0
    assert metrics["memory"]["rss"] > 1 << 20
    if not cached:  # hello, session, shared memory, four tables, three pulls and pushes, and the stats
        assert metrics["traffic"]["requests"] == 14
    assert metrics["traffic"]["bytes_in"] == stats["traffic"]["bytes_in"] > 8 * metrics["pulls"]["keys"]
    assert metrics["traffic"]["bytes_out"] > stats["traffic"]["bytes_out"]
    assert set(metrics) - set(stats) == {"time", "rates"}


def test_rates_are_those_since_the_last_writing(tmp_path, monkeypatch):
    now = [100.0]
    totals = {"pulls": {"keys": 70}, "pushes": {"keys": 7}}
    traffic = {"requests": 1, "bytes_in": 10, "bytes_out": 20}

    class Fake:
        def stats(self):
            return json.dumps({**totals, "traffic": traffic})

    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    metrics = metrics_module.MetricsFile(Fake(), tmp_path / "metrics.json")

    def rates():
        metrics.write()
        return json.loads((tmp_path / "metrics.json").read_text())["rates"]

    assert set(rates().values()) == {0}
    now[0] += 4
    totals["pulls"]["keys"] += 100
    totals["pushes"]["keys"] += 40
    traffic["requests"] += 8
    traffic["bytes_in"] += 2
    assert rates() == {
        "seconds": 4,
        "pulled_keys_per_s": 25,
        "pushed_keys_per_s": 10,
        "requests_per_s": 2,
        "bytes_in_per_s": 0.5,
        "bytes_out_per_s": 0,
    }
