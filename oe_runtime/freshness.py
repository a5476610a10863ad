"""How old a training step is when answers begin to be of it, in the directory of the run, for its report.

``freshness.jsonl`` has a line per process and up to 5 seconds: the newest step, and of all steps in these
seconds the mean and the most seconds from the end of the step to the first answer that may be of it. Times
are those of two hosts, if the run was trained on another one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

FILE = "freshness.jsonl"
_RUN_FILE = "metrics.jsonl"
_SECONDS = 5.0  # between two lines


def is_run(directory: Path) -> bool:
    """Whether a run writes its events to the directory."""
    return (directory / _RUN_FILE).exists()


class FreshnessLog:
    """The file of one run, to which processes append."""

    def __init__(self) -> None:
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._seconds: list[float] = []  # of steps that are in no line yet
        self._due = 0.0
        self._last: tuple[Path, int] | None = None  # directory and step of the newest of them
        self._said = False
        self._lock = threading.Lock()

    def note(self, run: Path, step: int, seconds: float) -> None:
        """Note that answers are of `step` now, so many seconds after its end."""
        with self._lock:
            self._seconds.append(max(0.0, seconds))
            self._last = run, step
            if time.monotonic() >= self._due:
                self._write()

    def flush(self) -> None:
        """Write what was noted. Says once if it cannot be written."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._last is None:
            return
        (run, step), seconds = self._last, self._seconds
        line = {
            "process": self._process,
            "step": step,
            "steps": len(seconds),
            "seconds": round(sum(seconds) / len(seconds), 4),
            "most": round(max(seconds), 4),
        }
        self._last, self._seconds, self._due = None, [], time.monotonic() + _SECONDS
        try:
            with (run / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._said:
                problem = f"{run / FILE}: cannot be written: {error.strerror}"
                print(f"warning: {problem}; the run's report shows no freshness", file=sys.stderr, flush=True)
            self._said = True


def read(run: Path) -> list[dict[str, Any]]:
    """Return by step, of the processes together, the mean of `seconds` and the most; [] without a file."""
    found: dict[int, list[tuple[float, float]]] = {}
    with contextlib.suppress(OSError), (run / FILE).open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(
                ValueError, TypeError, KeyError, OverflowError
            ):  # a line that a full disk cut, perhaps
                line = json.loads(text)
                seconds, most = float(line["seconds"]), float(line["most"])
                if not math.isfinite(seconds + most):
                    continue
                found.setdefault(int(line["step"]), []).append((seconds, most))
    return [
        {
            "step": step,
            "seconds": sum(seconds for seconds, _ in lines) / len(lines),
            "most": max(most for _, most in lines),
        }
        for step, lines in sorted(found.items())
    ]
