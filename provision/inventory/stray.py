"""Files of variables beside an inventory that match no host or group; Ansible ignores them in silence."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from provision.cluster.errors import did_you_mean
from provision.inventory import sources
from provision.inventory.file import read


def problems(path: Path) -> list[str]:
    """A line per entry of group_vars and host_vars beside the inventory that matches nothing.

    An entry that another inventory of the directory names is that one's.
    """
    raw = read(path)
    top = path if path.is_dir() else path.parent
    others = "" if path.is_dir() else _texts(top, path)
    found = []
    for folder, what, known in (
        ("group_vars", "group", ["all", "ungrouped", *raw.groups]),
        ("host_vars", "host", [host.name for host in raw.hosts]),
    ):
        for entry in sources.variable_entries(top, folder):
            name = entry.name if entry.is_dir() or entry.name in known else entry.stem
            if name in known or re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", others):
                continue
            hint = did_you_mean(name, known, cutoff=0.5)
            found.append(f"{entry}: the inventory has no {what} {name}{hint}; rename the file, or remove it")
    return found


def _texts(directory: Path, path: Path) -> str:
    """The texts of the other files beside the inventory, which may be inventories too."""
    texts = []
    for item in sorted(directory.iterdir()):
        with suppress(OSError):  # it may be nobody's but root's
            if item.is_file() and item.stat().st_size < 1_000_000 and item.resolve() != path.resolve():
                texts.append(item.read_text(errors="replace"))
    return "\n".join(texts)
