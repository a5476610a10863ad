"""What a job needs of its hosts, and what to do if it is missing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from provision.cluster import flavor_facts, host_names
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.cluster.settings import KernelSettings
from provision.jobs import jobspec, placement, script
from provision.jobs.flavors.oe_runtime import schema_text
from provision.jobs.request import Request
from provision.jobs.storage import (
    MODES,
    POOLS,
    check_storage,
    places_of,
    servers_of,
    storage_of,
    unused_drives,
)
from provision.node.platform_base import MEMORY_NODES
from provision.node.state import State
from provision.node.step import Plan, Step


def needed(inventory: Inventory, wanted: Request) -> Inventory:
    """The inventory with only what the job needs: its storage's mode of persistent memory, and any kernel.

    What else the inventory asks for is up to ``bootstrap`` and does not prevent a job.
    """
    hosts = {}
    for name, host in inventory.hosts.items():
        pmem = host.pmem.model_copy(update={"mode": _mode(host, wanted)})
        hosts[name] = replace(host, pmem=pmem, kernel=KernelSettings())
    return replace(inventory, hosts=hosts)


def _mode(host: Host, wanted: Request) -> str:
    if not host.platform.managed:
        return host.pmem.mode  # a directory that stands in for it, or none
    mode = "none"
    keeps_rows = flavor_facts.get(host.runtime.flavor).keeps_rows
    if keeps_rows(parameter_server=host.is_parameter_server, worker=host.is_worker):
        # On system-ram, servers with storage dram have all their memory on memory nodes: see ``place_of``.
        dram = host.pmem.mode if host.pmem.mode in MEMORY_NODES else "none"
        mode = MODES.get(storage_of(host, wanted), dram)
        if mode == "fsdax" and host.ssd.devices:
            mode = host.pmem.mode  # rows are on drives, unless persistent memory has a file system
    return host.pmem.mode if host.platform.refuse(mode) else mode


def mistakes(inventory: Inventory) -> list[str]:
    """What a launch without flags would refuse: missing files, then a sentence per host on its servers.

    Jobs on Kubernetes and of other flavors have rules of their own.
    """
    if inventory.kubernetes.server_image or inventory.flavor != flavor_facts.DEFAULT:
        return []
    found = []
    wanted = Request(inventory.training, storage="", storage_cache=0, servers=0, workers=0, name="")
    hosts = needed(inventory, wanted).hosts
    training = inventory.training
    for check in (
        lambda: script.settled(training, "training_script"),
        lambda: schema_text(training.schema or ""),
    ):
        try:
            check()
        except TrainingError as error:
            found.append(re.sub("^--(?=script|schema)", "training_", str(error)))
    for name in inventory.parameter_servers:
        host = hosts[name]
        try:
            placement.check_connection(host)
            check_storage(host, storage_of(host, wanted))
            jobspec.check_ports(host, servers_of(host, wanted))
        except TrainingError as error:
            found.append(str(error))
    return found


def why_not(
    inventory: Inventory, wanted: Request, plan: Plan, steps: Sequence[Step], state: State | None
) -> str:
    """Why the job cannot start on a host with problems or ``steps`` in its plan, and what to do."""
    host, missing = inventory.hosts[plan.host], [*plan.problems, *(step.what for step in steps)]
    mode, storage = _mode(host, wanted), storage_of(host, wanted)
    other = mode not in (host.pmem.mode, "none")
    path = shlex.quote(str(inventory.path))
    bootstrap = f"oeprov bootstrap -i {path}"
    switch = f"oeprov pmem-mode {mode} -i {path} --limit {shlex.quote(host.name)}"
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    message = f"host {host.name} is not ready: {missing[0]}{more}; "
    if not plan.problems and all(step.role == "runtime" for step in steps):
        # The mode is right. Bootstrap alone would change it to the inventory's.
        return message + (
            f"run: {switch} --write-inventory, then: {bootstrap}" if other else f"run: {bootstrap}"
        )
    advice = f"run: {switch if other else bootstrap}"
    found = host.platform.find_mode(state) if state is not None else ""
    if not host.platform.managed or storage not in MODES or found == mode or host.ssd.devices:
        return message + advice
    fits = next((name for name, needs in MODES.items() if needs == found), "dram")
    needs = f"storage {storage} needs pmem_mode {mode}, found {found or 'none'}: "
    return f"{message}{needs}use --storage {fits}, or {advice}"


def differences(inventory: Inventory, wanted: Request) -> list[str]:
    """One line for each mode that the job uses against the inventory."""
    found: dict[tuple[str, str], list[str]] = {}
    for host in inventory.hosts.values():
        mode = _mode(host, wanted)
        if mode not in (host.pmem.mode, "none"):
            found.setdefault((mode, host.pmem.mode), []).append(host.name)
    return [
        f"{', '.join(names)}: the job uses {mode}; {inventory.path} says pmem_mode {other}, and the next "
        "bootstrap plans to change back"
        for (mode, other), names in found.items()
    ]


def idle(inventory: Inventory, states: Mapping[str, State], wanted: Request) -> list[str]:
    """One line for places for rows that no server uses: each server has its rows in one."""
    unused: dict[str, list[str]] = {}
    found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name in inventory.parameter_servers:
        host = inventory.hosts[name]
        storage, servers = storage_of(host, wanted), servers_of(host, wanted)
        words = "" if wanted.storage else unused_drives(host, storage)  # a flag says what is wanted now
        if words:
            unused.setdefault(words, []).append(name)
        places = places_of(host, states.get(name), storage) if storage in POOLS else []
        if places[servers:]:
            found.setdefault((servers, tuple(places)), []).append(name)
    return [f"{host_names.fold(names)}: {words}" for words, names in unused.items()] + [
        f"{host_names.fold(names)}: no server keeps rows in {', '.join(places[servers:])}; to use all, run "
        f"{len(places)} servers per host (parameter_server_count)"
        for (servers, places), names in found.items()
    ]
