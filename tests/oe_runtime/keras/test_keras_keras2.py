"""Layers written for Keras 2, as DeepCTR's are."""

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime import Client


class OldDense(keras.layers.Layer):
    """Names its weights as Keras 2's layers did."""

    def build(self, input_shape):
        self.kernel = self.add_weight("old_kernel", (input_shape[-1], 1), initializer="ones")
        self.bias = self.add_weight(shape=(1,), name="old_bias", initializer="zeros")
        self.scale = self.add_weight((1,), "ones", name="scale")

    def call(self, x):
        return (keras.ops.matmul(x, self.kernel) + self.bias) * self.scale


def old_model():
    ids = keras.Input((1,), dtype="int64")
    rows = keras.layers.Flatten()(keras.layers.Embedding(100, 4, "ones")(ids))
    return keras.Model(ids, OldDense()(rows))


def test_weights_named_by_position(monkeypatch):
    monkeypatch.setattr(
        keras.layers.Layer, "add_weight", keras.layers.Layer.add_weight
    )  # put back at the end
    with pytest.raises((TypeError, ValueError)):
        old_model()
    embed.accept_keras2_layers()
    embed.accept_keras2_layers()
    model = old_model()
    assert [variable.name for variable in model.layers[-1].variables] == ["old_kernel", "old_bias", "scale"]
    ids = np.arange(8)[:, None]
    with Client.in_process() as client:
        model = embed.distributed_model(model, client)
        model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.1)), "mse")
        np.testing.assert_allclose(model.predict(ids, verbose=0), np.full((8, 1), 4.0))
        losses = model.fit(ids, np.zeros((8, 1)), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_models_and_optimizers_of_tf_keras_are_refused():
    """tf-keras 2 need not be installed: its classes are known by their module."""
    legacy = type("Functional", (), {"__module__": "tf_keras.src.engine.functional"})
    derived = type("Mine", (legacy,), {})
    for refuse in (embed.distributed_model, embed.distributed_optimizer):
        with pytest.raises(
            ValueError,
            match=r"Mine is of tf-keras 2, .* write `import oe_runtime.tf_keras as embed`, or unset",
        ):
            refuse(derived())
