"""The run directory and checkpoints of workers other than worker 0: they write nothing.

They take part when the run goes back to a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oe_runtime.client import Client
from oe_runtime.run.dense_state import DenseState
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position, RunCheckpoint
from oe_runtime.run.ranks import Ranks, deferring_losses


class FollowingDirectory:
    """In place of a RunDirectory."""

    def __init__(self, options: RunOptions) -> None:
        self.path = options.run_dir
        self.stopped: Mapping[str, Any] = {}  # worker 0 knows how the run before ended

    def event(self, event: str, **values: Any) -> None:
        """Do nothing: worker 0 writes events."""

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Do nothing: worker 0 writes scalars."""

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Trace nothing: worker 0 is traced."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Do nothing."""


class FollowingCheckpoints:
    """In place of a run's Checkpoints."""

    def __init__(self, state: DenseState, client: Client, ranks: Ranks) -> None:
        self._state = state
        self._client = client
        self._ranks = ranks

    def take(self, position: Position) -> None:
        """Do nothing: worker 0 takes the checkpoint, which includes all workers' pushes."""

    take_now = take_files = take

    def settle(self, *, wait: bool = False) -> None:
        """Do nothing: worker 0 publishes it."""

    def settle_files(self) -> None:
        """Do nothing: worker 0 publishes them."""

    def roll_back(self) -> tuple[RunCheckpoint, str]:
        """Go to worker 0's checkpoint, with its dense weights; as Checkpoints.roll_back."""
        self._ranks.barrier()  # worker 0 has chosen
        target = json.loads(self._ranks.share(b""))
        with deferring_losses(self._ranks):
            restore_target(self._client, target)
        self._ranks.barrier()
        return self._loaded(target, self._ranks.share(b""))

    def _loaded(self, target: Mapping[str, Any], weights: bytes) -> tuple[RunCheckpoint, str]:
        path = Path(target["path"])
        self._state.load(path, weights)
        return RunCheckpoint(path, Position(**target["position"]), target["pool"]), ""


def restore_target(client: Client, target: Mapping[str, Any]) -> None:
    """Restore a checkpoint to the servers: that of `pool`, in their storage, or `files`."""
    if target["pool"] is not None:
        client.recover(target["pool"]["checkpoint"])
    else:
        client.restore(*map(Path, target["files"]))
