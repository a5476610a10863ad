"""Models of tf-keras 2: a converted one trains as it was written, or is refused by name."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from tf_keras_models import ROWS, keras, pair, random_ids, rows, two_fields

import oe_runtime.tf_keras as embed

Stock = keras.layers.Embedding


class Scaled(Stock):
    def call(self, inputs):
        return super().call(inputs) * 100.0


class Biased(Stock):
    def build(self, input_shape=None):
        self.bias = self.add_weight("bias", (1,))
        super().build(input_shape)


class Named(Stock):
    def get_config(self):
        return super().get_config()


def _model(kind):
    x = keras.Input((1,), dtype="int64")
    return keras.Model(x, keras.layers.Dense(1)(kind(100, 2, name="here")(x)))


@pytest.mark.parametrize(
    ("kind", "message"), [(Scaled, "Scaled overrides call,"), (Biased, "Biased overrides build,")]
)
def test_subclasses_are_refused(kind, message):
    with pytest.raises(ValueError, match=f"'here': .*{message}"):
        embed.distributed_model(_model(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = embed.distributed_model(_model(kind), in_worker=["here"])
    assert type(model.get_layer("here")) is kind


def test_sparse_outputs_are_refused():
    x = keras.Input((1,), dtype="int64")
    with pytest.raises(ValueError, match="'here': sparse=True is not supported"):
        embed.distributed_model(keras.Model(x, Stock(100, 2, sparse=True, name="here")(x)))


def test_harmless_subclasses_are_converted():
    assert type(embed.distributed_model(_model(Named)).get_layer("here")) is embed.Embedding


def test_a_state_and_gradients_in_two_bytes():
    """Those of the model, unless a layer says otherwise."""
    dtypes = {"state_dtype": "bfloat16", "exchange_dtype": "bfloat16"}
    model = embed.distributed_model(two_fields(), **dtypes)
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.1)), "binary_crossentropy")
    x, y = random_ids(100)
    model.fit(x, y, verbose=0)
    layer = embed.Embedding.from_config(embed.Embedding(9, 2, **dtypes).get_config())
    for field in dtypes:
        assert {getattr(table, field) for table in model.tables.values()} == {"bfloat16"}
        assert getattr(layer, field) == "bfloat16"


def test_activity_regularizer():
    option = {"activity_regularizer": keras.regularizers.L2(0.5)}
    model, plain = pair(lambda: keras.optimizers.SGD(0.5), table_a=option)
    again = embed.distributed_model(embed.distributed_model(two_fields(**option)))
    assert again.get_layer("table_a").activity_regularizer is not None
    copied = embed.Embedding.from_config(model.get_layer("table_a").get_config())
    assert copied.activity_regularizer is not None
    x, y = random_ids(100)
    options = {"batch_size": 40, "shuffle": False, "verbose": 0}
    losses = [one.fit(x, y, **options).history["loss"] for one in (model, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for name in model.tables:
        np.testing.assert_allclose(rows(model, name), plain.get_layer(name).get_weights()[0], atol=1e-5)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_loop_with_embed_gradient_tape_trains_as_with_tf_gradient_tape(graph):
    model, plain = pair(lambda: keras.optimizers.SGD(0.5))
    x, y = random_ids(2 * ROWS)
    x = [tf.constant(a) for a in x]

    def train(model, tape):
        with tape() as t:
            loss = keras.losses.BinaryCrossentropy()(y, model(x, training=True))
        gradients = t.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    model.optimizer.build(model.trainable_variables)
    step = tf.function(train) if graph else train
    ours_of = functools.partial(embed.GradientTape, model)
    for _ in range(2):
        ours = step(model, ours_of)
        np.testing.assert_allclose(ours, train(plain, tf.GradientTape), rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"'table_.' is called under .*embed.GradientTape\(model\)"):
        train(model, tf.GradientTape)


class Multiplies(keras.Model):
    def call(self, *args, **kwargs):
        return 100 * super().call(*args, **kwargs)


def test_a_model_with_a_graph_and_more_than_that_is_refused():
    """Its copy would be trained without."""
    plain = _model(Stock)
    with pytest.raises(ValueError, match="Multiplies overrides call,"):
        embed.distributed_model(Multiplies(plain.input, plain.output))
    for addition, add in {
        "add_loss": lambda model: model.add_loss(tf.reduce_mean(model.output)),
        "add_metric": lambda model: model.add_metric(tf.reduce_mean(model.output), "mean"),
    }.items():
        stock = _model(Stock)
        add(stock)
        with pytest.raises(ValueError, match=f"{addition} of a model is not supported here"):
            embed.distributed_model(stock)


def test_layers_that_models_inside_share_stay_shared():
    x = keras.Input((1,), dtype="int64")
    lookup, dense = Stock(100, 2, name="here"), keras.layers.Dense(2, name="shared")
    inner = keras.Model(x, dense(lookup(x)), name="inner")
    stock = keras.Model(x, keras.layers.Add()([inner(x), dense(lookup(x))]))
    model = embed.distributed_model(stock)
    assert list(model.served.layers) == ["here"]
    assert model.get_layer("inner").get_layer("shared") is model.get_layer("shared")
    wrapped = keras.layers.TimeDistributed(dense, name="wrapped")
    stock = keras.Model(x, keras.layers.Add()([dense(lookup(x)), wrapped(lookup(x))]))
    with pytest.raises(ValueError, match=r"'\w+' and '\w+' share the weight .*kernel"):
        embed.distributed_model(stock)


def test_a_model_inside_that_is_meant_to_stay():
    x = keras.Input((1,), dtype="int64")
    tower = keras.Sequential([keras.Input((1,), dtype="int64"), Stock(100, 2)], name="tower")
    stock = keras.Model(x, keras.layers.Dense(1)(tower(x)))
    assert embed.distributed_model(stock).served.layers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not embed.distributed_model(stock, in_worker=["tower"]).served.layers


def test_feature_columns_are_named():
    known = tf.feature_column.categorical_column_with_hash_bucket("tag", 5000)
    columns = [tf.feature_column.embedding_column(known, 4), tf.feature_column.numeric_column("number")]
    inputs = {
        "tag": keras.Input((1,), dtype="string", name="tag"),
        "number": keras.Input((1,), name="number"),
    }
    x = keras.layers.DenseFeatures(columns, name="features")(inputs)
    stock = keras.Model(inputs, keras.layers.Dense(1)(x))
    with pytest.warns(
        UserWarning, match=r"'features' \(DenseFeatures\): its column 'tag_embedding' \(5000 rows\)"
    ):
        model = embed.distributed_model(stock)
    x = {"tag": tf.constant([["a"], ["b"]]), "number": tf.constant([[1.0], [2.0]])}
    np.testing.assert_array_equal(model(x), stock(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embed.distributed_model(stock, in_worker=["features"])


def test_ragged_inputs_are_refused_in_one_sentence():
    model = embed.distributed_model(_model(Stock))
    model.compile("sgd", "mse")
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(4), [1, 1, 1, 1])
    batches = tf.data.Dataset.from_tensor_slices((ragged, np.zeros((4, 1), np.float32))).batch(2)
    with pytest.raises(ValueError, match=r"is a RaggedTensor.*Dataset.padded_batch .*mask_zero=True"):
        model.fit(batches, verbose=0)
