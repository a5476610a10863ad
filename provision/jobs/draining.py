"""``drain`` and ``undrain``: jobs leave a host, which is kept out of placement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts.journal import cluster_lock
from provision.jobs import drained, scaling, store
from provision.jobs.backends import registry
from provision.jobs.request import ScaleOptions
from provision.jobs.screen import JobScreen, say
from provision.jobs.store import ACTIVE, Job


def drain(
    inventory: Inventory,
    host: str,
    confirm: Callable[[str], bool],
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """Take a host out: each running job goes on without it. 1: not agreed; TrainingError: it is as before."""
    drained.check_host(inventory, host)
    try:
        drained.take_out(drained.leave_out(inventory, state_dir, keep=host), [host])
    except TrainingError as error:
        raise TrainingError(f"{error}; nothing was changed") from None
    jobs = jobs_on(state_dir, inventory.cluster, host)
    for job in jobs:
        if not job.spec().has_worker:
            what = "oeprov servers down" if job.spec().is_servers_alone else "oeprov stop"
            raise TrainingError(
                f"{job.id} serves others from host {host} and cannot move; end it first: {what} {job.id}"
            )
        scaling.check(job, ScaleOptions(confirm))

    def agree(question: str) -> bool:
        agreed = confirm(question)
        if agreed:
            drained.add(state_dir, inventory.cluster, host)
        return agreed

    before = drained.hosts_of(state_dir, inventory.cluster)
    try:
        for job in jobs:
            options = ScaleOptions(agree, without=host)
            move = registry.backend_of(job).scale
            if code := move(job, lambda: inventory, options, state_dir=state_dir, screen=screen):
                return code
    except TrainingError:
        if host not in before:
            with cluster_lock(state_dir, inventory.cluster):
                drained.remove(state_dir, inventory.cluster, host)
        raise
    with cluster_lock(state_dir, inventory.cluster):
        drained.add(state_dir, inventory.cluster, host)
    say(
        screen.console,
        f"[green]✓[/] host {host} is drained: no job runs there, and none is placed there until: oeprov "
        f"undrain {host}",
    )
    return 0


def undrain(inventory: Inventory, host: str, *, state_dir: Path, screen: JobScreen) -> int:
    """Let a drained host take part in placement again."""
    if host not in drained.hosts_of(state_dir, inventory.cluster):
        drained.check_host(inventory, host)
        raise TrainingError(f"host {host} is not drained; nothing was changed")
    with cluster_lock(state_dir, inventory.cluster):
        drained.remove(state_dir, inventory.cluster, host)
    say(
        screen.console,
        f"[green]✓[/] host {host} takes part in placement again; to move servers of a running job there: "
        "oeprov scale JOB --servers N",
    )
    return 0


def jobs_on(state_dir: Path, cluster: str, host: str) -> list[Job]:
    """The active jobs of a cluster with a process on the host."""
    return [
        job
        for job in store.all_jobs(state_dir)
        if job.state().phase in ACTIVE
        and job.spec().cluster == cluster
        and any(item.host == host for item in job.spec().processes)
    ]
