"""Steps of a table whose rows are larger than its memory: dram_ssd, dram_pmem on a directory, and dram.

    python benchmarks/ssd/step.py [--directory DIRECTORY] [--rows 2000000] [--rounds 7] [--save]

As root, where control groups can limit memory. A step pulls and pushes a batch of 4,096 x 26 skewed ids. Each
storage has a process of its own, with the same cache and the same limit of memory (but dram, which has none),
and they take turns: a round is ten steps of each. The table has medians, and medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import core_programs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "ssd_step.md"
PROGRAM = core_programs.FOLDER / "ssd_step"
STORAGES = ("dram_ssd", "dram_pmem", "dram")
STEPS = 10
INDEX = 24  # bytes of DRAM per row
OTHERS = 224 << 20  # the process, and what a batch of new rows takes at once
GROUPS = Path("/sys/fs/cgroup/memory")


class Contender:
    """A process with a table, which runs steps when it is asked to."""

    def __init__(self, storage: str, options: argparse.Namespace) -> None:
        directory = options.directory / f"ssd_step-{storage}"
        directory.mkdir(exist_ok=True)
        row = 8 * options.dim
        cache = int(options.rows * row * options.cached)
        self.limit = cache + options.rows * INDEX + OTHERS
        self._group = GROUPS / f"ssd_step-{storage}"
        argv = [PROGRAM, storage, directory, cache, options.rows, options.dim, options.threads]
        self.process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=None if storage == "dram" else self._join,
        )
        if self._line() != ["ready"]:
            raise SystemExit(f"{storage}: ended with status {self.process.wait()}")

    def _join(self) -> None:
        self._group.mkdir(exist_ok=True)
        (self._group / "memory.limit_in_bytes").write_text(str(self.limit))
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def _line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def run(self) -> list[float]:
        """Milliseconds, processor milliseconds, misses, bytes read and written of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEPS}\n")
        self.process.stdin.flush()
        return [float(word) for word in self._line()]


def _table(runs: dict[str, list[list[float]]]) -> str:
    lines = [
        "| storage | ms per step | × dram_ssd | processor ms | rows missed | read | written |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    ours = [run[0] for run in runs["dram_ssd"]]
    for storage, found in runs.items():
        wall, processor, misses, read, written = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        ratio = statistics.median(run[0] / beside for run, beside in zip(found, ours, strict=True))
        drive = f"{read / 2**20:.1f} MiB | {written / 2**20:.1f} MiB" if storage == "dram_ssd" else "– | –"
        lines.append(
            f"| `{storage}` | {wall:.1f} | {ratio:.2f} | {processor:.0f} | {misses:,.0f} | {drive} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/ssd/step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive")  # noqa: S108
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64, help="of float32, with Adagrad's state")
    parser.add_argument("--cached", type=float, default=0.1, help="part of the rows that the cache holds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/ssd_step.md")
    options = parser.parse_args()
    core_programs.build(PROGRAM.name)
    contenders = {storage: Contender(storage, options) for storage in STORAGES}
    runs: dict[str, list[list[float]]] = {storage: [] for storage in STORAGES}
    for round_ in range(options.rounds + 1):
        for storage, contender in contenders.items():
            found = contender.run()
            if round_:  # the first fills the caches
                runs[storage].append(found)
    where = (
        f"{core_programs.machine()}, load {os.getloadavg()[0]:.1f}: "
        f"`python benchmarks/ssd/step.py {shlex.join(sys.argv[1:])}`"
    )
    row = 8 * options.dim
    about = (
        f"{options.rows:,} rows of {row} bytes, {options.rows * row / 2**20:,.0f} MiB, with "
        f"{options.cached:.0%} of them cached; the memory of a process is limited to "
        f"{contenders['dram_ssd'].limit / 2**20:,.0f} MiB, but not of `dram`. {options.rounds} rounds in "
        f"turns, each of {STEPS} steps of 4,096 × 26 ids, pull and push, on {options.threads} threads."
    ).replace("%", " %")
    table = _table(runs)
    print(where, about, table, sep="\n\n")
    if options.save:
        RESULTS.write_text(f"# Steps with rows on a drive\n\n{where}\n\n{about}\n\n{table}")


if __name__ == "__main__":
    main()
