"""Parts that the pods of servers and of workers share."""

from __future__ import annotations

from typing import Any

from provision.jobs.backends.kubernetes.plan import PodPlan

Document = dict[str, Any]

WORKER_PORT = 7702  # on which workers of one job reach each other
SECRET_DIR = "/etc/oeprov"  # noqa: S105 - in pods: where the token is mounted
PRIVATE_DIR = "/run/oeprov"  # in pods: the copy of the token, in memory
POOL_DIR = "/pool"
TOKEN = f"{PRIVATE_DIR}/token"

# The kubelet makes files of a secret readable for the pod's group, and the runtime refuses such a token.
TAKE_TOKEN = f"umask 077\ncat {SECRET_DIR}/token >{TOKEN}\n"


def labels_of(name: str) -> Document:
    """Labels of all objects of a job."""
    return {
        "app.kubernetes.io/name": "oeprov",
        "app.kubernetes.io/managed-by": "oeprov",
        "app.kubernetes.io/instance": name,
    }


def labels(plan: PodPlan, role: str = "") -> Document:
    """Labels by which objects of a job are found; of one role only, if given."""
    found = labels_of(plan.name)
    return {**found, "app.kubernetes.io/component": role} if role else found


def selector(plan: PodPlan, role: str) -> Document:
    """The labels that select pods of a role."""
    return {"app.kubernetes.io/instance": plan.name, "app.kubernetes.io/component": role}


def document(
    plan: PodPlan, api: str, kind: str, name: str, *, role: str = "", namespaced: bool = True
) -> Document:
    """An object's head."""
    place = {"namespace": plan.settings.namespace} if namespaced else {}
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, **place, "labels": labels(plan, role)},
    }


def cpus(value: float) -> str:
    """A number of CPUs as a quantity: ``2``, ``500m``."""
    return str(int(value)) if value == int(value) else f"{round(value * 1000)}m"


def size(value: int) -> str:
    """Bytes as a quantity: ``8Gi``, ``512Mi``."""
    for unit, name in ((1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if value and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)


def pod_security(plan: PodPlan) -> Document:
    """Security context of a pod: never root, and volumes writable for its group."""
    user = plan.settings.user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        # Else each start changes the group of each file of a large volume.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def security(*capabilities: str) -> Document:
    """Security context of a container: Pod Security's level "restricted", and ``capabilities``."""
    added = {"add": list(capabilities)} if capabilities else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **added},
    }


def volumes(plan: PodPlan) -> list[Document]:
    """The token, memory for a private copy of it, temporary files, and the claim."""
    return [
        {"name": "token", "secret": {"secretName": f"{plan.name}-token", "defaultMode": 0o440}},
        {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": plan.settings.claim}},
    ]


def mounts(plan: PodPlan) -> list[Document]:
    """Where containers see ``volumes``."""
    return [
        {"name": "token", "mountPath": SECRET_DIR, "readOnly": True},
        {"name": "private", "mountPath": PRIVATE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
        {"name": "shared", "mountPath": plan.settings.claim_path},
    ]


def pod(plan: PodPlan, **more: Any) -> Document:
    """A pod's specification."""
    pull = [{"name": plan.settings.pull_secret}] if plan.settings.pull_secret else []
    return {
        **({"imagePullSecrets": pull} if pull else {}),
        "automountServiceAccountToken": False,  # nothing in a pod asks the API anything
        "enableServiceLinks": False,
        "securityContext": pod_security(plan),
        **more,
    }


# Puts a container's last error line into its pod's state, which status and kubectl show.
TELL = {"terminationMessagePolicy": "FallbackToLogsOnError"}


def command(script: str, name: str, words: list[str]) -> Document:
    """A container's command: ``words`` are the script's "$@"."""
    return {"command": ["/bin/sh", "-ec", script, name], "args": words}


def passing_on(words: str, sent: str = "TERM") -> str:
    """A shell script that runs a command, passes on signals to it as ``sent`` and sets ``status``.

    The first process of a container gets only signals that it handles, and Python handles none while it
    imports: deleting the pod would take the whole grace period. A trap interrupts `wait`: hence the loop.
    """
    return f"""\
{words} &
process=$!
trap 'kill -{sent} "$process"' TERM INT
while true; do
  wait "$process" && status=0 || status=$?
  kill -0 "$process" 2>/dev/null || break
done
"""


def environment(values: dict[str, str]) -> list[Document]:
    """Environment variables, sorted."""
    return [{"name": key, "value": values[key]} for key in sorted(values)]
