"""A run of parameter servers alone, for trainers that oeprov does not start."""

from __future__ import annotations

from provision.hosts.stop_request import TICK
from provision.jobs.store import STOPPED, Job
from provision.jobs.supervisor import Outcome, Supervisor


class ServersRun(Supervisor):
    """Keeps the servers of this machine up until a stop request; those of hosts are systemd's."""

    def _run(self, resume: bool) -> Outcome:
        self._write("starting")
        self.servers.start()
        self._write("running")
        while not self.stop.wait(TICK):
            for server in self.servers.lost():
                if not self.servers.restart(server):
                    return Outcome("failed", f"{server.label} {server.how_it_ended()}", 1)
        return Outcome("done", STOPPED, 0)


def supervisor_of(job: Job) -> type[Supervisor]:
    """What runs the job."""
    return ServersRun if job.spec().is_servers_alone else Supervisor
