"""What the Keras and PyTorch models share: which weights become tables, the tables, and their first rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oe_runtime.client import Client
from oe_runtime.errors import SpecError, StorageError
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
    numbers = list(map(partial(_create, client), specs))
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


def _create(client: Client, spec: TableSpec) -> int:
    """Create a table, in the form of 0.2.0 if its rows or its servers know no other."""
    earlier = _form_of_0_2(spec)
    if earlier is None:
        return client.create_table(spec)
    saved = client.saved_optimizers.get(spec.name)
    if saved is None or "torch" in saved:
        try:
            return client.create_table(spec)
        except (SpecError, StorageError) as error:
            if "optimizer" not in str(error):
                raise
            refusal = error
        try:
            number = client.create_table(earlier)
        except (SpecError, StorageError):
            raise refusal from None
    else:
        number = client.create_table(earlier)
    warnings.warn(
        f"table {spec.name} keeps the optimizer {spec.optimizer['name']} in the form of oeprov 0.2.0, which "
        "made its rows or runs its servers: it adds ε elsewhere than PyTorch, and its momenta hold earlier "
        "learning rates; a new table on servers of this version updates as PyTorch does",
        stacklevel=5,
    )
    return number


def _form_of_0_2(spec: TableSpec) -> TableSpec | None:
    """Return the table as 0.2.0 made it for the same optimizer of PyTorch; None if there is no other form."""
    if not isinstance(spec.optimizer, Mapping):
        return None  # which the core refuses
    rule = dict(spec.optimizer)
    if rule.get("name") not in _RULES_OF_0_2 or not rule.pop("torch", False) or rule.keys() & _SINCE_0_2:
        return None
    if rule["name"] in ("adagrad", "rmsprop"):
        rule["epsilon"] = rule["epsilon"] ** 2  # it stood below the root
    return replace(spec, optimizer=rule)


_RULES_OF_0_2 = {"adagrad", "adam", "adamw", "rmsprop", "sgd"}
_SINCE_0_2 = {"coupled_weight_decay", "dampening", "epsilon_hat", "learning_rate_decay", "maximize"}


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
