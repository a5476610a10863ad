"""A converted model trains as it was written, or is refused by name."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, copy_rows, pair, permutations, random_ids, same, two_fields

import oe_runtime.keras as embed
from oe_runtime import Client

Stock = keras.layers.Embedding


class Scaled(Stock):
    def call(self, inputs):
        return super().call(inputs) * 100.0


class Masked(Stock):
    def compute_mask(self, inputs, mask=None):
        return keras.ops.not_equal(inputs, 7)


class Biased(Stock):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = self.add_weight(shape=(1,), name="bias")


class Clipped:
    def __call__(self, *args, **kwargs):
        return keras.ops.clip(super().__call__(*args, **kwargs), -1, 1)


class Mixed(Clipped, Stock):
    pass


class Named(Stock):
    """What it adds is not about the rows."""

    _note = "ours"

    def __init__(self, *args, owner="me", **kwargs):
        super().__init__(*args, **kwargs)
        self.owner = owner

    call = Stock.call

    def get_config(self):
        return {**super().get_config(), "owner": self.owner}

    def rows(self):
        return self.input_dim


def _model(kind):
    x = keras.Input((1,), dtype="int64")
    return keras.Model(x, keras.layers.Dense(1, name="out")(kind(100, 2, name="here")(x)))


REFUSED = [
    (Scaled, r"test_keras_convert\.Scaled overrides call,"),
    (Masked, "Masked overrides compute_mask,"),
    (Biased, "Biased has more weights than embeddings: bias,"),
    (Mixed, "Mixed overrides __call__,"),
]
if hasattr(keras.layers, "ReversibleEmbedding"):
    REFUSED.append((keras.layers.ReversibleEmbedding, "ReversibleEmbedding overrides .*call"))


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_subclasses_are_refused(kind, message):
    stock = _model(kind)
    with pytest.raises(ValueError, match=message) as error:
        embed.distributed_model(stock)
    assert "'here'" in str(error.value)
    assert "in_worker=['here']" in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = embed.distributed_model(stock, in_worker=["here"])
    assert type(model.get_layer("here")) is kind
    ids = np.arange(8)[:, None]
    np.testing.assert_array_equal(model(ids), stock(ids))


def test_a_changed_call_of_one_layer_is_refused():
    stock = _model(Stock)
    layer = stock.get_layer("here")
    layer.call = lambda inputs: Stock.call(layer, inputs) * 2
    with pytest.raises(ValueError, match=r"'here': .*Embedding overrides call"):
        embed.distributed_model(stock)


def test_a_refused_layer_inside_of_a_layer_of_a_subclassed_model():
    class Tower(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.lookups = {"users": Scaled(100, 2, name="users")}

        def call(self, x):
            return self.lookups["users"](x)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = Tower()

        def call(self, x):
            return self.tower(x)

    with pytest.raises(ValueError, match=r"'users': .*Scaled overrides call"):
        embed.distributed_model(Model())
    assert not embed.distributed_model(Model(), in_worker=["users"]).served.layers


def test_harmless_subclasses_are_converted():
    assert type(embed.distributed_model(_model(Named)).get_layer("here")) is embed.Embedding


class Trains(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class Weighs(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 100 * super().compute_loss(*args, **kwargs)


class Multiplies(keras.Model):
    def call(self, *args, **kwargs):
        return 100 * super().call(*args, **kwargs)


class Steps(keras.Sequential):
    train_step = Trains.train_step


class Built(keras.Model):
    """Which only builds its graph and describes itself."""

    def __init__(self):
        x = keras.Input((1,), dtype="int64")
        super().__init__(x, keras.layers.Dense(1)(Stock(100, 2, name="here")(x)))

    def summary(self, *args, **kwargs):
        return super().summary(*args, **kwargs)


def _layers():
    return [keras.Input((1,), dtype="int64"), Stock(100, 2, name="here"), keras.layers.Dense(1)]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Trains, "Trains overrides train_step,"),
        (Weighs, "Weighs overrides compute_loss,"),
        (Multiplies, "Multiplies overrides call,"),
        (Steps, "Steps overrides train_step,"),
    ],
)
def test_a_model_with_a_graph_and_methods_of_its_own_is_refused(kind, message):
    """Its copy would be trained with Keras's."""
    if kind is Steps:
        stock = Steps(_layers())
    else:
        plain = _model(Stock)
        stock = kind(plain.input, plain.output)
    with pytest.raises(ValueError, match=message):
        embed.distributed_model(stock)


@pytest.mark.parametrize("step", ["train_step", "predict_step", "make_train_function"])
def test_a_subclassed_model_with_steps_of_its_own_is_refused(step):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.here = Stock(100, 2)

        def call(self, x):
            return self.here(x)

    embed.distributed_model(Model())
    setattr(Model, step, lambda self, *args, **kwargs: getattr(keras.Model, step)(self, *args, **kwargs))
    with pytest.raises(ValueError, match=f"Model overrides {step}"):
        embed.distributed_model(Model())


def test_a_method_of_one_model_is_refused():
    stock = _model(Stock)
    stock.compute_loss = lambda *args, **kwargs: 0.0
    with pytest.raises(ValueError, match="overrides compute_loss,"):
        embed.distributed_model(stock)


def test_harmless_models_are_converted():
    assert list(embed.distributed_model(Built()).served.layers) == ["here"]
    inner = _model(Stock)
    inner = Multiplies(inner.input, inner.output)  # inside of another it stays of its class
    x = keras.Input((1,), dtype="int64")
    stock = keras.Model(x, inner(x))
    model = embed.distributed_model(stock)
    model.compile("sgd", "mse")
    stock.get_layer(inner.name).get_layer("here").set_weights(
        [model.served.layers["here"].table.rows(np.arange(100))]
    )
    ids = np.arange(8)[:, None]
    np.testing.assert_allclose(model(ids), stock(ids), rtol=1e-6)


def test_a_model_inside_that_is_meant_to_stay():
    tower = keras.Sequential(_layers(), name="tower")
    x = keras.Input((1,), dtype="int64")
    stock = keras.Model(x, tower(x))
    assert embed.distributed_model(stock).served.layers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = embed.distributed_model(stock, in_worker=["tower"])
    assert not model.served.layers
    ids = np.arange(8)[:, None]
    np.testing.assert_array_equal(model(ids), stock(ids))


def test_layers_that_models_inside_share_stay_shared():
    x = keras.Input((1,), dtype="int64")
    lookup, dense = Stock(100, 2, name="here"), keras.layers.Dense(2, name="shared")
    inner = keras.Model(x, dense(lookup(x)), name="inner")
    other = keras.Model(x, keras.layers.Dense(2)(dense(lookup(x))), name="other")
    stock = keras.Model(x, keras.layers.Add()([inner(x), other(x), dense(lookup(x))]))
    model = embed.distributed_model(stock)
    assert list(model.served.layers) == ["here"]
    assert len(model.weights) == len(stock.weights) - 1
    assert [v.path for v in model.trainable_variables] == [v.path for v in stock.trainable_variables]
    assert model.get_layer("inner").get_layer("shared") is model.get_layer("shared")


@keras.saving.register_keras_serializable("tests")
class Tied(keras.layers.Layer):
    """A product with the matrix of another layer."""

    def __init__(self, lookup, **kwargs):
        super().__init__(**kwargs)
        self.lookup = lookup

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.lookup.embeddings))

    def get_config(self):
        return {**super().get_config(), "lookup": keras.saving.serialize_keras_object(self.lookup)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("lookup")), **config)


def test_tied_weights_are_refused():
    x = keras.Input((1,), dtype="int64")
    lookup = Stock(100, 2, name="here")
    stock = keras.Model(x, Tied(lookup, name="tied")(lookup(x)))
    with pytest.raises(ValueError, match="layers 'here' and 'tied' share the weight embeddings, which their"):
        embed.distributed_model(stock)


def test_names_of_no_layer():
    with pytest.raises(ValueError, match=r"in_worker: the model has no layer 'there'; it has here, .*out"):
        embed.distributed_model(_model(Stock), in_worker=["there"])
    with pytest.raises(ValueError, match=r"in_worker=\['here'\]"):
        embed.distributed_model(_model(Stock), in_worker="here")


class Linear(keras.layers.Layer):
    """A table that no Embedding says is one."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=(200_000, 1), name="table")

    def call(self, ids):
        return keras.ops.take(self.table, ids, axis=0)


def test_large_weights_that_stay_are_named():
    x = keras.Input((), dtype="int64")
    stock = keras.Model(x, keras.layers.Dense(1)(Linear(name="wide")(x)))
    message = r"'wide' \(Linear\): table \(200000, 1\) stays in the worker's memory"
    with pytest.warns(UserWarning, match=message):
        embed.distributed_model(stock)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.wide = Linear(name="wide")
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.wide(x))

    model = embed.distributed_model(Model())
    model.compile("sgd", "mse")
    ids, y = np.arange(8), np.zeros((8, 1))
    with pytest.warns(UserWarning, match=message):
        model.fit(ids, y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(ids, y, verbose=0)
        embed.distributed_model(stock, in_worker=["wide"])


def _step(model, x, y, tape):
    with tape() as t:
        loss = keras.losses.BinaryCrossentropy()(y, model(x, training=True))
    gradients = t.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def _train(model, x, y, batch, tape, graph=False):
    def step(x, y):
        return _step(model, x, y, tape)

    if graph:
        model.optimizer.build(model.trainable_variables)
        step = tf.function(step)
    parts = [slice(begin, begin + batch) for begin in range(0, len(y), batch)]
    return np.array([step([tf.constant(a[p]) for a in x], tf.constant(y[p])) for p in parts])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
def test_a_loop_with_embed_gradient_tape_trains_as_with_tf_gradient_tape(graph):
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, decay_steps=1, decay_rate=0.5)
    for optimizer, (x, y) in (
        (lambda: keras.optimizers.SGD(rate), random_ids(3 * ROWS)),  # which repeat in a batch
        (lambda: keras.optimizers.Adam(rate, epsilon=1e-3), permutations(3)),
    ):
        model, stock = pair(optimizer)
        ours = _train(model, x, y, ROWS, lambda model=model: embed.GradientTape(model), graph)
        np.testing.assert_allclose(ours, _train(stock, x, y, ROWS, tf.GradientTape), rtol=1e-5)
        same(model, stock, x)


def test_a_table_looked_up_twice_is_pushed_once():
    a, b = (keras.Input((2,), dtype="int64", name=name) for name in "ab")
    table = Stock(80, 4, name="table")
    both = keras.layers.Concatenate()([table(a), table(b)])
    stock = keras.Model([a, b], keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(both)))
    model = embed.distributed_model(stock)
    for one in (model, stock):
        one.compile(keras.optimizers.SGD(0.5, momentum=0.9), "binary_crossentropy")
    copy_rows(model, stock)
    rng = np.random.default_rng(0)
    x = [np.stack([rng.permutation(80) for _ in range(2)], 1) for _ in "ab"]  # each row in the batch
    y = rng.integers(0, 2, (80, 1)).astype("float32")
    x, y = [np.concatenate([a, a]) for a in x], np.concatenate([y, y])
    ours = _train(model, x, y, 80, lambda: embed.GradientTape(model))
    np.testing.assert_allclose(ours, _train(stock, x, y, 80, tf.GradientTape), rtol=1e-5)
    same(model, stock, x)


def test_other_tapes_are_refused_in_the_first_call():
    model, _ = pair()
    x, y = random_ids(40)
    x = [tf.constant(a) for a in x]
    with pytest.raises(RuntimeError, match=r"'table_.' is called under .*with embed.GradientTape\(model\)"):
        _train(model, x, y, 40, tf.GradientTape)
    with pytest.raises(RuntimeError, match=r"with embed.GradientTape\(model\)"):
        _train(model, x, y, 40, tf.GradientTape, graph=True)
    with tf.GradientTape() as tape:
        with tape.stop_recording():
            model(x)
        model.fit(x, y, verbose=0)
        model.predict(x, verbose=0)
    model.trainable = False
    with tf.GradientTape():
        model(x)


@pytest.mark.parametrize("tape", [tf.GradientTape, embed.GradientTape])
def test_a_function_that_was_traced_before_a_tape(tape):
    """Its pulls are in the graph already, so that no call of a layer can refuse."""
    model, _ = pair()
    x = [tf.constant(a) for a in random_ids(8)[0]]
    call = tf.function(lambda x: model(x, training=True))
    call(x)
    given = [model] if tape is embed.GradientTape else []
    with (
        tape(*given),
        pytest.raises(RuntimeError, match=r"'.*_[ab]' is called in a tf.function under a GradientTape"),
    ):
        call(x)
    np.testing.assert_allclose(call(x), model(x))


def test_unsupported_options_of_embed_gradient_tape_are_refused():
    model = embed.distributed_model(two_fields())
    with pytest.raises(RuntimeError, match="compile the model first"):
        embed.GradientTape(model)
    model.compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), "mse")
    with pytest.raises(ValueError, match="gradient_accumulation_steps is not offered; train with fit"):
        embed.GradientTape(model)
    with pytest.raises(TypeError, match="the model is a Functional, not one of distributed_model"):
        embed.GradientTape(two_fields())
    model, other = (pair()[0] for _ in range(2))
    x = [tf.constant(a) for a in random_ids(8)[0]]
    with embed.GradientTape(model), pytest.raises(RuntimeError, match=r"'table_.' is of another model"):
        other(x)
    with embed.GradientTape(model), pytest.raises(RuntimeError, match=r"called in a tf.function, but"):
        tf.function(model)(x)
    with embed.GradientTape(model) as tape:
        y = model(x)
    with pytest.raises(ValueError, match="jacobians do not train rows"):
        tape.jacobian(y, model.trainable_variables)


def test_ragged_and_sparse_inputs_are_refused_in_one_sentence():
    x = keras.Input((None,), dtype="int64", name="tags")
    pooled = keras.layers.GlobalAveragePooling1D()(Stock(100, 2)(x))
    model = embed.distributed_model(keras.Model({"tags": x}, keras.layers.Dense(1)(pooled)))
    model.compile("sgd", "mse")
    y = np.zeros((4, 1), np.float32)
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(12), [3, 3, 3, 3])
    sparse = tf.sparse.from_dense(np.arange(12).reshape(4, 3))
    for data in (ragged, sparse):
        batches = tf.data.Dataset.from_tensor_slices(({"tags": data}, y)).batch(2)
        with pytest.raises(ValueError, match=r"input 'tags' is a .*Dataset.padded_batch .*mask_zero=True"):
            model.fit(batches, verbose=0)


def test_the_former_names_of_a_workers_stop_requests_work_with_a_notice():
    class Two:
        rank, count = 0, 2
        wish, wishes = "mine", "all"

    workers = Two()
    ids = keras.Input((1,), dtype="int64")
    model = keras.Model(ids, keras.layers.Embedding(100, 4, name="here")(ids))
    with pytest.warns(UserWarning, match=r"Workers\.wish and \.wishes are now"):
        embed.distributed_model(model, Client.in_process(), workers=workers)
    assert (workers.stop_request, workers.stop_requests) == ("mine", "all")
