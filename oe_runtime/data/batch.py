"""Rows in their form for a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import oe_runtime._core as _core

# The id of a missing category; values take 1 .. cardinality.
MISSING_ID = 0


class Batch(NamedTuple):
    """Consecutive rows. `ids` is column-major, so that the ids of a field are contiguous."""

    dense: NDArray[np.float32]  # (B, numbers); 13 of Criteo's rows
    ids: NDArray[np.int64]  # (B, ids); 26 of Criteo's rows
    labels: NDArray[np.float32]  # (B,)
    weights: NDArray[np.float32] | None = None  # (B,); None: all rows have the same

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.labels)

    def part(self, rank: int, of: int) -> Batch:
        """Return the part of worker `rank` of `of` in a batch that all train together.

        Parts differ by at most one row. A part of a small batch may be empty; its step is done nevertheless.
        """
        if not 0 <= rank < of:
            raise ValueError(f"worker {rank} of {of}: expected 0 up to {of - 1}")
        return self.slice(self.rows * rank // of, self.rows * (rank + 1) // of)

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows start..stop (views, no copy)."""
        weights = None if self.weights is None else self.weights[start:stop]
        return Batch(self.dense[start:stop], self.ids[start:stop], self.labels[start:stop], weights)

    def take(self, mask: NDArray[np.bool_]) -> Batch:
        """Return the rows where `mask` is true (copies; `ids` stays column-major)."""
        weights = None if self.weights is None else self.weights[mask]
        return Batch(self.dense[mask], self.ids.T[:, mask].T, self.labels[mask], weights)


def concatenate(parts: list[Batch]) -> Batch:
    """Join several batches in order (`ids` stays column-major)."""
    if len(parts) == 1:
        return parts[0]
    ids = np.empty((sum(p.rows for p in parts), parts[0].ids.shape[1]), np.int64, order="F")
    np.concatenate([p.ids for p in parts], out=ids)
    labels = np.concatenate([p.labels for p in parts])
    weights = None
    if parts[0].weights is not None:
        weights = np.concatenate([p.weights for p in parts if p.weights is not None])
    return Batch(np.concatenate([p.dense for p in parts]), ids, labels, weights)


def rebatch(blocks: Iterable[Batch | None], batch_size: int) -> Iterator[tuple[Batch | None, int]]:
    """Yield batches of `batch_size` rows; the last one may be shorter. A None, for a wait, passes through.

    With each comes the number of rows of the last block that it leaves.
    """
    pending: list[Batch] = []
    rows = 0
    for block in blocks:
        if block is None:
            yield None, 0
            continue
        start = 0
        while rows + block.rows - start >= batch_size:
            stop = start + batch_size - rows
            yield concatenate([*pending, block.slice(start, stop)]), block.rows - stop
            pending, rows, start = [], 0, stop
        if start < block.rows:
            pending.append(block.slice(start, block.rows))
            rows += block.rows - start
    if pending:
        yield concatenate(pending), 0


def normalise(values: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return sign(x)·log1p(|x|) as float32, any shape; the counts are heavy-tailed."""
    return _core.normalise(values)
