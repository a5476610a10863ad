"""How a job ended: the last screen, and the next commands."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from provision.cluster.state_directory import state_flag
from provision.jobs.backends.units import job_directory
from provision.jobs.ending import newest_checkpoint
from provision.jobs.metrics import Summary, number, rate, summary
from provision.jobs.screen import say
from provision.jobs.store import RESULTS, Job


def resume_command(job: Job, state_dir: Path) -> str:
    """The exact command that resumes the job."""
    return f"oeprov resume {shlex.quote(job.id)}{state_flag(state_dir)}"


def fetch_command(job: Job, state_dir: Path) -> str:
    """The exact command that fetches the job's results, in place of those that were fetched before."""
    there = any(os.path.lexists(job.run_dir / name) for name in RESULTS)
    return f"oeprov fetch {shlex.quote(job.id)}{' --replace' if there else ''}{state_flag(state_dir)}"


def last_screen(job: Job, state_dir: Path, console: Console) -> None:
    """Print the result of a job that ended, where its files are, and the next commands."""
    state, facts = job.state(), summary(job.metrics_file)
    step, path = newest_checkpoint(job, facts)
    old = [f"run/{name}" for name in RESULTS if facts.export and job.is_old(name)]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if state.phase != "done" or state.lost:
        rows.add_row("warning" if state.phase == "done" else "why", escape(state.message))
    for name, value in _facts(facts):
        rows.add_row(name, value)
    rows.add_row("job", _short(job.directory))
    if path:
        rows.add_row("checkpoint", f"{_within(path, job)} (step {step})")
    elif state.phase != "done":
        rows.add_row("checkpoint", "none yet")
    if facts.export:
        rows.add_row("export", f"{_within(facts.export, job)} (a SavedModel)")
    if old:
        rows.add_row("warning", f"{', '.join(old)} here was fetched before the job went on, and is old")
    if report := _report(job):
        rows.add_row("report", _within(report, job))
    rows.add_row("metrics", str(job.metrics_file.relative_to(job.directory)))
    rows.add_row("logs", str(job.logs.relative_to(job.directory)) + "/")
    after = [f"oeprov status{state_flag(state_dir)}", f"oeprov logs {job.id}{state_flag(state_dir)}"]
    if state.phase == "done":
        title, style = f"{job.id} is done", "green"
        if facts.export and not old and (export := job.here(facts.export)).is_dir():
            short = _short(export)
            after.append(
                f"python -c \"import tensorflow as tf; print(tf.saved_model.load('{short}').signatures)\""
            )
            after.append(f"oeprov serve-export {job.id}{state_flag(state_dir)}")
        elif facts.export:
            after.append(fetch_command(job, state_dir))
    else:
        failed = state.phase == "failed"
        title, style = (f"{job.id} failed", "red") if failed else (f"{job.id} was stopped", "yellow")
        if path or not failed:
            after.insert(0, resume_command(job, state_dir))
        if state.units_alive:
            after.insert(0, f"oeprov stop {job.id}{state_flag(state_dir)}")
    console.print(Panel(Group(rows), title=title, border_style=style, expand=False))
    console.print("Next:")
    for line in after:
        # Outside the panel and never wrapped, so that it can be copied.
        say(console, f"  {escape(line)}")


def _facts(facts: Summary) -> list[tuple[str, str]]:
    found = []
    if facts.eval:
        found.append(("AUC", f"[bold]{number(facts.eval.get('auc'))}[/] on the held-out part"))
        if facts.eval.get("accuracy") is not None:
            found.append(("accuracy", number(facts.eval["accuracy"])))
        found.append(("loss", number(facts.eval.get("loss"))))
    elif facts.auc is not None:
        found.append(("AUC", f"{number(facts.auc)} so far, on the training rows"))
    if facts.samples_per_s is not None:
        found.append(("speed", rate(facts.samples_per_s)))
    if facts.step:
        found.append(("steps", f"{facts.step}" + (f" of {facts.steps}" if facts.steps else "")))
    return found


def _within(path: str, job: Job) -> str:
    """The path relative to the job's directory; with the host if it is on the worker's."""
    try:
        return str(Path(path).relative_to(job.directory))
    except ValueError:
        worker = job.spec().worker_unit
        return f"{worker.host}:{path}" if worker else path


def _report(job: Job) -> str:
    """The path of the run's report, which only our own trainer writes; empty if there is none."""
    worker = next((item for item in job.spec().processes if item.role == "worker"), None)
    if worker is None:
        return ""
    if worker.unit and not worker.adapted:
        return str(job_directory(job.id) / "run" / "report.html")
    path = job.run_dir / "report.html"
    return str(path) if path.is_file() else ""


def _short(path: Path) -> str:
    """The path relative to the current directory if it is below, else absolute."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
