"""Which GPUs the workers of a host use that run a script: by default one worker per GPU, each with its own.

Built-in models keep one worker per host, which uses what TensorFlow finds. PyTorch's programs choose by
LOCAL_RANK among all GPUs, as under torchrun: so on hosts with runtime_extra torch every worker sees all.
"""

from __future__ import annotations

from provision.cluster.inventory import Host
from provision.cluster.training_settings import TrainingSettings
from provision.jobs.request import Request
from provision.node.state import State

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"  # else TensorFlow takes all memory of a GPU at once


def worker_count(host: Host, state: State | None, wanted: Request) -> int:
    """How many workers the host runs."""
    if wanted.workers:
        return wanted.workers
    if "worker_count" in host.given or VISIBLE in host.worker.environment:
        return host.worker.count
    return max(host.worker.count, count(host, state, wanted.training))


def count(host: Host, state: State | None, training: TrainingSettings) -> int:
    """GPUs of the host for a script's workers; 0 for built-in models, which do not share them out."""
    if not training.script or training.device == "cpu" or not host.platform.has_gpus or state is None:
        return 0
    return len(state.gpu.devices)


def environment(
    host: Host, state: State | None, training: TrainingSettings, number: int, workers: int
) -> dict[str, str]:
    """Environment variables of the ``number``-th of the host's ``workers``."""
    if not training.script:
        return {}
    gpus = count(host, state, training)
    found = alone(training, gpus)
    if gpus and workers > 1 and not _sees_all(host):
        found[VISIBLE] = ",".join(map(str, _share(number, workers, gpus)))
    return found


def alone(training: TrainingSettings, gpus: int) -> dict[str, str]:
    """Environment variables of a script's worker that has its machine and so many GPUs to itself."""
    if training.device == "cpu":
        return {VISIBLE: "-1"}
    return {_GROWTH: "true"} if gpus else {}


def _sees_all(host: Host) -> bool:
    return host.runtime.extra == "torch"


def _share(number: int, workers: int, gpus: int) -> list[int]:
    """The GPUs of one worker: a part of them, or one that it shares with others."""
    if workers > gpus:
        return [number % gpus]
    return list(range(number * gpus // workers, (number + 1) * gpus // workers))


def note(host: Host, state: State | None, wanted: Request) -> str:
    """How the host's GPUs are shared out, for the plan; empty where there is nothing to share."""
    gpus, workers = count(host, state, wanted.training), worker_count(host, state, wanted)
    if gpus == 0 or gpus == workers == 1:
        return ""
    by = "--workers" if wanted.workers else "worker_count"
    if VISIBLE in host.worker.environment:
        return f"{host.name}: {_workers(workers)} with what worker_environment {VISIBLE} says of {gpus} GPUs"
    if workers == gpus:
        how = "; each sees all and chooses by LOCAL_RANK (runtime_extra torch)" if _sees_all(host) else ""
        return f"{host.name}: {workers} workers, one per GPU{how}; {by}: 1 for one worker with all of them"
    if workers > gpus:
        return f"{host.name}: {workers} workers share {gpus} GPU{'s' * (gpus > 1)} ({by}: {workers})"
    return f"{host.name}: {_workers(workers)} with {gpus} GPUs ({by}: {workers}); unset: one worker per GPU"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"
