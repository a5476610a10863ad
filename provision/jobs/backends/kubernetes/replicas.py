"""Replicas on Kubernetes as a job of their own: make, change, observe and delete their objects.

A job has one set of replicas, whose Deployment and Service keep their names: to serve it again changes them,
and Kubernetes replaces their pods. What of these names another made is neither changed nor deleted.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.markup import escape

from provision.cluster.errors import TrainingError
from provision.cluster.state_directory import state_flag
from provision.hosts.stop_request import StopRequest
from provision.jobs import store
from provision.jobs.backends.kubernetes import api, checks, follow, manifests, record, run, serving, state
from provision.jobs.backends.kubernetes.api import Api, ApiFailure, Document
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.backends.kubernetes.record import Record
from provision.jobs.request import ServeOptions, scheme
from provision.jobs.screen import JobScreen, say
from provision.jobs.store import STOPPED, Job

_GRACE = 60  # seconds beyond those that a pod may take to load its rows
_END_SECONDS = 60.0  # that pods may take to end


def serve(source: Job, options: ServeOptions, *, state_dir: Path, screen: JobScreen) -> Job:
    """See ``Backend``: make the replicas of the job, or change those that run. TrainingError: as before."""
    plan, found = serving.settle(source, options), record.read(source)
    job = Job(store.jobs_dir(state_dir) / store.replicas_id(source.id))
    stop_request = StopRequest()
    with stop_request.on_signals(), run.api_errors():
        cluster = Api(found.context)
        if job.directory.is_dir() and job.broken:
            raise TrainingError(f"job {job.id}: {job.broken}")
        if job.directory.is_dir() and record.read(job).phase == "running":
            _Replicas(cluster, job, screen, stop_request).change(plan, options)
        else:
            _make(cluster, job, plan, options, found, screen, stop_request)
    return job


def _make(
    cluster: Api,
    job: Job,
    plan: PodPlan,
    options: ServeOptions,
    source: Record,
    screen: JobScreen,
    stop_request: StopRequest,
) -> None:
    mark = secrets.token_hex(8)
    documents = serving.documents(plan, options, mark)
    _find(cluster, documents, mark)
    checks.check(cluster, plan, documents)
    shutil.rmtree(job.directory, ignore_errors=True)  # of replicas that have ended
    job.make()
    replicas = None
    try:
        (job.directory / record.MANIFESTS).write_text(manifests.text(documents), encoding="utf-8")
        kept = source.model_dump(include={"context", "namespace", "claim", "run", "claim_path"})
        made = Record(
            id=job.id,
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            servers=0,
            workers=0,
            source=source.id,
            model=serving.model_name(plan, options),
            mark=mark,
            **kept,
        )
        record.write(job, made)
        replicas = _Replicas(cluster, job, screen, stop_request)
        replicas.make(options)
    except BaseException:
        if replicas is None or not replicas.made:  # else `oeprov stop` deletes what is there
            shutil.rmtree(job.directory)
        raise


def stop(job: Job, *, state_dir: Path, screen: JobScreen) -> int:
    """See ``Backend``: pods answer the requests that were sent, then end."""
    stop_request = StopRequest()
    found = record.read(job)
    code = 0
    if found.phase != "running":
        say(screen.console, f"job {job.id} is not running: it is {found.phase}")
    else:
        with stop_request.on_signals(), run.api_errors():
            left = _Replicas(Api(found.context), job, screen, stop_request).delete()
        if left:
            say(screen.console, f"try again with: oeprov stop {job.id}{state_flag(state_dir)}")
            code = 1
        else:
            found = found.model_copy(update={"phase": "done", "message": STOPPED})
            record.write(job, found)
            say(screen.console, f"[green]✓[/] {job.id}: its replicas are down")
    if screen.as_json:
        print(json.dumps({"job": job.id, "state": found.phase, "message": found.message}))
    return code


def roll_back(job: Job, step: int | None, *, newest: bool, screen: JobScreen) -> int | None:
    """See ``Backend``: pods are replaced one by one, and those that know a step file follow it at once."""
    found = record.read(job)
    if step is None and not newest:
        raise TrainingError(
            f"{job.id} are pods, whose claim nothing here reads: name the step, --step N; one that is not "
            "kept is refused with those that are"
        )
    stop_request = StopRequest()
    with stop_request.on_signals(), run.api_errors():
        replicas = _Replicas(Api(found.context), job, screen, stop_request)
        replicas.pin("" if step is None else str(step))
    return step


def report(job: Job) -> dict[str, Any]:
    """See ``Backend.observe``; ``problem`` says why the cluster did not answer, or makes no pods."""
    found = record.read(job)
    documents = record.documents(job)
    kept = found.model_dump(include={"message", "namespace", "claim", "run"})
    result: dict[str, Any] = {"job": job.id, "on": "kubernetes", "state": found.phase, **kept}
    result |= {
        "progress": "",
        "problem": "",
        "pods": [],
        "source": found.source,
        "urls": _urls(found, documents),
    }
    try:
        cluster = Api(found.context)
        deployment = cluster.get(api.path(documents[-1]))
        pods = state.pods(cluster, found.namespace, job.id)
    except (ApiFailure, TrainingError) as error:
        return {**result, "problem": str(error)}
    result["pods"] = [asdict(pod) for pod in pods]
    if deployment is not None and _is_ours(deployment, found.mark):
        status = deployment.get("status") or {}
        ready, wanted = status.get("readyReplicas", 0), deployment["spec"]["replicas"]
        result.update(progress=f"{ready} of {wanted} replicas are ready", problem=_refusal(status))
    elif found.phase == "running":
        again = f"its deployment is no longer on the cluster; start it again: oeprov serve {found.source}"
        result.update(state="interrupted", message=again)
    return result


def _urls(found: Record, documents: list[Document]) -> list[str]:
    """Where the Service answers, as pods of the cluster name it."""
    service, deployment = documents
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    port = service["spec"]["ports"][0]["port"]
    place = f"{service['metadata']['name']}.{found.namespace}.svc:{port}"
    return [f"{scheme(words)}://{place}/v1/models/{found.model}"]


def _is_ours(document: Document, mark: str) -> bool:
    return bool(((document.get("metadata") or {}).get("annotations") or {}).get(serving.MARK) == mark)


def _refusal(status: Document) -> str:
    """Why pods are refused: quotas, Pod Security, admission."""
    for item in status.get("conditions") or []:
        if item.get("type") == "ReplicaFailure" and item.get("status") == "True":
            return str(item.get("message") or item.get("reason"))
    return ""


def _find(cluster: Api, documents: list[Document], mark: str) -> list[str]:
    """The labels of those objects that are there; TrainingError for one that another has made."""
    there = []
    for document in documents:
        found = cluster.get(api.path(document))
        label, namespace = api.label(document), document["metadata"]["namespace"]
        if found is not None and not _is_ours(found, mark):
            raise TrainingError(
                f"{label} is in namespace {namespace} already, and none of these replicas: it was applied by "
                f"hand, or is of another state directory; if nobody needs it: kubectl delete -n {namespace} "
                f"{label}; nothing was changed"
            )
        there += [label] if found is not None else []
    return there


class _Replicas:
    """The commands of one job's replicas on its cluster."""

    def __init__(self, cluster: Api, job: Job, screen: JobScreen, stop_request: StopRequest) -> None:
        self.cluster, self.job, self.screen, self.stop_request = cluster, job, screen, stop_request
        self.record, self.documents = record.read(job), record.documents(job)
        self.made: list[Document] = []  # by this command

    def make(self, options: ServeOptions) -> None:
        """Make the objects and wait until all replicas answer; TrainingError: none of them is left."""
        try:
            for document in self.documents:
                try:
                    api.put(self.cluster, document, is_there=False)
                except ApiFailure as error:
                    raise TrainingError(f"{api.label(document)} could not be made: {error}") from None
                self.made.append(document)
            self._wait(options.start_timeout, set())
        except (TrainingError, ApiFailure) as error:
            if self.stop_request.count:
                raise
            left = self.delete(self.made)
            self.made = [item for item in self.made if api.label(item) in left]
            raise TrainingError(
                f"{error}; {', '.join(left) or 'nothing'} is left of it on the cluster"
            ) from None

    def change(self, plan: PodPlan, options: ServeOptions) -> None:
        """Let the replicas be as the options say; TrainingError: they are as before."""
        before, mark = self.documents, self.record.mark
        documents = serving.documents(plan, options, mark)
        if self.record.step is not None:
            documents = serving.pinned(documents, self.record.run, self.record.step)
        there = _find(self.cluster, documents, mark)
        words = _differences(before, documents, there)
        changes = {"model": serving.model_name(plan, options)}
        if not words:
            say(self.screen.console, f"{self.job.id}: nothing of it changes")
            return self._wait(options.start_timeout, set())
        checks.check(self.cluster, plan, documents, there)
        if options.confirm is not None and not options.confirm(f"Change {self.job.id}: {words}?"):
            raise TrainingError("nothing was changed")
        return self._replace(documents, there, options.start_timeout, changes)

    def pin(self, step: str) -> None:
        """Let the replicas serve a step, or with an empty one follow training; else they are as before."""
        documents = serving.pinned(self.documents, self.record.run, step)
        there = _find(self.cluster, documents, self.record.mark)
        if len(there) < len(documents):
            raise TrainingError(f"its deployment is not on the cluster: oeprov serve {self.record.source}")
        checks.rehearse(self.cluster, documents, there)
        (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
        probe = container["startupProbe"]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        self._replace(documents, there, seconds, {"step": step})

    def _replace(
        self, documents: list[Document], there: list[str], seconds: int, changes: dict[str, Any]
    ) -> None:
        """Change the objects, and the record; TrainingError: they are as before."""
        before, known = self.documents, {pod.name for pod in self._pods()}
        with record.rewritten(self.job, manifests.text(documents)):
            try:
                self._put(documents, there)
                self.documents = documents
                self._wait(seconds, known)
            except (TrainingError, ApiFailure) as error:
                if not self.stop_request.count:
                    self._put(before, _find(self.cluster, before, self.record.mark))
                    raise TrainingError(f"{error}; its replicas go on as before") from None
                self._warn(str(error))
        self.record = self.record.model_copy(update=changes)
        record.write(self.job, self.record)

    def _put(self, documents: list[Document], there: list[str]) -> None:
        for document in documents:
            try:
                api.put(self.cluster, document, is_there=api.label(document) in there)
            except ApiFailure as error:
                raise TrainingError(f"{api.label(document)} could not be changed: {error}") from None

    def _pods(self) -> list[state.Pod]:
        return state.pods(self.cluster, self.record.namespace, self.job.id)

    def _wait(self, seconds: int, known: set[str]) -> None:
        """Wait until all pods are as the Deployment says, and ready; TrainingError says why they are not.

        ``known``: pods from before a change, whose troubles do not tell of it.
        """
        changed = begun = time.monotonic()  # when a number changed last; when the trouble began
        seen: tuple[int, ...] = ()
        with self.screen.console.status(f"{self.job.id}: waiting until its replicas answer"):
            while True:
                counts, trouble, is_final = self._observe(known)
                if counts is None:
                    return
                now = time.monotonic()
                changed, seen = (now, counts) if counts != seen else (changed, seen)
                begun = begun if trouble else now
                if trouble and (is_final or now - begun >= follow.HOPELESS_SECONDS):
                    raise TrainingError(trouble)
                if now - changed > seconds + _GRACE:
                    raise TrainingError(
                        f"a replica of {self.job.id} was not ready after {seconds} s; if it "
                        "needs longer, raise --start-timeout"
                    )
                if self.stop_request.wait(run.POLL_SECONDS):
                    raise TrainingError(
                        f"not all replicas of {self.job.id} answer yet; look with: oeprov status; to stop "
                        f"them: oeprov stop {self.job.id}"
                    )

    def _observe(self, known: set[str]) -> tuple[tuple[int, ...] | None, str, bool]:
        """The numbers of pods, or None if all are as the Deployment says; what keeps one from its work, and
        whether that is final.
        """
        deployment = self.documents[-1]
        try:
            found = self.cluster.get(api.path(deployment))
            pods = self._pods()
        except ApiFailure as error:
            if not error.passing:
                raise
            return (), f"the Kubernetes API refused: {error}", False
        except TrainingError as error:  # it does not answer
            return (), str(error), False
        if found is None:
            return (), f"{api.label(deployment)} was deleted from outside oeprov", True
        status, wanted = found.get("status") or {}, int(found["spec"]["replicas"])
        names = ("replicas", "updatedReplicas", "availableReplicas")
        counts = tuple(int(status.get(name) or 0) for name in names)
        is_seen = int(status.get("observedGeneration") or 0) >= int(found["metadata"].get("generation") or 0)
        if is_seen and counts == (wanted,) * len(names):
            return None, "", False
        for pod in pods:
            if pod.trouble and not pod.passing and pod.name not in known:
                return counts, f"pod {pod.name}: {pod.trouble}", not pod.hopeless
        return counts, _refusal(status), False

    def delete(self, documents: list[Document] | None = None) -> list[str]:
        """Delete the objects, pods first; the labels of those that could not be."""
        left = []
        for document in reversed(self.documents if documents is None else documents):
            label = api.label(document)
            try:
                found = self.cluster.get(api.path(document))
                if found is None:
                    continue
                if not _is_ours(found, self.record.mark):
                    self._warn(f"{label} was made by another meanwhile; it stays")
                    continue
                api.delete(self.cluster, document)
            except ApiFailure as error:
                if error.code != 404:
                    left.append(label)
                    self._warn(f"{label} could not be deleted: {error}")
                continue
            if document["kind"] == "Deployment":
                self._wait_gone()
        return left

    def _wait_gone(self) -> None:
        deadline, asked = time.monotonic() + _END_SECONDS, self.stop_request.count
        while self._pods():
            if time.monotonic() > deadline or self.stop_request.count > asked:
                return self._warn("its pods are still ending; look with: kubectl get pods")
            self.stop_request.wait(run.POLL_SECONDS)
        return None

    def _warn(self, text: str) -> None:
        say(self.screen.console, f"[yellow]![/] {escape(text)}")


def _differences(before: list[Document], documents: list[Document], there: list[str]) -> str:
    """What a change does, in words; empty for none."""
    words = [
        f"{api.label(item)}, which was deleted, is made again"
        for item in documents
        if api.label(item) not in there
    ]
    (service, deployment), (new_service, new_deployment) = before, documents
    first, second = (item["spec"]["replicas"] for item in (deployment, new_deployment))
    if first != second:
        words.append(f"{first} → {second} replicas")
    if service != new_service:
        words.append("other ports of its service")
    if deployment["spec"]["template"] != new_deployment["spec"]["template"]:
        words.append("its pods are replaced one by one, each once the next is ready")
    return "; ".join(words)
