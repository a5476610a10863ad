"""``status``: what jobs do, from their files, /proc and their hosts. Changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from provision.cli.views import pods
from provision.cluster.errors import TrainingError
from provision.cluster.state_directory import state_flag
from provision.jobs import drained, observing, store
from provision.jobs.backends import registry
from provision.jobs.metrics import duration, number
from provision.jobs.screen import STYLE, make_console, say
from provision.jobs.store import ACTIVE, Job

_MOST_JOBS = 20  # in a table, and asked about on a cluster


def status(
    state_dir: Path, name: str | None = None, *, cluster: str | None = None, as_json: bool = False
) -> int:
    """Show all jobs and the processes of the running (or named, or last) one; returns 0.

    With ``cluster`` only jobs of that one, and those that name none; TrainingError for a named job of
    another.
    """
    known = store.directories(state_dir) if name is None else [store.find(state_dir, name)]
    here, there = registry.split(known, _MOST_JOBS)
    if cluster is not None:
        here = [job for job in here if _belongs(job, cluster, named=name is not None)]
    console = make_console(as_json=as_json)
    with console.status("asking the hosts"):
        reports, clusters = (
            [registry.backend_of(job).observe(job) for job in found] for found in (here, there)
        )
    if name and reports and reports[0]["state"] == "unreadable":
        raise TrainingError(reports[0]["message"])
    out = {name: hosts for name, hosts in drained.read(state_dir).items() if cluster in (None, name)}
    if as_json:
        print(json.dumps({"jobs": [*reports, *clusters], "drained": out}))
        return 0
    for name, hosts in out.items():
        for host, since in hosts.items():
            say(
                console,
                f"[yellow]![/] host {host} of cluster {name} is drained, since {since}",
            )
    pods.show(clusters, console, state_flag(state_dir))
    if clusters and not reports:
        return 0
    if not reports:
        of = f" of cluster {cluster}" if cluster is not None else ""
        console.print(f"no jobs{of} in {store.jobs_dir(state_dir)}; start one with: oeprov launch-training")
        return 0
    console.print(_job_table(reports[-_MOST_JOBS:]))
    for item in observing.detailed(reports):
        if item["message"] and (item["state"] != "done" or item["lost_workers"]):
            say(console, f"{item['job']}: {escape(item['message'])}")
        if item["waiting"] and item["state"] in ACTIVE:
            say(console, f"training waits for a server: {escape(item['waiting'])}")
        if item["state"] in ACTIVE or observing.may_be_on_hosts(item):
            console.print(_process_table(item))
            for line in _troubles(item):
                say(console, line)
        for line in advice(item, state_flag(state_dir)):
            say(console, line)
    return 0


def _belongs(job: Job, cluster: str, *, named: bool) -> bool:
    """Whether a job belongs to the cluster, or names none; TrainingError if a named job does not."""
    try:
        mine = job.spec().cluster
    except TrainingError:
        if named and job.job_file.exists():
            raise
        return True
    if named and mine != cluster:
        raise TrainingError(f"job {job.id} belongs to cluster {mine}, not to {cluster}; leave out -i")
    return mine == cluster


def advice(item: dict[str, Any], flag: str) -> list[str]:
    """The next commands for a job that failed or was stopped."""
    if item["state"] not in ("failed", "interrupted"):
        return []
    lines = []
    if observing.may_be_on_hosts(item):
        there = [entry for entry in item["processes"] if observing.may_be_on_host(entry)]
        what = "servers" if all(entry["role"] == "parameter_server" for entry in there) else "processes"
        silent = any(entry["state"] == "does not answer" for entry in there)
        up = "may still run; once their host answers, stop" if silent else "still run; stop"
        lines.append(f"[yellow]![/] its {what} {up} them with: oeprov stop {item['job']}{flag}")
    if item["checkpoint_step"] is not None:
        lines.append(f"resume from step {item['checkpoint_step']} with: oeprov resume {item['job']}{flag}")
    return lines


def _job_table(reports: list[dict[str, Any]]) -> Table:
    table = Table(
        "job", "state", "step", "loss", "AUC", "samples/s", "ETA", "saved", box=None, pad_edge=False
    )
    table.columns[0].no_wrap = table.columns[1].no_wrap = table.columns[2].no_wrap = True
    for item in reports:
        state, running = item["state"], item["state"] in ACTIVE
        step = f"{item['step'] or 0}/{item['steps'] or '?'}"
        processes = item["processes"]
        if processes and item["step"] is None and all(e["role"] != "worker" for e in processes):
            step = "–"  # servers alone, or a worker that is still to start
            if versions := {entry["version"] for entry in processes} - {None}:
                step = ", ".join(map(str, sorted(versions)))  # that replicas serve
        held_out = (item["eval"] or {}).get("auc")
        table.add_row(
            item["job"],
            f"[{STYLE.get(state, 'cyan')}]{state}[/]",
            step,
            number((item["eval"] or item)["loss"]),
            number(held_out if held_out is not None else item["auc"]),
            number(item["samples_per_s"], 0),
            duration(item["eta_s"]) if running else "",
            "–" if item["checkpoint_step"] is None else str(item["checkpoint_step"]),
        )
    return table


def process_lines(item: dict[str, Any]) -> list[Any]:
    """What the processes of a job do, and what happened to them; for a console."""
    return [_process_table(item), *_troubles(item)]


def _process_table(item: dict[str, Any]) -> Table:
    table = Table(title=item["job"], box=None, pad_edge=False, title_justify="left")
    for name in ("process", "host", "pid", "state", "endpoint"):
        wraps = name in ("state", "endpoint")  # where the terminal is narrow
        table.add_column(name, no_wrap=not wraps, overflow="fold")
    for name in ("rows", "DRAM", "PMem", "pulled keys/s", "pushed keys/s"):
        table.add_column(name, justify="right", no_wrap=True)
    silent = set()
    for entry in item["processes"]:
        host = entry["host"]
        if entry["state"] == "does not answer":
            if host not in silent:
                silent.add(host)
                names = [e["name"] for e in item["processes"] if e["host"] == host]
                table.add_row(", ".join(names), host, "", f"[red]{entry['state']}[/]")
            continue
        colour = {"runs": "green", "starts": "cyan"}.get(entry["state"], "red")
        table.add_row(
            entry["name"],
            f"{host}, CPUs {entry['cpus']}" if entry["cpus"] else host,
            str(entry["pid"] or "–"),
            f"[{colour}]{entry['state']}[/]",
            entry["endpoint"] or "",
            f"{sum(entry['tables'].values()):,}" if entry["tables"] else "",
            _size(entry["dram_bytes"]),
            _size(entry["pmem_bytes"]),
            number(entry["pulled_keys_per_s"], 0) if entry["role"] == "parameter_server" else "",
            number(entry["pushed_keys_per_s"], 0) if entry["role"] == "parameter_server" else "",
        )
    return table


def _troubles(item: dict[str, Any]) -> list[str]:
    """What happened to processes that no longer run as started, one line each; one line per silent host."""
    lines: dict[str, None] = {}
    for entry in item["processes"]:
        if entry["trouble"]:
            silent = entry["state"] == "does not answer"
            who = entry["host"] if silent else f"{entry['name']} on {entry['host']}"
            lines[f"[red]✗[/] {who}: {escape(entry['trouble'])}"] = None
    return list(lines)


def _size(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value / 2**30:,.1f} GiB" if value >= 10 * 2**30 else f"{value / 2**20:,.0f} MiB"
