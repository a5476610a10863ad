"""The engine beside its peers, in one run: pull, a whole step, index lookups.

    python benchmarks/engine [--save]

In pieces, for a machine that is quiet for minutes only:

    python benchmarks/engine --only loopback --dim 64 --rows 1000000 --optimizer adagrad --keep FILE
    python benchmarks/engine --report FILE [--save]

A batch is 4096 examples of 26 ids. A pull brings a row for each id, duplicates included; a step
also hands a gradient for each id back and has the optimizer applied. Contenders are processes of
their own that take turns, round after round, on the same ids and the same cores (1 core: client and
server share it). Shown are the median speeds, and the median over rounds of our speed over the
other's, which a busy machine disturbs least. Maps and the gather run on one thread and are timed in
processor time. A "gather" only copies rows from places that are known; "with an index line" it also
reads, for each row, a known line of a region as large as our index: those are the bytes that a pull
reads, which has to find them. Ids are made unique for both, as in training, unless "repeated", as who
only reads asks for them (Client.pull_rows). Peers are fetched from the package indexes and built into
.cache/. Rows that miss their target say so. "socket" is what the system's loopback takes to carry the
same bytes, and no engine: a program that sends and receives them and does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import contenders
import peers
from contenders import BATCH, Contender, Setup
from processes import Missing
from reporting import RESULTS, header
from rich.console import Console
from rich.table import Table

# (against, what): the least ratio.
TARGETS = {
    ("OpenEmbedding", "step"): 3.0,
    ("OpenEmbedding", "pull"): 2.0,
    ("FBGEMM", "step"): 1.3,
    ("FBGEMM", "pull"): 1.3,
    ("FBGEMM, dim 12", "step"): 1.3,
    ("FBGEMM, dim 12", "pull"): 1.3,
    ("ours", "step"): 0.9,  # of dram_pmem beside dram
}
MAP_TARGETS = {
    ("lookup", "Boost"): 2.0,
    ("pull", "gather"): 0.7,
    ("pull", "gather with an index line"): 0.7,
}
CACHE_ROWS = 2_000_000  # beyond so many keys an index is larger than a processor's cache
MEMORY = 6 << 30  # bytes of all tables that are held at once
Keep = Callable[[dict[str, Any]], None]  # takes what was measured, or a note


def _memory(setup: Setup) -> int:
    return setup.rows * (setup.row_bytes + 64)


class Report:
    """The tables of one run."""

    def __init__(self) -> None:
        self.console = Console(record=True, width=130)
        self.missed = 0
        self.checked = 0
        self.steps = Table(
            "where", "dim", "rows", "optimizer", "ids", "cores", "what", "ours", "other", "Mkeys/s"
        )
        for name in ("ratio", "target"):
            self.steps.add_column(name, justify="right")
        self.maps = Table("what", "dim", "rows", "ids", "ours", "other", "Mkeys/s", "ratio", "target")
        self.notes: list[str] = []

    def verdict(self, ratio: float, target: float | None) -> str:
        """What is said of a ratio that should be at least the target."""
        if target is None:
            return ""
        self.checked += 1
        if ratio >= target:
            return f"≥ {target:g}"
        self.missed += 1
        return f"MISSED {target:g}"

    def note(self, text: str) -> None:
        """A line below the tables, once."""
        if text not in self.notes:
            self.notes.append(text)

    def compare(self, runs: list[dict[str, Any]], ours: str, other: str) -> None:
        """The rows of one pair of contenders, from what both measured of one table in one place."""
        times = {(run["contender"], run["skewed"], run["cores"]): run["times"] for run in runs}
        for skewed, cores in sorted({key[1:] for key in times}, key=lambda key: (not key[0], key[1])):
            if (ours, skewed, cores) not in times or (other, skewed, cores) not in times:
                continue
            for what in ("pull", "step"):
                pair = [
                    [pull + (push if what == "step" else 0.0) for pull, push in times[name, skewed, cores]]
                    for name in (ours, other)
                ]
                ratio = statistics.median(b / a for a, b in zip(*pair, strict=True))
                verdict = self.verdict(ratio, TARGETS.get((other, what)))
                speeds = [f"{BATCH / statistics.median(times) / 1e6:.2f}" for times in pair]
                ids = "skewed" if skewed else "uniform"
                setup = runs[0]
                which = [str(setup["dim"]), f"{setup['rows']:,}", setup["optimizer"], ids, str(cores), what]
                name = other if ours == "ours" else f"{other} ({ours})"
                where = setup["where"]
                self.steps.add_row(where, *which, speeds[0], name, speeds[1], f"{ratio:.2f}", verdict)

    def add(self, records: list[dict[str, Any]]) -> None:
        """All that was measured, in the order of time."""
        tables: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for record in records:
            if "note" in record:
                self.note(record["note"])
            elif "contender" in record:
                key = tuple(record[name] for name in ("where", "dim", "rows", "optimizer"))
                tables.setdefault(key, []).append(record)
            else:
                self.compare_maps(record)
        for key in sorted(tables, key=lambda key: (key[0] != "loopback", key[2], key[1], key[3])):
            runs = tables[key]
            names = list(dict.fromkeys(run["contender"] for run in runs))
            for other in names:
                if not other.startswith("ours"):
                    for ours in ("ours", "ours, array"):
                        self.compare(runs, ours, other)
            self.compare(runs, "ours", "ours, TCP")
            self.compare(runs, "ours", "ours, TLS")
            self.compare(runs, "ours, dram_pmem", "ours")

    def compare_maps(self, line: dict[str, Any]) -> None:
        """The rows of one line of maps.cc."""
        if line["what"] == "bytes":
            self.note(
                f"The index takes {line['bytes_a_key']} bytes a key at {line['rows']:,} keys (target: ≤ 24)."
            )
            self.checked += 1
            self.missed += line["bytes_a_key"] > 24
            return
        if line["what"] == "touch":
            self.note(
                f"Touching {line['pages']} fresh pages of 2 MiB, with nothing in between: a page takes "
                f"{line['median_ms']:.2f} ms of processor time (median), the longest took "
                f"{line['longest_ms']:.2f} ms."
            )
            return
        if line["what"] == "insert":
            self.note(
                f"Inserting {line['rows']:,} keys into {line['name']}: {line['speed']:.2f} Mkeys/s, the "
                f"longest 64 insertions took {line['stall_ms']:.2f} ms of processor time"
                + (" (target: ≤ 3)" if line["name"] == "ours" else "")
                + f", of those without a page fault {line['stall_without_fault_ms']:.2f} ms."
            )
            self.checked += line["name"] == "ours"
            self.missed += line["name"] == "ours" and line["stall_ms"] > 3
            return
        ours = line["speeds"].pop("ours")
        for name, speeds in line["speeds"].items():
            ratio = statistics.median(a / b for a, b in zip(ours, speeds, strict=True))
            target = MAP_TARGETS.get((line["what"], name))
            if line["what"] == "lookup" and line["rows"] < CACHE_ROWS:
                target = None
            if line["what"] == "pull" and line["dim"] != 64:
                target = None
            verdict = self.verdict(ratio, target)
            dim = str(line["dim"] or "")
            which = [line["what"], dim, f"{line['rows']:,}", line["ids"], f"{statistics.median(ours):.1f}"]
            self.maps.add_row(*which, name, f"{statistics.median(speeds):.1f}", f"{ratio:.2f}", verdict)

    def print(self) -> None:
        """Show it all."""
        self.console.print(self.steps, self.maps, sep="\n")
        for note in self.notes:
            self.console.print(note, highlight=False, soft_wrap=True)
        self.console.print(f"{self.missed} of {self.checked} targets are missed.", highlight=False)


def _measure(started: list[Contender], rows: int, cores: list[int], rounds: int, folder: Path) -> None:
    file = folder / "ids"
    for skewed in (True, False):
        for count in cores:
            for contender in started:
                contender.pin(count)
            for number in range(rounds):
                contenders.write_ids(file, rows, skewed, number)
                for contender in started:
                    contender.times.setdefault((skewed, count), []).extend(contender.measure(file))


def _compare(
    keep: Keep,
    where: str,
    setup: Setup,
    wanted: Sequence[partial[Contender]],
    cores: list[int],
    rounds: int,
    folder: Path,
) -> None:
    """Measure contenders in turn, all at once or, where memory does not hold all their tables, one by one."""
    made: list[Contender] = []
    for make in wanted:
        try:
            made.append(make())
        except Missing as missing:
            keep({"note": f"{make.func.__name__}: {missing}."})
    together = len(made) * _memory(setup) <= MEMORY
    if not together:
        keep(
            {
                "note": f"Dim {setup.dim}, {setup.rows:,} rows, {setup.optimizer}: the tables do not fit "
                "beside each other; contenders ran one after the other, and what else the machine did is in "
                "the ratio."
            }
        )
    for group in [made] if together else [[one] for one in made]:
        with ExitStack() as stack:
            started = []
            for contender in group:
                stack.enter_context(contender)
                try:
                    contender.start()
                    started.append(contender)
                except Missing as missing:
                    keep({"note": f"{contender.name}, dim {setup.dim}, {setup.optimizer}: {missing}."})
            try:
                _measure(started, setup.rows, cores, rounds, folder)
            except Missing as missing:
                table = f"dim {setup.dim}, {setup.rows:,} rows, {setup.optimizer}"
                keep({"note": f"{where}, {table}: {missing}."})
    for contender in made:
        for (skewed, count), times in contender.times.items():
            run = {"contender": contender.name, "skewed": skewed, "cores": count, "times": times}
            keep({"where": where, **vars(setup), **run})


def _grid(options: argparse.Namespace) -> Iterator[Setup]:
    dims, optimizers = options.dim or (9, 16, 64), options.optimizer or ("adagrad", "adam")
    for rows, dim, optimizer in itertools.product(options.rows or (1_000_000, 10_000_000), dims, optimizers):
        yield Setup(dim, rows, optimizer)


def _steps(keep: Keep, options: argparse.Namespace) -> None:
    cores = list(range(1, min(2, os.cpu_count() or 1) + 1))
    rounds = options.rounds
    with tempfile.TemporaryDirectory() as folder:
        for setup in _grid(options):
            loopback = [
                partial(contenders.ours, setup, "loopback"),
                partial(contenders.openembedding, setup),
                partial(contenders.sockets, setup),
                partial(contenders.ours, setup, "loopback", share=False),
                partial(contenders.ours, setup, "loopback", tls="on"),
            ]
            if options.only in (None, "tiers"):
                with tempfile.TemporaryDirectory(dir=options.directory) as pools:
                    tiers = [
                        partial(contenders.ours, setup, "loopback"),
                        partial(contenders.ours, setup, "loopback", pools=Path(pools)),
                    ]
                    _compare(keep, "loopback", setup, tiers, cores, rounds, Path(folder))
            if options.only in (None, "loopback"):
                _compare(keep, "loopback", setup, loopback, cores, rounds, Path(folder))
            if options.only not in (None, "in-process"):
                continue
            local = [
                partial(contenders.ours, setup, "in process"),
                partial(contenders.ours, setup, "in process", "array"),
                partial(contenders.fbgemm, setup),
                partial(contenders.tfra, setup),
            ]
            if setup.optimizer == "adagrad":
                local.append(partial(contenders.fbgemm, setup, rowwise=True))
            _compare(keep, "in process", setup, local, cores, rounds, Path(folder))


def _maps(keep: Keep, options: argparse.Namespace) -> None:
    try:
        program = peers.maps()
    except Missing as missing:
        keep({"note": f"Maps and the gather: {missing}."})
        return
    runs = [(1_000_000, 9), (1_000_000, 64), (10_000_000, 9), (10_000_000, 16)]
    if options.rows and options.dim:
        runs = list(itertools.product(options.rows, options.dim))
    for rows, dim in runs:
        words = [program, str(rows), str(dim), str(options.rounds + 1)]
        ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        for line in ran.stdout.splitlines():
            keep(json.loads(line))
        if ran.returncode != 0:
            raise SystemExit(f"error: maps, {rows:,} rows, dim {dim}: ended with status {ran.returncode}")


def _run(keep: Keep, options: argparse.Namespace) -> None:
    if options.only != "maps":
        _steps(keep, options)
    if options.only in (None, "maps"):
        _maps(keep, options)


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("loopback", "tiers", "in-process", "maps"), help="a part of it")
    parser.add_argument("--dim", type=int, action="append", help="of tables; may be given again")
    parser.add_argument("--rows", type=int, action="append", help="of tables; may be given again")
    parser.add_argument("--optimizer", action="append", help="may be given again")
    parser.add_argument("--rounds", type=int, default=4, help="in which contenders take turns")
    parser.add_argument(
        "--directory",
        default="/dev/shm",  # noqa: S108 (memory is what it is for)
        help="for the pools of tiers; DAX maps huge pages, and so does mount -t tmpfs -o huge=always",
    )
    parser.add_argument("--keep", type=Path, help="append what is measured to this file, a JSON line each")
    parser.add_argument("--report", type=Path, help="print what such a file has, and measure nothing")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/engine.md")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(record) + "\n")

    if options.report:
        records = [json.loads(line) for line in options.report.read_text().splitlines()]
    else:
        _run(keep, options)
    report = Report()
    report.add(records)
    report.print()
    if options.save:
        text = header("The engine beside its peers") + f"```\n{report.console.export_text()}```\n"
        (RESULTS / "engine.md").write_text(text)


if __name__ == "__main__":
    main()
