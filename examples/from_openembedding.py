"""A script for OpenEmbedding, written like its examples, with only the import and the endpoint changed.

Run:

    python -m oe_runtime.server --port 4400 &
    python examples/from_openembedding.py 127.0.0.1:4400
"""

import sys

import keras
import tensorflow as tf
from clicks import clicks

import oe_runtime.keras as embed  # before: import openembedding.tensorflow as embed

embed.flags.master_endpoint = sys.argv[1]  # before: the master's address; now the addresses of all servers
embed.flags.num_workers = 1


class SparseEmbedding(embed.Embedding):
    """Rows for any 64-bit id, with OpenEmbedding's arguments."""

    def __init__(self, input_dim: int = -1, output_dim: int = 9, **kwargs: object) -> None:
        super().__init__(
            input_dim, output_dim, keras.initializers.RandomNormal(0, 0.01), num_shards=16, **kwargs
        )


inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")}
rows = [keras.layers.Flatten()(SparseEmbedding(name=f"sparse_{name}")(inputs[name])) for name in inputs]
hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()(rows))
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))

optimizer = embed.distributed_optimizer(keras.optimizers.Adam(0.01), explicit=True)
model = embed.distributed_model(model, sparse_as_dense_size=64)
model.compile(optimizer, "binary_crossentropy", metrics=["AUC"])
dataset = tf.data.Dataset.from_tensor_slices(clicks(50_000)).batch(512)
dataset = embed.pulling(dataset, model).prefetch(4)
checkpoints = keras.callbacks.ModelCheckpoint("checkpoint{epoch}.keras")
losses = model.fit(dataset, epochs=2, callbacks=[checkpoints]).history["loss"]
if losses[-1] >= losses[0]:
    raise SystemExit("the model has not learned")
model.save("save", include_optimizer=False)
model.save_as_original_model("export", include_optimizer=False)
