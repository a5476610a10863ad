"""DeepCTR's own models, where it is installed: `make test` does."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime import Client

ROWS = 500


@pytest.fixture
def deepctr(monkeypatch):
    """It asks PyPI for a newer version of itself when it is imported."""
    monkeypatch.setattr("requests.get", lambda *_, **__: pytest.fail("asks the network"))
    return pytest.importorskip("deepctr.models")


@pytest.fixture
def old_layers(monkeypatch):
    """Keras takes them in this test only."""
    monkeypatch.setattr(keras.layers.Layer, "add_weight", keras.layers.Layer.add_weight)
    embed.accept_keras2_layers()


@pytest.mark.parametrize("name", ["WDL", "DeepFM", "xDeepFM"])
def test_deepctr_models_predict_and_learn_unmodified(name, deepctr, old_layers):
    """With its tables on servers and the same weights, it predicts what it does without, and it learns."""
    from deepctr.feature_column import DenseFeat, SparseFeat

    columns = [SparseFeat(f"C{i}", ROWS, embedding_dim=8) for i in (1, 2, 3)] + [DenseFeat("I1", 1)]
    rng = np.random.default_rng(1)
    inputs = {f"C{i}": rng.integers(0, ROWS, 512) for i in (1, 2, 3)} | {"I1": rng.random(512, np.float32)}
    labels = (inputs["C1"] % 2).astype(np.float32)
    stock = getattr(deepctr, name)(columns, columns, task="binary")
    with Client.in_process(servers=2) as client:
        model = embed.distributed_model(stock, client)
        model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.02)), "binary_crossentropy")
        assert len(model.tables) == 6  # three of width 8, three linear ones
        for table, spec in model.tables.items():
            stock.get_layer(table).set_weights([model.get_layer(table).table.rows(np.arange(spec.input_dim))])
        np.testing.assert_allclose(
            model.predict(inputs, verbose=0), stock.predict(inputs, verbose=0), atol=1e-5
        )
        losses = model.fit(inputs, labels, batch_size=64, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ran"),
    [("IFM", False), ("DIFM", False), ("MMOE", False), ("PLE", False), ("DCNMix", False), ("DCNMix", True)],
)
def test_trains_as_without_servers(name, ran, deepctr, old_layers):
    """Lambda layers around names of DeepCTR's modules, and a layer that makes weights in its first call."""
    from deepctr.feature_column import DenseFeat, SparseFeat

    columns = [SparseFeat(f"C{i}", ROWS, embedding_dim=8) for i in (1, 2, 3)] + [DenseFeat("I1", 1)]
    rng = np.random.default_rng(1)
    inputs = {f"C{i}": rng.integers(0, ROWS, 256) for i in (1, 2, 3)} | {"I1": rng.random(256, np.float32)}
    labels = (inputs["C1"] % 2).astype(np.float32)
    build = getattr(deepctr, name)
    without = {"l2_reg_embedding": 0}  # it is about the rows of a batch here
    if name in ("MMOE", "PLE"):
        stock = build(columns, task_types=["binary"] * 2, task_names=["a", "b"], **without)
        labels = [labels, labels]
    else:
        stock = build(columns, columns, task="binary", l2_reg_linear=0, **without)
    if ran:
        stock.predict(inputs, verbose=0)
    with Client.in_process(servers=2) as client:
        model = embed.distributed_model(stock, client)
        for one in (model, stock):
            one.compile(embed.distributed_optimizer(keras.optimizers.Adagrad(0.1)), "binary_crossentropy")
        for table, spec in model.tables.items():
            stock.get_layer(table).set_weights([model.get_layer(table).table.rows(np.arange(spec.input_dim))])
        losses = [
            one.fit(inputs, labels, batch_size=64, shuffle=False, verbose=0).history["loss"]
            for one in (model, stock)
        ]
    np.testing.assert_allclose(*losses, rtol=5e-6)
