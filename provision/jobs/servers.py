"""``oeprov servers``: parameter servers alone, for notebooks and other launchers; see ``servers_run``."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from provision.cluster import flavor_facts
from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.hosts.journal import cluster_lock
from provision.jobs import drained, jobspec, launching, placement, readiness, stopping, store
from provision.jobs.backends import units
from provision.jobs.background import start_and_wait
from provision.jobs.request import LaunchOptions, Request, flag
from provision.jobs.screen import JobScreen
from provision.jobs.store import Job, JobSpec, JobState

NAME = "servers"
_SETTINGS = ("tls", "server_wait", "storage", "storage_cache", "servers")  # that job.json keeps


def up(inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """Start the inventory's servers, or those of ``options.resume`` again with the rows that they left.

    Returns them once they listen. TrainingError: nothing was started.
    """
    if inventory.flavor != flavor_facts.DEFAULT:
        raise TrainingError(f"runtime_flavor: {inventory.flavor} has no servers that others could use")
    if not inventory.parameter_servers:
        raise TrainingError(f"{inventory.path}: there is no host of group parameter_servers")
    inventory = drained.leave_out(inventory, state_dir)  # which the launch tells of
    hosts = {name: inventory.hosts[name] for name in inventory.parameter_servers}
    alone = replace(inventory, hosts=hosts, workers=[])
    wanted = jobspec.server_request(alone, options)
    wanted = replace(wanted, name=wanted.name or NAME)
    for host in hosts.values():
        placement.check_connection(host)
    launch = launching.Launch(alone, options, state_dir, screen)
    with launch.stop_request.on_signals(), cluster_lock(state_dir, alone.cluster):
        before = None if options.resume is None else _ended(state_dir, options, alone)
        if before is not None:
            wanted = _as_before(before.spec(), wanted)
        states = launch.check_hosts(wanted)
        jobspec.check_servers(alone, wanted)
        alone = readiness.needed(alone, wanted)
        now = datetime.now()
        job = before or store.create(state_dir, wanted.name, now)
        try:
            placed = placement.place_servers(job, alone, states, wanted, fresh=before is None)
            spec = jobspec.build(job, alone, placed, wanted, now)
            spec = spec.model_copy(update={"settings": {name: spec.settings[name] for name in _SETTINGS}})
            jobspec.check_storage_is_free(spec, state_dir)
            if before is None:
                jobspec.check_storage_is_new(job, spec)
            else:
                _check_places(job, job.spec(), spec)
        except TrainingError:
            if before is None:
                shutil.rmtree(job.directory)
            raise
        job.make()
        job.write_spec(spec)
        launch.prepare(job, placed)
    if any(not item.unit for item in spec.processes):
        start_and_wait(job, launch.stop_request, f"oeprov servers down {job.id}")
    else:
        job.write_state(JobState(phase="running", processes=job.state().processes))  # systemd supervises
    return job


def _ended(state_dir: Path, options: LaunchOptions, inventory: Inventory) -> Job:
    """The servers to start again; TrainingError if they run, or if more is asked than that."""
    job = find(state_dir, options.resume)
    if options.given():
        flags = ", ".join(flag(name) for name in options.given())
        raise TrainingError(f"--resume keeps the settings of the servers; leave out {flags}")
    if stopping.is_running(job):
        raise TrainingError(f"{job.id} runs, or may still run; stop it first: oeprov servers down {job.id}")
    launching.require_own(job.spec(), inventory)
    return job


def _as_before(spec: JobSpec, wanted: Request) -> Request:
    """The request with the settings that these servers had."""
    values = dict(spec.settings)
    training = {name: values.pop(name) for name in ("tls", "server_wait")}
    return replace(wanted, training=wanted.training.model_copy(update=training), **values)


def _check_places(job: Job, before: JobSpec, now: JobSpec) -> None:
    """Refuse to start servers elsewhere than where their rows are."""
    places = [[(item.name, item.host, item.pools) for item in spec.processes] for spec in (before, now)]
    if places[0] != places[1]:
        there, here = (
            ", ".join(f"{name} on {host} {path}".strip() for name, host, path in p) for p in places
        )
        raise TrainingError(
            f"{job.id} had {there}; in {now.inventory} it would have {here}, without those rows: use the "
            "inventory and the modes of then"
        )


def down(state_dir: Path, name: str | None, *, screen: JobScreen) -> int:
    """Stop servers; rows that have a checkpoint stay. 0, or 1 when a host could not be reached."""
    return stopping.stop(find(state_dir, name), state_dir=state_dir, screen=screen)


def find(state_dir: Path, name: str | None) -> Job:
    """The servers of this id, name or beginning; without one the last, of those that run if any do."""
    found = [job for job in store.all_jobs(state_dir) if not job.broken and job.spec().is_servers_alone]
    if not found:
        raise TrainingError(
            f"no parameter servers in {store.jobs_dir(state_dir)}; start some: oeprov servers up"
        )
    if name is None:
        found = [job for job in found if stopping.is_running(job)] or found[-1:]
    return store.choose(found, name, store.jobs_dir(state_dir))


def access(job: Job, report: dict[str, Any]) -> dict[str, Any]:
    """What a client needs; ``report``: what was observed of the servers."""
    spec = job.spec()
    argv = spec.processes[0].argv
    directory = units.job_directory(job.id)
    return {
        "endpoints": [item["endpoint"] for item in report["processes"]],
        "token_file": str(job.token_file),
        "token_files": {item.host: str(directory / "token") for item in spec.processes if item.unit},
        "tls": argv[argv.index("--tls") + 1],
    }
