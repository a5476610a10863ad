"""The registry of what oeprov made on this host, written before anything relies on it.

It has one word per line: UUIDs of namespaces and file systems; ``making:NAMESPACE:MODE`` while a namespace is
created, whose UUID is not known yet; ``vacant:DEVICE:UUID`` for a device without data, until its file system
is in /etc/fstab; ``goal:GOAL:BOOT`` for the last goal of the modules and the boot in which it was set.
Namespaces without labels lose their names silently, so a name cannot show whose a namespace is.
"""

from typing import List

from . import devices
from .command import System
from .state import Namespace

PATH = "/var/lib/oeprov/owned"  # what oeprov made on this host, one word per line


def observe(system: System) -> List[str]:
    """The words of the registry, in order."""
    return system.read(PATH).split()


def change(system: System, add: List[str], remove: List[str]) -> bool:
    """Add and remove words, flushed to the disk; True if anything changed."""
    words = observe(system)
    kept = [word for word in words if word not in remove or word in add]
    kept += [word for word in add if word and word not in kept]
    return kept != words and system.write(PATH, "".join(word + "\n" for word in kept))


def making(namespace: str, mode: str) -> str:
    """The word while ``namespace`` is created in ``mode``."""
    return f"making:{namespace}:{mode}"


def vacant(device: str, uuid: str = "") -> str:
    """The word for a block device without data; ``uuid`` is its namespace's."""
    return f"vacant:{device}:{uuid}"


def is_ours(words: List[str], item: Namespace) -> bool:
    """oeprov made the namespace as it is, or was interrupted while making it."""
    return any(word and word in words for word in (item.uuid, item.raw_uuid, making(item.dev, item.mode)))


def adopt(system: System) -> None:
    """Register by UUID the namespaces that were created just before an interruption."""
    words = observe(system)
    for item in devices.namespaces(system) if any(word.startswith("making:") for word in words) else []:
        if making(item.dev, item.mode) in words:
            empty = [vacant(item.blockdev, item.uuid)] if item.blockdev else []
            before = [word for word in words if empty and word.startswith(vacant(item.blockdev))]
            change(system, [item.uuid, item.raw_uuid] + empty, [making(item.dev, item.mode)] + before)


def goal(argument: str, boot_id: str) -> str:
    """The word for a goal of the modules that was set in this boot."""
    return f"goal:{argument}:{boot_id}"


def has_goal(words: List[str], argument: str) -> bool:
    """The goal is registered, whatever its boot."""
    return any(word.startswith(f"goal:{argument}:") for word in words)


def goal_of_earlier_boot(words: List[str], argument: str, boot_id: str) -> bool:
    """The goal was set before the running boot, so the firmware could have applied it."""
    return any(word.startswith(f"goal:{argument}:") and word != goal(argument, boot_id) for word in words)
