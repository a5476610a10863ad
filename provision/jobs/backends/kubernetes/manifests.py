"""The manifests of a job: all objects in the order of their creation, also as one YAML text."""

from __future__ import annotations

import base64
import shlex
from typing import Any

import yaml

from provision.jobs.backends.kubernetes import parts, servers, workers
from provision.jobs.backends.kubernetes.parts import Document
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.backends.kubernetes.script import APPLIED_BYTES


def build(plan: PodPlan, token: str = "") -> list[Document]:
    """All objects; without a ``token``, all but the secret that holds it."""
    first = [secret(plan.name, plan.settings.namespace, token)] if token else []
    return [*first, *servers.documents(plan), *workers.documents(plan)]


def secret(name: str, namespace: str, token: str) -> Document:
    """The token that servers ask of clients; TLS keys are derived from it too."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-token", "namespace": namespace, "labels": parts.labels_of(name)},
        "type": "Opaque",
        "data": {"token": base64.b64encode(token.encode()).decode()},
    }


def render(plan: PodPlan, found: list[Document]) -> str:
    """One YAML text, the same for the same inventory; its head says how to use it."""
    namespace = shlex.quote(plan.settings.namespace)
    large = plan.script is not None and len(plan.script.packed) > APPLIED_BYTES
    apply = "apply --server-side" if large else "apply"
    lines = [f"Made by `oeprov manifests` for job {plan.name}: kubectl {apply} -f FILE"]
    if not any(item["kind"] == "Secret" for item in found):
        lines += [
            "This file lacks the secret. Create it first:",
            f"  openssl rand -hex 32 | kubectl -n {namespace} create secret generic {plan.name}-token "
            "--from-file=token=/dev/stdin",
        ]
    lines += [
        f"Checkpoints and the export come to {plan.directory}/run of claim {plan.settings.claim}.",
        "When its workers are complete, or to stop it: kubectl delete -f FILE",
    ]
    if plan.storage == "pmem_memkind":
        lines.append("Servers have capability SYS_NICE (for mbind): Pod Security's level must be privileged.")
    lines += [f"Note: {note}" for note in plan.notes]
    return "".join(f"# {line}\n" for line in lines) + text(found)


def text(found: list[Document]) -> str:
    """Objects as one YAML text."""
    rendered: str = yaml.dump_all(found, Dumper=_Dumper, explicit_start=True, sort_keys=False, width=110)
    return rendered


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
