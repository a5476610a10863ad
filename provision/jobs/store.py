"""Training jobs on disk: ``.oeprov/jobs/<id>/``.

``job.json``   the settings and the command line of every process; no secret in it
``state.json`` the phase and the processes, written by the supervisor alone
``token``      the secret that servers ask of clients, mode 0600
``ready/``, ``metrics/``, ``logs/``   one file per process;  ``run/`` the trainer's own directory
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from provision.cluster.errors import TrainingError, why_not_one
from provision.cluster.setting_types import explain
from provision.jobs.backends.units import job_directory
from provision.jobs.metrics import Event, course, has_event, last_end, summary
from provision.node import jobfiles, process
from provision.node.command import replace_file

# Where jobs run, as --on names it: the file that each job there has, and the module with its ``Backend``.
BACKENDS = {
    "hosts": ("job.json", "provision.jobs.backends.hosts"),
    "kubernetes": ("kubernetes.json", "provision.jobs.backends.kubernetes.backend"),
}
# Placeholders in a worker's command line: the servers' endpoints, known once they listen, and the workers'
# own, at free ports of this machine.
SERVERS, WORKERS = "{servers}", "{workers}"
# Environment variables of a script's worker on its host; each start of the workers sets them anew.
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
Role = Literal["parameter_server", "worker", "replica"]
Phase = Literal["prepared", "starting", "running", "scaling", "stopping", "done", "failed", "interrupted"]
ACTIVE: frozenset[str] = frozenset({"prepared", "starting", "running", "scaling", "stopping"})
RESULTS = ("export", "report.html")  # that a run leaves at its end
DONE = "training is done"
STOPPED = "the servers were stopped"  # of a job without workers
_STEP = re.compile(r"step-(\d+)(?:\.\d+)?$")
_STAMP = re.compile(r"-\d{8}-\d{6}(?:-\d+)?$")  # `create` appends it to a job's name


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProcessSpec(_Record):
    """One process of a job; ``argv`` is its whole command line."""

    name: str
    role: Role
    host: str
    argv: list[str]
    environment: dict[str, str] = {}  # added to the launcher's own
    unit: str = ""  # of systemd on a host reached over SSH; empty: a child of the launcher
    storage: str = ""  # directory or mount point that holds its rows; empty for dram
    pools: str = ""  # directory of its own there; empty for dram
    cpus: str = ""  # that it is bound to, as the kernel lists them; empty: any
    script: str = ""  # digest of the script's directory that its host needs
    start_timeout: int = 180  # seconds until a server of the launcher's own must listen
    adapted: bool = False  # a program of others, run by provision/node/adapter.py beside the job

    def state(self, **found: Any) -> ProcessState:
        """The state of its process; ``found``: the fields that are not in the specification."""
        return ProcessState(name=self.name, role=self.role, host=self.host, unit=self.unit, **found)


class JobSpec(_Record):
    """The job file: the seam between provisioning and the runtime."""

    version: Literal[1] = 1
    id: str
    created: str
    cluster: str
    inventory: str
    settings: dict[str, Any]
    hosts: dict[str, dict[str, Any]] = {}  # how hosts of units are reached; see ssh.connection
    processes: list[ProcessSpec]
    foreign: list[str] = []  # hosts where another job has this id: all that has it there is that job's

    @property
    def units(self) -> list[ProcessSpec]:
        """The processes that are this job's units on hosts."""
        return [item for item in self.processes if item.unit and item.host not in self.foreign]

    @property
    def worker_unit(self) -> ProcessSpec | None:
        """The first worker that is a unit on a host, where the run's results are."""
        return next((item for item in self.processes if item.role == "worker" and item.unit), None)

    @property
    def is_servers_alone(self) -> bool:
        """Whether these are parameter servers for others (``oeprov servers``), and nothing trains."""
        return all(item.role == "parameter_server" for item in self.processes)

    @property
    def is_serving(self) -> bool:
        """Whether these are replicas that answer requests (``oeprov serve``), and nothing trains."""
        return any(item.role == "replica" for item in self.processes)

    @property
    def server_role(self) -> Role:
        """The role of its processes that are kept up."""
        return "replica" if self.is_serving else "parameter_server"

    @property
    def has_worker(self) -> bool:
        """Whether it trains, and so ends by itself."""
        return any(item.role == "worker" for item in self.processes)


class ProcessState(_Record):
    """One process that was started, identified so that no other process is ever signalled."""

    name: str
    role: Role
    host: str
    pid: int
    started: int  # clock ticks since boot: tells the process from a later one with the same pid
    endpoint: str = ""
    exit_code: int | None = None
    unit: str = ""  # on another host: only that host knows whether it runs
    boot: str = ""  # the boot of that host in which it was started
    rows: str = ""  # where it left rows on that host, when it was stopped

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a unit does until it was seen to have ended."""
        if self.unit:
            return self.exit_code is None
        return self.exit_code is None and process.alive(self.pid, self.started)


class JobState(_Record):
    """The contents of ``state.json``."""

    phase: Phase = "prepared"
    supervisor_pid: int = 0
    supervisor_started: int = 0
    processes: list[ProcessState] = []
    message: str = ""
    lost: list[str] = []  # workers without which the others continue, or have continued
    events_from: int = 0  # byte of metrics.jsonl at which this run begins: before it, earlier runs had an end

    @classmethod
    def supervised_here(cls, **fields: Any) -> JobState:
        """A state with this process as the supervisor."""
        pid = os.getpid()
        return cls(supervisor_pid=pid, supervisor_started=process.start_time(pid), **fields)

    @property
    def units_alive(self) -> list[ProcessState]:
        """The units on other hosts that run, or may still run."""
        return [item for item in self.processes if item.unit and item.alive]

    @property
    def supervised(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return process.alive(self.supervisor_pid, self.supervisor_started)


class Job:
    """A job's directory, and what is read from and written to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.id = directory.name
        self.job_file = self.directory / "job.json"
        self.state_file = self.directory / "state.json"
        self.token_file = self.directory / "token"
        self.step_file = self.directory / "step"  # that its replicas serve; missing: the newest
        self.fetched_file = self.directory / "fetched.json"  # name in run/ -> its first byte of events since
        self.run_dir = self.directory / "run"
        self.logs = self.directory / "logs"
        self.metrics_file = self.run_dir / "metrics.jsonl"

    @property
    def name(self) -> str:
        """Its id without the time at which it was made."""
        return _STAMP.sub("", self.id)

    @property
    def place(self) -> str:
        """Where it runs, as ``BACKENDS`` names it."""
        return next((name for name in BACKENDS if os.path.isfile(self.record_file(name))), "hosts")

    def record_file(self, place: str) -> Path:
        """The file that says how the job runs at a place."""
        return self.directory / BACKENDS[place][0]

    @property
    def served(self) -> str:
        """The name in requests of the model that its replicas serve; empty for a job without replicas."""
        if self.place != "hosts":  # its record says it
            return str(_read_object(self.record_file(self.place)).get("model") or "")
        with contextlib.suppress(TrainingError):
            return str(self.spec().settings["name"]) if self.spec().is_serving else ""
        return ""

    @property
    def broken(self) -> str:
        """Why nothing can be read of it; empty otherwise."""
        if not os.access(self.directory, os.R_OK | os.X_OK):
            return f"{self.directory}: permission denied"
        if not os.path.isfile(self.record_file(self.place)):
            return (
                "it has no job.json: its launch is not that far yet, or was killed; to remove it: "
                f"oeprov jobs rm {self.id}"
            )
        return ""

    @property
    def started(self) -> int:
        """When its newest run was started, in ns since 1970; of one without job.json, when it was made."""
        return modified(self.job_file) or modified(self.token_file) or modified(self.directory)

    def ready_file(self, process_name: str) -> Path:
        """Where a server says that it listens."""
        return self.directory / "ready" / f"{process_name}.json"

    def ready(self, process_name: str) -> dict[str, Any]:
        """What a server's ready file says; empty if there is none."""
        return _read_object(self.ready_file(process_name))

    def here(self, path: str) -> Path:
        """The path on this machine of a worker's file; for a worker elsewhere, where ``fetch`` puts it."""
        try:
            return self.directory / PurePosixPath(path).relative_to(job_directory(self.id))
        except ValueError:
            return Path(path)

    def is_old(self, name: str) -> bool:
        """Whether the job has exported since ``name`` was fetched into ``run/``; no if it was not fetched."""
        if self.spec().worker_unit is None:
            return False
        try:
            since = int(json.loads(self.fetched_file.read_bytes())[name])
        except (OSError, ValueError, KeyError, TypeError):
            return os.path.lexists(self.run_dir / name)  # nobody knows when it was fetched
        return has_event(self.metrics_file, "export", since)

    def server_metrics(self, process_name: str) -> Path:
        """Where a server writes its counters."""
        return self.directory / "metrics" / f"{process_name}.json"

    def log(self, process_name: str) -> Path:
        """Standard output and error of one process."""
        return self.logs / f"{process_name}.log"

    def make(self) -> None:
        """Make the directory with its folders and a token; an existing token is kept."""
        for name in ("", "run", "logs", "ready", "metrics"):
            (self.directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            token = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        with os.fdopen(token, "w") as file:
            file.write(secrets.token_hex(32) + "\n")

    def token(self) -> str:
        """What its processes know each other by; empty if its file is lost."""
        return self.token_file.read_text(encoding="utf-8").strip() if self.token_file.exists() else ""

    def write_spec(self, spec: JobSpec) -> None:
        """Replace ``job.json`` atomically."""
        write_json(self.job_file, spec.model_dump(mode="json"))

    def spec(self) -> JobSpec:
        """Read ``job.json``; TrainingError names file and field when it is not one."""
        try:
            return JobSpec.model_validate_json(self.job_file.read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(unreadable(self.job_file, error)) from None

    def write_state(self, state: JobState) -> None:
        """Replace ``state.json`` atomically."""
        write_json(self.state_file, state.model_dump(mode="json"))

    def state(self) -> JobState:
        """The state that the supervisor wrote last.

        If the supervisor is gone, an active job is interrupted; or done, if its trainer reached the end.
        """
        state = self._written_state()
        if state.phase in ACTIVE and not state.supervised:
            if state.phase == "running" and all(item.unit for item in state.processes):
                with contextlib.suppress(TrainingError):
                    if not self.spec().has_worker:
                        return state  # systemd has them
            if self.is_done():
                return state.model_copy(update={"phase": "done", "message": DONE})
            message = state.message or "its launcher was killed"
            return state.model_copy(update={"phase": "interrupted", "message": message})
        return state

    def read_state(self) -> JobState:
        """Read ``state.json``; TrainingError if it cannot be read."""
        try:
            return JobState.model_validate_json(self.state_file.read_bytes())
        except FileNotFoundError:
            return JobState(phase="interrupted", message="it never started")
        except (OSError, ValidationError) as error:
            raise TrainingError(unreadable(self.state_file, error)) from None

    def _written_state(self) -> JobState:
        try:
            return self.read_state()
        except TrainingError as error:
            return JobState(phase="interrupted", message=str(error))

    def last_end(self) -> Event | None:
        """The event with which the trainer ended the newest run; None if there is none here yet."""
        return last_end(self.metrics_file, self._written_state().events_from)

    def is_done(self) -> bool:
        """Whether the trainer has reported its end, as far as is known here."""
        return (self.last_end() or {}).get("event") == "end"

    def checkpoint(self) -> tuple[int, Path] | None:
        """Step and path of the newest published checkpoint; None where a worker on another host has them."""
        with contextlib.suppress(TrainingError):
            if self.spec().worker_unit is not None:
                return None  # what lies here was fetched, and may be old
        found = [
            (int(match[1]), path)
            for path in (self.run_dir / "checkpoints").glob("step-*")
            if (match := _STEP.search(path.name)) and (path / "manifest.json").is_file()
        ]
        return max(found, default=None)

    def pool_servers(self) -> int | None:
        """The number of servers whose pools have the newest checkpoint's rows; None if files have them."""
        if (newest := self.checkpoint()) is None:  # or it is on the worker's host
            far = summary(self.metrics_file).checkpoint_rows == "pool"
            return sum(item.role == "parameter_server" for item in self.spec().processes) if far else None
        try:
            return int(manifest(newest[1])["pool"]["servers"])
        except (KeyError, TypeError, ValueError):
            return None

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from, here or reported by a worker on another host."""
        if self.checkpoint() is not None:
            return True
        return any(summary(path).checkpoint is not None for path in self._reports())

    def has_files(self, kept: int) -> bool:
        """Whether a checkpoint has its rows in files: here, or one of the ``kept`` that a worker reported."""
        if self.checkpoint() is not None:
            found = (self.run_dir / "checkpoints").glob("step-*/manifest.json")
            return any("pool" not in manifest(path.parent) for path in found)
        events = (event for path in self._reports() for event in course(path, checkpoints=kept).checkpoints)
        return any(event.get("rows") == "files" for event in events)

    def _reports(self) -> list[Path]:
        """The events of the worker, and of those that were put aside."""
        return [self.metrics_file, *self.run_dir.glob("metrics-*.jsonl")]

    def put_metrics_aside(self, host: str) -> None:
        """Keep the events of a worker on ``host``: the next one, on another host, begins its own."""
        if self.metrics_file.exists():
            self.metrics_file.rename(self.run_dir / f"metrics-{host}.jsonl")

    def keeps_rows(self, spec: JobSpec, *, done: bool, known: bool = True) -> bool:
        """Whether rows with a checkpoint stay in its servers' storage when these end: only training's end
        removes them. A script may have taken checkpoints that the job was not told of, and so may the clients
        of servers alone.

        ``known``: whether the worker's hosts have told of its checkpoints; programs of others take no more.
        """
        if any(item.adapted for item in spec.processes):
            return not done and (not known or self.has_checkpoint())
        return not done or spec.is_servers_alone

    def has_rows(self, spec: ProcessSpec) -> bool:
        """Whether this process's own directory for rows on this machine holds any."""
        if not spec.pools or spec.unit:
            return False
        return any(name != jobfiles.LOCK for _, _, names in os.walk(spec.pools) for name in names)

    def rows_left(self) -> list[str]:
        """Where its servers that were stopped left rows, as far as is known here: "DIRECTORY on HOST"."""
        here = [f"{item.pools} here" for item in self.spec().processes if self.has_rows(item)]
        return here + [f"{item.rows} on {item.host}" for item in self.state().processes if item.rows]

    def remove_pools(self, spec: ProcessSpec) -> None:
        """Remove this process's own rows in persistent memory of this machine.

        Not while a server has them: it is one of another state directory's job with this id.
        """
        path = Path(spec.pools)
        if spec.unit or path.name != spec.name or path.parent.name != self.id or _is_locked(path):
            return
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _is_locked(directory: Path) -> bool:
    """Whether a server has a storage directory: the lock is dropped when its holder ends."""
    try:
        with (directory / jobfiles.LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; empty if it cannot be read: the worker says what is wrong with it."""
    return _read_object(checkpoint / "manifest.json")


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def unreadable(file: Path, error: OSError | ValidationError) -> str:
    """Why a job's file cannot be used, in words."""
    if isinstance(error, OSError):
        return f"{file}: {error.strerror}"
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return ": ".join(filter(None, [str(file), where, explain(first)]))


def jobs_dir(state_dir: Path) -> Path:
    """Where the jobs of a state directory lie."""
    return state_dir / "jobs"


def directories(state_dir: Path) -> list[Job]:
    """Every directory of a job, oldest first, including unreadable and incomplete ones."""
    place = jobs_dir(state_dir)
    try:
        found = [Job(path) for path in place.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TrainingError(f"{place}: the jobs cannot be listed: {error.strerror}") from None
    return sorted(found, key=lambda job: (job.started, job.id))


def all_jobs(state_dir: Path) -> list[Job]:
    """Every job on hosts, oldest first."""
    return [job for job in directories(state_dir) if os.path.isfile(job.job_file)]


def find(state_dir: Path, name: str | None) -> Job:
    """The job with this id, name or unique beginning of an id; without one, the last that was started.

    At any place. TrainingError lists the jobs that match, or all.
    """
    known, place = directories(state_dir), jobs_dir(state_dir)
    try:
        return choose([job for job in known if not job.broken], name, place)
    except TrainingError:
        for job in known:
            if job.broken and name in (job.id, job.name):
                raise TrainingError(f"job {job.id}: {job.broken}; `oeprov jobs` lists all") from None
        raise


def find_trained(state_dir: Path, name: str | None) -> Job:
    """``find``; without a name, the last job that has workers, or that does not say so here."""
    if name is None:
        for job in reversed([job for job in directories(state_dir) if not job.broken]):
            with contextlib.suppress(TrainingError):
                if job.served or (job.place == "hosts" and not job.spec().has_worker):
                    continue
            return job
    return find(state_dir, name)


def choose(found: list[Job], name: str | None, place: Path) -> Job:
    """``find`` among these jobs of the directory ``place``, oldest first."""
    if name is not None and not name:
        raise TrainingError("the job's name is empty; `oeprov jobs` lists the jobs")
    if not found:
        named = f" {name}" if name else ""
        raise TrainingError(f"no job{named} in {place} yet: start one with `oeprov launch-training`")
    if name is None:
        return found[-1]
    meant = (
        [job for job in found if job.id == name]
        or [job for job in found if job.name == name]
        or [job for job in found if job.id.startswith(name)]
    )
    if len(meant) == 1:
        return meant[0]
    words = [word for job in found for word in (job.name, job.id)]
    why = why_not_one("job", name, [job.id for job in meant], [job.id for job in found], place, words)
    raise TrainingError(why if meant else f"{why}; `oeprov jobs` lists them")


def replicas_id(job_id: str) -> str:
    """The id of a job's replicas where it has no others: NAME-serving-STAMP."""
    name = _STAMP.sub("", job_id)
    return f"{name}-serving{job_id.removeprefix(name)}"


def modified(path: Path) -> int:
    """When a file was last written, in ns since 1970; 0 if unknown."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def create(state_dir: Path, name: str, now: datetime) -> Job:
    """A new directory, named NAME-YYYYMMDD-HHMMSS (with -2, -3, … when two begin in one second)."""
    base = f"{name}-{now:%Y%m%d-%H%M%S}"
    jobs_dir(state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1
    while True:
        job = Job(jobs_dir(state_dir) / (base if number == 1 else f"{base}-{number}"))
        try:
            job.directory.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        job.make()
        return job


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file; see ``replace_file``."""
    replace_file(str(path), (json.dumps(value, indent=2) + "\n").encode())
