"""The parameter servers of one run: start, wait until they listen, restart, stop.

Servers of this machine are children. Those of other hosts are systemd units: the launch starts them before
the run, systemd restarts them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from provision.jobs.backends.local import Child, Refused, Stopped, start, wait_ready
from provision.jobs.backends.ssh import HostServer, describe, ended, message_of
from provision.jobs.job_run import JobRun
from provision.jobs.store import ProcessSpec, ProcessState


class ServerGroup:
    """All servers; ``prepared`` are the states of the units."""

    def __init__(self, run: JobRun, prepared: Iterable[ProcessState]) -> None:
        self.run = run
        self.waited_for = bool(run.settings.get("server_wait"))  # workers wait for a lost server
        self.children: list[Child] = []
        specs = run.fleet.processes
        self.units = [
            HostServer(specs[item.name], item.pid, item.started, item.boot, item.endpoint, self.waited_for)
            for item in prepared
            if item.name in specs
        ]
        self._stopped: dict[str, ProcessState] = {}  # units after they were stopped
        self._restarts: dict[str, list[float]] = {}  # server -> times of its restarts

    @property
    def all(self) -> list[Child | HostServer]:
        """Every server, wherever it runs."""
        return [*self.children, *self.units]

    def states(self) -> list[ProcessState]:
        """For ``state.json``."""
        return [self._stopped.get(server.spec.name) or server.state() for server in self.all]

    def start(self) -> str:
        """Start the children; the endpoints of all servers in order, once all listen."""
        specs = [spec for spec in self.run.spec.processes if spec.role == "parameter_server"]
        for spec in specs:
            if not spec.unit:
                self.run.job.ready_file(spec.name).unlink(missing_ok=True)
                self.children.append(start(self.run.job, spec, spec.argv))
                self.run.write_state()
        for child in self.children:
            self._wait_ready(child)
        endpoints = {server.spec.name: server.endpoint for server in self.all}
        return ",".join(endpoints[spec.name] for spec in specs)

    def _wait_ready(self, child: Child) -> None:
        run, path = self.run, self.run.job.ready_file(child.spec.name)
        ready = wait_ready(child, path, run.stop)
        run.emit({**ready, **_event("server", child.spec), "endpoint": child.endpoint})
        run.write_state()

    def lost_children(self) -> list[Child]:
        """The children that have ended."""
        return [child for child in self.children if child.poll() is not None]

    def find_lost(self) -> Child | HostServer | None:
        """A server that has ended, or is not the process that was started; asks the hosts."""
        if self.units:
            answers = self.run.fleet.observe()
            for server in self.units:
                server.refresh(answers[server.spec.host])
        return next((server for server in self.all if server.poll() is not None), None)

    def restart(self, child: Child) -> Child | None:
        """Restart a server at its address; None after too many restarts, or if workers do not wait for it.

        During a stop request nothing is started: the child that has ended is returned.
        """
        run, limits, now = self.run, self.run.limits, time.monotonic()
        times = self._restarts.setdefault(child.spec.name, [])
        times[:] = [then for then in times if now - then < limits.restart_window]
        if not self.waited_for or len(times) >= limits.restarts:
            return None
        times.append(now)
        run.emit({**_event("server_lost", child.spec), "message": child.how_it_ended()})
        if run.stop.wait(limits.restart_pause):
            return child
        argv = list(child.spec.argv)
        if "--port" in argv:
            argv[argv.index("--port") + 1] = child.endpoint.rpartition(":")[2]
        fresh = start(run.job, child.spec, argv)
        fresh.endpoint, fresh.restarts = child.endpoint, child.restarts + 1
        self.children[self.children.index(child)] = fresh
        if child.popen.stdin is not None:
            child.popen.stdin.close()
        run.write_state()
        run.emit({**_event("server_restarted", child.spec), "endpoint": fresh.endpoint, "pid": fresh.pid})
        return fresh

    def restart_lost(self) -> bool:
        """Restart every child that has ended and wait until it listens; False when one does not."""
        for child in self.lost_children():
            self.run.job.ready_file(child.spec.name).unlink(missing_ok=True)
            try:
                fresh = self.restart(child)
                if fresh is None:
                    return False
                self._wait_ready(fresh)
            except (Refused, Stopped):
                return False
        return True

    def stop(self, known: str, *, keep_pools: bool) -> str:
        """End all servers; names hosts out of reach, with the reason unless it is in ``known``.

        ``keep_pools``: keep the rows in persistent memory that have a checkpoint, for a resumed job.
        """
        for child in reversed(self.children):
            child.end(self.run.limits.server)
        for spec in self.run.spec.processes:
            if not (keep_pools and self.run.job.has_rows(spec)):
                self.run.job.remove_pools(spec)
        answers = self.run.fleet.stop("parameter_server", keep_pools=keep_pools)
        self._stopped = {item.name: item for item in ended([unit.state() for unit in self.units], answers)}
        for line in describe(answers):
            self.run.emit({"event": "host_stopped", "line": line})
        return message_of(answers, known)


def _event(kind: str, spec: ProcessSpec) -> dict[str, str]:
    return {"event": kind, "name": spec.name, "host": spec.host}
