"""Several workers of one model: the sums of their dense gradients."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from oe_runtime.client import Client
from oe_runtime.keras.translate import table_optimizer
from oe_runtime.spec import TableSpec

# Keys of the workers' sums, the same in all workers.
_GROUP = 1
GRADIENTS, WEIGHTS, MEETING, METRICS = 1, 2, 3, 4
# An attribute of an optimizer: apply the sum of the workers' mean gradients, not those of their mean loss.
SUM_OVER_WORKERS = "sum_over_workers"
_PROBE_SECONDS = 2.0


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


class TensorFlowWorkers:
    """Workers whose gradients are summed by TensorFlow's own collective operations: a ring over gRPC.

    `endpoints` are HOST:PORT of all workers, the same list in each. `rank` is this worker's place in it,
    where it listens. Create it before TensorFlow's first operation. The loss of a worker ends the others'
    step with an error of TensorFlow's; so does a worker that misses a sum for `timeout` seconds, or whose
    host does not answer for `silence` seconds. The connections are neither encrypted nor authenticated: use
    networks of the job's hosts only.
    """

    def __init__(
        self, endpoints: Sequence[str], rank: int, *, timeout: float = 600, silence: float = 300
    ) -> None:
        if not 0 <= rank < len(endpoints):
            raise ValueError(f"worker {rank} of {len(endpoints)} does not exist")
        self.rank = rank
        self.count = len(endpoints)
        self._timeout = timeout
        _be_patient(len(endpoints), silence)
        # Only to start the cluster: Keras 3 does not train in this strategy.
        self._cluster = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(endpoints)}), task_type="worker", task_id=rank
            )
        )
        port = int(endpoints[rank].rpartition(":")[2])
        threading.Thread(target=_keep_connections, args=(port, silence), daemon=True).start()
        threading.Thread(target=_watch_neighbours, args=(endpoints, rank, _abort), daemon=True).start()
        self.stop_request = tf.Variable(0.0, trainable=False)
        self.stop_requests = tf.Variable(0.0, trainable=False)

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


def _be_patient(count: int, silence: float) -> None:
    """Let workers be unreachable for `silence` seconds.

    TensorFlow's coordination service takes a worker for lost after 10 seconds without a heartbeat. The
    strategy, which starts the service, has no option for that, but keeps an existing configuration.
    """
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    field = config_pb2.ConfigProto.Experimental.DESCRIPTOR.fields_by_name.get("coordination_config")
    if field is None:
        return  # a TensorFlow without it
    service = field.message_type._concrete_class()
    jobs = service.coordinated_job_list
    jobs.add(name="worker", num_tasks=count)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        heartbeat_timeout_in_ms=int(silence * 1000),
        coordinated_jobs=list(jobs),
    )


def _keep_connections(port: int, silence: float) -> None:
    """Let connections to this worker's port outlive a link that is down.

    gRPC's servers close a connection after 20 seconds without acknowledgement, and no option of TensorFlow's
    changes that. So it is set on the sockets themselves, as they come.
    """
    wanted = int(silence * 1000)
    done: set[tuple[int, int]] = set()
    while True:
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/self/fd/{name}")
                    key = (found.st_dev, found.st_ino)
                    if stat.S_ISSOCK(found.st_mode) and key not in done:
                        done.add(key)
                        _set_timeout(int(name), port, wanted)
        time.sleep(1.0)


def _set_timeout(descriptor: int, port: int, milliseconds: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as found:
        if found.type != socket.SOCK_STREAM or found.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if found.getsockname()[1] == port:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _watch_neighbours(endpoints: Sequence[str], rank: int, lost: Callable[[int], None]) -> None:
    """Call `lost` with the rank of a neighbour in the ring whose port was open and now refuses connections.

    TensorFlow notices the end of a neighbour where it waits for the neighbour's bytes. Where it waits for the
    neighbour to fetch bytes, only the heartbeats notice, after `silence` seconds. The other workers notice
    the end of this one.
    """
    others = {(rank + step) % len(endpoints) for step in (-1, 1)} - {rank}
    listened: set[int] = set()
    while others:
        for other in others:
            host, _, port = endpoints[other].rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
                listened.add(other)
            except ConnectionRefusedError:
                if other in listened:
                    lost(other)
                    return
            except OSError:
                pass  # unreachable, perhaps for a moment
        time.sleep(_PROBE_SECONDS)


def _abort(rank: int) -> None:
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(
        tf.errors.UNAVAILABLE, f"/job:worker/replica:0/task:{rank} does not listen any more"
    )


class ServerWorkers:
    """Asynchronous workers: their dense weights are on the servers, and no worker waits.

    The counterpart of DeepRec's parameter servers. A table holds the sum of updates to the first weights, so
    its optimizer's updates must not depend on the weight: no decay, no FTRL. Around each step, `pull` gets
    the weights and `push` sends the gradients of the mean loss of this worker's batch; the updates of the
    model's own optimizer in between are overwritten.
    """

    NAME, _DIM = "dense_weights", 64
    tables = (NAME,)

    def __init__(self, client: Client, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self.stop_request = self.stop_requests = None
        self._client = client

    def bind(self, model: Any) -> None:
        """Make the table of a compiled model. Raises ValueError for its optimizer."""
        rule = table_optimizer(model.optimizer)
        if rule["name"] == "ftrl" or rule.get("weight_decay"):
            raise ValueError(f"optimizer {rule['name']}: asynchronous workers need one without decay")
        self._variables = model.trainable_variables
        self._size = sum(int(np.prod(v.shape)) for v in self._variables)
        self._keys = np.arange(-(-self._size // self._DIM), dtype=np.int64)
        zero = {"name": "constant", "value": 0.0}
        spec = TableSpec(self.NAME, self._DIM, "array", len(self._keys), optimizer=rule, initializer=zero)
        self._table = self._client.create_table(spec)
        self._gradients = tf.Variable(tf.zeros([self._size]), trainable=False)
        self.rebase()

    def rebase(self) -> None:
        """Take the model's weights as those of the table's rows, as after a restore."""
        mine = np.concatenate([np.ravel(np.asarray(v, np.float32)) for v in self._variables])
        self._first = mine - self._rows(self._client.pull_rows(self._table, self._keys))

    def pull(self) -> None:
        """Give the model the present weights."""
        self._pulled = self._client.pull([self._keys], [(self._table, 0)])
        weights = self._first + self._rows(self._client.embeddings(self._pulled.groups[0]))
        for variable in self._variables:
            size = int(np.prod(variable.shape))
            variable.assign(np.reshape(weights[:size], variable.shape))
            weights = weights[size:]

    def push(self, learning_rate: float) -> None:
        """Push the last step's gradients."""
        gradients = np.zeros((len(self._keys), self._DIM), np.float32)
        gradients.reshape(-1)[: self._size] = self._gradients.numpy()
        self._client.push(self._pulled, [gradients], learning_rate)

    def keep(self, dense: Sequence[Any]) -> None:
        """In a step, keep the gradients for `push`."""
        self._gradients.assign(tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in dense], 0))

    def sum(self, values: Any, what: int) -> Any:
        """Raise RuntimeError: asynchronous workers sum nothing."""
        raise RuntimeError(f"asynchronous workers sum nothing (sum {what})")

    def _rows(self, rows: Any) -> Any:
        return np.asarray(rows, np.float32).reshape(-1)[: self._size]


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
