"""Rows by key over real servers: assigned, erased, exported and imported; tables that are dropped."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from server_processes import Relay, Servers

from oe_runtime import CheckpointError, Client, KeyRangeError, ServerLost, SpecError, TableSpec, row_files

ADAM = TableSpec("e", 4, optimizer={"name": "adam"})
KEYS = np.arange(-500, 500, dtype=np.int64) * 7919


@pytest.fixture(params=["dram", "dram_pmem", "dram_ssd"])
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


def test_rows_and_state_are_columns_of_the_callers_array(servers):
    with Client(servers.endpoints) as client:
        table = client.create_table(ADAM)
        values = client.new_array(table, 1000, 14)  # weights, 2 columns that nobody touches, state
        values[:] = random((1000, 14))
        wanted = values.copy()
        assert client.assign(table, KEYS, values[:, :4], state=values[:, 6:]) == (1000, 0, 0)
        values[:, :4] = values[:, 6:] = 0
        read = client.read_rows("e", KEYS, out=values[:, :4], state=values[:, 6:])
        assert read.found.all()
        assert (values == wanted).all()
        assert (read.slots["velocity"] == wanted[:, 10:]).all()
        assert np.shares_memory(read.slots["velocity"], values)
        only = np.empty((1000, 4), np.float32)
        assert client.read_rows("e", KEYS, out=only).slots == {}
        assert (only == wanted[:, :4]).all()
        read = client.read_rows("e", [KEYS[3], 10**15], out=values[:2, :4], state=values[:2, 6:])
        assert read.found.tolist() == [True, False]
        assert (values[1, 6:] == 0).all()
        # Rows that do not lie together are brought together to be written, and refused to be read.
        client.assign(table, KEYS, np.asfortranarray(wanted[:, :4]))
        assert (client.read_rows("e", KEYS).rows == wanted[:, :4]).all()
        frozen = only.copy()
        frozen.flags.writeable = False
        for arrays, message in (
            ({"out": np.asfortranarray(only)}, "the rows of a key do not lie one after the other"),
            ({"out": only[::-1]}, "the rows of a key do not lie one after the other"),
            ({"out": only.astype(np.float64)}, r"float64 of shape \(1000, 4\); expected float32"),
            ({"out": only[:9]}, r"of shape \(9, 4\); expected float32 of shape \(1000, 4\)"),
            (
                {"out": only, "state": only},
                r"slots are .* \(1000, 4\); expected float32 of shape \(1000, 8\)",
            ),
            ({"state": np.empty((1000, 8), np.float32)}, "'state' needs 'out'"),
        ):
            with pytest.raises(SpecError, match=message):
                client.read_rows("e", KEYS, **arrays)
        with pytest.raises(ValueError, match="not writeable"):
            client.read_rows("e", KEYS, out=frozen)
        with pytest.raises(SpecError, match="'slots' and 'state' are the same"):
            client.assign("e", KEYS, only, {}, state=values[:, 6:])
        assert (only == wanted[:, :4]).all()


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
    with pytest.warns(UserWarning, match="its cap evicted 2 rows for the assigned ones, of which 0 were not"):
        assert client.assign(table, np.array([200, 201]), np.ones((2, 1), np.float32)) == (2, 2, 0)


def test_many_rows_go_out_in_pieces():
    # Two and a half messages; every server and every position gets its own.
    client = Client.in_process(servers=3)
    table = client.create_table(TableSpec("big", 1, optimizer={"name": "adam"}))
    keys = np.arange(650_000, dtype=np.int64)
    rows = (keys % 65_521).astype(np.float32)[:, None]
    assert client.assign(table, keys, rows, {"momentum": rows, "velocity": rows + 1}).created == len(keys)
    read = client.read_rows(table, keys)
    assert read.found.all()
    assert (read.rows == rows).all()
    assert (read.slots["velocity"] == rows + 1).all()


def test_an_exported_table_comes_back_as_it_was(servers, tmp_path):
    file = tmp_path / "rows.parquet"
    slots = {"momentum": random((1000, 4), 1), "velocity": abs(random((1000, 4), 2))}
    with Client(servers.endpoints) as client:
        client.create_table(ADAM)
        client.assign("e", KEYS, random((1000, 4)), slots)
        assert client.export("e", file) == 1000
        before = client.to_arrow("e")
        written = pq.read_table(file)
        assert written.schema.names == ["key", "row", "momentum", "velocity"]
        assert str(written.schema.field("row").type) == "fixed_size_list<element: float>[4]"
        assert json.loads(written.schema.metadata[b"oe_runtime.table"])["dim"] == 4
        assert written.sort_by("key") == before.sort_by("key")
        with pytest.raises(FileExistsError, match="overwrite=True"):
            client.export("e", file)
        client.erase("e", KEYS)
        assert client.import_rows("e", file) == (1000, 0, 0)
        assert client.to_arrow("e").sort_by("key") == before.sort_by("key")
        client.export("e", file, overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["rows.parquet"]
    # Into tables of another number of servers, of this process, and without the slots.
    other = Client.in_process(servers=3)
    other.create_table(ADAM)
    other.create_table(TableSpec("half", 4, dtype="bfloat16", optimizer={"name": "sgd"}))
    other.import_rows("e", before)
    read = other.read_rows("e", KEYS)
    assert (read.rows == random((1000, 4))).all()
    assert all((read.slots[name] == slots[name]).all() for name in slots)
    other.import_rows("half", file, slots=False)
    assert np.allclose(other.pull_rows(1, KEYS), random((1000, 4)), rtol=2**-8)


def test_a_large_table_is_written_in_groups_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_PIECE", 4096)
    monkeypatch.setattr(row_files, "_KEYS_AT_ONCE", 300)
    client = Client.in_process(servers=2)
    client.create_table(TableSpec("d", 2, dtype="float64", optimizer={"name": "sgd"}))
    client.assign("d", KEYS, np.stack([KEYS, -KEYS], 1).astype(np.float64))
    client.export("d", tmp_path / "rows.parquet")
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.num_row_groups >= 16
    assert max(file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)) <= 4096 // 24
    other = Client.in_process()
    other.create_table(TableSpec("d", 2, dtype="float64", optimizer={"name": "adagrad"}))
    assert other.import_rows("d", tmp_path / "rows.parquet").created == 1000
    assert (other.pull_rows(0, KEYS)[:, 0] == KEYS).all()


def test_a_file_that_does_not_fit_changes_nothing(tmp_path):
    client = Client.in_process()
    client.create_table(ADAM)

    def table(**columns: Any) -> pa.Table:
        row = columns.pop("row", [[1.0] * 4] * 3)
        kind = columns.pop("kind", pa.list_(pa.float32()))
        key = columns.pop("key", [1, 2, 3])
        return pa.table({"key": pa.array(key, pa.int64()), "row": pa.array(row, kind), **columns})

    slots = {name: pa.array([[1.0] * 4] * 3, pa.list_(pa.float32(), 4)) for name in ("momentum", "velocity")}
    for message, source in {
        "it has no column 'row'": table().drop_columns("row"),
        r"'row' has double, the table float32": table(kind=pa.list_(pa.float64())),
        r"'row' has lists of 5, the table of 4": table(row=[[1.0] * 5] * 3, kind=pa.list_(pa.float32(), 5)),
        r"'row' has a list of 3, the table of 4": table(row=[[1.0] * 4, [1.0] * 3, [1.0] * 4]),
        r"'row' is float, not a list": table(row=[1.0] * 3, kind=pa.float32()),
        r"'row' has 1 nulls": table(row=[[1.0] * 4, None, [1.0] * 4]),
        r"'key' has 1 nulls": table(key=[1, None, 3]),
        r"key 7 is there twice": table(key=[7, 2, 7]),
        r"the row of key 2 is not finite": table(row=[[1.0] * 4, [1.0, float("nan"), 1.0, 1.0], [1.0] * 4]),
        r"the slots velocity, but optimizer adam has momentum, velocity": table(velocity=slots["velocity"]),
    }.items():
        with pytest.raises(SpecError, match=message):
            client.import_rows("e", source)
    assert client.stats()["servers"][0]["tables"]["e"]["rows"] == 0
    with pytest.raises(CheckpointError, match="cannot read rows from"):
        client.import_rows("e", tmp_path / "missing.parquet")
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(CheckpointError, match="cannot read rows from"):
        client.import_rows("e", tmp_path / "text.parquet")
    # What others wrote needs no metadata; slots of another optimizer are not these.
    assert client.import_rows("e", table(**slots)).created == 3
    client.create_table(TableSpec("nadam", 4, optimizer={"name": "nadam"}))
    with pytest.raises(SpecError, match=r'its slots are of optimizer .*"adam".*the table\'s is .*"nadam"'):
        client.import_rows("nadam", client.to_arrow("e"))


@pytest.mark.parametrize("rule", [ADAM.optimizer, {"name": "adagrad", "learning_rate_decay": 0.1}])
def test_an_import_says_that_pushes_are_counted_anew(rule):
    client = Client.in_process()
    spec = replace(ADAM, optimizer=rule)
    client.create_table(spec)
    pulled = client.pull([KEYS], [(0, 0)])
    client.push(pulled, [random((1000, 4))], 0.1)
    exported = client.to_arrow("e")
    other = Client.in_process()
    other.create_table(spec)
    with pytest.warns(
        UserWarning,
        match=f"optimizer {rule['name']} depends on the number of pushes, which was 1 at the",
    ):
        other.import_rows("e", exported)


def test_a_dropped_table_is_gone_for_all(servers):
    with Client(servers.endpoints) as client:
        alone = max(server["connections"]["open"] for server in client.stats()["servers"])
    with Client(servers.endpoints, job="x") as client, Client(servers.endpoints, job="x") as other:
        client.create_table(ADAM)
        client.create_table(TableSpec("a", 4, "array", 1000))
        other.create_table(ADAM)
        client.assign("e", KEYS, random((1000, 4)))
        client.assign("a", np.arange(1000), random((1000, 4)))
        with pytest.raises(SpecError, match=r"the job has 1 other client connected.*force=True"):
            client.drop_table("e")
        assert client.read_rows("e", KEYS).found.all()
        client.drop_table("e", force=True)
        with pytest.raises(SpecError, match="table 'e' was dropped from job 'x' by a client"):
            other.pull_rows(0, KEYS)
        for use in (lambda: client.pull_rows(0, KEYS), lambda: client.pull([KEYS], [(0, 0)])):
            with pytest.raises(SpecError, match="table id 0 is of a table that this client has dropped"):
                use()
        with pytest.raises(SpecError, match="table 'e' is not one of this client's: a"):
            client.assign("e", KEYS, random((1000, 4)))
        with pytest.raises(SpecError, match="table 'e' is not dropped: it does not exist"):
            client.drop_table("e", force=True)
        client.reconnect()  # ids stay
        assert (client.pull_rows(1, np.arange(1000)) == random((1000, 4))).all()
        assert client.create_table(TableSpec("e", 2)) == 2
        assert not client.read_rows("e", KEYS).found.any()
    with Client(servers.endpoints) as client:
        for _ in range(1000):  # until both servers have seen that the others are gone
            if max(server["connections"]["open"] for server in client.stats()["servers"]) <= alone:
                break
            time.sleep(0.01)
        assert client.drop_job("x") == 2
        assert client.drop_job("x") == 0
        assert not any(s["jobs"].get("x") for s in client.stats()["servers"])


def test_a_refused_drop_changes_nothing_on_any_server(servers):
    """One server has seen the end of a client's connection, the other has not."""
    ends, seen = threading.Event(), threading.Event()

    def end(_op: int) -> None:
        if ends.is_set():
            raise ConnectionError

    def keep(_op: int) -> None:
        if ends.is_set():
            seen.wait()

    relays = [Relay(endpoint, work) for endpoint, work in zip(servers.endpoints, (end, keep), strict=True)]
    with Client(servers.endpoints, job="x") as client:
        client.create_table(ADAM)
        client.assign("e", KEYS, random((1000, 4)))

        def connections() -> int:
            return client.stats()["servers"][0]["connections"]["open"]

        alone = connections()
        with Client([relay.endpoint for relay in relays], job="x", timeout=2) as other:
            ends.set()
            with pytest.raises(ServerLost):
                other.stats()
        while connections() > alone:
            time.sleep(0.01)
        for drop in (lambda: client.drop_table("e"), lambda: client.drop_job("x")):
            with pytest.raises(SpecError, match=r"no table is dropped: the job has 1 other client connected"):
                drop()
            assert client.read_rows("e", KEYS).found.all()
        seen.set()
        for relay in relays:
            relay.close()
        client.drop_table("e", force=True)


def test_what_a_recovering_server_holds_is_dropped(tmp_path):
    def run(work: Callable[[Client], None]) -> None:
        servers = Servers(tmp_path, 2, "--storage-recover", storage="pmem_libpmem")
        try:
            with Client(servers.endpoints) as client:
                work(client)
        finally:
            servers.end()
            for server in servers.servers:
                server.ready_file.unlink(missing_ok=True)

    def make(client: Client) -> None:
        for name in ("e", "kept"):
            table = client.create_table(TableSpec(name, 4))
            client.assign(table, KEYS, random((1000, 4)))
        client.checkpoint(1, wait=True)

    def look(client: Client) -> None:
        assert [len(client.keys(client.create_table(TableSpec(name, 4)))) for name in ("e", "kept")] == [
            0,
            1000,
        ]

    run(make)
    run(lambda client: client.drop_table("e"))  # which it never created
    run(look)
