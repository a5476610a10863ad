"""The built-in DeepFM as a script of one's own: what `benchmarks/training job` trains by --script."""

import sys

import keras

import oe_runtime.job as job
import oe_runtime.keras as embed
from oe_runtime import models
from oe_runtime.data import dataset
from oe_runtime.data.row_schema import CRITEO

dim, cap, batch_size, epochs = map(int, sys.argv[1:])

keras.utils.set_random_seed(0)
schema = CRITEO.limited(cap)
sizes = [one.rows for one in schema.categories]
numbers = [keras.Input((1,), name=one.name) for one in schema.numbers]
ids = [keras.Input((1,), dtype="int64", name=one.name) for one in schema.categories]
deepfm = models.build("deepfm", sizes, dim, schema=schema, seed=0)
columns = {one.name: one for one in numbers + ids}
model = keras.Model(columns, deepfm([keras.layers.Concatenate()(numbers), *ids]))
model = embed.distributed_model(model, job.client(), sparse_as_dense_size=2)
model.compile(
    embed.distributed_optimizer(keras.optimizers.Adagrad(0.01)),
    "binary_crossentropy",
    metrics=[keras.metrics.AUC(name="auc")],
    jit_compile=False,
)

callbacks = [embed.JobCallback(job)]
model.fit(dataset(schema, job.data, batch_size), epochs=epochs, verbose=0, callbacks=callbacks)
