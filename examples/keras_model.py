"""Train a Keras model of your own with its embeddings on a parameter server, and export it.

Run:

    python -m oe_runtime.server --port 4400 &
    python examples/keras_model.py 127.0.0.1:4400
"""

import sys

import keras
from clicks import ITEMS, USERS, clicks

import oe_runtime.keras as embed
from oe_runtime import Client


def click_model() -> keras.Model:
    """An ordinary Keras model with two embeddings."""
    inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")}
    rows = [
        keras.layers.Flatten()(keras.layers.Embedding(USERS, 16, name="users")(inputs["user"])),
        keras.layers.Flatten()(keras.layers.Embedding(ITEMS, 16, name="items")(inputs["item"])),
    ]
    hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()(rows))
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))


with Client(sys.argv[1].split(",")) as client:
    model = embed.distributed_model(click_model(), client)
    model.compile(
        embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy", metrics=["AUC"]
    )
    embed.check_export("export")  # before training: raise if it could not export there
    model.fit(*clicks(100_000), batch_size=512, epochs=2)
    loss, auc = model.evaluate(*clicks(20_000, seed=1), batch_size=512)
    print(f"AUC of rows that were not trained on: {auc:.3f}")
    if auc < 0.65:
        raise SystemExit("the model has not learned")
    model.save_as_original_model("export")  # a SavedModel that plain TensorFlow loads
