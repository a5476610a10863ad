"""Which ids are pulled, and from where they are taken."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import two_fields

import oe_runtime.keras as embed
from oe_runtime.keras.plan import LookupPlan


def _plan(model, *x):
    tensors = [tf.constant(v) for v in x]
    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors]
    structure = list(x) if len(x) > 1 else x[0]
    plan = LookupPlan(model, structure, specs)
    return plan, plan.ids(tensors)


def test_inputs_that_are_ids_are_taken_as_they_are_and_once():
    model = embed.distributed_model(two_fields())
    a, b = np.array([[1], [2]]), np.array([[3], [4]])
    plan, ids = _plan(model, a, b, np.zeros((2, 3), np.float32))
    assert plan._compute is None
    names = [layer.name for layer in plan.layers]
    assert sorted(names) == ["linear_a", "table_a", "table_b"]
    assert len(ids) == 2
    for name, source in zip(names, plan.sources, strict=True):
        np.testing.assert_array_equal(ids[source], [3, 4] if name == "table_b" else [1, 2])


def test_ids_computed_from_inputs():
    x = keras.Input((3,), dtype="int32")
    parts = [embed.Embedding(-1, 2, name=f"t{i}")(x[:, i : i + 1]) for i in range(3)] + [
        embed.Embedding(-1, 1, name="linear")(x[:, 1:2]),
        embed.Embedding(-1, 2, name="all")(x + 100),
    ]
    output = keras.layers.Concatenate()([keras.layers.Flatten()(p) for p in parts])
    model = embed.distributed_model(keras.Model(x, output))
    plan, ids = _plan(model, np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    found = {layer.name: ids[s].tolist() for layer, s in zip(plan.layers, plan.sources, strict=True)}
    assert found == {
        "t0": [1, 4],
        "t1": [2, 5],
        "t2": [3, 6],
        "linear": [2, 5],
        "all": [101, 102, 103, 104, 105, 106],
    }
    assert len(ids) == 4  # t1 and linear share theirs


def test_narrowing_casts_are_not_skipped():
    x = keras.Input((1,), dtype="int64")
    output = embed.Embedding(1000, 2, name="t")(keras.ops.cast(x, "int8"))
    _, ids = _plan(embed.distributed_model(keras.Model(x, output)), np.array([[257], [3]]))
    assert [i.tolist() for i in ids] == [[1, 3]]


def test_ids_from_floats_and_uint64():
    x, u = keras.Input((1,)), keras.Input((1,), dtype="uint64")
    output = keras.layers.Add()([embed.Embedding(-1, 2, name="f")(x), embed.Embedding(-1, 2, name="u")(u)])
    model = embed.distributed_model(keras.Model([x, u], output))
    plan, ids = _plan(model, np.array([[7.0]], np.float32), np.array([[2**64 - 1]], np.uint64))
    found = {layer.name: ids[s].tolist() for layer, s in zip(plan.layers, plan.sources, strict=True)}
    assert found == {"f": [7], "u": [-1]}


def test_nested_models_and_masks():
    inner_x = keras.Input((4,), dtype="int64")
    inner = keras.Model(inner_x, embed.Embedding(-1, 3, mask_zero=True, name="words")(inner_x), name="inner")
    x = keras.Input((4,), dtype="int64")
    pooled = keras.layers.GlobalAveragePooling1D()(inner(x))
    model = embed.distributed_model(keras.Model(x, keras.layers.Dense(1)(pooled)))
    model.compile("sgd", "mse")
    data = np.array([[1, 2, 0, 0], [3, 3, 3, 3]])
    predicted = model.predict(data, verbose=0)
    rows = model.get_layer("inner").get_layer("words").table.rows(data)
    kernel, bias = model.layers[-1].get_weights()
    means = np.stack([rows[0, :2].mean(0), rows[1].mean(0)])
    np.testing.assert_allclose(predicted, means @ kernel + bias, atol=1e-6)
    model.fit(data, np.ones((2, 1)), verbose=0)
    changed = model.get_layer("inner").get_layer("words").table.rows(data) != rows
    assert changed.all(axis=-1).tolist() == [[True, True, False, False], [True] * 4]


def test_lengths_that_vary_make_one_more_program():
    x = keras.Input((None,), dtype="int64")
    y = keras.ops.mean(embed.Embedding(-1, 2, name="t")(x), axis=(1, 2))
    model = embed.distributed_model(keras.Model(x, y))
    model.compile("sgd", "mse")
    for length in (3, 5, 2, 9):
        model.train_on_batch(np.arange(4 * length).reshape(4, length), np.ones(4))
    (program,) = model._steps._programs.values()
    assert program.specs[0].shape.as_list() == [None, None]


def test_ids_from_embeddings_are_refused():
    x = keras.Input((1,), dtype="int64")
    first = embed.Embedding(-1, 3, name="first")(x)
    second = embed.Embedding(-1, 3, name="second")(keras.ops.argmax(first, axis=-1))
    model = embed.distributed_model(keras.Model(x, second))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"'second'.*computed from the embeddings of 'first'"):
        model.predict(np.ones((2, 1)), verbose=0)


def test_the_original_model_can_be_forgotten():
    """Its tables may be larger than the worker's memory should hold."""
    stock = two_fields()
    table = weakref.ref(stock.get_layer("table_a"))
    model = embed.distributed_model(stock)
    del stock
    gc.collect()
    assert table() is None
    model.compile("sgd", "mse")
    model.predict([np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 3))], verbose=0)
