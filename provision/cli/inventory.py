"""``oeprov inventory check | show | schema``."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:  # the models are slow to import
    from provision.cluster.inventory import Host, Inventory

app = typer.Typer(no_args_is_help=True, help="Check and show the inventory; export its schema for editors.")


@app.command(epilog="Example:  oeprov inventory check -i inventory.yml")
def check(
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Check the inventory and list everything that is wrong with it. Contacts no host."""
    from provision.cluster.errors import InventoryError
    from provision.inventory import stray
    from provision.jobs import readiness

    found: Any = None
    try:
        found = open_inventory(inventory, limit, state_dir)
        problems = [f"{inventory}: {mistake}" for mistake in readiness.mistakes(found)]
        problems += stray.problems(inventory)
    except InventoryError as error:
        problems = error.problems
    if problems:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        if as_json:
            print(json.dumps({"ok": False, "problems": problems}))
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
    """Show the hosts, their wanted settings, and the training settings."""
    found = open_inventory(inventory, limit, state_dir)
    if as_json:
        print(json.dumps(_document(found)))
    else:
        _show_table(found)
    return 0


@app.command(epilog="Example:  oeprov inventory schema > schema.json")
def schema() -> int:
    """Print a JSON Schema of the inventory, for editors.

    With `# yaml-language-server: $schema=schema.json` as the first line of the inventory, editors complete
    keys, explain them and mark mistakes.
    """
    from provision.inventory.schema import inventory_schema

    print(json.dumps(inventory_schema(), indent=2))
    return 0


def _show_table(found: Inventory) -> None:
    """Print hosts with their settings, then the training settings."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("host", "kind", "address", "roles", "memory", "kernel", "runtime", title=found.cluster)
    for host in found.hosts.values():
        table.add_row(
            host.name,
            host.kind.value,
            "this machine" if host.is_here else f"{host.address}:{host.port}",
            "\n".join(_roles(host)) or "none",
            _memory(host),
            host.kernel.version,
            f"{host.runtime.extra} in {host.runtime.venv}",
        )
    console.print(table)
    if found.training.script:
        words = shlex.join([found.training.script, *found.training.script_arguments])
        data = f" on {found.training.data}" if found.training.data else ""
        console.print(f"training: {words}{data}", highlight=False, soft_wrap=True, markup=False)
        return
    job = found.training.decided()
    length = f"{job.steps} steps" if job.steps and not found.training.epochs else f"{job.epochs} epoch(s)"
    rate = "" if job.learning_rate is None else f" {job.learning_rate:g}"
    console.print(
        f"training: {job.model} on {job.data or 'data given at launch'}, dim {job.dim}, "
        f"batch {job.batch_size}, {job.optimizer}{rate}, {length}",
        highlight=False,
        soft_wrap=True,
    )


def _document(found: Inventory) -> dict[str, object]:
    """The inventory as plain values, every variable with its final value."""
    return {
        "path": str(found.path),
        "cluster": found.cluster,
        "parameter_servers": found.parameter_servers,
        "workers": found.workers,
        "training": found.training.decided().flat(),
        "hosts": {
            host.name: {
                "address": host.address,
                "port": host.port,
                "user": host.user,
                "connection": host.connection,
                "groups": list(host.groups),
                **host.variables(),
            }
            for host in found.hosts.values()
        },
    }


def _roles(host: Host) -> list[str]:
    servers = f"{host.servers()} parameter server(s), {host.server.storage}"
    return [servers] * host.is_parameter_server + ["worker"] * host.is_worker


def _memory(host: Host) -> str:
    mode = host.pmem.mode
    if mode == "directory":
        return f"directory {host.pmem.directory}"
    if mode == "fsdax":
        return f"fsdax at {host.pmem.mount_prefix}N"
    return "–" if mode == "none" else mode
