"""The workers of a TensorFlow job: their sums, by TensorFlow's own collective operations."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from oe_runtime.run.server_workers import ServerWorkers

# Keys of the workers' sums, the same in all workers.
_GROUP = 1
GRADIENTS, WEIGHTS, MEETING, METRICS = 1, 2, 3, 4
_PROBE_SECONDS = 2.0


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


class TensorFlowServerWorkers(ServerWorkers):
    """Asynchronous workers whose step is a tf.function, which keeps the gradients in a variable."""

    def bind(
        self, variables: Sequence[Any], rule: Mapping[str, Any], learning_rate: Callable[[], float]
    ) -> None:
        """See ServerWorkers."""
        super().bind(variables, rule, learning_rate)
        self._variable = tf.Variable(tf.zeros([self._size]), trainable=False)

    def keep(self, dense: Sequence[Any]) -> None:
        """See ServerWorkers."""
        self._variable.assign(tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in dense], 0))

    def _kept(self) -> Any:
        return self._variable.numpy()


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
