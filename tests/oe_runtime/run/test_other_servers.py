"""A run that goes on with other numbers of servers has the losses of one that was not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_train import keep_determinism, train  # noqa: F401
from training_runs import ServerProcess, losses

from oe_runtime import checkpoint
from oe_runtime.checkpoint import cli

pytestmark = pytest.mark.process

ENDLESS = ["--data", "generate:100000000:1", "--holdout", "0"]


def test_one_then_three_then_two_servers(tmp_path: Path) -> None:
    assert train(tmp_path / "local", "--steps", "6", data=ENDLESS) == 0
    run_dir = tmp_path / "run"
    for count, steps in ((1, "2"), (3, "4"), (2, "6")):
        if count == 2:
            # With or without it: two servers read what three wrote, and what it was rewritten to.
            again = cli.reshard(run_dir, count)
            found = checkpoint.latest(run_dir / "checkpoints")
            assert found is not None
            assert found.path == again
        servers = [ServerProcess(tmp_path / f"server-{count}-{i}", i, count) for i in range(count)]
        try:
            where = ("--servers", ",".join(server.endpoint for server in servers))
            resume = () if count == 1 else ("--resume",)
            assert train(run_dir, "--steps", steps, *resume, where=where, data=ENDLESS) == 0
        finally:
            for server in servers:
                server.stop()
    assert losses(run_dir) == losses(tmp_path / "local")
