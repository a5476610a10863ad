"""The tables of benchmarks: where and how they were measured, and the lines of measurements behind them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MISSED = 3  # exit status of a benchmark that ran, and missed a target


def processor() -> str:
    """`AMD EPYC (family 26, model 2; L1d 48 KiB, L2 1,024 KiB, L3 32,768 KiB)`; caches as one core sees them.

    Virtual machines have names that many processors share, so family and model are there, too.
    """
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    caches = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            caches.append(f"L{level}{'d' * (kind == 'Data')} {int(size.rstrip('K')):,} KiB")
    family = [f"family {facts['cpu family']}, model {facts['model']}"] if "cpu family" in facts else []
    details = "; ".join([*family, *([", ".join(caches)] if caches else [])])
    return facts.get("model name", platform.machine()) + (f" ({details})" if details else "")


def machine() -> str:
    """`2 × AMD EPYC (…), 24 GiB, Linux 6.1`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} × {processor()}, {memory:.0f} GiB, Linux {platform.release()}"


def measured() -> dict[str, Any]:
    """When, where, and how busy the machine was: for a line of a file of measurements."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"day": now, "load": round(os.getloadavg()[0], 1), "processor": processor()}


def when(*lines: dict[str, Any]) -> str:
    """`2026-11-23 02:52, load 1.1 to 2.0` of the lines of a cell, and their processor if it is another one.

    Lines of before 2026-11-28 do not name it.
    """
    loads = sorted(line["load"] for line in lines)
    load = f"{loads[0]:.1f}" + (f" to {loads[-1]:.1f}" if len(lines) > 1 else "")
    others = sorted({line["processor"] for line in lines if "processor" in line} - {processor()})
    return ", ".join([lines[-1]["day"], f"load {load}", *others])


def stamp(*more: str) -> str:
    """When, and on which machine; ``more``: other facts that the figures depend on."""
    now = measured()
    return ", ".join([f"{now['day']} UTC", machine(), *more, f"load {now['load']:.1f}"])


def command() -> str:
    """The command that this program was started with."""
    program = os.path.relpath(sys.argv[0])
    return " ".join(["python", *program.split(), *(shlex.quote(word) for word in sys.argv[1:])])


def header(title: str, *more: str) -> str:
    """Title, date, machine and the command that made the table, in Markdown."""
    return f"# {title}\n\n{stamp(*more)}\n\n    {command()}\n\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first is left-aligned, the others right-aligned."""
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(aligned) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(columns), rule, *(line(r) for r in rows)]) + "\n"


def append(parts: Path, line: dict[str, Any]) -> None:
    """Add a measurement to a file of JSON lines, from which a report is made, and show it."""
    text = json.dumps(line)
    print(text, file=sys.stderr, flush=True)
    with parts.open("a") as file:
        file.write(text + "\n")


def lines_of(parts: Path) -> list[dict[str, Any]]:
    """What earlier runs appended to a file, an object of JSON per line. Exits if there is nothing."""
    lines = parts.read_text().splitlines() if parts.is_file() else []
    if not lines:
        sys.exit(f"{parts}: nothing was measured so far; run it without --report first")
    return [json.loads(line) for line in lines]


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.2f}"
