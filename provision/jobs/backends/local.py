"""A process of this machine as a child of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs.placement import endpoint
from provision.jobs.store import Job, ProcessSpec, ProcessState
from provision.node import environments, process
from provision.node.command import System


@dataclass
class Child:
    """A process of this job that runs under this supervisor."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    started: int
    log: Path
    log_begin: int  # where this run's lines begin in the log file
    endpoint: str = ""
    restarts: int = 0  # in this run

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; negative for a signal."""
        return self.popen.poll()

    def state(self) -> ProcessState:
        """For ``state.json``."""
        return self.spec.state(
            pid=self.pid, started=self.started, endpoint=self.endpoint, exit_code=self.poll()
        )

    def end(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after ``seconds``; the process has ended when this returns."""
        self.send(signal.SIGTERM)
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.popen.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)  # what a process that was killed has left
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    @property
    def label(self) -> str:
        """Name, host and pid, for messages."""
        return f"{self.spec.name} on {self.spec.host} (pid {self.popen.pid})"

    def send(self, number: int) -> None:
        """Signal the process; until it is waited for, no other process has its pid."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def how_it_ended(self) -> str:
        """In words: the signal or exit status, and its last error line."""
        code = self.popen.poll()
        if code is None:
            return "still runs"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = "unknown"
            return f"was killed by signal {-code} ({name})"
        error, last = self._last_lines()
        how = f"ended with exit status {code}"
        if error:
            return f"{how}: {error}"
        return f"{how} without a reason" + (f"; its last line: {last}" if last else "")

    def error_line(self) -> str:
        """Its last ``error: …`` line of this run, else its last line of any kind."""
        error, last = self._last_lines()
        return error or last

    def _last_lines(self) -> tuple[str, str]:
        """What its last ``error: …`` line of this run says, and its last line of any kind."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_begin, self.log.stat().st_size - 65536))
                lines = [
                    line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
                ]
        except OSError:
            return "", ""
        errors = [line for line in lines if line.lower().startswith("error:")]
        return (errors or [""])[-1].removeprefix("error:").strip(), (lines or [""])[-1]


class Refused(Exception):
    """A process did not start."""


class Stopped(Exception):
    """A stop request before training began."""


def start(job: Job, spec: ProcessSpec, argv: list[str]) -> Child:
    """Start a process; raises Refused."""
    path = job.log(spec.name)
    with path.open("ab") as log:
        begin = log.tell()
        try:
            if spec.pools:
                Path(spec.pools).parent.mkdir(mode=0o700, exist_ok=True)
            popen = subprocess.Popen(
                # A link to an environment may lead to another one while the process runs.
                [environments.resolve(System(), argv[0]), *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
            )
        except OSError as error:
            raise Refused(f"{spec.name} on {spec.host}: {error.filename}: {error.strerror}") from None
    return Child(spec, popen, process.start_time(popen.pid), path, begin)


def wait_ready(child: Child, path: Path, stop: StopRequest) -> dict[str, Any]:
    """Wait for a server's ready file, store its endpoint, return its contents. Raises Refused, Stopped."""
    seconds = child.spec.start_timeout
    deadline = time.monotonic() + seconds
    while (text := _read(path)) is None:
        if child.popen.poll() is not None:
            raise Refused(f"{child.label} did not start: it {child.how_it_ended()}; its log: {child.log}")
        if time.monotonic() > deadline:
            last = child.error_line()
            raise Refused(
                f"{child.label} was not ready after {seconds} s"
                + (f"; its last line: {last}" if last else "")
                + "; if it needs longer, raise parameter_server_start_timeout"
                + f"; its log: {child.log}"
            )
        if stop.wait(TICK):
            raise Stopped
    try:
        ready: dict[str, Any] = json.loads(text)
        child.endpoint = endpoint("127.0.0.1", str(ready["host"]), int(ready["port"]))
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{child.label}: {path} has no host and port") from None
    return ready


def _read(path: Path) -> str | None:
    """The file's text; None if it is missing (a server removes its ready file when it ends)."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
