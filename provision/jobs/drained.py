"""Hosts that are out of placement until ``oeprov undrain``: ``drained.json`` of the state directory.

By cluster and host, with the time since when. Launches, resumes and scales leave these hosts out; hosts are
still observed and set up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from provision.cluster.errors import TrainingError, did_you_mean
from provision.cluster.inventory import Inventory
from provision.jobs.store import write_json

_FILE = "drained.json"
Drained = dict[str, dict[str, str]]  # cluster -> host -> since when


def read(state_dir: Path) -> Drained:
    """All drained hosts; TrainingError if the file cannot be read, since it must not be ignored."""
    path = state_dir / _FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(cluster): {**hosts} for cluster, hosts in found.items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TrainingError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        raise TrainingError(
            f"{path}: this is not a list of drained hosts; repair it, or remove it and drain them again"
        ) from None


def add(state_dir: Path, cluster: str, host: str) -> None:
    """Keep a host out of placement from now on. The caller holds the cluster's lock."""
    found = read(state_dir)
    found.setdefault(cluster, {}).setdefault(host, datetime.now().astimezone().isoformat(timespec="seconds"))
    write_json(state_dir / _FILE, found)


def remove(state_dir: Path, cluster: str, host: str) -> None:
    """Let a host take part again. The caller holds the cluster's lock."""
    found = read(state_dir)
    found.get(cluster, {}).pop(host, None)
    write_json(state_dir / _FILE, {name: hosts for name, hosts in found.items() if hosts})


def hosts_of(state_dir: Path, cluster: str) -> dict[str, str]:
    """The drained hosts of a cluster, with the time since when."""
    return read(state_dir).get(cluster, {})


def check_host(inventory: Inventory, host: str) -> None:
    """Refuse a host that the inventory does not have."""
    if host not in inventory.hosts:
        hint = did_you_mean(host, inventory.hosts)
        raise TrainingError(f"host {host}: {inventory.path} has no such host{hint}; nothing was changed")


def leave_out(
    inventory: Inventory, state_dir: Path, tell: Callable[[str], None] = lambda _: None, *, keep: str = ""
) -> Inventory:
    """The inventory without its drained hosts, which it tells of; TrainingError if it needs one of them.

    ``keep``: a host that stays in it all the same, because it is just being drained.
    """
    found = hosts_of(state_dir, inventory.cluster)
    names = [name for name in found if name in inventory.hosts and name != keep]
    for name in names:
        tell(f"[yellow]![/] host {name} is drained and left out; to use it again: oeprov undrain {name}")
    try:
        return take_out(inventory, names)
    except TrainingError as error:
        raise TrainingError(f"{error}, or use this one again: oeprov undrain {names[0]}") from None


def take_out(inventory: Inventory, names: list[str]) -> Inventory:
    """The inventory without these hosts; TrainingError if a group has no other."""
    if not names:
        return inventory
    groups = {"parameter_servers": inventory.parameter_servers, "workers": inventory.workers}
    left = {key: [name for name in hosts if name not in names] for key, hosts in groups.items()}
    for key, hosts in groups.items():
        if hosts and not left[key]:
            raise TrainingError(
                f"without host {', '.join(names)}, no host of group {key} in {inventory.path} is left; add "
                "one"
            )
    return replace(
        inventory,
        hosts={name: host for name, host in inventory.hosts.items() if name not in names},
        parameter_servers=left["parameter_servers"],
        workers=left["workers"],
    )
