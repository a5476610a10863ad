"""The units of a job on its hosts, as seen and told from here over SSH; every host at once."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Host
from provision.hosts import errands
from provision.jobs import units
from provision.jobs.metrics import last_word
from provision.jobs.placement import CHECKPOINT_SECONDS, restored, worker_start
from provision.jobs.store import Job, JobSpec, ProcessSpec, ProcessState, Role, write_json
from provision.node.job import MOST_EVENTS

LOOK_SECONDS = 60  # that a look may take on a slow host
STOP_SECONDS = {"parameter_server": 180, "worker": int(CHECKPOINT_SECONDS) + 60}
START_SECONDS = 120
POLL_SECONDS = 2.0  # between looks at a worker on another host
LEAST_SILENCE = 120.0  # seconds that such a host may be out of reach, where lost servers are not waited for

_EXIT_CODES = {"end": 0, "interrupted": units.INTERRUPTED, "error": 1}  # of the trainer, by its last event
Answer = dict[str, Any]


class Fleet:
    """The hosts of one job that are reached over SSH; empty for a job of this machine alone."""

    def __init__(self, job: Job, spec: JobSpec) -> None:
        self.job = job
        self.spec = spec
        self.processes = {item.name: item for item in spec.processes if item.unit}

    @cached_property
    def hosts(self) -> dict[str, Host]:
        """Every host that runs units of the job; slow to make, because it needs the inventory's code."""
        names = {item.host for item in self.processes.values()}
        if unknown := sorted(names - self.spec.hosts.keys()):
            raise TrainingError(f"{self.job.job_file}: it does not say how host {unknown[0]} is reached")
        return {name: restored(values) for name, values in self.spec.hosts.items() if name in names}

    def of_role(self, role: Role) -> dict[str, Host]:
        """The hosts with processes of one role."""
        if not any(item.role == role for item in self.processes.values()):
            return {}
        names = {item.host for item in self.processes.values() if item.role == role}
        return {name: host for name, host in self.hosts.items() if name in names}

    @property
    def silence(self) -> float:
        """Seconds that a worker's host may be out of reach before it is lost: as long as a server may."""
        return max(LEAST_SILENCE, float(self.spec.settings.get("server_wait") or 0))

    def args(self) -> dict[str, Any]:
        """What every errand needs."""
        return {"directory": str(units.job_directory(self.job.id))}

    def observe(self) -> dict[str, Answer | HostError]:
        """What every host says of the job's units; new events of a worker there are taken over."""
        if not self.processes:
            return {}
        offset = self.mirrored
        args = {**self.args(), "offset": offset}
        answers = errands.on_all(self.hosts, "look", args, LOOK_SECONDS)
        for answer in answers.values():
            if isinstance(answer, dict):
                self.mirror(answer, offset)
        return answers

    @property
    def worker(self) -> ProcessSpec | None:
        """The worker, if it is a unit."""
        return next((item for item in self.processes.values() if item.role == "worker"), None)

    @property
    def mirrored(self) -> int:
        """How many bytes of the worker's metrics.jsonl lie here too; -1 where it writes them here itself."""
        if self.worker is None:
            return -1
        path = self.job.metrics_file
        return path.stat().st_size if path.exists() else 0

    def mirror(self, answer: Answer, offset: int) -> None:
        """Append what the worker's host had new after ``offset``, unless another process was quicker."""
        if self.worker is None or not answer.get("events"):
            return
        with self.job.metrics_file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size == offset:
                file.write(answer["events"].encode())

    def take_events(self) -> None:
        """Mirror all that the worker has written on its host by now; HostError when that cannot be known."""
        while self.worker is not None:
            offset = self.mirrored
            answer = errands.run(
                self.hosts[self.worker.host], "look", {**self.args(), "offset": offset}, LOOK_SECONDS
            )
            self.mirror(answer, offset)
            count = len(answer["events"].encode())
            # Else there is more, or another process was quicker and has brought less than this one has seen.
            if count < MOST_EVENTS and self.mirrored >= offset + count:
                return

    def start_worker(self, spec: ProcessSpec, argv: list[str], *, fresh: bool) -> Answer:
        """Start the worker's unit; what its host says of it. HostError says why it did not begin.

        ``fresh``: events that an earlier attempt left on the host are of no use.
        """
        args = {
            **self.args(),
            "user": units.USER,
            "token": "",
            "seconds": START_SECONDS,
            "units": [{**worker_start(self.job.id, spec, argv), "forget_events": fresh}],
        }
        return errands.run(self.hosts[spec.host], "start", args, START_SECONDS + 30)

    def stop(self, role: Role, *, keep_pools: bool = False) -> dict[str, Answer | HostError]:
        """End the units of one role on every host and take them away; their last words are kept here.

        With them go the rows that they have in persistent memory, unless ``keep_pools``.
        """
        hosts = self.of_role(role)
        args = {**self.args(), "role": role, "keep_pools": keep_pools}
        answers = errands.on_all(hosts, "stop", args, STOP_SECONDS[role])
        for answer in answers.values():
            if isinstance(answer, dict):
                for name, item in answer["stopped"].items():
                    self._keep(name, item)
        return answers

    def remove_pools(self, servers: Sequence[ProcessSpec]) -> list[HostError]:
        """Remove what these servers left in persistent memory; the hosts where that failed."""
        listed = [{"name": item.name, "unit": item.unit, "pools": item.pools} for item in servers]
        names = {item.host for item in servers}
        hosts = {name: host for name, host in self.hosts.items() if name in names}
        args = {**self.args(), "servers": listed}
        answers = errands.on_all(hosts, "remove_pools", args, LOOK_SECONDS)
        return [answer for answer in answers.values() if isinstance(answer, HostError)]

    def remove(self) -> list[HostError]:
        """Remove all that the job, which has ended, has on its hosts; those where that failed.

        Of a host that has nothing of it any more too, twice does no harm.
        """
        listed = [
            {"name": item.name, "unit": item.unit, "pools": item.pools} for item in self.processes.values()
        ]
        args = {**self.args(), "servers": listed}
        answers = errands.on_all(self.hosts, "remove", args, STOP_SECONDS["parameter_server"])
        return [answer for answer in answers.values() if isinstance(answer, HostError)]

    def _keep(self, name: str, item: Mapping[str, Any]) -> None:
        """Logs and last counters, so that they can be read when the hosts are long gone."""
        if item["log"]:
            self.job.log(name).write_text("\n".join(item["log"]) + "\n")
        if item["metrics"]:
            write_json(self.job.server_metrics(name), item["metrics"])


def ended(states: list[ProcessState], answers: Mapping[str, Answer | HostError]) -> list[ProcessState]:
    """The states after ``Fleet.stop``: a unit that its host knows no more has ended."""
    found = []
    for item in states:
        answer = answers.get(item.host)
        if item.unit and item.exit_code is None and isinstance(answer, dict):
            code = int(answer["stopped"].get(item.name, {}).get("exit_code", 0))
            item = item.model_copy(update={"exit_code": code})
        found.append(item)
    return found


@dataclass
class HostServer:
    """A parameter server that runs as a unit; ``refresh`` tells it what its host says."""

    spec: ProcessSpec
    pid: int
    started: int
    boot: str
    endpoint: str
    waited_for: bool = False  # systemd may start it again, and training goes on
    exit_code: int | None = None
    lost: str = ""

    @property
    def label(self) -> str:
        """Name, host and pid, for messages."""
        return f"{self.spec.name} on {self.spec.host} (pid {self.pid})"

    def poll(self) -> int | None:
        """The exit code once it was seen to have ended, or to be another process than the one started."""
        return self.exit_code

    def refresh(self, answer: Answer | HostError) -> None:
        """Take over what the host said."""
        if isinstance(answer, HostError):
            self.exit_code, self.lost = -signal.SIGKILL, f"cannot be reached any more: {answer.reason}"
            return
        found = answer["processes"].get(self.spec.name)
        if found is None:
            self.exit_code, self.lost = 0, "was taken away"
        elif self.waited_for and found["up"] and found["started"]:
            self.pid, self.started, self.boot = found["pid"], found["started"], answer["boot"]
        elif answer["boot"] != self.boot:
            self.exit_code, self.lost = -signal.SIGKILL, "is gone: the host was booted again"
        elif not found["up"] or found["started"] != self.started or found["pid"] != self.pid:
            self.exit_code = found["exit_code"] or 0
            self.lost = f"is gone: {found['how']}" if found["how"] else "was started again"

    def how_it_ended(self) -> str:
        """In words."""
        return self.lost or "still runs"

    def state(self) -> ProcessState:
        """For ``state.json``; a lost server's unit is still there until it is stopped."""
        return self.spec.state(pid=self.pid, started=self.started, endpoint=self.endpoint, boot=self.boot)


class HostWorker:
    """The worker as a unit on another host, looked at every few seconds.

    Its end is what the trainer says in its events: systemd unloads a unit that ended well, or as it was told
    to, and then knows no more of it than of one that never ran.
    """

    def __init__(self, fleet: Fleet, spec: ProcessSpec) -> None:
        self.fleet = fleet
        self.spec = spec
        self.pid = 0
        self.boot = ""
        self.endpoint = ""
        self.first = fleet.worker is not None and fleet.worker.name == spec.name  # who writes the events
        self._since = 0  # where the events of its run begin
        self.exit_code: int | None = None
        self.how = ""
        self.silent = False  # its host cannot be reached: it may still run
        self._seen = time.monotonic()
        self._next = 0.0

    @property
    def label(self) -> str:
        """Name, host and pid as far as it is known, for messages."""
        return f"{self.spec.name} on {self.spec.host}" + (f" (pid {self.pid})" if self.pid else "")

    def start(self, argv: list[str], environment: Mapping[str, str], *, fresh: bool) -> None:
        """Start its unit; HostError says why it did not begin."""
        if self.first and not fresh:
            self.fleet.take_events()
            self._since = self.fleet.mirrored
        spec = self.spec.model_copy(update={"environment": dict(environment)})
        answer = self.fleet.start_worker(spec, argv, fresh=fresh and self.first)
        self.boot, self.pid = answer["boot"], int(answer["workers"].get(self.spec.name, 0))

    def poll(self) -> int | None:
        """Look at it, unless that was just done; the exit code once it has ended or is out of reach."""
        now = time.monotonic()
        if self.exit_code is not None or now < self._next:
            return self.exit_code
        offset = self.fleet.mirrored
        args = {**self.fleet.args(), "offset": offset}
        try:
            answer = errands.run(self.fleet.hosts[self.spec.host], "look", args, LOOK_SECONDS)
        except HostError as error:
            if now - self._seen > self.fleet.silence:
                self.give_up(error.reason)
        else:
            self._seen = time.monotonic()
            self.fleet.mirror(answer, offset)
            found = answer["processes"].get(self.spec.name, {})
            self.pid = found.get("pid") or self.pid
            if not found.get("up") and found.get("active") != "deactivating":
                self._ended(found, answer["boot"])
        self._next = time.monotonic() + POLL_SECONDS
        return self.exit_code

    def _ended(self, found: Mapping[str, Any], boot: str) -> None:
        """Take over how it ended; what its host does not know any more, its events do."""
        code, how = int(found.get("exit_code") or 0), str(found.get("how") or "")
        if self.first and not code:
            try:
                self.fleet.take_events()
            except HostError:
                return  # asked again soon
            word = last_word(self.fleet.job.metrics_file, self._since)
            if word is not None:
                self.exit_code = _EXIT_CODES[word["event"]]
                self.how = f"ended with an error: {word.get('message')}" if self.exit_code == 1 else "ended"
                return
        if self.boot and boot != self.boot:
            self.exit_code, self.how = -signal.SIGKILL, "ended: its host rebooted"
        elif not found:
            self.exit_code, self.how = 1, "ended: its systemd unit was removed"
        elif self.first and not code:
            self.exit_code, self.how = -signal.SIGTERM, "was killed before it reported its last step"
        else:
            self.exit_code = code
            self.how = how[3:] if how.startswith("it ") else f"is gone: {how}"

    def send(self, number: int) -> None:
        """SIGTERM: finish the step and write a checkpoint; SIGKILL: end at once."""
        name = signal.Signals(number).name
        args = {
            "directory": str(units.job_directory(self.fleet.job.id)),
            "name": self.spec.name,
            "signal": name,
        }
        errands.run(self.fleet.hosts[self.spec.host], "send", args, LOOK_SECONDS)

    def give_up(self, reason: str) -> None:
        """Its host does not answer, so it is unknown whether the process runs."""
        self.exit_code, self.how, self.silent = 1, f"cannot be reached any more: {reason}", True

    def how_it_ended(self) -> str:
        """In words."""
        return self.how or "still runs"

    def state(self) -> ProcessState:
        """For ``state.json``."""
        exit_code = None if self.silent else self.exit_code
        return self.spec.state(pid=self.pid, started=0, boot=self.boot, exit_code=exit_code)

    def end(self) -> None:
        """Its host has stopped its unit."""
        self.silent = False
        self.exit_code = self.exit_code or 0


def message_of(answers: Mapping[str, Answer | HostError], said: str = "") -> str:
    """Which hosts could not be told to stop, and why unless that was ``said``; empty when all were."""
    lost = [error for error in answers.values() if isinstance(error, HostError)]
    return "; ".join(
        f"{error.host} could not be told to stop its part"
        + ("" if error.reason in said else f": {error.reason}")
        for error in lost
    )


def describe(answers: Mapping[str, Answer | HostError]) -> list[str]:
    """One line a host: what ``stop`` did there."""
    lines = []
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            lines.append(f"[red]✗[/] {host}: {answer.reason}")
            continue
        ran = [name for name, item in answer["stopped"].items() if item["ran"]]
        gone = [name for name in answer["stopped"] if name not in ran]
        words = [f"stopped {', '.join(ran)}"] if ran else []
        words += [f"took away {', '.join(gone)}, which did not run"] if gone else []
        lines.append(f"[green]✓[/] {host}: {'; '.join(words) or 'nothing of the job is left there'}")
    return lines
