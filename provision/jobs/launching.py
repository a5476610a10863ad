"""``launch-training`` and ``resume``: check, prepare the hosts, supervise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.markup import escape

from provision.cluster import flavor_facts
from provision.cluster.errors import HostError, Interrupted, TrainingError
from provision.cluster.inventory import Inventory
from provision.cluster.state_directory import state_flag
from provision.hosts.journal import cluster_lock
from provision.hosts.stop_request import TICK, StopRequest
from provision.hosts.survey import survey
from provision.jobs import (
    data,
    drained,
    flavors,
    gpus,
    jobspec,
    later_end,
    placement,
    preparing,
    readiness,
    request,
    scale_request,
    script,
    script_delivery,
    store,
)
from provision.jobs.backends import containers
from provision.jobs.backends.ssh import Fleet
from provision.jobs.background import start_detached
from provision.jobs.ending import result
from provision.jobs.going_on import supervise
from provision.jobs.placement import Placement
from provision.jobs.request import LaunchOptions, Request, ScaleOptions
from provision.jobs.scale_request import ScaleRequest
from provision.jobs.screen import JobScreen, say
from provision.jobs.stopping import stop, wait_for_orphans
from provision.jobs.store import ACTIVE, Job, JobSpec, ProcessSpec, ProcessState
from provision.node import process
from provision.node.state import State


def launch(inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """Run a new job, or resume one (``options.resume``); returns the exit code.

    0: done (or started, with ``detach``); 1: failed; 130: stopped by the user. TrainingError if the job is
    refused; then nothing was made.
    """
    return Launch(inventory, options, state_dir, screen).run()


class Launch:
    """One launch of a new or a resumed job."""

    def __init__(
        self,
        inventory: Inventory,
        options: LaunchOptions,
        state_dir: Path,
        screen: JobScreen,
        *,
        drains: str = "",
    ) -> None:
        """``drains``: a host that is being drained, and so is not left out before that is planned."""
        self.options, self.state_dir = options, state_dir
        self.screen, self.console = screen, screen.console
        self.stop_request = StopRequest()
        self.inventory = drained.leave_out(
            inventory, state_dir, lambda text: say(self.console, text), keep=drains
        )

    def run(self) -> int:
        """The whole launch; the exit code."""
        options, resume = self.options, False
        with self.stop_request.on_signals():
            try:
                with cluster_lock(self.state_dir, self.inventory.cluster):
                    if options.resume is None:
                        job, placed = self.new()
                    else:
                        job, placed, resume = self._resumed()
                    self.prepare(job, placed)
            except TrainingError as error:
                if self.stop_request.count and not isinstance(error, Interrupted):
                    # Ctrl-C ends ssh too, and then a host seems to be lost.
                    raise Interrupted(f"stopped before training began ({error})") from None
                raise
            if self.inventory.flavor == flavor_facts.DEFAULT:
                say(self.console, request.checkpoint_words(Request.from_job(job.spec()).training))
            if options.detach:
                return self._detached(job, start_detached(job, resume))
            outcome = supervise(job, resume, self.screen.follow, self.console, self.stop_request)
        self.screen.show_end(job, self.state_dir)
        if self.screen.as_json:
            print(json.dumps(result(job)))
        return 130 if self.stop_request.count else outcome.exit_code

    def new(self) -> tuple[Job, Placement]:
        """Make a new job and place its processes."""
        wanted = jobspec.request(self.inventory, self.options)
        states = self._check(wanted)
        job = store.create(self.state_dir, wanted.name, datetime.now())
        try:
            placed, spec = self._place(job, states, wanted, fresh=True)
            jobspec.check_storage_is_new(job, spec)
        except TrainingError:
            shutil.rmtree(job.directory)
            raise
        job.write_spec(spec)
        return job, placed

    def _resumed(self) -> tuple[Job, Placement, bool]:
        """The job to resume, its processes on today's hosts, and whether it has a checkpoint."""
        inventory, options = self.inventory, self.options
        given = options.given()
        # Any number of servers can restore a checkpoint, and any number of workers resume from it.
        servers, workers = given.pop("servers", None), given.pop("workers", None)
        arguments = given.pop("script_arguments", None)
        end: dict[str, int] = {name: given.pop(name) for name in ("epochs", "steps") if name in given}
        request.check_counts(servers, workers)
        if given:
            flags = ", ".join(request.flag(name) for name in given)
            raise TrainingError(f"--resume keeps the settings of the job; leave out {flags}")
        longer_asked = bool(end) or arguments is not None
        job = self._job_to_resume(longer_asked)
        spec = job.spec()
        worker = next(item for item in spec.processes if item.role == "worker")
        moves = self._moves(job, spec, worker.host)
        alive, removed = self._still_alive(job)
        stays = [item for item in alive if item not in removed]
        wanted = script.resumed(job, Request.from_job(spec), arguments)
        if end:
            wanted = later_end.extended(wanted, end, job.id, inventory.flavor, later_end.trained(job))
        if servers is not None:
            _require_stopped(job, alive, "its number of servers changes")
        total = 0 if servers else wanted.total_servers  # --servers is per host
        count, group = servers or wanted.servers, workers or wanted.workers
        wanted = replace(wanted, workers=group, servers=count, total_servers=total)
        self.inventory = placement.spread(inventory, total)
        states = self._check(wanted)
        with self.console.status(f"waiting for processes of {job.id} that are still ending"):
            wait_for_orphans(job, self.stop_request)
        known = Fleet(job, spec)
        if options.consent:
            _require_stopped(job, stays, "its rows are removed")
        self._take_events(known, moves)
        if job.is_done() and not longer_asked:
            and_stop = f"; to stop its servers: oeprov stop {job.id}" if alive else ""
            raise TrainingError(f"job {job.id} is done; there is nothing to resume{and_stop}")
        if options.consent:
            _check_files(job, wanted.training.keep_checkpoints)
        job.make()
        wanted, states, planned, later = self._begin_by_pools(job, inventory, wanted, states, moves=moves)
        others = planned != len(servers_by_host(spec.processes)) and not self._opens_pools(job, moves=moves)
        saved = job.has_checkpoint()
        adapted = any(item.adapted for item in spec.processes)
        if others and not (saved or adapted or options.consent):
            _check_rows(job)
        if others:
            _require_stopped(job, stays, "its number of servers changes")
        self._say_left(job, removed)
        self._say_unfinished(job, planned, saved)
        placed, resumed = self._place(job, states, wanted, fresh=False)
        if moves:
            where = spec.settings["upload_to"]
            say(self.console, f"the checkpoints of host {worker.host} are looked for in {escape(where)}")
            job.put_metrics_aside(worker.host)
        if inventory.flavor != flavor_facts.DEFAULT:  # a failed run may have left half an export
            shutil.rmtree(job.run_dir / "export", ignore_errors=True)
        # Programs of others have no checkpoint in their pools but those that they report.
        if others or options.consent or (adapted and not saved):
            used = {item.host for item in resumed.processes if item.role == "parameter_server"}
            if preparing.remove_pools(known, used, self.console) and options.consent:
                say(self.console, f"job {job.id}: its rows in persistent memory were removed")
        job.write_spec(resumed)  # last: if this ends before, the next resume sees the old servers too
        scale_request.remove(job)
        if later:
            self._scale_later(job, later)
        return job, placed, saved

    def _plan(self, job: Job, states: Mapping[str, State], wanted: Request) -> list[tuple[str, str]]:
        """Each server's name with its host, without a change anywhere."""
        needed = readiness.needed(self.inventory, wanted)
        return servers_by_host(
            flavors.get(self.inventory.flavor).place(job, needed, states, wanted).processes
        )

    def _opens_pools(self, job: Job, *, moves: bool) -> bool:
        """Whether servers begin with rows in pools, which no checkpoint in files or in uploads replaces."""
        in_files = self.options.consent or (moves and job.checkpoint() is None)
        return not in_files and job.pool_servers() is not None

    def _begin_by_pools(
        self, job: Job, inventory: Inventory, wanted: Request, states: dict[str, State], *, moves: bool
    ) -> tuple[Request, dict[str, State], int, int]:
        """What the job begins with: the request, its hosts' states, the number of servers.

        Also the number of servers later, once those whose pools have the rows have begun; 0: these stay.
        """
        planned, before = self._plan(job, states, wanted), servers_by_host(job.spec().processes)
        pools = job.pool_servers() if self._opens_pools(job, moves=moves) else None
        if pools is None or len(planned) in (pools, len(before)):
            return wanted, states, len(planned), 0
        later, wanted = len(planned), replace(wanted, servers=0, total_servers=pools)
        states = self._plan_former(job, inventory, wanted, before, later)
        return wanted, states, pools, later

    def _plan_former(
        self, job: Job, inventory: Inventory, wanted: Request, before: list[tuple[str, str]], later: int
    ) -> dict[str, State]:
        """The hosts' states where the servers ``before`` can be started again; else TrainingError."""
        self.inventory = placement.spread(inventory, wanted.total_servers)
        states = self._check(wanted)
        if self._plan(job, states, wanted) != before:
            raise TrainingError(
                f"the rows of the newest checkpoint of job {job.id} are in the pools of "
                f"{_count(wanted.total_servers)}, which {later} cannot open, and not all of those would be "
                "where they were; resume it on the hosts that it had (or export every Nth checkpoint to "
                "files with training_export_checkpoints: N)"
            )
        return states

    def _scale_later(self, job: Job, later: int) -> None:
        """Let the job go on with other servers after the first step of those whose pools have its rows."""
        now, first = self.inventory, len(servers_by_host(job.spec().processes))
        request = self.plan_scale(job, ScaleOptions(confirm=lambda _: True, servers=later))
        self.inventory = now
        scale_request.write(job, request, waits=True)
        say(
            self.console,
            f"the rows of the newest checkpoint are in the pools of {_count(first)}: job {job.id} trains "
            f"with these until it reports a step, and then goes on with {later}",
        )

    def _job_to_resume(self, longer_asked: bool) -> Job:
        """The job, unless it runs, is done and shall not be trained longer, or is of another cluster."""
        if self.options.resume:
            job = store.find(self.state_dir, self.options.resume)
        else:  # the last on hosts
            job = store.choose(store.all_jobs(self.state_dir), None, store.jobs_dir(self.state_dir))
        request.check_consent(self.options.consent, [job.id], job.directory.parent)
        spec, state = job.spec(), job.state()
        require_training(spec)
        if state.phase in ACTIVE:
            raise TrainingError(f"job {job.id} is running; stop it first: oeprov stop {job.id}")
        if state.phase == "done" and not longer_asked:
            trained = later_end.trained(job)
            how = "--epochs N (or --steps N)" if trained.by_flags else "-- ARGUMENTS"
            raise TrainingError(
                f"job {job.id} is done: it has trained {trained}; to train it longer: oeprov "
                f"resume {job.id} {how}"
            )
        require_own(spec, self.inventory)
        return job

    def _moves(self, job: Job, spec: JobSpec, host: str) -> bool:
        """Whether worker 0, which was on ``host``, starts on another; refused without uploads."""
        if host == placement.worker_hosts(self.inventory)[0].name:
            return False
        if not spec.settings.get("upload_to"):
            raise TrainingError(
                f"job {job.id} has its checkpoints on host {host}, where worker 0 was; "
                f"in {self.inventory.path} the first worker is another host"
            )
        return True

    def _take_events(self, known: Fleet, moves: bool) -> None:
        """Fetch what the job's hosts have reported since its state was written."""
        try:
            known.take_events()
        except HostError as error:
            # The worker may have reported a checkpoint since then, whose rows are in the servers' pools.
            if not moves:
                raise TrainingError(f"{error}; nothing was started") from None
            say(self.console, f"[yellow]![/] {escape(str(error))}; its last events are missing here")

    def _still_alive(self, job: Job) -> tuple[list[ProcessState], list[ProcessState]]:
        """The job's units that its state calls alive, and those of them on hosts that are not used now."""
        alive = job.state().units_alive
        removed = [item for item in alive if item.host not in self.inventory.hosts]
        for left in removed:
            if left.role != "worker":
                raise TrainingError(
                    f"job {job.id} still has servers on host {left.host}, which {self.inventory.path} no "
                    f"longer has; stop them first: oeprov stop {job.id}"
                )
        return alive, removed

    def _say_left(self, job: Job, removed: Sequence[ProcessState]) -> None:
        """Tell of processes on hosts that have left the inventory."""
        for left in removed:  # without its servers, which start anew, it can train nothing
            say(
                self.console,
                f"[yellow]![/] {left.host} may still have {left.name} of {job.id}, which ends by itself; "
                f"oeprov destroy removes its files there",
            )

    def _say_unfinished(self, job: Job, count: int, saved: bool) -> None:
        """Tell of a scale in which the launcher died, and where the job begins."""
        request = scale_request.read(job)
        if request is not None and request.phase == "accepted":
            say(
                self.console,
                f"[yellow]![/] its launcher ended while the job was scaled ({escape(request.words)}): it "
                f"resumes with {count} servers",
            )
        if not saved:
            self.console.print(f"job {job.id} has no checkpoint yet: it starts from the beginning")

    def plan_scale(self, job: Job, options: ScaleOptions) -> ScaleRequest:
        """What the running job goes on with; TrainingError says why it cannot."""
        spec = job.spec()
        before = Request.from_job(spec)
        count = len(servers_by_host(spec.processes))
        total = count if options.servers is None else options.servers
        inventory = _with_workers_of(self.inventory, spec)
        if options.without:
            inventory = drained.take_out(inventory, [options.without])
        self.inventory = placement.spread(inventory, total)
        first = next(item for item in spec.processes if item.role == "worker")
        if first.host != placement.worker_hosts(self.inventory)[0].name:
            raise TrainingError(
                f"job {job.id} has its checkpoints on host {first.host}, where worker 0 is, and cannot leave "
                f"it while it runs; stop it: oeprov stop {job.id}"
            )
        wanted = replace(script.resumed(job, before, None), servers=0, total_servers=total)
        own = {int(item.endpoint.rpartition(":")[2] or 0) for item in job.state().processes}
        states = self._check(wanted, {*own, *_worker_ports(spec)})
        placed, new = self._place(job, states, wanted, fresh=False)
        hosts, others = servers_by_host(spec.processes), servers_by_host(new.processes)
        if hosts == others and not options.without:
            raise TrainingError(f"job {job.id} runs on {_words(hosts)} already; nothing was changed")
        units = {name: placed.units.get(name, []) for name in {item.host for item in new.processes}}
        return ScaleRequest(
            words=f"{_words(hosts)} → {_words(others)}",
            spec=new,
            units=units,
        )

    def _check(self, wanted: Request, own: Collection[int] = ()) -> dict[str, State]:
        """The hosts' states; TrainingError names the host that is not ready, or another obstacle.

        ``own``: ports that the running job has.
        """
        inventory = self.inventory
        flavors.get(inventory.flavor).check_data(inventory, wanted)
        if wanted.on:
            containers.check(inventory, wanted.on)
        states = self.check_hosts(wanted)
        jobspec.check(inventory, wanted, own)
        data.check(inventory, wanted)
        for line in readiness.differences(inventory, wanted):
            say(self.console, f"[yellow]![/] {escape(line)}")
        for host in placement.worker_hosts(inventory):
            if line := gpus.note(host, states.get(host.name), wanted):
                say(self.console, escape(line))
        return states

    def check_hosts(self, wanted: Request) -> dict[str, State]:
        """The hosts' states; TrainingError names the first host that does not answer or is not ready."""
        inventory = self.inventory
        needed = readiness.needed(inventory, wanted)
        found = survey(needed)
        if found.lost:
            more = f" (and {len(found.lost) - 1} more hosts)" if len(found.lost) > 1 else ""
            raise TrainingError(
                f"host {found.lost[0].host} {found.lost[0].reason}{more}; nothing was started"
            )
        for name, plan in found.plans.items():
            steps = [step for step in plan.steps if not (wanted.on and step.id in containers.IN_IMAGES)]
            if plan.problems or steps:
                state = found.states.get(name)
                raise TrainingError(readiness.why_not(inventory, wanted, plan, steps, state))
        if inventory.flavor == flavor_facts.DEFAULT:  # the others have one server per host
            for line in readiness.idle(needed, found.states, wanted):
                say(self.console, f"[yellow]![/] {escape(line)}")
        return found.states

    def _place(
        self, job: Job, states: Mapping[str, State], wanted: Request, *, fresh: bool
    ) -> tuple[Placement, JobSpec]:
        """Decide what runs where, and bring its script there; also returns what the job file will say."""
        inventory = readiness.needed(self.inventory, wanted)
        delivery = script_delivery.prepare(inventory, wanted, self.state_dir)
        placed = flavors.get(inventory.flavor).place(job, inventory, states, wanted, fresh=fresh)
        placed = script_delivery.placed(delivery, placed)
        script_delivery.deliver(delivery, inventory, self.state_dir, self.console, self.stop_request)
        spec = jobspec.build(job, inventory, placed, wanted, datetime.now())
        jobspec.check_storage_is_free(spec, self.state_dir)
        return placed, spec

    def prepare(self, job: Job, placed: Placement) -> None:
        """Make directories and the token on the hosts and start servers; undone after a failure."""
        far = {name: host for name in placed.units if not (host := self.inventory.hosts[name]).is_here}
        fresh = self.options.resume is None
        preparing.prepare(job, placed.units, far, self.console, self.stop_request, fresh=fresh)

    def _detached(self, job: Job, pid: int) -> int:
        """Wait until the supervisor in the background, ``pid``, has started the workers, or failed."""
        started, state = process.start_time(pid), job.state()
        # Until it has written its first word, nobody else can be asked to stop: the state is this process's.
        while state.phase == "prepared" or (state.phase == "starting" and not self.stop_request.count):
            is_there = process.alive(pid, started)
            self.stop_request.wait(TICK)
            state = job.state()
            if state.phase == "prepared" and not is_there:
                raise TrainingError(f"the supervisor did not start; its log: {job.log('supervisor')}")
        if self.stop_request.count and state.phase in ACTIVE:
            stop(job, state_dir=self.state_dir, screen=self.screen)
            return 130
        if state.phase in ("failed", "interrupted"):
            self.screen.show_end(job, self.state_dir)
        else:
            self.console.print(f"[green]✓[/] job {job.id} runs in the background; follow it with:")
            for words in ("status", "logs -f", "stop"):
                say(self.console, f"  oeprov {words}{state_flag(self.state_dir)}")
        if self.screen.as_json:
            print(json.dumps(result(job)))
        return 1 if state.phase == "failed" else 0


def _check_files(job: Job, kept: int) -> None:
    """Refuse to remove the rows in persistent memory that no checkpoint in files has."""
    if job.pool_servers() is not None and not job.has_files(kept):
        raise TrainingError(
            f"job {job.id} has no checkpoint in files: without its rows in persistent memory there is "
            f"nothing to resume; to lose them: oeprov jobs rm {job.id} --consent {job.id}, and launch it "
            "again"
        )


def _check_rows(job: Job) -> None:
    """Refuse another number of servers where rows of no checkpoint would be lost."""
    if rows := job.rows_left():
        raise TrainingError(
            f"job {job.id} has reported no checkpoint, but there are rows in {', '.join(rows)}, which "
            f"another number of servers cannot open; resume it with as many as it had, or to lose them, add: "
            f"--consent {job.id}"
        )


def require_training(spec: JobSpec) -> None:
    """TrainingError for a job that has no training to resume."""
    if spec.is_serving:
        raise TrainingError(
            f"{spec.id} are replicas that answer requests, which have no training to resume; to start them "
            f"again: oeprov serve {spec.settings['model']}"
        )
    if spec.is_servers_alone:
        raise TrainingError(
            f"{spec.id} are parameter servers alone, which have no training to resume; to start them "
            f"again: oeprov servers up --resume {spec.id}"
        )


def servers_by_host(processes: Sequence[ProcessSpec]) -> list[tuple[str, str]]:
    """Each server's name with its host."""
    return [(item.name, item.host) for item in processes if item.role == "parameter_server"]


def _words(servers: Sequence[tuple[str, str]]) -> str:
    """How many servers there are, and on which hosts."""
    hosts = ", ".join(dict.fromkeys(host for _, host in servers))
    return f"{_count(len(servers))} on {hosts}"


def _count(servers: int) -> str:
    return f"{servers} server{'' if servers == 1 else 's'}"


def _with_workers_of(inventory: Inventory, spec: JobSpec) -> Inventory:
    """The inventory with those workers' hosts only that the job has."""
    used = {item.host for item in spec.processes if item.role == "worker"}
    workers = [name for name in inventory.workers if name in used]
    kept = {*workers, *inventory.parameter_servers}
    hosts = {name: host for name, host in inventory.hosts.items() if name in kept}
    return replace(inventory, hosts=hosts, workers=workers)


def _worker_ports(spec: JobSpec) -> set[int]:
    """The ports that the job's workers have on this machine, as far as its file says."""
    ports = set()
    for item in spec.processes:
        if item.role == "worker" and "--workers" in item.argv:
            places = item.argv[item.argv.index("--workers") + 1].split(",")
            found = [place.rpartition(":")[2] for place in places]
            ports |= {int(port) for port in found if port.isdigit()}
    return ports


def require_own(spec: JobSpec, inventory: Inventory) -> None:
    """TrainingError for a job of another cluster, and if another has this job's id on one of its hosts."""
    if spec.foreign:
        raise TrainingError(
            f"{spec.id} has never begun: host {spec.foreign[0]} has another job of this id; launch it again: "
            f"it gets another one (to remove this one: oeprov jobs rm {spec.id})"
        )
    if spec.cluster != inventory.cluster:
        raise TrainingError(
            f"job {spec.id} belongs to cluster {spec.cluster} ({spec.inventory}), "
            f"not to {inventory.cluster} ({inventory.path})"
        )


def _require_stopped(job: Job, alive: Sequence[ProcessState], what: str) -> None:
    """TrainingError if processes of the job may still run; ``what`` is to happen."""
    if alive:
        raise TrainingError(
            f"{alive[0].name} of job {job.id} may still run on host {alive[0].host}; before {what}: "
            f"oeprov stop {job.id}"
        )
