"""A device that cannot give back what was stored: the server ends and names the file."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

from oe_runtime import Client, ServerLost, TableSpec


def test_a_pool_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that is cut short stands in for a bad block: both end in SIGBUS."""
    servers = Servers(tmp_path, 1, storage="pmem_libpmem")
    try:
        with Client(servers.endpoints) as client:
            client.create_table(TableSpec("t", 16, optimizer={"name": "adagrad"}))
            ids = np.arange(1000)
            client.push(client.pull([ids], [(0, 0)]), [np.ones((len(ids), 16), np.float32)], 0.1)
            (segment,) = (tmp_path / "pool-0").glob("*-000000.pool")
            os.truncate(segment, 0)
            with pytest.raises(ServerLost):
                client.pull([ids], [(0, 0)])
        status, said = servers.servers[0].wait()
        assert status == -signal.SIGBUS
        message = rf"error: {re.escape(str(segment))} cannot be read at byte \d+ \(SIGBUS\): the file was cut"
        assert re.search(message, said), said
        assert "restore from a checkpoint" in said
    finally:
        servers.end()
