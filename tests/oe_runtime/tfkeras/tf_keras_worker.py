"""One of several workers of a model of tf-keras, as a process: trains on its part of every batch.

python tf_keras_worker.py RANK WORKERS SERVERS OUTPUT: WORKERS and SERVERS are endpoints. Writes the losses
that it saw, the dense weights and predictions to OUTPUT, an .npz file.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from tf_keras_models import embed, keras, random_ids, two_fields

from oe_runtime import Client, Worker

BATCH, STEPS = 60, 5


def train(model: Any, rank: int, of: int) -> dict[str, Any]:
    """The mean losses of this worker's part of each batch; the last but one is of the first worker only."""
    x, y = random_ids(BATCH * STEPS)
    model.compile(keras.optimizers.Adagrad(0.2), "binary_crossentropy")
    losses = []
    for step in range(STEPS):
        batch = np.arange(step * BATCH, (step + 1) * BATCH)
        part = np.array_split(batch, of)[rank] if step != STEPS - 2 else batch[: 0 if rank else None]
        model.reset_metrics()
        losses.append((model.train_on_batch([a[part] for a in x], y[part]), len(part)))
    return {"losses": np.array(losses), "predictions": model.predict(x, verbose=0)}


def main(rank: int, workers: list[str], servers: list[str], output: str) -> None:
    """See above."""
    keras.utils.set_random_seed(rank)  # the dense weights are worker 0's all the same
    together = embed.TensorFlowWorkers(workers, rank)
    with Client(servers, job="many", worker=Worker(rank, len(workers), wait=120)) as client:
        model = embed.distributed_model(two_fields(), client, workers=together)
        results = train(model, rank, len(workers))
        np.savez(output, *model.get_weights(), **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(","), sys.argv[4])
