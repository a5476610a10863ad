"""A run without workers: parameter servers for trainers that oeprov does not start, or replicas."""

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
            gone = [server for server in self.servers.lost() if not self.servers.restart(server)]
            # While other replicas answer, one is tried again when its restarts are long enough ago.
            if gone and not (self.job_run.spec.is_serving and len(gone) < len(self.servers.members)):
                return Outcome("failed", f"{gone[0].label} {gone[0].how_it_ended()}", 1)
        return Outcome("done", STOPPED, 0)


def supervisor_of(job: Job) -> type[Supervisor]:
    """What runs the job."""
    return Supervisor if job.spec().has_worker else ServersRun
