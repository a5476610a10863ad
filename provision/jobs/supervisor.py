"""Runs one job: decides its phases and its outcome, and leaves no process behind, here or on its hosts.

Servers first, then the workers. Processes of this machine are children, each in a session of its own with a
pipe as standard input: they end by themselves when it closes, which happens even when this process is killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from provision.cluster.errors import TrainingError
from provision.hosts.stop_request import TICK, StopRequest
from provision.jobs import scale_request, worker_group
from provision.jobs.backends import Process, Refused, Stopped
from provision.jobs.backends.units import WORKER_LOST
from provision.jobs.ending import newest_checkpoint
from provision.jobs.job_run import JobRun, Limits
from provision.jobs.metrics import Event, MetricsTail, summary
from provision.jobs.scale_request import ScaleRequest
from provision.jobs.server_group import ServerGroup
from provision.jobs.store import DONE, Job, JobState, Phase
from provision.jobs.worker_group import WorkerGroup

_STEPPED = ("step", "checkpoint", "server_back")  # events of workers that have begun to train


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``exit_code`` is that of the command."""

    phase: Literal["done", "failed", "interrupted"]
    message: str
    exit_code: int
    goes_on: ScaleRequest | None = None  # with other servers, from the checkpoint at which it was stopped


class Supervisor:
    """One run of one job; ``run`` returns when no process of it is left."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        stop: StopRequest,
        limits: Limits | None = None,
    ) -> None:
        self.job, self.stop, self.limits = job, stop, limits or Limits()
        self.job_run = JobRun(job, on_event, stop, self.limits, lambda: self._write(self.phase))
        self.last = self.job_run.last
        # state.json has the servers that the launch has started; from now on it is written here.
        prepared = job.state()
        self.servers = ServerGroup(self.job_run, prepared.processes)
        self.workers = WorkerGroup(self.job_run)
        self.events_from = prepared.events_from
        self.phase: Phase = "starting"
        self._seen_request = 0  # when that was written

    def run(self, resume: bool = False) -> Outcome:
        """Start everything, wait for the end, stop everything; ``state.json`` says how far it is."""
        outcome, stopped_in_start = Outcome("failed", "the launcher failed; see its log", 1), False
        try:
            outcome = self._run(resume)
        except Refused as error:
            outcome = Outcome("failed", str(error), 1)
        except Stopped:
            outcome, stopped_in_start = Outcome("interrupted", "stopped before training began", 130), True
        finally:
            left = self.workers.stop(outcome.message)
            for event in self.job_run.tail.read() if self.workers.members else ():
                self.last[event["event"]] = event  # not shown: a broken view must not keep servers running
            if stopped_in_start and self._checkpoint_step() is not None:  # that of a restart, or of resume
                outcome = self._stopped([])
            if self._is_over() and outcome.phase != "done":
                outcome = Outcome("done", DONE, 0)  # a host that was out of reach has answered
            # Where nobody can know whether the trainer has written a checkpoint, one may need these rows.
            # Of the spec in memory: what happens to job.json must not keep servers running.
            spec = self.job_run.spec
            keep = self.job.keeps_rows(spec, done=outcome.phase == "done", known=not left)
            left = "; ".join(filter(None, (left, self.servers.stop(outcome.message, keep_pools=keep))))
            if left:
                message = f"{outcome.message}; {left}; when it answers again: oeprov stop {self.job.id}"
                outcome = replace(outcome, message=message, goes_on=None)  # part of it may still run there
            if self.stop.count or not self.last.get("interrupted", {}).get("path"):
                outcome = replace(outcome, goes_on=None)
            self._write("scaling" if outcome.goes_on else outcome.phase, outcome.message)
        return outcome

    def _run(self, resume: bool) -> Outcome:
        if not resume:
            self.job.metrics_file.unlink(missing_ok=True)
            self.events_from = 0
        self._write("starting")
        self.job_run.tail = MetricsTail(self.job.metrics_file)
        endpoints = self.servers.start()
        if self.stop.count:
            raise Stopped
        restarts, extra_used = 0, False
        while True:
            self.workers.start(endpoints, resume=resume)
            self._write("running")
            outcome = self._watch()
            if not self._may_restart(outcome):
                return outcome
            # After the last step workers restart once more, whatever `restarts` says.
            extra = self._has_trained() and not extra_used
            silent = self.workers.continues and self.workers.are_silent()
            if extra or (restarts < int(self.job_run.settings.get("restarts") or 0) and not silent):
                restarts += not extra
                extra_used = extra_used or extra
                event = {"event": "workers_restarted", "message": outcome.message, "times": restarts}
                self.job_run.emit(event)
            elif not self.workers.drop_lost():
                return outcome
            if not self.servers.restart_lost():
                return outcome
            resume = True
            for kind in _STEPPED:
                self.last.pop(kind, None)  # of the workers before

    def _may_restart(self, outcome: Outcome) -> bool:
        """Whether workers may restart: one of several or a server was lost, without a user's mistake.

        After the last step a single worker may too: evaluation and export are left.
        """
        if outcome.phase != "failed" or self.stop.count:
            return False
        settings, workers = self.job_run.settings, self.workers
        several = len(workers.members) > 1 and (settings.get("restarts") or workers.continues)
        if not (several or self._has_trained()):
            return False
        mistakes = any(map(worker_group.has_mistake, workers.members))
        return self.job.has_checkpoint() and not (mistakes and not self.servers.lost())

    def _has_trained(self) -> bool:
        """Whether all steps were made, and the hosts of all workers answer."""
        return "trained" in self.last and not self.workers.are_silent()

    def _is_over(self) -> bool:
        """Whether training finished, even if processes failed afterwards.

        Only our own trainer can tell: programs of others may end well though they have lost a server.
        """
        return "end" in self.last and not any(spec.adapted for spec in self.job_run.spec.processes)

    def _watch(self) -> Outcome:
        """Wait until workers end, a stop request or the loss of a server; how the run ended."""
        while True:
            self.workers.drop_lost_of_queue()
            if self.workers.have_succeeded() or any(w.poll() not in (None, 0) for w in self.workers.members):
                break
            self.job_run.read_events()
            if self.stop.wait(TICK):
                self._drain()
                break
            if (request := self._accepted_request()) is not None:
                self._stop_to_scale(request)
                outcome = self._ended()
                return replace(outcome, goes_on=request) if outcome.phase == "interrupted" else outcome
            for server in self.servers.lost():
                if not self.servers.restart(server):
                    return self._server_lost(server)
        return self._ended()

    def _drain(self) -> None:
        """Let the workers finish their step and write a checkpoint; a second stop request kills them."""
        self._write("stopping")
        self.job_run.emit({"event": "stopping", "again": "ends it at once, without a checkpoint"})
        self.workers.signal(signal.SIGTERM)
        if not self.workers.wait(self.limits.checkpoint):
            self.workers.kill()

    def _accepted_request(self) -> ScaleRequest | None:
        """A new request to go on with other servers; None without one, or if it was refused."""
        seen, self._seen_request = self._seen_request, scale_request.modified(self.job)
        if seen == self._seen_request:
            return None
        try:
            request = scale_request.read(self.job)
        except TrainingError as error:
            self.job_run.emit({"event": "trouble", "message": str(error)})
            return None
        if request is None or request.phase != "asked":
            return None
        self.job_run.read_events()
        if request.waits and "trained" not in self.last and not self._has_stepped():
            self._seen_request = 0  # look again
            return None
        why = self._why_not_now()
        answered = scale_request.write(self.job, request, phase="refused" if why else "accepted", message=why)
        return None if why else answered

    def _why_not_now(self) -> str:
        """Why training cannot be stopped now to go on with other servers; empty if it can."""
        job = self.job.id
        if "trained" in self.last:
            return f"job {job} has made its last step; it needs no other servers"
        if waiting := summary(self.job.metrics_file).waiting:
            return f"job {job} waits for a lost server ({waiting}); scale it when training goes on"
        if self.servers.lost():
            return f"a server of job {job} was lost and is being restarted; scale it when training goes on"
        if not self._has_stepped():
            return f"job {job} has reported no step since its workers started; try again once it has"
        return ""

    def _has_stepped(self) -> bool:
        """Whether the workers have begun to train since they were started."""
        return any(kind in self.last for kind in _STEPPED)

    def _stop_to_scale(self, request: ScaleRequest) -> None:
        """Let the workers finish their step and write a checkpoint with its rows in files.

        A stop request meanwhile ends the job at that checkpoint; a second one kills the workers.
        """
        self._write("scaling", request.words)
        self.job_run.emit({"event": "scaling", "message": request.words})
        self.workers.signal(scale_request.SIGNAL)
        seconds = self.limits.checkpoint
        if not self.workers.wait(seconds) and not (self.stop.count == 1 and self.workers.wait(seconds)):
            self.workers.kill()

    def _ended(self) -> Outcome:
        """How the run ended: all workers have ended, or one has and the others cannot continue."""
        failed = self.workers.failed()
        if failed and self.workers.continues and self.job_run.settings.get("workqueue"):
            self.workers.signal(signal.SIGTERM)  # they would go on by themselves
        in_time = self.workers.wait(self.limits.loss if failed else self.limits.checkpoint)
        killed = [] if in_time else self.workers.kill()
        self.job_run.read_events()
        if "end" in self.last:
            by = f" by {self.workers.warning}" if self.workers.warning else ""
            return Outcome("done", DONE + by, 0)
        first = self.workers.members[0]
        if self.workers.have_succeeded():
            words = f"{first.label} ended, but {self.job.metrics_file} has no end event"
            if self.job_run.settings.get("script"):
                words += ": its script calls os._exit or exec, or closes files that are not its own"
            return Outcome("failed", words, 1)
        # Those that failed by themselves, in front of those that failed after them; then those killed here. A
        # host that does not answer was not killed.
        killed = [worker for worker in killed if not worker.silent]
        failed += [worker for worker in self.workers.failed() if worker not in failed]
        failed = [worker for worker in failed if worker not in killed] or failed
        if failed and (server := self.servers.find_lost()):
            return self._server_lost(server)
        if not failed or self.stop.count:
            return self._stopped(failed)
        # The cause is the lost worker, not the ones that noticed.
        worker = next((item for item in failed if item.poll() != WORKER_LOST), failed[0])
        code, message = worker.poll(), self.last.get("error", {}).get("message")
        how = worker.how_it_ended()
        if message and code and code > 0 and worker is first:
            how = f"ended with exit status {code}: {message}"
        return Outcome("failed", f"{worker.label} {how}", 1)

    def _stopped(self, failed: list[Process]) -> Outcome:
        """How the run ended after a stop request."""
        event = self.last.get("interrupted", {})
        step = event.get("step")
        if event.get("path"):
            message = f"stopped at step {step}, which is saved"
        elif failed:
            message = f"stopped without a new checkpoint: the worker {failed[0].how_it_ended()}"
        elif step:
            message = f"stopped after step {step}; nothing is saved"
        else:
            saved = self._checkpoint_step()
            message = "stopped before the first step"
            message += "" if saved is None else f" after the checkpoint of step {saved}"
        return Outcome("interrupted", message, 130)

    def _checkpoint_step(self) -> int | None:
        """The step of the job's newest checkpoint, as far as its events or files are here."""
        return newest_checkpoint(self.job, summary(self.job.metrics_file))[0]

    def _server_lost(self, server: Process) -> Outcome:
        """How the run ended, once its workers have noticed that the server is lost."""
        self.job_run.emit({"event": "server_lost", "name": server.spec.name, "host": server.spec.host})
        if self.servers.waited_for:
            self.workers.signal(signal.SIGTERM)  # they would wait for the server
        # After the last step no server is needed: a worker may be exporting the checkpoint's rows.
        exporting = "trained" in self.last and not self.servers.waited_for
        self.workers.wait(self.limits.checkpoint if exporting else self.limits.loss)
        self.job_run.read_events()
        if self._is_over():
            return Outcome("done", DONE, 0)
        message = f"{server.label}, listening on {server.endpoint}, {server.how_it_ended()}"
        if server.restarts:
            message += f" (it was restarted {server.restarts} times before)"
        error = self.last.get("error", {}).get("message")
        if self.workers.kill():
            message += "; the worker did not notice and was stopped"
        elif error:
            message += f"; the worker says: {str(error).split(';')[0]}"
        return Outcome("failed", message, 1)

    def _write(self, phase: Phase, message: str = "") -> None:
        self.phase = phase
        states = {item.name: item for item in [*self.servers.states(), *self.workers.states()]}
        self.job.write_state(
            JobState.supervised_here(
                phase=phase,
                processes=[states[spec.name] for spec in self.job_run.spec.processes if spec.name in states],
                message=message or self.workers.warning,
                lost=[worker.spec.name for worker in self.workers.dropped],
                events_from=self.events_from,
            )
        )
