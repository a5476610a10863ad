"""``scale`` of a job on hosts: plan its servers, ask, and let its own launcher go on with them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.cluster.state_directory import state_flag
from provision.hosts.journal import cluster_lock
from provision.hosts.stop_request import TICK
from provision.jobs import launching, scale_request
from provision.jobs.metrics import summary
from provision.jobs.request import LaunchOptions, ScaleOptions
from provision.jobs.scale_request import ScaleRequest
from provision.jobs.screen import JobScreen, say
from provision.jobs.store import Job

_ANSWER_SECONDS = 30.0  # that a launcher may take to see a request


def scale(
    job: Job,
    inventory: Callable[[], Inventory],
    options: ScaleOptions,
    *,
    state_dir: Path,
    screen: JobScreen,
) -> int:
    """See ``Backend``. 0: it goes on with these servers; 1: not agreed; 130: left while it is under way."""
    check(job, options)
    resume = LaunchOptions(resume=job.id)
    launch = launching.Launch(inventory(), resume, state_dir, screen, drains=options.without)
    launching.require_own(job.spec(), launch.inventory)
    with launch.stop_request.on_signals(), cluster_lock(state_dir, launch.inventory.cluster):
        request = launch.plan_scale(job, options)
        if not options.confirm(
            f"Scale job {job.id}: {request.words}? Training pauses between two steps: the job writes a "
            "checkpoint, and all its processes start again."
        ):
            say(screen.console, "nothing was changed")
            return 1
        check(job, options)
        scale_request.write(job, request)
        say(screen.console, f"{job.id}: {escape(request.words)}: its workers finish their step")
        answer = _answer(launch, job)
    if answer.is_open:
        say(screen.console, f"{job.id} goes on by itself; look with: oeprov status{state_flag(state_dir)}")
        return 130
    scale_request.remove(job)
    if answer.phase != "done":
        raise TrainingError(answer.message)
    step = summary(job.metrics_file).checkpoint_step
    paused = "" if answer.seconds is None else f"; training paused {answer.seconds:.1f} s"
    say(screen.console, f"[green]✓[/] {job.id}: {escape(request.words)} from step {step}{paused}")
    if screen.as_json:
        count = len(launching.servers_by_host(request.spec.processes))
        print(json.dumps({"job": job.id, "servers": count, "step": step, "paused_s": answer.seconds}))
    return 0


def check(job: Job, options: ScaleOptions) -> None:
    """Refuse a job that cannot be scaled now; nothing was changed."""
    spec, state = job.spec(), job.state()
    launching.require_training(spec)
    if options.servers is not None and options.servers < 1:
        raise TrainingError(f"--servers: found {options.servers}; a job has at least 1; nothing was changed")
    if any(item.adapted for item in spec.processes):
        raise TrainingError(
            f"job {job.id} is trained by a program of others, which oeprov cannot scale while it runs; "
            f"nothing was changed"
        )
    phases = {
        "prepared": "is starting; try again once it trains",
        "starting": "is starting; try again once it trains",
        "scaling": "is being scaled already; wait for it",
        "stopping": "is being stopped",
    }
    if state.phase != "running":
        why = phases.get(state.phase, f"is not running: it is {state.phase}")
        raise TrainingError(f"job {job.id} {why}; nothing was changed")
    if not state.supervised:
        raise TrainingError(f"job {job.id} has lost its launcher; stop it first: oeprov stop {job.id}")
    if spec.settings.get("script") and not job.has_checkpoint():
        raise TrainingError(
            f"job {job.id} has reported no checkpoint, and may lose its steps; scale it once its script has "
            "taken one"
        )
    if waiting := summary(job.metrics_file).waiting:
        raise TrainingError(
            f"job {job.id} waits for a lost server ({waiting}); scale it when training goes on"
        )


def _answer(launch: launching.Launch, job: Job) -> ScaleRequest:
    """The final answer of the job's launcher, or the open request after a stop request of this command."""
    begun = time.monotonic()
    while True:
        request = scale_request.read(job)
        if request is None:
            raise TrainingError(f"the request in {job.directory} was removed; look with: oeprov status")
        if not request.is_open:
            return request
        if not job.state().supervised and (request := scale_request.read(job)) and request.is_open:
            if request.phase == "asked":
                scale_request.remove(job)
            raise TrainingError(
                f"the launcher of job {job.id} has ended in the middle ({request.words}); to go on: oeprov "
                f"resume {job.id}"
            )
        if request.phase == "asked" and time.monotonic() - begun > _ANSWER_SECONDS:
            scale_request.remove(job)
            raise TrainingError(
                f"the launcher of job {job.id} did not answer in {_ANSWER_SECONDS:.0f} s: it is busy, or an "
                "earlier version; nothing was changed"
            )
        if launch.stop_request.wait(TICK):
            if request.phase == "asked":
                scale_request.remove(job)
                raise TrainingError("stopped; nothing was changed")
            return request
