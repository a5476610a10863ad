"""Train a Keras model of your own as a job: checkpoints, stop and resume, lost servers.

Run by itself, in this process:

    python examples/keras_job.py

Run as a job, here with its rows in the process too; --servers names parameter servers:

    python -m oe_runtime.train --script examples/keras_job.py --in-process --run-dir run
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
model.fit(*clicks(100_000), batch_size=512, epochs=2, verbose=0, callbacks=callbacks)
