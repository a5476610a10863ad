"""Parameter servers: a StatefulSet with its service, volumes, disruption budget and network policy."""

from __future__ import annotations

from typing import Any

from provision.jobs.backends.kubernetes import parts
from provision.jobs.backends.kubernetes.parts import POOL_DIR, Document
from provision.jobs.backends.kubernetes.plan import PodPlan
from provision.jobs.placement import LEAST_POOL_CHECKPOINTS, arguments

ROLE = "server"
END_SECONDS = 120
_REQUEST_BYTES = 4 << 30  # the runtime's own default, where there is memory for it

# Rows in the volume are the job's own once its trainer has begun. Before, they are of an earlier job of its
# name, or of another namespace's on the same mount point: the server refuses them and names the tables. In a
# volume without any (oe-*; the lock is oe.lock) it recovers too: the trainer asks for that, to keep
# checkpoints there.
_RECOVER = """\
if [ -e "$RUN/metrics.jsonl" ] || ! ls "$POOL"/oe-* >/dev/null 2>&1; then set -- "$@" --storage-recover; fi
"""
_START = parts.passing_on('python -m oe_runtime.server --index "${POD_NAME##*-}" "$@"')
# The rows of a job that is done are in files of its last checkpoint, so volumes that are kept are emptied. A
# job that was applied again with more steps has earlier ends in its events too.
_EMPTY = """\
case $(grep -Es '"event": "(start|end)"' "$RUN/metrics.jsonl" | tail -n 1) in
  *'"event": "end"'*) rm -rf "$POOL" ;;
esac
"""
_END = 'exit "$status"\n'


def names(plan: PodPlan) -> list[str]:
    """DNS names of the servers in order; pods that replace a server have its name."""
    return [f"{plan.name}-server-{index}.{plan.name}-servers" for index in range(plan.servers)]


def endpoints(plan: PodPlan) -> str:
    """For ``--servers``."""
    return ",".join(f"{name}:{plan.port}" for name in names(plan))


def documents(plan: PodPlan) -> list[Document]:
    """All objects of the servers, in the order in which they are made."""
    return [*_local_volumes(plan), _service(plan), _policy(plan), _budget(plan), _set(plan)]


def _service(plan: PodPlan) -> Document:
    return {
        **parts.document(plan, "v1", "Service", f"{plan.name}-servers", role=ROLE),
        "spec": {
            "clusterIP": "None",
            # Names resolve while a server recovers, so that workers wait for it instead of failing.
            "publishNotReadyAddresses": True,
            "selector": parts.selector(plan, ROLE),
            "ports": [
                {"name": "pull-push", "port": plan.port, "targetPort": "pull-push"},
                {"name": "metrics", "port": plan.metrics_port, "targetPort": "metrics"},
            ],
        },
    }


def _policy(plan: PodPlan) -> Document:
    """Only the job's workers reach the servers; the namespace and Prometheus's read the metrics."""
    readers: list[Document] = [{"podSelector": {}}]
    if plan.settings.monitoring_namespace:
        label = {"kubernetes.io/metadata.name": plan.settings.monitoring_namespace}
        readers.append({"namespaceSelector": {"matchLabels": label}})
    workers = {"podSelector": {"matchLabels": parts.selector(plan, "worker")}}
    return {
        **parts.document(plan, "networking.k8s.io/v1", "NetworkPolicy", f"{plan.name}-servers", role=ROLE),
        "spec": {
            "podSelector": {"matchLabels": parts.selector(plan, ROLE)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [workers], "ports": [{"protocol": "TCP", "port": plan.port}]},
                {"from": readers, "ports": [{"protocol": "TCP", "port": plan.metrics_port}]},
            ],
        },
    }


def _budget(plan: PodPlan) -> Document:
    """Draining nodes evicts one server at a time, and training continues after each."""
    return {
        **parts.document(plan, "policy/v1", "PodDisruptionBudget", f"{plan.name}-servers", role=ROLE),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": parts.selector(plan, ROLE)}},
    }


def _local_volumes(plan: PodPlan) -> list[Document]:
    """Mount points of nodes as volumes, each reserved for the claim of its server."""
    found = []
    for index, (node, mount) in enumerate(plan.local):
        name = f"{plan.settings.namespace}-{plan.name}-{index}"
        # The claim that the StatefulSet makes for the server's volume.
        claim = {"namespace": plan.settings.namespace, "name": f"pool-{plan.name}-server-{index}"}
        found.append(
            {
                **parts.document(plan, "v1", "PersistentVolume", name, role=ROLE, namespaced=False),
                "spec": {
                    "capacity": {"storage": _volume_size(plan)},
                    "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "storageClassName": "",
                    "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim},
                    "local": {"path": mount},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [_select_nodes([node])]}},
                },
            }
        )
    return found


def _select_nodes(nodes: list[str]) -> Document:
    return {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": nodes}]}


def _volume_size(plan: PodPlan) -> str:
    # Nothing measures a local volume: any size is that of the file system.
    return parts.size(plan.settings.storage_size or 1 << 30)


def _set(plan: PodPlan) -> Document:
    claim = {
        "metadata": {"name": "pool", "labels": parts.labels(plan, ROLE)},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": plan.settings.storage_class,
            "resources": {"requests": {"storage": _volume_size(plan)}},
        },
    }
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(plan.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    return {
        **parts.document(plan, "apps/v1", "StatefulSet", f"{plan.name}-server", role=ROLE),
        "spec": {
            "serviceName": f"{plan.name}-servers",
            "replicas": plan.servers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": parts.selector(plan, ROLE)},
            **({"volumeClaimTemplates": [claim]} if plan.pools else {}),
            "template": {
                "metadata": {"labels": parts.labels(plan, ROLE), "annotations": annotations},
                "spec": parts.pod(
                    plan,
                    terminationGracePeriodSeconds=END_SECONDS,
                    **_where(plan),
                    containers=[_container(plan)],
                    volumes=parts.volumes(plan),
                ),
            },
        },
    }


def _where(plan: PodPlan) -> dict[str, Any]:
    """Nodes with persistent memory, preferably one server per node."""
    if plan.settings.server_nodes:
        found: dict[str, Any] = {"nodeSelector": dict(sorted(plan.settings.server_nodes.items()))}
        affinity: Document = {}
    else:
        found = {}
        terms = {"nodeSelectorTerms": [_select_nodes(list(plan.server_hosts))]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        affinity = {"nodeAffinity": required} if plan.server_hosts else {}
    apart = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": parts.selector(plan, ROLE)},
            "topologyKey": "kubernetes.io/hostname",
        },
    }
    affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}
    return {**found, "affinity": affinity}


def _container(plan: PodPlan) -> Document:
    settings = plan.settings
    resources = {"cpu": parts.cpus(settings.server_cpus), "memory": parts.size(settings.server_memory)}
    pool = f"{POOL_DIR}/{plan.name}"
    values = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # noqa: S108 - a volume of the pod's own
    if plan.pools:
        values.update(RUN=str(plan.directory / "run"), POOL=pool)
    script = parts.TAKE_TOKEN + (f"{_RECOVER}{_START}{_EMPTY}" if plan.pools else _START) + _END
    page = {"httpGet": {"path": "/metrics", "port": "metrics"}, "periodSeconds": 5, "timeoutSeconds": 5}
    mounts = parts.mounts(plan)
    if plan.pools:
        mounts.append({"name": "pool", "mountPath": POOL_DIR})
    # RuntimeDefault's filter allows mbind with this capability only.
    capabilities = ["SYS_NICE"] if plan.storage == "pmem_memkind" else []
    return {
        "name": "server",
        "image": settings.server_image,
        **parts.command(script, "server", _words(plan, pool)),
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *parts.environment(values),
        ],
        "ports": [
            {"name": "pull-push", "containerPort": plan.port},
            {"name": "metrics", "containerPort": plan.metrics_port},
        ],
        # The page is served once the pool's rows are recovered, which may take minutes.
        "startupProbe": {**page, "failureThreshold": 360},
        "readinessProbe": {**page, "failureThreshold": 3},
        "livenessProbe": {
            "tcpSocket": {"port": "pull-push"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {"requests": resources, "limits": {"memory": resources["memory"]}},
        "securityContext": parts.security(*capabilities),
        "volumeMounts": mounts,
        **parts.TELL,
    }


def _words(plan: PodPlan, pool: str) -> list[str]:
    options: dict[str, Any] = {
        "host": "0.0.0.0",  # noqa: S104 - the pod's own addresses
        "port": plan.port,
        "count": plan.servers,
        "storage": plan.storage,
        "threads": plan.threads,
        "token-file": parts.TOKEN,
        "tls": "on",
        "metrics-host": "0.0.0.0",  # noqa: S104
        "metrics-port": plan.metrics_port,
        # Three budgets of this size beside the rows.
        "max-request-bytes": min(_REQUEST_BYTES, plan.settings.server_memory // 8),
        **plan.server_options,
    }
    if plan.pools:
        kept = max(LEAST_POOL_CHECKPOINTS, plan.request.training.keep_checkpoints)
        options.update({"storage-path": pool, "storage-checkpoints": kept})
    if plan.cache:
        options["storage-cache"] = plan.cache
    if plan.size:
        options["storage-size"] = plan.size
    return arguments(options)
