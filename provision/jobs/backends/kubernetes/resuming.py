"""What a resumed job on Kubernetes may have otherwise than before: a later end, other numbers, its script.

The objects in its ``manifests.yml`` are made as they are, also where they were changed by hand. For another
end or number they are built again from the plan of the launch, which the job's record keeps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from provision.cluster import flavor_facts
from provision.cluster.errors import TrainingError
from provision.jobs import jobspec, later_end, request
from provision.jobs.backends.kubernetes import parts, script
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.backends.kubernetes.record import Record
from provision.jobs.backends.kubernetes.servers import ROLE as SERVER
from provision.jobs.later_end import Trained
from provision.jobs.request import LaunchOptions

REBUILD = frozenset({"servers", "workers", "epochs", "steps"})  # options whose objects are built again

_PLAN = TypeAdapter(PodPlan)


def kept(plan: PodPlan) -> dict[str, Any]:
    """The plan for the job's record; a script is read again where the job resumes."""
    found: dict[str, Any] = _PLAN.dump_python(replace(plan, script=None), mode="json")
    return found


def resumed(found: Record, options: LaunchOptions) -> PodPlan | None:
    """The plan of a job that resumes; None for a record of an earlier version, which has none.

    TrainingError says what of the ``options`` cannot be.
    """
    given = options.given()
    servers, workers = given.get("servers"), given.get("workers")
    end: dict[str, int] = {name: given[name] for name in ("epochs", "steps") if name in given}
    if not found.plan:
        if changed := [request.flag(name) for name in ("servers", "workers", *end) if name in given]:
            raise TrainingError(
                f"{', '.join(changed)}: job {found.id} was launched by an earlier version, which kept too "
                "little of it for that; launch a new one"
            )
        return None
    try:
        plan = _PLAN.validate_python(found.plan)
    except ValidationError as error:
        raise TrainingError(f"job {found.id}: its kubernetes.json has an unusable plan: {error}") from None
    request.check_counts(servers, workers)
    wanted = plan.request
    if end:
        wanted = later_end.extended(wanted, end, found.id, flavor_facts.DEFAULT, _trained(plan, found))
    if options.script_arguments is not None:
        training = wanted.training.model_copy(update={"script_arguments": list(options.script_arguments)})
        wanted = replace(wanted, training=training)
    settings = plan.settings.model_copy(update={"workers": workers or plan.settings.workers})
    jobspec.check_together(wanted.training, settings.workers)
    count = plan.servers if servers is None else servers * plan.hosts
    if plan.local and count != plan.servers:
        raise TrainingError(
            f"--servers {servers}: job {found.id} has a server for each of {plan.servers} local volumes; "
            "launch a new one, or use kubernetes_storage_class"
        )
    pods = script.settle(wanted.training, settings)
    return replace(plan, request=wanted, settings=settings, servers=count, script=pods)


def scaled(found: Record, servers: int) -> PodPlan:
    """The plan of a running job that goes on with so many servers in all; TrainingError says why not."""
    if (plan := resumed(found, LaunchOptions())) is None:
        raise TrainingError(
            f"job {found.id} was launched by an earlier version, which kept too little of it to scale it; "
            "nothing was changed"
        )
    if plan.local:
        raise TrainingError(
            f"job {found.id} has a server for each of {plan.servers} local volumes, and no more or fewer; "
            "nothing was changed"
        )
    return replace(plan, servers=servers)


def _trained(plan: PodPlan, found: Record) -> Trained:
    """How far a job that is done has come, if its limits say so: its events are in the claim."""
    training = plan.request.training
    epochs = training.epochs or 0 if training.steps else training.decided().epochs
    if found.phase != "done" or (epochs and training.steps):
        return Trained(None, None)
    return Trained(training.steps or None, epochs or None)


def check_volumes(plan: PodPlan, found: Record, before: int, *, has_rows: bool) -> None:
    """Refuse another number of servers than the ``before`` whose volumes are there with rows of the job."""
    if plan.pools and has_rows and found.phase != "done" and plan.servers != before:
        labels = parts.selector(plan, SERVER)
        how = "without --servers" if found.servers == before else "with as many"
        words = ",".join(f"{name}={value}" for name, value in labels.items())
        raise TrainingError(
            f"job {found.id}: the volumes of {before} servers may have its rows, which {plan.servers} servers"
            f" cannot open; resume it {how}, or to lose these rows: kubectl delete pvc -n "
            f"{found.namespace} -l {words}"
        )
