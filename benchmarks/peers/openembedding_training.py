"""Trains one of our models with OpenEmbedding 0.1.2, for benchmarks: its layers, its server in the process.

Run by the Python of the environment that openembedding_build.py makes, on batches that lie in a file, so
that nothing of ours but the models' code takes part. Legacy Keras stands in for Keras 3, which OpenEmbedding
precedes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import openembedding.tensorflow as embed
import tensorflow as tf
import tf_keras

WARM_UP = 5


def main() -> int:
    """Train for some seconds after a few steps; prints samples/s as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--rows", type=json.loads, required=True, help="ids of each field, as JSON")
    parser.add_argument("--batches", type=Path, required=True, help="an .npz of integers, ids, labels")
    parser.add_argument("--optimizer", default="Adagrad")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    model = distributed(options)
    steps, samples = Clock(options.seconds), 0
    data, samples = batches(options.batches)
    model.fit(embed.pulling(data, model), steps_per_epoch=10**9, verbose=0, callbacks=[steps])
    print(json.dumps({"samples_per_s": steps.count * samples / steps.elapsed}))
    # Its server's threads do not end by themselves.
    sys.stdout.flush()
    os._exit(0)


def distributed(options: argparse.Namespace) -> Any:
    """The model, compiled, with OpenEmbedding's layers in place of Keras's."""
    tf_keras.ops = SimpleNamespace(
        sum=lambda x, axis, keepdims=False: tf.reduce_sum(x, axis=axis, keepdims=keepdims), square=tf.square
    )
    sys.modules["keras"] = tf_keras
    # Without the packages' __init__, which need our core.
    root = Path(__file__).resolve().parents[2]
    for name in ("oe_runtime", "oe_runtime.data"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
    sys.modules["oe_runtime"]._core = None
    from oe_runtime import models

    model = models.build(options.model, options.rows, options.dim, seed=1)
    model = embed.distributed_model(model)
    optimizer = embed.distributed_optimizer(
        getattr(tf_keras.optimizers.legacy, options.optimizer)(learning_rate=options.rate)
    )
    model.compile(optimizer, loss="binary_crossentropy")
    return model


def batches(path: Path) -> tuple[tf.data.Dataset, int]:
    """The batches of the file, again and again, and the samples of each."""
    with np.load(path) as file:
        integers, ids, labels = file["integers"], file["ids"], file["labels"]
    count, size, _ = integers.shape

    def one(k: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        here = tf.gather(all_ids, k)
        inputs = {f"C{i + 1}_id": here[:, i : i + 1] for i in range(ids.shape[2])}
        return inputs | {"integers": tf.gather(all_integers, k)}, tf.gather(all_labels, k)

    all_integers, all_ids, all_labels = map(tf.constant, (integers, ids, labels))
    order = tf.data.Dataset.range(count).repeat()
    return order.map(one, num_parallel_calls=2, deterministic=True).prefetch(2), size


class Clock(tf_keras.callbacks.Callback):
    """Counts steps after the warm-up and ends the training after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._seen, self.count, self.elapsed = seconds, 0, 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See Keras."""
        self._seen += 1
        if self._seen == WARM_UP:
            self._began = time.perf_counter()
        elif self._seen > WARM_UP:
            self.count += 1
            self.elapsed = time.perf_counter() - self._began
            self.model.stop_training = self.elapsed >= self._seconds


if __name__ == "__main__":
    sys.exit(main())
