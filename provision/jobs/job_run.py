"""What the servers and the workers of one run share: the job, limits, the stop request and events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from provision.hosts.stop_request import StopRequest
from provision.jobs.backends import Process
from provision.jobs.backends.local import Child
from provision.jobs.backends.ssh import Fleet, HostServer, HostWorker
from provision.jobs.metrics import Event, MetricsTail
from provision.jobs.store import Job, ProcessSpec, ProcessState


@dataclass(frozen=True)
class Limits:
    """Seconds to wait before the next, harder measure; and how often a server is restarted."""

    checkpoint: float = 600.0  # until a worker ends after SIGTERM: it writes a checkpoint first
    server: float = 30.0  # until a server ends after SIGTERM
    loss: float = 20.0  # until a worker ends whose server, or another worker, died
    restarts: int = 5  # of a server at most, within `restart_window`; systemd does the same with units
    restart_window: float = 600.0
    restart_pause: float = 1.0  # before a restart


class JobRun:
    """One run of a job. ``write_state`` writes ``state.json`` with all processes as they are now."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        stop: StopRequest,
        limits: Limits,
        write_state: Callable[[], None],
    ) -> None:
        self.job, self.spec = job, job.spec()
        self.settings = self.spec.settings
        self.fleet = Fleet(job, self.spec)
        self.stop, self.limits, self.write_state = stop, limits, write_state
        self.last: dict[str, Event] = {}  # kind of event -> the last one of this run
        self.tail = MetricsTail(job.metrics_file)
        self._on_event = on_event

    def process(self, spec: ProcessSpec, prepared: ProcessState | None = None) -> Process:
        """The process where it runs; ``prepared``: the state of a server that the launch has started."""
        if not spec.unit:
            return Child(self.job, spec)
        if spec.role == "worker":
            return HostWorker(self.fleet, spec, self.emit)
        return HostServer(self.fleet, spec, prepared or spec.state(pid=0, started=0))

    def emit(self, event: Event) -> None:
        """Remember and show an event."""
        self.last[event["event"]] = event
        # The screen may have lost its reader, as with `| head`: rich then asks the program to exit. The job
        # continues; `oeprov status` shows it.
        with contextlib.suppress(BrokenPipeError, SystemExit):
            self._on_event(event)

    def read_events(self) -> None:
        """Emit what the trainer has written since the last call."""
        for event in self.tail.read():
            self.emit(event)
