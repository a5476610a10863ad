"""What the trainer's tests share: small runs, their events, server processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_processes import held_port

# Small in every dimension: 9 steps an epoch of 400 training rows each, tables of at most 301 rows.
SMALL = [
    "--max-cardinality",
    "300",
    "--dim",
    "4",
    "--hidden",
    "16,8",
    "--batch-size",
    "400",
    "--log-every",
    "1",
]
DATA = ["--data", "generate:4000:1"]


def events(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The run's events, all or of one kind."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [e for e in found if kind is None or e["event"] == kind]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step → (loss, AUC), the last word on each."""
    return {e["step"]: (e["loss"], e["auc"]) for e in events(run_dir, "step")}


def wait_for(condition: Callable[[], object], process: subprocess.Popen[Any], seconds: float = 90) -> None:
    """Wait until `condition` holds; fails when the process ends before or the time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            said = process.stderr.read() if process.stderr else ""
            raise AssertionError(f"ended with {process.returncode}: {said}")
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


class ServerProcess:
    """`python -m oe_runtime.server` on a port of loopback."""

    def __init__(
        self, directory: Path, index: int = 0, count: int = 1, storage: str = "dram", *flags: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._ready = directory / "ready.json"
        command = [sys.executable, "-m", "oe_runtime.server", "--host", "127.0.0.1"]
        command += ["--port", str(held_port())]
        command += ["--index", str(index), "--count", str(count), "--storage", storage]
        command += ["--storage-path", str(directory)] if storage != "dram" else []
        self._command = [*command, "--ready-file", str(self._ready), "--exit-with-parent", *flags]
        self._start()

    def _start(self) -> None:
        self._ready.unlink(missing_ok=True)
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(self._command, stdin=pipe, stderr=nowhere)
        wait_for(self._ready.exists, self.process)
        self.endpoint = f"127.0.0.1:{json.loads(self._ready.read_text())['port']}"

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """After `kill`, at the same address."""
        self._start()

    def stop(self) -> None:
        """End it as its parent's end would; harmless when it was killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
