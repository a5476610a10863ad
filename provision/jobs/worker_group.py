"""The workers of one run: start, signal, wait, kill; which were lost, and who continues without them."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence

from provision.cluster.errors import HostError
from provision.hosts.stop_request import TICK
from provision.jobs.backends import Process, Refused
from provision.jobs.backends.ssh import ended, message_of
from provision.jobs.backends.units import INTERRUPTED, WORKER_LOST
from provision.jobs.job_run import JobRun
from provision.jobs.store import LOCAL_RANK, LOCAL_WORLD_SIZE, SERVERS, WORKERS, ProcessSpec, ProcessState

_MISTAKES = (1, 2)  # exit statuses of the trainer that starting again would not change


class WorkerGroup:
    """All workers of a run."""

    def __init__(self, run: JobRun) -> None:
        self.run = run
        self.everyone = [spec for spec in run.spec.processes if spec.role == "worker"]
        self.specs = self.everyone  # of those that train, by rank
        self.members: list[Process] = []  # by rank
        self.killed: list[Process] = []  # members that did not end after SIGTERM
        self.dropped: list[Process] = []  # lost workers without which the others continue
        self.continues = run.settings.get("on_worker_lost") == "continue"  # without lost ones
        self._losses: list[str] = []  # how the dropped ones were lost
        self._stopped: list[ProcessState] = []  # all, after they were stopped
        self._generation = 0

    @property
    def warning(self) -> str:
        """How many workers are left of how many, and why; empty if it is all of them."""
        if not self._losses:
            return ""
        return (
            f"{len(self.specs)} of {len(self.specs) + len(self.dropped)} workers: {'; '.join(self._losses)}"
        )

    def states(self) -> list[ProcessState]:
        """For ``state.json``."""
        everyone = [*self.members, *self.dropped]
        return self._stopped or [state for worker in everyone if (state := worker.state())]

    def are_running(self) -> bool:
        """Whether at least one has not ended."""
        return any(worker.poll() is None for worker in self.members)

    def have_succeeded(self) -> bool:
        """Whether all have ended with exit status 0."""
        return all(worker.poll() == 0 for worker in self.members)

    def failed(self) -> list[Process]:
        """Those that ended, but neither at the end of training nor by a stop request."""
        return list(filter(has_failed, self.members))

    def are_silent(self) -> bool:
        """Whether the host of at least one does not answer."""
        return any(worker.silent for worker in self.members)

    def start(self, endpoints: str, *, resume: bool) -> None:
        """Start all; ``endpoints`` are the servers'. Raises Refused, Stopped."""
        self.members, self.killed = [], []
        words = {SERVERS: endpoints, WORKERS: free_endpoints(len(self.specs)), **self._with_ports()}
        # Servers still hold the places of workers whose host has vanished, and may not serve those that come
        # back: so each start is of a higher generation, also when another supervisor began the one before.
        self._generation = max(self._generation + 1, int(time.time()))
        for spec, argv in zip(self.specs, commands(self.specs, self.everyone, words), strict=True):
            several = len(self.everyone) > 1 and not spec.adapted
            more = ["--generation", str(self._generation)] if several else []
            argv = with_words(spec, argv, [*more, *(["--resume"] if resume else [])])
            worker = self.run.process(spec)
            self.members.append(worker)  # from now on it may be there, and must be stopped
            worker.start(argv, environment_among(spec, self.specs), self.run.stop, fresh=not resume)
            self.run.write_state()
            self.run.emit({"event": "worker", "pid": worker.pid, "name": spec.name, "host": spec.host})

    def _with_ports(self) -> dict[str, str]:
        """The endpoints of workers on hosts as their command lines have them, and with ports of today.

        Other jobs may have taken those of the run before. Raises Refused, which names who has a port that the
        inventory sets.
        """
        argv = commands(self.specs, self.everyone, {})[0]
        # Workers of this machine keep what the inventory sets, which no host is asked about.
        if not self.specs[0].unit or "--workers" not in argv:
            return {}
        listed = argv[argv.index("--workers") + 1]
        places = [place.rpartition(":") for place in listed.split(",")]
        wanted = [(spec, int(port)) for spec, (_, _, port) in zip(self.specs, places, strict=True)]
        try:
            ports = self.run.fleet.worker_ports(wanted)
        except HostError as error:
            raise Refused(f"{error}; no worker was started") from None
        return {
            listed: ",".join(f"{where}:{port}" for (where, _, _), port in zip(places, ports, strict=True))
        }

    def drop_lost_of_queue(self) -> None:
        """Drop lost workers of a queue: the others neither wait for them nor restart."""
        # Worker 0 writes the checkpoints: without it training cannot continue.
        of_queue = self.continues and self.run.settings.get("workqueue")
        if of_queue and (lost := list(filter(was_lost, self.members[1:]))):
            self._drop(lost, [item.spec for item in self.members if item not in lost], again=False)

    def drop_lost(self) -> bool:
        """Drop lost workers before the others restart; False if these cannot continue without them."""
        lost = list(filter(was_lost, self.members))
        lost = [worker for worker in lost if worker not in self.killed] or lost
        left = rest(self.specs, {worker.spec.name for worker in lost})
        if not (self.continues and lost and left):
            return False
        self._drop(lost, left, again=True)
        return True

    def _drop(self, lost: list[Process], left: list[ProcessSpec], *, again: bool) -> None:
        self._losses += [f"{worker.label} {worker.how_it_ended()}" for worker in lost]
        dropped = [worker for worker in self.members if worker.spec not in left]
        self.specs = left
        self.dropped += dropped
        self.members = [worker for worker in self.members if worker not in dropped]
        for worker in dropped:
            worker.end(self.run.limits.server)
        self.run.write_state()
        self.run.emit({"event": "workers_go_on", "message": self.warning, "again": again})

    def signal(self, number: int) -> None:
        """Signal those that run."""
        for worker in self.members:
            if worker.poll() is None:
                worker.send(number)

    def wait(self, seconds: float) -> bool:
        """Show events until all have ended; False after ``seconds`` or at a further stop request."""
        asked, deadline = self.run.stop.count, time.monotonic() + seconds
        while self.are_running():
            self.run.read_events()
            if self.run.stop.count > asked or time.monotonic() > deadline:
                return False
            time.sleep(TICK)
        return True

    def kill(self) -> list[Process]:
        """Kill the workers that still run and return them."""
        self.killed = [worker for worker in self.members if worker.poll() is None]
        for worker in self.killed:
            worker.send(signal.SIGKILL)
        return self.killed

    def stop(self, known: str) -> str:
        """End those that still run; names hosts out of reach, with the reason unless it is in ``known``."""
        if not self.members:
            return ""
        for worker in self.members:
            worker.end(self.run.limits.server)
        answers = self.run.fleet.stop("worker")
        self._stopped = ended(self.states(), answers)
        left = message_of(answers, known)
        try:
            self.run.fleet.take_events()
        except (HostError, OSError) as error:
            left = left or str(error)
        return left


def has_failed(worker: Process) -> bool:
    """Whether it ended, but neither at the end of training nor by a stop request."""
    return worker.poll() not in (None, 0, INTERRUPTED)


def was_lost(worker: Process) -> bool:
    """Whether it was killed or its host does not answer; not after a mistake or another's loss."""
    return worker.silent or (has_failed(worker) and worker.poll() not in (*_MISTAKES, WORKER_LOST))


def has_mistake(worker: Process) -> bool:
    """Whether it ended with an error that it would have again."""
    return worker.poll() in _MISTAKES and not worker.silent


def rest(specs: Sequence[ProcessSpec], lost: Collection[str]) -> list[ProcessSpec]:
    """The workers that continue without `lost` (names), by rank; none if training cannot continue.

    The first one's host has the run directory. So if the first is lost, it is started there again, and the
    last one beside it gives way.
    """
    left = [spec for spec in specs if spec.name not in lost]
    first = specs[0]
    if first.name not in lost:
        return left
    beside = [spec for spec in left if spec.host == first.host]
    return [first, *(spec for spec in left if spec is not beside[-1])] if beside else []


def commands(
    specs: Sequence[ProcessSpec], everyone: Sequence[ProcessSpec], words: Mapping[str, str]
) -> list[list[str]]:
    """The command lines of `specs`, which are some of `everyone`; `words` are replaced where they stand."""
    ranks = [everyone.index(spec) for spec in specs]
    found = []
    for rank, spec in enumerate(specs):
        own, scripts = _parts(spec)
        found.append([*(words.get(word, word) for word in _select_rank(own, rank, ranks)), *scripts])
    return found


def environment_among(spec: ProcessSpec, specs: Sequence[ProcessSpec]) -> dict[str, str]:
    """The environment of one of `specs`, with its number among those on its host."""
    if LOCAL_RANK not in spec.environment:
        return spec.environment
    beside = [item for item in specs if item.host == spec.host]
    local = {LOCAL_RANK: str(beside.index(spec)), LOCAL_WORLD_SIZE: str(len(beside))}
    return {**spec.environment, **local}


def with_words(spec: ProcessSpec, argv: Sequence[str], more: Sequence[str]) -> list[str]:
    """The command line with more words of the trainer's own, before the arguments of a script."""
    scripts = _parts(spec)[1]
    own = argv[: len(argv) - len(scripts)]
    return [*own, *more, *scripts]


def _parts(spec: ProcessSpec) -> tuple[list[str], list[str]]:
    """The trainer's own words, and what follows from ``--`` on: the script's, which stay as they are."""
    argv = spec.argv
    if spec.adapted or "--script" not in argv:
        return argv, []
    end = argv.index("--", argv.index("--script")) if "--" in argv[argv.index("--script") :] else len(argv)
    return argv[:end], argv[end:]


def _select_rank(argv: Sequence[str], rank: int, ranks: Sequence[int]) -> list[str]:
    """A worker's command line, renumbered: number `rank` of the workers that had the numbers `ranks`."""
    words = list(argv)
    for place, word in enumerate(argv[:-1], start=1):
        if word == "--rank":
            words[place] = str(rank)
        elif word == "--workers" and words[place] != WORKERS:
            endpoints = words[place].split(",")
            words[place] = ",".join(endpoints[number] for number in ranks)
    return words


def free_endpoints(count: int) -> str:
    """Ports of this machine that are free now; another process may take them before they are used."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return ",".join(f"127.0.0.1:{item.getsockname()[1]}" for item in found)
