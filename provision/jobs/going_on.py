"""Runs a job to its end under one launcher, also where it goes on with other servers meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from provision.cluster.errors import Interrupted, OeprovError, TrainingError
from provision.hosts.stop_request import StopRequest
from provision.jobs import preparing, scale_request
from provision.jobs.backends.ssh import Fleet
from provision.jobs.metrics import Event
from provision.jobs.scale_request import ScaleRequest, Units
from provision.jobs.screen import say
from provision.jobs.servers_run import supervisor_of
from provision.jobs.store import Job, JobSpec
from provision.jobs.supervisor import Outcome

Follow = Callable[[], AbstractContextManager[Callable[[Event], None]]]


def supervise(job: Job, resume: bool, follow: Follow, console: Console, stop: StopRequest) -> Outcome:
    """Run the job; where other servers are asked for, go on with them from the checkpoint of the stop.

    ``follow`` shows the events of one run.
    """
    while True:
        with follow() as show:
            outcome = supervisor_of(job)(job, _noting(job, show), stop).run(resume)
        if outcome.goes_on is None:
            break
        try:
            _go_on(job, outcome.goes_on, console, stop)
        except OeprovError as error:
            outcome = replace(outcome, goes_on=None)
            if not isinstance(error, Interrupted):
                message = f"{outcome.message}; {error}"
                outcome = replace(outcome, message=message, phase="failed", exit_code=1)
            state = job.state().model_copy(update={"phase": outcome.phase, "message": outcome.message})
            job.write_state(state)
            break
        resume = True
    _settle(job, outcome)
    return outcome


def _noting(job: Job, show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Also answers the request, once the trainer says how long it paused."""

    def note(event: Event) -> None:
        request = scale_request.read(job) if event["event"] == "pause" else None
        if request is not None and request.phase == "accepted":
            scale_request.write(job, request, phase="done", seconds=event.get("seconds"))
        show(event)

    return note


def _settle(job: Job, outcome: Outcome) -> None:
    """At the job's end: answer a request that has no answer yet."""
    request = scale_request.read(job) if job.directory.exists() else None
    if request is not None and request.is_open:
        done = request.phase == "accepted" and outcome.phase == "done"
        scale_request.write(job, request, phase="done" if done else "failed", message=outcome.message)


def _go_on(job: Job, request: ScaleRequest, console: Console, stop: StopRequest) -> None:
    """Prepare the servers that are asked for, or the former ones if that fails; TrainingError if both do."""
    before, former = job.spec(), preparing.units_of(job)
    try:
        if job.pool_servers() is not None:
            raise TrainingError("the last checkpoint has its rows in the former servers' pools")
        used = {item.host for item in request.spec.processes if item.role == "parameter_server"}
        preparing.remove_pools(Fleet(job, before), used, console)
        _prepare(job, request.spec, request.units, console, stop)
    except Interrupted:
        raise
    except TrainingError as error:
        if former is None or stop.count:
            raise
        say(console, f"[yellow]![/] {escape(str(error))}; the job goes on with its servers as before")
        _prepare(job, before, former, console, stop)
        scale_request.write(
            job, request, phase="failed", message=f"{error}; the job goes on with its servers as before"
        )


def _prepare(job: Job, spec: JobSpec, units: Units, console: Console, stop: StopRequest) -> None:
    """Start what hosts start for these processes, as the job's from now on."""
    job.write_spec(spec)
    hosts = Fleet(job, spec).hosts
    far = {name: hosts[name] for name in units if name in hosts}
    preparing.prepare(job, units, far, console, stop, fresh=False)
