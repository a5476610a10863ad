"""Runs that changed hosts, as the journal has them: for ``oeprov history`` and for estimates of durations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from provision.cluster.errors import ConvergeError, why_not_one
from provision.hosts.journal import Journal, is_locked

HostOutcome = Literal["done", "failed", "interrupted", "running", "not reached", "unchanged"]


@dataclass
class StepRun:
    """One step on one host; ``ok`` is None until it has ended."""

    step: str
    what: str
    began: datetime | None
    ended: datetime | None = None
    ok: bool | None = None
    message: str = ""
    seconds: float | None = None  # of the step itself, without waiting; older journals have none


@dataclass
class Run:
    """One run of ``bootstrap``, ``pmem-mode``, ``rollback`` or ``destroy``."""

    id: str
    cluster: str
    began: datetime | None
    hosts: list[str]
    pending: list[str] | None  # hosts with something to do; None: an older journal
    who: str = ""
    command: str = ""
    last: datetime | None = None  # its last entry
    outcome: str = ""  # as it was finished; empty: it was not
    is_running: bool = False
    failed: set[str] = field(default_factory=set)
    is_stopped: bool = True  # by its failed hosts; one that went on lets the next run do so too
    steps: dict[str, dict[str, StepRun]] = field(default_factory=dict)  # by host and step
    reboots: dict[str, list[float]] = field(default_factory=dict)  # seconds, by host

    @property
    def state(self) -> str:
        """How it ended: done, failed, nothing to do or interrupted; or running."""
        if self.outcome:
            return "done" if self.outcome == "ok" else self.outcome
        return "running" if self.is_running else "interrupted"

    @property
    def seconds(self) -> float | None:
        """From its first entry to its last."""
        return (self.last - self.began).total_seconds() if self.began and self.last else None

    def host_outcome(self, host: str) -> HostOutcome:
        """How the run ended on one host."""
        steps = list(self.steps.get(host, {}).values())
        if host in self.failed or any(step.ok is False for step in steps):
            return "failed"
        if any(step.ok is None for step in steps):
            return "running" if self.is_running else "interrupted"
        if steps:
            return "done"
        if host in (self.pending or ()):
            return "running" if self.is_running else "not reached"
        return "unchanged"

    def outcomes(self) -> dict[HostOutcome, list[str]]:
        """The hosts by outcome, in the inventory's order."""
        found: dict[HostOutcome, list[str]] = {}
        for host in dict.fromkeys([*self.hosts, *self.steps]):
            found.setdefault(self.host_outcome(host), []).append(host)
        return found

    def host_seconds(self, host: str) -> float:
        """From the first step's begin to the last step's end on one host; 0 if no step has both."""
        steps = self.steps.get(host, {}).values()
        began = [step.began for step in steps if step.began]
        ended = [step.ended for step in steps if step.ended]
        return (max(ended) - min(began)).total_seconds() if began and ended else 0.0


@dataclass
class Durations:
    """Seconds that steps and reboots took in earlier runs."""

    steps: dict[str, list[float]] = field(default_factory=dict)  # by the step's id
    reboots: dict[str, list[float]] = field(default_factory=dict)  # by host


def durations(journal: Journal) -> Durations:
    """What successful steps and reboots of all runs took."""
    found = Durations()
    for entry in journal.read():
        seconds = entry.get("seconds")
        if not isinstance(seconds, (int, float)):
            continue
        if entry.get("event") == "end" and entry.get("ok"):
            found.steps.setdefault(str(entry.get("step", "")), []).append(float(seconds))
        elif entry.get("event") == "rebooted":
            found.reboots.setdefault(str(entry.get("host", "")), []).append(float(seconds))
    return found


def interrupted(journal: Journal, cluster: str) -> list[tuple[Run, str, StepRun]]:
    """Steps of the cluster's last run that have no end, with their hosts; none if that run finished."""
    last = next((run for run in reversed(_runs(journal)) if run.cluster == cluster), None)
    if last is None or last.outcome:
        return []
    return [
        (last, host, step) for host, steps in last.steps.items() for step in steps.values() if step.ok is None
    ]


def unsettled(journal: Journal, cluster: str) -> dict[str, str]:
    """Host → run that it stopped, or that was interrupted there, if no later run reached the host."""
    found: dict[str, str] = {}
    for run in _runs(journal):
        if run.cluster == cluster:
            found = {host: by for host, by in found.items() if host not in run.hosts}
            settled = set() if not run.outcome else set(run.steps) - (run.failed if run.is_stopped else set())
            found.update(dict.fromkeys(set(run.steps) - settled, run.id))
    return found


def read(state_dir: Path) -> list[Run]:
    """Every run in the state directory's journal, oldest first."""
    runs = _runs(Journal(state_dir / "journal.jsonl", ""))
    # Only the last run of a cluster can be the one that holds the cluster's lock.
    for last in {run.cluster: run for run in runs}.values():
        last.is_running = not last.outcome and is_locked(state_dir, last.cluster)
    return runs


def _runs(journal: Journal) -> list[Run]:
    found: dict[tuple[str, str], Run] = {}
    clusters: dict[str, str] = {}  # by run: in older journals only its first entry has the cluster
    for entry in journal.read():
        run, time = str(entry.get("run", "")), _time(entry.get("time"))
        if entry.get("event") == "run":
            clusters[run] = str(entry.get("cluster", ""))
        key = run, str(entry.get("cluster", clusters.get(run, "")))
        if entry.get("event") == "run":
            _begin(found.setdefault(key, Run(*key, time, [], None)), entry)
        if key in found:
            found[key].last = time or found[key].last
            _add(found[key], entry, time)
    return list(found.values())


def _begin(run: Run, entry: dict[str, Any]) -> None:
    run.hosts = [str(host) for host in _list(entry.get("hosts"))]
    run.pending = [str(host) for host in entry["pending"]] if isinstance(entry.get("pending"), list) else None
    run.who, run.command = str(entry.get("who", "")), str(entry.get("command", ""))


def _add(run: Run, entry: dict[str, Any], time: datetime | None) -> None:
    event, host, name = entry.get("event"), str(entry.get("host", "")), str(entry.get("step", ""))
    steps = run.steps.setdefault(host, {}) if event in ("begin", "end") else {}
    if event == "begin":
        steps[name] = StepRun(name, str(entry.get("what", "")), time)
    elif event == "end":
        step = steps.setdefault(name, StepRun(name, name, None))
        step.ended, step.ok, step.message = time, bool(entry.get("ok")), str(entry.get("message", ""))
        step.seconds = float(entry["seconds"]) if isinstance(entry.get("seconds"), (int, float)) else None
    elif event == "rebooted" and isinstance(entry.get("seconds"), (int, float)):
        run.reboots.setdefault(host, []).append(float(entry["seconds"]))
    elif event == "finished":
        run.outcome = str(entry.get("outcome", ""))
        run.failed = {str(host) for host in _list(entry.get("failed"))}
        run.is_stopped = bool(entry.get("stopped", True))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _time(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else None


def choose(runs: Iterable[Run], name: str, place: Path) -> Run:
    """The run with this id, CLUSTER/ID or unique beginning of an id; ConvergeError names what matches."""
    known = list(runs)
    if not name:
        raise ConvergeError("the run's name is empty; `oeprov history` lists the runs")
    if not known:
        raise ConvergeError(f"no run {name} in {place}: nothing was changed from this state directory yet")
    whole = [run for run in known if name in (run.id, f"{run.cluster}/{run.id}")]
    meant = whole or [run for run in known if run.id.startswith(name)]
    if len(meant) == 1:
        return meant[0]
    if whole:  # began in one second
        names = " or ".join(f"{run.cluster}/{run.id}" for run in whole)
        raise ConvergeError(f"{name} is a run of {len(whole)} clusters; say which: {names}")
    why = why_not_one("run", name, [run.id for run in meant], [run.id for run in known], place)
    raise ConvergeError(why if meant else f"{why}; `oeprov history` lists them")
