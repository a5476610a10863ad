"""What a checkpoint every so many steps costs training, as a user has it.

The trainer's model, pipeline and checkpoints, with one server of dram_pmem over loopback on the same cores:
turns of so many steps with a checkpoint at their beginning and without (with, without, without, with, …).
The server's pool lies on --directory, a tmpfs with huge pages, and is flushed as persistent memory is. A run
appends a line of JSON for each pair of turns; the report is made of all pairs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline import Trained
from processes import Server, server
from reporting import MISSED, RESULTS, append, header, lines_of, measured, table, when

TARGET = 1.0  # percent
CACHED = 0.02  # of the rows


def main() -> int:
    """Measure pairs of turns of one dim, or report; 0 when no target is missed."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training checkpoints", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--cap", type=int, default=20000, help="--max-cardinality")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--every", type=int, default=500, help="steps of a turn")
    parser.add_argument("--seconds", type=float, default=220, help="no pair begins that would end later")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="for the pool")  # noqa: S108
    parser.add_argument("--parts", type=Path, default=RESULTS / "training_checkpoints.jsonl")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    options = parser.parse_args()
    if not options.report:
        for line in pairs(options):
            append(options.parts, line)
    return report(options.parts)


def pairs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measured pairs of turns, once the pool has as much room as it is going to need."""
    began = time.monotonic()
    os.environ["PMEM_IS_PMEM_FORCE"] = "1"  # CLWB and fences instead of msync
    row_bytes = 2 * options.dim * 4  # Adagrad
    cache = int(26 * options.cap * CACHED * row_bytes)
    flags = ("--storage-cache", str(cache), "--storage-recover")
    setup = {key: getattr(options, key) for key in ("model", "dim", "cap", "batch_size", "every")}
    with tempfile.TemporaryDirectory() as run, server("dram_pmem", options.directory, *flags) as one:
        extra = ("--run-dir", run, "--checkpoint-rows", "pool")
        with Trained(options, one.endpoint, extra) as trained:
            turns = Turns(trained, one)
            for checkpoint, steps in (
                (False, 2 * options.every),
                (True, options.every),
                (True, options.every),
            ):
                turns.take(checkpoint, steps)
            while True:
                before = time.monotonic()
                pair = [turns.take(checkpoint, options.every) for checkpoint in turns.next_pair()]
                kinds = {("with" if turn.pop("checkpoint") else "without"): turn for turn in pair}
                yield {**setup, **kinds, **measured()}
                now = time.monotonic()
                if now - began + (now - before) > options.seconds:
                    return


class Turns:
    """Turns of one model and its server."""

    def __init__(self, trained: Trained, one: Server) -> None:
        from oe_runtime.run.checkpoints import Checkpoints
        from oe_runtime.run.position import Position

        self._position = Position
        self._trained, self._server, self._step, self._pairs = trained, one, 0, 0
        self._batches = trained.batches
        self._batch, self._following = next(self._batches), next(self._batches)
        self._checkpoints = Checkpoints(trained.options, trained.trainee.state, trained.client)

    def next_pair(self) -> tuple[bool, bool]:
        """Whether the next two turns have checkpoints: each kind is first as often."""
        self._pairs += 1
        return (True, False) if self._pairs % 2 else (False, True)

    def take(self, checkpoint: bool, steps: int) -> dict[str, Any]:
        """Milliseconds a step: of all, and the mean of the medians of every ten; processor time of both."""
        processor, times, pending = self._processor(), [], checkpoint
        for i in range(steps):
            began = time.perf_counter()
            if checkpoint and i == 0:
                self._checkpoints.take(self._position(self._step))
            self._trained.trainee.train(self._batch, self._following)
            if pending and self._checkpoints.settle():
                pending = False
            self._batch, self._following = self._following, next(self._batches)
            self._step += 1
            times.append((time.perf_counter() - began) * 1000)
        self._trained.client.settle()
        processor = (self._processor() - processor) * 1000 / steps
        while pending and not self._checkpoints.settle():
            time.sleep(0.1)
        tens = [statistics.median(times[at : at + 10]) for at in range(0, steps - 9, 10)]
        return {
            "checkpoint": checkpoint,
            "all": sum(times) / steps,
            "medians": statistics.fmean(tens),
            "longest": max(times),
            "processor": processor,
        }

    def _processor(self) -> float:
        return time.process_time() + self._server.cpu_seconds()


def more(with_it: Sequence[float], without: Sequence[float]) -> tuple[float, float, float]:
    """By how many percent each of the first is more than its second: the median, and its interval of 95 %.

    The interval is that of order statistics; of fewer than six pairs it is all of them.
    """
    ratios = sorted(100 * (a / b - 1) for a, b in zip(with_it, without, strict=True))
    n, out, below = len(ratios), 0, 0.5 ** len(ratios)
    while 2 * below <= 0.05:
        out += 1
        below += math.comb(n, out) * 0.5**n
    first = max(0, out - 1)
    return statistics.median(ratios), ratios[first], ratios[n - 1 - first]


def report(parts: Path) -> int:
    """The table of all pairs."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in lines_of(parts):
        key = (one["model"], one["dim"], one["cap"], one["batch_size"], one["every"])
        cells.setdefault(key, []).append(one)
    rows, missed = [], False
    for (model, dim, cap, _, every), found in cells.items():
        kinds = {kind: [one[kind] for one in found] for kind in ("without", "with")}

        def values(kind: str, field: str, kinds: dict[str, Any] = kinds) -> list[float]:
            return [turn[field] for turn in kinds[kind]]

        texts = {}
        for field in ("medians", "all", "processor"):
            middle, low, high = more(values("with", field), values("without", field))
            texts[field] = f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"
            missed |= field != "processor" and middle > TARGET
        steps = [f"{statistics.median(values(kind, 'medians')):.2f}" for kind in kinds]
        measured_at = when(*found)
        name = f"{model}, dim {dim}, {26 * cap:,} ids, every {every}"
        rows.append([name, *steps, *(f"**{texts[f]}**" for f in ("medians", "all")), texts["processor"]])
        rows[-1] += [str(len(found)), measured_at]
    columns = [
        "",
        "without, ms",
        "with, ms",
        "slower",
        "slower, all",
        "more processor time",
        "pairs",
        "measured",
    ]
    text = header("What a checkpoint costs training")
    text += f"""\
The trainer's pipeline with one `dram_pmem` server over loopback on the same cores (a pool in memory, tmpfs
with huge=always, flushed as persistent memory is; a cache of {CACHED:.0%} of the rows), batch 4096, adagrad,
generated rows: turns of so many steps with a checkpoint of rows and dense weights at their beginning, beside
turns without. A step is all that the training loop does for it. *Slower* compares the means of the medians
of every ten steps, *all* the means of all steps, in which the one that writes dense weights to disk is, too;
pair by pair, median and interval of 95 %. Processor time is that of worker and server, with the thread that
makes checkpoints durable. Asked: at most {TARGET:g} % slower.

"""
    target = parts.with_suffix(".md")
    target.write_text(
        text + table(columns, rows) + f"\nAt most {TARGET:g} %: {'missed' if missed else 'met'}.\n"
    )
    print(target.read_text())
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
