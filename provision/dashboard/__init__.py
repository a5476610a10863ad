"""``oeprov dashboard``: a page about the cluster on this machine's loopback that keeps itself up to date."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from provision.cluster.inventory import Inventory
from provision.dashboard.server import Server
from provision.dashboard.watch import Watch
from provision.hosts.stop_request import StopRequest


def run(inventory: Inventory, *, state_dir: Path, port: int) -> int:
    """Serve the page until it is stopped, which is 130; OeprovError when the port cannot be used."""
    console = Console()
    stop = StopRequest()
    with (
        Watch(inventory, state_dir) as watch,
        Server(watch.document, port) as server,
        stop.on_signals(),
    ):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        console.print(server.url, highlight=False, soft_wrap=True, style="bold")
        console.print(
            f"Read-only, for this machine alone; from yours: ssh -L {server.port}:127.0.0.1:{server.port} "
            "THIS-HOST, then the same address. Ctrl-C ends it.",
            highlight=False,
            soft_wrap=True,
        )
        while not stop.count:
            stop.wait(1.0)
        server.shutdown()
        thread.join()
    return 130
