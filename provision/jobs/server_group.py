"""The servers of one run, or its replicas: start, wait until they listen, restart, stop.

The supervisor starts and restarts those of this machine. The launch starts those of other hosts before the
run, and systemd restarts them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from provision.jobs.backends import Process, Refused, Stopped
from provision.jobs.backends.ssh import describe, ended, message_of
from provision.jobs.job_run import JobRun
from provision.jobs.store import ProcessSpec, ProcessState


class ServerGroup:
    """All servers; ``prepared`` are the states of those that the launch has started."""

    def __init__(self, run: JobRun, prepared: Iterable[ProcessState]) -> None:
        self.run = run
        self.role = run.spec.server_role
        # Workers wait for a lost server. Clients of a lost replica ask another.
        self.waited_for = bool(run.settings.get("server_wait")) or run.spec.is_serving
        begun = {item.name: item for item in prepared}
        specs = [spec for spec in run.spec.processes if spec.role == self.role]
        self.members = [run.process(spec, begun.get(spec.name)) for spec in specs]
        self._stopped: list[ProcessState] = []  # all, after they were stopped
        self._restarts: dict[str, list[float]] = {}  # server -> times of its restarts

    def states(self) -> list[ProcessState]:
        """For ``state.json``."""
        return self._stopped or [state for server in self.members if (state := server.state())]

    def start(self) -> str:
        """Start all; their endpoints in order, once all listen."""
        for server in self.members:
            server.start(server.spec.argv, server.spec.environment, self.run.stop)
            self.run.write_state()
        for server in self.members:
            self._wait_ready(server)
        return ",".join(server.endpoint for server in self.members)

    def _wait_ready(self, server: Process) -> None:
        if ready := server.wait_ready(self.run.stop):
            self.run.emit({**ready, **_event("server", server.spec), "endpoint": server.endpoint})
            self.run.write_state()

    def lost(self) -> list[Process]:
        """Those that have ended and are restarted here."""
        return [server for server in self.members if server.supervised and server.poll() is not None]

    def find_lost(self) -> Process | None:
        """A server that has ended, or is not the process that was started; asks the hosts."""
        fleet = self.run.fleet
        answers = fleet.observe() if fleet.hosts_of(self.role) else {}
        for server in self.members:
            if server.spec.host in answers:
                server.refresh(answers[server.spec.host])
        return next((server for server in self.members if server.poll() is not None), None)

    def restart(self, server: Process) -> bool:
        """Restart a server at its address; False after too many restarts, or if workers do not wait for it.

        During a stop request nothing is started.
        """
        run, limits, now = self.run, self.run.limits, time.monotonic()
        times = self._restarts.setdefault(server.spec.name, [])
        times[:] = [then for then in times if now - then < limits.restart_window]
        if not self.waited_for or len(times) >= limits.restarts:
            return False
        times.append(now)
        run.emit({**_event("server_lost", server.spec), "message": server.how_it_ended()})
        if run.stop.wait(limits.restart_pause):
            return True
        argv = list(server.spec.argv)
        if "--port" in argv:
            argv[argv.index("--port") + 1] = server.endpoint.rpartition(":")[2]
        server.start(argv, server.spec.environment, run.stop)
        server.restarts += 1
        run.write_state()
        event = _event("server_restarted", server.spec)
        run.emit({**event, "endpoint": server.endpoint, "pid": server.pid})
        return True

    def restart_lost(self) -> bool:
        """Restart those that are lost and wait until they listen; False when one does not."""
        for server in self.lost():
            try:
                if not self.restart(server) or self.run.stop.count:
                    return False
                self._wait_ready(server)
            except (Refused, Stopped):
                return False
        return True

    def stop(self, known: str, *, keep_pools: bool) -> str:
        """End all servers; names hosts out of reach, with the reason unless it is in ``known``.

        ``keep_pools``: keep the rows in persistent memory that have a checkpoint, for a resumed job.
        """
        if self.role == "replica":  # each answers its last requests for a while: all at once
            for server in filter(lambda item: item.supervised, self.members):
                server.send(signal.SIGTERM)
        for server in reversed(self.members):
            server.end(self.run.limits.server)
        for spec in self.run.spec.processes:
            if not (keep_pools and self.run.job.has_rows(spec)):
                self.run.job.remove_pools(spec)
        answers = self.run.fleet.stop(self.role, keep_pools=keep_pools)
        self._stopped = ended(self.states(), answers)
        for line in describe(answers):
            self.run.emit({"event": "host_stopped", "line": line})
        return message_of(answers, known)


def _event(kind: str, spec: ProcessSpec) -> dict[str, str]:
    return {"event": kind, "name": spec.name, "host": spec.host}
