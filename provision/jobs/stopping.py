"""``stop``: the workers write a checkpoint, the servers end; also if the job's supervisor was killed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from rich.markup import escape

from provision.cluster.errors import HostError, Interrupted
from provision.cluster.state_directory import state_flag
from provision.hosts.journal import remove_private_files
from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs.backends import ssh
from provision.jobs.backends.ssh import Fleet
from provision.jobs.ending import result
from provision.jobs.screen import JobScreen, say
from provision.jobs.store import ACTIVE, DONE, STOPPED, Job, Phase, Role
from provision.node import process


def is_running(job: Job) -> bool:
    """Whether anything of a job on hosts runs, or may still run."""
    state = job.state()
    return state.phase in ACTIVE or any(item.alive for item in state.processes)


def stop(job: Job, *, state_dir: Path, screen: JobScreen) -> int:
    """Stop a job on hosts: workers write a checkpoint, then the servers end.

    Returns 0 if nothing of it runs any more, 1 if a host could not be reached to stop its part.
    """
    console = screen.console
    if not is_running(job):
        console.print(f"job {job.id} is not running: it is {job.state().phase}")
    else:
        with console.status(f"stopping {job.id}"):
            asked = _ask_supervisor(job)
            if not job.job_file.exists():
                console.print(f"job {job.id} was stopped before training began; nothing is left of it")
                return 0
            lines = _stopped_units(job) if asked else _stop_orphans(job)
            remove_private_files(state_dir, job.spec().cluster)
        for line in lines:
            say(console, line)
        if job.spec().is_servers_alone:
            say(console, f"[green]✓[/] {job.id}: parameter servers are down")
            if left := job.rows_left():
                flag = state_flag(state_dir)
                say(console, f"rows that have a checkpoint stay in {escape(', '.join(left))}")
                say(console, f"  to start the servers with them: oeprov servers up --resume {job.id}{flag}")
                say(console, f"  to lose them: oeprov jobs rm {job.id} --consent {job.id}{flag}")
        elif job.spec().is_serving:
            say(console, f"[green]✓[/] {job.id}: its replicas are down")
        else:
            screen.show_end(job, state_dir)
    if screen.as_json:
        print(json.dumps(result(job)))
    return 1 if any(item.alive for item in job.state().processes) else 0


def _ask_supervisor(job: Job) -> bool:
    """Ask who supervises the job to stop it, and wait until nobody does; whether there was somebody."""
    asked = (0, 0)
    while (state := job.state()).supervised:
        # Once only, for a second request is to end it at once; but a launch that was asked may have handed
        # the job over to a supervisor in the background, and ended.
        if not process.alive(*asked):
            asked = state.supervisor_pid, state.supervisor_started
            process.send(*asked)
        time.sleep(TICK)
    return asked != (0, 0)


def _stop_orphans(job: Job) -> list[str]:
    """Stop the processes of a killed supervisor: children end by themselves, units are stopped."""
    wait_for_orphans(job)
    state = job.state()
    if not state.units_alive:
        return []
    hosts, lines, stopped = Fleet(job, job.spec()), [], {}
    keep = True
    roles: tuple[Role, ...] = ("worker", "parameter_server", "replica")
    for role in roles:
        answers = hosts.stop(role, keep_pools=keep)
        stopped.update(answers)
        lines += ssh.describe(answers)
        if role == "worker":
            try:
                hosts.take_events()
                keep = job.keeps_rows(hosts.spec, done=job.is_done())
            except HostError as error:
                lines.append(f"[yellow]![/] {error}; rows in persistent memory stay for its checkpoints")
        ended = ssh.ended([item for item in state.processes if item.role == role], answers)
        others = [item for item in state.processes if item.role != role]
        state = state.model_copy(update={"processes": [*others, *ended]})
    known = job.state()  # read again: new events may have changed it
    earlier = re.sub(r"; [^;]* could not be told to stop its part.*", "", known.message)
    phase, message = _end(job, known.phase) or (known.phase, earlier)
    if not job.spec().has_worker:
        phase, message = "done", STOPPED
    left = ssh.message_of(stopped, message)
    message = f"{message}; {left}" if left else message
    job.write_state(state.model_copy(update={"phase": phase, "message": message}))
    return lines


def _end(job: Job, phase: Phase) -> tuple[Phase, str] | None:
    """Phase and message of a job whose worker reported its end after the launcher was killed.

    None if it reported none, or if the job had failed before.
    """
    event = job.last_end() or {}
    if event.get("event") == "end":
        return "done", DONE
    if phase == "interrupted" and event.get("event") == "interrupted" and event.get("path"):
        return "interrupted", f"stopped at step {event.get('step')}, which is saved"
    return None


def wait_for_orphans(job: Job, stop: StopRequest | None = None) -> None:
    """Wait for children of a killed supervisor, which end by themselves; then send SIGTERM.

    Not at once: a second SIGTERM ends a worker without a checkpoint. Raises Interrupted at a stop request.
    """
    for role, seconds in (("worker", 600.0), ("parameter_server", 30.0), ("replica", 60.0)):
        for item in job.state().processes:
            if item.role != role or item.unit:
                continue
            deadline = time.monotonic() + seconds
            while not (ended := process.wait_gone(item.pid, item.started, TICK)):
                if stop is not None and stop.count:
                    raise Interrupted(f"stopped; {item.name} of job {job.id} (pid {item.pid}) still runs")
                if time.monotonic() > deadline:
                    break
            if not ended:
                process.send(item.pid, item.started)
                process.wait_gone(item.pid, item.started, 30.0)


def _stopped_units(job: Job) -> list[str]:
    """One line per host: what the supervisor has stopped there, and what it could not stop."""
    by_host: dict[tuple[str, bool], list[str]] = {}
    for item in job.state().processes:
        if item.unit:
            by_host.setdefault((item.host, item.alive), []).append(item.name)
    lines = []
    for (host, alive), found in by_host.items():
        names = ", ".join(found)
        what = f"{names} could not be stopped and may still run" if alive else f"stopped {names}"
        lines.append(f"[{'red]✗' if alive else 'green]✓'}[/] {host}: {what}")
    return lines
