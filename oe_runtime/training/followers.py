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
from oe_runtime.training.position import Position, Saved
from oe_runtime.training.ranks import Ranks, asking


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

    def go_back(self) -> tuple[Saved, str]:
        """Go where worker 0 goes, with its dense weights; as Checkpoints.go_back."""
        from oe_runtime.keras import dense

        self._ranks.meet()  # worker 0 has chosen
        target = json.loads(self._ranks.share(b""))
        with asking(self._ranks):
            go_back_to(self._client, target)
        self._ranks.meet()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / dense.FILE).write_bytes(self._ranks.share(b""))
            dense.load(self._model, Path(directory))
        return Saved(Path(target["path"]), Position(**target["position"]), target["pool"]), ""


def go_back_to(client: Client, target: Mapping[str, Any]) -> None:
    """Put a checkpoint onto the servers: that of `pool`, in their storage, or `files`."""
    if target["pool"] is not None:
        client.recover(target["pool"]["checkpoint"])
    else:
        client.restore(*map(Path, target["files"]))
