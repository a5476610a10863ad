"""What rows on a drive cost training: dram_ssd servers beside dram servers, step by step, with equal losses.

The same model trains on the same batches with a server of each storage, in turns of steps. A part of the rows
is cached; the others are on the drive of --directory, past the page cache. All share the cores, or with
--apart the servers have the last one. Beside each pair fio measures the drive, for the bound. A run appends a
line of JSON for each pair of turns; the report is made of all pairs. A loss that differs ends the run. Needs
fio.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints import more
from pipeline import Trained
from processes import Server, server
from reporting import RESULTS, append, header, lines_of, measured, table, when

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ssd"))

import device

KINDS = ("dram", "dram_ssd")
SETUP = ("model", "dim", "cap", "batch_size", "cached", "apart")


def main() -> int:
    """Measure one cell, or report."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/training drive", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", default="deepfm")
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--cap", type=int, default=40000, help="--max-cardinality")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--cached", type=float, default=0.1, help="part of all rows that the cache holds")
    parser.add_argument("--before", type=int, default=300, help="steps that make most rows first")
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive")  # noqa: S108
    parser.add_argument("--gib", type=float, default=1, help="size of the file that fio reads")
    parser.add_argument("--apart", action="store_true", help="the servers have the last core for themselves")
    parser.add_argument("--parts", type=Path, default=RESULTS / "training_drive.jsonl")
    parser.add_argument("--report", action="store_true", help="write the table, and measure nothing")
    options = parser.parse_args()
    if options.apart and len(os.sched_getaffinity(0)) == 1:
        parser.error("--apart: needs two cores")
    if not options.report:
        for line in pairs(options):
            append(options.parts, line)
    return report(options.parts)


def pairs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measured pairs of turns."""
    cache = int(26 * options.cap * options.cached * 2 * options.dim * 4)  # Adagrad
    setup = {key: getattr(options, key) for key in SETUP}
    cores = sorted(os.sched_getaffinity(0))
    flags = ("--storage-cache", str(cache))
    file = device.file_of(options.directory, options.gib)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory)))
        if options.apart:
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, cores[-1:])
        first = stack.enter_context(server("dram", directory))
        second = stack.enter_context(server("dram_ssd", directory, *flags))
        if options.apart:
            os.sched_setaffinity(0, cores[:-1])
        dram = stack.enter_context(Trained(options, first.endpoint))
        drive = stack.enter_context(Trained(options, second.endpoint))
        turns = {"dram": Turns(dram, first), "dram_ssd": Turns(drive, second)}
        for turn in turns.values():
            turn.take(options.before)
        for number in range(options.pairs):
            found = {kind: turns[kind].take(options.steps) for kind in (KINDS if number % 2 else KINDS[::-1])}
            if found["dram"].pop("losses") != found["dram_ssd"].pop("losses"):
                raise SystemExit("error: the losses of dram and dram_ssd differ")
            fio = device.fio(file, 2.0)
            drive_alone = {"reads_per_s": fio.rate, "cpu_us_per_read": fio.cpu}
            yield {**setup, **{kind: found[kind] for kind in KINDS}, "fio": drive_alone, **measured()}


class Turns:
    """Turns of one model and its server."""

    def __init__(self, trained: Trained, one: Server) -> None:
        self._trained, self._server = trained, one
        self._batches = deque(next(trained.batches) for _ in range(1 + trained.trainee.batches_ahead))

    def take(self, steps: int) -> dict[str, Any]:
        """Milliseconds per step, those of both processes' cores, what the drive did, and the losses."""
        before, processor, losses = self._drive(), self._processor(), []
        began = time.perf_counter()
        for _ in range(steps):
            self._trained.trainee.train(*self._batches)
            losses.append(self._trained.trainee.window()[0])
            self._batches.popleft()
            self._batches.append(next(self._trained.batches))
        self._trained.client.settle()
        took = time.perf_counter() - began
        after = self._drive()
        return {
            "ms": took * 1000 / steps,
            "processor_ms": (self._processor() - processor) * 1000 / steps,
            **{field: (after[field] - before[field]) / steps for field in after},
            "losses": losses,
        }

    def _drive(self) -> dict[str, int]:
        """Reads and bytes so far."""
        tables = self._trained.client.stats()["servers"][0]["tables"].values()
        fields = ("reads", "read_bytes", "written_bytes")
        return {field: sum(one["drive"][field] for one in tables if "drive" in one) for field in fields}

    def _processor(self) -> float:
        return time.process_time() + self._server.cpu_seconds()


def bound(step_ms: float, reads: float, fio: dict[str, float]) -> float:
    """The most speed, as a part of dram's, with so many reads per step."""
    if reads == 0:
        return 1.0
    drive_ms = reads / fio["reads_per_s"] * 1e3
    return min(1.0, step_ms / max(drive_ms, reads * fio["cpu_us_per_read"] / 1e3))


def report(parts: Path) -> int:
    """The table of all pairs."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in lines_of(parts):
        cells.setdefault(tuple(one[key] for key in SETUP), []).append(one)
    rows = []
    for (model, dim, cap, _, cached, apart), found in cells.items():
        kinds = {kind: [one[kind] for one in found] for kind in KINDS}
        ms = {kind: [turn["ms"] for turn in kinds[kind]] for kind in KINDS}
        middle, low, high = more(ms["dram"], ms["dram_ssd"])
        both = zip(kinds["dram_ssd"], kinds["dram"], strict=True)
        spent = [ours["processor_ms"] - theirs["processor_ms"] for ours, theirs in both]
        drive = {
            field: statistics.median(turn[field] for turn in kinds["dram_ssd"])
            for field in ("reads", "read_bytes", "written_bytes")
        }
        bounds = [
            bound(turn["ms"], ours["reads"], one["fio"])
            for turn, ours, one in zip(kinds["dram"], kinds["dram_ssd"], found, strict=True)
        ]
        rows.append(
            [
                f"{model}, dim {dim}, {26 * cap:,} ids, {cached:.0%} cached{', servers apart' * apart}",
                *(f"{statistics.median(ms[kind]):.1f}" for kind in KINDS),
                f"**{1 + middle / 100:.2f} ×** ({1 + low / 100:.2f} to {1 + high / 100:.2f})",
                f"{statistics.median(bounds):.2f} ×",
                f"{statistics.median(spent):+.0f}",
                f"{drive['reads']:,.0f}",
                f"{drive['read_bytes'] / 2**20:.1f}",
                f"{drive['written_bytes'] / 2**20:.1f}",
                str(len(found)),
                when(*found),
            ]
        )
    text = header("What rows on a drive cost training")
    text += """\
The trainer with one server over loopback, batch 4096, adagrad, generated rows, with the loss read after each
step: turns with rows in `dram_ssd` beside turns with rows in `dram`. All share the cores; *apart*: the server
has one of them, the trainer the others. The losses of all steps were equal. *Speed* is that of `dram_ssd` as
a multiple of `dram`'s: of the pairs, the median and its interval of 95 %. *Bound* is what the drive allows if
all its reads are hidden: the step of dram, or the time that fio takes for as many reads (on the drive, or on
the core that submits them) where that is longer.

"""
    columns = ["", "dram, ms", "dram_ssd, ms", "speed", "bound", "more processor ms", "reads", "MiB read"]
    columns += ["MiB written", "pairs", "measured"]
    parts.with_suffix(".md").write_text(text + table(columns, rows))
    print(parts.with_suffix(".md").read_text())
    return 0
