"""Train one Keras model in two worker processes, each with half of every batch.

Run:

    python -m oe_runtime.server --port 4400 &
    python examples/two_workers.py 1 127.0.0.1:7100,127.0.0.1:7101 127.0.0.1:4400 &
    python examples/two_workers.py 0 127.0.0.1:7100,127.0.0.1:7101 127.0.0.1:4400
    wait $!

The losses are those of one worker with the whole batches. Both processes end together.
"""

import sys

import keras
from clicks import ITEMS, USERS, clicks

import oe_runtime.keras as embed
from oe_runtime import Client, Worker

rank, workers, servers = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")
together = embed.TensorFlowWorkers(workers, rank)  # before TensorFlow computes anything

inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")}
rows = [
    keras.layers.Flatten()(keras.layers.Embedding(USERS, 16, name="users")(inputs["user"])),
    keras.layers.Flatten()(keras.layers.Embedding(ITEMS, 16, name="items")(inputs["item"])),
]
output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(rows))
stock_model = keras.Model(inputs, output)

with Client(servers, worker=Worker(rank, of=len(workers))) as client:
    model = embed.distributed_model(stock_model, client, workers=together)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy")
    x, y = clicks(40_000)
    mine = slice(rank, None, len(workers))
    losses = model.fit(
        {name: values[mine] for name, values in x.items()}, y[mine], batch_size=512, epochs=2, shuffle=False
    ).history["loss"]
    if losses[-1] >= losses[0]:
        raise SystemExit("the model has not learned")
    if rank == 0:
        model.save_weights("weights")  # a directory with the rows in it
