"""Train a Keras model of your own on rows that the job reads: files of any columns, or those that arrive.

Run by itself, in this process, on generated rows with Criteo's columns:

    python examples/job_batches.py

Run as a job; --schema, --batch-size, --epochs, --follow and others are those of built-in models:

    python -m oe_runtime.train --script examples/job_batches.py --in-process --run-dir run --data generate:999

--servers names parameter servers. Several workers (--workers) each get their part of each batch.
"""

from collections.abc import Iterator
from typing import Any

import keras

import oe_runtime.job as job
import oe_runtime.keras as embed

job.defaults(data="generate:20000", batch_size=500)  # without a launcher
keras.utils.set_random_seed(0)
numbers = {one.name: keras.Input((1,), name=one.name) for one in job.schema.numbers}
ids = {one.name: keras.Input((one.length,), dtype="int64", name=one.name) for one in job.schema.categories}
rows = [
    keras.layers.Flatten()(embed.Embedding(one.rows, 8, name=f"rows_{one.name}")(ids[one.name]))
    for one in job.schema.categories
]
hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([*numbers.values(), *rows]))
model = keras.Model(numbers | ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
model = embed.distributed_model(model, job.client())
model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.05)), "binary_crossentropy")


def evaluate() -> Iterator[tuple[Any, Any]]:
    """Yield labels and probabilities of the held-out rows, or of those of --eval-data."""
    for features, labels in job.eval_batches():
        yield labels, model.predict_on_batch(features)


with job.training(model, evaluate=evaluate):
    for features, labels in job.batches():
        model.reset_metrics()
        job.step(loss=model.train_on_batch(features, labels))
