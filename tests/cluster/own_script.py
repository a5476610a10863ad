"""A user's own training program: its directory has a module, and its argument says how long it trains."""

from __future__ import annotations

from pathlib import Path

STEPS = 100  # per epoch
SCRIPT = """\
import json, os, sys
import keras, numpy
from ids import IDS
import oe_runtime.job as job
import oe_runtime.keras as embed

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print("told", [os.environ[name] for name in names], sys.argv[1:], job.resume_step > 0, flush=True)
open("written.txt", "w").close()  # beside the script, which in pods is a copy of their own
keras.utils.set_random_seed(0)
ids = keras.Input((1,), dtype="int64")
row = keras.layers.Flatten()(keras.layers.Embedding(IDS, 4, name="ids")(ids))
model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(row))
model = embed.distributed_model(model, job.client())
model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy")
users = numpy.random.default_rng(0).integers(0, IDS, (6400, 1))
callbacks = [embed.JobCallback(job)]
labels = (users % 2).astype("float32")
model.fit(users, labels, batch_size=64, epochs=int(sys.argv[1]), verbose=0, callbacks=callbacks)
"""


def write(directory: Path) -> Path:
    """The program in a directory of its own."""
    program = directory / "train_mine.py"
    directory.mkdir()
    program.write_text(SCRIPT)
    (directory / "ids.py").write_text("IDS = 1000\n")
    return program
