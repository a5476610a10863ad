"""Horovod's names in scripts for OpenEmbedding."""

from types import SimpleNamespace

import pytest

keras = pytest.importorskip("tf_keras")

import numpy as np  # noqa: E402 - without tf-keras there is nothing to test
import tensorflow as tf  # noqa: E402

import oe_runtime.tf_keras.horovod as hvd  # noqa: E402
from oe_runtime.keras.workers import SUM_OVER_WORKERS, weighted_mean  # noqa: E402


class TwoAlike:
    """Two workers with the same data."""

    rank, count = 0, 2

    def __init__(self):
        self.stop_request, self.stop_requests = tf.Variable(0.0), tf.Variable(0.0)

    def sum(self, values, what):
        return 2 * values


def test_processes_are_those_of_the_launcher(monkeypatch):
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(f"HOROVOD_{name}", raising=False)
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    for name, value in {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (3, 4, 1, 2)


@pytest.mark.parametrize(("op", "dense", "rows"), [(hvd.Average, 1.0, 0.5), (hvd.Sum, 2.0, 1.0)])
def test_gradients_are_joined_as_the_optimizer_says(op, dense, rows):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), op=op)
    gradient = tf.constant([3.0, 5.0])
    as_sum = getattr(optimizer, SUM_OVER_WORKERS)
    found = weighted_mean(TwoAlike(), [gradient], [gradient], tf.constant(8), as_sum=as_sum)
    np.testing.assert_allclose(found[0][0], dense * gradient)
    np.testing.assert_allclose(found[1][0], rows * gradient)
    with pytest.raises(ValueError, match=r"op is hvd\.Average or hvd\.Sum, not 'Adasum'"):
        hvd.DistributedOptimizer(optimizer, op="Adasum")


def test_callbacks():
    callback = hvd.callbacks.MetricAverageCallback()
    callback.model = SimpleNamespace(served=SimpleNamespace(workers=TwoAlike()))
    callback.model.served.workers.sum = lambda values, what: tf.add(values, [1.0, 3.0])
    logs = {"loss": 2.0, "auc": 0.5}
    callback.on_epoch_end(0, logs)
    assert logs == {"auc": 0.75, "loss": 2.5}
    with pytest.raises(ValueError, match=r"rank 0 .* not of rank 1"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(1)
