"""Runs the processes of one job on this machine and leaves none behind.

Servers first, then the worker, each in a session of its own with a pipe as standard input: they end by
themselves when the pipe closes, which happens even when this process is killed. Also ``python -m
provision.supervisor JOB_DIR`` in the background, for ``--detach``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from provision.child import TICK, Child, StopRequest
from provision.errors import TrainingError
from provision.jobs import SERVERS, Job, JobSpec, JobState, Phase, ProcessSpec, ProcessState
from provision.metrics import Event, MetricsTail
from provision.node import process


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds, before the next harder measure."""

    ready: float = 60.0  # a server's start
    checkpoint: float = 600.0  # a worker that was told to stop: it writes a checkpoint first
    server: float = 30.0  # a server that was told to stop
    loss: float = 20.0  # a worker whose server died: it says so itself


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``exit_code`` is that of the command."""

    phase: Literal["done", "failed", "interrupted"]
    message: str
    exit_code: int


class Supervisor:
    """One run of one job; ``run`` returns when no process of it is left."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        stop: StopRequest,
        limits: Limits | None = None,
    ) -> None:
        self.job = job
        self.spec: JobSpec = job.spec()
        self.on_event = on_event
        self.stop = stop
        self.limits = limits or Limits()
        self.children: list[Child] = []
        self.last: dict[str, Event] = {}  # kind of event -> the last one of this run
        self.phase: Phase = "starting"

    def run(self, resume: bool = False) -> Outcome:
        """Start everything, wait for the end, stop everything; ``state.json`` says how far it is."""
        outcome = Outcome("failed", "the launcher failed; see its log", 1)
        try:
            outcome = self._run(resume)
        except _Refused as error:
            outcome = Outcome("failed", str(error), 1)
        except _Stopped:
            outcome = Outcome("interrupted", "stopped before training began", 130)
        finally:
            self._stop_all()
            self._write(outcome.phase, outcome.message)
        return outcome

    def _run(self, resume: bool) -> Outcome:
        self._write("starting")
        if not resume:
            self.job.metrics_file.unlink(missing_ok=True)
        self.tail = MetricsTail(self.job.metrics_file)
        servers = [spec for spec in self.spec.processes if spec.role == "parameter_server"]
        for spec in servers:
            self.job.ready_file(spec.name).unlink(missing_ok=True)
            self._start(spec, spec.argv)
        for child in list(self.children):
            self._wait_ready(child)
        endpoints = ",".join(child.endpoint for child in self.children)
        (worker_spec,) = (spec for spec in self.spec.processes if spec.role == "worker")
        argv = [endpoints if word == SERVERS else word for word in worker_spec.argv]
        worker = self._start(worker_spec, [*argv, "--resume"] if resume else argv)
        self._write("running")
        self._emit(
            {"event": "worker", "pid": worker.popen.pid, "name": worker_spec.name, "host": worker_spec.host}
        )
        return self._watch(worker)

    def _watch(self, worker: Child) -> Outcome:
        while worker.popen.poll() is None:
            self._events()
            if self.stop.wait(TICK):
                self._drain(worker)
                return self._ended(worker)
            for child in self.children:
                if child is not worker and child.popen.poll() is not None:
                    return self._server_lost(worker, child)
        return self._ended(worker)

    def _ended(self, worker: Child) -> Outcome:
        self._events()
        code = worker.popen.poll()
        if code == 0:
            return Outcome("done", "training is done", 0)
        dead = next((c for c in self.children if c is not worker and c.popen.poll() is not None), None)
        if dead is not None and code != 130:
            return self._server_lost(worker, dead)
        if code == 130 or self.stop.count:
            saved = self.last.get("interrupted", {})
            if saved.get("path"):
                return Outcome("interrupted", f"stopped at step {saved.get('step')}, which is saved", 130)
            if code == 130:
                return Outcome("interrupted", "stopped before the first step", 130)
            message = f"stopped without a new checkpoint: the worker {worker.how_it_ended()}"
            return Outcome("interrupted", message, 130)
        said = self.last.get("error", {}).get("message")
        how = (
            f"ended with exit status {code}: {said}" if said and code and code > 0 else worker.how_it_ended()
        )
        return Outcome("failed", f"{worker.label} {how}", 1)

    def _server_lost(self, worker: Child, server: Child) -> Outcome:
        self._emit({"event": "server_lost", "name": server.spec.name, "host": server.spec.host})
        deadline = time.monotonic() + self.limits.loss
        while worker.popen.poll() is None and time.monotonic() < deadline and not self.stop.count:
            self._events()
            time.sleep(TICK)
        self._events()
        message = f"{server.label}, listening on {server.endpoint}, {server.how_it_ended()}"
        said = self.last.get("error", {}).get("message")
        if worker.popen.poll() is None:
            message += "; the worker did not notice and was stopped"
            worker.send(signal.SIGKILL)
        elif said:
            message += f"; the worker says: {str(said).split(';')[0]}"
        return Outcome("failed", message, 1)

    def _drain(self, worker: Child) -> None:
        """Tell the worker to finish its step and write a checkpoint; asked again, end it at once."""
        self._write("stopping")
        self._emit({"event": "stopping", "again": "ends it at once, without a checkpoint"})
        asked = self.stop.count
        worker.send(signal.SIGTERM)
        deadline = time.monotonic() + self.limits.checkpoint
        while worker.popen.poll() is None:
            self._events()
            if self.stop.count > asked or time.monotonic() > deadline:
                worker.send(signal.SIGKILL)
                worker.popen.wait()
                return
            time.sleep(TICK)

    def _start(self, spec: ProcessSpec, argv: list[str]) -> Child:
        path = self.job.log(spec.name)
        with path.open("ab") as log:
            begin = log.tell()
            try:
                popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
                )
            except OSError as error:
                raise _Refused(f"{spec.name} on {spec.host}: {argv[0]}: {error.strerror}") from None
        child = Child(spec, popen, process.start_time(popen.pid), path, begin)
        self.children.append(child)
        self._write(self.phase)
        return child

    def _wait_ready(self, child: Child) -> None:
        """Wait for the server's ready file and take its endpoint from it."""
        path = self.job.ready_file(child.spec.name)
        deadline = time.monotonic() + self.limits.ready
        while (text := _read(path)) is None:
            if child.popen.poll() is not None:
                raise _Refused(
                    f"{child.label} did not start: it {child.how_it_ended()}; its log: {child.log}"
                )
            if time.monotonic() > deadline:
                words = child.error_line()
                raise _Refused(
                    f"{child.label} was not ready after {self.limits.ready:.0f} s"
                    + (f"; its last line: {words}" if words else "")
                    + f"; its log: {child.log}"
                )
            if self.stop.wait(TICK):
                raise _Stopped
        try:
            ready = json.loads(text)
            child.endpoint = f"{ready['host']}:{int(ready['port'])}"
        except (ValueError, KeyError, TypeError):
            raise _Refused(f"{child.label}: {path} does not say where it listens") from None
        self._emit(
            {
                **ready,
                "event": "server",
                "name": child.spec.name,
                "host": child.spec.host,
                "endpoint": child.endpoint,
            }
        )
        self._write(self.phase)

    def _stop_all(self) -> None:
        """End what still runs, workers first; nothing is left when this returns."""
        for child in reversed(self.children):
            child.send(signal.SIGTERM)
            try:
                child.popen.wait(self.limits.server)
            except subprocess.TimeoutExpired:
                child.send(signal.SIGKILL)
                child.popen.wait()
            if child.popen.stdin is not None:
                child.popen.stdin.close()

    def _events(self) -> None:
        for event in self.tail.read():
            self._emit(event)

    def _emit(self, event: Event) -> None:
        self.last[event["event"]] = event
        self.on_event(event)

    def _write(self, phase: Phase, message: str = "") -> None:
        self.phase = phase
        pid = os.getpid()
        states = [
            ProcessState(
                name=child.spec.name,
                role=child.spec.role,
                host=child.spec.host,
                pid=child.popen.pid,
                started=child.started,
                endpoint=child.endpoint,
                exit_code=child.popen.poll(),
            )
            for child in self.children
        ]
        self.job.write_state(
            JobState(
                phase=phase,
                supervisor_pid=pid,
                supervisor_started=process.start_time(pid),
                processes=states,
                message=message,
            )
        )


def _read(path: Path) -> str | None:
    """The file's text; None when it is not there (a server takes its ready file away when it ends)."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


class _Refused(Exception):
    """A process did not come up."""


class _Stopped(Exception):
    """Asked to stop before the worker began."""


def start_detached(job: Job, resume: bool) -> int:
    """Run the job under a supervisor in the background (its log: logs/supervisor.log); returns its pid."""
    argv = [sys.executable, "-m", "provision.supervisor", str(job.directory)]
    with job.log("supervisor").open("ab") as log:
        popen = subprocess.Popen(
            [*argv, "--resume"] if resume else argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return popen.pid


def _say(event: Event) -> None:
    print(json.dumps(event), flush=True)


def main(argv: list[str]) -> int:
    """``python -m provision.supervisor JOB_DIR [--resume]``."""
    stop = StopRequest()
    with stop.on_signals():
        try:
            outcome = Supervisor(Job(Path(argv[0])), _say, stop).run(resume="--resume" in argv[1:])
        except TrainingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(outcome.message, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
