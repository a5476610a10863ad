"""``status`` and ``logs`` of jobs on Kubernetes, from their clusters. Changes nothing."""

from __future__ import annotations

import queue
import sys
import threading
from dataclasses import asdict
from typing import Any

from provision.cluster.errors import TrainingError
from provision.jobs.backends.kubernetes import record, state
from provision.jobs.backends.kubernetes.api import Api, ApiFailure
from provision.jobs.backends.kubernetes.follow import PAUSE_SECONDS
from provision.jobs.backends.kubernetes.state import Pod
from provision.jobs.screen import LogPrinter
from provision.jobs.store import Job


def report(job: Job) -> dict[str, Any]:
    """All that is known of one job, for JSON; ``problem`` says why its cluster did not answer."""
    result: dict[str, Any] = {
        "job": job.id,
        "on": "kubernetes",
        "state": "unreadable",
        "message": "",
        "namespace": "",
        "claim": "",
        "run": "",
        "progress": "",
        "problem": "",
        "pods": [],
    }
    try:
        found = record.read(job)
    except TrainingError as error:
        return {**result, "problem": str(error)}
    result["state"] = found.phase
    result.update(found.model_dump(include={"message", "namespace", "claim", "run"}))
    try:
        cluster = Api(found.context)
        documents = record.documents(job)
        phase, message = state.phase(cluster, record.work(documents))
        pods = state.pods(cluster, found.namespace, job.id)
        workers = [pod for pod in pods if pod.role == "worker"]
        # Of pods that replaced each other, the one that trains.
        order = {"runs": 0, "succeeded": 1}
        first = min(workers, key=lambda pod: order.get(pod.state, 2), default=None)
        lines = state.last_lines(cluster, found.namespace, first, 20) if first else []
        if phase == "running" and (not workers or len(pods) - len(workers) < found.servers):
            result["problem"] = "; ".join(state.refusals(cluster, found.namespace, documents))
    except (ApiFailure, TrainingError) as error:
        return {**result, "problem": str(error)}
    result["pods"] = [asdict(pod) for pod in pods]
    result["progress"] = next((line for line in reversed(lines) if line.startswith("step ")), "")
    if phase != "gone":
        result["state"] = phase
        result["message"] = message or found.message
    elif found.phase == "running":
        result.update(state="interrupted", message="its workers are no longer on the cluster")
    return result


def logs(job: Job, *, process: str | None, follow: bool, lines: int) -> int:
    """Print the last lines of the job's pods, and with ``follow`` new ones until they end; returns 0.

    ``process``: only this pod, as `status` names it or without the job's name (worker-0).
    """
    found = record.read(job)
    try:
        cluster = Api(found.context)
        pods = state.pods(cluster, found.namespace, job.id)
        if process:
            names = (process, f"{job.id}-{process}")
            chosen = [pod for pod in pods if pod.name in names or pod.name.startswith(f"{job.id}-{process}-")]
            if not chosen:
                there = ", ".join(pod.name for pod in pods) or "none"
                raise TrainingError(f"job {job.id} has no pod {process!r}; there are: {there}")
            pods = chosen
        if not pods:
            raise TrainingError(
                f"job {job.id} has no pods any more, and so no logs; its run is in {found.run} of "
                f"claim {found.claim}"
            )
        _print(cluster, found.namespace, pods, follow, lines)
    except ApiFailure as error:
        raise TrainingError(f"the Kubernetes API refused: {error}") from None
    return 0


def _print(cluster: Api, namespace: str, pods: list[Pod], follow: bool, lines: int) -> None:
    put = LogPrinter([pod.name for pod in pods]).put
    if not follow:
        for pod in pods:
            try:
                found = cluster.text(state.log_path(namespace, pod.name), tailLines=lines).splitlines()
            except ApiFailure as error:
                found = [f"({error})"]
            for line in found:
                put(pod.name, line)
        return
    news: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def read(name: str) -> None:
        try:
            for line in cluster.lines(state.log_path(namespace, name), follow="true", tailLines=lines):
                news.put((name, line))
        except (ApiFailure, TrainingError) as error:
            news.put((name, f"({error})"))

    threads = [threading.Thread(target=read, args=(pod.name,), daemon=True) for pod in pods]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not news.empty():
        try:
            put(*news.get(timeout=PAUSE_SECONDS))
        except queue.Empty:
            sys.stdout.flush()
