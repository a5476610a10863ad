"""The state of hosts before each change: written to the journal, read by ``oeprov rollback``."""

from __future__ import annotations

from collections.abc import Mapping

from provision.cluster.settings import Kind
from provision.hosts.journal import Journal
from provision.node import bootloader, grubdefaults, platforms
from provision.node.state import State


def write(journal: Journal, cluster: str, states: Mapping[str, State], kinds: Mapping[str, Kind]) -> None:
    """Record the hosts' kernels, modes and boot settings before they are changed."""
    journal.write_all(
        {
            "event": "before",
            "cluster": cluster,
            "host": host,
            "kernel": state.kernel.running,
            "mode": platforms.get(kinds[host].value).find_mode(state),
            "arguments": list(dict.fromkeys(state.kernel.cmdline + state.bootloader.cmdline.split())),
            "grub_default": grubdefaults.default_of(bootloader.defaults_of(state.bootloader)),
        }
        for host, state in states.items()
    )


def first(journal: Journal, cluster: str) -> dict[str, tuple[tuple[str, ...] | None, str | None]]:
    """Host → kernel arguments and GRUB_DEFAULT before its first change; None: not recorded."""
    found: dict[str, tuple[tuple[str, ...] | None, str | None]] = {}
    for entry in journal.read():
        if entry.get("event") == "before" and entry.get("cluster") == cluster:
            words = entry.get("arguments")
            known = tuple(words) if isinstance(words, list) else None
            found.setdefault(str(entry.get("host", "")), (known, entry.get("grub_default")))
    return found


def last(journal: Journal, cluster: str, key: str, now: Mapping[str, str]) -> dict[str, str]:
    """Host → the last recorded value of ``key`` (kernel, mode) that differs from ``now``."""
    found: dict[str, str] = {}
    for entry in journal.read():
        host, value = str(entry.get("host", "")), str(entry.get(key, ""))
        if entry.get("event") != "before" or entry.get("cluster") != cluster:
            continue
        if value and host in now and value != now[host]:
            found[host] = value
    return found
