"""Checks before a launch that the workers can read the training data.

The flavor names a program that reads the first rows of every file as the workers will. It runs on every
worker's host at the same time, as the workers' user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host, Inventory
from provision.hosts import errands
from provision.jobs import flavors, placement
from provision.jobs.backends.runners import runner_of
from provision.jobs.request import Request, files_of_hosts, flag

SECONDS = 300  # for directories of thousands of files, and TensorFlow for TFRecord
_PRIVATE = ("/tmp", "/var/tmp")  # noqa: S108 - units have their own


def check(inventory: Inventory, wanted: Request) -> None:
    """Raise TrainingError with the first worker's host that cannot read the data, and why."""
    training = wanted.training
    files = files_of_hosts(training)
    # The URLs of a built-in model are read too; how a script reads one is not known here.
    if not files and (training.script or not training.data or training.data.startswith("generate:")):
        return
    flavor = flavors.get(inventory.flavor)
    hosts = {host.name: host for host in placement.worker_hosts(inventory)}
    for key, path in files.items():
        host = next((item for item in hosts.values() if not item.is_here), None)
        if host is not None and any(PurePosixPath(p) in PurePosixPath(path).parents for p in _PRIVATE):
            raise TrainingError(
                f"{flag(key)}: {path}: workers on host {host.name} run with a private /tmp and cannot see "
                "it; move the data to another directory"
            )
    problems = _ask(hosts, {name: flavor.data_check(host, wanted) for name, host in hosts.items()})
    for name, problem in problems.items():
        if problem:
            where = "" if hosts[name].is_here else f"host {name}: "
            named = [key for key, path in files.items() if path in problem]
            setting = flag(max(named, key=lambda key: len(files[key]), default="data"))
            words = problem if problem.startswith(setting) else f"{setting}: {problem}"
            raise TrainingError(f"{where}{words}; nothing was started")


def _ask(hosts: Mapping[str, Host], programs: Mapping[str, Sequence[str]]) -> dict[str, str]:
    def one(name: str) -> str:
        return runner_of(hosts[name]).check(programs[name], SECONDS)

    with ThreadPoolExecutor(max_workers=min(len(hosts), errands.MOST_AT_ONCE)) as pool:
        found = dict(zip(hosts, pool.map(one, hosts), strict=True))
    return {name: problem.removeprefix("error: ") for name, problem in found.items()}
