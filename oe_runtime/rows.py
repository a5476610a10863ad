"""What a client returns about rows, as plain values."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# ``Client.keys`` returns the keys of a table in this many parts.
PARTS = 16


class Bags(NamedTuple):
    """How the ids of a lookup form bags (``Client.pool``)."""

    offsets: NDArray[np.int64]  # (bags + 1,), from 0 to the number of ids
    weights: NDArray[Any] | None = None  # of each id, of the dtype of the rows
    mean: bool = False  # whether a bag's embedding is divided by its number of ids


class Pairs(NamedTuple):
    """The distinct (lookup, row) pairs of a group, ordered by lookup; int32 arrays."""

    rows: NDArray[np.int32]  # pair -> row of the group
    sizes: NDArray[np.int32]  # lookup -> number of its pairs
    of_ids: NDArray[np.int32]  # id -> its pair: all lookups of the first example, then of the next
    # One element per id in both, ordered by pair, then by example.
    examples: NDArray[np.int32]
    pairs: NDArray[np.int32]


class Assigned(NamedTuple):
    """The outcome of assigning rows, as numbers of rows."""

    created: int  # new rows
    evicted: int  # other rows that the cap evicted to make room
    no_room: int  # assigned rows that were not written: full of rows of the call, or beyond a lowered cap


class Rows(NamedTuple):
    """Rows by key."""

    found: NDArray[np.bool_]  # whether the key has a row
    rows: NDArray[Any]  # (n, dim)
    slots: dict[str, NDArray[Any]]  # of the optimizer, (n, size) each

    def select(self, which: NDArray[Any]) -> Rows:
        """Return the rows at ``which``, a NumPy index."""
        slots = {name: values[which] for name, values in self.slots.items()}
        return Rows(self.found[which], self.rows[which], slots)


def warn_of_cap(table: str, found: Assigned, *, stacklevel: int) -> None:
    """Warn of rows that a cap evicted for assigned ones, or did not take."""
    if found.evicted or found.no_room:
        warnings.warn(
            f"table '{table}' is full: its cap evicted {found.evicted} rows for the assigned ones, of which "
            f"{found.no_room} were not written; raise the cap, or assign fewer rows",
            stacklevel=stacklevel,
        )
