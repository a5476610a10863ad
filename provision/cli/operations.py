"""Commands that watch a cluster: ``dashboard``, ``report``, ``monitoring``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Json,
    Limit,
    StateDir,
    open_inventory,
)

REPORT_EXAMPLES = "Examples:  oeprov report  |  oeprov report --output cluster.html --runs 10"
MONITORING_EXAMPLES = "Examples:  oeprov monitoring  |  oeprov monitoring --output /etc/prometheus/oeprov"
HISTORY_EXAMPLES = (
    "Examples:  oeprov history  |  oeprov history bootstrap-20261124  |  oeprov history --host re6p-1"
)
DASHBOARD_EXAMPLES = "Examples:  oeprov dashboard -i inventory.yml  |  oeprov dashboard --port 8800"
MONITORING_EXAMPLES = "Examples:  oeprov monitoring  |  oeprov monitoring --output /etc/prometheus/oeprov"


def dashboard(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free port.")] = 0,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show hosts, PMem modes, jobs, throughput and checkpoints on a local web page that updates itself.

    Prints the page's address, which contains a token. While a browser has the page open, it observes the
    hosts every 30 seconds and the jobs every 2 seconds. Changes nothing.
    """
    from provision import dashboard as page

    return page.run(open_inventory(inventory, limit, state_dir), state_dir=state_dir, port=port)


def report(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: oeprov-CLUSTER.html here.")
    ] = None,
    runs: Annotated[int, typer.Option(min=0, help="Number of jobs with curves, newest first.")] = 3,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Write one HTML file about the cluster, to send to others: hosts, plan, jobs, curves, versions.

    The file is self-contained and has no token, key or password. It has host names, paths, and the address
    of each unreachable host. Observes every host and changes nothing.
    Exit code 0: written; 1: written, but a host could not be observed.
    """
    from provision.dashboard import report as writing

    found = open_inventory(inventory, limit, state_dir)
    return writing.run(found, state_dir=state_dir, output=output, runs=runs)


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

    They cover servers with parameter_server_metrics_port and, with kubernetes_server_image, those on
    Kubernetes. `oeprov bootstrap` writes these files too.
    """
    from provision.monitoring import stack

    directory = output or state_dir / "monitoring"
    for note in stack.write(open_inventory(inventory, limit, state_dir), directory):
        print(f"! {note}")
    print(f"Prometheus: prometheus --config.file {directory / stack.PROMETHEUS}")
    print(f"Grafana: import {directory / stack.DASHBOARD}")
    return 0


def history(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's id, or a unique beginning of it.", show_default=False),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="NAME", help="Show this host's steps; without RUN, of its last run."),
    ] = None,
    last: Annotated[int, typer.Option(min=0, metavar="N", help="List the last N runs; 0: all.")] = 20,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show the runs that changed hosts: when, who, which command, hosts by outcome, and how long.

    With RUN, it shows the hosts of one run by outcome, the slowest ones, and what failed. With --host, it
    shows the steps of one host with times and results. It reads the journal in the state directory.
    """
    from provision.cli.views import history as view

    return view.show(state_dir, run, host, last=last, as_json=as_json)
