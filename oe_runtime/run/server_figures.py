"""The servers' statistics, sampled into the run's events for its report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from oe_runtime.client import Client
from oe_runtime.run.followers import FollowingDirectory
from oe_runtime.run.run_directory import RunDirectory


class ServerFigures:
    """Samples the servers' statistics, with at least `seconds` between samples.

    Writes events `servers` (per server: rows, bytes by tier, cache hits, bytes read from and written to
    drives, keys pulled and pushed; counts since the server's start) and, at the end, `tables` (rows and bytes
    of each, all servers together).
    """

    def __init__(
        self, client: Client | None, directory: RunDirectory | FollowingDirectory, seconds: float
    ) -> None:
        self._client = client
        self._directory = directory
        self._seconds = seconds
        self._last = -float("inf")

    def sample(self, step: int) -> None:
        """Write the event `servers` if it is due. Raises ServerLost."""
        if self._client is not None and time.monotonic() - self._last >= self._seconds:
            self._servers(step, self._client.stats()["servers"])

    def finish(self, step: int) -> None:
        """Write both events. Raises ServerLost."""
        if self._client is None:
            return
        servers = self._client.stats()["servers"]
        self._servers(step, servers)
        tables: dict[str, dict[str, int]] = {}
        for server in servers:
            for name, table in server["tables"].items():
                sums = tables.setdefault(name, {"dim": table["dim"], "rows": 0, "bytes": 0})
                sums["rows"] += table["rows"]
                sums["bytes"] += table["bytes"]
        self._directory.event("tables", step=step, tables=tables)

    def _servers(self, step: int, servers: Sequence[dict[str, Any]]) -> None:
        self._last = time.monotonic()
        figures = [_figures(one) for one in servers]
        self._directory.event("servers", step=step, servers=figures)
        shown = ("rows", "dram_bytes", "pmem_bytes", "index_bytes")
        self._directory.scalars(
            step, {f"servers/{name}": sum(one[name] for one in figures) for name in shown}
        )


def _figures(server: dict[str, Any]) -> dict[str, Any]:
    tables, memory = server["tables"].values(), server["memory"]
    drives = [table["drive"] for table in tables if "drive" in table]
    return {
        "index": server["index"],
        "storage": server["storage"],
        "rows": sum(table["rows"] for table in tables),
        "dram_bytes": memory["dram"],
        "pmem_bytes": memory["pmem"],
        "index_bytes": memory["index"],
        "resident_bytes": memory["rss"],
        "cache_hits": sum(table["cache"]["hits"] for table in tables),
        "cache_misses": sum(table["cache"]["misses"] for table in tables),
        **(
            {f"drive_{name}": sum(one[name] for one in drives) for name in ("read_bytes", "written_bytes")}
            if drives
            else {}
        ),
        "pulled_keys": server["pulls"]["keys"],
        "pushed_keys": server["pushes"]["keys"],
    }
