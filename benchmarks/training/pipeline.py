"""Where the time of a training step goes, and how much of pulls and pushes the pipeline hides.

One worker with one dram server over loopback; the same model runs one step after the other, with rows pulled
ahead (the same results), and with a push that goes out during the next step (staleness 1), in turns of some
seconds. A run appends lines of JSON; the report is made of all of them.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import server
from reporting import RESULTS, append, header, lines_of, measured, table, when
from trainee import Trainee

MODES = {"one after the other": (False, 0), "pulled ahead": (True, 0), "staleness 1": (True, 1)}
PARTS = ("input", "pull", "compute", "push", "other")
TARGET = 0.8


def main() -> int:
    """Measure one dim, or report."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training pipeline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--cap", type=int, default=40000, help="--max-cardinality; 0: full")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", type=Path, default=RESULTS / "training_pipeline.jsonl")
    parser.add_argument("--report", action="store_true", help="write table and plot, and measure nothing")
    options = parser.parse_args()
    if not options.report:
        with tempfile.TemporaryDirectory() as directory, server("dram", Path(directory)) as one:
            for line in measure(options, one.endpoint):
                append(options.parts, line)
    return report(options)


def measure(options: argparse.Namespace, endpoint: str) -> list[dict[str, Any]]:
    """The median round of each mode."""
    rounds: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    with Trained(options, endpoint) as trained:
        for number, mode in itertools.product(range(options.rounds + 1), MODES):
            result = trained.turn(mode, options.seconds if number else 0.0)
            if number:  # the first compiles
                rounds[mode].append(result)
    shared = {"model": options.model, "dim": options.dim, "cap": options.cap, "batch": options.batch_size}
    return [
        {
            **shared,
            "mode": mode,
            **{key: statistics.median(r[key] for r in results) for key in results[0]},
            **measured(),
        }
        for mode, results in rounds.items()
    ]


class Trained:
    """A model of the trainer's in this process, with its tables on one server, and generated rows."""

    def __init__(
        self,
        options: argparse.Namespace,
        endpoint: str,
        flags: Sequence[str] = (),
        *,
        share_memory: bool = True,
    ) -> None:
        from oe_runtime.client import Client
        from oe_runtime.data import Split, open_source, training_batches
        from oe_runtime.run.options import parse

        data = "generate:1000000000"
        command = ["--data", data, "--model", options.model, "--dim", str(options.dim), "--servers", endpoint]
        command += ["--max-cardinality", str(options.cap), "--batch-size", str(options.batch_size)]
        self.options = parse([*command, *flags])
        self.client = Client([endpoint], share_memory=share_memory)
        self.trainee = Trainee(self.options, self.client)
        self._clock = Clock()
        source, self._size = open_source(data, options.cap), options.batch_size
        self.batches = training_batches(source, Split(self.options.holdout), self._size)

    def turn(self, mode: str, seconds: float) -> dict[str, float]:
        """See `turn`; in one of MODES."""
        ahead, staleness = MODES[mode]
        switch(self.trainee.model, self._clock, ahead=ahead, staleness=staleness)
        return turn(self.trainee, self._clock, self.batches, self._size, seconds)

    def __enter__(self) -> Trained:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


class Clock:
    """Seconds of the main thread by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._main = threading.current_thread()

    def timed(self, part: str, function: Any) -> Any:
        """`function`, whose time in the main thread is added to the part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not self._main:
                return function(*args, **kwargs)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return call


def switch(model: Any, clock: Clock, *, ahead: bool, staleness: int) -> None:
    """Makes the next steps those of another mode, without compiling anew."""
    from oe_runtime.keras.program import StepFunction
    from oe_runtime.keras.step_bodies import TRAIN

    model.served.settings = replace(model.served.settings, pipeline=ahead, staleness=staleness)
    steps = model._steps
    pipeline = steps.training = steps.pipeline(TRAIN, staleness)
    model.train_function = None
    for owner, name, part in (
        (pipeline, "_take", "pull"),  # waiting for what the other thread prepares
        (steps, "prepare", "pull"),
        (steps, "refresh", "pull"),
        (model.client, "push", "push"),
        (model.client, "push_later", "push"),
        (StepFunction, "run", "compute"),
    ):
        function = getattr(owner, name)
        original = getattr(function, "__wrapped__", function)
        wrapped = clock.timed(part, original)
        wrapped.__wrapped__ = original
        setattr(owner, name, wrapped)


def turn(trainee: Any, clock: Clock, batches: Iterator[Any], batch_size: int, seconds: float) -> Any:
    """Steps for so many seconds, four at the least; milliseconds a step by part, and samples a second."""
    batch, following, steps = next(batches), next(batches), 0
    while True:
        if steps == 2:
            clock.seconds.clear()
            began = time.perf_counter()
        trainee.train(batch, following)
        steps += 1
        reading = time.perf_counter()
        batch, following = following, next(batches)
        clock.seconds["input"] += time.perf_counter() - reading
        if steps >= 4 and time.perf_counter() - began > seconds:
            break
    trainee.model.client.settle()
    whole, steps = time.perf_counter() - began, steps - 2
    parts = {part: clock.seconds[part] * 1000 / steps for part in PARTS[:-1]}
    parts["other"] = whole * 1000 / steps - sum(parts.values())
    return {**parts, "step": whole * 1000 / steps, "samples_per_s": steps * batch_size / whole}


def report(options: argparse.Namespace) -> int:
    """The table and the plot of the newest lines."""
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in lines_of(options.parts):
        cells[one["model"], one["dim"], one["cap"], one["mode"]] = one
    rows = []
    for (model, dim, cap, mode), one in cells.items():
        base = cells[model, dim, cap, next(iter(MODES))]
        exposed, all_of_it = one["pull"] + one["push"], base["pull"] + base["push"]
        name = f"{model}, dim {dim}, {cap or 'full'}, {mode}"
        hidden = "" if one is base else f"{1 - exposed / all_of_it:.0%}"
        speed = [f"{one['samples_per_s']:,.0f}", f"{one['samples_per_s'] / base['samples_per_s']:.2f}"]
        measured_at = when(one)
        rows.append([name, *(f"{one[part]:.1f}" for part in (*PARTS, "step")), hidden, *speed, measured_at])
    columns = [
        "",
        *(f"{part}, ms" for part in (*PARTS, "step")),
        "pull + push hidden",
        "samples/s",
        "×",
        "measured",
    ]
    text = header("Where a training step's time goes")
    text += f"""\
Batch {options.batch_size}, adagrad, generated rows, one server process over loopback sharing the cores with
the worker; the median of several turns. Times are those of the thread that trains: what another thread does
meanwhile is not in them, but takes the same cores, so a step gets shorter by less than what is hidden.
"Pulled ahead" gives the results of one step after the other, bit for bit: another thread pushes and then
pulls the rows of both batches again, while this one reads input and does what Keras does between steps. What
then is left waits for rows that the push changes, with which the next batch begins: with equal results, only
the dense weights' update and the metrics, which come before the push, could hide a little more of it. Asked:
{TARGET:.0%} hidden, with results equal or of a stated staleness.

"""
    target = options.parts.with_suffix(".md")
    target.write_text(text + table(columns, rows) + "\n![a step by part](training_pipeline.svg)\n")
    target.with_suffix(".svg").write_text(plot(list(cells.values())))
    print(target.read_text())
    return 0


COLOURS = dict(zip(PARTS, ("#8c8c8c", "#2f6fb0", "#7aa974", "#c9762b", "#d8d8d8"), strict=True))


def plot(cells: list[dict[str, Any]]) -> str:
    """One bar a cell, as SVG."""
    # Not `step`: medians of the parts need not add up to the median of the whole.
    longest = max(sum(max(0.0, cell[part]) for part in PARTS) for cell in cells)
    lines, y = [], 40
    x = 10
    for part in PARTS:
        lines.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[part]}"/>')
        lines.append(f'<text x="{x + 16}" y="20">{part}</text>')
        x += 80
    for cell in cells:
        name = f"{cell['model']}, dim {cell['dim']}, {cell['mode']}"
        lines.append(f'<text x="280" y="{y + 12}" text-anchor="end">{name}</text>')
        at = 290.0
        for part in PARTS:
            width = max(0.0, cell[part]) / longest * 420
            place = f'x="{at:.1f}" y="{y}" width="{width:.1f}" height="16"'
            lines.append(f'<rect {place} fill="{COLOURS[part]}"/>')
            at += width
        lines.append(f'<text x="{at + 5:.0f}" y="{y + 12}">{cell["step"]:.0f} ms</text>')
        y += 22
    style = 'font-family="sans-serif" font-size="12"'
    size = f'width="770" height="{y + 10}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(lines)}</svg>\n'
