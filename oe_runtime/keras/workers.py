"""Several workers of one model: what their dense gradients are summed by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

# The same in all workers: which sum of theirs belongs to which.
_GROUP = 1
GRADIENTS, WEIGHTS = 1, 2


class Workers(Protocol):
    """The workers of one job, each of which trains on a part of every batch.

    All of them run the same steps in the same order; `count` is how many there are, and `rank`, from 0, which
    one this is.
    """

    wish: Any  # a float32 variable: not 0 where this worker wishes that all stop
    wishes: Any  # the sum of it in all workers, as of the last step

    @property
    def rank(self) -> int:
        """Which of them this is."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: Any, what: int) -> Any:
        """Of a tensor of numbers, of equal shape (N,) in all workers, the sum; the same bits in each.

        `what` is one number for each place that sums, the same in all workers. Works in a tf.function too.
        """
        ...


class TensorFlowWorkers:
    """Workers whose gradients TensorFlow's own collective operations sum: a ring over gRPC.

    `endpoints` are HOST:PORT of all workers, the same list in each, and `rank` is the place of this one,
    which will listen there. Must be made before TensorFlow runs its first operation. A worker that is lost
    ends the others' step with an error of TensorFlow's; so does one that does not come to a sum for
    `timeout` seconds. The connections are neither encrypted nor authenticated: for networks that only the
    job's hosts are in.
    """

    def __init__(self, endpoints: Sequence[str], rank: int, *, timeout: float = 600) -> None:
        if not 0 <= rank < len(endpoints):
            raise ValueError(f"worker {rank} of {len(endpoints)} does not exist")
        self.rank = rank
        self.count = len(endpoints)
        self._timeout = timeout
        # Only the strategy's start of the cluster is used: Keras 3 does not train in this strategy.
        self._cluster = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(endpoints)}), task_type="worker", task_id=rank
            )
        )
        self.wish = tf.Variable(0.0, trainable=False)
        self.wishes = tf.Variable(0.0, trainable=False)

    def sum(self, values: Any, what: int) -> Any:
        """See Workers."""
        return tf.raw_ops.CollectiveReduceV2(
            input=values,
            group_size=self.count,
            group_key=_GROUP,
            instance_key=what,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
            timeout_seconds=self._timeout,
        )


def weighted_mean(
    workers: Workers, dense: Sequence[Any], gradients: Sequence[Any], examples: Any
) -> tuple[list[Any], list[Any]]:
    """From gradients of the mean loss of a worker's `examples` to those of the mean loss of all workers'.

    Of `dense` the result is the same in all workers. Of `gradients`, of rows, it is this worker's share,
    which the servers add to the others'. A worker without examples has none.
    """
    mine = tf.cast(examples, tf.float32)
    flat = tf.concat(
        [*(tf.reshape(_times(g, mine, tf.float32), [-1]) for g in dense), [mine, workers.wish]], 0
    )
    total = workers.sum(flat, GRADIENTS)
    sizes = [g.shape.num_elements() for g in dense]
    *parts, all_examples, wishes = tf.split(total, [*sizes, 1, 1])
    workers.wishes.assign(wishes[0])
    whole = tf.maximum(all_examples[0], 1.0)
    means = [
        tf.cast(tf.reshape(part / whole, g.shape), g.dtype) for part, g in zip(parts, dense, strict=True)
    ]
    return means, [_times(g, mine / whole, g.dtype) for g in gradients]


def _times(gradient: Any, factor: Any, dtype: Any) -> Any:
    """Zero for the factor 0, also of NaN, which the mean over no examples is."""
    return tf.math.multiply_no_nan(tf.cast(gradient, dtype), tf.cast(factor, dtype))


def begin_alike(workers: Workers, variables: Sequence[Any]) -> None:
    """Gives every worker the values that worker 0 has of float variables."""
    floats = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    if not floats:
        return
    mine = tf.concat([tf.reshape(tf.cast(v, tf.float32), [-1]) for v in floats], 0)
    total = workers.sum(mine if workers.rank == 0 else tf.zeros_like(mine), WEIGHTS)
    for variable, part in zip(floats, tf.split(total, [tf.size(v) for v in floats]), strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
