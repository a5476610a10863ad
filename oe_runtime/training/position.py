"""Where in the data a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """`step` steps in all, `batch` of them in epoch `epoch` (from 0)."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
