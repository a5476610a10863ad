"""Pool files that are damaged under real servers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, StorageError, StorageSpec, TableSpec, _core
from oe_runtime.checkpoint.verification import verify

KEYS = np.arange(2000, dtype=np.int64)
SPEC = TableSpec("t", 4, optimizer={"name": "sgd"}, initializer={"name": "zeros"})
TIERS = ["pmem_libpmem", "dram_pmem"]


def push(client: Client, table: int) -> None:
    """One more push to every key, of another value for each."""
    pulled = client.pull([KEYS], [(table, 0)])
    client.push(pulled, [-(KEYS[:, None] + np.arange(1, 5) / 8).astype(np.float32)], 1.0)


def flip_a_bit(pool: Path, row: np.ndarray, files: str = "*.pool") -> Path:
    """Of the row with these weights, which is in one place only; its file."""
    (file,) = (path for path in pool.glob(files) if row.tobytes() in path.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(row.tobytes()) + 2] ^= 0x10
    file.write_bytes(content)
    return file


@pytest.mark.process
@pytest.mark.parametrize("tier", TIERS)
def test_a_flipped_bit_is_found_named_and_never_laundered(tmp_path, tier):
    servers = Servers(tmp_path, 1, storage=tier)
    try:
        with Client(servers.endpoints) as client:
            table = client.create_table(SPEC)
            push(client, table)
            client.checkpoint(1, wait=True)
            wanted = client.pull_rows(table, KEYS)
    finally:
        servers.end()
    file = flip_a_bit(tmp_path / "pool-0", wanted[1234])
    assert len(_core.verify_pools(str(tmp_path / "pool-0"))) == 1
    servers.servers[0].ready_file.unlink(missing_ok=True)

    servers = Servers(tmp_path, 1, "--storage-recover", storage=tier)
    try:
        with Client(servers.endpoints) as client:
            table = client.create_table(SPEC)
            assert client.recover() == 1
            deadline = time.monotonic() + 60  # the scrub finds it, by itself
            while not client.stats()["servers"][0]["tables"]["t"]["damage"]["quarantined_rows"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            wanted[1234] = 0  # as the initializer says
            assert np.array_equal(client.pull_rows(table, KEYS), wanted)
            for batch in (2, 3, 4):
                push(client, table)
                client.checkpoint(batch, wait=True)
            damage = client.stats()["servers"][0]["tables"]["t"]["damage"]
            assert damage["quarantined_rows"] == 1
            assert damage["scrubbed_rows"] > 0
    finally:
        servers.end()
    log = servers.servers[0].errors.read_text()
    assert "error: table 't': the row of key 1234 is damaged: its checksum does not fit, at byte " in log
    assert str(file) in log
    assert _core.verify_pools(str(tmp_path / "pool-0")) == []


def test_a_flipped_bit_on_a_drive_takes_the_rows_of_its_block_and_names_them(tmp_path):
    rows = tmp_path / "rows"
    in_block = 4096 // 16

    def open_again() -> Client:
        return Client.in_process(StorageSpec("dram_ssd", str(rows), recover=True, cache_bytes=1 << 20))

    with open_again() as client:
        table = client.create_table(SPEC)
        push(client, table)
        client.checkpoint(1, wait=True)
        wanted = client.pull_rows(table, KEYS)
    assert verify(rows) == []
    file = flip_a_bit(rows, wanted[1234], "*.log")
    (problem,) = verify(tmp_path)
    assert problem.startswith(f"{file} is damaged: the checksum of the block at byte ")
    assert " is wrong, with rows of keys " in problem

    with open_again() as client:
        table = client.create_table(SPEC)
        found = client.pull_rows(table, KEYS)
        gone = ~(found == wanted).all(axis=1)
        assert gone[1234]
        assert 1 <= gone.sum() <= in_block
        assert not found[gone].any()  # as the initializer says
        damage = client.stats()["servers"][0]["tables"]["t"]["damage"]
        assert damage["quarantined_rows"] == gone.sum()


def test_two_logs_of_one_table_are_refused_and_both_are_named(tmp_path):
    rows = tmp_path / "rows"
    storage = StorageSpec("dram_ssd", str(rows), recover=True, cache_bytes=1 << 20)
    with Client.in_process(storage) as client:
        push(client, client.create_table(SPEC))
        client.checkpoint(1, wait=True)
    (log,) = rows.glob("oe-*.log")
    old = log.read_bytes()
    with Client.in_process(storage) as client:
        push(client, client.create_table(SPEC))
        client.checkpoint(2, wait=True)
        wanted = client.pull_rows(0, KEYS)
    for name in ("oe-0000000000000000.log", "oe-ffffffffffffffff.log"):  # before and after it in order
        copy = rows / name
        copy.write_bytes(old)
        first, second = sorted([log, copy])
        with (
            Client.in_process(storage) as client,
            pytest.raises(StorageError, match=f"{first} and {second} both have checkpoints of table 't'"),
        ):
            client.create_table(SPEC)
        copy.unlink()
    with Client.in_process(storage) as client:
        client.create_table(SPEC)
        assert client.recover() == 2
        assert np.array_equal(client.pull_rows(0, KEYS), wanted)


def test_verify_names_the_rows_of_a_log_that_cannot_be_read(tmp_path):
    rows = tmp_path / "rows"
    with Client.in_process(StorageSpec("dram_ssd", str(rows), cache_bytes=1 << 20)) as client:
        table = client.create_table(SPEC)
        push(client, table)
        client.checkpoint(1, wait=True)
        wanted = client.pull_rows(table, KEYS)
    (log,) = rows.glob("oe-*.log")
    block = log.read_bytes().index(wanted[1234].tobytes()) // 4096 * 4096
    os.truncate(log, block)
    first, *_ = verify(rows)
    assert first.startswith(f"{log} is damaged: the block at byte {block} cannot be read, with rows of keys ")
