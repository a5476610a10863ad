"""Checks what a cluster must have and allow before a job is made there. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from provision.cluster.errors import TrainingError
from provision.jobs.backends.kubernetes import api, record
from provision.jobs.backends.kubernetes.api import Api, ApiFailure, Document
from provision.jobs.backends.kubernetes.plan import PodPlan

_READ = ("get", "list")
_OLDEST, _BUDGETS, _INDEXED = (1, 20), (1, 21), (1, 22)  # versions: of jobs, of policy/v1, of Indexed Jobs
_OPERATORS = {"TFJob": "Kubeflow's training operator", "MPIJob": "Kubeflow's MPI operator"}


def check(
    cluster: Api, plan: PodPlan, documents: list[Document], there: Collection[str] = ()
) -> list[Document]:
    """The documents in the form that the cluster's version knows; ``there``: labels of those to be changed.

    TrainingError names what is missing: an answer, a newer version, the namespace, rights, the claim, kinds;
    or volumes that are there already.
    """
    try:
        documents = for_version(cluster, plan, documents)
        _namespace(cluster, plan)
        _rights(cluster, plan, documents)
        _claim(cluster, plan)
        _pull_secret(cluster, plan)
        _kinds(cluster, documents)
        _volumes(cluster, documents)
        rehearse(cluster, documents, there)
        return documents
    except ApiFailure as error:
        if error.code == 401:
            raise TrainingError(
                f"the Kubernetes API at {cluster.address} refused your credentials: {error}; renew them "
                "in the kubeconfig file"
            ) from None
        raise TrainingError(f"the Kubernetes API at {cluster.address} refused: {error}") from None


def for_version(cluster: Api, plan: PodPlan, documents: list[Document]) -> list[Document]:
    """The documents for the cluster's version; TrainingError if that cannot run the job.

    The cluster drops fields that it does not know yet (a Job's ``podFailurePolicy``) by itself.
    """
    name = str(cluster.ask("GET", "/version").get("gitVersion", ""))
    found = re.match(r"v?(\d+)\.(\d+)", name)
    if found is None:
        return documents
    version = int(found[1]), int(found[2])
    if version < _OLDEST:
        raise TrainingError(f"the cluster is Kubernetes {name}; jobs need 1.20 or later")
    if version < _INDEXED and plan.settings.form == "job" and plan.settings.workers > 1:
        raise TrainingError(
            f"kubernetes_workers is {plan.settings.workers}, but several workers are an Indexed Job, and the "
            f"cluster is Kubernetes {name}, before 1.22: use one worker, or kubernetes_form: tfjob"
        )
    if version >= _BUDGETS:
        return documents
    return [
        {**item, "apiVersion": "policy/v1beta1"} if item["kind"] == "PodDisruptionBudget" else item
        for item in documents
    ]


def _is_missing(cluster: Api, path: str) -> bool:
    """Whether an object is missing; one that may not be read may still be used."""
    try:
        return cluster.get(path) is None
    except ApiFailure as error:
        if error.code != 403:
            raise
        return False


def _namespace(cluster: Api, plan: PodPlan) -> None:
    name = plan.settings.namespace
    if _is_missing(cluster, f"/api/v1/namespaces/{name}"):
        raise TrainingError(
            f"kubernetes_namespace: the cluster has no namespace {name}; make it with: "
            f"kubectl create namespace {name}"
        )


def rights(plan: PodPlan, documents: list[Document]) -> list[dict[str, str]]:
    """Every right that a job needs, as the API asks for it."""
    namespace = plan.settings.namespace
    found: list[dict[str, str]] = []

    def need(
        verbs: tuple[str, ...], resource: str, group: str = "", subresource: str = "", here: bool = True
    ) -> None:
        for verb in verbs:
            item = {"verb": verb, "resource": resource, "group": group}
            if subresource:
                item["subresource"] = subresource
            if here:
                item["namespace"] = namespace
            if item not in found:
                found.append(item)

    for document in documents:
        resource, group = api.resource(str(document["kind"])), api.group(document)
        need(("create", "delete"), resource, group, here="namespace" in document["metadata"])
        if document["kind"] in record.WORK:
            need(("get",), resource, group)
        if document["kind"] == "Deployment":  # of replicas, which may be changed, with their service
            need(("get", "patch"), resource, group)
            need(("get", "patch"), "services")
    need(_READ, "pods")
    need(("get",), "pods", subresource="log")
    has_volumes = plan.pools and any(item["kind"] == "StatefulSet" for item in documents)
    need(("get", "delete") if has_volumes else ("get",), "persistentvolumeclaims")
    return found


def _rights(cluster: Api, plan: PodPlan, documents: list[Document]) -> None:
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    denied = []
    for right in rights(plan, documents):
        body = {**review, "spec": {"resourceAttributes": right}}
        answer = cluster.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        if not (answer.get("status") or {}).get("allowed"):
            denied.append(right)
    if not denied:
        return
    wide = [item for item in denied if "namespace" not in item]
    advice = "ask for a role with these rights"
    if wide and len(wide) == len(denied):
        advice = "let an administrator make the volumes (oeprov manifests), or set kubernetes_storage_class"
    raise TrainingError(
        f"no right in namespace {plan.settings.namespace} to {_words(denied)}; nothing was made: {advice}"
    )


def _words(denied: list[dict[str, str]]) -> str:
    verbs: dict[str, list[str]] = {}
    for item in denied:
        name = item["resource"] + (f"/{item['subresource']}" if "subresource" in item else "")
        verbs.setdefault(name + (f".{item['group']}" if item["group"] else ""), []).append(item["verb"])
    return ", ".join(f"{'/'.join(found)} {name}" for name, found in verbs.items())


def _claim(cluster: Api, plan: PodPlan) -> None:
    name, namespace = plan.settings.claim, plan.settings.namespace
    found = cluster.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
    if found is None:
        raise TrainingError(
            f"kubernetes_claim: namespace {namespace} has no claim {name}; make one with access mode "
            "ReadWriteMany, for data and checkpoints"
        )
    modes: list[Any] = found.get("spec", {}).get("accessModes") or []
    if "ReadWriteMany" not in modes:
        raise TrainingError(
            f"kubernetes_claim: claim {name} has access mode {', '.join(map(str, modes)) or 'none'}; servers "
            "and workers on several nodes need ReadWriteMany"
        )
    if found.get("status", {}).get("phase") == "Lost":
        raise TrainingError(f"kubernetes_claim: claim {name} has lost its volume")


def _pull_secret(cluster: Api, plan: PodPlan) -> None:
    name, namespace = plan.settings.pull_secret, plan.settings.namespace
    if name and _is_missing(cluster, f"/api/v1/namespaces/{namespace}/secrets/{name}"):
        raise TrainingError(f"kubernetes_pull_secret: namespace {namespace} has no secret {name}")


def _kinds(cluster: Api, documents: list[Document]) -> None:
    for document in documents:
        kind, group = str(document["kind"]), str(document["apiVersion"])
        if kind in _OPERATORS and cluster.get(f"/apis/{group}") is None:
            raise TrainingError(
                f"kubernetes_form: the cluster has no {kind} ({group}); install {_OPERATORS[kind]}, or use "
                "kubernetes_form: job"
            )


def _volumes(cluster: Api, documents: list[Document]) -> None:
    """Refuse a new job whose servers would get the volumes of an earlier job of its name, with its rows."""
    volumes = [item for item in documents if item["kind"] == "PersistentVolume"]
    for item in [*record.volume_claims(documents), *volumes]:
        try:
            found = cluster.get(api.path(item))
        except ApiFailure as error:
            if error.code != 403:
                raise
            continue  # the right to read volumes is not needed
        if found is not None:
            label = api.label(item)
            raise TrainingError(
                f"{label} is there already, with the rows of an earlier job of this name; launch it again, "
                f"which gives it another name, or to lose these rows: kubectl delete {label}"
                + (f" -n {item['metadata']['namespace']}" if "namespace" in item["metadata"] else "")
            )


def has_volumes(cluster: Api, documents: list[Document]) -> bool:
    """Whether servers have volumes already, in which rows may be; or they may not be read."""
    return any(not _is_missing(cluster, api.path(item)) for item in record.volume_claims(documents))


def rehearse(cluster: Api, documents: list[Document], there: Collection[str] = ()) -> None:
    """Let the API check each object, admission and quotas too, without keeping it."""
    for document in documents:
        try:
            api.put(cluster, document, is_there=api.label(document) in there, dryRun="All")
        except ApiFailure as error:
            if error.code == 409 and document["kind"] == "PersistentVolume":
                continue  # of this very job, before it was stopped
            raise TrainingError(
                f"the cluster would refuse {api.label(document)}: {error}; nothing was "
                + ("changed" if there else "made")
            ) from None
