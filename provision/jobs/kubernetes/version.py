"""What a cluster that is older than the manifests needs to be otherwise."""

from __future__ import annotations

import re

from provision.cluster.errors import TrainingError
from provision.jobs.kubernetes.api import Api, Document
from provision.jobs.kubernetes.plan import Plan

_OLDEST, _BUDGETS, _INDEXED = (1, 20), (1, 21), (1, 22)


def suit(cluster: Api, plan: Plan, documents: list[Document]) -> list[Document]:
    """The documents as the cluster's version knows them; TrainingError when it cannot run the job.

    Fields that it does not know yet (a Job's ``podFailurePolicy``) it drops by itself.
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
