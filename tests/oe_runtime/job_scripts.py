"""The scripts that the tests of jobs run, and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training_runs import events

from oe_runtime.train import main

# 20 steps an epoch, with all that depends on what ran before: shuffled arrays, dropout, metrics of an epoch.
KERAS = """
import os, signal, sys
import keras, numpy as np
import oe_runtime.job as job
import oe_runtime.keras as embed

keras.utils.set_random_seed(1)
ids = keras.Input((2,), dtype="int64")
x = keras.layers.Flatten()(keras.layers.Embedding(300, 4, name="C1")(ids))
x = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="relu")(x))
model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(x))
model = embed.distributed_model(model, job.client())
model.compile(
    embed.distributed_optimizer(keras.optimizers.Adam(0.01)), "binary_crossentropy", metrics=["AUC"]
)
features = np.random.default_rng(0).integers(0, 300, (1000, 2))
labels = (features[:, 0] % 3 == 0).astype("float32")
stops = [int(step) for step in job.arguments]


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if step in stops and step > job.resume_step:
            os.kill(os.getpid(), signal.SIGTERM)


callbacks = [Stop(), embed.JobCallback(job)]
"""
# The same with tf-keras.
TF_KERAS = (
    KERAS.replace("import keras, numpy", "import tf_keras as keras, numpy")
    .replace("oe_runtime.keras", "oe_runtime.tf_keras")
    .replace("keras.Input(", "keras.backend.clear_session()\nids = keras.Input(", 1)
    .replace("ids = keras.backend", "keras.backend")
)
ARRAYS = KERAS + "model.fit(features, labels, batch_size=50, epochs=3, verbose=0, callbacks=callbacks)\n"
DATASET = (
    KERAS
    + """
import tensorflow as tf

data = tf.data.Dataset.from_tensor_slices((features, labels)).shuffle(500, seed=3).batch(50)
model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
"""
)
# A model that makes its weights with the first batch, and has a layer that it does not call.
SUBCLASSED = DATASET.replace(
    DATASET[DATASET.index("ids = ") : DATASET.index("model = embed")],
    """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = keras.layers.Embedding(300, 4, name="C1")
        self.flat = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.unused = keras.layers.Dense(3)
        self.dropout = keras.layers.Dropout(0.2)
        self.score = keras.layers.Dense(1, activation="sigmoid")

    def call(self, ids, training=False):
        return self.score(self.dropout(self.hidden(self.flat(self.rows(ids))), training=training))


model = Model()
""",
)
# Its batches are shuffled by fit, and its rows by itself.
PY_DATASET = (
    KERAS
    + """
class Batches(keras.utils.PyDataset):
    order = np.arange(1000)
    random = np.random.default_rng(5)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        rows = self.order[index * 50 : index * 50 + 50]
        return features[rows], labels[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


model.fit(Batches(), epochs=3, verbose=0, callbacks=callbacks)
"""
)
# Epochs of 20 steps, of 13 batches again and again: shuffled anew each time.
ENDLESS = DATASET.replace(".batch(50)", ".batch(50).take(13).repeat()").replace(
    "data, epochs=3", "data, epochs=3, steps_per_epoch=20"
)
# Epochs of 10 steps, of which two read all data.
STEPS = DATASET.replace("data, epochs=3", "data, epochs=6, steps_per_epoch=10")
# Epochs that a callback of Keras ends and two of them look at.
CALLBACKS = ARRAYS.replace(
    "callbacks = [Stop(), embed.JobCallback(job)]",
    """
early = keras.callbacks.EarlyStopping("loss", patience=4, min_delta=1.0)
plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=1.0, factor=0.5, min_lr=0.0)
callbacks = [early, plateau, Stop(), embed.JobCallback(job)]
""",
).replace("epochs=3", "epochs=9")
# 20 steps an epoch, of a file that the job names.
READER = """
import os, signal
import keras
import oe_runtime.job as job
import oe_runtime.keras as embed
from oe_runtime.data import dataset

keras.utils.set_random_seed(1)
stops = [int(step) for step in job.arguments]


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if step in stops and step > job.resume_step:
            os.kill(os.getpid(), signal.SIGTERM)


ids = keras.Input((1,), dtype="int64", name="C1")
x = keras.layers.Flatten()(keras.layers.Embedding(201, 4, name="rows")(ids))
model = keras.Model({"C1": ids}, keras.layers.Dense(1, activation="sigmoid")(x))
model = embed.distributed_model(model, job.client())
adam = embed.distributed_optimizer(keras.optimizers.Adam(0.01))
model.compile(adam, "binary_crossentropy", metrics=["AUC"])
rows = dataset("criteo", job.data, 100, max_cardinality=200)
model.fit(rows, epochs=2, verbose=0, callbacks=[Stop(), embed.JobCallback(job)])
"""
PARTS = KERAS + "for _ in range(3): model.fit(features, labels, 50, 1, 0, callbacks)\n"
# The second fit has another optimizer, which counts its own steps.
RECOMPILED = (
    KERAS.replace("int(self.model.optimizer.iterations)", "job.current().course.position.step")
    + """
model.fit(features, labels, 50, 1, 0, callbacks)
adam = embed.distributed_optimizer(keras.optimizers.Adam(0.003))
model.compile(adam, "binary_crossentropy", metrics=["AUC"])
model.fit(features, labels, 50, 1, 0, callbacks)
"""
)


def write(directory: Path, text: str, name: str = "train.py") -> Path:
    """Write a script; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(text)
    return path


def run(script: Path, run_dir: Path, *flags: str, arguments: tuple[str, ...] = ()) -> int:
    """Run it in this process, with its tables in it too unless the flags say otherwise."""
    if "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # layers get the names that they have in a new process
    where = [] if "--servers" in flags else ["--in-process"]
    words = ["--script", str(script), "--run-dir", str(run_dir), "--log-every", "1", *where, *flags]
    return main([*words, "--", *arguments])


def run_apart(script: Path, *runs: tuple[Path, tuple[str, ...], tuple[str, ...]]) -> tuple[list[int], str]:
    """Do `run` several times in one other process: tf-keras does not let go of models.

    Each of `runs` is a run directory, flags and the script's arguments. Return the statuses and the output.
    """
    calls = [[str(script), str(where), list(flags), list(arguments)] for where, flags, arguments in runs]
    text = (
        "import json, sys\nfrom pathlib import Path\nfrom job_scripts import run\n"
        "for script, where, flags, arguments in json.loads(sys.argv[1]):\n"
        "    print('status', run(Path(script), Path(where), *flags, arguments=arguments), flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", text, json.dumps(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("status ") for line in done.stdout.splitlines() if line.startswith("status ")]
    return [int(line) for line in lines], done.stdout


def start(script: Path, run_dir: Path, *flags: str, arguments: tuple[str, ...] = (), **more: Any) -> Any:
    """Start it in a process of its own."""
    command = [sys.executable, "-m", "oe_runtime.train", "--script", str(script), "--run-dir", str(run_dir)]
    command += ["--log-every", "1", *([] if "--servers" in flags else ["--in-process"]), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--", *arguments], stdout=pipe, stderr=pipe, text=True, **more)


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step → (loss, AUC of the epoch so far), the last word on each."""
    return {e["step"]: (e["loss"], e["auc"]) for e in events(run_dir, "step")}


def figures(run_dir: Path) -> dict[int, dict[str, float]]:
    """Epoch → what Keras says of it, the last word on each."""
    return {e["epoch"]: e["figures"] for e in events(run_dir, "epoch")}


# 20 steps an epoch; shuffled by the loader, with dropout, momenta and a scheduler.
TORCH = """
import os, signal
import torch
import oe_runtime.job as job
import oe_runtime.torch as embed

torch.manual_seed(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = torch.nn.Embedding(300, 4)
        self.dense = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, ids):
        return self.dense(self.c1(ids).flatten(1))[:, 0]


model = embed.distributed_model(Model(), job.client())
optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.01), model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
ids = torch.randint(0, 300, (1000, 2), generator=torch.Generator().manual_seed(0))
labels = (ids[:, 0] % 3 == 0).float()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, labels), batch_size=50, shuffle=True)
loss_of = torch.nn.BCEWithLogitsLoss()
stops = [int(step) for step in job.arguments]
with job.training(model, optimizer, scheduler=scheduler) as loop:
    for epoch in loop.epochs(3):
        for x, y in loop.batches(data):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if loop.step_number + 1 in stops and loop.step_number + 1 > job.resume_step:
                os.kill(os.getpid(), signal.SIGTERM)
            job.step(loss=loss)
"""
# Rows and dense weights by an optimizer each, with a schedule each that the job finds by itself.
TORCH_TWO_OPTIMIZERS = (
    TORCH.replace(
        "optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.01), model)",
        "rows = embed.distributed_optimizer(torch.optim.Adagrad(model.c1.parameters(), 0.1), model.c1)\n"
        "optimizer = torch.optim.Adam(model.dense.parameters(), 0.01)\n"
        "slower = torch.optim.lr_scheduler.ExponentialLR(rows, 0.95)",
    )
    .replace("job.training(model, optimizer, scheduler=scheduler)", "job.training(model, [rows, optimizer])")
    .replace("zero_grad()", "zero_grad(), rows.zero_grad()")
    .replace("optimizer.step()", "rows.step(), optimizer.step(), slower.step()")
)
# The same for Keras, whose data do not shuffle.
TAPE = (
    KERAS.replace("callbacks = ", "unused = ")
    + """
import tensorflow as tf

bce = keras.losses.BinaryCrossentropy()
with job.training(model) as loop:
    for epoch in loop.epochs(3):
        for i in loop.batches(range(0, 1000, 50)):
            x, y = tf.constant(features[i : i + 50]), tf.constant(labels[i : i + 50, None])
            with embed.GradientTape(model) as tape:
                loss = bce(y, model(x, training=True))
            grads = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))
            if loop.step_number + 1 in stops and loop.step_number + 1 > job.resume_step:
                os.kill(os.getpid(), signal.SIGTERM)
            job.step(loss=loss, rows=50)
"""
)
