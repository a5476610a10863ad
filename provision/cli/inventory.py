"""``oeprov inventory check | show | schema``."""

from __future__ import annotations

import json
import sys

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

app = typer.Typer(no_args_is_help=True, help="Check and show the inventory; export its schema for editors.")


@app.command(epilog="Example:  oeprov inventory check -i inventory.yml")
def check(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Check the inventory and list all that is wrong with it; reaches no host."""
    from provision.cluster.errors import InventoryError

    try:
        found = open_inventory(inventory, limit, state_dir)
    except InventoryError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        if as_json:
            print(json.dumps({"ok": False, "problems": error.problems}))
        return 1
    if as_json:
        print(json.dumps({"ok": True, "hosts": list(found.hosts)}))
    else:
        servers, workers = len(found.parameter_servers), len(found.workers)
        hosts = f"{len(found.hosts)} host{'' if len(found.hosts) == 1 else 's'}"
        print(f"{inventory}: fine: {hosts}, {servers} in parameter_servers, {workers} in workers")
    return 0


@app.command(epilog="Examples:  oeprov inventory show  |  oeprov inventory show --limit re7p-1 --json")
def show(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Show the hosts with what they are, what is wanted of them and what will be trained."""
    from provision.cli import show as showing

    return showing.inventory(open_inventory(inventory, limit, state_dir), as_json=as_json)


@app.command(epilog="Example:  oeprov inventory schema > schema.json")
def schema() -> int:
    """Print a JSON Schema of the inventory, for editors.

    Put `# yaml-language-server: $schema=schema.json` in the first line of the inventory, and the editor
    completes keys, explains them and marks mistakes.
    """
    from provision.inventory.schema import inventory_schema

    print(json.dumps(inventory_schema(), indent=2))
    return 0
