"""``launch-training`` and ``stop``: check, prepare through Ansible, supervise, and say what came of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from provision import jobs, jobspec, playbook
from provision.child import TICK, StopRequest
from provision.converge import pending
from provision.errors import TrainingError
from provision.jobs import ACTIVE, Job, JobState
from provision.jobspec import LaunchOptions, Request
from provision.journal import cluster_lock
from provision.metrics import Summary, summary
from provision.node import process
from provision.progress import TrainingView, number, rate
from provision.supervisor import Outcome, Supervisor, start_detached

if TYPE_CHECKING:
    from provision.inventory import Host, Inventory  # imports Ansible: slow, and `stop` does without

DEFAULT_STATE_DIR = Path(".oeprov")


def launch(inventory: Inventory, options: LaunchOptions, *, state_dir: Path) -> int:
    """Run a new job, or go on with one (``options.resume``); returns the exit code.

    0 done (or started, with ``detach``), 1 failed, 130 stopped by the user. TrainingError when it is refused,
    in which case nothing was made.
    """
    console = Console(stderr=True) if options.as_json else Console()
    host = jobspec.only_host(inventory)
    wish = StopRequest()
    with wish.on_signals():
        with cluster_lock(state_dir, inventory.cluster):
            if options.resume is None:
                job = _new(inventory, host, options, state_dir)
                resume = False
            else:
                job, resume = _old(inventory, host, options, state_dir, console)
            _prepare(job, inventory, state_dir, console, wish, fresh=options.resume is None)
        if options.detach:
            start_detached(job, resume)
            return _detached(job, state_dir, console, wish, as_json=options.as_json)
        with TrainingView(console) as view:
            outcome = Supervisor(job, view.event, wish).run(resume)
    _last_screen(job, outcome, state_dir, console)
    if options.as_json:
        print(json.dumps(result(job)))
    return outcome.exit_code


def _new(inventory: Inventory, host: Host, options: LaunchOptions, state_dir: Path) -> Job:
    wanted = jobspec.request(inventory, options)
    _check(inventory, host, wanted, state_dir)
    now = datetime.now()
    job = jobs.create(state_dir, wanted.name, now)
    job.write_spec(jobspec.build(job, inventory, host, wanted, now))
    return job


def _old(
    inventory: Inventory, host: Host, options: LaunchOptions, state_dir: Path, console: Console
) -> tuple[Job, bool]:
    """The job to go on with, and whether it has a checkpoint to go on from."""
    given = options.given()
    if given:
        flags = ", ".join(jobspec.flag(name) for name in given)
        raise TrainingError(f"--resume goes on with the settings of the job; leave out {flags}")
    job = jobs.find(state_dir, options.resume or None)
    spec, phase = job.spec(), job.state().phase
    if phase in ACTIVE:
        raise TrainingError(f"job {job.id} is running; stop it first: oeprov stop {job.id}")
    if phase == "done":
        raise TrainingError(f"job {job.id} is done; there is nothing to resume")
    if spec.cluster != inventory.cluster:
        raise TrainingError(
            f"job {job.id} belongs to cluster {spec.cluster} ({spec.inventory}), "
            f"not to {inventory.cluster} ({inventory.path})"
        )
    _check(inventory, host, Request.of_job(spec), state_dir)
    checkpoint = job.checkpoint()
    if checkpoint is None:
        console.print(f"job {job.id} has no checkpoint yet: it starts from the beginning")
    job.make()
    shutil.rmtree(job.run_dir / "export", ignore_errors=True)  # of a run that broke while it was written
    return job, checkpoint is not None


def _check(inventory: Inventory, host: Host, wanted: Request, state_dir: Path) -> None:
    missing = pending(inventory)
    if missing:
        raise TrainingError(
            f"host {host.name} is not ready: {missing[0]}"
            + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
            + f"; run: oeprov bootstrap -i {shlex.quote(str(inventory.path))}"
        )
    jobspec.check(host, wanted, state_dir)


def _prepare(
    job: Job, inventory: Inventory, state_dir: Path, console: Console, wish: StopRequest, *, fresh: bool
) -> None:
    """Directories and the token on the hosts; a new job that cannot be prepared is taken away again."""
    me = os.getpid()
    job.write_state(JobState(phase="prepared", supervisor_pid=me, supervisor_started=process.start_time(me)))
    begun = time.monotonic()
    variables = {
        "training_job_directory": str(job.directory),
        "training_storage_directory": next(iter(job.spec().storage_paths.values()), ""),
    }
    with console.status("preparing hosts"):
        run = playbook.run(
            "launch_training", inventory, state_dir=state_dir, run_id=job.id, variables=variables, stop=wish
        )
    if run.outcome == "ok":
        names = ", ".join(inventory.hosts)
        console.print(f"[green]✓[/] job {job.id}: {names} prepared ({time.monotonic() - begun:.1f} s)")
        run.log.unlink(missing_ok=True)
        return
    if fresh:
        shutil.rmtree(job.directory)
    else:
        job.write_state(JobState(phase="interrupted", message="its hosts could not be prepared"))
    if run.outcome == "canceled":
        raise TrainingError("stopped before training began; nothing was started")
    words = "; ".join(f"{item.host}: {item.task}: {item.message}" for item in run.failures)
    raise TrainingError(f"the hosts could not be prepared: {words or 'Ansible failed'} (log: {run.log})")


def _detached(job: Job, state_dir: Path, console: Console, wish: StopRequest, *, as_json: bool) -> int:
    """Wait until the background supervisor has the worker running, or failed."""
    begun = time.monotonic()
    state = job.state()
    while state.phase in ("prepared", "starting") and not wish.count:
        if state.phase == "prepared" and time.monotonic() - begun > 30:
            raise TrainingError(f"the supervisor did not start; its log: {job.log('supervisor')}")
        wish.wait(TICK)
        state = job.state()
    if wish.count and state.phase in ACTIVE:
        return stop(state_dir, job.id, as_json=as_json) or 130
    if state.phase in ("failed", "interrupted"):
        _last_screen(job, Outcome(state.phase, state.message, 1), state_dir, console)
    else:
        console.print(f"[green]✓[/] job {job.id} runs in the background; follow it with:")
        for words in ("status", "logs -f", "stop"):
            console.print(f"  oeprov {words}{_state_flag(state_dir)}", highlight=False)
    if as_json:
        print(json.dumps(result(job)))
    return 1 if state.phase == "failed" else 0


def stop(state_dir: Path, name: str | None, *, as_json: bool = False) -> int:
    """Stop the named job, or the one that runs: the worker checkpoints, then the servers end."""
    console = Console(stderr=True) if as_json else Console()
    job = jobs.find(state_dir, name) if name else _running(state_dir)
    state = job.state()
    left = [item for item in state.processes if item.alive]
    if state.phase not in ACTIVE and not left:
        console.print(f"job {job.id} is not running: it is {state.phase}")
    else:
        with console.status(f"stopping {job.id}: the worker writes a checkpoint"):
            if not process.send(state.supervisor_pid, state.supervisor_started):
                _stop_orphans(job)
            while job.state().supervised:
                time.sleep(TICK)
        _last_screen(job, _outcome(job.state()), state_dir, console)
    if as_json:
        print(json.dumps(result(job)))
    return 0


def _running(state_dir: Path) -> Job:
    for job in reversed(jobs.all_jobs(state_dir)):
        state = job.state()
        if state.phase in ACTIVE or any(item.alive for item in state.processes):
            return job
    raise TrainingError(f"no job is running in {jobs.jobs_dir(state_dir)}")


def _stop_orphans(job: Job) -> None:
    """Processes whose supervisor was killed end by themselves; this waits, and then insists.

    Not at once: a worker that is asked a second time ends without its checkpoint.
    """
    for role, seconds in (("worker", 600.0), ("parameter_server", 30.0)):
        for item in job.state().processes:
            if item.role == role and not process.wait_gone(item.pid, item.started, seconds):
                process.send(item.pid, item.started)
                process.wait_gone(item.pid, item.started, 30.0)


def _outcome(state: JobState) -> Outcome:
    phase = state.phase if state.phase in ("done", "failed") else "interrupted"
    return Outcome(phase, state.message, 0)


def result(job: Job) -> dict[str, Any]:
    """What ``--json`` prints of a job that ended or was started."""
    state, facts, checkpoint = job.state(), summary(job.metrics_file), job.checkpoint()
    return {
        "job": job.id,
        "state": state.phase,
        "message": state.message,
        "step": facts.step,
        "steps": facts.steps,
        "loss": facts.loss,
        "auc": facts.auc,
        "eval": facts.eval,
        "samples_per_s": facts.samples_per_s,
        "directory": str(job.directory),
        "run_dir": str(job.run_dir),
        "checkpoint": str(checkpoint[1]) if checkpoint else None,
        "checkpoint_step": checkpoint[0] if checkpoint else None,
        "export": facts.export,
    }


def resume_command(job: Job, state_dir: Path) -> str:
    """The exact command that goes on with the job."""
    path = shlex.quote(job.spec().inventory)
    return f"oeprov launch-training -i {path} --resume {job.id}{_state_flag(state_dir)}"


def _state_flag(state_dir: Path) -> str:
    same = state_dir.absolute() == DEFAULT_STATE_DIR.absolute()
    return "" if same else f" --state-dir {shlex.quote(str(state_dir))}"


def _last_screen(job: Job, outcome: Outcome, state_dir: Path, console: Console) -> None:
    facts, checkpoint = summary(job.metrics_file), job.checkpoint()
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if outcome.phase != "done":
        rows.add_row("why", escape(outcome.message))
    for name, value in _facts(facts):
        rows.add_row(name, value)
    rows.add_row("job", _short(job.directory))
    if checkpoint:
        rows.add_row("checkpoint", f"{checkpoint[1].relative_to(job.directory)} (step {checkpoint[0]})")
    elif outcome.phase != "done":
        rows.add_row("checkpoint", "none yet")
    if facts.export:
        rows.add_row("export", f"{Path(facts.export).relative_to(job.directory)} (a SavedModel)")
    rows.add_row("metrics", str(job.metrics_file.relative_to(job.directory)))
    rows.add_row("logs", str(job.logs.relative_to(job.directory)) + "/")
    after = [f"oeprov status{_state_flag(state_dir)}", f"oeprov logs {job.id}{_state_flag(state_dir)}"]
    if outcome.phase == "done":
        title, style = f"{job.id} is done", "green"
        if facts.export:
            path = _short(Path(facts.export))
            after.append(
                f"python -c \"import tensorflow as tf; print(tf.saved_model.load('{path}').signatures)\""
            )
    else:
        title, style = f"{job.id} {'failed' if outcome.phase == 'failed' else 'was stopped'}", "yellow"
        style = "red" if outcome.phase == "failed" else style
        if checkpoint or outcome.phase == "interrupted":
            after.insert(0, resume_command(job, state_dir))
    console.print(Panel(Group(rows), title=title, border_style=style, expand=False))
    console.print("What to type next:" if outcome.phase == "done" else "To go on, or to look:")
    for line in after:
        # Outside the panel and never wrapped, so that it can be copied.
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def _facts(facts: Summary) -> list[tuple[str, str]]:
    found = []
    if facts.eval:
        found.append(("AUC", f"[bold]{number(facts.eval.get('auc'))}[/] on the held-out part"))
        found.append(("loss", number(facts.eval.get("loss"))))
    elif facts.auc is not None:
        found.append(("AUC", f"{number(facts.auc)} so far, on the training rows"))
    if facts.samples_per_s is not None:
        found.append(("speed", rate(facts.samples_per_s)))
    if facts.step:
        found.append(("steps", f"{facts.step}" + (f" of {facts.steps}" if facts.steps else "")))
    return found


def _short(path: Path) -> str:
    """The path from here when it lies below, else whole."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
