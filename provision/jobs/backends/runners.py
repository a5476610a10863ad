"""The runner of a host: by how it is reached."""

from __future__ import annotations

from provision.cluster.inventory import Host
from provision.jobs.backends import Runner
from provision.jobs.backends.local import LocalRunner
from provision.jobs.backends.ssh import SshRunner


def runner_of(host: Host) -> Runner:
    """What runs the processes of jobs on the host."""
    return LocalRunner(host) if host.is_here else SshRunner(host)
