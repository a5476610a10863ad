"""Commands for who looks after a cluster: ``dashboard``."""

from __future__ import annotations

from typing import Annotated

import typer

from provision.cli_options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Limit,
    StateDir,
    open_inventory,
)

DASHBOARD_EXAMPLES = "Examples:  oeprov dashboard -i inventory.yml  |  oeprov dashboard --port 8800"


def dashboard(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any that is free.")] = 0,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show hosts, PMem modes, jobs, throughput and checkpoints on a local web page that updates itself.

    Prints the page's address, which has a token in it. Looks at the hosts every half minute and at the jobs
    every two seconds, while a browser has the page open; changes nothing.
    """
    from provision import dashboard as page

    return page.run(open_inventory(inventory, limit, state_dir), state_dir=state_dir, port=port)
