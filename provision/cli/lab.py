"""``oeprov lab``: virtual nodes with persistent memory, for trials without hardware."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from provision.cli.options import DEFAULT_STATE_DIR, DoNotAsk, Json, StateDir

if TYPE_CHECKING:
    from provision.lab import Lab

app = typer.Typer(
    no_args_is_help=True,
    help="Virtual nodes with persistent memory (QEMU), for trials without hardware.",
    epilog="Example:  oeprov lab up  and then  oeprov plan -i inventory/lab.yml",
)
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `oeprov lab list` shows it.")]


def _lab(state_dir: Path, inventory: Path | None = None) -> Lab:
    from provision.lab import Lab

    return Lab(state_dir / "lab", inventory=inventory, report=lambda line: print(line, file=sys.stderr))


def _size(option: str, text: str) -> int:
    from provision.cluster.errors import LabError
    from provision.cluster.setting_types import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise LabError(f"{option}: {error}") from None


@app.command(
    epilog="Examples:  oeprov lab up --nodes 2 --pmem 2G  |  oeprov lab up --variant re7p --memory 2G"
)
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 2,
    pmem: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Persistent memory per node, or the size of its drive with nvme; a multiple of 128M.",
        ),
    ] = "2G",
    variant: Annotated[
        str,
        typer.Option(
            help="Hardware to imitate. bare-metal: a module with labels, no namespace, and a stand-in "
            "for ipmctl. re6p: namespace0.0 without labels. re7p: a memory node that a kernel argument turns "
            "into persistent memory. cxl: a memory expander (QEMU 8.1 or newer). nvme: an empty NVMe drive."
        ),
    ] = "bare-metal",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="DRAM per node.")] = "1536M",
    cpus: Annotated[int, typer.Option(min=1, help="CPUs per socket.")] = 1,
    sockets: Annotated[
        int,
        typer.Option(min=1, max=2, help="Modules of persistent memory, each on a memory node of its own."),
    ] = 1,
    debian: Annotated[
        int,
        typer.Option(
            metavar="12|13",
            show_default=False,
            help="The nodes' Debian; default: 12, or 13 with variant cxl.",
        ),
    ] = 0,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "-i",
            "--inventory",
            metavar="FILE",
            help="Inventory to write; default: inventory/lab.yml, or lab.yml where there is no inventory/.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="As root: install the programs that are missing.")
    ] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Start virtual nodes, wait until they answer ssh, and write an inventory of them.

    The first run builds a disk image (some minutes, as root). Nodes that are off are started.
    """
    sizes = {"pmem": _size("--pmem", pmem), "memory": _size("--memory", memory)}
    lab = _lab(state_dir, inventory)
    lab.up(nodes=nodes, variant=variant, cpus=cpus, sockets=sockets, debian=debian, install=yes, **sizes)
    print(f"{len(lab.nodes)} nodes are up; inventory: {lab.inventory}")
    return 0


@app.command(epilog="Example:  oeprov lab down --yes")
def down(
    yes: DoNotAsk = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Remove all nodes with their disks and persistent memory; the image stays."""
    lab = _lab(state_dir)
    if not lab.nodes:
        print("the lab has no nodes")
        return 0
    lost = f"disks, persistent memory and consoles of {', '.join(node.name for node in lab.nodes)}"
    if not yes:
        typer.confirm(f"This removes {lost} ({lab.directory / 'nodes'}). Continue?", abort=True)
    lab.down()
    print(f"removed: {lost}")
    return 0


@app.command("list", epilog="Example:  oeprov lab list --json")
def list_nodes(as_json: Json = False, state_dir: StateDir = DEFAULT_STATE_DIR) -> int:
    """List the nodes: variant, ssh port, process, and whether they are on."""
    lab = _lab(state_dir)
    rows = [
        {
            "name": node.name,
            "variant": node.spec.variant,
            "ssh_port": node.ssh_port,
            "pid": node.pid or None,
            "state": "on" if node.pid else "off",
            "console": str(node.console),
        }
        for node in lab.nodes
    ]
    if as_json:
        print(json.dumps({"nodes": rows, "inventory": str(lab.inventory)}))
    elif not rows:
        print("the lab has no nodes; `oeprov lab up` makes them")
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("name", "variant", "ssh port", "pid", "state", box=None, header_style="bold")
        for row in rows:
            table.add_row(*(str(row[name] or "") for name in ("name", "variant", "ssh_port", "pid", "state")))
        Console().print(table)
        print(f"inventory: {lab.inventory}")
    return 0


@app.command(
    epilog="Examples:  oeprov lab ssh lab-1  |  oeprov lab ssh lab-1 ndctl list -R",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def ssh(
    node: NodeName,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="A command instead of a shell.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> int:
    """Open a shell on a node, or run a command there and return its exit code."""
    import subprocess

    found = _lab(state_dir).node(node)
    terminal = ["-t"] if sys.stdin.isatty() and not command else []
    return subprocess.run([*found.ssh_command(tty=True, options=terminal), *(command or [])]).returncode


@app.command("power-cut", epilog="Example:  oeprov lab power-cut lab-1")
def power_cut(node: NodeName, state_dir: StateDir = DEFAULT_STATE_DIR) -> int:
    """Cut the power of a node, as if its cord were pulled; its persistent memory keeps its content."""
    found = _lab(state_dir).node(node)
    was_on = bool(found.pid)
    found.power_cut()
    print(f"{node} is off" if was_on else f"{node} was off already")
    return 0


@app.command(epilog="Example:  oeprov lab start lab-1")
def start(node: NodeName, state_dir: StateDir = DEFAULT_STATE_DIR) -> int:
    """Power a node on and wait until it answers ssh."""
    found = _lab(state_dir).node(node)
    found.start()
    found.wait_ssh()
    print(f"{node} is up")
    return 0
