"""TensorFlow Recommenders Addons in process, driven by lines on standard input (contenders.py).

python tfra.py '{"dim": 16, "rows": 1000000, "optimizer": "adagrad"}'

Its table and what it has for an optimizer's state are hash tables (cuckoo) in the process. A pull brings a
row for each id, looked up once for each distinct one; a push is what a compiled step of lookup, gradient and
optimizer takes longer than that.
"""

import contextlib
import json
import os
import sys
import time

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_USE_LEGACY_KERAS="1")  # its optimizers are Keras 2

import numpy as np
import tensorflow as tf

with contextlib.redirect_stdout(sys.stderr):  # it prints as it is loaded
    from tensorflow_recommenders_addons import dynamic_embedding as de

OPTIMIZERS = {"adagrad": tf.keras.optimizers.legacy.Adagrad, "adam": tf.keras.optimizers.legacy.Adam}


def main() -> None:
    """Make the table, then answer lines."""
    asked = json.loads(sys.argv[1])
    dim, rows = asked["dim"], asked["rows"]
    table = de.get_variable(
        "benchmark",
        key_dtype=tf.int64,
        value_dtype=tf.float32,
        dim=dim,
        devices=["/CPU:0"],
        initializer=tf.keras.initializers.RandomUniform(-0.05, 0.05),
        init_size=rows,
    )
    optimizer = de.DynamicEmbeddingOptimizer(OPTIMIZERS[asked["optimizer"]](0.01))

    # What was looked up lies in a variable of its own, which the optimizer takes for the weights.
    rows_of_ids = de.shadow_ops.ShadowVariable(table, name="rows")

    @tf.function(reduce_retracing=True)
    def pull(ids: tf.Tensor) -> tf.Tensor:
        return de.shadow_ops.embedding_lookup_unique(rows_of_ids, ids, dim, True)

    @tf.function(reduce_retracing=True)
    def step(ids: tf.Tensor, gradient: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(pull(ids) * gradient)
        optimizer.apply_gradients([(tape.gradient(loss, rows_of_ids), rows_of_ids)])

    for begin in range(0, rows, 200_000):
        keys = tf.range(begin, min(begin + 200_000, rows), dtype=tf.int64)
        step(keys, tf.fill((keys.shape[0], dim), 0.01))
    print("ready", flush=True)
    for line in sys.stdin:
        file, size = line.split()
        batch = int(size)
        gradient = tf.fill((batch, dim), 0.01)
        times = []
        for row in np.fromfile(file, np.int64).reshape(-1, batch):
            ids = tf.constant(row)
            start = time.perf_counter()
            pull(ids)
            middle = time.perf_counter()
            step(ids, gradient)
            end = time.perf_counter()
            times += [middle - start, max(0.0, end - middle - (middle - start))]
        print(*times, flush=True)


if __name__ == "__main__":
    main()
