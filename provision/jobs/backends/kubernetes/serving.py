"""Replicas on Kubernetes: a Deployment beside a job's run in its claim, and a Service in front of it.

``replicas`` makes them, or they are printed, to be applied by hand. A change of the Deployment replaces pods
one by one, each once the next is ready.
"""

from __future__ import annotations

import copy
import shlex
from dataclasses import replace
from pathlib import PurePosixPath

from provision.cluster.errors import TrainingError
from provision.jobs.backends.kubernetes import manifests, parts, record, resuming
from provision.jobs.backends.kubernetes.parts import Document
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.placement import arguments
from provision.jobs.request import LaunchOptions, ServeOptions, scheme
from provision.jobs.store import Job, replicas_id

ROLE = "replica"
PORT, GRPC_PORT = 8501, 8500  # in pods
MARK = "oeprov/made-by"  # annotation: a word that only the job which made the object knows
_SCRIPT = f"""\
{parts.passing_on('python -m oe_runtime.serve "$@"')}exit "$status"
"""
# Training keeps the checkpoint that the file names, so nothing is written for one that is not kept.
_PIN = """\
if [ -n "$OEPROV_STEP" ]; then
  kept="" is_kept=""
  for file in "$1"/checkpoints/step-*/manifest.json; do
    step=${file%/manifest.json}
    step=$(printf %s "${step##*step-}" | sed 's/[.].*//; s/^0*\\(.\\)/\\1/')
    kept="$kept $step"
    [ "$step" != "$OEPROV_STEP" ] || is_kept=yes
  done
  if [ -z "$is_kept" ]; then
    echo "error: step $OEPROV_STEP is not kept; kept are$kept" >&2
    exit 1
  fi
fi
printf '%s\\n' "$OEPROV_STEP" >"$OEPROV_STEP_FILE.$HOSTNAME"
mv "$OEPROV_STEP_FILE.$HOSTNAME" "$OEPROV_STEP_FILE"
"""
_END_SECONDS = 40  # more than --drain-seconds, for a computation that is waited for


def text(job: Job, options: ServeOptions) -> str:
    """The objects as one YAML text, whose head says how to use it; TrainingError says what cannot be."""
    plan = settle(job, options)
    namespace = shlex.quote(plan.settings.namespace)
    port = options.port or PORT
    lines = [
        f"Made by `oeprov serve {job.id} --print`: kubectl apply -f FILE",
        f"To ask it: kubectl -n {namespace} port-forward service/{replicas_id(job.id)} {port}",
        "To stop it: kubectl delete -f FILE",
    ]
    return "".join(f"# {line}\n" for line in lines) + manifests.text(documents(plan, options))


def settle(job: Job, options: ServeOptions) -> PodPlan:
    """The plan of the job whose model is served; TrainingError says what cannot be."""
    plan = resuming.resumed(record.read(job), LaunchOptions())
    if plan is None:
        raise TrainingError(
            f"job {job.id} was launched by an earlier version, which kept no plan; launch anew"
        )
    if plan.request.training.script:
        raise TrainingError(
            f"job {job.id} trains a script, which alone makes its model: serve what it exports, by `oeprov "
            "serve EXPORT --rows RUN` where the claim's volume is mounted"
        )
    if options.rows is not None:
        raise TrainingError(f"--rows: job {job.id} has rows of its own; leave it out")
    if options.host != ServeOptions.host:
        raise TrainingError(f"--host {options.host}: on Kubernetes a Service has the address; leave it out")
    return plan


def documents(plan: PodPlan, options: ServeOptions, mark: str = "") -> list[Document]:
    """The Service and the Deployment; ``mark``: see ``MARK``."""
    options = options.with_paths(here=False)
    ports = {"http": options.port or PORT, **({"grpc": options.grpc_port} if options.grpc_port else {})}
    own = replace(plan, name=replicas_id(plan.name))  # its pods are none of the training's
    service = {
        **parts.document(own, "v1", "Service", own.name, role=ROLE),
        "spec": {
            "selector": parts.selector(own, ROLE),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        },
    }
    deployment = {
        **parts.document(own, "apps/v1", "Deployment", own.name, role=ROLE),
        "spec": {
            "replicas": options.replicas,
            "selector": {"matchLabels": parts.selector(own, ROLE)},
            # The next one is ready before one ends, so that no request finds none.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": parts.labels(own, ROLE)},
                "spec": _pod(plan, options),
            },
        },
    }
    found = [service, deployment]
    for item in found if mark else []:
        item["metadata"]["annotations"] = {MARK: mark}
    return found


def pinned(found: list[Document], run: str, step: str) -> list[Document]:
    """The objects of replicas that serve this step of the run; with an empty ``step`` the newest one again.

    Their pods may write to the job's directory: the step, and marks of the checkpoints that they serve.
    """
    service, deployment = copy.deepcopy(found)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    directory = PurePosixPath(run).parent
    file = str(directory / "serving-step")
    if "--step-file" not in container["args"]:
        container["args"][1:1] = ["--step-file", file]
        container["command"][2] = _PIN + _SCRIPT
        (shared,) = [item for item in container["volumeMounts"] if item["name"] == "shared"]
        inside = str(directory.relative_to(shared["mountPath"]))
        mount = {"name": "shared", "mountPath": str(directory), "subPath": inside}
        container["volumeMounts"].append(mount)
        (volume,) = [item for item in pod["volumes"] if item["name"] == "shared"]
        volume["persistentVolumeClaim"]["readOnly"] = False  # its other mount is
    given = {"OEPROV_STEP": step, "OEPROV_STEP_FILE": file}
    container["env"] = parts.environment(
        {**{item["name"]: item["value"] for item in container["env"]}, **given}
    )
    return [service, deployment]


def model_name(plan: PodPlan, options: ServeOptions) -> str:
    """The model's name in requests."""
    return options.name or plan.name


def _pod(plan: PodPlan, options: ServeOptions) -> Document:
    settings = plan.settings
    ports = {"http": PORT, **({"grpc": GRPC_PORT} if options.grpc_port else {})}
    flags = arguments(
        {
            "name": model_name(plan, options),
            "host": "0.0.0.0",  # noqa: S104 - of the pod
            "port": PORT,
            "grpc_port": ports.get("grpc"),
        }
    )
    secure = {"scheme": "HTTPS"} if scheme(options.arguments) == "https" else {}
    ready = {"httpGet": {"path": "/v2/health/ready", "port": "http", **secure}}
    words = [str(plan.directory / "run"), *flags, *options.arguments]
    memory = parts.size(settings.worker_memory)
    shared = {"name": "shared", "mountPath": settings.claim_path, "readOnly": True}
    container = {
        "name": ROLE,
        "image": settings.worker_image,
        **parts.command(_SCRIPT, ROLE, words),
        "env": parts.environment({"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}),  # noqa: S108 - the pod's own
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": {
            "requests": {"cpu": parts.cpus(settings.worker_cpus), "memory": memory},
            "limits": {"memory": memory},
        },
        "startupProbe": {**ready, "periodSeconds": 5, "failureThreshold": -(-options.start_timeout // 5)},
        "readinessProbe": {**ready, "periodSeconds": 1, "failureThreshold": 1},
        "securityContext": parts.security(),
        **parts.TELL,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, shared],  # noqa: S108 - the pod's own
    }
    where = {"nodeSelector": dict(sorted(settings.worker_nodes.items()))} if settings.worker_nodes else {}
    claim = {"claimName": settings.claim, "readOnly": True}
    return parts.pod(
        plan,
        terminationGracePeriodSeconds=_END_SECONDS,
        **where,
        containers=[container],
        volumes=[{"name": "tmp", "emptyDir": {}}, {"name": "shared", "persistentVolumeClaim": claim}],
    )
