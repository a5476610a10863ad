"""Several workers of one Keras model train it as one worker does with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import keras_worker
import numpy as np
import pytest
from keras_models import two_fields
from server_processes import Servers, free_endpoints

import oe_runtime.keras as embed
from oe_runtime import Client

pytestmark = pytest.mark.process


class Two:
    """Stands for a job of two workers in which nothing is trained."""

    rank, count = 0, 2

    def sum(self, values, _what):
        return values


def run_workers(servers, count, directory):
    """What each of the processes has written."""
    program = [sys.executable, str(Path(keras_worker.__file__))]
    where = [free_endpoints(count), ",".join(servers.endpoints)]
    files = [directory / f"worker-{rank}.npz" for rank in range(count)]
    processes = [
        subprocess.Popen([*program, str(rank), *where, str(file)], stderr=subprocess.PIPE, text=True)
        for rank, file in enumerate(files)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    return [dict(np.load(file)) for file in files]


@pytest.mark.parametrize("count", [2, 4])
def test_workers_train_as_one_with_the_whole_batch(tmp_path, count):
    servers = Servers(tmp_path / "servers", 2)
    try:
        workers = run_workers(servers, count, tmp_path)
    finally:
        servers.end()
    keras.utils.set_random_seed(0)  # as worker 0 has it
    model = keras_worker.model_of_mine(Client.in_process())
    losses, predictions = keras_worker.train(model, 0, 1)
    assert set(model.tables) == {"table_a", "linear_a"}
    weights = {f"arr_{i}": weight for i, weight in enumerate(model.get_weights())}
    shares = np.stack([worker["losses"] for worker in workers])
    means = np.nansum(shares[:, :, 0] * shares[:, :, 1], 0) / shares[:, :, 1].sum(0)
    np.testing.assert_allclose(means, losses[:, 0], rtol=2e-5)
    assert losses[-1, 0] < losses[0, 0]
    for worker in workers:
        np.testing.assert_allclose(worker["predictions"], predictions, rtol=2e-4, atol=1e-5)
        for name, weight in weights.items():
            np.testing.assert_allclose(worker[name], weight, rtol=2e-4, atol=1e-5)
            np.testing.assert_array_equal(worker[name], workers[0][name], "all workers have the same bits")


def test_what_needs_the_gradients_of_all_is_refused():
    with pytest.raises(ValueError, match="2 workers need servers"):
        embed.distributed_model(two_fields(), workers=Two())
    model = embed.distributed_model(two_fields(), Client.in_process(), workers=Two())
    with pytest.raises(ValueError, match="meet at the servers only"):
        model.compile(keras.optimizers.Adagrad(0.1, clipnorm=1.0), "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps does not work with several workers"):
        model.compile(keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2), "mse")
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    with pytest.raises(ValueError, match="each of 2 workers has its own metrics"):
        model.fit(callbacks=[keras.callbacks.EarlyStopping(restore_best_weights=True)])


def test_a_rank_beyond_the_workers_is_refused():
    with pytest.raises(ValueError, match="worker 2 of 2 does not exist"):
        embed.TensorFlowWorkers(["127.0.0.1:1", "127.0.0.1:2"], 2)
