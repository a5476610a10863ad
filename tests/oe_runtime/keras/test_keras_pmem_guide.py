"""OpenEmbedding's user guide for persistent memory: two runs of one script, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import keras, numpy as np
import oe_runtime.keras as embed

embed.flags.config = sys.argv[1]


def save_server_model(model, filepath, include_optimizer=True):
    embed.persist_server_model(model, filepath, 0)


embed.exb.save_server_model = save_server_model
embed.exb.load_server_model = embed.restore_server_model
ids = keras.Input((1,), dtype="int64")
rows = keras.layers.Flatten()(keras.layers.Embedding(1000, 8)(ids))
model = embed.distributed_model(keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(rows)))
model.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
x, y = np.arange(64)[:, None], np.ones(64)
if os.path.exists("A"):
    model.load_weights("A")
else:
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    model.save("A")
print("predicted", model.predict(x, verbose=0).tobytes().hex())
"""


@pytest.mark.parametrize("cache", [0, 64], ids=["pmem_libpmem", "dram_pmem"])
def test_the_second_run_loads_the_rows_of_the_first(tmp_path: Path, cache: int) -> None:
    config = f'{{"server": {{"pmem_pool_root_path": "{tmp_path}/pmem0", "cache_size": {cache}}}}}'
    runs: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, config], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert ("has tables of an earlier run" in done.stderr) == bool(runs)
        runs.append(done.stdout.strip().splitlines()[-1])
    assert runs[0].startswith("predicted ")
    assert runs[1] == runs[0]
