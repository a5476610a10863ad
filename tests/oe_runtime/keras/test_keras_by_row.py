"""Dense layers and sums over embeddings, once for each distinct row of a batch, give what Keras gives."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.keras import by_row

ROWS, DIM = 100, 32


def _model(*, pairwise: bool, shared: bool) -> keras.Model:
    """Three fields of 32, two of them of one table if `shared`; a factorisation machine if `pairwise`."""
    ids = [keras.Input((1,), dtype="int64", name=name) for name in "abc"]
    numbers = keras.Input((3,), name="numbers")
    initializer = keras.initializers.RandomUniform(-0.3, 0.3, seed=1)
    tables = [keras.layers.Embedding(ROWS, DIM, initializer, name=f"table_{name}") for name in "abc"]
    if shared:
        tables[2] = tables[0]
    embeddings = keras.layers.Concatenate(axis=1)([t(i) for t, i in zip(tables, ids, strict=True)])
    x = keras.layers.Concatenate()([numbers, keras.layers.Flatten()(embeddings)])
    logit = keras.layers.Dense(1, name="logit")(keras.layers.Dense(64, "relu", name="hidden")(x))
    if pairwise:
        square = keras.ops.square(keras.ops.sum(embeddings, axis=1))
        squares = keras.ops.sum(keras.ops.square(embeddings), axis=-2, keepdims=True)
        logit += keras.ops.sum(square - squares[:, 0], axis=1, keepdims=True)
    return keras.Model([*ids, numbers], keras.layers.Activation("sigmoid")(logit))


def _data(samples: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, rows, (samples, 1)) for rows in (5, 40, ROWS)]
    numbers = rng.random((samples, 3), dtype=np.float32)
    return [*ids, numbers], ((ids[0] + ids[1] % 3 + numbers[:, :1]) > 3).astype(np.float32)


@pytest.mark.parametrize(
    ("pairwise", "shared"),
    [(True, False), (False, False), (True, True)],
    ids=["pairwise", "dense_only", "shared_table"],
)
def test_equals_stock_keras(pairwise, shared):
    stock = _model(pairwise=pairwise, shared=shared)
    model = embed.distributed_model(stock, Client.in_process(servers=2))
    model.compile(keras.optimizers.SGD(0.2), "binary_crossentropy")
    for name, table in model.served.tables().items():
        stock.get_layer(name).set_weights([table.rows(np.arange(ROWS))])
    stock.compile(keras.optimizers.SGD(0.2), "binary_crossentropy")
    x, y = _data(300)

    ours = model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0).history["loss"]
    theirs = stock.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0).history["loss"]

    programs = list(model._steps._programs.values())
    assert [program._paired for program in programs] == [{0}]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-5)
    for name, table in model.served.tables().items():
        rows = stock.get_layer(name).get_weights()[0]
        np.testing.assert_allclose(table.rows(np.arange(ROWS)), rows, atol=1e-5)


def test_clipped_gradients_are_those_of_ordinary_layers(monkeypatch):
    """Keras itself takes the norm of a gradient for each id, so it is not what to compare with."""
    x, y = _data(300)
    losses = []
    for use_fast_layers in (by_row.use_fast_layers, lambda _model: None):
        monkeypatch.setattr(by_row, "use_fast_layers", use_fast_layers)
        keras.utils.set_random_seed(1)
        model = embed.distributed_model(_model(pairwise=True, shared=False), Client.in_process())
        model.compile(keras.optimizers.SGD(0.2, global_clipnorm=0.05), "binary_crossentropy")
        history = model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0).history
        losses.append(history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_layers_that_see_something_else_are_as_they_were():
    """The ids of a field of two lie side by side, and there is an operation between lookup and layer."""
    ids = keras.Input((2,), dtype="int64")
    x = keras.layers.Embedding(ROWS, DIM, name="table")(ids)
    wide = keras.layers.Dense(64)(keras.layers.Flatten()(x))
    other = keras.layers.Dense(64)(keras.layers.Flatten()(keras.ops.sin(x)))
    out = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([wide, other]))
    stock = keras.Model(ids, out)
    model = embed.distributed_model(stock, Client.in_process())
    model.compile("sgd", "binary_crossentropy")
    rows = model.served.tables()["table"].rows(np.arange(ROWS))
    stock.get_layer("table").set_weights([rows])
    x = np.arange(20).reshape(10, 2)
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-5)
    assert [program._paired for program in model._steps._programs.values()] == [set()]


@pytest.mark.parametrize("dims", [(32, 32, 64), (32, 32, 8)], ids=["a part of a group", "a small dim"])
def test_a_layer_that_sees_other_lookups_too_is_as_it_was(dims):
    """Beside a whole group of two fields of 32: one of the two fields of another dim."""
    ids = [keras.Input((1,), dtype="int64", name=name) for name in "abcd"]
    tables = [
        keras.layers.Embedding(ROWS, dim, "uniform", name=f"table_{name}")
        for name, dim in zip("abcd", (*dims, dims[-1]), strict=True)
    ]
    flat = [keras.layers.Flatten()(t(i)) for t, i in zip(tables, ids, strict=True)]
    hidden = keras.layers.Dense(64)(keras.layers.Concatenate()(flat[:3]))
    stock = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()([hidden, flat[3]])))
    model = embed.distributed_model(stock, Client.in_process())
    model.compile("sgd", "binary_crossentropy")
    for name, table in model.served.tables().items():
        stock.get_layer(name).set_weights([table.rows(np.arange(ROWS))])
    x = [np.arange(20)[:, None] % n for n in (3, 5, 7, 9)]
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-5)


def test_one_lookup_is_computed_by_distinct_row():
    ids = keras.Input((1,), dtype="int64")
    embedding = keras.layers.Flatten()(keras.layers.Embedding(ROWS, DIM, "uniform", name="table")(ids))
    stock = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(64)(embedding)))
    model = embed.distributed_model(stock, Client.in_process())
    model.compile("sgd", "binary_crossentropy")
    stock.get_layer("table").set_weights([model.served.tables()["table"].rows(np.arange(ROWS))])
    x = np.arange(20)[:, None] % 7
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-5)
    assert [program._paired for program in model._steps._programs.values()] == [{0}]


@pytest.mark.parametrize(
    ("over", "by_row_of"),
    [
        (lambda tables: keras.ops.sum(_concatenated(tables), axis=1), {0}),
        (lambda tables: keras.ops.sum(keras.ops.stack(_flat(tables), axis=1), axis=1), {0}),
        (lambda tables: keras.ops.sum(_concatenated(tables) ** 2, axis=1), {0}),
        (lambda tables: keras.ops.sum(_times_itself(_concatenated(tables)), axis=1), {0}),
        (lambda tables: keras.ops.sum(_concatenated(tables), axis=2), set()),
        (lambda tables: keras.ops.sum(_concatenated(tables[:2]), axis=1) * _flat(tables)[2], set()),
        (lambda tables: keras.ops.sum(keras.ops.sin(_concatenated(tables)), axis=1), set()),
        (lambda tables: keras.ops.sum(_halves(tables), axis=1), set()),
    ],
    ids=[
        "concatenated",
        "stacked",
        "powers",
        "products",
        "over dims",
        "a part of a group",
        "of a function",
        "of halves",
    ],
)
def test_sums_of_embeddings(over, by_row_of):
    ids = [keras.Input((1,), dtype="int64", name=name) for name in "abc"]
    tables = [keras.layers.Embedding(ROWS, DIM, "uniform", name=f"table_{name}") for name in "abc"]
    found = [t(i) for t, i in zip(tables, ids, strict=True)]
    stock = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(over(found)))
    model = embed.distributed_model(stock, Client.in_process())
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    stock.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    for name, table in model.served.tables().items():
        stock.get_layer(name).set_weights([table.rows(np.arange(ROWS))])
    (*x, _), y = _data(100)
    for one in (stock, model):
        one.train_on_batch(x, y)
    assert [program._paired for program in model._steps._programs.values()] == [by_row_of]
    for name, table in model.served.tables().items():
        rows = stock.get_layer(name).get_weights()[0]
        np.testing.assert_allclose(table.rows(np.arange(ROWS)), rows, atol=1e-6)


def _concatenated(tables: list[keras.KerasTensor]) -> keras.KerasTensor:
    return keras.layers.Concatenate(axis=1)(tables)


def _times_itself(embeddings: keras.KerasTensor) -> keras.KerasTensor:
    return embeddings * embeddings


def _flat(tables: list[keras.KerasTensor]) -> list[keras.KerasTensor]:
    return [keras.layers.Flatten()(t) for t in tables]


def _halves(tables: list[keras.KerasTensor]) -> keras.KerasTensor:
    """(examples, 6, 16)"""
    return keras.layers.Reshape((2 * len(tables), DIM // 2))(keras.layers.Concatenate()(tables))
