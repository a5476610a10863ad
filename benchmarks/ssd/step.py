"""Steps of a table with rows beyond its memory: dram_ssd, dram_pmem on a directory, dram, RocksDB.

    python benchmarks/ssd/step.py [--directory DIRECTORY] [--rows 2000000] [--dim 64 ...] [--only NAME ...]

As root, where control groups can limit memory. A step pulls and pushes a batch of 4,096 x 26 skewed ids. Each
contender has a process of its own, with the same cache, and they take turns: a round is ten steps of each.
The table has medians, and medians of each round's ratio. dram_ssd and dram_pmem have the same limit of
memory. RocksDB has none, since its compactions need more, but it reads and writes past the page cache. Its
block cache is as large as the cache and the index of dram_ssd together, or it has a cache of rows in front
that is as large as the cache of dram_ssd. It logs nothing. The bound of dram_ssd is the step of dram, or the
time that fio takes in the same round for as many reads, with as many threads, where that is longer. Needs fio
and librocksdb-dev.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import device
from processes import PROGRAMS, ROOT, build, compile_peer
from reporting import RESULTS, header, table

PROGRAM = PROGRAMS / "ssd_step"
PEER = ROOT / "benchmarks" / "peers" / "rocksdb_step.cc"
STORAGES = ("dram_ssd", "dram_pmem", "dram")
LIMITED = ("dram_ssd", "dram_pmem")
# RocksDB: threads that share the MultiGet of a batch, and whether a cache of rows is in front.
PEERS = {
    "RocksDB, 1 thread": (1, False),
    "RocksDB, 16 threads": (16, False),
    "RocksDB, 32 threads": (32, False),
    "RocksDB behind a cache of rows, 16 threads": (16, True),
    "RocksDB behind a cache of rows, 32 threads": (32, True),
}
STEPS = 10
LEAST_ROWS = 2000
INDEX = 24  # bytes of DRAM per row
FRAME = 24  # the same per row in the cache of dram_ssd, beside the row
OTHERS = 224 << 20  # the process, and what a batch of new rows takes at once
GROUPS = Path("/sys/fs/cgroup/memory")


class Contender:
    """A process with a table, which runs steps when it is asked to."""

    def __init__(self, name: str, options: argparse.Namespace, dim: int) -> None:
        folder = "ssd_step-" + name.replace(" ", "_").replace(",", "")
        directory = options.directory / folder
        directory.mkdir(exist_ok=True)
        self._directory = directory
        row = 8 * dim
        cache = int(options.rows * (row + FRAME) * options.cached)
        index = options.rows * INDEX
        self.limit = cache + index + OTHERS
        self._group = GROUPS / folder
        argv: list[object] = [PROGRAM, name, directory, cache, options.rows, dim, options.threads]
        if name in PEERS:
            threads, has_rows_cached = PEERS[name]
            rows = int(options.rows * row * options.cached)
            caches = (index, rows) if has_rows_cached else (index + cache, 0)
            argv = [_peer_program(), directory, *caches, options.rows, dim, threads]
        self.process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=self._join if name in LIMITED else None,
        )
        if self._line() != ["ready"]:
            raise SystemExit(f"{name}: ended with status {self.process.wait()}")

    def _join(self) -> None:
        self._group.mkdir(exist_ok=True)
        (self._group / "memory.limit_in_bytes").write_text(str(self.limit))
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def end(self) -> None:
        """End the process, and remove its rows."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self._directory)
        if self._group.exists():
            self._group.rmdir()

    def _line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def run(self) -> list[float]:
        """Milliseconds, processor milliseconds, misses, bytes read and written of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEPS}\n")
        self.process.stdin.flush()
        return [float(word) for word in self._line()]


def _peer_program() -> Path:
    if not Path("/usr/include/rocksdb/db.h").exists():
        raise SystemExit(
            "there is no RocksDB here: apt-get install librocksdb-dev, or name others with --only"
        )
    return compile_peer(PEER, f"-I{ROOT}", "-lrocksdb", "-lpthread")


def _table(runs: dict[str, list[list[float]]]) -> str:
    columns = ["rows in", "ms per step", "× `dram_ssd`", "processor ms", "rows missed", "read", "written"]
    rows = []
    ours = [run[0] for run in runs["dram_ssd"]]
    for storage, found in runs.items():
        wall, processor, misses, read, written = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        ratio = statistics.median(run[0] / beside for run, beside in zip(found, ours, strict=True))
        drive = [f"{size / 2**20:.1f} MiB" for size in (read, written)]
        name = storage if storage in PEERS else f"`{storage}`"
        rows.append([name, f"{wall:.1f}", f"{ratio:.2f}", f"{processor:.0f}", f"{misses:,.0f}", *drive])
    return table(columns, rows)


def _bounds(runs: dict[str, list[list[float]]], alone: list[device.Run]) -> str:
    """What the drive and the cores allow dram_ssd."""
    took, speeds, parts = [], [], []
    for ours, dram, fio in zip(runs["dram_ssd"], runs["dram"], alone, strict=True):
        took.append(ours[2] / fio.rate * 1e3)
        bound = max(dram[0], took[-1])
        speeds.append((dram[0] / ours[0], dram[0] / bound))
        parts.append(bound / ours[0])
    speed, bound = map(statistics.median, zip(*speeds, strict=True))
    rate, cpu = (statistics.median(column) for column in zip(*map(astuple, alone), strict=True))
    return (
        f"fio reads {rate / 1e3:,.0f} k blocks per second at {cpu:.2f} µs of processor time each: a step's "
        f"reads take {statistics.median(took):.1f} ms. `dram_ssd` has {speed:.2f} of `dram`'s speed, the "
        f"bound is {bound:.2f}. It has **{statistics.median(parts):.2f} of its bound**.\n"
    )


def _measure(options: argparse.Namespace, dim: int) -> str:
    """The result for one width of rows."""
    # Ours is what the others are compared with.
    names = dict.fromkeys(("dram_ssd", *options.only))
    contenders = {name: Contender(name, options, dim) for name in names}
    runs: dict[str, list[list[float]]] = {name: [] for name in contenders}
    # The log itself has blocks that were never written, which the file system reads as zeros by itself.
    file = device.file_of(options.directory, options.gib)
    alone: list[device.Run] = []
    for round_ in range(options.rounds + 1):
        for storage, contender in contenders.items():
            found = contender.run()
            if not round_:  # it fills the caches
                continue
            runs[storage].append(found)
            if storage == "dram_ssd" and "dram" in names:
                alone.append(device.fio(file, 1.0, options.threads))
    for contender in contenders.values():
        contender.end()
    about = (
        f"{options.rows:,} rows of {8 * dim} bytes, {options.rows * 8 * dim / 2**20:,.0f} MiB, with "
        f"{options.cached:.0%} of them cached; the memory of a process is limited to "
        f"{contenders['dram_ssd'].limit / 2**20:,.0f} MiB, but not of `dram` and RocksDB. "
        f"{options.rounds} rounds in turns, each of {STEPS} steps of 4,096 × 26 ids, pull and push, on "
        f"{options.threads} threads."
    ).replace("%", " %")
    return "\n\n".join([about, _table(runs), *([_bounds(runs, alone)] if alone else [])])


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/ssd/step.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the drive")  # noqa: S108
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, nargs="+", default=[64], help="of float32, with Adagrad's state")
    parser.add_argument("--cached", type=float, default=0.1, help="part of the rows that the cache holds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1, help="size of the file that fio reads")
    parser.add_argument("--rounds", type=int, default=7)
    everyone = (*STORAGES, *PEERS)
    parser.add_argument("--only", nargs="+", choices=everyone, default=everyone, metavar="NAME")
    parser.add_argument(
        "--save", nargs="?", const="ssd_step", metavar="NAME", help="write benchmarks/results/NAME.md"
    )
    options = parser.parse_args()
    if options.rows < LEAST_ROWS:
        parser.error(f"--rows: found {options.rows}; the ids need {LEAST_ROWS} at least")
    if not shutil.which("fio"):
        raise SystemExit("there is no fio here: apt-get install fio")
    build(PROGRAM.name)
    if any(name in PEERS for name in options.only):
        _peer_program()
    result = "\n\n".join(_measure(options, dim) for dim in options.dim)
    page = header("Steps with rows on a drive") + result
    print(page)
    if options.save:
        (RESULTS / f"{options.save}.md").write_text(page)


if __name__ == "__main__":
    main()
