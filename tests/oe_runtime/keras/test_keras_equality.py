"""Training with distributed embeddings gives what stock Keras gives."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import (
    OPTIMIZERS,
    ROWS,
    copy_rows,
    permutations,
    random_ids,
    shared_field,
    two_fields,
)

import oe_runtime.keras as embed
from oe_runtime import spec
from oe_runtime.client import Client
from oe_runtime.keras.translate import table_optimizer
from oe_runtime.spec import StorageSpec


def _fit(model, x, y, **options):
    history = model.fit(x, y, shuffle=False, verbose=0, **options)
    return history.history["loss"]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd", "ftrl"])
def test_repeated_ids_and_shared_layers_have_their_gradients_summed(optimizer):
    """The reference applies the true gradient of the table. (Keras's own Adagrad, Adam and Ftrl square the
    gradients of an id's occurrences one by one.)"""
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(8):
        ids = np.concatenate([rng.permutation(ROWS), rng.permutation(ROWS)])
        many, one = ids[: ROWS * 3 // 2].reshape(-1, 3), ids[ROWS * 3 // 2 :].reshape(-1, 1)
        batches.append(([many, one], (many[:, :1] + one) % 2))
    stock = shared_field()
    model = embed.distributed_model(stock)
    model.compile(OPTIMIZERS[optimizer](), "binary_crossentropy")
    assert list(model.tables) == ["shared"]
    copy_rows(model, stock)
    reference = OPTIMIZERS[optimizer]()

    for x, y in batches:
        loss = model.train_on_batch(x, y)
        with tf.GradientTape() as tape:
            expected = tf.reduce_mean(keras.losses.binary_crossentropy(y, stock(x, training=True)))
        variables = stock.trainable_variables
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(expected, variables)]
        reference.apply_gradients(zip(gradients, variables, strict=True))
        np.testing.assert_allclose(loss, expected, atol=1e-5)

    x, _ = batches[0]
    np.testing.assert_allclose(model(x), stock(x), atol=1e-4)


def test_every_optimizer_of_tables_is_compared_with_keras():
    assert {table_optimizer(make())["name"] for make in OPTIMIZERS.values()} == set(spec.OPTIMIZERS)


def test_rows_outside_the_batch_stay():
    model = embed.distributed_model(two_fields())
    model.compile(keras.optimizers.Adam(0.1), "binary_crossentropy")
    table = model.get_layer("table_a").table
    before = table.rows(np.arange(ROWS))
    x, y = random_ids(64)
    x[0] %= ROWS // 2
    model.fit(x, y, epochs=2, verbose=0)
    after = table.rows(np.arange(ROWS))
    np.testing.assert_array_equal(after[ROWS // 2 :], before[ROWS // 2 :])
    assert (after[np.unique(x[0])] != before[np.unique(x[0])]).all()
    assert model.client.stats()  # the servers say what they hold


def _losses(client):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = embed.distributed_model(two_fields(), client, seed=11)
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    losses: list[float] = []
    x, y = random_ids(1000, seed=4)
    step = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"]))
    )
    model.fit(x, y, batch_size=128, epochs=2, verbose=0, shuffle=False, callbacks=[step])
    return losses, model.predict(x, verbose=0)


def test_storage_and_server_count_do_not_change_a_bit(deterministic, tmp_path):
    losses, predictions = _losses(Client.in_process())
    assert len(losses) == 16
    assert losses[-1] < losses[0]
    pmem = StorageSpec("pmem_libpmem", str(tmp_path), 1 << 30)
    cached = StorageSpec("dram_pmem", str(tmp_path / "cached"), cache_bytes=1 << 20)
    drive = StorageSpec("dram_ssd", str(tmp_path / "drive"), cache_bytes=1 << 20)
    for client in (
        Client.in_process(pmem),
        Client.in_process(cached, servers=2),
        Client.in_process(drive),
        Client.in_process(servers=3),
    ):
        with client:
            other_losses, other_predictions = _losses(client)
        assert other_losses == losses
        np.testing.assert_array_equal(other_predictions, predictions)


def test_seed_decides_the_initial_rows():
    rows = {}
    for seed in (1, 1, 2):
        model = embed.distributed_model(two_fields(), seed=seed)
        model.compile("sgd", "binary_crossentropy")
        table = model.get_layer("table_a").table.rows(np.arange(ROWS))
        if seed in rows:
            np.testing.assert_array_equal(table, rows[seed])
        rows[seed] = table
    assert (rows[1] != rows[2]).any()
    assert np.abs(rows[1]).max() <= 0.05
    assert len(np.unique(rows[1])) > ROWS


def test_xla_trains_the_same():
    """`jit_compile=True`, with batches of two sizes."""
    x, y = random_ids(210)
    stock = two_fields()
    results = []
    for jit in (False, True):
        model = embed.distributed_model(stock)
        model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", jit_compile=jit)
        losses = _fit(model, x, y, batch_size=80, epochs=2)
        results.append((losses, model.predict(x, verbose=0)))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)


def _of_dtype(dtype):
    a = keras.Input((1,), dtype="int64", name="a")
    table = keras.layers.Embedding(ROWS, 4, name="table_a", dtype=dtype)
    hidden = keras.layers.Flatten(dtype=dtype)(table(a))
    y = keras.layers.Dense(1, "sigmoid", name="y", kernel_initializer="ones", dtype=dtype)(hidden)
    return keras.Model(a, y)


@pytest.mark.parametrize(
    ("dtype", "atol"), [("float64", 1e-12), ("float32", 1e-6), ("bfloat16", 0.03), ("float16", 0.003)]
)
@pytest.mark.parametrize(
    "optimizer",
    [
        # Keras rounds such numbers to float32, for float64 variables too; these it cannot round.
        lambda: keras.optimizers.Adagrad(0.125, initial_accumulator_value=0.25, epsilon=2**-20),
        lambda: keras.optimizers.Adam(2**-6, beta_1=0.75, beta_2=0.984375, epsilon=2**-20),
    ],
    ids=["adagrad", "adam"],
)
def test_layers_of_every_dtype(dtype, atol, optimizer, tmp_path):
    """float64 is as near to stock Keras as its digits; halves differ by their roundings."""
    x, y = permutations(batches=4)
    ids = x[0]
    stock = _of_dtype(dtype)
    loss = keras.losses.BinaryCrossentropy(dtype="float64" if dtype == "float64" else "float32")
    model = embed.distributed_model(stock, sparse_as_dense_size=1)
    model.compile(embed.distributed_optimizer(optimizer()), loss)
    assert model.tables["table_a"].dtype == dtype
    copy_rows(model, stock)
    stock.compile(optimizer(), loss)
    before = np.asarray(stock(ids), np.float64)
    for m in (model, stock):
        m.fit(ids, y, shuffle=False, verbose=0, batch_size=ROWS, epochs=2)
    after = np.asarray(keras.ops.cast(model(ids), "float64"))
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, np.asarray(keras.ops.cast(stock(ids), "float64")), rtol=0, atol=atol)
    rows = model.get_layer("table_a").table.rows(np.arange(ROWS))
    assert rows.dtype == ("float64" if dtype == "float64" else "float32")
    model.save_as_original_model(tmp_path / "export")
    exported = tf.saved_model.load(tmp_path / "export")
    served = np.asarray(tf.cast(exported.serve(ids), tf.float64))
    np.testing.assert_allclose(served, after, rtol=0, atol=atol)


@pytest.mark.parametrize("rule", ["Adagrad", "Adam"])
def test_a_state_and_gradients_in_two_bytes(rule):
    """Those of the model, unless a layer says otherwise."""
    x, y = permutations(batches=4)
    models = []
    for state_dtype in (None, "bfloat16"):
        ids = keras.Input((1,), dtype="int64", name="a")
        layers = [
            keras.layers.Embedding(ROWS, 4, name="rows", dtype="bfloat16"),
            embed.Embedding(ROWS, 4, name="own", state_dtype="float32", exchange_dtype="float32"),
        ]
        hidden = [keras.layers.Flatten()(layer(ids)) for layer in layers]
        y_of = keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")(keras.layers.Concatenate()(hidden))
        model = embed.distributed_model(
            keras.Model(ids, y_of),
            sparse_as_dense_size=1,
            state_dtype=state_dtype,
            exchange_dtype=state_dtype,
        )
        model.compile(
            embed.distributed_optimizer(getattr(keras.optimizers, rule)(0.1)), "binary_crossentropy"
        )
        model.fit(x[0], y, shuffle=False, verbose=0, batch_size=ROWS, epochs=2)
        models.append(model)
    layer = embed.Embedding.from_config(models[1].get_layer("own").get_config())
    for field in ("state_dtype", "exchange_dtype"):
        assert [getattr(m.tables["rows"], field) for m in models] == [None, "bfloat16"]
        assert getattr(models[1].tables["own"], field) is None  # float32, as servers of all versions know it
        assert getattr(layer, field) == "float32"
    single, half = (m.predict(x[0], verbose=0) for m in models)
    assert (single != half).any()
    np.testing.assert_allclose(half, single, atol=0.02)


def test_optimizer_variables_lie_as_those_of_keras():
    """Files of plain Keras have an optimizer's variables by their place."""
    ours, adam = embed.AdamAsync(), keras.optimizers.Adam()
    variables = [keras.Variable(np.zeros(size), name=name) for name, size in (("a", 2), ("b", 3))]
    for optimizer in (ours, adam):
        optimizer.build(variables)
    assert [v.name for v in ours.variables] == [v.name for v in adam.variables]
