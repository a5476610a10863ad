"""The terminal as the screen of a job: a training run as it goes, and how it ended.

The run is a progress bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from provision.cli.views.ending import last_screen
from provision.jobs.metrics import Event, duration, number, rate
from provision.jobs.screen import say
from provision.jobs.store import Job

WORDS = 80  # columns that the step and the facts beside the bar may take
PLAIN_SECONDS = 2.0  # minimum time between two plain progress lines


class JobTerminal:
    """See ``provision.jobs.screen.JobScreen``; beside JSON it writes to standard error."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json)

    @contextmanager
    def follow(self) -> Iterator[Callable[[Event], None]]:
        """Show the events that the block gives to the value."""
        with TrainingView(self.console) as view:
            yield view.event

    def show_end(self, job: Job, state_dir: Path) -> None:
        """Show how it ended, where its files are, and the next commands."""
        last_screen(job, state_dir, self.console)


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
        self._has_auc = True
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
        """Show one event; unknown kinds are not shown."""
        kind = event["event"]
        if kind == "step":
            self._step(event)
            return
        if kind == "start":
            # A script knows its steps later, and its rows and their AUC never.
            self._has_auc = event.get("rows", 0) is not None
            self.total = event["steps"] if isinstance(event.get("steps"), int) else self.total
        line = describe(event)
        if line:
            say(self.console, line)

    def _step(self, event: Event) -> None:
        auc = f"AUC {number(event.get('auc'))}  " if self._has_auc or event.get("auc") is not None else ""
        facts = (
            f"{rate(event.get('samples_per_s'))}  loss {number(event.get('loss'))}  "
            f"{auc}ETA {duration(event.get('eta_s'))}"
        )
        if isinstance(waiting := event.get("waiting"), int):  # of a stream
            facts = (
                facts.rpartition("ETA")[0] + f"{waiting:,} {'file waits' if waiting == 1 else 'files wait'}"
            )
        step = event.get("step", 0)
        if isinstance(event.get("steps"), int):
            self.total = event["steps"]
        if self.total:  # estimated by the trainer while it reads a file
            self.total = max(self.total, step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self.total or None, facts=facts)
            return
        now = self.clock()
        if step == self.total or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            say(self.console, f"  step {step}/{self.total or '?'}  {facts}")


# Lines of events, by kind; ``describe`` has those that depend on more than their fields.
_LINES = {
    "worker": "[green]✓[/] {name} on {host} started (pid {pid})",
    "resume": "[green]✓[/] resumed from step {step}",
    "export": "[green]✓[/] exported the model to {path}",
    "stopping": "[yellow]stopping:[/] workers finish their step and write a checkpoint "
    "(Ctrl-C again stops them at once, without one)",
    "scaling": "[yellow]scaling:[/] {message}; workers finish their step and write a checkpoint",
    "pause": "[green]✓[/] paused {seconds} s after step {step}; servers: {servers_before} → {servers}",
    "host_stopped": "{line}",
    "trouble": "[yellow]![/] {message}",
    "server_restarted": "[green]✓[/] {name} on {host} was restarted (pid {pid})",
    "workers_restarted": "[yellow]![/] {message}: all workers restart from the last checkpoint",
    "server_gone": "[yellow]![/] training waits up to {wait_s} s for server {endpoint}",
    "host_silent": "[yellow]![/] {host} ({name}) does not answer, waiting up to {wait_s} s: {message}",
    "host_answers": "[green]✓[/] {host} answers again after {seconds} s",
    "server_back": "[green]✓[/] server {endpoint} is back: training resumes from step {step}",
    "went_back": "[yellow]![/] {message}: training resumes from step {step}",
}


def describe(event: Event) -> str:
    """One line for an event, with Rich markup; empty for events that are not shown as lines."""
    kind, get = event["event"], event.get
    if kind in _LINES:
        return _LINES[kind].format_map(defaultdict(lambda: "–", event))
    if kind == "server":
        memory = "persistent memory" if get("is_pmem") else get("storage", "dram")
        return f"[green]✓[/] {get('name')} listens on {get('endpoint')} ({memory}, pid {get('pid')})"
    if kind == "start":
        rows = f" on {get('rows'):,} rows" if isinstance(get("rows"), int) else ""
        steps = f", {get('steps'):,} steps" if isinstance(get("steps"), int) else ""
        return f"[green]✓[/] training {get('model', '')}{rows}{steps}"
    if kind == "checkpoint":
        seconds = f" ({number(get('seconds'), 1)} s)" if get("seconds") is not None else ""
        return f"[green]✓[/] checkpoint at step {get('step')}{seconds}"
    if kind == "eval":
        rows = f" of {get('rows'):,} rows" if isinstance(get("rows"), int) else ""
        right = f", accuracy {number(get('accuracy'))}" if get("accuracy") is not None else ""
        found = f"held-out part{rows}: AUC {number(get('auc'))}{right}, loss {number(get('loss'))}"
        if (label := get("only_label")) is None:
            return f"[green]✓[/] {found}"
        return (
            f"[yellow]![/] {found}; the label is always {label}, so AUC says nothing; is it the right column?"
        )
    if kind == "server_lost":
        how = f": it {get('message')}" if get("message") else ""
        return f"[red]✗[/] {get('name')} on {get('host')} was lost{how}"
    if kind == "workers_go_on":
        how = "restart from the last checkpoint" if get("again") else "continue"
        return f"[yellow]![/] {get('message')}; the rest {how}"
    return ""
