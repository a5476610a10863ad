"""A job with its supervisor in the background (``--detach``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.hosts import askpass
from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs.going_on import supervise
from provision.jobs.metrics import Event
from provision.jobs.screen import make_console
from provision.jobs.store import ACTIVE, Job
from provision.node import process

_GRACE = 30.0  # seconds beyond those that servers of this machine may take to listen, for their supervisor


def start_detached(job: Job, resume: bool) -> int:
    """Run the job under a supervisor in the background (its log: logs/supervisor.log); returns its pid."""
    argv = [sys.executable, "-m", "provision.jobs.background", str(job.directory)]
    passwords, files = askpass.for_child()
    with job.log("supervisor").open("ab") as log:
        popen = subprocess.Popen(
            [*argv, "--resume"] if resume else argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **passwords},
            pass_fds=files,
        )
    return popen.pid


def start_and_wait(job: Job, stop_request: StopRequest, stop_command: str) -> None:
    """Start a job without workers in the background, and wait until all its servers of this machine listen.

    Its state must be active: until the supervisor has written its first word, it is that of this process.
    TrainingError says why they do not.
    """
    seconds = _GRACE + max(item.start_timeout for item in job.spec().processes)
    pid = start_detached(job, False)
    started = process.start_time(pid)
    deadline = time.monotonic() + seconds
    state = job.state()
    while state.phase != "running":
        if state.phase == "failed":
            raise TrainingError(state.message)
        if state.phase not in ACTIVE:  # stopped by another command, or killed
            raise TrainingError(f"{job.id} does not run: {state.message}; its logs: {job.logs}")
        # Before its first word `oeprov stop` would ask nobody but this process.
        asked = stop_request.wait(TICK) and state.phase != "prepared"
        if asked or time.monotonic() > deadline:
            raise TrainingError(
                f"the servers do not listen yet; their logs: {job.logs}; to stop them: {stop_command}"
            )
        is_there = process.alive(pid, started)
        state = job.state()
        if state.phase == "prepared" and not is_there:
            raise TrainingError(f"{job.id} does not run: its supervisor has ended; its logs: {job.logs}")


@contextmanager
def _events() -> Iterator[Callable[[Event], None]]:
    yield lambda event: print(json.dumps(event), flush=True)


def main(argv: list[str]) -> int:
    """``python -m provision.jobs.background JOB_DIR [--resume]``."""
    stop = StopRequest()
    with stop.on_signals():
        try:
            job = Job(Path(argv[0]))
            outcome = supervise(job, "--resume" in argv[1:], _events, make_console(), stop)
        except TrainingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(outcome.message, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
