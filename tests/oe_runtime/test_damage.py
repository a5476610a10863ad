"""Pool files that are damaged under real servers."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, TableSpec, _core

KEYS = np.arange(2000, dtype=np.int64)
SPEC = TableSpec("t", 4, optimizer={"name": "sgd"}, initializer={"name": "zeros"})
TIERS = ["pmem_libpmem", "dram_pmem"]


def push(client: Client, table: int) -> None:
    """One more push to every key, of another value for each."""
    pulled = client.pull([KEYS], [(table, 0)])
    client.push(pulled, [-(KEYS[:, None] + np.arange(1, 5) / 8).astype(np.float32)], 1.0)


def flip_a_bit(pool: Path, row: np.ndarray) -> Path:
    """Of the row with these weights, which is in one place only; its file."""
    (file,) = (path for path in pool.glob("*.pool") if row.tobytes() in path.read_bytes())
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
