"""The position of a run in the data, and the checkpoints of positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Position:
    """`step` steps in all, `batch` of them in epoch `epoch` (from 0).

    For asynchronous workers, `queue` is the state of their work queue, in place of `batch`. `part` is the
    number (from 0) of a script's part, such as a call of `fit`. `ended` is the number of epochs that was
    asked of a part that has ended, and `left_early` whether its program left the job's rows before their end.
    `stream` is the place in a stream, as oe_runtime.data.stream.Place has it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    queue: Mapping[str, Any] | None = None
    part: int = 0
    ended: int | None = None
    left_early: bool = False
    stream: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the values for a checkpoint's manifest."""
        plain: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "batch": self.batch}
        if self.part:
            plain["part"] = self.part
        if self.ended is not None:
            plain["ended"] = self.ended
        if self.left_early:
            plain["left_early"] = True
        if self.stream is not None:
            plain["stream"] = self.stream
        return plain if self.queue is None else {**plain, "queue": self.queue}


@dataclass(frozen=True)
class RunCheckpoint:
    """A published checkpoint of the trainer."""

    path: Path
    position: Position
    pool: Mapping[str, Any] | None  # where the rows are, unless they are files
