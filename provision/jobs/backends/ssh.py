"""The systemd units of a job on its hosts: observe, start, signal, stop; over SSH, all hosts at once."""

from __future__ import annotations

import base64
import fcntl
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from provision.cluster import share
from provision.cluster.errors import HostError, TrainingError
from provision.cluster.inventory import Host
from provision.cluster.settings import Kind
from provision.hosts import errands, fanout, remote
from provision.hosts.stop_request import StopRequest
from provision.jobs.backends import ADAPTER, CHECKPOINT_SECONDS, Process, Refused, Runner, Stopped, units
from provision.jobs.backends.units import Place
from provision.jobs.metrics import last_end
from provision.jobs.script_files import ScriptFiles
from provision.jobs.store import Job, JobSpec, ProcessSpec, ProcessState, Role, write_json
from provision.node import jobscript, numa
from provision.node.job import MOST_EVENTS
from provision.node.state import State

OBSERVE_SECONDS = 60  # an observation may take on a slow host
STOP_SECONDS = {"parameter_server": 180, "replica": 180, "worker": int(CHECKPOINT_SECONDS) + 60}
START_SECONDS = 120
SCRIPT_SECONDS = 120  # a host may take for an archive
POLL_SECONDS = 2.0  # between observations of a worker on another host
LEAST_SILENCE = 120.0  # seconds that such a host may always be out of reach

_EXIT_CODES = {"end": 0, "interrupted": units.INTERRUPTED, "error": 1}  # of the trainer, by its last event
Answer = dict[str, Any]


class SshRunner(Runner):
    """On a host reached over SSH, as systemd units."""

    def directory(self, job: Job) -> Path:
        """See ``Runner``."""
        return Path(units.job_directory(job.id))

    def environments(self, state_dir: Path) -> str:
        """See ``Runner``."""
        return jobscript.ENVIRONMENTS

    def sent(self, job: Job, path: Path, folder: str = "") -> Path:
        """See ``Runner``."""
        return self.directory(job) / folder / path.name

    def cpus(self, state: State | None) -> int:
        """See ``Runner``."""
        return numa.cpu_count(state) if state else 1

    def dram(self, state: State | None) -> int:
        """See ``Runner``."""
        return numa.dram(state) if state else 0

    def unit(self, job: Job, process: str) -> str:
        """See ``Runner``: ``oeprov-JOB-server-0.service``."""
        return f"oeprov-{job.id}-{process}.service"

    def server_start(
        self, job: Job, spec: ProcessSpec, where: Place, port: int, *, fresh: bool
    ) -> list[dict[str, Any]]:
        """See ``Runner`` and provision/node/job.py."""
        text = units.server_unit(job.id, spec.name, spec.argv, where)
        start = _unit_start(spec, text, address=self.host.server.host, port=port, fresh=fresh)
        start["directories"].insert(0, str(self.directory(job) / "checkpoints" / spec.name))
        start["needs"] += [units.MEMORY_FILE, units.NUMACTL] if where.bound else []
        return [start]

    def check(self, argv: Sequence[str], seconds: int) -> str:
        """See ``Runner``."""
        args = {"user": units.USER, "argv": list(argv), "seconds": seconds}
        try:
            return str(errands.run(self.host, "check_data", args, seconds + 30)["problem"])
        except HostError as error:
            return error.reason

    def deliver(
        self, files: ScriptFiles | None, environment: dict[str, object], stop: StopRequest
    ) -> tuple[bool, bool]:
        """See ``Runner``."""
        assert files is not None  # noqa: S101 - collected for such hosts
        args = {"digest": files.digest, "environment": environment, "user": units.USER, "archive": ""}
        seconds = SCRIPT_SECONDS + (jobscript.PIP_SECONDS if environment else 0)
        answer = errands.run(self.host, "deliver_script", args, seconds, stop)
        if missing := bool(answer["missing"]):
            args["archive"] = base64.b64encode(zlib.compress(files.archive, 1)).decode()
            answer = errands.run(self.host, "deliver_script", args, seconds, stop)
        return missing, bool(answer["made"])


def worker_start(job: str, spec: ProcessSpec, argv: list[str]) -> dict[str, Any]:
    """What the worker's host needs to start its unit; ``argv`` has the servers' endpoints."""
    own = [spec.pools] if spec.pools else []
    text = units.worker_unit(job, spec.name, argv, spec.environment, seconds=CHECKPOINT_SECONDS, writable=own)
    return _unit_start(spec, text, address="", port=0, script=spec.script)


def _unit_start(spec: ProcessSpec, text: str, **more: Any) -> dict[str, Any]:
    """What every unit's host needs to start it; programs of others are run by the adapter."""
    adapter = share.node_package() / ADAPTER
    return {
        "name": spec.name,
        "role": spec.role,
        "unit": spec.unit,
        "text": text,
        "directories": [spec.pools] if spec.pools else [],
        "mount": spec.storage,
        "needs": spec.argv[:1],
        "files": {ADAPTER: adapter.read_text(encoding="utf-8")} if spec.adapted else {},
        **more,
    }


def connection(host: Host) -> dict[str, Any]:
    """How the host is reached, for the job file: every plain field of it."""
    values = {item.name: getattr(host, item.name) for item in fields(host)}
    plain = {name: value for name, value in values.items() if isinstance(value, (str, int, tuple, list))}
    return {**plain, "kind": host.kind.value}


def restored(values: Mapping[str, Any]) -> Host:
    """The host that ``connection`` described, with default settings; TrainingError for unusable values."""
    found: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    try:
        return Host(**{**found, "kind": Kind(found["kind"])})
    except (TypeError, KeyError, ValueError) as error:
        raise TrainingError(f"job.json does not say how its hosts are reached: {error}") from None


class Fleet:
    """The hosts of one job that are reached over SSH; empty for a job of this machine alone."""

    def __init__(self, job: Job, spec: JobSpec) -> None:
        self.job = job
        self.spec = spec
        self.processes = {item.name: item for item in spec.units}

    @cached_property
    def hosts(self) -> dict[str, Host]:
        """Every host that runs units of the job."""
        names = {item.host for item in self.processes.values()}
        if unknown := sorted(names - self.spec.hosts.keys()):
            raise TrainingError(f"{self.job.job_file}: it does not say how host {unknown[0]} is reached")
        found = {name: restored(values) for name, values in self.spec.hosts.items() if name in names}
        return with_passwords(found, Path(self.spec.inventory))

    def hosts_of(self, role: Role) -> dict[str, Host]:
        """The hosts with units of one role."""
        names = {item.host for item in self.processes.values() if item.role == role}
        return {name: host for name, host in self.hosts.items() if name in names} if names else {}

    @property
    def silence(self) -> float:
        """Seconds that a worker's host may be out of reach before it is lost; no less than a server's."""
        return max(LEAST_SILENCE, float(self.spec.settings.get("server_wait") or 0))

    def observe_host(self, name: str) -> Answer:
        """The answer of one host, whose new events are copied; HostError if there is none."""
        offset = self.mirrored
        answer = errands.run(self.hosts[name], "observe", self.args(offset=offset), OBSERVE_SECONDS)
        self.mirror(answer, offset)
        return answer

    def args(self, **more: Any) -> dict[str, Any]:
        """The arguments of an errand: the job's directory and ``more``."""
        return {"directory": str(units.job_directory(self.job.id)), **more}

    def observe(self) -> dict[str, Answer | HostError]:
        """Every host's answer about the job's units; new events of a worker there are copied."""
        if not self.processes:
            return {}
        offset = self.mirrored
        answers = errands.on_all(self.hosts, "observe", self.args(offset=offset), OBSERVE_SECONDS)
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
        """Bytes of the worker's metrics.jsonl that were copied here; -1 if it writes the file here itself."""
        if self.worker is None:
            return -1
        path = self.job.metrics_file
        return path.stat().st_size if path.exists() else 0

    def mirror(self, answer: Answer, offset: int) -> None:
        """Append the worker's new events after ``offset``, unless another process has already."""
        if self.worker is None or not answer.get("events"):
            return
        with self.job.metrics_file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_size == offset:
                file.write(answer["events"].encode())

    def take_events(self) -> None:
        """Copy all events that the worker has written on its host by now; HostError if it does not answer."""
        while self.worker is not None:
            offset = self.mirrored
            count = len(self.observe_host(self.worker.host)["events"].encode())
            # Else there is more, or another process was quicker and has copied less than this answer has.
            if count < MOST_EVENTS and self.mirrored >= offset + count:
                return

    def worker_ports(self, wanted: Sequence[tuple[ProcessSpec, int]]) -> list[int]:
        """Ports at which these workers can listen, by rank: theirs, or free ones for 0.

        HostError names the host and who has a port there.
        """
        by_host: dict[str, list[dict[str, Any]]] = {}
        for spec, port in wanted:
            by_host.setdefault(spec.host, []).append({"name": spec.name, "port": port})
        answers = fanout.on_hosts(
            {name: self.hosts[name] for name in by_host},
            lambda host, cut: errands.run(
                host, "worker_ports", self.args(workers=by_host[host.name]), OBSERVE_SECONDS, cut=cut
            ),
        )
        ports: dict[str, list[int]] = {}
        for name, answer in answers.items():
            if isinstance(answer, HostError):
                raise answer
            ports[name] = answer["ports"]
        return [ports[spec.host].pop(0) for spec, _ in wanted]

    def start_worker(
        self, spec: ProcessSpec, argv: Sequence[str], stop: StopRequest, *, fresh: bool
    ) -> Answer:
        """Start the worker's unit; its host's answer. HostError says why it did not start.

        A stop request ends the wait. ``fresh``: remove events that an earlier attempt left on the host.
        """
        unit = {**worker_start(self.job.id, spec, list(argv)), "forget_events": fresh}
        args = self.args(user=units.USER, token="", seconds=START_SECONDS, units=[unit])
        longest = _longest_start("worker", START_SECONDS)
        return errands.run(self.hosts[spec.host], "start", args, longest, stop)

    def prepare(
        self, hosts: Mapping[str, Host], wanted: Mapping[str, Sequence[Mapping[str, Any]]], stop: StopRequest
    ) -> dict[str, Answer | HostError]:
        """Give hosts the job's directory and token, and start their servers; each one's answer.

        ``wanted``: the units of each host, as its runner says. A stop request ends the wait. Hosts of
        servers come first, and the others are asked only when these have begun: else two jobs with one id,
        of two controllers, may each have a part of the hosts, and both are refused.
        """
        token = self.job.token()
        limits = {item.name: item.start_timeout for item in self.processes.values()}

        def prepare(host: Host, cut: fanout.Cut) -> Answer:
            items = wanted[host.name]
            seconds = max((limits[item["name"]] for item in items), default=0)
            args = self.args(user=units.USER, token=token, seconds=seconds, units=items)
            longest = _longest_start("parameter_server", seconds)
            answer = errands.run(host, "start", args, longest, stop, cut)
            _check_servers(host, items, answer)
            return answer

        answers: dict[str, Answer | HostError] = {}
        for has_units in (True, False):
            if not any(isinstance(answer, HostError) for answer in answers.values()):
                asked = {name: host for name, host in hosts.items() if bool(wanted[name]) == has_units}
                answers |= fanout.on_hosts(asked, prepare, cut_off=False)
        return answers

    def stop(self, role: Role, *, keep_pools: bool = False) -> dict[str, Answer | HostError]:
        """Stop and remove the units of one role on every host; their logs and last counters are kept here.

        Their rows in persistent memory are removed too, unless ``keep_pools``: see ``node.job.stop``. A host
        that has another job with this id leaves that alone, and its HostError has ``jobfiles.TAKEN``.
        """
        args = self.args(role=role, keep_pools=keep_pools, token=self.job.token())
        if keep_pools:  # also where an earlier stop, which told nobody, has removed the units
            args["pools"] = {item.name: item.pools for item in self.processes.values() if item.pools}
        answers = errands.on_all(self.hosts_of(role), "stop", args, STOP_SECONDS[role])
        for answer in answers.values():
            if isinstance(answer, dict):
                for name in self.processes.keys() & answer["stopped"].keys():  # they become names of files
                    self._keep(name, answer["stopped"][name])
        return answers

    def remove_pools(self, servers: Sequence[ProcessSpec]) -> list[HostError]:
        """Remove the rows of these servers in persistent memory; the errors of hosts where that failed."""
        return self._remove("remove_pools", servers, STOP_SECONDS["parameter_server"])

    def remove(self) -> list[HostError]:
        """Remove all that a job that has ended has on its hosts; the errors of hosts where that failed.

        Idempotent.
        """
        return self._remove("remove", list(self.processes.values()), STOP_SECONDS["parameter_server"])

    def _remove(
        self, errand: errands.Errand, processes: Sequence[ProcessSpec], seconds: int
    ) -> list[HostError]:
        listed = [{"name": item.name, "unit": item.unit, "pools": item.pools} for item in processes]
        hosts = {item.host: self.hosts[item.host] for item in processes}
        answers = errands.on_all(hosts, errand, self.args(servers=listed), seconds)
        return [answer for answer in answers.values() if isinstance(answer, HostError)]

    def _keep(self, name: str, item: Mapping[str, Any]) -> None:
        """Keep log and last counters here, so that they can be read without the host."""
        if item["log"]:
            self.job.log(name).write_text("\n".join(item["log"]) + "\n")
        if item["metrics"]:
            write_json(self.job.server_metrics(name), item["metrics"])


def with_passwords(hosts: dict[str, Host], inventory: Path) -> dict[str, Host]:
    """The hosts with the passwords of the inventory where they need some: job.json has none."""
    if all(host.login == "key" or remote.has_password(host) for host in hosts.values()):
        return hosts
    from provision.inventory.loader import load  # slow to import

    known = load(inventory).hosts
    return {
        name: replace(host, first_login=known[name].first_login) if name in known else host
        for name, host in hosts.items()
    }


def _longest_start(role: Role, seconds: int) -> int:
    """Seconds that a host may need to start units of a role, each of which may take ``seconds``.

    It stops earlier units, may wait twice for new ones (systemd, then ready files) and stops those that do
    not begin; and before that, another start there may do the same.
    """
    return 2 * (2 * STOP_SECONDS[role] + 2 * seconds)


def _check_servers(host: Host, items: Sequence[Mapping[str, Any]], answer: Answer) -> None:
    """HostError unless the answer to a start says where each server of ``items`` listens, and of no other."""
    wanted = sorted(item["name"] for item in items if item["role"] != "worker")
    try:
        told = [
            (str(item["name"]), item["host"], int(item["port"]), int(item["pid"]), int(item["started"]))
            for item in answer["servers"]
        ]
        found = sorted(name for name, address, port, *_ in told if address and port)
        str(answer["boot"])
    except (KeyError, TypeError, ValueError) as error:
        raise HostError(host.name, f"sent an answer that cannot be read: {error!r}") from None
    if found != wanted:
        raise HostError(
            host.name,
            f"has not told where its servers listen: expected {', '.join(wanted) or 'none'}, found "
            f"{', '.join(found) or 'none'}",
        )


def ended(states: list[ProcessState], answers: Mapping[str, Answer | HostError]) -> list[ProcessState]:
    """The states after ``Fleet.stop``: a unit that its host no longer knows has ended."""
    found = []
    for item in states:
        answer = answers.get(item.host)
        if item.unit and item.exit_code is None and isinstance(answer, dict):
            found_there = answer["stopped"].get(item.name, {})
            rows = found_there.get("rows") or answer["rows"].get(item.name, "")
            update = {"exit_code": int(found_there.get("exit_code", 0)), "rows": rows}
            item = item.model_copy(update=update)
        found.append(item)
    return found


class HostProcess(Process):
    """A process that runs as a unit; ``how`` says how it ended."""

    def __init__(self, fleet: Fleet, spec: ProcessSpec, pid: int = 0, boot: str = "") -> None:
        self.fleet, self.spec = fleet, spec
        self.pid, self.boot = pid, boot
        self.exit_code: int | None = None
        self.how = ""

    def poll(self) -> int | None:
        """The exit code once it has ended or is another process than the one started."""
        return self.exit_code

    def send(self, number: int) -> None:
        """See ``Process``; HostError if its host does not answer."""
        args = self.fleet.args(name=self.spec.name, signal=signal.Signals(number).name)
        errands.run(self.fleet.hosts[self.spec.host], "send", args, OBSERVE_SECONDS)

    def how_it_ended(self) -> str:
        """See ``Process``."""
        return self.how or "still runs"


class HostServer(HostProcess):
    """A parameter server that the launch has started as a unit; ``refresh`` gives it its host's answer."""

    def __init__(self, fleet: Fleet, spec: ProcessSpec, prepared: ProcessState) -> None:
        super().__init__(fleet, spec, prepared.pid, prepared.boot)
        self.started, self.endpoint = prepared.started, prepared.endpoint
        # systemd may restart it, and training continues
        self.waited_for = bool(fleet.spec.settings.get("server_wait"))

    def refresh(self, answer: Answer | HostError) -> None:
        """See ``Process``."""
        if isinstance(answer, HostError):
            self.exit_code, self.how = -signal.SIGKILL, f"cannot be reached any more: {answer.reason}"
            return
        found = answer["processes"].get(self.spec.name)
        if found is None:
            self.exit_code, self.how = 0, "was removed from its host"
        elif self.waited_for and found["up"] and found["started"]:
            self.pid, self.started, self.boot = found["pid"], found["started"], answer["boot"]
        elif answer["boot"] != self.boot:
            self.exit_code, self.how = -signal.SIGKILL, "was lost: its host rebooted"
        elif not found["up"] or found["started"] != self.started or found["pid"] != self.pid:
            self.exit_code = found["exit_code"] or 0
            self.how = f"was lost: {found['how']}" if found["how"] else "was restarted"

    def state(self) -> ProcessState:
        """For ``state.json``; a lost server's unit is still there until it is stopped."""
        return self.spec.state(pid=self.pid, started=self.started, endpoint=self.endpoint, boot=self.boot)


class HostWorker(HostProcess):
    """A worker that runs as a unit on another host, observed every few seconds.

    How it ended is read from the trainer's events: systemd unloads a unit that ended well or was stopped, and
    then knows no more of it than of one that never ran.
    """

    def __init__(self, fleet: Fleet, spec: ProcessSpec, emit: Callable[[Answer], None]) -> None:
        """``emit`` gets events of a host that does not answer."""
        super().__init__(fleet, spec)
        self._emit = emit
        self.first = fleet.worker is not None and fleet.worker.name == spec.name  # it writes the events
        self._since = 0  # where the events of its run begin
        self._answered = time.monotonic()
        self._is_unanswered = False  # the last observation
        self._next = 0.0

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], stop: StopRequest, *, fresh: bool = True
    ) -> None:
        """See ``Process``; it may be there although its host refused."""
        spec = self.spec.model_copy(update={"environment": dict(environment)})
        try:
            if self.first and not fresh:
                self.fleet.take_events()
                self._since = self.fleet.mirrored
            answer = self.fleet.start_worker(spec, argv, stop, fresh=fresh and self.first)
        except HostError as error:
            if stop.count:
                raise Stopped from None
            raise Refused(f"{spec.name} on {spec.host}: {error.reason}") from None
        self.boot, self.pid = answer["boot"], int(answer["workers"].get(spec.name, 0))

    def poll(self) -> int | None:
        """Observe it, at most every POLL_SECONDS; the exit code once it has ended or is out of reach."""
        now = time.monotonic()
        if self.exit_code is not None or now < self._next:
            return self.exit_code
        try:
            answer = self.fleet.observe_host(self.spec.host)
        except HostError as error:
            if not self._is_unanswered:
                self._say("host_silent", message=error.reason, wait_s=round(self.fleet.silence))
            self._is_unanswered = True
            if now - self._answered > self.fleet.silence:
                self.give_up(error.reason)
        else:
            if self._is_unanswered:
                self._say("host_answers", seconds=round(time.monotonic() - self._answered, 1))
            self._is_unanswered = False
            self._answered = time.monotonic()
            found = answer["processes"].get(self.spec.name, {})
            self.pid = found.get("pid") or self.pid
            if not found.get("up") and found.get("active") != "deactivating":
                self._ended(found, answer["boot"])
        self._next = time.monotonic() + POLL_SECONDS
        return self.exit_code

    def _say(self, kind: str, **facts: Any) -> None:
        self._emit({"event": kind, "host": self.spec.host, "name": self.spec.name, **facts})

    def _ended(self, found: Mapping[str, Any], boot: str) -> None:
        """Store how it ended, from its host or from its events."""
        code, how = int(found.get("exit_code") or 0), str(found.get("how") or "")
        if self.first and not code:
            try:
                self.fleet.take_events()
            except HostError:
                return  # the next poll asks again
            event = last_end(self.fleet.job.metrics_file, self._since)
            if event is not None:
                self.exit_code = _EXIT_CODES[event["event"]]
                self.how = f"ended with an error: {event.get('message')}" if self.exit_code == 1 else "ended"
                return
        if self.boot and boot != self.boot:
            self.exit_code, self.how = -signal.SIGKILL, "ended: its host rebooted"
        elif not found:
            self.exit_code, self.how = 1, "ended: its systemd unit was removed"
        elif self.first and not code:
            self.exit_code, self.how = -signal.SIGTERM, "was killed before it reported its last step"
        else:
            self.exit_code = code
            self.how = how[3:] if how.startswith("it ") else f"was lost: {how}"

    def send(self, number: int) -> None:
        """See ``Process``; a host that does not answer is reported."""
        try:
            super().send(number)
        except HostError as error:
            self._emit({"event": "trouble", "message": str(error)})
            if number == signal.SIGKILL:
                self.give_up(error.reason)

    def give_up(self, reason: str) -> None:
        """Its host does not answer, so it is unknown whether the process runs."""
        self.exit_code, self.how, self.silent = 1, f"cannot be reached any more: {reason}", True

    def state(self) -> ProcessState:
        """For ``state.json``."""
        exit_code = None if self.silent else self.exit_code
        return self.spec.state(pid=self.pid, started=0, boot=self.boot, exit_code=exit_code)


def message_of(answers: Mapping[str, Answer | HostError], known: str = "") -> str:
    """The hosts that could not stop their part, with reasons that are not in ``known``; empty if all did."""
    lost = [error for error in answers.values() if isinstance(error, HostError)]
    return "; ".join(
        f"{error.host} could not be told to stop its part"
        + ("" if error.reason in known else f": {error.reason}")
        for error in lost
    )


def describe(answers: Mapping[str, Answer | HostError]) -> list[str]:
    """One line per host: what ``stop`` did there."""
    lines = []
    for host, answer in answers.items():
        if isinstance(answer, HostError):
            lines.append(f"[red]✗[/] {host}: {answer.reason}")
            continue
        ran = [name for name, item in answer["stopped"].items() if item["ran"]]
        idle = [name for name in answer["stopped"] if name not in ran]
        words = [f"stopped {', '.join(ran)}"] if ran else []
        words += [f"removed {', '.join(idle)}, which did not run"] if idle else []
        lines.append(f"[green]✓[/] {host}: {'; '.join(words) or 'nothing of the job is left there'}")
    return lines
