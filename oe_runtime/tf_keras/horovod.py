"""The names of `horovod.tensorflow.keras` that scripts for OpenEmbedding use; no Horovod is needed.

    import oe_runtime.tf_keras.horovod as hvd  # import horovod.tensorflow.keras as hvd

The processes are those of `oeprov launch-training`, of horovodrun, or one alone. `distributed_model` lets
them train together, so that `DistributedOptimizer` only says how their gradients are joined.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
import tf_keras

from oe_runtime.keras.servers import flags
from oe_runtime.keras.workers import SUM_OVER_WORKERS
from oe_runtime.run.tensorflow_workers import METRICS

Average, Sum = "Average", "Sum"


def init() -> None:
    """Wait for the other processes. Call it before TensorFlow computes anything."""
    if size() > 1:
        flags.num_workers = size()


def rank() -> int:
    """Return the place of this process among all of them, from 0."""
    return _number("HOROVOD_RANK", 0)


def size() -> int:
    """Return the number of processes."""
    return _number("HOROVOD_SIZE", 1)


def local_rank() -> int:
    """Return the place of this process among those of its host, from 0."""
    return _number("HOROVOD_LOCAL_RANK", 0)


def local_size() -> int:
    """Return the number of processes on this host."""
    return _number("HOROVOD_LOCAL_SIZE", 1)


def _number(name: str, alone: int) -> int:
    return int(os.environ.get(name) or alone)


def DistributedOptimizer(optimizer: Any, op: str = Average) -> Any:
    """Return the optimizer, which applies the `op` of all processes' gradients, those of rows too.

    Average: the gradients of the mean loss over all examples. Sum: the sum of the processes' mean gradients.
    """
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer: op is hvd.Average or hvd.Sum, not {op!r}")
    setattr(optimizer, SUM_OVER_WORKERS, op == Sum)
    return optimizer


class _BroadcastGlobalVariables(tf_keras.callbacks.Callback):  # type: ignore[misc]
    """Nothing to do: all processes begin with the weights of rank 0."""

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        if root_rank != 0:
            raise ValueError(f"the weights of rank 0 are those that all begin with, not of rank {root_rank}")


class _MetricAverage(tf_keras.callbacks.Callback):  # type: ignore[misc]
    """Puts the mean over all processes into an epoch's logs, for the callbacks after this one."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average `logs` in place."""
        workers = self.model.served.workers
        if workers is None or not logs:
            return
        names = sorted(logs)
        total = workers.sum(tf.constant([float(logs[name]) for name in names]), METRICS)
        logs.update(zip(names, (total.numpy() / workers.count).tolist(), strict=True))


callbacks = SimpleNamespace(
    BroadcastGlobalVariablesCallback=_BroadcastGlobalVariables, MetricAverageCallback=_MetricAverage
)
