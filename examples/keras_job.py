"""Train a Keras model of your own as a job: checkpoints, stop and resume, lost servers.

Run by itself, in this process:

    python examples/keras_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/keras_job.py --in-process --run-dir run

Several workers (--workers) each train on their part of each batch.
"""

import keras
from clicks import ITEMS, USERS, clicks

import oe_runtime.job as job  # 1
import oe_runtime.keras as embed

keras.utils.set_random_seed(0)
inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")}
rows = [
    keras.layers.Flatten()(keras.layers.Embedding(USERS, 16, name="users")(inputs["user"])),
    keras.layers.Flatten()(keras.layers.Embedding(ITEMS, 16, name="items")(inputs["item"])),
]
hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()(rows))
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))

model = embed.distributed_model(model, job.client())  # 2
model.compile(
    embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy", metrics=["AUC"]
)
callbacks = [embed.JobCallback(job)]  # 3
features, labels = clicks(100_000)
mine = slice(job.rank, None, job.workers)  # this worker's part of the data
features = {name: ids[mine] for name, ids in features.items()}
model.fit(features, labels[mine], batch_size=512 // job.workers, epochs=2, verbose=0, callbacks=callbacks)
