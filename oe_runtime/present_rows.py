"""Tables of a model on servers that have rows of them already."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from oe_runtime.client import Client
from oe_runtime.spec import TableSpec


def make_tables(
    client: Client,
    specs: Sequence[TableSpec],
    fresh: bool | None,
    *,
    also: Sequence[str] = (),
    first: bool = True,
) -> list[int]:
    """Create tables on the servers; their ids.

    Rows that are there already go on, which a warning says of the `first` of several workers; with ``fresh``
    False it is meant. With True the tables are dropped before, and those of the names `also`: all workers of
    a job say so, and it is done once. Raises SpecError where other clients use them.
    """
    if fresh:
        client.drop_tables([*(spec.name for spec in specs), *also])
    numbers = [client.create_table(spec) for spec in specs]
    if fresh is None and first:
        _warn(client, [spec.name for spec in specs])
    return numbers


def rows_on_servers(client: Client, names: Iterable[str]) -> dict[str, int]:
    """How many rows the servers have of each of these tables; 0 of one that does not exist."""
    servers = client.stats()["servers"]
    return {
        name: sum(server["tables"][name]["rows"] for server in servers if name in server["tables"])
        for name in names
    }


def _warn(client: Client, names: Sequence[str]) -> None:
    for name, count in rows_on_servers(client, names).items():
        if count:
            warnings.warn(
                f"table {name} exists with {count:,} rows, going on: they are of an earlier run, the model's "
                "other weights are not; begin anew with fresh=True, or say fresh=False if that is meant",
                stacklevel=5,
            )
