"""The state of a job on its cluster: its phase, its pods and their troubles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from provision.jobs.backends.kubernetes import api
from provision.jobs.backends.kubernetes.api import Api, ApiFailure, Document

# Reasons of a waiting container that seldom go away by themselves.
_HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "ErrImageNeverPull",
)
_ENDS = {"Complete": "done", "Succeeded": "done", "Failed": "failed"}


@dataclass(frozen=True)
class Pod:
    """A pod of a job; ``trouble`` says what keeps it from running.

    ``passing``: the trouble is usual for some seconds. ``hopeless``: if it lasts, the pod will never run.
    """

    name: str
    role: str
    node: str
    state: str
    ready: bool
    restarts: int
    trouble: str
    passing: bool = False
    hopeless: bool = False


def pods(cluster: Api, namespace: str, name: str) -> list[Pod]:
    """The job's pods, servers first."""
    query = f"app.kubernetes.io/instance={name},app.kubernetes.io/managed-by=oeprov"
    found = cluster.ask("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=query).get("items") or []
    pairs = [(_pod(item), item) for item in found]
    if any(pod.state == "starts" and not pod.trouble for pod, _ in pairs):
        # Volumes that cannot be mounted, for example, are reported nowhere else.
        warnings = {item["involvedObject"].get("uid"): text for item, text in _warnings(cluster, namespace)}
        for number, (pod, item) in enumerate(pairs):
            warning = warnings.get(item["metadata"].get("uid"))
            if warning and pod.state == "starts" and not pod.trouble:
                pairs[number] = replace(pod, trouble=warning, passing=True), item
    return sorted((pod for pod, _ in pairs), key=lambda pod: (pod.role, *_order(pod.name)))


def refusals(cluster: Api, namespace: str, documents: list[Document]) -> list[str]:
    """Why pods of these objects were refused: quotas, Pod Security, admission."""
    names = {(item["kind"], item["metadata"]["name"]): api.label(item) for item in documents}
    found = {}
    for item, words in _warnings(cluster, namespace):
        about = item["involvedObject"]
        if item.get("reason") == "FailedCreate" and (
            label := names.get((about.get("kind"), about.get("name")))
        ):
            found[label] = words
    return [f"{label}: {words}" for label, words in found.items()]


def _warnings(cluster: Api, namespace: str) -> list[tuple[Document, str]]:
    """Warning events of the namespace with their texts, oldest first; empty if they may not be read."""
    try:
        found = cluster.ask("GET", f"/api/v1/namespaces/{namespace}/events", fieldSelector="type=Warning")
    except ApiFailure:
        return []
    items = sorted(
        found.get("items") or [],
        key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""),
    )
    return [(item, f"{item.get('reason')}: {item.get('message')}") for item in items]


def _order(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (name, 0)


def _pod(item: Document) -> Pod:
    meta, status = item["metadata"], item.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    phase = str(status.get("phase", "Unknown"))
    ready = any(
        c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or []
    )
    state = (
        "ends"
        if meta.get("deletionTimestamp")
        else {"Running": "runs", "Pending": "starts"}.get(phase, phase.lower())
    )
    return Pod(
        name=str(meta["name"]),
        role=str(meta.get("labels", {}).get("app.kubernetes.io/component", "")),
        node=str((item.get("spec") or {}).get("nodeName", "")),
        state=state,
        ready=ready,
        restarts=sum(int(c.get("restartCount", 0)) for c in containers),
        **_trouble(status, containers),
    )


def _trouble(status: Document, containers: list[Document]) -> dict[str, Any]:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason in _HOPELESS:
            message = waiting.get("message") or container.get("image", "")
            return {"trouble": f"{reason}: {message}", "hopeless": True}
        if reason == "CrashLoopBackOff":
            return {"trouble": f"container {container.get('name')} ends again and again{_ended(container)}"}
        if (ended := (container.get("state") or {}).get("terminated")) and ended.get("exitCode"):
            return {"trouble": f"container {container.get('name')} ended{_ended(container)}"}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = condition.get("message") or condition.get("reason", "")
            return {"trouble": f"no node takes it yet: {message}", "passing": True}
    return {"trouble": str(status.get("message") or "")}


def _ended(container: Document) -> str:
    """How a container ended last, with its last error line: the kubelet keeps the end of its log."""
    for key in ("state", "lastState"):
        if ended := (container.get(key) or {}).get("terminated"):
            reason = f" ({ended['reason']})" if ended.get("reason") not in (None, "Error") else ""
            lines = str(ended.get("message") or "").splitlines()
            error = next((line for line in reversed(lines) if line.startswith("error: ")), "")
            return f" with exit status {ended.get('exitCode')}{reason}{error.removeprefix('error')}"
    return ""


def phase(cluster: Api, work: Document) -> tuple[str, str]:
    """``running``, ``done``, ``failed`` or, if the object is missing, ``gone``; and the API's message."""
    found = cluster.get(api.path(work))
    if found is None:
        return "gone", ""
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in _ENDS:
            return _ENDS[condition["type"]], str(condition.get("message") or "")
    return "running", ""


def log_path(namespace: str, pod: str) -> str:
    """The API's path of a pod's log."""
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/log"


def last_lines(cluster: Api, namespace: str, pod: Pod, lines: int) -> list[str]:
    """The last lines of a pod's log; none until it has started."""
    try:
        return cluster.text(log_path(namespace, pod.name), tailLines=lines).splitlines()
    except ApiFailure:
        return []
