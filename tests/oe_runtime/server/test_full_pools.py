"""A pool without room for new rows goes on with those that it has, over the wire too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, StorageError, StorageFull, StorageSpec, TableSpec
from oe_runtime.server import metrics

MIB = 1 << 20
SPEC = TableSpec(
    "t", 16, optimizer={"name": "adagrad"}, eviction=[{"name": "global_step", "steps_to_live": 1_000_000}]
)


def push(client: Client, keys: np.ndarray) -> None:
    pulled = client.pull([keys], [(0, 0)])
    client.push(pulled, [np.ones((len(keys), SPEC.dim), np.float32)], 0.1)


def fill(client: Client, first: int = 0) -> int:
    """New rows until one is refused; how many there are."""
    for rows in range(first, 10**6, 500):
        try:
            push(client, np.arange(rows, rows + 500))
        except StorageFull as full:
            assert "takes no new rows" in str(full)  # noqa: PT017 - which push it is, is not known
            return rows
    raise AssertionError("it is never full")


def pool(client: Client) -> dict[str, int]:
    (server,) = client.stats()["servers"]
    return server["tables"]["t"]["pool"]


@pytest.fixture(params=["pmem_libpmem", "dram_pmem"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """Of a server with room for 8 MiB."""
    servers = Servers(tmp_path, 1, "--storage-size", str(8 * MIB), storage=request.param)
    try:
        with Client(servers.endpoints) as found:
            found.create_table(SPEC)
            yield found
    finally:
        servers.end()


def test_updates_and_evictions_of_a_full_pool(client: Client) -> None:
    rows = fill(client)
    assert rows * 148 > 8 * MIB * 3 // 4, "gave up with room left"
    assert pool(client)["refused"] >= 1
    assert pool(client)["headroom"] < 500
    assert pool(client)["free"] >= pool(client)["reserved"] - 64 * 16
    before = client.pull_rows(0, np.arange(rows))
    chance = np.random.default_rng(0)
    times = np.zeros(rows, np.int64)
    for step in range(1, 41):
        client.checkpoint(step, wait=True)
        keys = np.sort(chance.choice(rows, 500, replace=False))
        push(client, keys)
        times[keys] += 1
    changed = (client.pull_rows(0, np.arange(rows)) != before).any(axis=1)
    np.testing.assert_array_equal(changed, times > 0)
    with pytest.raises(StorageError):
        push(client, np.arange(rows, 2 * rows))
    (server,) = client.stats()["servers"]
    table = server["tables"]["t"]
    page = metrics.text({**server, "tables": [table]}, 0.0)
    assert f'oe_pool_headroom_rows{{table="t"}} {table["pool"]["headroom"]}' in page
    assert f'oe_pool_slots{{table="t"}} {table["pool"]["slots"]}' in page
    assert f'oe_pool_refused_rows_total{{table="t"}} {table["pool"]["refused"]}' in page


def test_a_full_pool_evicts_in_turns(tmp_path: Path) -> None:
    spec = TableSpec(
        "t", 16, optimizer={"name": "adagrad"}, eviction=[{"name": "global_step", "steps_to_live": 1}]
    )
    storage = StorageSpec("pmem_libpmem", str(tmp_path / "pool"), 8 * MIB)
    with Client.in_process(storage, threads=1) as client:
        client.create_table(spec)
        rows = fill(client)
        client.checkpoint(1, wait=True)
        push(client, np.array([5]))
        push(client, np.array([5]))
        for step in range(2, 30):
            try:
                client.evict()
                break
            except StorageFull as full:
                assert "make a checkpoint" in str(full)  # noqa: PT017 - each time
            push(client, np.array([5]))  # what is left is updated
            client.checkpoint(step, wait=True)
        assert client.export_rows(0)[0].tolist() == [5]
        for step in range(30, 38):
            client.checkpoint(step, wait=True)
        push(client, np.arange(1_000_000, 1_000_000 + rows // 2))


def test_the_headroom_says_when_new_rows_are_refused(tmp_path: Path) -> None:
    storage = StorageSpec("pmem_libpmem", str(tmp_path / "pool"), 8 * MIB, kept_checkpoints=3)
    with Client.in_process(storage, threads=1) as client:
        client.create_table(SPEC)
        push(client, np.arange(1_000))
        few = pool(client)
        assert few["slots"] >= 1_000 + few["reserved"]
        assert 20_000 < few["headroom"] < 8 * MIB // 148
        client.checkpoint(1, wait=True)
        push(client, np.arange(100))
        assert pool(client)["changed"] == 100
        assert pool(client)["reserved"] >= 4 * 100
        rows = fill(client, 1_000)
        assert abs(rows - (1_000 + few["headroom"])) < 3_000, "about"
