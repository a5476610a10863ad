"""The optimizers through pull and push are Keras's, to 1e-5 over 100 steps."""

from __future__ import annotations

import os

import numpy as np
import pytest

from oe_runtime import Client, TableSpec

ROWS, DIM, STEPS = 13, 5, 100
CASES = [
    ("Adagrad", {}, 0.1),
    ("Adagrad", {"initial_accumulator_value": 0.01, "epsilon": 1e-4}, 0.05),
    ("Adam", {}, 0.01),
    ("Adam", {"beta_1": 0.7, "beta_2": 0.95, "epsilon": 1e-5}, 0.02),
    ("SGD", {}, 0.05),
    ("SGD", {"momentum": 0.9}, 0.02),
    ("SGD", {"momentum": 0.9, "nesterov": True}, 0.02),
    ("Ftrl", {}, 0.1),
    (
        "Ftrl",
        {
            "learning_rate_power": -0.4,
            "initial_accumulator_value": 0.2,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "l2_shrinkage_regularization_strength": 0.01,
            "beta": 0.1,
        },
        0.1,
    ),
]


@pytest.mark.parametrize(("name", "parameters", "rate"), CASES)
def test_equal_to_keras(name, parameters, rate):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")  # here, so that the tests beside this one do not pay for it
    client = Client.in_process(servers=2)
    table = client.create_table(TableSpec("t", DIM, optimizer={"name": name.lower(), **parameters}))
    keys = np.arange(ROWS) * 1_000_003
    variable = keras.Variable(client.pull_rows(table, keys))
    optimizer = getattr(keras.optimizers, name)(learning_rate=rate, **parameters)
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        # Keras's momenta decay in rows without a gradient and ours do not, so every row has one each step;
        # some rows have several.
        ids = np.concatenate([keys, rng.choice(keys, 9)])
        gradients = rng.normal(size=(len(ids), DIM)).astype(np.float32)
        dense = np.zeros((ROWS, DIM), np.float32)
        np.add.at(dense, np.searchsorted(keys, ids), gradients)
        client.push(client.pull([ids], [(table, 0)]), [gradients], rate)
        optimizer.apply([keras.ops.convert_to_tensor(dense)], [variable])
        if step in (0, 9, STEPS - 1):
            rows = client.pull_rows(table, keys)
            np.testing.assert_allclose(rows, np.asarray(variable), rtol=0, atol=1e-5)
    assert not np.allclose(rows, 0)
