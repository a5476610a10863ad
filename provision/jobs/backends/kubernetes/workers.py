"""Workers: an Indexed Job, or Kubeflow's TFJob or MPIJob, with the service for their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from provision.jobs.backends import CHECKPOINT_SECONDS
from provision.jobs.backends.kubernetes import parts, script, servers
from provision.jobs.backends.kubernetes.parts import WORKER_PORT, Document
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.placement import arguments, training_words

ROLE = "worker"
_HOME = "/home/oeprov"  # of the image's user; MPI's ssh reads its keys there
RETRIES = 3  # per worker, since all end together; each resumes from the last checkpoint

# Shown by kubectl. --on-worker-lost has nothing to choose here: lost workers always restart.
_WORKER_LOST = (
    "A lost pod is started again; all workers then resume from the last checkpoint, or from the beginning "
    "if there is none yet."
)

# A worker that replaces another resumes from its checkpoint.
_SCRIPT = f"""\
{parts.TAKE_TOKEN}for saved in "$RUN"/checkpoints/step-*/manifest.json; do
  if [ -e "$saved" ]; then set -- --resume "$@"; break; fi
done
{parts.passing_on('python -m oe_runtime.train "$@"')}exit "$status"
"""

# Workers start when all servers listen: a first connection is not retried.
_WAIT = """\
import signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the first process of a container gets no other
deadline = time.monotonic() + float(sys.argv[1])
for place in sys.argv[2].split(","):
    host, port = place.rsplit(":", 1)
    while True:
        try:
            socket.create_connection((host, int(port)), 5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"error: server {place} cannot be reached: {error}")
            time.sleep(1)
"""
_WAIT_SECONDS = 1800  # servers may take to recover their rows

# Of MPIJob, whose operator puts one key into ~/.ssh of all pods; it is also their host key.
_SSH_PORT = 7703  # no process has the right to listen on 22
_SSHD = ["/usr/sbin/sshd", "-De", "-f", "/dev/null", "-p", str(_SSH_PORT)]
_SSHD += ["-o", f"HostKey={_HOME}/.ssh/id_rsa", "-o", f"AuthorizedKeysFile={_HOME}/.ssh/authorized_keys"]
_SSHD += ["-o", "StrictModes=no", "-o", "PidFile=none", "-o", "PasswordAuthentication=no"]
# Without a binding, workers have all CPUs. mpirun kills processes one second after a SIGTERM of its own, so
# SIGUSR1 asks the workers to stop.
_MPIRUN = """\
mpirun --map-by ppr:1:node --bind-to none -n "$WORKERS" --mca plm_rsh_args '-F /tmp/ssh_config' \
  --mca plm_rsh_no_tree_spawn 1 --mca odls_base_signal_direct_children_only 1 $PASSED \
  /bin/sh -ec "$SCRIPT" worker ${MANY:+--workers "$workers"} "$@"\
"""
# Runs in the launcher: the operator's list of hosts says where the workers are.
_MPI_LAUNCHER = f"""\
workers=$(sed -e 's/[: ].*//' -e "s/$/:$PORT/" /etc/mpi/hostfile | paste -s -d , -)
cat >/tmp/ssh_config <<'END'
Port {_SSH_PORT}
ConnectionAttempts 30
StrictHostKeyChecking yes
UserKnownHostsFile /dev/null
KnownHostsCommand /bin/sed "s/^/* /" {_HOME}/.ssh/authorized_keys
END
{parts.passing_on(_MPIRUN, "USR1")}exit "$status"
"""
# A worker's container ends with its sshd, so it waits until the training has written its checkpoint.
_MPI_STOP = "while grep -qsx orted /proc/[0-9]*/comm; do sleep 1; done"


def documents(plan: PodPlan) -> list[Document]:
    """All objects of the workers, in the order in which they are made."""
    found = {"job": _job, "tfjob": _tfjob, "mpijob": _mpijob}[plan.settings.form](plan)
    found["metadata"]["annotations"] = {"oeprov/worker-lost": _WORKER_LOST}
    many = plan.settings.workers > 1
    service = [_service(plan)] if many and plan.settings.form == "job" else []
    files = [_script_files(plan)] if plan.script is not None and plan.script.files is not None else []
    return [*files, *service, *([_policy(plan)] if many else []), found]


def name(plan: PodPlan) -> str:
    """Of the object that runs the workers; it also begins the names of their pods."""
    return f"{plan.name}-worker" if plan.settings.form == "job" else plan.name


def _script_files(plan: PodPlan) -> Document:
    """The script's directory, packed. Its name says which content, so that a pod never sees another."""
    assert plan.script is not None  # noqa: S101 - asked by the caller
    found = parts.document(plan, "v1", "ConfigMap", _archive(plan), role=ROLE)
    found["metadata"]["annotations"] = {script.CONTENT: plan.script.content}
    return {**found, "immutable": True, "binaryData": plan.script.data()}


def _archive(plan: PodPlan) -> str:
    """The name of the ConfigMap with the script's directory; empty if the job has none."""
    name = plan.script.name if plan.script is not None else ""
    return f"{plan.name}-{name}" if name else ""


def _service(plan: PodPlan) -> Document:
    return {
        **parts.document(plan, "v1", "Service", f"{plan.name}-workers", role=ROLE),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": parts.selector(plan, ROLE),
            "ports": [{"name": "workers", "port": WORKER_PORT, "targetPort": WORKER_PORT}],
        },
    }


def _policy(plan: PodPlan) -> Document:
    """Only workers of the job reach each other: TensorFlow's collectives have no authentication."""
    return {
        **parts.document(plan, "networking.k8s.io/v1", "NetworkPolicy", f"{plan.name}-workers", role=ROLE),
        "spec": {
            "podSelector": {"matchLabels": parts.selector(plan, ROLE)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": parts.selector(plan, ROLE)}}]}],
        },
    }


def _job(plan: PodPlan) -> Document:
    count = plan.settings.workers
    addresses = [f"{plan.name}-worker-{rank}.{plan.name}-workers:{WORKER_PORT}" for rank in range(count)]
    template = _template(plan, "worker", _rank_words(count, addresses, "$(JOB_COMPLETION_INDEX)"))
    if count > 1:
        template["spec"]["subdomain"] = f"{plan.name}-workers"
    return {
        **parts.document(plan, "batch/v1", "Job", name(plan), role=ROLE),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": RETRIES * count,
            # An eviction from a node is no failure.
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
                ]
            },
            "template": template,
        },
    }


def _rank_words(count: int, addresses: list[str], rank: str) -> list[str]:
    return ["--workers", ",".join(addresses), "--rank", rank] if count > 1 else []


def _tfjob(plan: PodPlan) -> Document:
    count = plan.settings.workers
    addresses = [f"{plan.name}-worker-{rank}:{WORKER_PORT}" for rank in range(count)]
    # The operator expects a container of this name, and numbers its pods by this label.
    template = _template(plan, "tensorflow", _rank_words(count, addresses, "$(RANK)"))
    label = "metadata.labels['training.kubeflow.org/replica-index']"
    container = template["spec"]["containers"][0]
    container["env"].insert(0, {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": label}}})
    container["ports"] = [{"name": "tfjob-port", "containerPort": WORKER_PORT}]
    del template["spec"]["restartPolicy"]  # the replica's own says it
    return {
        **parts.document(plan, "kubeflow.org/v1", "TFJob", name(plan), role=ROLE),
        "spec": {
            "runPolicy": {"backoffLimit": RETRIES * count, "cleanPodPolicy": "None"},
            "tfReplicaSpecs": {
                "Worker": {"replicas": count, "restartPolicy": "OnFailure", "template": template}
            },
        },
    }


def _mpijob(plan: PodPlan) -> Document:
    count = plan.settings.workers
    template = _template(plan, "launcher", [])
    launcher = template["spec"]["containers"][0]
    launcher["command"] = ["/bin/sh", "-ec", _MPI_LAUNCHER, "launcher"]
    rank = '--rank "$OMPI_COMM_WORLD_RANK"' if count > 1 else ""
    passed = ["PATH", *(item["name"] for item in launcher["env"])]
    launcher["env"] += parts.environment(
        {
            "SCRIPT": _start(plan)
            .replace("oe_runtime.train", f"oe_runtime.train {rank}".rstrip())
            .replace("TERM INT", "TERM INT USR1"),
            "PASSED": " ".join(f"-x {name}" for name in passed),
            "PORT": str(WORKER_PORT),
            "WORKERS": str(count),
            **({"MANY": "1"} if count > 1 else {}),
        }
    )
    # mpirun starts the training; the launcher itself needs little.
    launcher["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    worker = _template(plan, "worker", [])
    container = worker["spec"]["containers"][0]
    container["command"] = _SSHD
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", _MPI_STOP]}}}
    del container["args"], worker["spec"]["initContainers"]
    for item in (template, worker):
        del item["spec"]["restartPolicy"]
    return {
        **parts.document(plan, "kubeflow.org/v2beta1", "MPIJob", name(plan), role=ROLE),
        "spec": {
            "slotsPerWorker": 1,
            "launcherCreationPolicy": "WaitForWorkersReady",  # before that they have no address
            "sshAuthMountPath": f"{_HOME}/.ssh",
            "runPolicy": {"backoffLimit": RETRIES * count, "cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "OnFailure", "template": template},
                "Worker": {"replicas": count, "restartPolicy": "OnFailure", "template": worker},
            },
        },
    }


def _template(plan: PodPlan, container: str, more: list[str]) -> Document:
    settings = plan.settings
    endpoints = servers.endpoints(plan)
    resources = {"cpu": parts.cpus(settings.worker_cpus), "memory": parts.size(settings.worker_memory)}
    gpus = {"nvidia.com/gpu": settings.worker_gpus} if settings.worker_gpus else {}
    values = {
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",  # noqa: S108 - a volume of the pod's own
        "RUN": str(plan.directory / "run"),
        **plan.environment,
    }
    wait = {
        "name": "servers",
        "image": settings.worker_image,
        "command": ["python", "-c", _WAIT, str(_WAIT_SECONDS), endpoints],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": parts.security(),
        **parts.TELL,
    }
    main = {
        "name": container,
        "image": settings.worker_image,
        **parts.command(
            _start(plan),
            "worker",
            [*_words(plan, endpoints), *more, *script.words(plan.request.training.script_arguments)],
        ),
        "env": parts.environment(values),
        "resources": {
            "requests": {**resources, **gpus},
            "limits": {"memory": resources["memory"], **gpus},
        },
        "securityContext": parts.security(),
        **parts.TELL,
        "volumeMounts": parts.mounts(plan),
    }
    volumes = parts.volumes(plan)
    if archive := _archive(plan):
        volumes.append({"name": "script", "configMap": {"name": archive}})
        main["volumeMounts"].append({"name": "script", "mountPath": script.ARCHIVE_DIR, "readOnly": True})
    where = {"nodeSelector": dict(sorted(settings.worker_nodes.items()))} if settings.worker_nodes else {}
    return {
        "metadata": {"labels": parts.labels(plan, ROLE)},
        "spec": parts.pod(
            plan,
            restartPolicy="Never",
            terminationGracePeriodSeconds=int(CHECKPOINT_SECONDS),
            **where,
            initContainers=[wait],
            containers=[main],
            volumes=volumes,
        ),
    }


def _start(plan: PodPlan) -> str:
    """What the shell of a worker's container runs."""
    return (script.UNPACK if _archive(plan) else "") + _SCRIPT


def _words(plan: PodPlan, endpoints: str) -> list[str]:
    options: dict[str, Any] = {
        "servers": endpoints,
        "token_file": parts.TOKEN,
        "tls": "on",
        # Servers mount the claim too, and write their files there themselves.
        "checkpoint_transfer": "shared",
    }
    training = plan.request.training.model_copy(update={"on_worker_lost": "stop"})
    path = Path(plan.script.path) if plan.script is not None else None
    return [*training_words(training, Path(plan.directory / "run"), path), *arguments(options)]
