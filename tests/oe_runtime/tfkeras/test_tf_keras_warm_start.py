"""A converted model of tf-keras goes on from the weights that it was given."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tf_keras_models import ROWS, keras, permutations, random_ids, rows, two_fields
from warm_starts import WarmStarts

import oe_runtime.tf_keras as embed

cases = WarmStarts(keras, embed, two_fields, permutations, random_ids)


def test_a_trained_model_goes_on_from_its_rows():
    plain, x, y = cases.trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tf-keras's, of initializers that are called twice
        model = embed.distributed_model(plain)
    cases.assert_rows_of(cases.compile(model), plain)
    cases.assert_equal_training([model], plain, x, y)


def test_an_untrained_model_has_the_rows_of_its_initializer(monkeypatch):
    monkeypatch.setattr("oe_runtime.client.Client.assign", None)
    found = [rows(cases.converted(two_fields(), seed=1), "table_a") for _ in range(2)]
    np.testing.assert_array_equal(*found)


def test_matrices():
    """`weights=[…]`, which tf-keras assigns when it builds the layer, Constant(matrix), and set_weights."""
    matrix = np.random.default_rng(0).random((ROWS, 4), dtype=np.float32)

    class Three(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Embedding(ROWS, 4, weights=[matrix], name="first")  # not built yet
            self.second = keras.layers.Embedding(ROWS, 4, keras.initializers.Constant(matrix), name="second")
            self.third = embed.Embedding(ROWS, 4, weights=[matrix], name="third")

        def call(self, ids):
            return self.first(ids) + self.second(ids) + self.third(ids)

    model = cases.converted(Three())
    for layer in (model.first, model.second, model.third):
        np.testing.assert_allclose(layer.get_weights()[0], matrix, atol=1e-7)
    model.third.set_weights([matrix + 1])
    np.testing.assert_allclose(model(np.arange(3)), 3 * matrix[:3] + 1, atol=1e-5)


def write(plain, kind, directory):
    path = directory / f"plain{kind}"
    if kind in (".h5", ".tf", ".keras"):
        plain.save(path, save_format={".tf": "tf"}.get(kind))
    else:
        plain.save_weights(path)
    return path


@pytest.mark.parametrize("kind", [".weights.h5", ".h5", ".keras", ".tf", ""])
@pytest.mark.filterwarnings("ignore:.*HDF5", "ignore:Skipping variable loading for optimizer")
def test_files_of_plain_models(kind, tmp_path):
    """The last are a SavedModel, and a checkpoint of TensorFlow's by its prefix."""
    plain, x, _ = cases.trained()
    cases.loaded(write(plain, kind, tmp_path), plain, x)


@pytest.mark.parametrize("kind", [".weights.h5", ".h5", ".keras", ".tf", ""])
@pytest.mark.filterwarnings("ignore:.*HDF5", "ignore:Skipping variable loading for optimizer")
def test_files_of_other_models_change_nothing(kind, tmp_path):
    x = keras.Input((1,), dtype="int64")
    other = keras.Model(x, keras.layers.Embedding(ROWS, 4, name="table_a")(x))
    path = write(other, kind, tmp_path)
    model = cases.refusing(path, "plain")
    with pytest.raises(ValueError, match="by_name=True is not supported"):
        model.load_weights(path, by_name=True)


def test_summary_shows_what_the_servers_hold():
    lines = []
    embed.distributed_model(two_fields()).summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert "Params on the servers: 720" in text
    assert "table linear_a: 80 rows × 1, float32" in text


def test_predict_before_compile():
    cases.assert_predicts_before_compile()
