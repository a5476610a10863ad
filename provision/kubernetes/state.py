"""What the cluster says of a job right now: its phase, its pods and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from provision.kubernetes import api
from provision.kubernetes.api import Api, ApiFailure, Document

# Reasons of a waiting container that do not go away by themselves.
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
    """A pod of a job; ``trouble`` says in words what keeps it from running, ``hopeless`` that it will not."""

    name: str
    role: str
    node: str
    state: str
    ready: bool
    restarts: int
    trouble: str
    hopeless: bool


def pods(cluster: Api, namespace: str, name: str) -> list[Pod]:
    """The job's pods, servers first."""
    query = f"app.kubernetes.io/instance={name},app.kubernetes.io/managed-by=oeprov"
    found = cluster.ask("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=query)
    items = sorted((_pod(item) for item in found.get("items") or []), key=lambda pod: _order(pod.name))
    return sorted(items, key=lambda pod: pod.role)


def _order(name: str) -> tuple[str, int]:
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (name, 0)


def _pod(item: Document) -> Pod:
    meta, status = item["metadata"], item.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    trouble, hopeless = _trouble(status, containers)
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
        trouble=trouble,
        hopeless=hopeless,
    )


def _trouble(status: Document, containers: list[Document]) -> tuple[str, bool]:
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason in _HOPELESS:
            return f"{reason}: {waiting.get('message') or container.get('image', '')}", True
        if reason == "CrashLoopBackOff":
            return f"container {container.get('name')} ends again and again{_ended(container)}", False
        if (ended := (container.get("state") or {}).get("terminated")) and ended.get("exitCode"):
            return f"container {container.get('name')} ended{_ended(container)}", False
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"no node takes it: {condition.get('message', '')}", False
    return str(status.get("message") or ""), False


def _ended(container: Document) -> str:
    for key in ("state", "lastState"):
        if ended := (container.get(key) or {}).get("terminated"):
            reason = f" ({ended['reason']})" if ended.get("reason") not in (None, "Error") else ""
            return f" with exit status {ended.get('exitCode')}{reason}"
    return ""


def phase(cluster: Api, work: Document) -> tuple[str, str]:
    """``running``, ``done``, ``failed`` or, when the object is not there, ``gone``; and the API's words."""
    found = cluster.get(api.path(work))
    if found is None:
        return "gone", ""
    for condition in (found.get("status") or {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in _ENDS:
            return _ENDS[condition["type"]], str(condition.get("message") or "")
    return "running", ""


def log_path(namespace: str, pod: str) -> str:
    """Where the API has what a pod said."""
    return f"/api/v1/namespaces/{namespace}/pods/{pod}/log"


def last_lines(cluster: Api, namespace: str, pod: Pod, lines: int, *, previous: bool = False) -> list[str]:
    """The last lines of a pod; none while it has not begun."""
    query: dict[str, Any] = {"tailLines": lines, **({"previous": "true"} if previous else {})}
    try:
        return cluster.text(log_path(namespace, pod.name), **query).splitlines()
    except ApiFailure:
        return []
