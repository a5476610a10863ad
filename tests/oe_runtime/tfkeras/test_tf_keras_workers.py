"""Several workers of one model of tf-keras train it as one worker does with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tf_keras_worker
from server_processes import Servers, free_endpoints
from tf_keras_models import embed, keras, two_fields

from oe_runtime import Client


@pytest.mark.process
def test_two_workers_train_as_one_with_the_whole_batch(tmp_path):
    servers = Servers(tmp_path / "servers", 2)
    program = [sys.executable, str(Path(tf_keras_worker.__file__))]
    where = [free_endpoints(2), ",".join(servers.endpoints)]
    files = [tmp_path / f"worker-{rank}.npz" for rank in range(2)]
    try:
        processes = [
            subprocess.Popen([*program, str(rank), *where, str(file)], stderr=subprocess.PIPE, text=True)
            for rank, file in enumerate(files)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        servers.end()
    keras.utils.set_random_seed(0)  # as worker 0 has it
    with Client.in_process() as client:
        model = embed.distributed_model(two_fields(), client)
        expected = tf_keras_worker.train(model, 0, 1)
    workers = [dict(np.load(file)) for file in files]
    losses, examples = np.moveaxis(np.stack([worker["losses"] for worker in workers]), -1, 0)
    means = np.nansum(losses * examples, 0) / examples.sum(0)
    np.testing.assert_allclose(means, expected["losses"][:, 0], rtol=2e-5)
    for worker in workers:
        np.testing.assert_allclose(worker["predictions"], expected["predictions"], rtol=2e-4, atol=1e-5)
        weights = [name for name in worker if name.startswith("arr_")]
        assert len(weights) == len(model.weights) + len(model.served.layers)
        for name in weights:
            np.testing.assert_array_equal(worker[name], workers[0][name], "the same bits")
