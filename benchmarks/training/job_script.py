"""The built-in DeepFM as a script of one's own: what `benchmarks/training job` trains by --script."""

import sys

import keras
import tensorflow as tf

import oe_runtime.job as job
import oe_runtime.keras as embed
from oe_runtime import models
from oe_runtime.data import dataset
from oe_runtime.data.row_schema import CRITEO

dim, cap, batch_size, epochs = map(int, sys.argv[1:])

keras.utils.set_random_seed(0)
schema = CRITEO.limited(cap)
sizes = [one.rows for one in schema.categories]
model = models.build("deepfm", sizes, dim, schema=schema, seed=0)
model = embed.distributed_model(model, job.client(), sparse_as_dense_size=2)
model.compile(
    embed.distributed_optimizer(keras.optimizers.Adagrad(0.01)),
    "binary_crossentropy",
    metrics=[keras.metrics.AUC(name="auc")],
    jit_compile=False,
)


def inputs(features: dict[str, tf.Tensor], labels: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], tf.Tensor]:
    """The built-in model's inputs: all numbers, and the ids of each category."""
    return (features["numbers"], *tf.split(features["ids"], len(sizes), axis=1)), labels


data = dataset(schema, job.data, batch_size, grouped=True)
callbacks = [embed.JobCallback(job)]
model.fit(data.map(inputs).prefetch(2), epochs=epochs, verbose=0, callbacks=callbacks)
