"""Hosts on cables of limited bandwidth: network namespaces of this machine and a bridge (root only)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PREFIX = "oebench"
# Small beside what a step sends: what gathers while workers compute would go without a limit.
BURST = "32kb"


@contextmanager
def hosts(count: int, megabits: int) -> Iterator[list[str]]:
    """Names of `count` namespaces with the addresses 10.77.0.1 and up, on cables of so many Mb/s; 0: any.

    The limit holds in both directions: at the host's end of its cable for what it sends, at the bridge's for
    what it gets.
    """
    names = [f"{PREFIX}{number}" for number in range(count)]
    bridge = f"{PREFIX}-br"
    _remove([*names, bridge])
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            port = f"p{number}"
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", bridge)
            _ip("-n", bridge, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if megabits:
                for namespace, device in ((name, "eth0"), (bridge, port)):
                    limit = ("rate", f"{megabits}mbit", "burst", BURST, "latency", "50ms")
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)
        yield names
    finally:
        _remove([*names, bridge])


def within(name: str, command: Sequence[str]) -> list[str]:
    """Return the command as one that runs in this namespace."""
    return ["ip", "netns", "exec", name, *command]


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
