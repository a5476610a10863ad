"""What is wrong is said by name, and nothing is lost or half done by it."""

from __future__ import annotations

import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, GradientError, SpecError, StorageError, StorageSpec, TableSpec
from oe_runtime.checkpoint import cli as checkpoint_cli

SGD = {"name": "sgd"}
KEYS = np.array([0, 1, -1, 2**63 - 1, -(2**63), *range(5, 60)], np.int64)


def push(client: Client, table: int, value: float = 1.0, rate: object = 0.1) -> None:
    pulled = client.pull([KEYS], [(table, 0)])
    group = pulled.groups[0]
    client.push(pulled, [np.full((len(KEYS), group.dim), value, group.rows.dtype)], rate)


# ---- calls


@pytest.mark.parametrize("rate", [np.float32(0.5), np.float64(0.5), np.array(0.5, np.float32), 0.5, [0.5]])
def test_a_learning_rate_is_any_number(rate):
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 1, optimizer=SGD, initializer={"name": "zeros"}))
    push(client, table, rate=rate)
    assert (client.pull_rows(table, KEYS) == -0.5).all()


@pytest.mark.parametrize("rate", ["0.5", None, np.ones((2, 2)), [[0.5]], ["a"]])
def test_what_is_no_learning_rate(rate):
    client = Client.in_process()
    table = client.create_table(TableSpec("t", 1, optimizer=SGD))
    with pytest.raises(SpecError, match="the learning rate must be a number, or one for each group, not "):
        push(client, table, rate=rate)


def test_ftrl_divides_by_the_learning_rate():
    client = Client.in_process()
    tables = [client.create_table(TableSpec(n, 1, optimizer={"name": n})) for n in ("ftrl", "adam")]
    before = client.pull_rows(tables[0], KEYS)
    for rate in (0.0, 1e-46):  # as a schedule may end
        with pytest.raises(SpecError, match=r"'ftrl': .*divides by the learning rate, which must be above 0"):
            push(client, tables[0], rate=rate)
        push(client, tables[1], rate=rate)
    assert np.array_equal(client.pull_rows(tables[0], KEYS), before)


def test_specifications_with_numbers_of_numpy_and_paths(tmp_path):
    client = Client.in_process(
        StorageSpec("pmem_libpmem", tmp_path / "pool", capacity_bytes=np.int64(1 << 30))
    )
    rule = {"name": "adam", "beta_1": np.float32(0.5), "amsgrad": np.bool_(True)}
    table = client.create_table(TableSpec("t", np.int64(4), "array", np.uint32(7), optimizer=rule))
    assert client.spec(table) == client.spec(
        client.create_table(
            TableSpec("t", 4, "array", 7, optimizer={"name": "adam", "beta_1": 0.5, "amsgrad": True})
        )
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"optimizer": "adam"},
            "'optimizer' must be a mapping with a 'name', not 'adam'; write {\"name\": \"adam\"}",
        ),
        ({"initializer": None}, "'initializer' must be a mapping with a 'name', not None"),
        ({"admission": "counter"}, "'admission' must be a mapping"),
        ({"eviction": {"name": "ttl", "seconds": 3}}, "'eviction' must be a list of mappings"),
        ({"eviction": ["ttl"]}, "'eviction[0]' must be a mapping"),
        ({"optimizer": {"name": "adam", "beta_1": 1.0}}, "'beta_1' must be between 0 and 0.99999994, not 1"),
        ({"initializer": {"name": "constant", "value": 1e39}}, "'value' must be a finite number, not 1e+39"),
        (
            {"initializer": {"name": "uniform", "minval": -3e38, "maxval": 3e38}},
            "'minval' and 'maxval' are further apart than float32 holds",
        ),
        ({"eviction": [{"name": "ttl", "seconds": 0}]}, "'seconds' must be between 1 and 2147483647, not 0"),
    ],
)
def test_what_is_no_specification(fields, message):
    with pytest.raises(SpecError, match=re.escape(message)) as error:
        Client.in_process().create_table(TableSpec("t", 4, **fields))
    assert "table 't'" in str(error.value)


# ---- gradients


@pytest.mark.process
def test_refused_gradients_are_counted_and_change_no_server(tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        with Client(servers.endpoints) as client, Client.in_process(servers=3) as local:
            for one in (client, local):
                tables = [one.create_table(TableSpec(n, 3, optimizer={"name": "adam"})) for n in "ab"]
                pulled = one.pull([KEYS], [(table, 0) for table in tables])
                gradients = np.ones((2 * len(KEYS), 3), np.float32)
                gradients[len(KEYS) + 7, 1] = np.nan
                with pytest.raises(GradientError, match=r"table 'b': the gradient of key 7 is not finite"):
                    one.push(pulled, [gradients], 0.1)
                gradients[len(KEYS) :] = np.inf  # on every server
                with pytest.raises(GradientError, match=r"table 'b': .* \((\d+) of \1 keys\)") as error:
                    one.push(pulled, [gradients], 0.1)
                assert "applied" not in str(error.value)
                stats = [server["tables"] for server in one.stats()["servers"]]
                assert sum(of["b"]["nonfinite_gradients"] for of in stats) == 1 + len(KEYS)
                assert all(of["a"]["nonfinite_gradients"] == 0 for of in stats)
                assert all(of[name]["version"] == of[name]["rows"] == 0 for of in stats for name in "ab")
                push(one, tables[0])  # and it goes on
    finally:
        servers.end()


# ---- pools


def made(directory: Path, kind: str) -> tuple[StorageSpec, TableSpec]:
    """A pool of a table and one of what its admission counted, with two checkpoints."""
    storage = StorageSpec(kind, directory, recover=True, cache_bytes=1 << 20 if kind == "dram_pmem" else 0)
    spec = TableSpec(
        "t",
        9,
        optimizer=SGD,
        admission={"name": "counter", "filter_freq": 2},
        eviction=[{"name": "global_step", "steps_to_live": 1}],
    )
    with Client.in_process(storage) as client:
        table = client.create_table(spec)
        push(client, table)
        push(client, table)
        client.checkpoint(1, wait=True)
        pulled = client.pull([KEYS[:9]], [(table, 0)])
        for _ in range(3):
            client.push(pulled, [np.ones((9, 9), np.float32)], 0.1)
        assert client.evict() == len(KEYS) - 9  # leaves tombstones
        others = np.full((len(KEYS), 9), 1, np.float32)
        client.push(client.pull([KEYS + 100], [(table, 0)]), [others], 0.1)  # counted, not yet admitted
        client.checkpoint(2, wait=True)
        client.push(pulled, [np.ones((9, 9), np.float32)], 0.1)  # of no checkpoint
    return storage, spec


def said(path: Path, expect: int, capsys: pytest.CaptureFixture[str]) -> str:
    code = checkpoint_cli.main(["verify", str(path)])
    output = capsys.readouterr()
    assert code == expect, output
    return output.out + output.err


@pytest.mark.parametrize("kind", ["pmem_libpmem", "dram_pmem"])
def test_verify_reads_every_row_of_pools(tmp_path, kind, capsys):
    pool = tmp_path / "job" / "pool"
    pool.parent.mkdir()
    storage, spec = made(pool, kind)
    files = sorted(pool.glob("oe-*.pool"))
    before = [file.read_bytes() for file in files]
    for path in (pool, pool.parent):
        assert "no problem found" in said(path, 0, capsys)
    assert [file.read_bytes() for file in files] == before
    with Client.in_process(storage) as client:
        weights = client.pull_rows(client.create_table(spec), KEYS[:1])[0].tobytes()
    found = 0
    for file in files:
        data = file.read_bytes()
        at = data.find(weights)
        while at >= 0:
            found += 1
            file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            assert f"{file} is damaged: the checksum of the row of key 0 is wrong" in said(pool, 1, capsys)
            at = data.find(weights, at + 1)
        file.write_bytes(data)
    assert found == 1
    # What recovery finds too: keys and states, and files that are gone.
    for file in files:
        data = file.read_bytes()
        if "super" not in file.name:
            (rows_at,) = struct.unpack_from("<Q", data, 72)
            slot = next(i for i in reversed(range(4096, rows_at, 16)) if any(data[i + 8 : i + 16]))
            file.write_bytes(data[:slot] + bytes([data[slot] ^ 1]) + data[slot + 1 :])
            assert str(file) in said(pool, 1, capsys)
            file.write_bytes(data[: slot + 8] + bytes(8) + data[slot + 16 :])  # as if it had never been
            assert "is damaged: checkpoint 2 has " in said(pool, 1, capsys)
        os.truncate(file, 4096)
        assert str(file) in said(pool, 1, capsys)
        file.unlink()
        assert f"{file} is missing" in said(pool, 1, capsys)
        file.write_bytes(data)
    assert "no problem found" in said(pool, 0, capsys)
    with Client.in_process(storage):
        assert f"storage directory {pool} is in use by process {os.getpid()}" in said(pool, 1, capsys)


@pytest.mark.parametrize("left", [0, 3])  # bytes
def test_a_superblock_that_was_emptied_takes_no_rows_with_it(tmp_path, left):
    storage, spec = made(tmp_path / "pool", "pmem_libpmem")
    shutil.copytree(tmp_path / "pool", tmp_path / "copy")
    segments = {file: file.read_bytes() for file in (tmp_path / "pool").glob("oe-*0.pool")}
    for file in (tmp_path / "pool").glob("oe-*-super.pool"):
        os.truncate(file, left)
    with pytest.raises(
        StorageError, match=r"super\.pool is damaged: 'magic' is missing, but there is oe-\w+-0"
    ):
        Client.in_process(storage)
    assert all(file.read_bytes() == data for file, data in segments.items())
    # One that was never finished has no segments, and goes.
    for file in (tmp_path / "copy").glob("oe-*-super.pool"):
        (tmp_path / "pool" / file.name).write_bytes(file.read_bytes())
    alone = tmp_path / "pool" / "oe-0123456789abcdef-super.pool"
    alone.write_bytes(bytes(100))
    with Client.in_process(storage) as client:
        client.create_table(spec)
        assert client.checkpoints() == [1, 2]
    assert not alone.exists()


@pytest.mark.parametrize(
    ("kind", "said_of_it"),
    [
        ("pmem_libpmem", "is not persistent memory; rows there work the same"),
        ("dram_pmem", "is not persistent memory; rows there work the same"),
        ("pmem_memkind", "under pmem_memkind are not persistent"),
    ],
)
def test_a_directory_that_is_not_persistent_memory_is_said_in_process_too(tmp_path, kind, said_of_it):
    storage = StorageSpec(kind, tmp_path / "pool", cache_bytes=1 << 20 if kind == "dram_pmem" else 0)
    with (
        pytest.warns(UserWarning, match=f"{tmp_path / 'pool'} {said_of_it}") as caught,
        Client.in_process(storage),
    ):
        pass
    assert len(caught) == 1
