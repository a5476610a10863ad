"""The click models: their formulas, equality of served and stock embeddings, short runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import SMALL, events, losses

from oe_runtime import Client, models
from oe_runtime.train import main

ROWS = [30, 70, 500] + [10] * 23


@pytest.fixture(autouse=True)
def keep_determinism() -> Iterator[None]:
    yield
    from tensorflow.python.util import _pywrap_determinism

    _pywrap_determinism.enable(False)


def batch(rows: int, seed: int = 0) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, n, (rows, 1)) for n in ROWS]
    return [rng.random((rows, 13), np.float32), *ids], rng.integers(0, 2, (rows, 1)).astype(np.float32)


def test_the_cin_is_the_papers_sum() -> None:
    import keras

    from oe_runtime.models.blocks import Seeds
    from oe_runtime.models.xdeepfm import interactions

    embeddings = keras.Input((5, 3))
    shape = models.Shape(dim=3, cin=(4, 2))
    model = keras.Model(embeddings, interactions(embeddings, shape, Seeds(1)))
    x0 = np.random.default_rng(0).standard_normal((6, 5, 3)).astype(np.float32)
    weights = {layer.name: layer.get_weights() for layer in model.layers}
    last, sums = x0, []
    for k, maps in ((1, 4), (2, 2)):
        w = weights[f"cin_{k}"][0].reshape(last.shape[1], 5, maps)  # W[i, j] of each feature map
        last = np.einsum("bid,bjd,ijh->bhd", last, x0, w)
        sums.append(last.sum(axis=2))
    kernel, bias = weights["cin_logit"]
    assert [len(weights[f"cin_{k}"]) for k in (1, 2)] == [1, 1]  # no bias
    expected = np.concatenate(sums, axis=1) @ kernel + bias
    np.testing.assert_allclose(np.asarray(model(x0)), expected, rtol=1e-4, atol=1e-5)


def test_dlrm_takes_the_product_of_every_pair_once() -> None:
    import keras

    from oe_runtime.models.dlrm import dot_products

    bottom, embeddings = keras.Input((3,)), keras.Input((4, 3))
    model = keras.Model([bottom, embeddings], dot_products(bottom, embeddings))
    rng = np.random.default_rng(0)
    v, e = rng.standard_normal((2, 3)), rng.standard_normal((2, 4, 3))
    vectors = np.concatenate([v[:, None], e], axis=1)
    expected = [[np.dot(row[i], row[j]) for i in range(5) for j in range(i)] for row in vectors]
    np.testing.assert_allclose(np.asarray(model([v, e])), expected, rtol=1e-5)


@pytest.mark.parametrize(("interaction", "width"), [("dot", 4 + 27 * 26 // 2), ("cat", 4 + 26 * 4)])
def test_dlrms_top_sees_the_integers_and_the_interactions(interaction: str, width: int) -> None:
    model = models.build("dlrm", ROWS, 4, hidden=(8,), bottom=(16,), interaction=interaction)
    assert model.get_layer("top_1").kernel.shape == (width, 8)
    assert model.get_layer("bottom_2").kernel.shape == (16, 4)
    names = {layer.name for layer in model.layers}
    assert "C1" in names
    assert "C1_linear" not in names


@pytest.mark.parametrize("name", ["dlrm", "xdeepfm"])
def test_served_embeddings_train_as_stock_ones(name: str) -> None:
    import keras

    import oe_runtime.keras as embed

    stock = models.build(name, ROWS, 4, hidden=(8,), cin=(3, 2), bottom=(8,), seed=3)
    model = embed.distributed_model(stock, Client.in_process())
    model.compile(keras.optimizers.SGD(0.3), "binary_crossentropy")
    assert {"C2", "C3"} <= set(model.tables) <= {"C2", "C3", "C2_linear", "C3_linear"}
    for table, spec in model.tables.items():
        rows = model.get_layer(table).table.rows(np.arange(spec.input_dim))
        stock.get_layer(table).set_weights([rows])
    stock.compile(keras.optimizers.SGD(0.3), "binary_crossentropy")
    x, _ = batch(50)
    before = np.asarray(model.predict_on_batch(x))
    for seed in range(3):
        data = batch(50, seed)
        ours, theirs = model.train_on_batch(*data), stock.train_on_batch(*data)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    after = np.asarray(model.predict_on_batch(x))
    assert after.shape == (50, 1)
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, stock.predict_on_batch(x), atol=1e-5)


@pytest.mark.parametrize("name", ["deepfm", "dlrm", "xdeepfm"])
def test_wide_layers_in_bfloat16_keep_their_weights_in_float32(name: str) -> None:
    sizes: dict[str, Any] = {"hidden": (8,), "cin": (3, 2), "bottom": (8,), "seed": 3}
    plain = models.build(name, ROWS, 4, **sizes)
    mixed = models.build(name, ROWS, 4, dtype="mixed_bfloat16", **sizes)
    x, _ = batch(20)
    assert mixed(x).dtype == "float32"
    assert {w.dtype for w in mixed.weights} == {"float32"}
    difference = np.abs(np.asarray(mixed(x)) - np.asarray(plain(x))).max()
    assert 0 < difference < 0.01


@pytest.mark.parametrize("model", [("xdeepfm", "--cin", "4,4"), ("dlrm", "--bottom", "16,8")])
def test_a_run_learns_resumes_and_exports(model: tuple[str, ...], tmp_path: Path) -> None:
    import tensorflow as tf

    run = tmp_path / "run"
    arguments = ["--data", "generate:8000:1", *SMALL, "--in-process", "--run-dir", str(run)]
    arguments += ["--model", *model, "--learning-rate", "0.2"]
    assert main([*arguments, "--steps", "7"]) == 0
    assert main([*arguments, "--resume", "--epochs", "1", "--export", str(tmp_path / "exported")]) == 0
    assert [e["step"] for e in events(run, "resume")] == [7]
    course = losses(run)
    assert sorted(course) == list(range(1, 19))
    assert course[18][0] < course[1][0]
    assert events(run, "eval")[-1]["auc"] > 0.55
    served = tf.saved_model.load(str(tmp_path / "exported"))
    ids = [np.zeros((2, 1), np.int64)] * 26
    answer = np.asarray(served.serve([np.zeros((2, 13), np.float32), *ids]))
    assert answer.shape == (2, 1)
    assert ((answer > 0) & (answer < 1)).all()
