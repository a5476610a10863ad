"""Replicas that answer requests, as ``oeprov serve`` shows them."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from provision.cli.views import jobs, pods
from provision.cluster.state_directory import state_flag
from provision.jobs import replicas
from provision.jobs.backends import registry
from provision.jobs.screen import make_console, say
from provision.jobs.store import Job


def show(job: Job, state_dir: Path, *, as_json: bool) -> int:
    """Print replicas, where they answer, and the next commands; returns 0."""
    report = registry.backend_of(job).observe(job)
    urls = replicas.urls(job, report)
    if as_json:
        print(json.dumps({**report, "urls": urls}))
        return 0
    console, flag = make_console(), state_flag(state_dir)
    if "pods" in report:
        pods.show([report], console, flag)
    else:
        console.print(f"[green]✓[/] {job.id}: {report['state']}", highlight=False)
        for line in jobs.process_lines(report):
            console.print(line, highlight=False, soft_wrap=True)
    for url in urls:
        say(console, f"  {url}")
    say(console, "To serve an earlier step, or to stop:")
    for words in (f"serve rollback {job.id}", f"stop {job.id}"):
        say(console, f"  oeprov {words}{flag}")
    return 0


def show_step(job: Job, step: int | None, seconds: float, *, as_json: bool) -> int:
    """Print the step that replicas serve now; returns 0."""
    if as_json:
        print(json.dumps({"job": job.id, "step": step, "seconds": seconds}))
        return 0
    what = "the newest step" if step is None else f"step {step}"
    count = len(job.spec().processes) if job.place == "hosts" else 0
    who = {0: "its replicas serve", 1: "its replica serves"}.get(count, f"{count} replicas serve")
    say(Console(), f"[green]✓[/] {job.id}: {who} {what} ({seconds:.1f} s)")
    return 0
