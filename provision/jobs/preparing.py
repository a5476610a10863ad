"""The hosts of a run: directories, the token and servers are made there, and undone if a host cannot."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console

from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Host
from provision.hosts.stop_request import StopRequest
from provision.jobs import placement, store
from provision.jobs.backends import endpoint, ssh
from provision.jobs.backends.ssh import Fleet
from provision.jobs.metrics import MetricsTail
from provision.jobs.scale_request import Units
from provision.jobs.screen import say
from provision.jobs.store import Job, JobState, ProcessState
from provision.node import jobfiles

_UNITS = "units.json"  # of a job's directory: what its hosts have started


def prepare(
    job: Job,
    units: Mapping[str, Sequence[Mapping[str, Any]]],
    far: Mapping[str, Host],
    console: Console,
    stop_request: StopRequest,
    *,
    fresh: bool,
) -> None:
    """Make directories and the token on the hosts of the job file, and start servers; undone after a failure.

    ``units``: what each host starts; ``far``: those of them that are reached over SSH. ``fresh``: the job is
    new.
    """
    known = Fleet(job, job.spec())
    # Written before the units start: `oeprov stop` must find them even if this process is killed now.
    servers = [item for item in known.spec.processes if item.unit and item.role != "worker"]
    states = {item.name: item.state(pid=0, started=0) for item in servers}
    events_from = MetricsTail(job.metrics_file).offset
    _write(job, "prepared", states, events_from)
    begun = time.monotonic()
    with console.status("preparing hosts"):
        refused = placement.unwritable(known.spec.processes)
        answers = {} if refused else known.prepare(far, units, stop_request)
    for name, answer in answers.items():
        if isinstance(answer, HostError):
            refused.append(answer)
            continue
        for ready in answer["servers"]:
            where = endpoint(far[name].address, str(ready["host"]), int(ready["port"]))
            update = {"pid": int(ready["pid"]), "started": int(ready["started"]), "endpoint": where}
            boot = {"boot": str(answer["boot"])}
            states[ready["name"]] = states[ready["name"]].model_copy(update={**update, **boot})
    if not (refused or stop_request.count):
        store.write_json(job.directory / _UNITS, {name: list(items) for name, items in units.items()})
        _write(job, "prepared", states, events_from)
        try:
            took = time.monotonic() - begun
            console.print(f"[green]✓[/] job {job.id}: {', '.join(units)} prepared ({took:.1f} s)")
            for item in states.values():
                where = f"{item.name} on {item.host} listens on {item.endpoint} (pid {item.pid})"
                say(console, f"[green]✓[/] {where}")
        except OSError:  # the reader of our output is gone, and nothing would supervise the servers
            _undo(job, console, (), fresh=fresh)
            raise
        return
    foreign = _taken(answers)
    if fresh and (foreign or not answers):  # hosts that were not asked have nothing of this job
        foreign += [name for name in far if name not in answers]
    left = _undo(job, console, foreign, fresh=fresh)
    if stop_request.count:
        raise Interrupted(f"stopped before training began; nothing was started{left}")
    words = "; ".join(f"host {item.host}: {item.reason}" for item in refused)
    raise TrainingError(f"the hosts could not be prepared: {words}{left}")


def units_of(job: Job) -> Units | None:
    """What the job's hosts have started, to start it there again; None if that is not known."""
    try:
        found: Units = json.loads((job.directory / _UNITS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        processes = job.spec().processes  # prepared by an earlier version
        return None if any(item.unit for item in processes) else {item.host: [] for item in processes}
    return found


def remove_pools(old: Fleet, used: Collection[str], console: Console) -> bool:
    """Remove the rows of a job's former servers, which files have, or whose loss the user has agreed to.

    Also where a new server takes their place: if this process is killed before that begins, the next resume
    finds as many servers as it starts, and would recover these rows. So TrainingError where rows stay on one
    of the hosts ``used`` by new servers; on other hosts, a warning. Whether all were removed.
    """
    for process in old.spec.processes:
        old.job.remove_pools(process)
        if old.job.has_rows(process):
            raise TrainingError(
                f"{process.pools}, with rows of former servers, could not be removed, and nothing was "
                "started; check whether a server uses it, and who may write there"
            )
    errors = []
    unused = [item for item in old.processes.values() if item.pools]
    for error in old.remove_pools(unused):
        errors.append(error)
        paths = " ".join(shlex.quote(item.pools) for item in unused if item.host == error.host)
        if error.host in used:
            raise TrainingError(
                f"{error.host}: {error.reason}; rows of former servers stay there, and nothing was started; "
                f"try again, or remove them, as root there: rm -r {paths}"
            )
        say(
            console,
            f"[yellow]![/] {error.host}: {error.reason}; unused rows of former servers stay there; to remove "
            f"them, as root there: rm -r {paths}",
        )
    return not errors


def _write(
    job: Job, phase: store.Phase, units: Mapping[str, ProcessState], events_from: int, message: str = ""
) -> None:
    processes = list(units.values())
    job.write_state(
        JobState.supervised_here(phase=phase, processes=processes, message=message, events_from=events_from)
    )


def _taken(answers: Mapping[str, ssh.Answer | HostError]) -> list[str]:
    """The hosts that have another job with this id."""
    return [
        name
        for name, answer in answers.items()
        if isinstance(answer, HostError) and jobfiles.TAKEN in answer.reason
    ]


def _undo(job: Job, console: Console, foreign: Collection[str], *, fresh: bool) -> str:
    """Stop and remove what was started; the end of a message with the hosts where that failed.

    ``foreign``: hosts where all that has this job's id may be another job's. Others may say so only now.
    """
    spec, state = job.spec().model_copy(update={"foreign": list(foreign)}), job.state()
    if fresh:  # so that neither `oeprov stop` nor `jobs rm` goes there
        job.write_spec(spec)
    hosts = Fleet(job, spec)
    with console.status("stopping what was started"):
        answers = hosts.stop(spec.server_role, keep_pools=not fresh)
        others = hosts.stop("worker") if fresh else {}
    if taken := {*_taken(answers), *_taken(others)}:
        foreign = [*foreign, *sorted(taken)]
        answers, others = (
            {name: answer for name, answer in found.items() if name not in taken}
            for found in (answers, others)
        )
        if fresh:
            job.write_spec(spec.model_copy(update={"foreign": foreign}))
    left = "; ".join(words for words in (ssh.message_of(answers), ssh.message_of(others)) if words)
    if fresh and not left:
        shutil.rmtree(job.directory)
        return ""
    message = "its hosts could not be prepared"
    mine = [item for item in state.processes if item.host not in foreign]
    ended = {item.name: item for item in ssh.ended(mine, answers)}
    _write(job, "interrupted", ended, state.events_from, message)
    return f"; {left}; when it answers again: oeprov stop {job.id}" if left else ""
