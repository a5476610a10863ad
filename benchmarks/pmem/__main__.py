"""Tiers on persistent memory: by the published figures of Optane, or files in memory as they are.

    python benchmarks/pmem [--only tiers checkpoints loopback recovery] [--save]

Beside each other: tables in DRAM, in pools with and without a cache of 2 % of the rows, and Ori-Cache,
what the OpenEmbedding paper compares itself with; what checkpoints cost; recovery beside loading a
checkpoint. There is no Optane here: pools are files in memory, flushed as persistent memory is, and
"1 DIMM" means that reads, writes, flushes and fences are charged what they take there by the model that
model.h states. Builds the programs beside this file first; each run takes below four minutes.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from processes import AS_PMEM, PROGRAMS, build
from reporting import RESULTS, command, stamp, table

PAGE = RESULTS / "pmem.md"
ROWS = "1000000"
TIERS = (
    "dim | threads | model | checkpoint every | tier | pull | upkeep | push | Mkeys/s | step of dram "
    "| hidden of dram | storage of dram | unique keys missed"
)


@dataclass(frozen=True)
class Section:
    """A table: its heading, what is said of it, its columns, and the runs that print its lines."""

    title: str
    text: str
    columns: str
    program: str
    runs: tuple[str, ...]


SECTIONS = {
    "tiers": Section(
        "The lines of the paper",
        "10⁶ rows, Adagrad, a cache of 2 % of the rows' bytes, batches of 4096 × 26 skewed ids (0.05 % of "
        "the rows take 85.7 %, 1 % take 95.7 %). Means in ms a batch; keys count ids. A step is the "
        "client's part, pull, upkeep and push in one process; *hidden* is without the upkeep, which servers"
        " do after their reply; *storage* is pull and push alone. The paper's DRAM, PMem-OE and Ori-Cache "
        "take 1 / 1.01 / 1.24 of the time on 4 GPUs and 0.35 / 0.38 / 0.80 on 16, PMem-Hash without a cache"
        " 2.16 and 1.46.",
        TIERS,
        "pmem_tiers",
        (
            f"{ROWS} 64 1 0 300",
            f"{ROWS} 16 1 0 300",
            f"{ROWS} 9 1 0 300",
            f"{ROWS} 64 1 1 300",
            f"{ROWS} 64 1 6 300",
            f"{ROWS} 64 2 6 300",
            f"{ROWS} 9 1 6 300",
        ),
    ),
    "tiers-checkpoints": Section(
        "The same with a checkpoint every 1,000 batches",
        "The paper's DRAM-PS, PMem-OE and Ori-Cache, with a checkpoint every 20 minutes, take 1 / 0.93 / "
        "1.22 of the time on 4 GPUs and 0.39 / 0.36 / 0.79 on 16. Here `dram` makes none, since its rows "
        "would go to files.",
        TIERS,
        "pmem_tiers",
        (f"{ROWS} 64 1 6 2000 1000",),
    ),
    "checkpoints": Section(
        "A checkpoint every 1,000 batches beside none",
        "Turns of 1,000 batches of one table, with a checkpoint at their beginning and without; ms a batch "
        "(the mean of the medians of every ten, of the median turn), then how much longer the turns with a "
        "checkpoint take, pair by pair (median and its interval of 95 %), and how much more processor time of"
        " all threads, the one that makes checkpoints durable included. The client's part, the same in both, "
        "is in all of them. With a fifth of the rows, turns are a fifth of the batches, and there are more of"
        " them. *Bare copies* is what turns without a checkpoint take longer when each push is followed by "
        "copies of as many rows as it would copy after one, from rows just read to others one after the "
        "other, and nothing else. Pulls of a whole batch, all of them, p50 / p99 / p99.9 / longest in ms, "
        "and how long the thread that called the longest one with checkpoints was on a processor in it.",
        "tier | rows | dim | threads | model | without | with | slower | more processor time "
        "| bare copies: slower | bare copies: more processor time | pairs "
        "| pulls without | pulls with | longest with / p99 without | longest with: on the processor "
        "| longest Checkpoint() | durable after ms",
        "pmem_checkpoints",
        (
            "dram_pmem 200000 64 1 0 200 90",
            "dram_pmem 200000 64 2 0 200 90",
            f"dram_pmem {ROWS} 64 1 0 1000 200",
            f"dram_pmem {ROWS} 64 2 0 1000 200",
        ),
    ),
    "loopback": Section(
        "What a checkpoint costs a step over loopback",
        "The same turns as a user has them: a client pulls and pushes at a server over loopback (both in one "
        "process, with as many threads each); ms a step, pulls p50 / p99 / longest in ms.",
        "tier | rows | dim | threads | without | with | slower | more processor time | pairs "
        "| pulls without | pulls with | longest with / p99 without",
        "pmem_loopback",
        ("dram_pmem 200000 64 1 200 90", f"dram_pmem {ROWS} 64 1 1000 200"),
    ),
    "recovery": Section(
        "Recovery of 10⁷ rows beside loading an exported checkpoint",
        "dim 9, Adagrad; pool and file in memory. DRAM is what the process itself holds (RssAnon) a row, "
        "then its index and its cache alone.",
        "what | seconds | Mrows/s | faster than loading | DRAM B a row | index B a row | cache B a row",
        "pmem_recovery",
        ("10000000 9 3",),
    ),
}


def _table(section: Section, runs: Sequence[str], directory: str, through: list[str]) -> str:
    """A section with the lines that its program prints, which are rows of Markdown."""
    head = f"## {section.title}\n\n{stamp()}\n\n    {command()}\n\n{section.text}\n"
    rows = []
    for run in runs:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            ran = subprocess.run(
                [*through, str(PROGRAMS / section.program), folder, *run.split()],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env={**os.environ, **AS_PMEM},
            )
        print(ran.stdout, end="", file=sys.stderr, flush=True)
        rows += [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in ran.stdout.splitlines()]
    text = f"{head}\n{table([name.strip() for name in section.columns.split('|')], rows)}"
    print(text)
    return text


def _save(tables: dict[str, str]) -> None:
    """Write the result, where sections that were not measured now stay as they are."""
    if PAGE.exists():
        there = {part.partition("\n")[0]: part for part in PAGE.read_text().split("\n## ")[1:]}
        for name, section in SECTIONS.items():
            if section.title in there:
                tables.setdefault(name, f"## {there[section.title].rstrip()}\n")
    PAGE.write_text(
        "# Tiers on persistent memory\n\n"
        "Not Optane: pools are files in memory, flushed as persistent memory is. 1 DIMM and 6 DIMM are the "
        "published figures of Optane as `benchmarks/pmem/model.h` states them; *none* is without them.\n\n"
        + "\n".join(tables[name] for name in SECTIONS if name in tables)
    )


def main() -> None:
    """Run, print, and with --save keep the result."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/pmem",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some of it")
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="WORDS",
        help="each run's arguments, instead of the section's own",
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/pmem.md")
    parser.add_argument("--through", default="", help="a command to run each measurement with, as flock FILE")
    parser.add_argument(
        "--directory",
        default="/dev/shm",  # noqa: S108 (memory is what it is for)
        help="for the pools; DAX maps huge pages, and so does mount -t tmpfs -o huge=always tmpfs DIRECTORY",
    )
    options = parser.parse_args()
    build(*sorted({section.program for section in SECTIONS.values()}))
    tables = {
        name: _table(
            SECTIONS[name],
            options.runs or SECTIONS[name].runs,
            options.directory,
            shlex.split(options.through),
        )
        for name in options.only
    }
    if options.save:
        _save(tables)


if __name__ == "__main__":
    main()
