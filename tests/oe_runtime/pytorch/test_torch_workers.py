"""Two processes train as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from server_processes import Servers

torch = pytest.importorskip("torch")

from torch_worker import train  # noqa: E402

from oe_runtime import Client  # noqa: E402


def run_two(tmp_path: Path, program: str) -> None:
    """Run a program of this directory as two workers, with two servers."""
    servers = Servers(tmp_path, 2)
    try:
        command = [sys.executable, str(Path(__file__).with_name(program)), str(tmp_path)]
        workers = [
            subprocess.Popen(
                [*command, str(rank), "2", json.dumps(servers.endpoints)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]
        said = [worker.communicate(timeout=120)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], said
    finally:
        servers.end()


@pytest.mark.process
def test_two_workers_train_as_one(tmp_path):
    with Client.in_process() as client:
        wanted = train(client, 0, 1)
    run_two(tmp_path, "torch_worker.py")
    for rank in range(2):
        with np.load(tmp_path / f"worker-{rank}.npz") as file:
            assert set(file.files) == set(wanted)
            for name, value in wanted.items():
                np.testing.assert_allclose(file[name], value, atol=1e-5, err_msg=f"{rank} {name}")


@pytest.mark.process
def test_one_worker_saves_states_that_all_load(tmp_path):
    run_two(tmp_path, "torch_state_worker.py")
