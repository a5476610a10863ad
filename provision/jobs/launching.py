"""``launch-training`` and ``resume``: check, prepare through Ansible, supervise."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from provision.cluster import flavor_facts
from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Inventory
from provision.cluster.state_directory import state_flag
from provision.hosts import playbook
from provision.hosts.journal import cluster_lock
from provision.hosts.playbook import TaskResult
from provision.hosts.stop_request import TICK, StopRequest
from provision.hosts.survey import survey
from provision.jobs import (
    containers,
    data,
    flavors,
    fleet,
    gpus,
    jobspec,
    longer,
    placement,
    readiness,
    request,
    script,
    script_delivery,
    store,
)
from provision.jobs.background import start_detached
from provision.jobs.ending import last_screen, result
from provision.jobs.fleet import Fleet
from provision.jobs.metrics import MetricsTail
from provision.jobs.placement import Placement
from provision.jobs.progress import TrainingView
from provision.jobs.request import LaunchOptions, Request
from provision.jobs.stopping import stop, wait_for_orphans
from provision.jobs.store import ACTIVE, Job, JobSpec, JobState, ProcessState
from provision.jobs.supervisor import Outcome, Supervisor
from provision.node.state import State


def launch(inventory: Inventory, options: LaunchOptions, *, state_dir: Path) -> int:
    """Run a new job, or go on with one (``options.resume``); returns the exit code.

    0 done (or started, with ``detach``), 1 failed, 130 stopped by the user, in whatever phase. TrainingError
    when it is refused, in which case nothing was made.
    """
    console = Console(stderr=True) if options.as_json else Console()
    stop_request = StopRequest()
    with stop_request.on_signals():
        try:
            with cluster_lock(state_dir, inventory.cluster):
                if options.resume is None:
                    job, placed = _new(inventory, options, state_dir, console)
                    resume = False
                else:
                    job, placed, resume = _old(inventory, options, state_dir, console, stop_request)
                prepare(
                    job, inventory, placed, state_dir, console, stop_request, fresh=options.resume is None
                )
        except TrainingError as error:
            if stop_request.count and not isinstance(error, Interrupted):
                # Ctrl-C ends ssh too, which then looks like a host that is lost.
                raise Interrupted(f"stopped before training began ({error})") from None
            raise
        if options.detach:
            start_detached(job, resume)
            return _detached(job, state_dir, console, stop_request, as_json=options.as_json)
        with TrainingView(console) as view:
            outcome = Supervisor(job, view.event, stop_request).run(resume)
    last_screen(job, outcome, state_dir, console)
    if options.as_json:
        print(json.dumps(result(job)))
    return 130 if stop_request.count else outcome.exit_code


def _new(
    inventory: Inventory, options: LaunchOptions, state_dir: Path, console: Console
) -> tuple[Job, Placement]:
    wanted = jobspec.request(inventory, options)
    states = _check(inventory, wanted, console)
    inventory = readiness.needed(inventory, wanted)
    now = datetime.now()
    job = store.create(state_dir, wanted.name, now)
    try:
        return job, _place(job, inventory, states, wanted, state_dir, now, console, fresh=True)
    except TrainingError:
        shutil.rmtree(job.directory)
        raise


def _old(
    inventory: Inventory, options: LaunchOptions, state_dir: Path, console: Console, stop_request: StopRequest
) -> tuple[Job, Placement, bool]:
    """The job to go on with, its processes on today's hosts, and whether there is a checkpoint of it."""
    given = options.given()
    # Any number of servers can restore a checkpoint, and any number of workers go on from it.
    servers, workers = given.pop("servers", None), given.pop("workers", None)
    arguments = given.pop("script_arguments", None)
    end: dict[str, int] = {name: given.pop(name) for name in ("epochs", "steps") if name in given}
    request.check_counts(servers, workers)
    if given:
        flags = ", ".join(request.flag(name) for name in given)
        raise TrainingError(f"--resume goes on with the settings of the job; leave out {flags}")
    if options.resume:
        job = store.find(state_dir, options.resume)
    else:  # the last on hosts
        job = store.choose(store.all_jobs(state_dir), None, store.jobs_dir(state_dir))
    spec, state = job.spec(), job.state()
    if spec.is_servers_alone:
        raise TrainingError(f"{job.id} are parameter servers alone, which have no training to go on with")
    if state.phase in ACTIVE:
        raise TrainingError(f"job {job.id} is running; stop it first: oeprov stop {job.id}")
    if state.phase == "done" and not end and arguments is None:
        how = "-- ARGUMENTS" if spec.settings.get("script") else "--epochs N (or --steps N)"
        raise TrainingError(
            f"job {job.id} is done: it has trained {longer.trained(job)}; to train it longer: oeprov resume "
            f"{job.id} {how}"
        )
    if spec.cluster != inventory.cluster:
        raise TrainingError(
            f"job {job.id} belongs to cluster {spec.cluster} ({spec.inventory}), "
            f"not to {inventory.cluster} ({inventory.path})"
        )
    worker = next(item for item in spec.processes if item.role == "worker")
    if worker.host != placement.worker_hosts(inventory)[0].name:
        raise TrainingError(
            f"job {job.id} has its checkpoints on host {worker.host}, where worker 0 was; "
            f"in {inventory.path} the first worker is another host"
        )
    gone = sorted({item.host for item in state.processes if item.unit and item.alive} - set(inventory.hosts))
    if gone:
        raise TrainingError(
            f"job {job.id} still has servers on host {gone[0]}, which {inventory.path} no longer has; "
            f"stop them first: oeprov stop {job.id}"
        )
    wanted = script.resumed(job, Request.of_job(spec), arguments)
    wanted = longer.extended(job, wanted, end, inventory.flavor)
    if workers is not None:
        wanted = replace(wanted, workers=workers)
    if servers is not None:
        alive = next((item for item in state.processes if item.unit and item.alive), None)
        if alive is not None:
            raise TrainingError(
                f"{alive.name} of job {job.id} may still run on host {alive.host}; before it gets another "
                f"number of servers: oeprov stop {job.id}"
            )
        wanted = replace(wanted, servers=servers)
    states = _check(inventory, wanted, console)
    inventory = readiness.needed(inventory, wanted)
    with console.status(f"waiting for processes of {job.id} that still end"):
        wait_for_orphans(job, stop_request)
    # What was written down on another host since its launcher ended is of this run too.
    known = Fleet(job, spec)
    try:
        known.take_events()
    except HostError as error:
        # It may have a checkpoint that is not known here, whose rows are in the servers' pools.
        raise TrainingError(f"{error}; nothing was started") from None
    if job.is_done() and not end and arguments is None:
        left = [item for item in state.processes if item.unit and item.alive]
        and_stop = f"; to take its servers away: oeprov stop {job.id}" if left else ""
        raise TrainingError(f"job {job.id} is done; there is nothing to resume{and_stop}")
    saved = job.saved()
    if not saved:
        console.print(f"job {job.id} has no checkpoint yet: it starts from the beginning")
    job.make()
    if inventory.flavor != flavor_facts.DEFAULT:  # whose export of a run that broke is half-written
        shutil.rmtree(job.run_dir / "export", ignore_errors=True)
    planned = flavors.of(inventory.flavor).place(job, inventory, states, wanted)
    others = _other_servers(job, spec, planned)
    if others:
        for item in spec.processes:
            job.remove_pools(item)
        _remove_pools(known, planned, console)
    fresh = others or not saved
    placed = _place(job, inventory, states, wanted, state_dir, datetime.now(), console, fresh=fresh)
    return job, placed, saved


def _remove_pools(old: Fleet, new: Placement, console: Console) -> None:
    """Remove the rows of servers that the job no longer has; files have them. Says where they had to stay."""
    kept = {(item.host, item.pools) for item in new.processes}
    gone = [item for item in old.processes.values() if item.pools and (item.host, item.pools) not in kept]
    for error in old.remove_pools(gone):
        paths = " ".join(shlex.quote(item.pools) for item in gone if item.host == error.host)
        console.print(
            f"[yellow]![/] {error.host}: {error.reason}; rows of servers that the job no longer has stay "
            f"there, which nobody needs; as root there: rm -r {paths}",
            soft_wrap=True,
        )


def _other_servers(job: Job, old: JobSpec, new: Placement) -> bool:
    """Whether the number of servers changes. TrainingError if the job can only go on with the old number."""
    count = sum(item.role == "parameter_server" for item in new.processes)
    if count == sum(item.role == "parameter_server" for item in old.processes):
        return False
    pools = job.pool_servers()
    if pools not in (None, count):
        raise TrainingError(
            f"the rows of the newest checkpoint of job {job.id} lie in the pools of {pools} servers, which "
            f"{count} cannot open; resume it with {pools} (with training_export_checkpoints: N, every Nth "
            "checkpoint has files, which any number of servers takes)"
        )
    return pools is None


def _check(inventory: Inventory, wanted: Request, console: Console) -> dict[str, State]:
    """The hosts' states; TrainingError names the host that is not ready, or what else cannot work."""
    flavors.of(inventory.flavor).check_data(inventory, wanted)
    if wanted.on:
        containers.check(inventory, wanted.on)
    found = check_hosts(inventory, wanted)
    jobspec.check(inventory, wanted)
    data.check(inventory, wanted)
    for line in readiness.differences(inventory, wanted):
        console.print(f"[yellow]![/] {escape(line)}", highlight=False, soft_wrap=True)
    for host in placement.worker_hosts(inventory):
        if line := gpus.note(host, found.get(host.name), wanted):
            console.print(escape(line), highlight=False, soft_wrap=True)
    return found


def check_hosts(inventory: Inventory, wanted: Request) -> dict[str, State]:
    """The hosts' states; TrainingError names the first host that does not answer or is not ready."""
    found = survey(readiness.needed(inventory, wanted))
    if found.lost:
        more = f" (and {len(found.lost) - 1} more hosts)" if len(found.lost) > 1 else ""
        raise TrainingError(f"host {found.lost[0].host} {found.lost[0].reason}{more}; nothing was started")
    for name, plan in found.plans.items():
        steps = [step for step in plan.steps if not (wanted.on and step.id in containers.IN_IMAGES)]
        if plan.problems or steps:
            state = found.states.get(name)
            raise TrainingError(readiness.why_not(inventory, wanted, plan, steps, state))
    return found.states


def _place(
    job: Job,
    inventory: Inventory,
    states: Mapping[str, State],
    wanted: Request,
    state_dir: Path,
    now: datetime,
    console: Console,
    *,
    fresh: bool,
) -> Placement:
    """Decide what runs where, bring its script there and write the job file."""
    delivery = script_delivery.prepare(inventory, wanted, state_dir)
    placed = flavors.of(inventory.flavor).place(job, inventory, states, wanted, fresh=fresh)
    placed = script_delivery.placed(delivery, placed)
    script_delivery.deliver(delivery, inventory, state_dir, console)
    spec = jobspec.build(job, inventory, placed, wanted, now)
    jobspec.check_storage_is_free(spec, state_dir)
    job.write_spec(spec)
    return placed


def prepare(
    job: Job,
    inventory: Inventory,
    placed: Placement,
    state_dir: Path,
    console: Console,
    stop_request: StopRequest,
    *,
    fresh: bool,
) -> None:
    """Directories, the token and servers on the hosts; a job that cannot be prepared leaves nothing there."""
    # Written before the units start: `oeprov stop` must find them even if this process is killed now.
    servers = [item for item in placed.processes if item.unit and item.role != "worker"]
    units = {item.name: item.state(pid=0, started=0) for item in servers}
    events_from = MetricsTail(job.metrics_file).offset
    _write(job, "prepared", units, events_from)
    begun = time.monotonic()

    def take(done: TaskResult) -> None:
        for ready in done.result.get("servers") or []:
            host = inventory.hosts[done.host]
            where = placement.endpoint(host.address, str(ready["host"]), int(ready["port"]))
            update = {"pid": int(ready["pid"]), "started": int(ready["started"]), "endpoint": where}
            boot = {"boot": str(done.result.get("boot", ""))}
            units[ready["name"]] = units[ready["name"]].model_copy(update={**update, **boot})

    with console.status("preparing hosts"):
        run = playbook.run(
            "launch_training",
            inventory,
            state_dir=state_dir,
            run_id=job.id,
            variables={"training_job_directory": str(job.directory)},
            host_variables={name: {"oeprov_job": values} for name, values in placed.hosts.items()},
            stop=stop_request,
            on_result=take,
        )
    if run.outcome == "ok" and all(item.endpoint for item in units.values()):
        _write(job, "prepared", units, events_from)
        try:
            _say_prepared(job, inventory, units.values(), time.monotonic() - begun, console)
        except OSError:  # the reader of our output is gone, so nothing would supervise the servers
            _take_back(job, console, fresh=fresh)
            raise
        run.log.unlink(missing_ok=True)
        return
    words = "; ".join(f"host {item.host}: {item.message}" for item in run.failures) or "Ansible failed"
    left = _take_back(job, console, fresh=fresh)
    if run.outcome == "canceled":
        raise Interrupted(f"stopped before training began; nothing was started{left}")
    raise TrainingError(f"the hosts could not be prepared: {words} (log: {run.log}){left}")


def _say_prepared(
    job: Job, inventory: Inventory, servers: Iterable[ProcessState], seconds: float, console: Console
) -> None:
    names = ", ".join(inventory.hosts)
    console.print(f"[green]✓[/] job {job.id}: {names} prepared ({seconds:.1f} s)")
    for item in servers:
        where = f"{item.name} on {item.host} listens on {item.endpoint} (pid {item.pid})"
        console.print(f"[green]✓[/] {where}", highlight=False, soft_wrap=True)


def _write(
    job: Job, phase: store.Phase, units: Mapping[str, ProcessState], events_from: int, message: str = ""
) -> None:
    processes = list(units.values())
    job.write_state(
        JobState.supervised_here(phase=phase, processes=processes, message=message, events_from=events_from)
    )


def _take_back(job: Job, console: Console, *, fresh: bool) -> str:
    """Stop and remove what was started; returns the hosts where that failed, as the end of a message."""
    hosts, state = Fleet(job, job.spec()), job.state()
    with console.status("taking back what was started"):
        answers = hosts.stop("parameter_server", keep_pools=not fresh)
        others = hosts.stop("worker") if fresh else {}
    left = "; ".join(words for words in (fleet.message_of(answers), fleet.message_of(others)) if words)
    if fresh and not left:
        shutil.rmtree(job.directory)
        return ""
    message = "its hosts could not be prepared"
    ended = {item.name: item for item in fleet.ended(state.processes, answers)}
    _write(job, "interrupted", ended, state.events_from, message)
    return f"; {left}; when it answers again: oeprov stop {job.id}" if left else ""


def _detached(
    job: Job, state_dir: Path, console: Console, stop_request: StopRequest, *, as_json: bool
) -> int:
    """Wait until the background supervisor has the worker running, or failed."""
    begun = time.monotonic()
    state = job.state()
    while state.phase in ("prepared", "starting") and not stop_request.count:
        if state.phase == "prepared" and time.monotonic() - begun > 30:
            raise TrainingError(f"the supervisor did not start; its log: {job.log('supervisor')}")
        stop_request.wait(TICK)
        state = job.state()
    if stop_request.count and state.phase in ACTIVE:
        stop(state_dir, job.id, as_json=as_json)
        return 130
    if state.phase in ("failed", "interrupted"):
        last_screen(job, Outcome(state.phase, state.message, 1), state_dir, console)
    else:
        console.print(f"[green]✓[/] job {job.id} runs in the background; follow it with:")
        for words in ("status", "logs -f", "stop"):
            console.print(f"  oeprov {words}{state_flag(state_dir)}", highlight=False)
    if as_json:
        print(json.dumps(result(job)))
    return 1 if state.phase == "failed" else 0
