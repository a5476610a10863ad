"""``oeprov servers``: parameter servers alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provision.cli.options import (
    DEFAULT_INVENTORY,
    DEFAULT_STATE_DIR,
    InventoryPath,
    Json,
    Limit,
    StateDir,
    open_inventory,
    takes_settings,
)

app = typer.Typer(
    help="Parameter servers alone, for notebooks and other launchers.",
    no_args_is_help=True,
    epilog="Examples:  oeprov servers up -i inventory/local.yml  |  oeprov servers status  |  "
    "oeprov servers down",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Servers = Annotated[
    str | None,
    typer.Argument(metavar="[SERVERS]", help="Which servers: their name or id; default: those that run."),
]


@app.command()
@takes_settings("servers", "storage", "storage_cache", panel=None)
def up(
    given: dict[str, Any],
    inventory: InventoryPath = DEFAULT_INVENTORY,
    limit: Limit = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name them; default: servers.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="SERVERS", help="Start these again, with the rows that they left in storage."
        ),
    ] = None,
    as_json: Json = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Start parameter servers, and print their endpoints and where their token lies.

    On hosts of group parameter_servers, as systemd units, or on this machine in the background. They stay up
    until `oeprov servers down`. Checkpoints are the client's to write: rows in pools and logs that have one
    stay, and --resume starts the servers with them.
    """
    from provision.cli.views.servers import show
    from provision.cli.views.training import JobTerminal
    from provision.jobs import servers
    from provision.jobs.request import LaunchOptions

    options = LaunchOptions(given, run_name=name, resume=resume)
    screen = JobTerminal(as_json=as_json)
    found = open_inventory(inventory, limit, state_dir)
    job = servers.up(found, options, state_dir=state_dir, screen=screen)
    return show(job, state_dir, as_json=as_json)


@app.command()
def status(name: Servers = None, as_json: Json = False, state_dir: StateDir = DEFAULT_STATE_DIR) -> int:
    """Show what the servers do, their endpoints and where their token lies."""
    from provision.cli.views.servers import show
    from provision.jobs import servers

    return show(servers.find(state_dir, name), state_dir, as_json=as_json)


@app.command()
def down(name: Servers = None, as_json: Json = False, state_dir: StateDir = DEFAULT_STATE_DIR) -> int:
    """Stop the servers; doing it twice does no harm.

    Rows without a checkpoint end with them; the others stay, and `oeprov jobs rm` removes them.
    """
    from provision.cli.views.training import JobTerminal
    from provision.jobs import servers

    return servers.down(state_dir, name, screen=JobTerminal(as_json=as_json))
