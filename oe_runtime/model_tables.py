"""What the Keras and PyTorch models share: which weights become tables, the tables, and their first rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.spec import TableSpec

# A weight of this many bytes, or a matrix of this many rows, belongs on servers.
_LARGE_BYTES = 64 << 20
_LARGE_ROWS = 100_000
_PIECE = 64 << 20  # bytes of rows per request


def is_large(shape: Sequence[int | None], item_bytes: int) -> bool:
    """Whether a weight of this shape belongs on servers: a matrix of many rows, or one of many bytes."""
    known = [n or 0 for n in shape]
    return (len(known) > 1 and known[0] >= _LARGE_ROWS) or math.prod(known) * item_bytes >= _LARGE_BYTES


def make_tables(
    client: Client,
    specs: Sequence[TableSpec],
    fresh: bool | None,
    *,
    also: Sequence[str] = (),
    replaced: Collection[str] = (),
    first: bool = True,
) -> list[int]:
    """Create tables on the servers; return their ids.

    Existing rows are kept. A warning says so in the `first` of several workers, unless ``fresh`` is False or
    the caller replaces the rows (tables `replaced`).
    With ``fresh=True`` the tables, and those named in `also`, are dropped before; all workers of a job must
    make this call, and it takes effect once. Raises SpecError where other clients use the tables.
    """
    names = [spec.name for spec in specs]
    if fresh:
        client.drop_tables([*names, *also])
    numbers = [client.create_table(spec) for spec in specs]
    for name, rows in (
        rows_on_servers(client, names).items() if fresh is None and first and not client.restores else ()
    ):
        if rows and name not in replaced:
            warnings.warn(
                f"table {name} exists with {rows:,} rows, which are kept: they are of an earlier run, the "
                "model's other weights are not; fresh=True drops them, fresh=False silences this warning",
                stacklevel=4,
            )
    return numbers


def rows_on_servers(client: Client, names: Iterable[str]) -> dict[str, int]:
    """Return how many rows the servers have of each of these tables; 0 for one that does not exist."""
    servers = client.stats()["servers"]
    return {
        name: sum(server["tables"][name]["rows"] for server in servers if name in server["tables"])
        for name in names
    }


def assign_all(
    client: Client, table: int, spec: TableSpec, matrix: Any, to_numpy: Callable[[Any], NDArray[Any]]
) -> None:
    """Assign row i of a matrix to key i; `to_numpy` converts a slice of it to an array."""
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    step = max(1, _PIECE // (np.dtype(dtype).itemsize * spec.dim))
    for begin in range(0, spec.input_dim, step):
        rows = np.ascontiguousarray(to_numpy(matrix[begin : begin + step]), dtype=dtype)
        client.assign(table, np.arange(begin, begin + len(rows), dtype=np.int64), rows)
