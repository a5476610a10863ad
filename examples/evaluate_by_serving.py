"""Train, publish checkpoints, and measure the AUC with a serving model that follows them.

Run:

    python examples/evaluate_by_serving.py

The tables are in this process; `Client(["HOST:PORT"])` puts them on servers.
"""

from pathlib import Path
from typing import Any

import keras
from clicks import ITEMS, USERS, clicks

import oe_runtime.keras as embed
from oe_runtime import Client, checkpoint
from oe_runtime.serving import Model

inputs = {name: keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")}
rows = [
    keras.layers.Flatten()(keras.layers.Embedding(USERS, 16, name="users")(inputs["user"])),
    keras.layers.Flatten()(keras.layers.Embedding(ITEMS, 16, name="items")(inputs["item"])),
]
output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(rows))
client = Client.in_process()
model = embed.distributed_model(keras.Model(inputs, output), client)
model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy")
model.save_serving_model("serving")  # without rows


def write(directory: Path) -> dict[str, Any]:
    """Fill the directory of a checkpoint."""
    model.save_dense(directory)
    return {"tables": client.save(directory)}


held_out, labels = clicks(10_000, seed=1)
found = []
checkpoint.publish(Path("checkpoints"), 0, write)
with Model.load("serving", "checkpoints") as served:
    for step in (1, 2):
        model.fit(*clicks(20_000, seed=step + 1), batch_size=512)
        checkpoint.publish(Path("checkpoints"), step, write)
        served.refresh()  # served.watch(10) does so every 10 seconds
        auc = keras.metrics.AUC()
        auc.update_state(labels, served.predict(held_out)["output_0"])
        found.append(float(auc.result()))
        print(f"checkpoint {step}: AUC {found[-1]:.3f}")
client.close()
if not 0.6 < found[0] < found[1]:
    raise SystemExit("the served model has not learned")
