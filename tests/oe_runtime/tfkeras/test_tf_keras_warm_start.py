"""A converted model of tf-keras goes on from the weights that it was given."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tf_keras_models import ROWS, keras, permutations, random_ids, rows, two_fields

import oe_runtime.tf_keras as embed
from oe_runtime.errors import CheckpointError

TABLES = ("table_a", "table_b", "linear_a")


def trained():
    """A plain model after some steps, and data."""
    x, y = permutations(batches=4)
    plain = two_fields()
    plain.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    plain.fit(x, y, batch_size=ROWS, epochs=3, verbose=0)
    return plain, x, y


def converted(plain, client=None, **options):
    model = embed.distributed_model(plain, client, **options)
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return model


def assert_rows_of(model, plain):
    for name in TABLES:
        np.testing.assert_allclose(rows(model, name), plain.get_layer(name).get_weights()[0], atol=1e-7)


def test_a_trained_model_goes_on_from_its_rows():
    plain, x, y = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tf-keras's, of initializers that are called twice
        model = embed.distributed_model(plain)
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    assert_rows_of(model, plain)
    plain.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    for one in (model, plain):
        one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)


def test_an_untrained_model_has_the_rows_of_its_initializer(monkeypatch):
    monkeypatch.setattr("oe_runtime.client.Client.assign", None)
    found = [rows(converted(two_fields(), seed=1), "table_a") for _ in range(2)]
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

    model = converted(Three())
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
    plain, x, _ = trained()
    path = write(plain, kind, tmp_path)
    late = converted(two_fields())
    late.load_weights(path)
    early = embed.distributed_model(two_fields())
    early.load_weights(path)
    early.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    for model in (late, early):
        assert_rows_of(model, plain)
        assert [w.name for w in model.weights] == [
            f"{layer}/{part}:0" for layer in ("hidden", "logit") for part in ("kernel", "bias")
        ]
        np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize("kind", [".weights.h5", ".h5", ".keras", ".tf", ""])
@pytest.mark.filterwarnings("ignore:.*HDF5", "ignore:Skipping variable loading for optimizer")
def test_files_of_other_models_change_nothing(kind, tmp_path):
    x = keras.Input((1,), dtype="int64")
    other = keras.Model(x, keras.layers.Embedding(ROWS, 4, name="table_a")(x))
    path = write(other, kind, tmp_path)
    model = converted(two_fields())
    x, y = random_ids(64)
    model.fit(x, y, verbose=0)
    before = model.predict(x, verbose=0)
    with pytest.raises(CheckpointError, match="plain"):
        model.load_weights(path)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    with pytest.raises(ValueError, match="by_name=True is not offered"):
        model.load_weights(path, by_name=True)


def test_summary_shows_what_the_servers_hold():
    lines = []
    embed.distributed_model(two_fields()).summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert "Params on the servers: 720" in text
    assert "table linear_a: 80 rows × 1, float32" in text
