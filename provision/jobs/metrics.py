"""The trainer's ``metrics.jsonl``, one event per line: followed as it grows, or summed up."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
FRESHNESS = "freshness.jsonl"  # beside the events
_WINDOW = 1 << 18  # bytes read at each end: `status` must stay quick on long runs


@dataclass
class LineTail:
    """A file that grows: whole lines behind ``offset``, as they come."""

    path: Path
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)  # the beginning of a line

    def read_lines(self) -> list[bytes]:
        """Lines since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset:
                    self.offset, self.rest = 0, b""  # written anew
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines


class MetricsTail(LineTail):
    """New events of a ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.stat().st_size if path.exists() else 0)

    def read(self) -> list[Event]:
        """Events since the last call; lines that are not JSON objects are left out."""
        return [event for line in self.read_lines() if (event := parse_event(line)) is not None]


# Types of fields: programs of others may write the file too.
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("step", "steps", "epoch"), int),
    **dict.fromkeys(("loss", "auc", "samples_per_s", "eta_s"), (int, float)),
    **dict.fromkeys(("path", "message"), str),
}


def parse_event(line: bytes) -> Event | None:
    """One line of ``metrics.jsonl`` without fields of a wrong type; None if it is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return {key: value for key, value in event.items() if isinstance(value, _KINDS.get(key, object))}


def last_end(path: Path, since: int = 0) -> Event | None:
    """The event with which the trainer's run ended: ``end``, ``interrupted`` or ``error``.

    None if there is none since its last start. Bytes before ``since`` do not count.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - _WINDOW))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines):
        event = parse_event(line)
        if event is not None and event["event"] in ("end", "interrupted", "error", "start", "resume"):
            return None if event["event"] in ("start", "resume") else event
    return None


def has_event(path: Path, kind: str, since: int) -> bool:
    """Whether there is such an event after byte ``since``; yes if the file is shorter: it is another one."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < since:
                return True
            file.seek(since)
            return any((parse_event(line) or {}).get("event") == kind for line in file)
    except OSError:
        return False


@dataclass(frozen=True)
class Summary:
    """How far a run is, from its newest events; None: not known yet."""

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None  # of that step, from 0
    loss: float | None = None
    auc: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    eval: Event | None = None
    export: str | None = None
    error: str | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    checkpoint_rows: str | None = None  # "files", or "pool" where the servers' storage has them
    waiting: str | None = None  # the server that training waits for, and why


@dataclass(frozen=True)
class Course:
    """The newest part of a run: curves over ``step``, and checkpoints."""

    step: list[int]
    loss: list[float | None]
    samples_per_s: list[float | None]
    checkpoints: list[Event]
    fresh_step: list[int]  # of processes that serve the run's checkpoints
    fresh_s: list[float]  # seconds from the end of that step to answers of it


def summary(path: Path) -> Summary:
    """Sum up a run of any length in one short read."""
    last: dict[str, Event] = {}
    for event in _events(path):
        if event["event"] in ("start", "resume"):
            for kind in ("error", "interrupted", "trained", "end", "eval", "export", "server_gone"):
                last.pop(kind, None)  # of an earlier run of the same job
        if event["event"] in ("server_back", "error", "interrupted"):
            last.pop("server_gone", None)
        last[event["event"]] = event
    step, start, end = last.get("step", {}), last.get("start", {}), last.get("end", {})
    done = end.get("steps", step.get("step"))
    # The trainer estimates its steps while it reads a file; once all are made, their number is known.
    steps = last.get("trained", {}).get("step", start.get("steps", step.get("steps")))
    export = last.get("export", {}).get("path")
    saved = max(
        (event for kind in ("checkpoint", "interrupted") if (event := last.get(kind, {})).get("path")),
        key=lambda event: int(event.get("step", 0)),
        default={},
    )
    return Summary(
        step=done,
        steps=steps if done is None or steps is None else max(steps, done),
        epoch=step.get("epoch"),
        loss=step.get("loss"),
        auc=step.get("auc"),
        samples_per_s=end.get("samples_per_s", step.get("samples_per_s")),
        eta_s=None if end else step.get("eta_s"),
        eval={"loss": None, "auc": None, **last["eval"]} if "eval" in last else None,
        export=str(export) if export else None,
        error=last.get("error", {}).get("message"),
        checkpoint=saved.get("path"),
        checkpoint_step=saved.get("step"),
        checkpoint_rows=last.get("checkpoint", {}).get("rows"),
        waiting=last.get("server_gone", {}).get("message"),
    )


def course(path: Path, points: int = 120, checkpoints: int = 5) -> Course:
    """The last ``points`` steps and the last ``checkpoints`` of a run, oldest first."""
    events = _events(path)
    # The last event of each step: after a server was lost, steps come twice.
    steps = {int(event["step"]): event for event in events if event["event"] == "step" and "step" in event}
    newest = [steps[step] for step in sorted(steps)[-points:]]
    fresh = _freshness(path.with_name(FRESHNESS))
    return Course(
        step=[int(event["step"]) for event in newest],
        loss=[event.get("loss") for event in newest],
        samples_per_s=[event.get("samples_per_s") for event in newest],
        checkpoints=[event for event in events if event["event"] == "checkpoint"][-checkpoints:],
        fresh_step=(fresh_steps := sorted(fresh)[-points:]),
        fresh_s=[sum(fresh[step]) / len(fresh[step]) for step in fresh_steps],
    )


def _freshness(path: Path) -> dict[int, list[float]]:
    """Seconds by step, one per process that serves, from lines of oe_runtime's ``freshness.jsonl``."""
    found: dict[int, list[float]] = {}
    for line in _lines(path):
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            read = json.loads(line)
            step, seconds = int(read["step"]), float(read["seconds"])
            if math.isfinite(seconds):
                found.setdefault(step, []).append(seconds)
    return found


def _events(path: Path) -> list[Event]:
    return [event for line in _lines(path) if (event := parse_event(line)) is not None]


def _lines(path: Path) -> list[bytes]:
    """Lines of the first and the last part of a file; [] without one."""
    try:
        with path.open("rb") as file:
            data = file.read(_WINDOW)
            size = os.fstat(file.fileno()).st_size
            if size > 2 * _WINDOW:
                file.seek(size - _WINDOW)
                data += b"\n"  # between the two windows a line may be cut: it does not parse and is left out
            data += file.read()
    except OSError:
        return []
    return data.split(b"\n")


def number(value: Any, digits: int = 4) -> str:
    """A metric for people; a dash when there is none."""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else "–"


def rate(value: Any) -> str:
    """Samples per second, with thousands separated."""
    return f"{value:,.0f} samples/s" if isinstance(value, (int, float)) else "–"


def duration(seconds: Any) -> str:
    """Seconds as 0:42 or 1:02:03."""
    if not isinstance(seconds, (int, float)):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
