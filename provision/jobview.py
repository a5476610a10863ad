"""``status`` and ``logs``: what jobs do, read from their files and from /proc; nothing is changed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from provision import jobs
from provision.errors import TrainingError
from provision.jobs import ACTIVE, Job, ProcessState
from provision.metrics import summary
from provision.node import process
from provision.progress import duration, number

STYLE = {"done": "green", "failed": "red", "interrupted": "yellow"}
POLL_SECONDS = 0.3


def status(state_dir: Path, name: str | None = None, *, as_json: bool = False) -> int:
    """Show all jobs and the processes of the running (or named, or last) one; returns 0."""
    shown = [jobs.find(state_dir, name)] if name else jobs.all_jobs(state_dir)
    reports = [report(job) for job in shown]
    if as_json:
        print(json.dumps({"jobs": reports}))
        return 0
    console = Console()
    if not reports:
        console.print(f"no jobs in {jobs.jobs_dir(state_dir)}; start one with: oeprov launch-training")
        return 0
    console.print(_job_table(reports[-20:]))
    detailed = [item for item in reports if item["state"] in ACTIVE] or reports[-1:]
    for item in detailed:
        if item["message"] and item["state"] != "done":
            console.print(f"{item['job']}: {escape(item['message'])}", highlight=False)
        if item["state"] in ACTIVE:
            console.print(_process_table(item))
    return 0


def report(job: Job) -> dict[str, Any]:
    """Everything `status` knows of one job, ready for JSON."""
    state, facts, checkpoint = job.state(), summary(job.metrics_file), job.checkpoint()
    processes = [_process(job, item) for item in state.processes]
    return {
        "job": job.id,
        "state": state.phase,
        "message": state.message,
        **asdict(facts),
        "checkpoint_step": checkpoint[0] if checkpoint else None,
        "directory": str(job.directory),
        "processes": processes,
        "rows": _rows(processes),
    }


def _process(job: Job, item: ProcessState) -> dict[str, Any]:
    alive = item.alive
    counters = _read_counters(job.server_metrics(item.name)) if item.role == "parameter_server" else {}
    return {
        "name": item.name,
        "role": item.role,
        "host": item.host,
        "pid": item.pid,
        "alive": alive,
        "exit_code": item.exit_code,
        "endpoint": item.endpoint,
        "memory_bytes": process.resident_bytes(item.pid) if alive else None,
        "tables": _tables(counters.get("tables")),
    }


def _read_counters(path: Path) -> dict[str, Any]:
    """What a server last wrote to its metrics file: the whole file, or its last whole line."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    for candidate in (text, *reversed(text.splitlines())):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _tables(found: Any) -> dict[str, int]:
    """Rows by table, from a list of tables with name and rows; others are left out."""
    tables = [table for table in found if isinstance(table, dict)] if isinstance(found, list) else []
    return {str(table["name"]): int(table["rows"]) for table in tables if {"name", "rows"} <= table.keys()}


def _rows(processes: list[dict[str, Any]]) -> dict[str, int]:
    """Rows by table, summed over the servers."""
    total: dict[str, int] = {}
    for item in processes:
        for name, rows in item["tables"].items():
            total[name] = total.get(name, 0) + rows
    return total


def _job_table(reports: list[dict[str, Any]]) -> Table:
    table = Table(
        "job", "state", "step", "loss", "AUC", "samples/s", "ETA", "saved", box=None, pad_edge=False
    )
    table.columns[0].no_wrap = table.columns[1].no_wrap = table.columns[2].no_wrap = True
    for item in reports:
        state, running = item["state"], item["state"] in ACTIVE
        step = f"{item['step'] or 0}/{item['steps'] or '?'}"
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


def _process_table(item: dict[str, Any]) -> Table:
    table = Table("process", "host", "pid", "state", "endpoint", "memory", "rows", title=item["job"])
    for entry in item["processes"]:
        memory = entry["memory_bytes"]
        rows = sum(entry["tables"].values())
        table.add_row(
            entry["name"],
            entry["host"],
            str(entry["pid"]),
            "[green]runs[/]" if entry["alive"] else "[red]ended[/]",
            entry["endpoint"] or "",
            f"{memory / 2**20:,.0f} MiB" if memory else "–",
            f"{rows:,}" if entry["tables"] else "",
        )
    return table


def logs(
    state_dir: Path,
    name: str | None = None,
    *,
    process_name: str | None = None,
    follow: bool = False,
    lines: int = 20,
) -> int:
    """Print the last lines of a job's logs, and with ``follow`` new ones until the job ends; returns 0."""
    job, write = jobs.find(state_dir, name), sys.stdout.write
    files = _log_files(job, process_name)
    width = max(len(path.stem) for path in files)
    offsets = {}
    for path in files:
        tail, offsets[path] = _tail(path, lines)
        for line in tail:
            _print(write, path, width, line, len(files))
    if not follow:
        return 0
    rest: dict[Path, bytes] = {}
    while True:
        active = job.state().phase in ACTIVE
        for path in _log_files(job, process_name):
            for line in _new_lines(path, offsets, rest):
                _print(write, path, width, line, len(files))
        if not active:
            for path, line in rest.items():
                if line:
                    _print(write, path, width, line, len(files))
            return 0
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)


def _log_files(job: Job, process_name: str | None) -> list[Path]:
    found = sorted(job.logs.glob("*.log"))
    if process_name:
        found = [path for path in found if path.stem == process_name]
        if not found:
            names = ", ".join(sorted(path.stem for path in job.logs.glob("*.log"))) or "none yet"
            raise TrainingError(f"job {job.id} has no log of process {process_name!r}; there are: {names}")
    if not found:
        raise TrainingError(f"job {job.id} has no logs yet in {job.logs}")
    return found


def _tail(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last whole lines of a file, and the offset after them."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - 1024 * max(1, count))
        file.seek(begin)
        data = file.read(size - begin)
    whole, newline, _ = data.rpartition(b"\n")
    found = whole.split(b"\n") if newline else []
    if begin and len(found) <= count:
        found = found[1:]  # its beginning lies before what was read
    return found[len(found) - min(count, len(found)) :], begin + len(whole) + len(newline)


def _new_lines(path: Path, offsets: dict[Path, int], rest: dict[Path, bytes]) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        data = file.read()
    offsets[path] = offsets.get(path, 0) + len(data)
    *found, rest[path] = (rest.get(path, b"") + data).split(b"\n")
    yield from found


def _print(write: Callable[[str], object], path: Path, width: int, line: bytes, files: int) -> None:
    text = line.decode(errors="replace")
    write(f"{path.stem:<{width}} | {text}\n" if files > 1 else f"{text}\n")
