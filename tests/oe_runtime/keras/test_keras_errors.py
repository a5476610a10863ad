"""One clear error that names the layer, the option or the table."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
from keras_models import random_ids, two_fields

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import KeyRangeError, SpecMismatch


class _AddsLoss(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.sum(inputs))
        return inputs


@pytest.mark.parametrize(
    "layer",
    [keras.layers.Dense(1, activity_regularizer="l2", name="adds"), _AddsLoss(name="adds")],
    ids=lambda layer: type(layer).__name__,
)
def test_jit_compile_with_a_loss_of_a_layer(layer):
    x = keras.Input((1,), dtype="int64")
    rows = keras.layers.Flatten()(embed.Embedding(5, 3, name="t")(x))
    model = embed.distributed_model(keras.Model(x, layer(rows)))
    model.compile("sgd", "mse", jit_compile=True)
    data = np.array([[1], [2]]), np.zeros((2, layer(np.zeros((1, 3), np.float32)).shape[-1]))
    with pytest.raises(
        ValueError, match=r"^layer 'adds' adds a loss .* with jit_compile=True; compile without"
    ):
        model.fit(*data, verbose=0)
    model.compile("sgd", "mse")
    model.fit(*data, verbose=0)


def test_a_directory_that_is_named_like_a_keras_file(tmp_path):
    model = embed.distributed_model(two_fields())
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"ends in \.keras, but .* is a directory.*model\.load_weights"):
        model.save(tmp_path / "best.keras")
    model.load_weights(tmp_path / "best.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save(tmp_path / "best")


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (
            keras.optimizers.Ftrl(use_ema=True),
            r"\(use_ema=True\): the average of a row .*; leave use_ema out",
        ),
        (keras.optimizers.Adam(loss_scale_factor=2.0), "loss_scale_factor"),
        (
            keras.optimizers.Adam(gradient_accumulation_steps=2, clipnorm=1.0),
            r"\(gradient_accumulation_steps=2\): clipping needs",
        ),
        (keras.optimizers.Adafactor(), "Adafactor"),
        (keras.optimizers.Lamb(), "Lamb"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_optimizers(optimizer, named):
    with pytest.raises(ValueError, match=named):
        embed.distributed_optimizer(optimizer)
    model = embed.distributed_model(two_fields())
    with pytest.raises(ValueError, match=named):
        model.compile(optimizer, "mse")
    assert not model.compiled


def test_gradient_accumulation_with_staleness_and_under_a_tape():
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2)
    model = embed.distributed_model(two_fields(), staleness=1)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps does not work with .* staleness=1"):
        model.compile(optimizer, "mse")
    model = embed.distributed_model(two_fields())
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps is not offered; train with fit"):
        embed.GradientTape(model)


def test_supported_optimizers_are_returned():
    optimizer = keras.optimizers.Adagrad(0.1)
    assert embed.distributed_optimizer(optimizer) is optimizer
    assert isinstance(embed.distributed_optimizer("ftrl"), keras.optimizers.Ftrl)


def _one_table(**options):
    x = keras.Input((1,), dtype="int64")
    return keras.Model(x, keras.layers.Embedding(100, 2, name="here", **options)(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings_initializer": "orthogonal"}, "Orthogonal makes the rows .* depend"),
        ({"embeddings_initializer": "identity"}, "Identity makes the rows .* depend"),
        (
            {"embeddings_initializer": keras.initializers.RandomUniform(seed=-1)},
            "seed must be an integer ≥ 0",
        ),
        (
            {"embeddings_regularizer": keras.regularizers.OrthogonalRegularizer()},
            "embeddings_regularizer OrthogonalRegularizer is not supported",
        ),
        ({"embeddings_constraint": "non_neg"}, "embeddings_constraint is not supported"),
        ({"lora_rank": 2}, "lora_rank is not supported"),
        ({"dtype": "int32", "embeddings_initializer": "zeros"}, "keeps variables as int32"),
    ],
)
def test_unsupported_layers(options, message):
    with pytest.raises(ValueError, match=message) as error:
        embed.distributed_model(_one_table(**options), explicit=True)
    assert "'here'" in str(error.value)
    embed.distributed_model(_one_table(**options), sparse_as_dense_size=101)  # it stays an ordinary layer


def test_bad_arguments_of_the_layer():
    for arguments in ((0, 2), (-2, 2), (10, 0), (10, None), ("10", 2)):
        with pytest.raises(ValueError, match=r"Embedding '.*': (input|output)_dim must be an integer"):
            embed.Embedding(*arguments)


def test_small_embeddings_stay():
    model = embed.distributed_model(_one_table(), sparse_as_dense_size=101)
    assert type(model.get_layer("here")) is keras.layers.Embedding
    assert (
        type(embed.distributed_model(_one_table(), sparse_as_dense_size=100).get_layer("here"))
        is embed.Embedding
    )


def test_translated_initializers():
    for given, expected in (
        ("ones", {"name": "constant", "value": 1.0, "seed": 4}),
        ("zeros", {"name": "zeros", "seed": 4}),
        (
            keras.initializers.RandomNormal(0.5, 0.25, seed=9),
            {"name": "normal", "mean": 0.5, "stddev": 0.25, "seed": 9},
        ),
        (
            keras.initializers.TruncatedNormal(0.5, 0.25, seed=9),
            {"name": "truncated_normal", "mean": 0.5, "stddev": 0.25, "seed": 9},
        ),
    ):
        model = embed.distributed_model(_one_table(embeddings_initializer=given), seed=4, name_prefix="x/")
        model.compile("sgd", "mse")
        assert dict(model.tables["x/here"].initializer) == expected


SCALED = [
    keras.initializers.GlorotUniform(),
    keras.initializers.GlorotNormal(),
    keras.initializers.HeUniform(),
    keras.initializers.HeNormal(),
    keras.initializers.LecunUniform(),
    keras.initializers.LecunNormal(),
    keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
    keras.initializers.VarianceScaling(3.0, "fan_avg", "uniform"),
]


@pytest.mark.parametrize("initializer", SCALED, ids=lambda i: type(i).__name__)
def test_variance_scaling(initializer):
    """Rows have the mean, the deviation and the range that Keras's own values have."""
    rows, dim = 3000, 20
    x = keras.Input((1,), dtype="int64")
    stock = keras.Model(x, keras.layers.Embedding(rows, dim, initializer, name="here")(x))
    model = embed.distributed_model(stock, seed=3)
    model.compile("sgd", "mse")
    ours = model.get_layer("here").table.rows(np.arange(rows))
    theirs = stock.get_layer("here").get_weights()[0]
    deviation = theirs.std()
    assert abs(ours.mean()) < 4 * deviation / np.sqrt(ours.size)
    assert ours.std() == pytest.approx(deviation, rel=0.02)
    if initializer.distribution != "untruncated_normal":
        assert np.abs(ours).max() == pytest.approx(np.abs(theirs).max(), rel=0.01)


@pytest.mark.parametrize("initializer", SCALED, ids=lambda i: f"{type(i).__name__}-{i.mode}")
def test_variance_scaling_without_a_number_of_rows(initializer):
    if initializer.mode == "fan_out":
        layer = embed.Embedding(-1, 8, initializer)
        assert layer.initializer_spec(0)["stddev"] == pytest.approx(np.sqrt(2 / 8))
        return
    with pytest.raises(ValueError, match=r"'any': .*divides by the number of rows"):
        embed.Embedding(-1, 8, initializer, name="any")


def test_a_layer_without_servers():
    x = keras.Input((1,), dtype="int64")
    model = keras.Model(x, embed.Embedding(-1, 2, name="here")(x))
    with pytest.raises(RuntimeError, match="'here' has no table yet"):
        model(np.ones((1, 1), np.int64))
    distributed = embed.distributed_model(model)
    for use in (distributed.predict, distributed):  # as plain Keras, before compile
        assert use(np.ones((1, 1), np.int64)).shape == (1, 1, 2)
    with pytest.raises(RuntimeError, match="compile the model first"):
        distributed.prefetch(np.ones((1, 1), np.int64))
    with pytest.raises(RuntimeError, match="table 'here' does not exist yet"):
        _ = distributed.tables


def test_models_that_cannot_be_copied():
    with pytest.raises(ValueError, match="functional"):
        embed.distributed_model(keras.Sequential([keras.layers.Dense(1)]))  # without an Input
    with pytest.raises(ValueError, match=r"keras\.Model is needed, not Dense"):
        embed.distributed_model(keras.layers.Dense(1))

    class Odd(keras.layers.Layer):
        def __init__(self, size, weight, **kwargs):
            super().__init__(**kwargs)
            self.size, self.weight = size, weight

        def build(self, input_shape):
            if self.weight:
                self.scale = self.add_weight(shape=(1,))

        def call(self, inputs):
            return inputs

    x = keras.Input((1,))
    with pytest.raises(ValueError, match=r"layer 'odd' .* cannot be copied, because it has weights"):
        embed.distributed_model(keras.Model(x, Odd(object(), True, name="odd")(x)))
    stock = keras.Model(x, Odd(object(), False, name="odd")(x))
    old, new = (model.get_layer("odd") for model in (stock, embed.distributed_model(stock)))
    assert new is not old
    assert new.size is old.size
    assert len(new._inbound_nodes) == len(old._inbound_nodes) == 1  # neither knows the other's graph


def test_two_layers_of_one_name():
    x = keras.Input((1,), dtype="int64")
    models = []
    for name in ("left", "right"):
        inner = keras.Input((1,), dtype="int64")
        models.append(keras.Model(inner, embed.Embedding(-1, 2, name="same")(inner), name=name))
    with pytest.raises(ValueError, match="two embedding layers have the name 'same'"):
        embed.distributed_model(keras.Model(x, [m(x) for m in models]))


def test_sequential_models_and_hidden_embeddings():
    stock = keras.Sequential([keras.Input((3,), dtype="int64"), keras.layers.Embedding(100, 2, name="e")])
    model = embed.distributed_model(stock)
    model.compile("sgd", "mse")
    assert list(model.tables) == ["e"]
    x = keras.Input((2, 3), dtype="int64")
    hidden = keras.Model(x, keras.layers.TimeDistributed(keras.layers.Embedding(100, 2, name="hidden"))(x))
    with pytest.warns(UserWarning, match="'hidden' .*stays an ordinary Keras embedding"):
        embed.distributed_model(hidden)


def test_another_optimizer_for_tables_that_exist():
    with Client.in_process() as client:
        embed.distributed_model(two_fields(), client).compile("adagrad", "mse")
        other = embed.distributed_model(two_fields(), client)
        with pytest.raises(SpecMismatch, match="optimizer"):
            other.compile("adam", "mse")
        embed.distributed_model(two_fields(), client, name_prefix="other/").compile("adam", "mse")


def test_ids_out_of_range():
    model = embed.distributed_model(two_fields())
    model.compile("sgd", "mse")
    x, y = random_ids(10)
    x[0][3] = 80
    with pytest.raises(KeyRangeError, match="80"):
        model.fit(x, y, verbose=0)
    with pytest.raises(KeyRangeError, match="80"):
        model.predict(x, verbose=0)
