"""Brings a job's training script, and the packages that it asks for, to where its workers run."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import errands
from provision.hosts.stop_request import StopRequest
from provision.jobs import environments, placement, script_files, script_packages, store
from provision.jobs.backends.runners import runner_of
from provision.jobs.placement import Placement
from provision.jobs.request import Request
from provision.jobs.script_files import ScriptFiles
from provision.jobs.script_packages import Packages
from provision.node import jobscript
from provision.node.command import System


@dataclass(frozen=True)
class Delivery:
    """What workers need of the script: its files on other hosts, and its packages everywhere."""

    files: ScriptFiles | None
    packages: Packages | None
    environments: Mapping[str, dict[str, object]]  # by host


def prepare(inventory: Inventory, wanted: Request, state_dir: Path) -> Delivery | None:
    """Read the script's directory; None for a built-in model. TrainingError names what cannot travel."""
    if not wanted.training.script:
        return None
    path = Path(wanted.training.script)
    hosts = placement.worker_hosts(inventory)
    files = None if all(host.is_here for host in hosts) else script_files.collect(path)
    if wanted.on:
        script_packages.check_image(path.parent, wanted.on, "container_worker_image")
        return Delivery(files, None, {})
    packages = script_packages.collect(path.parent)
    if packages is None:
        return Delivery(files, None, {})
    made = {}
    for host in hosts:
        runner, index = runner_of(host), host.runtime.index
        python = runner.python
        place = f"{runner.environments(state_dir)}/{packages.key(python, index)}"
        made[host.name] = packages.environment(place, python, index)
    return Delivery(files, packages, made)


def placed(delivery: Delivery | None, found: Placement) -> Placement:
    """The placement with the workers' interpreters and the digest of the files that they need."""
    if delivery is None:
        return found
    processes = []
    for spec in found.processes:
        if spec.role == "worker":
            environment = delivery.environments.get(spec.host)
            argv = [f"{environment['path']}/bin/python", *spec.argv[1:]] if environment else spec.argv
            digest = delivery.files.digest if delivery.files is not None and spec.unit else ""
            spec = spec.model_copy(update={"argv": argv, "script": digest})
        processes.append(spec)
    return replace(found, processes=processes)


def deliver(
    delivery: Delivery | None, inventory: Inventory, state_dir: Path, console: Console, stop: StopRequest
) -> None:
    """Send the files to hosts that lack them, and make environments; TrainingError names a failure.

    A stop request ends pip, here and on the hosts, and what it has installed is removed: Interrupted.
    """
    if delivery is None:
        return
    hosts = placement.worker_hosts(inventory)
    words = "sending the script to its workers' hosts"
    if delivery.packages is not None:
        words = f"installing the packages of {delivery.packages.source}"
    with console.status(words), ThreadPoolExecutor(max_workers=errands.MOST_AT_ONCE) as pool:
        try:
            lines = list(pool.map(lambda host: _deliver_to(host, delivery, stop), hosts))
        except TrainingError:
            if stop.count:
                raise Interrupted(f"stopped while {words}; nothing was started") from None
            raise
    for line in filter(None, lines):
        console.print(f"[green]✓[/] {line}", highlight=False, soft_wrap=True)
    if delivery.packages is not None and delivery.files is None:
        running = [job for job in store.all_jobs(state_dir) if job.state().phase in store.ACTIVE]
        programs = [spec.argv[0] for job in running for spec in job.spec().processes]
        directory = str(environments.directory(state_dir))
        jobscript.clean(System(), directory, lambda path: f"{path}/bin/python" in programs)


def _deliver_to(host: Host, delivery: Delivery, stop: StopRequest) -> str:
    """A line that says what was done for one host; empty if nothing was to be done."""
    environment = delivery.environments.get(host.name, {})
    try:
        sent, made = runner_of(host).deliver(delivery.files, environment, stop)
    except HostError as error:
        raise TrainingError(f"host {host.name}: {error.reason}; nothing was started") from None
    done = []
    if sent and delivery.files is not None:
        done.append(f"the script's directory was sent ({decimal(delivery.files.size)})")
    if made and delivery.packages is not None:
        done.append(f"packages of {delivery.packages.source} installed in {environment['path']}")
    return f"{host.name}: {', '.join(done)}" if done else ""
