"""Facts about a host for people: how its memory is used, and what it lacks."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

from provision.cluster.inventory import Host, Inventory
from provision.hosts.survey import ClusterSurvey
from provision.node import mount, numa
from provision.node.state import State
from provision.node.step import Plan


def hosts(inventory: Inventory, found: ClusterSurvey) -> list[dict[str, Any]]:
    """Every host of the inventory, unreachable ones too; ready for JSON.

    Has no keys or passwords, since users send the page to others.
    """
    lost = {error.host: error.reason for error in found.lost}
    return [
        describe(host, found.states[name], found.plans[name]) if name in found.states else _lost(host, lost)
        for name, host in inventory.hosts.items()
    ]


def describe(host: Host, state: State, plan: Plan) -> dict[str, Any]:
    """One observed host. Sizes are bytes; ``ready``: it has no pending step and no problem."""
    kernel = state.kernel.running or (platform.release() if host.is_here else "")
    return {
        **_identity(host),
        "error": "",
        "ready": plan.converged,
        "mode": host.platform.find_mode(state) or "none",
        "os": state.os.name,
        "kernel": kernel,
        "dram_bytes": numa.dram(state) if state.numa else None,
        "pmem_bytes": _pmem_bytes(host, state),
        "places": list(_places(host, state)),
        "gpus": state.gpu.names,
        "gpu_driver": state.gpu.driver,
        "oeprov": state.runtime.oeprov,
        "python": state.runtime.python,
        "tools": {name: text for name, text in state.tools._asdict().items() if text},
        "jobs": state.jobs,
        "steps": [
            {"what": step.what, "why": step.why, "destroys": step.destroys, "reboots": step.reboots}
            for step in plan.steps
        ],
        "problems": plan.problems,
        "notes": plan.notes,
    }


def _identity(host: Host) -> dict[str, Any]:
    roles = [("parameter server", host.is_parameter_server), ("worker", host.is_worker)]
    return {
        "host": host.name,
        "kind": host.kind.value,
        "roles": [name for name, has in roles if has],
        "wanted_mode": host.pmem.mode,
    }


def _lost(host: Host, reasons: dict[str, str]) -> dict[str, Any]:
    return {**_identity(host), "error": reasons.get(host.name, "was not observed"), "ready": False}


def _pmem_bytes(host: Host, state: State) -> int | None:
    found = sum(region.size for region in state.regions)
    if not found:
        # On re7p, persistent memory in use as a memory node has no region.
        found = sum(node.size for node in state.numa if not node.cpus)
    return found or None


def _places(host: Host, state: State) -> Iterable[str]:
    """Every place for rows, described for people."""
    for directory in state.directories:
        if directory.is_directory:
            yield f"{directory.path}, an ordinary directory"
    for item in state.mounts:
        if item.where.removeprefix(host.pmem.mount_prefix).isdigit():
            dax = "with" if mount.has_dax(item.options) else "without"
            yield f"{item.where}: {item.type} {dax} DAX on {item.device}"
    for node in numa.cpuless(state):
        yield f"memory node {node.id} without CPUs"
    for device in state.dax:
        if device.mode != "system-ram":
            yield f"{device.chardev} ({device.mode})"
