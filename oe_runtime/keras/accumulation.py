"""Gradients of rows between two updates, for `gradient_accumulation_steps` of Keras's optimizers.

Keras adds the dense gradients up in variables of the optimizer. Those of rows are kept here, and pushed as
one batch at the optimizer's update. Until then no row changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client

_IDS, _GRADIENTS = "ids", "gradients"


class Accumulated:
    """The gradients of rows since the optimizer's last update."""

    def __init__(self) -> None:
        self._of_tables: dict[str, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}

    def clear(self) -> None:
        """Forget them."""
        self._of_tables.clear()

    def copy(self) -> Accumulated:
        """Return a copy, which later calls here do not change."""
        copied = Accumulated()
        copied._of_tables = {table: list(parts) for table, parts in self._of_tables.items()}
        return copied

    def add(self, table: str, ids: NDArray[np.int64], gradients: NDArray[Any]) -> None:
        """Add gradients (ids, dim) of rows of a table; equal ids are summed by the push."""
        self._of_tables.setdefault(table, []).append((np.array(ids), np.array(gradients)))

    def add_group(
        self,
        group: Any,
        lookups: Sequence[tuple[str, NDArray[np.int64]]],
        of_ids: NDArray[Any] | None,
        of_rows: NDArray[Any] | None,
    ) -> None:
        """Add the gradients of a pulled group, in the shapes that `Client.push` takes.

        `lookups` are the tables and the flat ids of all lookups of the pull.
        """
        gradients = np.zeros((len(group.inverse), group.dim), group.rows.dtype)
        if of_ids is not None:
            gradients += of_ids.transpose(1, 0, 2).reshape(gradients.shape) if of_ids.ndim == 3 else of_ids
        if of_rows is not None:  # goes to each row's first id; the others come too: admission counts them
            rows, first = np.unique(group.inverse, return_index=True)
            gradients[first] += of_rows[rows]
        begin = 0
        for lookup, size in zip(group.lookups, group.sizes, strict=True):
            table, ids = lookups[lookup]
            self.add(table, ids, gradients[begin : begin + size])
            begin += size

    def push(self, client: Client, numbers: Mapping[str, int], steps: int, push: Callable[..., None]) -> None:
        """Call `push` with one batch of all rows and their mean gradients over `steps`; begin anew.

        `numbers` are the tables' by name.
        """
        merged = {
            table: [np.concatenate(part) for part in zip(*parts, strict=True)]
            for table, parts in self._of_tables.items()
        }
        self.clear()
        tables = list(merged)
        pulled = client.plan(
            [merged[table][0] for table in tables], [(numbers[table], i) for i, table in enumerate(tables)]
        )
        push(
            pulled,
            [
                np.concatenate([merged[tables[lookup]][1] for lookup in group.lookups]) / steps
                for group in pulled.groups
            ],
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies for a checkpoint, by name."""
        return {
            f"{table}/{name}": np.concatenate([part[i] for part in parts])
            for table, parts in self._of_tables.items()
            for i, name in enumerate((_IDS, _GRADIENTS))
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Go back to what `arrays` has returned."""
        self.clear()
        for name in arrays:
            table, _, part = name.rpartition("/")
            if part == _IDS:
                self.add(table, arrays[name], arrays[f"{table}/{_GRADIENTS}"])


def accumulation_steps(optimizer: Any) -> int:
    """Return the batches per update of an optimizer; 1 without accumulation."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)
