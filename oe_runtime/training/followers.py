"""What the workers beside worker 0 have in place of a run directory and its checkpoints: nothing is written.

They take part where all are needed: when the run goes back to a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oe_runtime.client import Client
from oe_runtime.training.options import Options
from oe_runtime.training.position import Position
from oe_runtime.training.ranks import Ranks


class FollowingDirectory:
    """The place of a RunDirectory."""

    def __init__(self, options: Options) -> None:
        self.path = options.run_dir

    def event(self, event: str, **values: Any) -> None:
        """Worker 0 writes it."""

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Worker 0 writes them."""

    def traced(self) -> contextlib.AbstractContextManager[None]:
        """Worker 0 is traced."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Nothing is open."""


class FollowingCheckpoints:
    """The place of a run's Checkpoints."""

    def __init__(self, model: Any, client: Client, ranks: Ranks) -> None:
        self._model = model
        self._client = client
        self._ranks = ranks

    def take(self, position: Position) -> None:
        """Worker 0 takes it, with what all have pushed."""

    def take_now(self, position: Position) -> None:
        """As `take`."""

    def take_files(self, position: Position) -> None:
        """As `take`."""

    def settle(self) -> None:
        """Worker 0 publishes it."""

    def go_back(self) -> Position:
        """Go where worker 0 goes, with its dense weights."""
        from oe_runtime.keras import dense

        target = json.loads(self._ranks.share(b""))
        go_back_to(self._client, target)
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / dense.FILE).write_bytes(self._ranks.share(b""))
            dense.load(self._model, Path(directory))
        return Position(**target["position"])


def go_back_to(client: Client, target: Mapping[str, Any]) -> None:
    """Put a checkpoint onto the servers: `pool`, the number of one in their storage, or `files`."""
    if target["pool"] is not None:
        client.recover(target["pool"])
    else:
        client.restore(*map(Path, target["files"]))
