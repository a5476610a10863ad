"""``oeprov dashboard``: serves a page about the cluster, on loopback only, that updates itself."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from provision.cluster.inventory import Inventory
from provision.dashboard.server import DashboardServer
from provision.dashboard.watch import Watch
from provision.hosts.stop_request import StopRequest
from provision.jobs.screen import say


def run(inventory: Inventory, *, state_dir: Path, port: int) -> int:
    """Serve the page until the user stops it, then return 130; OeprovError when the port cannot be used."""
    console = Console()
    stop = StopRequest()
    with (
        Watch(inventory, state_dir) as watch,
        DashboardServer(watch.document, port) as server,
        stop.on_signals(),
    ):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        say(console, f"[bold]{server.url}[/]")
        say(
            console,
            "Read-only, for this machine alone. From another machine: ssh -L "
            f"{server.port}:127.0.0.1:{server.port} THIS-HOST, then open the same address. Ctrl-C ends it.",
        )
        while not stop.count:
            stop.wait(1.0)
        server.shutdown()
        thread.join()
    return 130
