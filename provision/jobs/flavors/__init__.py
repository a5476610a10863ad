"""The job's part of each flavor: checks and command lines.

Its facts about settings are in ``provision.cluster.flavor_facts``, its needs on hosts in
``provision.node.flavors``. A flavor is one module here and one there; no other code compares its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from provision.cluster.flavor_facts import DEFAULT
from provision.cluster.inventory import Host, Inventory
from provision.jobs.flavors import deeprec, oe_runtime, openembedding
from provision.jobs.placement import Placement
from provision.jobs.request import Request
from provision.jobs.store import Job
from provision.node.state import State


class Flavor(Protocol):
    """What each module of this package has."""

    def settle(self, inventory: Inventory, wanted: Request) -> Request:
        """The request that will run; TrainingError names what the flavor cannot do, and what it can."""

    def check_data(self, inventory: Inventory, wanted: Request) -> None:
        """Refuse data that it can never read, before any host is asked."""

    def data_check(self, host: Host, wanted: Request) -> list[str]:
        """The command that checks on a worker's host whether the data can be read.

        It exits with 0, or prints a last line ``error: …``: the file, what was found and what is expected.
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


def get(name: str) -> Flavor:
    """The flavor of that name, as ``runtime_flavor`` has it."""
    return _FLAVORS[name]
