"""Rows that a table begins with in place of its initializer's: of a trained layer, a file or a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.spec import TableSpec

# Rows are assigned in pieces of about this many bytes.
_PIECE = 64 << 20


def assign_all(
    client: Client, table: int, spec: TableSpec, matrix: Any, to_numpy: Callable[[Any], NDArray[Any]]
) -> None:
    """Writes row i of a matrix as the row of key i; `to_numpy` makes an array of a slice of it."""
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    step = max(1, _PIECE // (np.dtype(dtype).itemsize * spec.dim))
    for begin in range(0, spec.input_dim, step):
        rows = np.ascontiguousarray(to_numpy(matrix[begin : begin + step]), dtype=dtype)
        client.assign(table, np.arange(begin, begin + len(rows), dtype=np.int64), rows)
