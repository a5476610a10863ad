"""A job with its supervisor in the background (``--detach``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from provision.cluster.errors import TrainingError
from provision.hosts import askpass
from provision.hosts.stop_request import StopRequest
from provision.jobs.servers_run import supervisor_of
from provision.jobs.store import Job


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


def main(argv: list[str]) -> int:
    """``python -m provision.jobs.background JOB_DIR [--resume]``."""
    stop = StopRequest()
    with stop.on_signals():
        try:
            job = Job(Path(argv[0]))
            supervisor = supervisor_of(job)(job, lambda event: print(json.dumps(event), flush=True), stop)
            outcome = supervisor.run(resume="--resume" in argv[1:])
        except TrainingError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(outcome.message, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
