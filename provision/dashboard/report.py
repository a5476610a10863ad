"""``oeprov report``: one HTML file about the cluster, for readers without access to it."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape

from provision import __version__
from provision.cluster.errors import OeprovError
from provision.cluster.inventory import Inventory
from provision.dashboard import hostview
from provision.hosts.survey import survey
from provision.inventory import vault
from provision.jobs import store
from provision.jobs.backends import registry
from provision.jobs.metrics import number
from provision.jobs.screen import say
from provision.jobs.store import Job
from provision.node.command import replace_file
from provision.node.directory import human

_RUN_PAGE_SECONDS = 120  # at most, to make the page of one run
_MOST_JOBS = 50  # listed
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_MAIN = re.compile(r"<main>(.*)</main>", re.DOTALL)
# Sections that are collapsed when several runs share the page.
_LONG = re.compile(r"<section><h2>(Settings|What happened)</h2>(.*?)</section>", re.DOTALL)
# In addresses of package repositories and of data.
_PASSWORD = re.compile(r"(\w+://)[^\s/@\"'<>]+@")
Document = dict[str, Any]


def run(inventory: Inventory, *, state_dir: Path, output: Path | None, runs: int) -> int:
    """Write the file and print its path; 1 when a host could not be observed, else 0."""
    console = Console()
    path = output or Path(f"oeprov-{inventory.cluster}.html")
    with console.status("observing hosts and jobs"):
        hosts = hostview.hosts(inventory, survey(inventory))
        page = render(inventory, hosts, state_dir, runs)
    try:
        replace_file(str(path), page.encode())
    except OSError as error:
        raise OeprovError(f"{path}: cannot be written: {error.strerror}") from None
    say(console, f"{path} ({human(len(page.encode()))})")
    lost = [item for item in hosts if item["error"]]
    for item in lost:
        say(console, f"[red]✗[/] {item['host']}: {escape(item['error'])}")
    return int(bool(lost))


def render(inventory: Inventory, hosts: list[Document], state_dir: Path, runs: int) -> str:
    """The page. ``hosts`` come from ``hostview``; ``runs``: number of jobs with curves."""
    here, there = registry.split([job for job in store.directories(state_dir) if not job.broken], _MOST_JOBS)
    here = here[-_MOST_JOBS:]
    shown = list(islice((page for job in reversed(here) if (page := run_page(job))), runs))
    environment = Environment(
        loader=PackageLoader("provision.dashboard", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=lambda value: human(value) if value else "–", number=number)
    text = environment.get_template("report.html.j2").render(
        cluster=inventory.cluster,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        oeprov=__version__,
        hosts=hosts,
        jobs=[registry.backend_of(job).observe(job) for job in reversed(here)],
        clusters=[registry.backend_of(job).observe(job) for job in reversed(there)],
        run_style=shown[0][0] if shown else "",
        runs=[content for _, content in shown],
        versions={
            "oeprov": __version__,
            "ansible-core": version("ansible-core"),
            "Python": platform.python_version(),
        },
    )
    for job in here:
        text = _without_token(text, job)
    return _PASSWORD.sub(r"\1…@", vault.hide(text))


def run_page(job: Job) -> tuple[str, str] | None:
    """Style and content of the trainer's own page of a run; None when it has none yet."""
    if not job.metrics_file.exists():
        return None
    argv = [sys.executable, "-m", "oe_runtime.report", "--stdout", str(job.run_dir)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_RUN_PAGE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    style, main = _STYLE.search(done.stdout), _MAIN.search(done.stdout)
    if done.returncode or style is None or main is None:
        return None
    # The trainer titles every run "run": name its job, and move its headings two levels down.
    content = re.sub(r" · run(?=</h1>)", lambda _: f" · {job.id}", main[1], count=1)
    content = _LONG.sub(r"<section><details><summary>\1</summary>\2</details></section>", content)
    return style[1], re.sub(r"(</?)h([12])\b", lambda m: f"{m[1]}h{int(m[2]) + 2}", content)


def _without_token(text: str, job: Job) -> str:
    """Hide the job's token. The trainer only knows the token's file, so this is a second barrier."""
    try:
        token = job.token_file.read_text(encoding="utf-8").strip()
    except OSError:
        return text
    return text.replace(token, "(token)") if token else text
