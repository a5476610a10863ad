"""``oeprov lab``: virtual nodes with persistent memory, to try everything on without hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from provision.cli_options import DEFAULT_STATE_DIR, StateDir

app = typer.Typer(no_args_is_help=True, help="Virtual nodes with persistent memory, to try everything on.")


@app.command(epilog="Example:  oeprov lab up --nodes 2 --pmem 2G")
def up(
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 2,
    pmem: Annotated[str, typer.Option(help="Persistent memory of a node: a multiple of 128M.")] = "2G",
    variant: Annotated[str, typer.Option(help="bare-metal, re6p, re7p or cxl.")] = "bare-metal",
    memory: Annotated[str, typer.Option(help="Memory of a node.")] = "1536M",
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of a node.")] = 1,
    sockets: Annotated[int, typer.Option(min=1, max=2, help="Modules of persistent memory.")] = 1,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="FILE", help="Where to write the inventory.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="As root: install the programs that are missing.")
    ] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Bring up virtual nodes and write an inventory of them."""
    from provision.lab import Lab
    from provision.settings import parse_size

    lab = Lab(state_dir / "lab", inventory=inventory, report=print)
    lab.up(
        nodes=nodes,
        pmem=parse_size(pmem),
        variant=variant,
        memory=parse_size(memory),
        cpus=cpus,
        sockets=sockets,
        install=yes,
    )
    return 0
