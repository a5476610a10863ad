"""``launch-training --on kubernetes``, ``resume`` and ``stop``: make, follow and delete the objects."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.cluster.state_directory import state_flag
from provision.hosts.stop_request import StopRequest
from provision.jobs import drained, store
from provision.jobs.backends import CHECKPOINT_SECONDS
from provision.jobs.backends.kubernetes import api, checks, manifests, record, resuming, script, state
from provision.jobs.backends.kubernetes.api import Api, ApiFailure, Document
from provision.jobs.backends.kubernetes.follow import Follower
from provision.jobs.backends.kubernetes.plan import PodPlan, settle
from provision.jobs.backends.kubernetes.record import Record
from provision.jobs.request import LaunchOptions, ScaleOptions, checkpoint_words
from provision.jobs.screen import JobScreen, say
from provision.jobs.store import Job
from provision.node import process

POLL_SECONDS = 2.0
_SERVER_SECONDS = 180.0  # that servers may take to end
_LISTEN_SECONDS = 5.0
_LAST_LINES = 200  # of a worker, among which is how long it paused
_PAUSED = re.compile(r"training paused ([\d.]+) s")  # what the trainer says
_CODES = {"done": 0, "running": 0, "scaling": 0, "failed": 1, "interrupted": 130}
_REBUILT = f"{record.MANIFESTS} of the job is written anew, without changes made in it by hand"
_VOLUMES = ("PersistentVolume", "PersistentVolumeClaim")


def launch(inventory: Inventory, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """Run a new job on the cluster; the exit code, as on hosts. TrainingError: nothing was made."""
    if options.resume is not None:
        raise TrainingError("to resume a job on Kubernetes: oeprov resume JOB")
    inventory = drained.leave_out(inventory, state_dir, lambda text: say(screen.console, text))
    first = settle(inventory, options)  # before a directory is made
    cluster = Api(inventory.kubernetes.context)
    stop_request = StopRequest()
    with stop_request.on_signals(), api_errors():
        job = _create(inventory, options, first.name, cluster, state_dir)
        run = _Run(cluster, job, screen, state_dir, stop_request)
        run.make([*first.notes, checkpoint_words(first.request.training)])
        return run.follow(detach=options.detach)


def resume(job: Job, options: LaunchOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """Make the objects of a job that has ended again: it resumes from its last checkpoint."""
    found = record.read(job)
    if options.consent:
        raise TrainingError(
            "--consent: a job on Kubernetes keeps its rows in volumes; to lose them: kubectl delete pvc NAME"
        )
    longer = options.script_arguments is not None or {"epochs", "steps"} & options.settings.keys()
    if found.phase == "done" and not longer:
        how = "-- ARGUMENTS" if found.script else "--epochs N (or --steps N)"
        raise TrainingError(
            f"job {job.id} is done; there is nothing to resume; to train it longer: oeprov resume {job.id} "
            f"{how}"
        )
    if found.phase in ("running", "scaling"):
        raise TrainingError(f"job {job.id} is running; stop it first: oeprov stop {job.id}")
    if options.script_arguments is not None and not found.script:
        raise TrainingError(f"arguments after --: job {job.id} trains a built-in model, which takes none")
    before, plan = record.documents(job), resuming.resumed(found, options)
    documents = before
    changes: dict[str, Any] = {} if plan is None else {"plan": resuming.kept(plan)}
    rebuilt = plan is not None and bool(resuming.REBUILD & options.settings.keys())
    if not rebuilt and found.script:
        pods = plan.script if plan is not None else None
        pods = pods or script.found(found.script, found.claim_path)
        documents = script.renewed(documents, pods, options.script_arguments)
    cluster = Api(found.context)
    stop_request = StopRequest()
    with stop_request.on_signals(), api_errors():
        has_rows = checks.has_volumes(cluster, before)
        if plan is not None and rebuilt:
            resuming.check_volumes(plan, found, record.servers(before), has_rows=has_rows)
            documents = checks.for_version(cluster, plan, manifests.build(plan))
            changes["workers"] = plan.settings.workers
        checks.rehearse(cluster, [_secret(job), *documents])
        text = ""
        if documents is not before:
            text = manifests.text(documents) if plan is None else manifests.render(plan, documents)
        # `stop` deletes the objects of the file, also when this process is killed while it makes them.
        with record.rewritten(job, text):
            run = _Run(cluster, job, screen, state_dir, stop_request, has_rows=has_rows)
            run.make([_REBUILT] if rebuilt else [], changes)
        return run.follow(detach=options.detach)


def stop(job: Job, *, state_dir: Path, screen: JobScreen) -> int:
    """Let the workers write a checkpoint, then delete the job's objects, except its volumes."""
    found = record.read(job)
    if found.phase == "scaling":
        raise TrainingError(f"job {job.id} is being scaled ({found.message}); wait for that")
    stop_request = StopRequest()
    with stop_request.on_signals(), api_errors():
        return _Run(Api(found.context), job, screen, state_dir, stop_request).stop()


def scale(job: Job, options: ScaleOptions, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``: stop the job as `stop` does, and make its objects for other servers."""
    found, before = record.read(job), record.documents(job)
    if options.servers is None:
        raise TrainingError(
            f"job {job.id} is on Kubernetes, which places its pods: kubectl drain NODE; nothing was changed"
        )
    if found.phase != "running":
        raise TrainingError(f"job {job.id} is not running: it is {found.phase}; nothing was changed")
    plan, count = resuming.scaled(found, options.servers), record.servers(before)
    if plan.servers == count:
        raise TrainingError(f"job {job.id} runs on {count} servers already; nothing was changed")
    cluster = Api(found.context)
    stop_request = StopRequest()
    with stop_request.on_signals(), api_errors():
        phase, _ = state.phase(cluster, record.work(before))
        if phase != "running":
            raise TrainingError(f"the workers of job {job.id} do not run: {phase}; nothing was changed")
        has_rows = checks.has_volumes(cluster, before)
        resuming.check_volumes(plan, found, count, has_rows=has_rows)
        documents = checks.for_version(cluster, plan, manifests.build(plan))
        words = f"{count} → {plan.servers} servers"
        if not options.confirm(
            f"Scale job {job.id}: {words}? Training pauses between two steps: the job writes a checkpoint, "
            "and all its pods start again."
        ):
            say(screen.console, "nothing was changed")
            return 1
        run = _Run(cluster, job, screen, state_dir, stop_request, has_rows=has_rows)
        return run.scale(plan, documents, words)


@contextmanager
def api_errors() -> Iterator[None]:
    """Turn what the API refuses into a TrainingError."""
    try:
        yield
    except ApiFailure as error:
        raise TrainingError(f"the Kubernetes API refused: {error}") from None


def _create(inventory: Inventory, options: LaunchOptions, name: str, cluster: Api, state_dir: Path) -> Job:
    """Make the job's directory, after all checks."""
    now = datetime.now()
    job = store.create(state_dir, name, now)
    try:
        plan = settle(inventory, options, job.id)
        documents = checks.check(cluster, plan, manifests.build(plan, _token(job)))
    except BaseException:
        shutil.rmtree(job.directory)
        raise
    text = manifests.render(plan, [item for item in documents if item["kind"] != "Secret"])
    (job.directory / record.MANIFESTS).write_text(text, encoding="utf-8")
    record.write(
        job,
        Record(
            id=job.id,
            created=now.astimezone().isoformat(timespec="seconds"),
            context=plan.settings.context,
            namespace=plan.settings.namespace,
            servers=plan.servers,
            workers=plan.settings.workers,
            claim=plan.settings.claim,
            run=str(plan.directory / "run"),
            script=plan.request.training.script,
            claim_path=plan.settings.claim_path,
            plan=resuming.kept(plan),
        ),
    )
    return job


def _token(job: Job) -> str:
    return job.token_file.read_text(encoding="utf-8").strip()


def _secret(job: Job) -> Document:
    return manifests.secret(job.id, record.read(job).namespace, _token(job))


class _Run:
    """The commands of one job on its cluster."""

    def __init__(
        self,
        cluster: Api,
        job: Job,
        screen: JobScreen,
        state_dir: Path,
        stop_request: StopRequest,
        *,
        has_rows: bool = False,
    ) -> None:
        """``has_rows``: volumes of its servers were there before this command."""
        self.cluster, self.job, self.stop_request = cluster, job, stop_request
        self.screen, self.console, self.has_rows = screen, screen.console, has_rows
        self.record = record.read(job)
        self.documents = record.documents(job)
        self.work = record.work(self.documents)
        self.flag = state_flag(state_dir)
        self.left: list[str] = []  # objects that could not be deleted

    def make(
        self, notes: Sequence[str], changes: Mapping[str, Any] = MappingProxyType({}), failed: str = "failed"
    ) -> None:
        """Make the job's objects; then its record gets the ``changes``; ``failed``: its phase otherwise."""
        for note in notes:
            self._say(f"[dim]note[/]     {escape(note)}")
        # Who follows a job that is scaled takes objects that "running" promises for deleted ones, and would
        # delete the rest.
        if self.record.phase != "scaling":
            failed = "done" if self.record.phase == "done" else failed
            self._note("running")
        self._make(failed)
        counted = {"servers": record.servers(self.documents)}
        self.record = self.record.model_copy(update={**changes, **counted})
        self._note("running")

    def follow(self, *, detach: bool) -> int:
        """Follow the job that was made to its end, unless it is to run by itself; the exit code."""
        self._say(f"{self.job.id}: made in namespace {self.record.namespace} of {self.cluster.address}")
        if detach:
            self._say(
                f"look with: oeprov status{self.flag}; stop it with: oeprov stop {self.job.id}{self.flag}"
            )
            return self._result()
        try:
            return self._watch()
        except ApiFailure as error:
            raise TrainingError(
                f"the Kubernetes API refused: {error}; {self.job.id} still runs there: look with: "
                f"oeprov status{self.flag}"
            ) from None

    def _make(self, fallback: str) -> None:
        """Make all objects, or none; then the phase is ``fallback``."""
        made: list[Document] = []
        try:
            for document in [_secret(self.job), *self.documents]:
                try:
                    self.cluster.ask("POST", api.collection(document), document)
                    made.append(document)
                except ApiFailure as error:
                    if error.code != 409 or document["kind"] not in _VOLUMES:  # a stopped job has its own
                        raise TrainingError(f"{api.label(document)} could not be made: {error}") from None
        except BaseException as error:
            left = [] if self.has_rows else record.volume_claims(made)
            for document in [*reversed(made), *left]:
                self._delete(document)
            self._note(fallback, f"{error}; what had been made was deleted")
            raise

    def _watch(self) -> int:
        """Follow the job to its end, then delete its objects."""
        follower = Follower(self.cluster, self.record, self.documents, self.console)
        follower.start()
        phase, message, hopeless = "running", "", ""
        while True:
            if self._was_scaled():
                follower.join()
                follower = Follower(self.cluster, self.record, self.documents, self.console)
                follower.start()
            with follower.patience():
                phase, message = state.phase(self.cluster, self.work)
                hopeless = follower.observe() if phase == "running" else ""
            if phase == "gone" and self._is_scaled():
                continue
            if phase != "running":
                break
            if hopeless:
                self._delete_all(keep_volumes=self.has_rows)
                left = ", ".join(self.left) or "nothing"
                self._note("failed", f"{hopeless}; {left} is left of it on the cluster")
                return self._result()
            if self.stop_request.wait(POLL_SECONDS):
                self._was_scaled()  # else its new objects would be made after they were stopped
                return self.stop(follower)
        follower.join()
        if phase == "gone":
            self._delete_all(keep_volumes=True)
            self._note("interrupted", "its workers were deleted from outside oeprov")
        else:
            message = message if phase == "done" else self._why(message)
            self._delete_all(keep_volumes=phase != "done")
            where = f"{self.record.run} of claim {self.record.claim}"
            self._note(
                phase, f"training is done; checkpoints and export: {where}" if phase == "done" else message
            )
        return self._result()

    def _why(self, message: str) -> str:
        """Why workers failed: how one of them ended, and the API's message."""
        pods = state.pods(self.cluster, self.record.namespace, self.job.id)
        ended = (
            f"{pod.name}: {pod.trouble} ({message})" for pod in pods if pod.role == "worker" and pod.trouble
        )
        return next(ended, message)

    def stop(self, follower: Follower | None = None) -> int:
        """Delete the workers, which write a checkpoint before they end, then all other objects."""
        phase = self._end(follower)
        if phase in ("done", "failed"):
            self._note(phase, "training is done" if phase == "done" else "training failed")
        elif self.record.phase == "running":
            self._note("interrupted", "stopped")
        if self.left:
            self._say(f"try again with: oeprov stop {self.job.id}{self.flag}")
            return self._result(1)
        self._say(
            f"nothing of {self.job.id} is left on the cluster"
            + ("" if phase == "done" else " but its volumes")
        )
        return self._result(0 if follower is None or not self.stop_request.count else 130)

    def _end(self, follower: Follower | None = None) -> str:
        """Delete all objects, the workers first, and show their last lines; the phase that they were in."""
        phase, _ = state.phase(self.cluster, self.work)
        if phase == "running":
            self._say("the workers finish their step and write a checkpoint")
            if follower is None:
                follower = Follower(self.cluster, self.record, self.documents, self.console, old_lines=False)
                follower.start()
                follower.wait(_LISTEN_SECONDS)
            self._delete(self.work)
            self._wait("worker", CHECKPOINT_SECONDS + 60)
            follower.join()
        self._delete_all(keep_volumes=phase != "done")
        return phase

    def scale(self, plan: PodPlan, documents: list[Document], words: str) -> int:
        """End the job's pods and make these objects; the former ones if that fails. The exit code."""
        pid, before = os.getpid(), self.documents
        count = self.record.scales + 1
        self.record = self.record.model_copy(
            update={"scales": count, "scaler": (pid, process.start_time(pid))}
        )
        self._note("scaling", words)
        phase = self._end()
        if phase != "running" or self.left or self.stop_request.count:
            ended = phase in ("done", "failed")
            self._note(phase if ended else "interrupted", "" if ended else "stopped while it was scaled")
            return self._result()
        changes = {"plan": resuming.kept(plan)}
        try:
            checks.rehearse(self.cluster, [_secret(self.job), *documents])
            with record.rewritten(self.job, manifests.render(plan, documents)):
                self._take(documents)
                self.make([_REBUILT], changes, failed="scaling")
        except TrainingError as error:
            self._take(before)
            self.make([])
            raise TrainingError(f"{error}; job {self.job.id} goes on with its servers as before") from None
        return self._say_pause(words)

    def _take(self, documents: list[Document]) -> None:
        """Let these be the job's objects, before its record says that they run."""
        self.documents, self.work = documents, record.work(documents)
        self.record = self.record.model_copy(update={"servers": record.servers(documents)})

    def _say_pause(self, words: str) -> int:
        """Wait until the first worker says how long training paused; the exit code."""
        follower = Follower(self.cluster, self.record, self.documents, self.console)
        while not self.stop_request.wait(POLL_SECONDS):
            with follower.patience():
                if hopeless := follower.observe():
                    raise TrainingError(f"{hopeless}; look with: oeprov status{self.flag}")
                if (paused := self._pause()) is not None:
                    self._say(f"[green]✓[/] {self.job.id}: {words}; training paused {paused:.1f} s")
                    return self._result()
                if state.phase(self.cluster, self.work)[0] != "running":
                    self._say(f"[green]✓[/] {self.job.id}: {words}")
                    return self._result()
        self._say(f"{self.job.id} goes on by itself; look with: oeprov status{self.flag}")
        return 130

    def _pause(self) -> float | None:
        """How long training paused, as a worker's log says."""
        for pod in state.pods(self.cluster, self.record.namespace, self.job.id):
            if pod.role == "worker" and pod.state != "starts":
                for line in state.last_lines(self.cluster, self.record.namespace, pod, _LAST_LINES):
                    if match := _PAUSED.search(line):
                        return float(match[1])
        return None

    def _is_scaled(self) -> bool:
        """Whether another command makes the job's objects anew, or has just made them."""
        now = record.read(self.job)
        return now.phase in ("scaling", "running") and now.scales != self.record.scales

    def _was_scaled(self) -> bool:
        """Whether another command has made the job's objects anew, for which this waits."""
        while (now := record.read(self.job)).phase == "scaling":
            time.sleep(POLL_SECONDS)
        if now.phase != "running" or now.scales == self.record.scales:
            return False
        self.record, self.documents = now, record.documents(self.job)
        self.work = record.work(self.documents)
        return True

    def _delete_all(self, *, keep_volumes: bool) -> None:
        everything = [_secret(self.job), *self.documents]
        for document in reversed([item for item in everything if item["kind"] not in _VOLUMES]):
            self._delete(document)
        self._wait("server", _SERVER_SECONDS)
        if keep_volumes:
            return
        volumes = [item for item in self.documents if item["kind"] in _VOLUMES]
        for document in [*record.volume_claims(self.documents), *volumes]:
            self._delete(document)

    def _delete(self, document: Document) -> None:
        try:
            api.delete(self.cluster, document)
        except ApiFailure as error:
            if error.code != 404:
                self.left.append(api.label(document))
                self._say(f"[yellow]![/] {api.label(document)} could not be deleted: {escape(str(error))}")

    def _wait(self, role: str, seconds: float) -> None:
        """Wait until no pod of the role is left."""
        deadline, asked = time.monotonic() + seconds, self.stop_request.count
        while any(pod.role == role for pod in state.pods(self.cluster, self.record.namespace, self.job.id)):
            if time.monotonic() > deadline or self.stop_request.count > asked:
                self._say(f"[yellow]![/] pods of {role}s are still ending; look with: kubectl get pods")
                return
            self.stop_request.wait(POLL_SECONDS)

    def _note(self, phase: str, message: str = "") -> None:
        self.record = self.record.model_copy(update={"phase": phase, "message": message})
        record.write(self.job, self.record)

    def _say(self, text: str) -> None:
        say(self.console, text)

    def _result(self, code: int | None = None) -> int:
        found = self.record
        if self.screen.as_json:
            facts = found.model_dump(include={"message", "namespace", "claim", "run"})
            print(json.dumps({"job": found.id, "state": found.phase, **facts}))
        elif found.phase != "running":
            self._say(f"{found.id}: {found.phase}" + (f": {escape(found.message)}" if found.message else ""))
            if found.phase in ("failed", "interrupted"):
                self._say(f"resume with: oeprov resume {found.id}{self.flag}")
        return _CODES[found.phase] if code is None else code
