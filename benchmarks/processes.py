"""Server and worker processes for the training benchmarks, with their peak memory."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Ended:
    """A process that ended: status, output, and the most memory it ever had resident, in bytes."""

    status: int
    output: str
    peak: int


class Server:
    """`python -m oe_runtime.server` on loopback; `peak` is its peak resident memory once it ended."""

    def __init__(self, directory: Path, storage: str, *flags: str) -> None:
        directory.mkdir(parents=True)
        ready = directory / "ready.json"
        command = [sys.executable, "-m", "oe_runtime.server", "--host", "127.0.0.1", "--port", "0"]
        command += ["--storage", storage, "--ready-file", str(ready), "--exit-with-parent", *flags]
        if storage != "dram":
            command += ["--storage-path", str(directory / "storage")]
            (directory / "storage").mkdir()
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log)
        self.peak = 0
        deadline = time.monotonic() + 60
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: a server did not start: {(directory / 'log').read_text()}")
            time.sleep(0.05)
        self.endpoint = f"127.0.0.1:{json.loads(ready.read_text())['port']}"

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the server and note its peak memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.peak = _wait(self._process)[1]
        self._log.close()


@contextlib.contextmanager
def server(storage: str, base: Path, *flags: str) -> Iterator[Server]:
    """A server whose files lie in a fresh directory under `base`; `flags` are more of its command line's."""
    with tempfile.TemporaryDirectory(dir=base) as directory:
        running = Server(Path(directory) / "server", storage, *flags)
        try:
            yield running
        finally:
            running.stop()


def run(command: Sequence[str]) -> Ended:
    """Run a command to its end, output captured; stderr passes through."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    status, peak = _wait(process)
    process.stdout.close()
    return Ended(status, output, peak)


def _wait(process: subprocess.Popen) -> tuple[int, int]:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024


def machine() -> str:
    """`8 × Intel Xeon …, 24 GiB, Linux 6.1`."""
    model = "unknown processor"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} × {model}, {memory:.0f} GiB, Linux {platform.release()}"


def measured() -> dict[str, Any]:
    """When, and how busy the machine was: for a line of a file of measurements."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return {"day": now, "load": round(os.getloadavg()[0], 1)}


def header(title: str) -> str:
    """Title, date, machine and the command that made the table, in Markdown."""
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"# {title}\n\n{day}, {machine()}\n\n    {command}\n\n"


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


def lines_of(parts: Path) -> list[dict[str, Any]]:
    """What earlier runs appended to a file, an object of JSON a line. Exits if there is nothing."""
    lines = parts.read_text().splitlines() if parts.is_file() else []
    if not lines:
        sys.exit(f"{parts}: nothing was measured so far; run it without --report first")
    return [json.loads(line) for line in lines]


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.2f}"
