"""``oeprov history``: the runs that changed hosts, one run by its hosts, and the steps of one host."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from provision.cli.views.plan import show_lines
from provision.cluster.errors import ConvergeError, did_you_mean
from provision.cluster.host_names import fold
from provision.hosts import runs
from provision.hosts.runs import HostOutcome, Run, StepRun
from provision.jobs.metrics import duration
from provision.jobs.screen import make_console, say

_STYLE = {"done": "green", "failed": "red", "interrupted": "yellow", "running": "cyan"}
_SLOWEST = 5
_NAMES = 60  # letters for the names of hosts in a line
_OUTCOMES: tuple[HostOutcome, ...] = ("failed", "interrupted", "running", "not reached", "done", "unchanged")


def show(state_dir: Path, name: str | None, host: str | None, *, last: int, as_json: bool) -> int:
    """Print all runs (the last so many; 0: all), one run, or one host's steps in a run; returns 0.

    ``host`` without a run: the last run with steps on it.
    """
    journal = state_dir / "journal.jsonl"
    found = runs.read(state_dir)
    if name is not None:
        run = runs.choose(found, name, journal)
    elif host is not None:
        having = [run for run in found if host in run.steps]
        if not having:
            _refuse_host(host, {other for run in found for other in (*run.hosts, *run.steps)}, f"{journal}")
            raise ConvergeError(f"{journal} has no step on host {host}: nothing was changed there")
        run = having[-1]
    else:
        return _show_runs(found, journal, last, as_json)
    if host is None:
        return _show_run(run, as_json)
    if host not in run.hosts and host not in run.steps:
        _refuse_host(host, {*run.hosts, *run.steps}, f"run {run.id}")
    return _show_host(run, host, as_json)


def _refuse_host(host: str, known: set[str], place: str) -> None:
    if host not in known:
        raise ConvergeError(f"{place} has no host {host}{did_you_mean(host, sorted(known))}")


def _show_runs(found: list[Run], journal: Path, last: int, as_json: bool) -> int:
    shown = found[-last:] if last else found
    if as_json:
        print(json.dumps({"runs": [_report(run) for run in shown]}))
        return 0
    console = make_console()
    if not found:
        say(console, f"{escape(str(journal))}: nothing was changed from this state directory yet")
        return 0
    clusters = len({run.cluster for run in shown}) > 1
    table = Table("run", "when", "who", *(["cluster"] if clusters else []), "hosts", "time", "command")
    table.columns[0].overflow = table.columns[-1].overflow = "fold"
    for run in shown:
        cluster = [Text(run.cluster)] if clusters else []
        words = (Text(run.id), _when(run.began), Text(run.who or "–"))
        table.add_row(*words, *cluster, _hosts(run), duration(run.seconds), Text(run.command or "–"))
    console.print(table)
    if len(found) > len(shown):
        say(console, f"{len(found) - len(shown):,} older run(s): --last 0 shows all")
    return 0


def _hosts(run: Run) -> Text:
    """The number of hosts by outcome; how the run ended where that says more."""
    if run.state == "nothing to do":
        return Text(run.state)
    outcomes = run.outcomes()
    words = Text()
    if run.state not in ("done", "failed"):
        words.append(run.state, _STYLE.get(run.state, ""))
    for outcome in _OUTCOMES:
        if hosts := outcomes.get(outcome):
            words.append("\n" if words else "").append(f"{len(hosts):,} {outcome}", _STYLE.get(outcome, ""))
    return words


def _show_run(run: Run, as_json: bool) -> int:
    if as_json:
        by_host = {host: run.host_outcome(host) for host in dict.fromkeys([*run.hosts, *run.steps])}
        print(json.dumps({**_report(run), "outcome_by_host": by_host}))
        return 0
    console = make_console()
    _show_head(console, run)
    outcomes = run.outcomes()
    for outcome in _OUTCOMES:
        if hosts := outcomes.get(outcome):
            style = _STYLE.get(outcome, "dim")
            number = f"{len(hosts):,} host{'s' * (len(hosts) != 1)}"
            say(console, f"  [{style}]{outcome:<11}[/]  {number}: {escape(fold(hosts, _NAMES))}")
    slow = sorted((host for host in run.steps), key=run.host_seconds, reverse=True)[:_SLOWEST]
    if len(run.steps) > 1:
        words = ", ".join(f"{host} {duration(run.host_seconds(host))}" for host in slow)
        say(console, f"  slowest      {escape(words)}")
    bad = [(host, step) for host, steps in run.steps.items() for step in steps.values() if step.ok is False]
    show_lines(console, "[red]✗[/] ", [(host, f"{step.what}: {step.message}") for host, step in bad])
    if run.steps:
        say(console, f"steps of one host: oeprov history {run.id} --host {escape(next(iter(run.steps)))}")
    return 0


def _show_head(console: Console, run: Run) -> None:
    style = _STYLE.get(run.state, "")
    state = f"[{style}]{run.state}[/]" if style else run.state
    by = f" by {run.who}" if run.who else ""
    say(console, f"[bold]{escape(run.id)}[/]: {state}; began {_when(run.began)}{escape(by)}, "
        f"took {duration(run.seconds)}")  # fmt: skip
    if run.command:
        say(console, f"  {escape(run.command)}")


def _show_host(run: Run, host: str, as_json: bool) -> int:
    steps = list(run.steps.get(host, {}).values())
    if as_json:
        outcome = run.host_outcome(host)
        listed = [_step(step) for step in steps]
        print(json.dumps({"run": run.id, "host": host, "outcome": outcome, "steps": listed,
                          "reboot_seconds": run.reboots.get(host, [])}))  # fmt: skip
        return 0
    console = make_console()
    _show_head(console, run)
    outcome = run.host_outcome(host)
    say(console, f"[bold]{escape(host)}[/]: [{_STYLE.get(outcome, 'dim')}]{outcome}[/]")
    table = Table("step", "began", "time", "result")
    table.columns[0].overflow = table.columns[3].overflow = "fold"
    for step in steps:
        table.add_row(Text(step.what), _clock(step.began), _seconds(step.seconds), _result(step, run))
    if steps:
        console.print(table)
    for seconds in run.reboots.get(host, []):
        say(console, f"a reboot took {_seconds(seconds)}")
    return 0


def _result(step: StepRun, run: Run) -> Text:
    if step.ok is None:
        word = "running" if run.is_running else "no end: interrupted, or not reached"
        return Text(word, "cyan" if run.is_running else "yellow")
    mark = Text("✓ ", "green") if step.ok else Text("✗ ", "red")
    return mark.append(Text(step.message or ("done" if step.ok else "failed"), "" if step.ok else "red"))


def _report(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "cluster": run.cluster,
        "state": run.state,
        "began": _iso(run.began),
        "seconds": run.seconds,
        "who": run.who,
        "command": run.command,
        "hosts": {outcome: len(hosts) for outcome, hosts in run.outcomes().items()},
    }


def _step(step: StepRun) -> dict[str, Any]:
    times = {"began": _iso(step.began), "ended": _iso(step.ended), "seconds": step.seconds}
    return {"id": step.step, "what": step.what, **times, "ok": step.ok, "message": step.message}


def _iso(time: datetime | None) -> str | None:
    return time.isoformat(timespec="milliseconds") if time else None


def _when(time: datetime | None) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else "–"


def _clock(time: datetime | None) -> str:
    return f"{time.astimezone():%H:%M:%S}" if time else "–"


def _seconds(seconds: float | None) -> str:
    return f"{seconds:.1f} s" if seconds is not None and seconds < 60 else duration(seconds)
