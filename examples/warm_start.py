"""Start from existing embeddings: a model that was trained in plain Keras, and rows from a file.

Run:

    python -m oe_runtime.server --port 4400 &
    python examples/warm_start.py 127.0.0.1:4400
"""

import sys

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clicks import USERS, clicks

import oe_runtime.keras as embed
from oe_runtime import Client

# A model that was trained without servers.
user = keras.Input((1,), dtype="int64", name="user")
item = keras.Input((1,), dtype="int64", name="item")
rows = [
    keras.layers.Flatten()(keras.layers.Embedding(USERS, 16, name="users")(user)),
    keras.layers.Flatten()(embed.Embedding(-1, 16, name="items")(item)),  # for any 64-bit id
]
output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(rows))
stock_model = keras.Model({"user": user, "item": item}, output)
matrix = np.random.default_rng(0).normal(0, 0.05, (USERS, 16)).astype("float32")
stock_model.get_layer("users").set_weights([matrix])

# Rows of items from another system, by key.
keys = np.array([3, 2**40 + 7, 2**62 + 11])
vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(3 * 16, "float32")), 16)
table = pa.table({"key": keys, "row": vectors})
pq.write_table(table, "items.parquet")

with Client(sys.argv[1].split(",")) as client:
    model = embed.distributed_model(stock_model, client, fresh=True)  # drop rows of an earlier run
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy")
    if not np.allclose(model.get_layer("users").get_weights()[0], matrix):
        raise SystemExit("the servers do not have the rows of the trained model")
    imported = client.import_rows("items", "items.parquet")
    print(f"{imported.created} rows of items were imported")
    model.fit(*clicks(20_000), batch_size=512)
    client.export("items", "items-trained.parquet")
