"""Train a table that is larger than the memory, with its rows on an NVMe drive.

    mkdir rows
    python -m oe_runtime.train --script examples/rows_on_nvme.py --in-process --run-dir run \
        --storage dram_ssd --storage-path rows --storage-cache 33554432 -- --gib 0.1 --then 10

`make demo-ssd` trains 20 GiB of rows so, in 4 GiB of memory. First each batch brings new ids, until the table
is full. Then ids are drawn from all of them, a few often and most seldom, as in production.
"""

import argparse

import keras
import numpy as np

import oe_runtime.job as job
import oe_runtime.keras as embed

DIM, FIELDS, EXAMPLES = 64, 26, 4096
ROW_BYTES = 2 * 4 * DIM  # weights, and the optimizer's state
OFTEN = 0.5  # of the fields have ids that come often; the others have new ones at first, and then any
POPULAR = 100_000  # ids that come often, the lower the more so

parser = argparse.ArgumentParser()
parser.add_argument("--gib", type=float, default=1.0, help="bytes of rows, in GiB")
parser.add_argument("--then", type=int, default=100, help="batches after all rows are there")
options = parser.parse_args()
ROWS = int(options.gib * 2**30) // ROW_BYTES
NEW = int(EXAMPLES * FIELDS * (1 - OFTEN))  # ids of a batch
GROWING = -(-ROWS // NEW)  # batches


class Clicks(keras.utils.PyDataset):
    """Batches by number, each from its own seed, so that a resumed job goes on with the next one."""

    def __len__(self) -> int:
        return GROWING + options.then

    def __getitem__(self, batch):
        chance = np.random.default_rng(batch)
        known = min(ROWS, max(1, batch * NEW))
        often = (chance.random(EXAMPLES * FIELDS - NEW) ** 4 * min(known, POPULAR)).astype(np.int64)
        if batch < GROWING:
            others = np.arange(batch * NEW, (batch + 1) * NEW) % ROWS
        else:
            others = chance.integers(0, ROWS, NEW)
        ids = np.concatenate([often, chance.permutation(others)]).reshape(FIELDS, EXAMPLES).T
        return ids, (ids[:, :4] * 7919 % 13).sum(axis=1) > 24


keras.utils.set_random_seed(0)
ids = keras.Input((FIELDS,), dtype="int64")
rows = embed.Embedding(-1, DIM, name="rows")(ids)  # any 64-bit id
hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Flatten()(rows))
model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
model = embed.distributed_model(model, job.client())
model.compile(
    embed.distributed_optimizer(keras.optimizers.Adagrad(0.05)), "binary_crossentropy", metrics=["AUC"]
)
print(
    f"{ROWS:,} rows of {ROW_BYTES} bytes, {ROWS * ROW_BYTES / 2**30:.1f} GiB, in {GROWING} batches",
    flush=True,
)
model.fit(Clicks(), shuffle=False, verbose=0, callbacks=[embed.JobCallback(job)])
