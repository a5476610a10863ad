"""Processes of this machine, as children of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Host
from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs.backends import Process, Refused, Runner, Stopped, endpoint
from provision.jobs.backends.containers import last_line
from provision.jobs.environments import directory as environments_directory
from provision.jobs.script_files import ScriptFiles
from provision.jobs.store import Job, ProcessSpec, ProcessState
from provision.node import environments, jobscript, process
from provision.node.command import CommandError, System
from provision.node.state import State


class LocalRunner(Runner):
    """On this machine; processes end with their launcher."""

    ending = ("--exit-with-parent",)

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.own_python = sys.executable
        if Path(host.runtime.venv) == Path(sys.prefix):
            self.python = sys.executable

    def directory(self, job: Job) -> Path:
        """See ``Runner``."""
        return job.directory

    def environments(self, state_dir: Path) -> str:
        """See ``Runner``."""
        return str(environments_directory(state_dir))

    def sent(self, job: Job, path: Path, folder: str = "") -> Path:
        """See ``Runner``."""
        return path

    def cpus(self, state: State | None) -> int:
        """See ``Runner``."""
        return os.cpu_count() or 1

    def dram(self, state: State | None) -> int:
        """See ``Runner``."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def check(self, argv: Sequence[str], seconds: int) -> str:
        """See ``Runner``."""
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"it could not be checked: {error}"
        return last_line(done) if done.returncode else ""

    def deliver(
        self, files: ScriptFiles | None, environment: dict[str, object], stop: StopRequest
    ) -> tuple[bool, bool]:
        """See ``Runner``; the files are where they were."""
        try:
            made = bool(environment) and jobscript.make_environment(
                System(), environment, is_wanted=lambda: not stop.count
            )
        except CommandError as error:
            raise TrainingError(f"--script: {error}; nothing was started") from None
        return False, made


class Child(Process):
    """A process of this job that runs under this supervisor."""

    supervised = True

    def __init__(self, job: Job, spec: ProcessSpec) -> None:
        self.spec = spec
        self.log = job.log(spec.name)
        self.ready_file = job.ready_file(spec.name)
        self._log_begin = 0  # where this run's lines begin in the log file
        self._popen: subprocess.Popen[bytes] | None = None
        self._started = 0

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], stop: StopRequest, *, fresh: bool = True
    ) -> None:
        """See ``Process``; also starts it anew once it has ended."""
        self._close()
        self.ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            try:
                if self.spec.pools:
                    Path(self.spec.pools).parent.mkdir(mode=0o700, exist_ok=True)
                self._popen = subprocess.Popen(
                    # A link to an environment may lead to another one while the process runs.
                    [environments.resolve(System(), argv[0]), *argv[1:]],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                )
            except OSError as error:
                raise Refused(
                    f"{self.spec.name} on {self.spec.host}: {error.filename}: {error.strerror}"
                ) from None
        self.pid = self._popen.pid
        self._started = process.start_time(self.pid)

    def poll(self) -> int | None:
        """See ``Process``."""
        return None if self._popen is None else self._popen.poll()

    def state(self) -> ProcessState | None:
        """See ``Process``."""
        if self._popen is None:
            return None
        return self.spec.state(
            pid=self.pid, started=self._started, endpoint=self.endpoint, exit_code=self.poll()
        )

    def end(self, seconds: float) -> None:
        """See ``Process``; it has ended when this returns."""
        if self._popen is None or self._popen.stdin is None or self._popen.stdin.closed:
            return
        self.send(signal.SIGTERM)
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what a process that was killed has left
        self._close()

    def _close(self) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            self._popen.stdin.close()

    def send(self, number: int) -> None:
        """See ``Process``; after SIGKILL it has ended when this returns.

        Until it is waited for, no other process has its pid.
        """
        if self._popen is None or self._popen.poll() is not None:
            return
        self._popen.send_signal(number)
        if number == signal.SIGKILL:
            self._popen.wait()

    def how_it_ended(self) -> str:
        """In words: the signal or exit status, and its last error line."""
        code = self.poll()
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

    def _last_lines(self) -> tuple[str, str]:
        """What its last ``error: …`` line of this run says, and its last line of any kind."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_begin, self.log.stat().st_size - 65536))
                lines = [
                    line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
                ]
        except OSError:
            return "", ""
        errors = [line for line in lines if line.lower().startswith("error:")]
        return (errors or [""])[-1].removeprefix("error:").strip(), (lines or [""])[-1]

    def wait_ready(self, stop: StopRequest) -> dict[str, Any]:
        """See ``Process``: the contents of its ready file."""
        seconds = self.spec.start_timeout
        deadline = time.monotonic() + seconds
        while (text := _read(self.ready_file)) is None:
            if self.poll() is not None:
                raise Refused(f"{self.label} did not start: it {self.how_it_ended()}; its log: {self.log}")
            if time.monotonic() > deadline:
                error, last = self._last_lines()
                last = error or last
                replica = self.spec.role == "replica"
                setting = "--start-timeout" if replica else "parameter_server_start_timeout"
                raise Refused(
                    f"{self.label} was not ready after {seconds} s"
                    + (f"; its last line: {last}" if last else "")
                    + f"; if it needs longer, raise {setting}"
                    + f"; its log: {self.log}"
                )
            if stop.wait(TICK):
                raise Stopped
        try:
            ready: dict[str, Any] = json.loads(text)
            self.endpoint = endpoint("127.0.0.1", str(ready["host"]), int(ready["port"]))
        except (ValueError, KeyError, TypeError):
            raise Refused(f"{self.label}: {self.ready_file} has no host and port") from None
        return ready


def _read(path: Path) -> str | None:
    """The file's text; None if it is missing (a server removes its ready file when it ends)."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
