"""``launch-training --on kubernetes``, ``resume`` and ``stop``: make the objects, follow, take them away."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.cluster.inventory import Inventory
from provision.cluster.state_directory import state_flag
from provision.hosts.stop_request import StopRequest
from provision.jobs import store
from provision.jobs.kubernetes import api, checks, manifests, record, state
from provision.jobs.kubernetes.api import Api, ApiFailure, Document
from provision.jobs.kubernetes.follow import Follower
from provision.jobs.kubernetes.plan import settle
from provision.jobs.kubernetes.record import Record
from provision.jobs.placement import CHECKPOINT_SECONDS
from provision.jobs.request import LaunchOptions
from provision.jobs.store import Job

POLL_SECONDS = 2.0
_SERVER_SECONDS = 180.0  # that servers may take to end
_LISTEN_SECONDS = 5.0
_CODES = {"done": 0, "running": 0, "failed": 1, "interrupted": 130}
_VOLUMES = ("PersistentVolume", "PersistentVolumeClaim")


def launch(inventory: Inventory, options: LaunchOptions, *, state_dir: Path) -> int:
    """Run a new job on the cluster; the exit code, as on hosts. TrainingError: nothing was made."""
    if options.resume is not None:
        raise TrainingError("to go on with a job on Kubernetes: oeprov resume JOB")
    notes = settle(inventory, options).notes  # before a directory is made
    cluster = Api(inventory.kubernetes.context)
    stop_request = StopRequest()
    with stop_request.on_signals(), _words():
        job = _create(inventory, options, cluster, state_dir)
        return _Run(cluster, job, options, state_dir, stop_request).start(notes)


def resume(job: Job, options: LaunchOptions, *, state_dir: Path) -> int:
    """Make the objects of a job that was stopped or failed again: it goes on from its last checkpoint."""
    found = record.read(job)
    for what in ("epochs", "steps"):
        if what in options.settings:
            raise TrainingError(f"--{what}: a job on Kubernetes cannot be trained longer; launch a new one")
    for what in ("servers", "workers"):
        if what in options.settings:
            raise TrainingError(f"--{what}: a job on Kubernetes goes on with as many {what} as it had")
    if found.phase == "done":
        raise TrainingError(f"job {job.id} is done; there is nothing to resume")
    if found.phase == "running":
        raise TrainingError(f"job {job.id} is running; stop it first: oeprov stop {job.id}")
    cluster = Api(found.context)
    stop_request = StopRequest()
    with stop_request.on_signals(), _words():
        checks.rehearse(cluster, [_secret(job), *record.documents(job)])
        return _Run(cluster, job, options, state_dir, stop_request).start()


def stop(job: Job, *, state_dir: Path, as_json: bool = False) -> int:
    """Let the worker write a checkpoint and take the job's objects away, but for its volumes."""
    found = record.read(job)
    stop_request = StopRequest()
    with stop_request.on_signals(), _words():
        return _Run(Api(found.context), job, LaunchOptions(as_json=as_json), state_dir, stop_request).stop()


@contextmanager
def _words() -> Iterator[None]:
    try:
        yield
    except ApiFailure as error:
        raise TrainingError(f"the Kubernetes API refused: {error}") from None


def _create(inventory: Inventory, options: LaunchOptions, cluster: Api, state_dir: Path) -> Job:
    """The job's directory, once all that can be checked was."""
    now = datetime.now()
    job = store.create(
        state_dir, options.run_name or options.settings.get("model") or inventory.training.model, now
    )
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
        ),
    )
    return job


def _token(job: Job) -> str:
    return job.token_file.read_text(encoding="utf-8").strip()


def _secret(job: Job) -> Document:
    return manifests.secret(job.id, record.read(job).namespace, _token(job))


class _Run:
    """A job on its cluster, from here."""

    def __init__(
        self, cluster: Api, job: Job, options: LaunchOptions, state_dir: Path, stop_request: StopRequest
    ) -> None:
        self.cluster, self.job, self.options, self.stop_request = cluster, job, options, stop_request
        self.record = record.read(job)
        self.documents = record.documents(job)
        self.work = record.work(self.documents)
        self.console = Console(stderr=True) if options.as_json else Console()
        self.flag = state_flag(state_dir)
        self.resumed = self.record.phase != "running"  # its volumes may have rows
        self.left: list[str] = []  # what could not be deleted

    def start(self, notes: Sequence[str] = ()) -> int:
        for note in notes:
            self._say(f"[dim]note[/]     {escape(note)}")
        self._note("running")
        self._make()
        self._say(f"{self.job.id}: made in namespace {self.record.namespace} of {self.cluster.address}")
        if self.options.detach:
            self._say(
                f"look with: oeprov status{self.flag}; stop it with: oeprov stop {self.job.id}{self.flag}"
            )
            return self._result()
        try:
            return self._watch()
        except ApiFailure as error:
            raise TrainingError(
                f"the Kubernetes API refused: {error}; {self.job.id} goes on there: look with: "
                f"oeprov status{self.flag}"
            ) from None

    def _make(self) -> None:
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
            left = [] if self.resumed else record.volume_claims(made)
            for document in [*reversed(made), *left]:
                self._delete(document)
            self._note("failed", f"{error}; what was made before was taken away")
            raise

    def _watch(self) -> int:
        """Follow the job to its end, and take away what is left of it."""
        follower = Follower(self.cluster, self.record, self.documents, self.console)
        follower.start()
        phase, words, hopeless = "running", "", ""
        while True:
            with follower.patience():
                phase, words = state.phase(self.cluster, self.work)
                hopeless = follower.look() if phase == "running" else ""
            if phase != "running":
                break
            if hopeless:
                self._take_away(keep_volumes=self.resumed)
                left = ", ".join(self.left) or "nothing"
                self._note("failed", f"{hopeless}; {left} is left of it on the cluster")
                return self._result()
            if self.stop_request.wait(POLL_SECONDS):
                return self.stop(follower)
        follower.join()
        if phase == "gone":
            self._take_away(keep_volumes=True)
            self._note("interrupted", "its workers were deleted from outside oeprov")
        else:
            words = words if phase == "done" else self._why(words)
            self._take_away(keep_volumes=phase != "done")
            where = f"{self.record.run} of claim {self.record.claim}"
            self._note(
                phase, f"training is done; checkpoints and export: {where}" if phase == "done" else words
            )
        return self._result()

    def _why(self, words: str) -> str:
        """Why workers failed: how one of them ended, and the API's words."""
        pods = state.pods(self.cluster, self.record.namespace, self.job.id)
        ended = (
            f"{pod.name}: {pod.trouble} ({words})" for pod in pods if pod.role == "worker" and pod.trouble
        )
        return next(ended, words)

    def stop(self, follower: Follower | None = None) -> int:
        """Delete the workers, which write a checkpoint before they end, then all others."""
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
        self._take_away(keep_volumes=phase != "done")
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

    def _take_away(self, *, keep_volumes: bool) -> None:
        everything = [_secret(self.job), *self.documents]
        for document in reversed([item for item in everything if item["kind"] not in _VOLUMES]):
            self._delete(document)
        self._wait("server", _SERVER_SECONDS)
        if keep_volumes:
            return
        for document in [
            *record.volume_claims(self.documents),
            *(d for d in self.documents if d["kind"] in _VOLUMES),
        ]:
            self._delete(document)

    def _delete(self, document: Document) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self.cluster.ask("DELETE", api.path(document), body)
        except ApiFailure as error:
            if error.code != 404:
                self.left.append(api.label(document))
                self._say(f"[yellow]![/] {api.label(document)} could not be deleted: {escape(str(error))}")

    def _wait(self, role: str, seconds: float) -> None:
        """Until no pod of the role is left."""
        deadline, asked = time.monotonic() + seconds, self.stop_request.count
        while any(pod.role == role for pod in state.pods(self.cluster, self.record.namespace, self.job.id)):
            if time.monotonic() > deadline or self.stop_request.count > asked:
                self._say(f"[yellow]![/] pods of {role}s still end; look with: kubectl get pods")
                return
            self.stop_request.wait(POLL_SECONDS)

    def _note(self, phase: str, message: str = "") -> None:
        self.record = self.record.model_copy(update={"phase": phase, "message": message})
        record.write(self.job, self.record)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _result(self, code: int | None = None) -> int:
        found = self.record
        if self.options.as_json:
            print(
                json.dumps(
                    {
                        "job": found.id,
                        "state": found.phase,
                        **found.model_dump(include={"message", "namespace", "claim", "run"}),
                    }
                )
            )
        elif found.phase != "running":
            self._say(f"{found.id}: {found.phase}" + (f": {escape(found.message)}" if found.message else ""))
            if found.phase in ("failed", "interrupted"):
                self._say(f"go on with: oeprov resume {found.id}{self.flag}")
        return _CODES[found.phase] if code is None else code
