"""A run as one HTML page without scripts or links: settings, results and curves."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from oe_runtime import freshness
from oe_runtime.errors import OeError
from oe_runtime.run.charts import LEVEL_COLOR, Chart, Mark, Series, Size, binary, draw, duration, si
from oe_runtime.run.report_style import STYLE

FILE = "report.html"
_RUN_OF_JOB = "run"  # the run's directory in a job's, which has the job's name

Event = Mapping[str, Any]

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0067a5", "#c25400", "#00795a", "#c01f2e", "#6b7280"
_WIDE, _NARROW = Size(560, 280), Size(340, 240)
_MOST_EVENTS = 200
_MOST_TABLES = 60


class ReportError(OeError):
    """A directory without a run to report; the message says why."""


def write(run_directory: Path) -> Path:
    """Write `run_directory`/report.html anew and return its path. Raises ReportError, OSError."""
    page = render(run_directory)
    path = run_directory / FILE
    partial = run_directory / f".{FILE}.part"
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def render(run_directory: Path) -> str:
    """Return the page. Raises ReportError for a directory without a run."""
    events, broken = _read(run_directory / "metrics.jsonl")
    try:
        config = json.loads((run_directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    path = run_directory.absolute()
    name = path.parent.name if path.name == _RUN_OF_JOB else path.name
    start = _last(events, "start")
    model = config.get("model") or start.get("model") or "run"
    title = name if name.startswith(model) else f"{model} · {name}"
    sections = [
        f"<header><h1>{escape(title)}</h1>{_status(events)}</header>",
        _facts(events, start),
        _tiles(events),
        _charts(events, freshness.read(run_directory)),
        _course(events),
        _settings(config),
        _tables(events),
    ]
    if broken:
        sections.append(f"<p class=note>{broken} lines of metrics.jsonl could not be read.</p>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _read(path: Path) -> tuple[list[Event], int]:
    events: list[Event] = []
    broken = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    event = json.loads(line)
                    events.append({**event, "event": str(event["event"])})
                except (ValueError, TypeError, KeyError):
                    broken += 1
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; name the directory of a run") from error
    if not events:
        raise ReportError(f"{path} has no events: this run has not begun")
    return events, broken


def _last(events: Sequence[Event], kind: str) -> Event:
    return next((e for e in reversed(events) if e["event"] == kind), {})


def _status(events: Sequence[Event]) -> str:
    ends = ("end", "error", "interrupted", "start", "resume")
    last = next((e for e in reversed(events) if e["event"] in ends), {"event": ""})
    words = {"end": ("finished", "good"), "error": ("failed", "bad"), "interrupted": ("stopped", "wait")}
    word, kind = words.get(last["event"], ("running", "wait"))
    more = f'<p class="message bad">{escape(str(last["message"]))}</p>' if last.get("message") else ""
    return f'<span class="status {kind}">{word}</span>{more}'


def _facts(events: Sequence[Event], start: Event) -> str:
    facts = []
    if start:
        rows, data, dim = (start.get(name) for name in ("rows", "data", "dim"))  # a script has its own
        facts += [
            f"data {data}" + (f" ({rows:,} rows)" if isinstance(rows, int) else "") if data else "",
            f"embeddings {start.get('embeddings')}" + (f", dim {dim}" if dim else ""),
            f"batches of {start.get('batch_size'):,}" if isinstance(start.get("batch_size"), int) else "",
        ]
    began = _time(events[0])
    if began is not None:
        facts.append(f"began {began:%Y-%m-%d %H:%M:%S} UTC")
    return f"<p class=facts>{escape(' · '.join(f for f in facts if f))}</p>"


def _tiles(events: Sequence[Event]) -> str:
    end, result, step = _last(events, "end"), _last(events, "eval"), _last(events, "step")
    servers = _last(events, "servers").get("servers", [])
    speed = end.get("samples_per_s") or step.get("samples_per_s")
    tiles = [
        ("held-out AUC", _fixed(result.get("auc"))),
        ("held-out accuracy", _fixed(result.get("accuracy"))),
        ("held-out log loss", _fixed(result.get("loss"))),
        ("samples/s", f"{speed:,.0f}" if speed else None),
        ("steps", f"{step['step']:,}" if "step" in step else None),
        ("training time", duration(end["seconds"]) if "seconds" in end else None),
        ("rows on servers", f"{sum(s['rows'] for s in servers):,}" if servers else None),
        ("bytes per row in DRAM", _bytes_per_row(servers, "dram_bytes", "index_bytes")),
        ("bytes per row in persistent memory or on drives", _bytes_per_row(servers, "pmem_bytes")),
        (
            "checkpoints not written",
            str(n) if (n := sum(e["event"] == "no_checkpoint" for e in events)) else None,
        ),
        ("paused for other servers", duration(n) if (n := _paused(events)) else None),
        ("servers lost", str(n) if (n := sum(e["event"] == "server_gone" for e in events)) else None),
    ]
    shown = "".join(
        f"<div><strong>{escape(value)}</strong><span>{name}</span></div>" for name, value in tiles if value
    )
    return f"<section class=tiles>{shown}</section>" if shown else ""


def _bytes_per_row(servers: Sequence[Event], *fields: str) -> str | None:
    """Return the bytes of the fields per row of all servers, or None if there are none."""
    rows = sum(server["rows"] for server in servers)
    size = sum(server.get(field, 0) for server in servers for field in fields)
    return f"{size / rows:,.0f}" if rows and size else None


def _paused(events: Sequence[Event]) -> float:
    """Return the seconds in which training paused, between runs with other servers."""
    return sum(float(e["seconds"]) for e in events if e["event"] == "pause" and _finite(e.get("seconds")))


def _charts(events: Sequence[Event], fresh: Sequence[Event]) -> str:
    steps = _by_step(e for e in events if e["event"] == "step")
    servers = _by_step(e for e in events if e["event"] == "servers")
    result = _last(events, "eval")
    evaluations = [e for e in events if e["event"] == "eval" and "step" in e]
    between = _by_step(evaluations) if len(evaluations) > 1 else []  # of --eval-every
    marks = _marks(events)

    def curve(name: str, color: str, at: Iterable[Event], value: Callable[[Event], Any]) -> Series | None:
        points = [(e["step"], v) for e in at if _finite(v := value(e))]
        x, y = np.array(points, np.float64).reshape(-1, 2).T
        return Series(name, color, x, y) if points else None

    def total(field: str) -> Callable[[Event], Any]:
        return lambda e: sum(s.get(field, 0) for s in e["servers"])

    def level(field: str) -> tuple[str, float] | None:
        return ("held-out rows", result[field]) if _finite(result.get(field)) else None

    def chart(title: str, unit: str, *curves: Series | None, **options: Any) -> Chart | None:
        found = [one for one in curves if one is not None]
        return Chart(title, unit, found, marks, **options) if found else None

    hits = list(_hit_rates(servers))
    charts = [
        chart(
            "Loss",
            "log loss of the steps between two points",
            curve("training", _BLUE, steps, lambda e: e.get("loss")),
            curve("held-out rows", _ORANGE, between, lambda e: e.get("loss")),
            level=level("loss"),
        ),
        chart(
            "AUC",
            "AUC of the steps between two points",
            curve("training", _BLUE, steps, lambda e: e.get("auc")),
            curve("held-out rows", _ORANGE, between, lambda e: e.get("auc")),
            level=level("auc"),
        ),
        chart(
            "Throughput",
            "samples/s, without checkpoints",
            curve("samples/s", _GREEN, steps, lambda e: e.get("samples_per_s")),
            zero=True,
            form=si,
        ),
        chart(
            "Cache hits", "% of the rows read", curve("hits", _ORANGE, hits, lambda e: e["rate"]), zero=True
        ),
        chart(
            "Drives",
            "bytes per step, all servers",
            *(
                curve(name, color, _per_step(servers, field), lambda e: e["bytes"])
                for name, color, field in (
                    ("read", _BLUE, "drive_read_bytes"),
                    ("written", _ORANGE, "drive_written_bytes"),
                )
            ),
            zero=True,
            powers_of_two=True,
            form=binary,
        ),
        chart(
            "Memory of the servers",
            "bytes, all servers",
            *(
                curve(name, color, servers, total(field)) if any(map(total(field), servers)) else None
                for name, color, field in (
                    ("rows in DRAM", _BLUE, "dram_bytes"),
                    ("rows in persistent memory or on drives", _ORANGE, "pmem_bytes"),
                    ("indexes", _GREEN, "index_bytes"),
                )
            ),
            zero=True,
            powers_of_two=True,
            form=binary,
        ),
        chart(
            "Rows of the tables",
            "rows, all servers",
            curve("rows", _BLUE, servers, total("rows")),
            zero=True,
            form=si,
        ),
    ]
    shown = [c for c in (*charts, _freshness(fresh, marks)) if c is not None]
    many = any(len(s.x) > 2 * c.buckets(_NARROW) for c in shown for s in c.series)
    note = "<p class=note>Of many points a line is the mean and its shade the range.</p>" if many else ""
    return f"<section class=charts>{''.join(map(_figure, shown))}</section>{note}"


def _freshness(fresh: Sequence[Event], marks: Sequence[Mark]) -> Chart | None:
    """Return the chart of processes that serve; None without any."""
    if not fresh:
        return None
    step, seconds, most = (
        np.array([e[name] for e in fresh], np.float64) for name in ("step", "seconds", "most")
    )
    curves = [
        Series("mean of the processes that serve", _BLUE, step, seconds),
        Series("most", _ORANGE, step, most),
    ]
    return Chart("Freshness", "seconds from a step to answers of it", curves, marks, zero=True)


def _figure(chart: Chart) -> str:
    entries = []
    if len(chart.series) > 1 or chart.level:
        entries += [(s.color, s.name, "line") for s in chart.series]
    if chart.level:
        entries.append((LEVEL_COLOR, f"{chart.level[0]}: {_fixed(chart.level[1])}", "dashed"))
    kinds = {mark.name: mark for mark in chart.marks}
    entries += [(m.color, name, "tick" if m.tick else "dashed") for name, m in kinds.items()]
    legend = "".join(
        f'<li><i class={kind} style="color:{c}"></i>{escape(name)}</li>' for c, name, kind in entries
    )
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption><ul class=legend>{legend}</ul>"
        f"{draw(chart, _WIDE, 'wide')}{draw(chart, _NARROW, 'narrow')}</figure>"
    )


def _marks(events: Sequence[Event]) -> list[Mark]:
    marks = [
        Mark("checkpoint", _GREY, e["step"], tick=True)
        for e in events
        if e["event"] == "checkpoint" and _finite(e.get("step"))
    ]
    step = 0
    for e in events:
        if e["event"] == "step":
            step = e["step"]
        elif e["event"] == "server_gone":
            marks.append(Mark("server lost", _RED, step))
        elif e["event"] == "went_back":
            marks.append(Mark("worker lost in its push", _RED, step))
        elif e["event"] == "resume":
            marks.append(Mark("resumed", _GREEN, e.get("step", step)))
    return marks


def _hit_rates(servers: Sequence[Event]) -> Iterable[Event]:
    """Yield the caches' share of reads between two samples, where there are caches."""
    before = (0, 0)
    for event in servers:
        now = tuple(sum(s.get(f, 0) for s in event["servers"]) for f in ("cache_hits", "cache_misses"))
        hits, misses = now[0] - before[0], now[1] - before[1]
        if hits < 0 or misses < 0:  # a restarted server counts from 0
            hits, misses = now
        if hits + misses:
            yield {"step": event["step"], "rate": 100 * hits / (hits + misses)}
        before = (now[0], now[1])


def _per_step(servers: Sequence[Event], field: str) -> Iterable[Event]:
    """Yield the growth of a count of bytes per step between two samples, where there is such a count."""
    last_step, before = 0, 0
    for event in servers:
        if not any(field in one for one in event["servers"]):
            continue
        now = sum(one.get(field, 0) for one in event["servers"])
        if event["step"] > last_step:
            grown = now - before if now >= before else now  # a restarted server counts from 0
            yield {"step": event["step"], "bytes": grown / (event["step"] - last_step)}
        last_step, before = event["step"], now


def _by_step(events: Iterable[Event]) -> list[Event]:
    """Return the last event of each step, in order: after a lost server, steps come twice."""
    found = {e["step"]: e for e in events if _finite(e.get("step"))}
    return [found[step] for step in sorted(found)]


def _tables(events: Sequence[Event]) -> str:
    tables = _last(events, "tables").get("tables", {})
    if not tables:
        return ""
    largest = sorted(tables.items(), key=lambda item: -item[1]["bytes"])
    rows = [(name, str(t["dim"]), f"{t['rows']:,}", binary(t["bytes"])) for name, t in largest[:_MOST_TABLES]]
    more = (
        f"<p class=note>and {len(largest) - len(rows)} smaller ones</p>" if len(rows) < len(largest) else ""
    )
    content = _grid(("table", "dim", "rows", "bytes"), rows) + more
    return f"<section><details><summary>Tables ({len(tables)})</summary>{content}</details></section>"


def _course(events: Sequence[Event]) -> str:
    known = [line for e in events if (line := _describe(e)) is not None]
    left_out = max(0, len(known) - _MOST_EVENTS)
    note = f"<p class=note>{left_out} earlier ones are not listed.</p>" if left_out else ""
    return _section("What happened", note + _grid(("time (UTC)", "event", ""), known[left_out:]))


def _describe(e: Event) -> tuple[str, str, str] | None:
    at = _time(e)
    time, kind, get = f"{at:%m-%d %H:%M:%S}" if at else "", e["event"], e.get
    words = {
        "start": lambda: f"{get('steps') or '?'} steps",
        "resume": lambda: f"from step {get('step')}, {get('path')}",
        "checkpoint": lambda: f"step {get('step')}, {get('seconds')} s, rows in {get('rows')}",
        "server_gone": lambda: f"{get('endpoint')}: {get('message')}",
        "server_back": lambda: f"{get('endpoint')} after {get('seconds')} s, from step {get('step')}",
        "went_back": lambda: f"{get('message')}: in {get('seconds')} s, from step {get('step')}",
        "eval": lambda: (
            f"{get('rows'):,} rows, AUC {_fixed(get('auc'))}"
            + (f", accuracy {_fixed(get('accuracy'))}" if get("accuracy") is not None else "")
            + f", log loss {_fixed(get('loss'))}"
        ),
        "export": lambda: str(get("path")),
        "interrupted": lambda: f"after step {get('step')}",
        "pause": lambda: (
            f"{get('seconds')} s from the end of step {get('step')} to that of the next one, "
            f"{get('servers_before')} servers before and {get('servers')} after"
        ),
        "error": lambda: str(get("message")),
        "end": lambda: f"{get('steps')} steps, {get('samples_per_s')} samples/s",
    }.get(kind)
    return None if words is None else (time, kind.replace("_", " "), words())


def _settings(config: Mapping[str, Any]) -> str:
    rows = [(name.replace("_", "-"), _value(value)) for name, value in sorted(config.items())]
    return _section("Settings", _grid(("setting", "value"), rows)) if rows else ""


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "–"
    return (
        "–" if value in (None, "") else json.dumps(value) if isinstance(value, (bool, dict)) else str(value)
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2><div class=scroll>{content}</div></section>"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _time(event: Event) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(str(event.get("time"))).astimezone(datetime.timezone.utc)
    except ValueError:
        return None


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fixed(value: Any) -> str:
    return f"{value:.4f}" if _finite(value) else ""
