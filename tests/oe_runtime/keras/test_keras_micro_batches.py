"""A batch in micro batches trains as the whole batch does; small embeddings as dense weights do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, random_ids, shared_field, two_fields

import oe_runtime.keras as embed
from oe_runtime.client import Client


def _trained(micro_batches, make=two_fields, optimizer="adam", *, jit=False, **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = embed.distributed_model(
        make(), Client.in_process(servers=2), micro_batches=micro_batches, **options
    )
    model.compile(
        optimizer, "binary_crossentropy", metrics=["AUC"], weighted_metrics=["mse"], jit_compile=jit
    )
    return model


def _fit(model, x, y, **options):
    """The history, the rows of all tables and the dense weights."""
    history = model.fit(x, y, batch_size=50, epochs=2, shuffle=False, verbose=0, **options).history
    rows = [model.get_layer(name).table.rows(np.arange(ROWS)) for name in model.tables]
    return history, [*rows, *model.get_weights()]


def _assert_equal(found, expected):
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=2e-5, err_msg=name)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(("jit", "parts"), [(False, 3), (True, 64)])
def test_micro_batches_train_as_the_whole_batch(jit, parts):
    """The batches of 50, and the last one of 7, do not divide by these numbers; 64 are more than examples."""
    x, y = random_ids(107, seed=4)
    weights = np.linspace(0.5, 2, len(y))
    expected = _fit(_trained(1), x, y, sample_weight=weights)
    _assert_equal(_fit(_trained(parts, jit=jit), x, y, sample_weight=weights), expected)
    assert expected[0]["loss"][1] < expected[0]["loss"][0]


def _small_and_frozen():
    """A frozen table, a regularized one, and an embedding that stays in the model."""
    model = two_fields(
        lambda rows, dim, initializer="uniform", *, name: keras.layers.Embedding(
            9 if name == "linear_a" else rows,
            dim,
            initializer,
            name=name,
            trainable=name != "table_a",
            embeddings_regularizer="l2" if name == "table_b" else None,
        )
    )
    assert not model.get_layer("table_a").trainable
    return model


@pytest.mark.filterwarnings("ignore:embeddings_regularizer")
def test_regularized_frozen_and_small_tables():
    x, y = random_ids(107, seed=4)
    x[0] %= 9
    expected = _fit(_trained(1, _small_and_frozen), x, y)
    _assert_equal(_fit(_trained(3, _small_and_frozen), x, y), expected)


def test_lookups_of_several_ids():
    rng = np.random.default_rng(1)
    x, y = [rng.integers(0, ROWS, (107, 3)), rng.integers(0, ROWS, (107, 1))], rng.integers(0, 2, (107, 1))
    expected = _fit(_trained(1, shared_field, "adagrad"), x, y)
    _assert_equal(_fit(_trained(4, shared_field, "adagrad"), x, y), expected)


def test_zero_micro_batches_are_refused():
    with pytest.raises(ValueError, match="micro_batches is 1 or more, not 0"):
        embed.distributed_model(two_fields(), micro_batches=0)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_small_embeddings_are_trained_as_dense_weights(optimizer):
    """Keras squares the gradients of an id that repeats one by one; several workers sum them before."""
    small = {"sparse_as_dense_size": ROWS + 1}
    x, y = random_ids(100, seed=5)
    model = _trained(1, optimizer=optimizer, **small)
    assert not model.tables
    reference = two_fields()
    reference.set_weights(model.get_weights())
    rule = keras.optimizers.get(optimizer)
    variables = [v.value for v in reference.trainable_variables]
    rule.build(reference.trainable_variables)
    for _ in range(3):
        model.train_on_batch(x, y)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(y, reference(x)))
        dense = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
        rule.apply(dense, reference.trainable_variables)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
