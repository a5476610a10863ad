"""Parameter servers alone, as ``oeprov servers`` shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from provision.cli.views import jobs
from provision.cluster.state_directory import state_flag
from provision.jobs import observing, servers
from provision.jobs.screen import say
from provision.jobs.store import ACTIVE, Job


def show(job: Job, state_dir: Path, *, as_json: bool) -> int:
    """Print servers: processes, endpoints, where the token lies, and how Python reaches them; returns 0."""
    report = observing.report(job)
    facts = {**report, **servers.access(job, report)}
    if as_json:
        print(json.dumps(facts))
        return 0
    console = Console()
    console.print(f"{job.id}: {report['state']}" + (f": {report['message']}" if report["message"] else ""))
    if report["state"] not in ACTIVE:
        for line in jobs.advice(report, state_flag(state_dir)):
            say(console, line)
        return 0
    for line in jobs.process_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"endpoints   {','.join(facts['endpoints'])}", highlight=False, soft_wrap=True)
    console.print(f"token file  {facts['token_file']}", highlight=False, soft_wrap=True)
    for host, path in facts["token_files"].items():
        console.print(f"            {host}:{path}", highlight=False, soft_wrap=True)
    console.print(f"tls         {facts['tls']}", highlight=False, soft_wrap=True)
    console.print("In Python:", highlight=False)
    console.print(f"  {_example(facts)}", highlight=False, soft_wrap=True, markup=False)
    console.print(f"To stop them: oeprov servers down {job.id}{state_flag(state_dir)}", highlight=False)
    return 0


def _example(facts: dict[str, Any]) -> str:
    return (
        f"oe_runtime.client.Client({facts['endpoints']!r}, tls={facts['tls']!r}, "
        f"token=open({facts['token_file']!r}).read().strip())"
    )
