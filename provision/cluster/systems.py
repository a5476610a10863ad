"""Systems as they are written on command lines: ``--system [HOST=]ID-RELEASE``, such as ``rocky-8``."""

from __future__ import annotations

from collections.abc import Iterable

from provision.cluster.errors import OeprovError, did_you_mean
from provision.cluster.inventory import Inventory
from provision.node import families
from provision.node.state import OsInfo

ARCHITECTURES = ("x86_64", "aarch64")


def parse(text: str) -> OsInfo:
    """The system in ``debian-12`` or ``debian-12-aarch64``; OeprovError when there is none like it."""
    name, _, rest = text.partition("-")
    release, dash, architecture = rest.partition("-")
    ids = {item.lower(): item for family in families.known() for item in family.ids}
    name = ids.get(name.lower(), name.lower())  # openEuler writes its own with a capital
    os = OsInfo(name, release, architecture=architecture if dash else ARCHITECTURES[0])
    family = families.find(os)
    if family is None or not families.is_known(os):
        known = families.known_systems()
        hint = did_you_mean(f"{os.id}-{release}", known)
        raise OeprovError(
            f"--system {text!r}: expected ID-RELEASE, with -ARCHITECTURE if it is not {ARCHITECTURES[0]}; "
            f"known: {', '.join(known)}{hint}"
        )
    if os.architecture not in ARCHITECTURES:
        raise OeprovError(
            f"--system {text!r}: found architecture {os.architecture!r}; allowed: {', '.join(ARCHITECTURES)}"
        )
    return os._replace(family=family.lineage, package_manager=family.package_manager)


def assigned(inventory: Inventory, systems: Iterable[str]) -> dict[str, OsInfo]:
    """The system of each host that one was named for: ``SYSTEM`` is for all, ``HOST=SYSTEM`` for one."""
    found: dict[str, OsInfo] = {}
    for text in systems:
        name, _, system = text.rpartition("=")
        if name and name not in inventory.hosts:
            raise OeprovError(f"--system {text!r}: there is no host {name}")
        found.update(dict.fromkeys([name] if name else inventory.hosts, parse(system)))
    return found
