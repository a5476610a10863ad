"""Stand-ins for `oe_runtime.server` and `oe_runtime.train`: the same contract, without TensorFlow."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from recorded import write_program

from provision.jobs.store import SERVERS, Job, JobSpec, ProcessSpec, create

SERVER = """
import json, os, signal, sys, threading
ready, behaviour = sys.argv[1:3]
if behaviour == "dies":
    sys.exit("warning: first\\nerror: port 7001 on 127.0.0.1 is taken")
if behaviour == "comes-back-broken":
    if os.path.exists(ready + ".pool"):  # of the process before
        sys.exit("error: pool of table C1 is damaged")
    open(ready + ".pool", "w").close()
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda *_: sys.exit(0))
if behaviour != "silent":
    with open(ready + ".tmp", "w") as file:
        json.dump({"pid": os.getpid(), "host": "127.0.0.1", "port": 7001, "index": 0, "count": 1,
                   "storage": "dram", "is_pmem": False}, file)
    os.rename(ready + ".tmp", ready)
while True:
    signal.pause()
"""

WORKER = """
import json, os, signal, sys, threading, time
servers, run, behaviour = sys.argv[1:4]
resume = "--resume" in sys.argv
stop = threading.Event()
metrics = open(os.path.join(run, "metrics.jsonl"), "a")
def say(event, **fields):
    metrics.write(json.dumps({"event": event, **fields}) + "\\n")
    metrics.flush()
def save(step):
    path = os.path.join(run, "checkpoints", "step-%010d" % step)
    os.makedirs(path, exist_ok=True)
    open(os.path.join(path, "manifest.json"), "w").close()
    say("checkpoint", step=step, path=path, seconds=0.01)
    return path
signal.signal(signal.SIGTERM, lambda *_: stop.set())
scaled = os.path.join(run, "scaled")
signal.signal(signal.SIGUSR1, lambda *_: (open(scaled, "w").close(), stop.set()))
threading.Thread(target=lambda: (os.read(0, 1), stop.set()), daemon=True).start()
first = 0
if resume:
    first = max(int(name[5:]) for name in os.listdir(os.path.join(run, "checkpoints")))
say("start", rows=800, steps=8, model="deepfm", servers=servers)
if resume:
    say("resume", step=first, path="x")
for step in range(first + 1, 9):
    say("step", step=step, epoch=0, loss=1.0 / step, auc=0.5 + step / 100, samples_per_s=1000.0, eta_s=1.0)
    if resume and os.path.exists(scaled):
        os.remove(scaled)
        say("pause", step=first, seconds=1.25, servers_before=2, servers=len(servers.split(",")))
    if step == 2:
        save(step)
    if resume and os.path.exists(os.path.join(run, "waits-again")):
        os.remove(os.path.join(run, "waits-again"))
        stop.wait()
    if step == 3 and not resume:
        if behaviour == "kills-itself":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "fails":
            say("error", message="table C1: dim is 9 here and 16 in the checkpoint")
            print("error: table C1: dim is 9 here and 16 in the checkpoint", file=sys.stderr)
            sys.exit(1)
        if behaviour == "kills-server":
            os.kill(int(open(os.path.join(run, "victim")).read()), signal.SIGKILL)
            say("error", message="lost server 127.0.0.1:7001 after step 3; last checkpoint: step 2")
            sys.exit(1)
        if behaviour == "outlives-server":
            path = os.path.join(run, "victim")
            victim = open(path).read()
            os.kill(int(victim), signal.SIGKILL)
            say("server_gone", endpoint="127.0.0.1:7001", message="the connection broke", wait_s=60)
            while open(path).read() == victim and not stop.is_set():
                time.sleep(0.02)
            say("server_back", endpoint="127.0.0.1:7001", step=2, seconds=0.1)
        if behaviour == "loses-server":
            waiting = os.path.join(run, "waiting")
            open(waiting, "w").close()
            while os.path.exists(waiting):
                time.sleep(0.05)
            say("error", message="lost server 127.0.0.1:7001 after step 3; last checkpoint: step 2")
            sys.exit(1)
        if behaviour in ("loses-worker", "lets-go"):
            open(os.path.join(run, "waiting"), "w").close()
            while not os.path.exists(os.path.join(run, "gone")):
                time.sleep(0.02)
        if behaviour == "loses-worker":
            say("error", message="worker 1 (127.0.0.1:7501) was lost")
            print("error: worker 1 (127.0.0.1:7501) was lost", file=sys.stderr)
            sys.exit(3)
        if behaviour == "waits":
            open(os.path.join(run, "waiting"), "w").close()
            stop.wait()
        if behaviour == "deaf":
            open(os.path.join(run, "waiting"), "w").close()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(60)
    if stop.is_set():
        say("interrupted", step=step, path=save(step))
        sys.exit(130)
say("trained", step=8)
if behaviour == "loses-power-at-the-end":
    if not resume:
        save(8)
    if not resume or os.path.exists(os.path.join(run, "again")):
        os.kill(os.getpid(), signal.SIGKILL)
say("eval", rows=80, loss=0.4, auc=0.75)
say("export", path=os.path.join(run, "export"))
say("end", steps=8, seconds=0.1, samples_per_s=1234.0)
if behaviour == "ends-slowly":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open(os.path.join(run, "waiting"), "w").close()
    time.sleep(60)
"""

FOLLOWER = """
import os, signal, sys, threading, time
run, behaviour = sys.argv[1:3]
resume = "--resume" in sys.argv
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
threading.Thread(target=lambda: (os.read(0, 1), stop.set()), daemon=True).start()
def when_worker_waits():
    while not os.path.exists(os.path.join(run, "waiting")) and not stop.is_set():
        time.sleep(0.02)
if behaviour == "kills-itself" and not resume:
    when_worker_waits()
    open(os.path.join(run, "gone"), "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "follows":
    when_worker_waits()
    open(os.path.join(run, "following"), "w").close()
    stop.wait()
    sys.exit(130)
"""


def python(code: str, *words: str) -> list[str]:
    """A command line that runs ``code`` without site-packages, for speed."""
    return [sys.executable, "-I", "-S", "-c", code, *words]


def make_job(
    state_dir: Path,
    *,
    server: str = "good",
    worker: str = "good",
    servers: int = 1,
    storage: str = "",
    server_wait: int = 0,
    follower: str = "",
    restarts: int = 0,
    start_timeout: int = 20,
    **settings: Any,
) -> Job:
    """A job directory whose processes are stand-ins with the given behaviour."""
    job = create(state_dir, "fake", datetime(2026, 11, 21, 12, 15))
    processes = [
        ProcessSpec(
            name=f"server-{index}",
            role="parameter_server",
            host="localhost",
            argv=python(SERVER, str(job.ready_file(f"server-{index}")), server),
            storage=storage,
            start_timeout=start_timeout,
        )
        for index in range(servers)
    ]
    argv = python(WORKER, SERVERS, str(job.run_dir), worker)
    processes.append(ProcessSpec(name="worker-0", role="worker", host="localhost", argv=argv))
    if follower:
        argv = python(FOLLOWER, str(job.run_dir), follower)
        processes.append(ProcessSpec(name="worker-1", role="worker", host="localhost", argv=argv))
    job.write_spec(
        JobSpec(
            id=job.id,
            created="2026-11-21T12:15:00+00:00",
            cluster="local",
            inventory="inventory/local.yml",
            settings={"server_wait": server_wait, "restarts": restarts, **settings},
            processes=processes,
        )
    )
    return job


def make_environment(directory: Path, *, server: str = "good", worker: str = "good") -> Path:
    """A stand-in for `runtime_venv`: its bin/python runs the stand-ins for `-m oe_runtime.*`."""
    python_file = directory / "bin" / "python"
    python_file.parent.mkdir(parents=True)
    write_program(
        python_file,
        "import sys\n"
        f"SERVER, WORKER = {SERVER!r}, {WORKER!r}\n"
        "module, words = sys.argv[2], sys.argv[3:]\n"
        "flags = dict(zip(words, words[1:]))\n"
        "assert '--exit-with-parent' in words\n"
        "assert module == 'oe_runtime.serve' or open(flags['--token-file']).read().strip()\n"
        "resume = ['--resume'] * ('--resume' in words)\n"
        "if module in ('oe_runtime.server', 'oe_runtime.serve'):\n"
        f"    sys.argv = ['server', flags['--ready-file'], {server!r}]\n"
        "    exec(SERVER)\n"
        "else:\n"
        f"    sys.argv = ['train', flags['--servers'], flags['--run-dir'], {worker!r}, *resume]\n"
        "    exec(WORKER)\n",
    )
    return directory
