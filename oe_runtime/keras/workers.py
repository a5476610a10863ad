"""Several workers of one model: the sums of their dense gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from oe_runtime.run.server_workers import ServerWorkers
from oe_runtime.run.tensorflow_workers import GRADIENTS, MEETING, WEIGHTS

# An attribute of an optimizer: apply the sum of the workers' mean gradients, not those of their mean loss.
SUM_OVER_WORKERS = "sum_over_workers"


class Workers(Protocol):
    """The workers of one job, each of which trains on a part of every batch.

    All run the same steps in the same order. `count` is their number, and `rank`, from 0, this one's place.
    """

    stop_request: Any  # a float32 variable: not 0 where this worker asks all to stop
    stop_requests: Any  # its sum over all workers in the last step

    @property
    def rank(self) -> int:
        """The rank of this worker."""

    @property
    def count(self) -> int:
        """The number of workers."""

    def sum(self, values: Any, what: int) -> Any:
        """Sum a tensor of numbers, of equal shape (N,) in all workers; the same bits in each.

        `what` identifies the calling place, the same number in all workers. Works in a tf.function too.
        """


def barrier(workers: Workers) -> None:
    """Wait until all workers have come here; asynchronous ones do not wait."""
    if not isinstance(workers, ServerWorkers):
        workers.sum(tf.zeros([1]), MEETING)


def weighted_mean(
    workers: Workers, dense: Sequence[Any], gradients: Sequence[Any], examples: Any, *, as_sum: bool = False
) -> tuple[list[Any], list[Any]]:
    """Turn gradients of a worker's mean loss over `examples` into those of all workers' mean loss.

    The result for `dense` is the same in all workers. For `gradients`, of rows, it is this worker's part,
    which the servers add to the others'. A worker without examples has none. Asynchronous workers each keep
    their own mean. With `as_sum`, the result is the sum of all workers' mean gradients.
    """
    if isinstance(workers, ServerWorkers):
        workers.keep(dense)
        return list(dense), list(gradients)
    mine = tf.cast(examples > 0 if as_sum else examples, tf.float32)
    flat = tf.concat(
        [*(tf.reshape(_times(g, mine, tf.float32), [-1]) for g in dense), [mine, workers.stop_request]], 0
    )
    total = workers.sum(flat, GRADIENTS)
    sizes = [g.shape.num_elements() for g in dense]
    *parts, all_examples, requests = tf.split(total, [*sizes, 1, 1])
    workers.stop_requests.assign(requests[0])
    whole = 1.0 if as_sum else tf.maximum(all_examples[0], 1.0)
    means = [
        tf.cast(tf.reshape(part / whole, g.shape), g.dtype) for part, g in zip(parts, dense, strict=True)
    ]
    return means, [_times(g, mine / whole, g.dtype) for g in gradients]


def _times(gradient: Any, factor: Any, dtype: Any) -> Any:
    """Return gradient × factor; zero for factor 0 even of NaN, the mean over no examples."""
    return tf.math.multiply_no_nan(tf.cast(gradient, dtype), tf.cast(factor, dtype))


def broadcast_weights(workers: Workers, variables: Sequence[Any]) -> None:
    """Give every worker worker 0's values of float variables; asynchronous workers pull theirs."""
    if isinstance(workers, ServerWorkers):
        return
    floats = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    if not floats:
        return
    mine = tf.concat([tf.reshape(tf.cast(v, tf.float32), [-1]) for v in floats], 0)
    total = workers.sum(mine if workers.rank == 0 else tf.zeros_like(mine), WEIGHTS)
    for variable, part in zip(floats, tf.split(total, [tf.size(v) for v in floats]), strict=True):
        variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))
