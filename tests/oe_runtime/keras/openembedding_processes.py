"""A script for OpenEmbedding that is several processes, on the shape of its example for Horovod.

horovodrun -np 2 python openembedding_processes.py SERVERS OUTPUT
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf
from keras_models import random_ids, two_fields

import oe_runtime.keras as embed  # import openembedding.tensorflow as embed

BATCH, STEPS, EPOCHS = 60, 6, 2


def fit(rank, size, callbacks=()):
    """The model after its part of each batch."""
    features, labels = random_ids(BATCH * STEPS)
    width = BATCH // size
    mine = [a.reshape(STEPS, BATCH, -1)[:, rank * width :][:, :width] for a in (*features, labels)]
    dataset = tf.data.Dataset.from_tensor_slices((tuple(mine[:-1]), mine[-1]))
    optimizer = embed.distributed_optimizer(keras.optimizers.Adagrad(0.2))
    model = embed.distributed_model(two_fields(), sparse_as_dense_size=64)
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"], experimental_run_tf_function=False)
    dataset = embed.pulling(dataset, model, steps=EPOCHS * STEPS).prefetch(4)
    model.fit(dataset, epochs=EPOCHS, callbacks=list(callbacks), verbose=2)
    return model, model.predict(features, verbose=0)


def main(servers, output):
    """See above."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    embed.flags.config = '{"server": {"server_concurrency": 4}}'
    embed.flags.master_endpoint = servers
    embed.flags.bind_ip = "127.0.0.1"
    embed.flags.num_workers = size
    embed.flags.wait_num_servers = 1
    keras.utils.set_random_seed(rank)  # the dense weights are worker 0's all the same
    checkpoints = [keras.callbacks.ModelCheckpoint(output + "/checkpoint{epoch}.keras")]
    model, predictions = fit(rank, size, checkpoints if rank == 0 else ())
    np.save(f"{output}/predictions-{rank}.npy", predictions)
    if rank == 0:
        model.save(output + "/save", include_optimizer=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
