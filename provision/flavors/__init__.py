"""What trains, as the controller sees it: what a flavor means, what it refuses, its command lines.

``provision/node/flavors.py`` is the other half: what it needs on hosts. A flavor is one module here and one
there; nobody else asks which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from provision.flavors import deeprec, oe_runtime, openembedding

if TYPE_CHECKING:
    from provision.inventory import Host, Inventory
    from provision.node.state import State
    from provision.runtime_settings import RuntimeSettings
    from provision.training.jobs import Job
    from provision.training.jobspec import Request
    from provision.training.placement import Placement
    from provision.wheel import Elsewhere

DEFAULT = "oe_runtime"


class Flavor(Protocol):
    """What each module of this package has."""

    def venv(self, local: bool, state_dir: Path) -> str:
        """Where its environment is, unless the inventory says."""

    def storage(self, mode: str, settings: RuntimeSettings) -> str:
        """What ``parameter_server_storage: auto`` means on a host of this ``pmem_mode``."""

    def keeps_rows(self, host: Host) -> bool:
        """Whether processes on the host keep rows, so that its persistent memory must fit their storage."""

    def desired(self, host: Host) -> dict[str, Any]:
        """What the planner is told of the environment beyond the settings themselves."""

    def provide(self, build: str, state_dir: Path, elsewhere: Elsewhere) -> Path:
        """The wheel of a build that a host wants, made if need be; WheelError says why it cannot be had."""

    def settle(self, inventory: Inventory, wanted: Request) -> Request:
        """The request as it will be run; TrainingError names what the flavor cannot do, and what it can."""

    def check_data(self, inventory: Inventory, wanted: Request) -> None:
        """Refuse what it can never read: by name, before any host is asked."""

    def data_check(self, host: Host, wanted: Request) -> list[str]:
        """The program that says on a worker's host whether the data there can be read.

        It ends with 0, or with a last line ``error: …`` that names the file, what was found and what is
        expected.
        """

    def place(
        self,
        job: Job,
        inventory: Inventory,
        states: Mapping[str, State],
        wanted: Request,
        *,
        fresh: bool = True,
    ) -> Placement:
        """Every process with its command line."""


_FLAVORS: dict[str, Flavor] = {
    DEFAULT: oe_runtime,
    "openembedding": openembedding,
    "deeprec": deeprec,
}


def of(name: str) -> Flavor:
    """The flavor of that name, as ``runtime_flavor`` has it."""
    return _FLAVORS[name]
