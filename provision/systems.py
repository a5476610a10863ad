"""Systems as they are written on command lines: ``--system [HOST=]ID-RELEASE``, such as ``rocky-8``."""

from __future__ import annotations

from collections.abc import Iterable

from provision.errors import OeprovError
from provision.inventory import Inventory
from provision.node import families
from provision.node.state import OsInfo


def parse(text: str) -> OsInfo:
    """The system in ``debian-12`` or ``debian-12-x86_64``; OeprovError when there is none like it."""
    words = text.split("-")
    os = OsInfo(words[0], words[1] if len(words) > 1 else "", architecture="x86_64")
    family = families.of(os)
    if len(words) not in (2, 3) or family is None or not families.is_known(os):
        raise OeprovError(
            f"--system {text!r}: expected ID-RELEASE, such as debian-12; known: {families.KNOWN}"
        )
    manager = "apt" if family.lineage == "debian" else family.managers[0]
    found = os._replace(family=family.lineage, package_manager=manager)
    return found._replace(architecture=words[2]) if len(words) == 3 else found


def assigned(inventory: Inventory, systems: Iterable[str]) -> dict[str, OsInfo]:
    """The system of each host that one was named for: ``SYSTEM`` is for all, ``HOST=SYSTEM`` for one."""
    found: dict[str, OsInfo] = {}
    for text in systems:
        name, _, system = text.rpartition("=")
        if name and name not in inventory.hosts:
            raise OeprovError(f"--system {text!r}: there is no host {name}")
        found.update(dict.fromkeys([name] if name else inventory.hosts, parse(system)))
    return found
