"""Runs the processes of one job and leaves none behind, here or on its hosts.

Servers first, then the workers. Those of this machine are children, each in a session of its own with a pipe
as standard input: they end by themselves when it closes, which happens even when this process is killed.
Those of other hosts are systemd units: Ansible has started the servers before; they are stopped at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from provision.cluster.errors import HostError
from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs import worker_group
from provision.jobs.child import Child, Refused, Stopped, start, wait_ready
from provision.jobs.fleet import Fleet, HostServer, HostWorker, describe, ended, message_of, readopt
from provision.jobs.metrics import Event, MetricsTail
from provision.jobs.store import (
    DONE,
    SERVERS,
    WORKERS,
    Job,
    JobSpec,
    JobState,
    Phase,
    ProcessSpec,
    ProcessState,
)
from provision.jobs.units import WORKER_LOST
from provision.jobs.worker_group import Worker
from provision.node import process


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds, before the next harder measure."""

    ready: float = 60.0  # a server's start
    checkpoint: float = 600.0  # a worker that was told to stop: it writes a checkpoint first
    server: float = 30.0  # a server that was told to stop
    loss: float = 20.0  # a worker whose server, or another worker, died: it says so itself
    # At most so many restarts of a server within `restart_window`, as systemd does with units.
    restarts: int = 5
    restart_window: float = 600.0
    restart_pause: float = 1.0  # before it


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
        self.fleet = Fleet(job, self.spec)
        # Ansible has started these; their endpoints are in state.json, which this object writes from now on.
        prepared = job.state()
        known = {item.name: item for item in prepared.processes if item.unit}
        self.events_from = prepared.events_from
        specs = self.fleet.processes
        waited = bool(self.spec.settings.get("server_wait"))
        self.units = [
            readopt(specs[name], item, waited_for=waited) for name, item in known.items() if name in specs
        ]
        self.group = [item for item in self.spec.processes if item.role == "worker"]  # the workers that train
        self.workers: list[Worker] = []  # by rank
        self.deaf: list[Worker] = []  # workers that had to be killed
        self.gone: list[Worker] = []  # lost workers that the others go on without
        self.losses: list[str] = []  # how they were lost
        self.last: dict[str, Event] = {}  # kind of event -> the last one of this run
        self.stopped: dict[str, ProcessState] = {}  # units after they were stopped
        self.restarts: dict[str, list[float]] = {}  # when servers were started again
        self.ended_anew = False  # whether lost workers were started once more after the last step
        self.phase: Phase = "starting"
        self.generation = 0  # of the workers

    def run(self, resume: bool = False) -> Outcome:
        """Start everything, wait for the end, stop everything; ``state.json`` says how far it is."""
        outcome = Outcome("failed", "the launcher failed; see its log", 1)
        try:
            outcome = self._run(resume)
        except Refused as error:
            outcome = Outcome("failed", str(error), 1)
        except Stopped:
            outcome = Outcome("interrupted", "stopped before training began", 130)
        finally:
            left = self._stop_workers(outcome.message)
            if self._is_over() and outcome.phase != "done":
                outcome = Outcome("done", DONE, 0)  # a host that had been out of reach has said so now
            # Rows in persistent memory go with the end of training alone. Where nobody can know whether the
            # trainer has written a checkpoint, one of them may need these rows.
            keep = outcome.phase != "done" and (bool(left) or self.job.saved())
            left = "; ".join(words for words in (left, self._stop_servers(outcome.message, keep)) if words)
            if left:
                message = f"{outcome.message}; {left}; when it answers again: oeprov stop {self.job.id}"
                outcome = replace(outcome, message=message)
            self._write(outcome.phase, outcome.message)
        return outcome

    def _run(self, resume: bool) -> Outcome:
        if not resume:
            self.job.metrics_file.unlink(missing_ok=True)
            self.events_from = 0
        self._write("starting")
        self.tail = MetricsTail(self.job.metrics_file)
        servers = [spec for spec in self.spec.processes if spec.role == "parameter_server"]
        for spec in servers:
            if not spec.unit:
                self.job.ready_file(spec.name).unlink(missing_ok=True)
                if not resume:
                    self.job.remove_pools(spec)
                self.children.append(start(self.job, spec, spec.argv))
                self._write(self.phase)
        for child in list(self.children):
            self._wait_ready(child)
        if self.stop.count:
            raise Stopped
        found = {server.spec.name: server.endpoint for server in self.servers}
        endpoints = ",".join(found[spec.name] for spec in servers)
        restarts = 0
        while True:
            self._start_workers(endpoints, resume=resume)
            outcome = self._watch()
            if not self._may_start_again(outcome):
                return outcome
            finishing = self._has_trained() and not self.ended_anew
            if finishing or (restarts < int(self.spec.settings.get("restarts") or 0) and not self._silent()):
                restarts += not finishing
                self.ended_anew = self.ended_anew or finishing
                self._emit({"event": "workers_restarted", "message": outcome.message, "times": restarts})
            elif not self._regroup():
                return outcome
            if not all(self._back(child) for child in self._dead_servers()):
                return outcome
            resume = True

    def _start_workers(self, endpoints: str, *, resume: bool) -> None:
        self.children = [child for child in self.children if child not in self.workers]
        self.workers, self.deaf = [], []
        words = {SERVERS: endpoints, WORKERS: free_endpoints(len(self.group))}
        everyone = [item for item in self.spec.processes if item.role == "worker"]
        # Servers still hold the places of workers whose host has vanished, and may not serve those that come
        # back: so each start is of a higher generation, also when another supervisor began the one before.
        self.generation = max(self.generation + 1, int(time.time()))
        for spec, argv in zip(self.group, worker_group.commands(self.group, everyone, words), strict=True):
            several = len(everyone) > 1 and not spec.adapted
            more = ["--generation", str(self.generation)] if several else []
            argv = worker_group.with_words(spec, argv, [*more, *(["--resume"] if resume else [])])
            worker = self._start_worker(spec, argv, fresh=not resume)
            self._emit({"event": "worker", "pid": worker.pid, "name": spec.name, "host": spec.host})
        self._write("running")

    def _start_worker(self, spec: ProcessSpec, argv: list[str], *, fresh: bool) -> Worker:
        if not spec.unit:
            child = start(self.job, spec, argv)
            self.workers.append(child)
            self.children.append(child)
            self._write(self.phase)
            return child
        worker = HostWorker(self.fleet, spec)
        self.workers.append(worker)  # from now on it may be there, and must be stopped
        try:
            worker.start(argv, fresh=fresh)
        except HostError as error:
            raise Refused(f"{spec.name} on {spec.host}: {error.reason}") from None
        return worker

    def _may_start_again(self, outcome: Outcome) -> bool:
        """Whether workers may restart: one of several or a server was lost, without a user's mistake.

        A server that is a child is then started again here, one that is a unit by its system. After the last
        step they may once, though there is only one: what is left is evaluation and export.
        """
        if outcome.phase != "failed" or self.stop.count:
            return False
        several = len(self.workers) > 1 and (self.spec.settings.get("restarts") or self.goes_on)
        if not (several or self._has_trained()):
            return False
        mistakes = any(map(worker_group.has_mistake, self.workers))
        return self.job.saved() and not (mistakes and not self._dead_servers())

    def _has_trained(self) -> bool:
        """Whether all steps were made, and hosts that could make the rest answer."""
        return "trained" in self.last and not any(map(worker_group.is_silent, self.workers))

    def _dead_servers(self) -> list[Child]:
        return [child for child in self.children if child not in self.workers and child.poll() is not None]

    @property
    def goes_on(self) -> bool:
        """Whether the rest of the workers goes on without one that was lost."""
        return self.spec.settings.get("on_worker_lost") == "continue"

    def _silent(self) -> bool:
        """Whether a worker cannot be restarted because its host does not answer."""
        return self.goes_on and any(map(worker_group.is_silent, self.workers))

    def _regroup(self) -> bool:
        """Go on with the remaining workers, if some were lost and the job may continue without them."""
        lost = [
            worker for worker in self.workers if worker_group.was_lost(worker) and worker not in self.deaf
        ]
        lost = lost or [worker for worker in self.deaf if worker_group.was_lost(worker)]
        left = worker_group.rest(self.group, {worker.spec.name for worker in lost})
        if not (self.goes_on and lost and left):
            return False
        self._go_on_with(left, lost, again=True)
        return True

    def _let_go(self) -> None:
        """Drop lost workers of a queue: the others neither wait for them nor restart."""
        if not (self.goes_on and self.spec.settings.get("workqueue")):
            return
        # Worker 0 writes the checkpoints: without it training cannot continue.
        lost = list(filter(worker_group.was_lost, self.workers[1:]))
        if lost:
            self._go_on_with([item.spec for item in self.workers if item not in lost], lost, again=False)

    def _go_on_with(self, left: list[ProcessSpec], lost: list[Worker], *, again: bool) -> None:
        self.losses += [f"{worker.label} {worker.how_it_ended()}" for worker in lost]
        gone = [worker for worker in self.workers if worker.spec not in left]
        self.group = left
        self.gone += gone
        self.workers = [worker for worker in self.workers if worker not in gone]
        for worker in gone:
            if isinstance(worker, Child):
                self.children.remove(worker)
                worker.end(self.limits.server)
        self._write(self.phase)
        self._emit({"event": "workers_go_on", "message": self.warning, "again": again})

    @property
    def warning(self) -> str:
        """How many workers are left of how many, and why; empty if it is all of them."""
        if not self.losses:
            return ""
        return f"{len(self.group)} of {len(self.group) + len(self.gone)} workers: {'; '.join(self.losses)}"

    @property
    def servers(self) -> list[Child | HostServer]:
        """Every server, wherever it runs."""
        return [*(child for child in self.children if child not in self.workers), *self.units]

    def _watch(self) -> Outcome:
        while True:
            self._let_go()
            if any(worker.poll() not in (None, 0) for worker in self.workers):
                break
            if all(worker.poll() == 0 for worker in self.workers):
                break
            self._events()
            if self.stop.wait(TICK):
                self._drain()
                break
            for child in list(self.children):
                if child in self.workers or child.poll() is None:
                    continue
                if not self._waits() or not self._start_again(child):
                    return self._server_lost(child)
        return self._ended()

    def _ended(self) -> Outcome:
        """How the run ended: all workers have ended, or one has and the others cannot continue."""
        failed = list(filter(worker_group.failed, self.workers))
        if failed and self.goes_on and self.spec.settings.get("workqueue"):
            for worker in self.workers:
                self._signal(worker, signal.SIGTERM)  # they would go on by themselves
        deaf = self._wait_for(self.workers, self.limits.loss if failed else self.limits.checkpoint)
        self._events()
        if "end" in self.last:
            by = f" by {self.warning}" if self.warning else ""
            return Outcome("done", DONE + by, 0)
        if all(worker.poll() == 0 for worker in self.workers):
            first = self.workers[0]
            return Outcome("failed", f"{first.label} ended, but {self.job.metrics_file} has no end event", 1)
        failed += [w for w in self.workers if w not in failed and worker_group.failed(w)]
        if not all(worker in deaf for worker in failed):
            failed = [worker for worker in failed if worker not in deaf]
        if failed:
            self._ask_hosts()
            dead = next((server for server in self.servers if server.poll() is not None), None)
            if dead is not None:
                return self._server_lost(dead)
        if not failed or self.stop.count:
            saved = self.last.get("interrupted", {})
            if saved.get("path"):
                return Outcome("interrupted", f"stopped at step {saved.get('step')}, which is saved", 130)
            if not failed:
                step = saved.get("step")
                words = f"after step {step}; nothing is saved" if step else "before the first step"
                return Outcome("interrupted", f"stopped {words}", 130)
            message = f"stopped without a new checkpoint: the worker {failed[0].how_it_ended()}"
            return Outcome("interrupted", message, 130)
        # The cause is the lost worker, not the ones that noticed.
        worker = next((item for item in failed if item.poll() != WORKER_LOST), failed[0])
        code, said = worker.poll(), self.last.get("error", {}).get("message")
        how = worker.how_it_ended()
        if said and code and code > 0 and worker is self.workers[0]:
            how = f"ended with exit status {code}: {said}"
        return Outcome("failed", f"{worker.label} {how}", 1)

    def _wait_for(self, workers: Sequence[Worker], seconds: float) -> list[Worker]:
        """Wait until these have ended; kill them after ``seconds`` or at a second stop request: which."""
        asked, deadline = self.stop.count, time.monotonic() + seconds
        while any(worker.poll() is None for worker in workers):
            self._events()
            if self.stop.count > asked or time.monotonic() > deadline:
                return self._kill(workers)
            time.sleep(TICK)
        return []

    def _kill(self, workers: Sequence[Worker]) -> list[Worker]:
        """Kill the workers that still run and return them."""
        self.deaf = [worker for worker in workers if worker.poll() is None]
        for worker in self.deaf:
            self._signal(worker, signal.SIGKILL)
            if isinstance(worker, Child):
                worker.popen.wait()
        return self.deaf

    def _is_over(self) -> bool:
        """Whether training finished, even if processes failed afterwards.

        Only our own trainer can tell: programs of others may end well though they have lost a server.
        """
        return "end" in self.last and not any(spec.adapted for spec in self.spec.processes)

    def _ask_hosts(self) -> None:
        """Ask the hosts which of their servers are no longer the ones that were started."""
        if self.units:
            answers = self.fleet.look()
            for server in self.units:
                server.refresh(answers[server.spec.host])

    def _waits(self) -> bool:
        """Whether the workers wait for a lost server."""
        return bool(self.spec.settings.get("server_wait"))

    def _start_again(self, child: Child) -> bool:
        """Restart a server at its address while workers wait for it; False after too many restarts."""
        times, now = self.restarts.setdefault(child.spec.name, []), time.monotonic()
        times[:] = [then for then in times if now - then < self.limits.restart_window]
        if not self.spec.settings.get("server_wait") or len(times) >= self.limits.restarts:
            return False
        times.append(now)
        how = child.how_it_ended()
        self._emit({"event": "server_lost", "name": child.spec.name, "host": child.spec.host, "message": how})
        if self.stop.wait(self.limits.restart_pause):
            return True  # the worker is told to stop instead
        argv = list(child.spec.argv)
        for place, word in enumerate(argv[:-1]):
            if word == "--port":
                argv[place + 1] = child.endpoint.rpartition(":")[2]
        fresh = start(self.job, child.spec, argv)
        fresh.endpoint, fresh.restarts = child.endpoint, child.restarts + 1
        self.children[self.children.index(child)] = fresh
        if child.popen.stdin is not None:
            child.popen.stdin.close()
        self._write(self.phase)
        self._emit(
            {
                "event": "server_restarted",
                "name": child.spec.name,
                "host": child.spec.host,
                "endpoint": fresh.endpoint,
                "pid": fresh.pid,
            }
        )
        return True

    def _back(self, child: Child) -> bool:
        """Restart a server and wait until it listens; False when it does not."""
        place = self.children.index(child)
        self.job.ready_file(child.spec.name).unlink(missing_ok=True)
        try:
            if self._start_again(child):
                self._wait_ready(self.children[place])
                return True
        except (Refused, Stopped):
            pass
        return False

    def _server_lost(self, server: Child | HostServer) -> Outcome:
        self._emit({"event": "server_lost", "name": server.spec.name, "host": server.spec.host})
        if self._waits():
            for worker in self.workers:
                if worker.poll() is None:
                    self._signal(worker, signal.SIGTERM)  # it would wait for the server
        # After the last step no server is needed: a worker may be exporting the checkpoint's rows.
        seconds = self.limits.checkpoint if "trained" in self.last and not self._waits() else self.limits.loss
        deadline = time.monotonic() + seconds
        while any(worker.poll() is None for worker in self.workers):
            if time.monotonic() > deadline or self.stop.count:
                break
            self._events()
            time.sleep(TICK)
        self._events()
        if self._is_over():
            return Outcome("done", DONE, 0)
        message = f"{server.label}, listening on {server.endpoint}, {server.how_it_ended()}"
        if isinstance(server, Child) and server.restarts:
            message += f" (it was started again {server.restarts} times before)"
        said = self.last.get("error", {}).get("message")
        if self._kill(self.workers):
            message += "; the worker did not notice and was stopped"
        elif said:
            message += f"; the worker says: {str(said).split(';')[0]}"
        return Outcome("failed", message, 1)

    def _drain(self) -> None:
        """Let the workers finish their step and write a checkpoint; a second stop request kills them."""
        self._write("stopping")
        self._emit({"event": "stopping", "again": "ends it at once, without a checkpoint"})
        for worker in self.workers:
            self._signal(worker, signal.SIGTERM)
        self._wait_for(self.workers, self.limits.checkpoint)

    def _signal(self, worker: Worker, number: int) -> None:
        try:
            worker.send(number)
        except HostError as error:
            self._emit({"event": "trouble", "message": str(error)})
            if number == signal.SIGKILL and isinstance(worker, HostWorker):
                worker.give_up(error.reason)

    def _wait_ready(self, child: Child) -> None:
        ready = wait_ready(child, self.job.ready_file(child.spec.name), self.limits.ready, self.stop)
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

    def _stop_workers(self, said: str) -> str:
        """End workers that still run, read their last events; names hosts out of reach, unless ``said``."""
        for worker in self.workers:
            if isinstance(worker, Child):
                worker.end(self.limits.server)
        left, far = "", self._far_workers()
        if far:
            answers = self.fleet.stop("worker")
            left = message_of(answers, said)
            for worker in far if not left else ():
                worker.end()
            try:
                self.fleet.take_events()
            except (HostError, OSError) as error:
                left = left or str(error)
        for event in self.tail.read() if self.workers else ():
            self.last[event["event"]] = event  # not shown: a broken view must not keep servers running
        return left

    def _stop_servers(self, said: str, keep_pools: bool) -> str:
        """End all servers; names hosts out of reach. ``keep_pools``: keep their rows for a resumed job."""
        for child in reversed(self.children):
            child.end(self.limits.server)
            if not keep_pools:
                self.job.remove_pools(child.spec)
        answers = self.fleet.stop("parameter_server", keep_pools=keep_pools)
        self.stopped = {item.name: item for item in ended([unit.state() for unit in self.units], answers)}
        for line in describe(answers):
            self._emit({"event": "host_stopped", "line": line})
        return message_of(answers, said)

    def _events(self) -> None:
        for event in self.tail.read():
            self._emit(event)

    def _emit(self, event: Event) -> None:
        self.last[event["event"]] = event
        # The screen may have lost its reader, as with `| head`: rich then asks the program to exit. The job
        # goes on; `oeprov status` shows it.
        with contextlib.suppress(BrokenPipeError, SystemExit):
            self.on_event(event)

    def _far_workers(self) -> list[HostWorker]:
        return [worker for worker in [*self.workers, *self.gone] if isinstance(worker, HostWorker)]

    def _write(self, phase: Phase, message: str = "") -> None:
        self.phase = phase
        pid = os.getpid()
        here = [*self.children, *(worker for worker in self.gone if isinstance(worker, Child))]
        everyone: list[Child | HostServer | HostWorker] = [*here, *self.units, *self._far_workers()]
        found = {item.spec.name: self.stopped.get(item.spec.name) or item.state() for item in everyone}
        states = [found[spec.name] for spec in self.spec.processes if spec.name in found]
        self.job.write_state(
            JobState(
                phase=phase,
                supervisor_pid=pid,
                supervisor_started=process.start_time(pid),
                processes=states,
                message=message or self.warning,
                lost=[worker.spec.name for worker in self.gone],
                events_from=self.events_from,
            )
        )


def free_endpoints(count: int) -> str:
    """Free ports of this machine, as far as one can know before they are taken."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return ",".join(f"127.0.0.1:{item.getsockname()[1]}" for item in found)
