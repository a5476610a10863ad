"""``oeprov monitoring``: files for Prometheus and Grafana."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Limit,
    StateDir,
    open_inventory,
)

MONITORING_EXAMPLES = "Examples:  oeprov monitoring  |  oeprov monitoring --output /etc/prometheus/oeprov"


def monitoring(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write; default: monitoring in the state directory."),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Write a Prometheus configuration that finds the parameter servers, and a Grafana dashboard for them.

    Of the servers with parameter_server_metrics_port, and, with kubernetes_server_image, of those on
    Kubernetes. `bootstrap` writes them too.
    """
    from provision.monitoring import stack as files

    return files.monitoring(open_inventory(inventory, limit, state_dir), output or state_dir / "monitoring")
