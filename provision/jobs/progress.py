"""Shows a training run as it goes: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from provision.jobs.metrics import Event

WORDS = 80  # columns that the step and the facts beside the bar may take
PLAIN_SECONDS = 2.0  # minimum time between two plain progress lines


def number(value: Any, digits: int = 4) -> str:
    """A metric for people; a dash when there is none."""
    return f"{value:,.{digits}f}" if isinstance(value, (int, float)) else "–"


def rate(value: Any) -> str:
    """Samples a second with thousands separated."""
    return f"{value:,.0f} samples/s" if isinstance(value, (int, float)) else "–"


def duration(seconds: Any) -> str:
    """Seconds as 0:42 or 1:02:03."""
    if not isinstance(seconds, (int, float)):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Steps(ProgressColumn):
    def render(self, task: Task) -> Text:
        total = f"{task.total:,.0f}" if task.total else "?"
        return Text(f"step {task.completed:,.0f}/{total}", style="bold")


class TrainingView:
    """A context manager; its ``event`` is what the supervisor calls."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.total = 0
        self._last_line = -PLAIN_SECONDS
        self._bar: Progress | None = None
        if console.is_terminal:
            room = console.width - WORDS
            bar = [BarColumn(bar_width=min(40, room))] if room >= 10 else []
            self._bar = Progress(
                SpinnerColumn(),
                _Steps(),
                *bar,
                TextColumn("{task.fields[facts]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("train", total=None, facts="starting")

    def __enter__(self) -> TrainingView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def event(self, event: Event) -> None:
        """Show one event; kinds that are not known here are not shown."""
        kind = event["event"]
        if kind == "step":
            self._step(event)
            return
        if kind == "start" and isinstance(event.get("steps"), int):
            self.total = event["steps"]
        line = describe(event)
        if line:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _step(self, event: Event) -> None:
        facts = (
            f"{rate(event.get('samples_per_s'))}  loss {number(event.get('loss'))}  "
            f"AUC {number(event.get('auc'))}  ETA {duration(event.get('eta_s'))}"
        )
        step = event.get("step", 0)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self.total or None, facts=facts)
            return
        now = self.clock()
        if step == self.total or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            self.console.print(f"  step {step}/{self.total or '?'}  {facts}", highlight=False, soft_wrap=True)


def describe(event: Event) -> str:
    """One line for an event, with Rich markup; empty for events that are not shown as lines."""
    kind, get = event["event"], event.get
    if kind == "server":
        memory = "persistent memory" if get("is_pmem") else get("storage", "dram")
        return f"[green]✓[/] {get('name')} listens on {get('endpoint')} ({memory}, pid {get('pid')})"
    if kind == "worker":
        return f"[green]✓[/] {get('name')} on {get('host')} started (pid {get('pid')})"
    if kind == "start":
        rows = f" on {get('rows'):,} rows" if isinstance(get("rows"), int) else ""
        steps = f", {get('steps'):,} steps" if isinstance(get("steps"), int) else ""
        return f"[green]✓[/] training {get('model', '')}{rows}{steps}"
    if kind == "resume":
        return f"[green]✓[/] goes on from step {get('step')}"
    if kind == "checkpoint":
        seconds = f" ({number(get('seconds'), 1)} s)" if get("seconds") is not None else ""
        return f"[green]✓[/] checkpoint at step {get('step')}{seconds}"
    if kind == "eval":
        rows = f" of {get('rows'):,} rows" if isinstance(get("rows"), int) else ""
        right = f", accuracy {number(get('accuracy'))}" if get("accuracy") is not None else ""
        return f"[green]✓[/] held-out part{rows}: AUC {number(get('auc'))}{right}, loss {number(get('loss'))}"
    if kind == "export":
        return f"[green]✓[/] exported the model to {get('path')}"
    if kind == "stopping":
        return (
            "[yellow]stopping:[/] workers finish their step and a checkpoint is written "
            "(Ctrl-C again ends it at once, without)"
        )
    if kind == "host_stopped":
        return str(get("line"))
    if kind == "trouble":
        return f"[yellow]![/] {get('message')}"
    if kind == "server_lost":
        how = f": it {get('message')}" if get("message") else ""
        return f"[red]✗[/] {get('name')} on {get('host')} is gone{how}"
    if kind == "server_restarted":
        return f"[green]✓[/] {get('name')} on {get('host')} was started again (pid {get('pid')})"
    if kind == "workers_restarted":
        return f"[yellow]![/] {get('message')}: all workers start again from the last checkpoint"
    if kind == "workers_go_on":
        how = "start again from the last checkpoint" if get("again") else "go on"
        return f"[yellow]![/] {get('message')}; the rest {how}"
    if kind == "server_gone":
        return f"[yellow]![/] training waits up to {get('wait_s')} s for server {get('endpoint')}"
    if kind == "server_back":
        return f"[green]✓[/] server {get('endpoint')} is back: training goes on from step {get('step')}"
    return ""
