"""One of several workers of a Keras model, as a process: trains on its part of every batch.

python keras_worker.py RANK WORKERS SERVERS OUTPUT: WORKERS and SERVERS are endpoints. Writes the losses that
it saw, the dense weights and predictions to OUTPUT, an .npz file.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras_models import random_ids, two_fields

import oe_runtime.keras as embed
from oe_runtime import Client, Worker

BATCH, STEPS, EPOCHS = 60, 7, 2


def parts(batch: int, of: int) -> list[slice]:
    """The examples of each worker in a batch: the last batch is smaller, and one is of a single worker."""
    if batch == 3:
        return [slice(batch * BATCH, (batch + 1) * BATCH)] + [slice(0, 0)] * (of - 1)
    end = (batch + 1) * BATCH - (25 if batch == STEPS - 1 else 0)
    edges = np.linspace(batch * BATCH, end, of + 1).astype(int)
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def train(model, rank, of):
    """The mean loss of this worker's part of each batch, and how many examples it had."""
    x, y = random_ids(BATCH * STEPS)
    model.compile(keras.optimizers.Adagrad(0.2), "binary_crossentropy")
    losses = []
    for batch in list(range(STEPS)) * EPOCHS:
        part = parts(batch, of)[rank]
        model.reset_metrics()
        loss = model.train_on_batch([a[part] for a in x], y[part])
        losses.append((float(loss), part.stop - part.start))
    return np.array(losses), np.asarray(model.predict_on_batch(x))


def model_of_mine(*where, **options):
    """`two_fields` with its second field in an embedding that stays in the model.

    One of the tables begins with a matrix of each worker's own: worker 0's counts.
    """

    def layer(rows, dim, initializer="uniform", *, name):
        if name == "table_b":
            return keras.layers.Embedding(rows, dim, initializer, name=name)
        weights = [np.random.random((rows, dim)) / 20] if name == "table_a" else None
        return embed.Embedding(rows, dim, initializer, name=name, weights=weights)

    return embed.distributed_model(two_fields(layer), *where, sparse_as_dense_size=1000, **options)


def main(rank: int, workers: list[str], servers: list[str], output: str) -> None:
    """See above."""
    keras.utils.set_random_seed(rank)  # the dense weights are worker 0's all the same
    together = embed.TensorFlowWorkers(workers, rank)
    with Client(servers, job="many", worker=Worker(rank, len(workers), wait=120)) as client:
        model = model_of_mine(client, workers=together)
        losses, predictions = train(model, rank, len(workers))
        np.savez(output, *model.get_weights(), losses=losses, predictions=predictions)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","), sys.argv[4])
