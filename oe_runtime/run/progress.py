"""The trainer's terminal output: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from oe_runtime.run.charts import duration


def view() -> View:
    """Return a bar when stdout is a terminal, else lines."""
    return Bar() if sys.stdout.isatty() else View()


def describe(numbers: dict[str, float | None]) -> str:
    """Format numbers: `loss 0.4512  auc 0.7655  88,120 samples/s  ETA 1:02`; of a stream, rows and lag."""
    parts = []
    for name in ("loss", "auc"):
        value = numbers.get(name)
        if value is not None:
            parts.append(f"{name} {value:.4f}")
    speed, eta = numbers.get("samples_per_s"), numbers.get("eta_s")
    if speed is not None:
        parts.append(f"{speed:,.0f} samples/s")
    if eta is not None:
        parts.append(f"ETA {duration(eta)}")
    rows, waiting = numbers.get("rows"), numbers.get("waiting")
    if rows is not None:
        parts.append(f"{rows:,} rows")
    if waiting is not None:
        parts.append(f"{waiting:,} {'file waits' if waiting == 1 else 'files wait'}")
    return "  ".join(parts)


class View:
    """Plain lines, for logs and pipes."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Show one line of news."""
        print(text, flush=True)

    def total(self, steps: int | None, done: int) -> None:
        """Set the number of steps, and how many are done already."""

    def tick(self, step: int) -> None:
        """Note that a step was done."""

    def step(self, step: int, steps: int | None, numbers: dict[str, float | None]) -> None:
        """Show progress, `step 40/1000  loss …`: loss, auc, samples_per_s, eta_s."""
        of = f"/{steps}" if steps is not None else ""
        print(f"step {step}{of}  {describe(numbers)}", flush=True)


class Bar(View):
    """A Rich progress bar; news appear above it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=False,
        )
        self._task = self._progress.add_task("training", total=None, text="starting", visible=False)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def total(self, steps: int | None, done: int) -> None:
        """Show the bar."""
        self._progress.update(self._task, total=steps, completed=done, visible=True)

    def tick(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def step(self, step: int, steps: int | None, numbers: dict[str, float | None]) -> None:
        """Move the bar and show the numbers."""
        self._progress.update(self._task, completed=step, total=steps, text=describe(numbers))
