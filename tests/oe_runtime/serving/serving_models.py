"""A small model in training, which publishes checkpoints, for tests of serving."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import oe_runtime.keras as embed
from oe_runtime import Client, checkpoint


def fields() -> Any:
    """A table of any 64-bit id whose rows may go, one of 80 rows, and three numbers."""
    a = keras.Input((2,), dtype="int64", name="a")
    b = keras.Input((1,), dtype="int64", name="b")
    numbers = keras.Input((3,), name="numbers")
    eviction = [{"name": "global_step", "steps_to_live": 6}]
    parts = [
        keras.layers.Flatten()(embed.Embedding(-1, 4, name="table_a", eviction=eviction)(a)),
        keras.layers.Flatten()(keras.layers.Embedding(80, 4, name="table_b")(b)),
        numbers,
    ]
    x = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Concatenate()(parts))
    return keras.Model([a, b, numbers], keras.layers.Dense(1, activation="sigmoid", name="click")(x))


def batch(rows: int, seed: int = 0, ids: int = 80) -> tuple[dict[str, Any], Any]:
    """Inputs by name and labels."""
    rng = np.random.default_rng(seed)
    x = {
        "a": rng.integers(0, ids, (rows, 2)) * np.int64(2**58) + 5,
        "b": rng.integers(0, ids, (rows, 1)),
        "numbers": rng.random((rows, 3), dtype=np.float32),
    }
    return x, (x["b"] % 2 + x["numbers"][:, :1] > 1).astype(np.float32)


class Training:
    """The model with its rows on `client`, and where it publishes."""

    def __init__(self, directory: Path, client: Client | None = None) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self.client = client or Client.in_process(servers=2)
        self.model = embed.distributed_model(fields(), self.client)
        self.model.compile(keras.optimizers.Adagrad(0.5), "binary_crossentropy")
        self._paths: dict[int, Path] = {}

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def export(self) -> Path:
        """A serving model."""
        return self.model.save_serving_model(self.directory / "export" / "model")

    def fit(self, seed: int = 0, ids: int = 60) -> None:
        """Four steps."""
        x, y = batch(128, seed, ids)
        self.model.fit(x, y, batch_size=32, verbose=0)

    def predict(self, x: Any) -> Any:
        """What the model in training says."""
        return self.model.predict(x, verbose=0)

    def rows(self) -> int:
        """Of the table of any id."""
        servers = self.client.stats()["servers"]
        return sum(server["tables"]["table_a"]["rows"] for server in servers)

    def evict_all_but(self, ids: range) -> int:
        """Train on these only until the others go; how many rows went."""
        for seed in range(2):
            self.fit(seed, len(ids))
        return self.client.evict()

    def publish(self, step: int, base: int | None = None) -> Path:
        """A checkpoint, with `base` an increment on that one."""
        before = None if base is None else self._paths[base]

        def write(path: Path) -> dict[str, Any]:
            taken = time.time()
            self.model.save_dense(path)
            return {"tables": self.client.save(path, since=before), "training": {"taken": taken}}

        self._paths[step] = checkpoint.publish(self.checkpoints, step, write, keep=9, base=before)
        return self._paths[step]
