"""Shows an inventory: a table for people, one document for programs."""

from __future__ import annotations

import json
import shlex

from rich.console import Console
from rich.table import Table

from provision.cluster.inventory import Host, Inventory


def inventory(found: Inventory, *, as_json: bool = False) -> int:
    """Print hosts with their settings and the training settings; returns 0."""
    if as_json:
        print(json.dumps(document(found)))
        return 0
    console = Console()
    table = Table("host", "kind", "address", "roles", "memory", "kernel", "runtime", title=found.cluster)
    for host in found.hosts.values():
        table.add_row(
            host.name,
            host.kind.value,
            "this machine" if host.connection == "local" else f"{host.address}:{host.port}",
            "\n".join(_roles(host)) or "none",
            _memory(host),
            host.kernel.version,
            f"{host.runtime.extra} in {host.runtime.venv}",
        )
    console.print(table)
    if found.training.script:
        words = shlex.join([found.training.script, *found.training.script_arguments])
        data = f" on {found.training.data}" if found.training.data else ""
        console.print(f"training: {words}{data}", highlight=False, soft_wrap=True, markup=False)
        return 0
    job = found.training.decided()
    length = f"{job.steps} steps" if job.steps and not found.training.epochs else f"{job.epochs} epoch(s)"
    rate = "" if job.learning_rate is None else f" {job.learning_rate:g}"
    console.print(
        f"training: {job.model} on {job.data or 'data given at launch'}, dim {job.dim}, "
        f"batch {job.batch_size}, {job.optimizer}{rate}, {length}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def document(found: Inventory) -> dict[str, object]:
    """The inventory as plain values, every variable with its final value."""
    return {
        "path": str(found.path),
        "cluster": found.cluster,
        "parameter_servers": found.parameter_servers,
        "workers": found.workers,
        "training": found.training.decided().flat(),
        "hosts": {
            host.name: {
                "address": host.address,
                "port": host.port,
                "user": host.user,
                "connection": host.connection,
                "groups": list(host.groups),
                **host.variables(),
            }
            for host in found.hosts.values()
        },
    }


def _roles(host: Host) -> list[str]:
    roles = (
        [f"{host.server.count} parameter server(s), {host.server.storage}"]
        if host.is_parameter_server
        else []
    )
    return roles + (["worker"] if host.is_worker else [])


def _memory(host: Host) -> str:
    mode = host.pmem.mode
    if mode == "directory":
        return f"directory {host.pmem.directory}"
    if mode == "fsdax":
        return f"fsdax at {host.pmem.mount_prefix}N"
    return "–" if mode == "none" else mode
