"""Rows by key over real servers: assigned, erased, exported and imported; tables that are dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, KeyRangeError, SpecError, TableSpec

ADAM = TableSpec("e", 4, optimizer={"name": "adam"})
KEYS = np.arange(-500, 500, dtype=np.int64) * 7919


@pytest.fixture(params=["dram", "dram_pmem"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    running = Servers(tmp_path / "servers", 2, storage=request.param)
    yield running
    running.end()


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_assigned_rows_are_those_that_are_read(servers):
    with Client(servers.endpoints) as client:
        table = client.create_table(ADAM)
        slots = {"momentum": random((1000, 4), 1), "velocity": abs(random((1000, 4), 2))}
        assert client.slots("e") == {"momentum": 4, "velocity": 4}
        assert client.assign("e", KEYS, random((1000, 4)), slots) == (1000, 0, 0)
        assert (client.pull_rows(table, KEYS) == random((1000, 4))).all()
        read = client.read_rows(table, KEYS[::-1])
        assert read.found.all()
        assert (read.rows == random((1000, 4))[::-1]).all()
        assert all((read.slots[name] == slots[name][::-1]).all() for name in slots)
        # Without slots, rows keep theirs, and new ones have those of a new row.
        keys = np.concatenate([KEYS[:3], [10**15]])
        assert client.assign(table, keys, np.ones((4, 4), np.float32)).created == 1
        read = client.read_rows(table, keys)
        assert (read.rows == 1).all()
        assert (read.slots["velocity"][:3] == slots["velocity"][:3]).all()
        assert (read.slots["velocity"][3] == 0).all()


def test_erased_keys_read_as_new_ones(servers):
    with Client(servers.endpoints) as client:
        table = client.create_table(ADAM)
        before = client.pull_rows(table, KEYS)
        client.assign(table, KEYS, random((1000, 4)))
        assert client.erase("e", np.concatenate([KEYS[:600], [10**15]])) == 600
        rows = client.pull_rows(table, KEYS)
        assert (rows[:600] == before[:600]).all()
        assert (rows[600:] == random((1000, 4))[600:]).all()
        assert not client.read_rows(table, KEYS[:600]).found.any()
        assert sum(s["tables"]["e"]["rows"] for s in client.stats()["servers"]) == 400


def test_assigned_rows_are_in_checkpoints_and_increments(servers, tmp_path):
    full, more = tmp_path / "full", tmp_path / "more"
    with Client(servers.endpoints) as client:
        table = client.create_table(ADAM)
        client.assign(table, KEYS, random((1000, 4)))
        full.mkdir()
        client.save(full)
        client.assign(
            table,
            KEYS[:10],
            random((10, 4), 3),
            {n: np.ones((10, 4), np.float32) for n in client.slots(table)},
        )
        client.erase(table, KEYS[900:])
        more.mkdir()
        assert {entry["rows"] for entry in client.save(more, since=full)} != {0}
        client.erase(table, KEYS)
        client.restore(full, more)
        read = client.read_rows(table, KEYS)
        assert read.found.tolist() == [True] * 900 + [False] * 100
        assert (read.rows[:10] == random((10, 4), 3)).all()
        assert (read.rows[10:900] == random((1000, 4))[10:900]).all()
        assert (read.slots["momentum"][:10] == 1).all()


def test_rows_that_were_pulled_before_an_assignment_are_pulled_anew():
    client = Client.in_process()
    table = client.create_table(ADAM)
    pulled = client.pull([KEYS], [(table, 0)])
    client.assign(table, KEYS, random((1000, 4)))
    client.refresh(pulled, staleness=5)
    assert (client.embeddings(pulled.groups[0]) == random((1000, 4))).all()
    client.erase(table, KEYS)
    client.refresh(pulled, staleness=5)
    assert (client.embeddings(pulled.groups[0]) == client.pull_rows(table, KEYS)).all()


def test_a_wrong_assignment_changes_nothing(servers):
    with Client(servers.endpoints) as client:
        table = client.create_table(ADAM)
        array = client.create_table(TableSpec("a", 4, "array", 100))
        keys, rows = KEYS[:3], random((3, 4))
        wrong = np.array([[1, 2, 3, 4], [1, np.nan, 3, 4], [1, 2, 3, 4]], np.float32)
        for message, values in {
            r"the rows are float64 of shape \(3, 4\); expected float32 of shape \(3, 4\)": (
                keys,
                rows.astype(float),
            ),
            r"of shape \(3, 5\)": (keys, random((3, 5))),
            r"of shape \(2, 4\)": (keys, rows[:2]),
            r"key -3959500 is there twice": (KEYS[[0, 1, 0]], rows),
            rf"table 'e': the row of key {keys[1]} is not finite": (keys, wrong),
            r"keys must be int64": (keys.astype(np.int32), rows),
            r"the slots are momentum; its optimizer adam has momentum, velocity": (
                keys,
                rows,
                {"momentum": rows},
            ),
            r"slot velocity has shape \(3, 5\)": (keys, rows, {"momentum": rows, "velocity": random((3, 5))}),
            r"optimizer's state of key": (keys, rows, {"momentum": rows, "velocity": wrong}),
        }.items():
            with pytest.raises(SpecError, match=message):
                client.assign(table, *values)
        with pytest.raises(SpecError, match="table 'other' is not one of this client's: e, a"):
            client.assign("other", keys, rows)
        for change in (
            lambda: client.assign(array, np.array([5, 100]), rows[:2]),
            lambda: client.erase(array, KEYS),
        ):
            with pytest.raises(KeyRangeError, match="table 'a': key"):
                change()
        assert all(t["rows"] == 0 for s in client.stats()["servers"] for t in s["tables"].values())
        with Client(servers.endpoints, read_only=True) as reader:
            reader.create_table(ADAM)
            assert not reader.read_rows("e", keys).found.any()
            for change in (lambda: reader.assign("e", keys, rows), lambda: reader.erase("e", keys)):
                with pytest.raises(SpecError, match="this client is read-only"):
                    change()


def test_more_rows_than_the_cap_keeps_are_said():
    client = Client.in_process()
    cap = TableSpec("c", 1, "array", 10_000, eviction=[{"name": "cap", "policy": "lru", "max_rows": 160}])
    table = client.create_table(cap)
    with pytest.raises(SpecError, match="161 rows are more than the 160 of its 'eviction' cap"):
        client.assign(table, np.arange(161), np.ones((161, 1), np.float32))
    client.assign(table, np.arange(160), np.ones((160, 1), np.float32))
    with pytest.warns(UserWarning, match="its cap evicted 2 rows for those assigned, of which 0 were not"):
        assert client.assign(table, np.array([200, 201]), np.ones((2, 1), np.float32)) == (2, 2, 0)


def test_many_rows_go_out_in_pieces():
    # 20 bytes a key: two and a half messages of 32 MiB; every server and every position gets its own.
    client = Client.in_process(servers=3)
    table = client.create_table(TableSpec("big", 1, optimizer={"name": "adam"}))
    keys = np.arange(4_200_000, dtype=np.int64)
    rows = (keys % 65_521).astype(np.float32)[:, None]
    assert client.assign(table, keys, rows, {"momentum": rows, "velocity": rows + 1}).created == len(keys)
    read = client.read_rows(table, keys)
    assert read.found.all()
    assert (read.rows == rows).all()
    assert (read.slots["velocity"] == rows + 1).all()
