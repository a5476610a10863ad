"""A flavor's half of a job: what it refuses, and its command lines.

What it means for a host's settings is in ``provision.cluster.flavor_facts``, what it needs on hosts in
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
