"""Options that several commands share, and how an inventory is opened from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from provision.inventory import Inventory

InventoryPath = Annotated[
    Path,
    typer.Option(
        "-i",
        "--inventory",
        metavar="FILE",
        envvar="OEPROV_INVENTORY",
        help="The inventory: an ordinary Ansible YAML inventory.",
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="PATTERN",
        help="Only these hosts or groups; Ansible's patterns, such as 'workers:!gpu-2'.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        envvar="OEPROV_STATE_DIR",
        help="Where jobs, checkpoints and the journal are kept.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Agree beforehand to all steps that destroy nothing.")]
Consent = Annotated[
    list[str] | None,
    typer.Option(
        "--consent",
        metavar="HOST:OBJECT",
        help="Agree to lose this object, named as the plan names it; once for each.",
    ),
]
DEFAULT_INVENTORY = Path("inventory.yml")
DEFAULT_STATE_DIR = Path(".oeprov")


def open_inventory(path: Path, limit: str | None, state_dir: Path) -> Inventory:
    """Load and check the inventory; imported late, because Ansible's loader takes a while to import."""
    from provision import inventory

    return inventory.load(path, limit, state_dir=state_dir)
