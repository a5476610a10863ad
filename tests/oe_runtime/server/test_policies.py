"""Admission and eviction through clients and servers; the rules themselves are tested in the core."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_processes import Server, Servers

from oe_runtime import CheckpointError, Client, SpecError, SpecMismatch, TableSpec
from oe_runtime.server import metrics

pytestmark = pytest.mark.process

# Each push of an id adds 1 to its row, which begins at 1.
PLAIN = {"optimizer": {"name": "sgd"}, "initializer": {"name": "constant", "value": 1.0}}
FILTERED = TableSpec(
    "filtered",
    3,
    admission={"name": "counter", "filter_freq": 3},
    eviction=[{"name": "global_step", "steps_to_live": 2}, {"name": "cap", "max_rows": 96, "policy": "lfu"}],
    **PLAIN,
)
BLOOM = TableSpec(
    "bloom",
    3,
    admission={
        "name": "cbf",
        "filter_freq": 3,
        "max_element_size": 10000,
        "false_positive_probability": 0.001,
        "default_value": 0.5,
    },
    **PLAIN,
)


def push(client: Client, lookups: list[tuple[int, int]], *ids: list[int]) -> None:
    pulled = client.pull([np.array(one, np.int64) for one in ids], lookups)
    gradients = [np.full((len(group.inverse), group.dim), -1.0, np.float32) for group in pulled.groups]
    client.push(pulled, gradients, 1.0)


def first(client: Client, table: int, ids: list[int]) -> list[float]:
    return client.pull_rows(table, np.array(ids, np.int64))[:, 0].tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_duplicates_in_a_batch_count_on_servers(tmp_path, count):
    servers = Servers(tmp_path, count)
    try:
        with Client(servers.endpoints) as client, Client.in_process(servers=count) as local:
            for one in (client, local):
                filtered, bloom = one.create_table(FILTERED), one.create_table(BLOOM)
                plain = one.create_table(TableSpec("plain", 3, **PLAIN))
                ids, more = [1, 1, 1, 1, 2, 2, 2, 3, 3, 4], [3, 5]
                # `filtered` is looked up twice; all tables share a group.
                push(one, [(filtered, 0), (plain, 0), (bloom, 0), (filtered, 1)], ids, more)
                assert first(one, filtered, [1, 2, 3, 4, 5]) == [5, 4, 4, 0, 0]
                assert first(one, bloom, [1, 2, 3, 4, 5]) == [5, 4, 0.5, 0.5, 0.5]
                assert first(one, plain, [1, 2, 3, 4, 5]) == [5, 4, 3, 2, 1]
            assert client.spec(filtered).eviction[0]["policy"] == "lfu"
            assert client.create_table(client.spec(bloom)) == bloom
            with pytest.raises(SpecMismatch, match=r"admission\.filter_freq 3\.0; asked for was 4\.0"):
                client.create_table(
                    TableSpec("filtered", 3, admission={"name": "counter", "filter_freq": 4}, **PLAIN)
                )
            with pytest.raises(SpecError, match=r"table 'x': 'eviction' cap has room for 5 rows"):
                client.create_table(TableSpec("x", 1, eviction=[{"name": "cap", "max_rows": 5}]))
    finally:
        servers.end()


def test_evictions_and_metrics(tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        with Client(servers.endpoints) as client:
            filtered, bloom = client.create_table(FILTERED), client.create_table(BLOOM)
            push(client, [(filtered, 0), (bloom, 0)], list(range(1000)) * 3)
            push(client, [(filtered, 0)], [0])
            stats = client.stats()["servers"]
            assert sum(server["tables"]["filtered"]["rows"] for server in stats) == 96
            for _ in range(3):
                push(client, [(filtered, 0)], [])
            assert client.evict() == 96
            stats = client.stats()["servers"]
            assert sum(server["tables"]["filtered"]["rows"] for server in stats) == 0
            samples = {}
            for server in stats:
                assert server["tables"]["bloom"]["admission"]["filter_bytes"] > 0
                server["tables"] = list(server["tables"].values())
                for family in text_string_to_metric_families(metrics.text(server, 0)):
                    for sample in family.samples:
                        key = (sample.name, *sorted(sample.labels.items()))
                        samples[key] = samples.get(key, 0) + sample.value
    finally:
        servers.end()
    assert samples["oe_admitted_rows_total", ("table", "bloom")] == 1000
    table = ("table", "filtered")
    evicted = {
        policy: samples["oe_evicted_rows_total", ("policy", policy), table]
        for policy in ("global_step", "cap")
    }
    assert evicted["global_step"] == 96
    assert evicted["cap"] <= 1  # id 0, if it had no row
    assert samples["oe_admitted_rows_total", table] == 96 + evicted["cap"]
    assert samples["oe_refused_keys_total", ("by", "cap"), table] == 1000 - 96
    assert samples["oe_refused_keys_total", ("by", "admission"), ("table", "bloom")] == 0


@pytest.mark.parametrize(("transfer", "count"), [("shared", 1), ("shared", 2), ("wire", 2)])
def test_counts_are_saved_and_move_to_other_servers(tmp_path, transfer, count):
    saved, again = tmp_path / "saved", tmp_path / "again"
    saved.mkdir()
    again.mkdir()
    tables = (FILTERED, BLOOM)
    with Client.in_process(servers=3) as client:
        for spec in tables:
            push(client, [(client.create_table(spec), 0)], [1, 2, 3] * 2)
        client.save(saved)
    servers = [
        Server(tmp_path, "--checkpoint-dir", str(tmp_path / f"own-{index}"), index=index, count=count)
        for index in range(count)
    ]
    try:
        with Client([server.endpoint for server in servers], checkpoint_transfer=transfer) as client:
            ids = [client.create_table(spec) for spec in tables]
            client.restore(saved)
            held: dict[str, bytes] = {}
            client.save(again, contents=held)
            assert not held, "which is for tables without counts"
            names = {path.name for path in again.iterdir()}
            assert {f"server-0-of-{count}.{spec.name}.oet.filter" for spec in tables} <= names
            client.restore(again)
            for table in ids:
                push(client, [(table, 0)], [1, 2])
                assert first(client, table, [1, 2]) == [2, 2], "the third time"
                assert first(client, table, [3])[0] < 1
            (saved / "server-1-of-3.bloom.oet.filter").unlink()
            with pytest.raises(CheckpointError, match=r"server-1-of-3\.bloom\.oet\.filter is missing"):
                client.restore(saved)
    finally:
        for server in servers:
            server.end()
