"""A converted model goes on from the weights that it was given: trained, loaded, or as a matrix."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, permutations, random_ids, shared_field, two_fields
from server_processes import Servers
from warm_starts import TABLES, WarmStarts

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError, ServerLost
from oe_runtime.spec import StorageSpec

cases = WarmStarts(keras, embed, two_fields, permutations, random_ids)
trained, converted, assert_rows_of = cases.trained, cases.converted, cases.assert_rows_of


def rows(model, name):
    return model.get_layer(name).table.rows(np.arange(ROWS))


def test_a_trained_model_goes_on_from_its_rows():
    """As the stock model does: rows of all tables, of a table that kept its zeros too."""
    stock, x, y = trained()
    model = converted(stock)
    assert_rows_of(model, stock)
    np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-6)
    cases.assert_equal_training([model], stock, x, y)


def test_rows_are_those_of_the_conversion():
    """What happens to the stock model between the conversion and compile does not count."""
    stock, x, y = trained()
    before = {name: stock.get_layer(name).get_weights()[0] for name in TABLES}
    model = embed.distributed_model(stock)
    stock.fit(x, y, verbose=0)
    model.compile("sgd", "mse")
    for name in TABLES:
        np.testing.assert_allclose(rows(model, name), before[name], atol=1e-7)
        assert model.get_layer(name).first_rows is None  # freed


@pytest.mark.parametrize("initializer", ["uniform", "glorot_normal", "ones"])
def test_an_untrained_model_has_the_rows_of_its_initializer(initializer, monkeypatch):
    """Nothing is sent to the servers: what the stock layer has drawn, it would draw again."""
    monkeypatch.setattr(Client, "assign", None, raising=False)
    x = keras.Input((1,), dtype="int64")
    stock = keras.Model(x, keras.layers.Embedding(ROWS, 4, initializer, name="here")(x))
    found = [converted(stock, seed=seed).get_layer("here").table.rows(np.arange(ROWS)) for seed in (1, 1)]
    np.testing.assert_array_equal(*found)


def test_one_changed_number_is_enough():
    stock = two_fields()
    matrix = stock.get_layer("table_b").get_weights()[0]
    matrix[ROWS - 1, 3] += 1
    stock.get_layer("table_b").set_weights([matrix])
    model = converted(stock)
    np.testing.assert_allclose(rows(model, "table_b"), matrix, atol=1e-7)
    assert np.abs(rows(model, "table_a") - stock.get_layer("table_a").get_weights()[0]).max() > 1e-3


def test_a_matrix_in_every_way_that_keras_takes_one(tmp_path):
    matrix = np.random.default_rng(0).random((ROWS, 4), dtype=np.float32)
    x = keras.Input((1,), dtype="int64")
    layers = [
        keras.layers.Embedding(ROWS, 4, weights=[matrix], name="stock_weights"),
        keras.layers.Embedding(ROWS, 4, keras.initializers.Constant(matrix), name="stock_constant"),
        embed.Embedding(ROWS, 4, weights=[matrix], name="weights"),
        embed.Embedding(ROWS, 4, keras.initializers.Constant(matrix), name="constant"),
        embed.Embedding(ROWS, 4, keras.initializers.Constant(matrix[0]), name="one_row"),
        embed.Embedding(ROWS, 4, name="before"),
        embed.Embedding(ROWS, 4, name="converted"),
        embed.Embedding(ROWS, 4, name="compiled"),
    ]
    layers[5].set_weights([matrix])
    model = embed.distributed_model(keras.Model(x, [layer(x) for layer in layers]))
    model.get_layer("converted").set_weights([matrix])
    np.testing.assert_array_equal(model.get_layer("converted").get_weights()[0], matrix)
    model.compile("sgd", "mse")
    model.get_layer("compiled").set_weights([tf.constant(matrix)])
    for layer in layers:
        want = matrix[:1].repeat(ROWS, 0) if layer.name == "one_row" else matrix
        np.testing.assert_allclose(rows(model, layer.name), want, atol=1e-7)
        np.testing.assert_array_equal(model.get_layer(layer.name).get_weights()[0], rows(model, layer.name))
    model.save_weights(tmp_path / "weights")


def test_matrices_that_do_not_fit():
    wrong = np.zeros((ROWS, 3))
    with pytest.raises(
        ValueError, match=r"'here': the matrix has shape \(80, 3\), but the rows are \(80, 4\)"
    ):
        embed.Embedding(ROWS, 4, weights=[wrong], name="here")
    with pytest.raises(ValueError, match=r"'here': Constant\(matrix\) has shape \(80, 3\), but the rows are"):
        embed.Embedding(ROWS, 4, keras.initializers.Constant(wrong), name="here")
    with pytest.raises(ValueError, match=r"Constant\(matrix\) is not supported with eviction"):
        embed.Embedding(
            ROWS, 3, keras.initializers.Constant(wrong), eviction=[{"name": "ttl", "steps": 1}], name="here"
        )
    with pytest.raises(ValueError, match=r"'here': Constant\(matrix\) needs an input_dim"):
        embed.Embedding(-1, 3, keras.initializers.Constant(wrong), name="here")
    any_id = embed.Embedding(-1, 3, name="here")
    with pytest.raises(
        ValueError, match=r"'here' takes any id, .*client\.assign\(layer\.table\.number, keys"
    ):
        any_id.set_weights([wrong])
    with pytest.raises(ValueError, match=r"'here' takes any id, .*client\.export_rows"):
        any_id.get_weights()
    layer = embed.Embedding(ROWS, 3, name="here")
    for weights, found in ((wrong, "ndarray"), ([wrong, wrong], "2 of them"), ([], "0 of them")):
        with pytest.raises(ValueError, match=f"weights must be a list of one matrix, not {found}"):
            layer.set_weights(weights)
    with pytest.raises(AttributeError, match=r"'here' has no `embeddings`.*get_weights\(\)\[0\] .*keras_rs"):
        _ = layer.embeddings


def test_a_model_of_trained_tables_is_not_converted_again():
    model = converted(two_fields())
    with pytest.raises(ValueError, match=r"layer 'table_[ab]' has rows on servers already"):
        embed.distributed_model(model)


def test_subclassed_models_bring_their_rows():
    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(ROWS, 4, name="table")
            self.dense = keras.layers.Dense(1)

        def call(self, ids):
            return self.dense(self.table(ids))

    model = Scores()
    ids = np.arange(ROWS)
    model(ids)
    matrix = np.random.default_rng(0).random((ROWS, 4), dtype=np.float32)
    model.table.set_weights([matrix])
    expected = model(ids)
    embed.distributed_model(model)
    model.compile("sgd", "mse")
    np.testing.assert_allclose(model(ids), expected, atol=1e-6)


def write(stock, kind, directory):
    """The stock model in a file of one kind; its path."""
    path = directory / f"stock{kind}"
    if kind == ".weights.h5":
        stock.save_weights(path)
    elif kind:
        stock.save(path)
    else:
        stock.export(path, verbose=False)
    return path


@pytest.mark.parametrize("kind", [".weights.h5", ".keras", ".h5", ""])
@pytest.mark.filterwarnings("ignore:.*HDF5", "ignore:Skipping variable loading for optimizer")
def test_files_of_stock_models(kind, tmp_path):
    """Before and after compile; training then goes on as in the stock model."""
    stock, x, y = trained()
    path = write(stock, kind, tmp_path)
    cases.assert_equal_training(cases.loaded(path, stock, x), stock, x, y)


@pytest.mark.parametrize("kind", [".weights.h5", ".keras", ".h5", ""])
@pytest.mark.filterwarnings("ignore:.*HDF5")
def test_files_of_other_models_change_nothing(kind, tmp_path):
    """Neither rows nor dense weights, though some of the file may fit."""
    other = two_fields(rows=ROWS + 1)
    path = write(other, kind, tmp_path)
    model = cases.refusing(path, r"stock.*81, 4")
    shared = converted(shared_field())
    with pytest.raises(CheckpointError, match="stock"):
        shared.load_weights(path)
    with pytest.raises(ValueError, match="skip_mismatch=True is not supported"):
        model.load_weights(path, skip_mismatch=True)


def test_an_export_with_rows_by_key_comes_back(tmp_path):
    """`save_as_original_model` writes the keys of a table for any id beside its rows."""

    def any_id(rows, dim, *args, name):
        if name == "table_b":
            return keras.layers.Embedding(rows, dim, *args, name=name)
        return embed.Embedding(-1, dim, *args, name=name)

    x, y = random_ids(64)
    x[0] = x[0] * 2**50
    model = converted(two_fields(any_id))
    model.fit(x, y, verbose=0)
    model.save_as_original_model(tmp_path / "export")
    again = embed.distributed_model(two_fields(any_id))
    with pytest.raises(CheckpointError, match=r"compile the model first: table '.*_a' takes any id"):
        again.load_weights(tmp_path / "export")
    again.compile("sgd", "mse")
    again.load_weights(tmp_path / "export")
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_a_saved_model_of_layers_that_keras_has_named(tmp_path):
    """Their numbers go on from model to model; models inside of the model, and layers of random numbers."""

    def stock():
        ids, inner = keras.Input((3,), dtype="int64"), keras.Input((3,), dtype="int64")
        layers = keras.layers
        fields = keras.Model(
            inner, layers.BatchNormalization()(layers.Flatten()(layers.Embedding(ROWS, 4)(inner)))
        )
        tower = keras.Sequential([layers.Dense(12), layers.Dropout(0.1), layers.Dense(12)])
        x = tower(layers.Concatenate()([fields(ids), layers.Flatten()(layers.Embedding(ROWS, 4)(ids))]))
        return keras.Model(ids, layers.Dense(1)(layers.Dense(12)(x)))

    ids = np.random.default_rng(0).integers(0, ROWS, (64, 3))
    first = stock()
    first.compile("adam", "mse")
    first.fit(ids, np.ones(64), verbose=0)
    first.export(tmp_path / "export", verbose=False)
    model = converted(stock())
    model.load_weights(tmp_path / "export")
    np.testing.assert_allclose(model.predict(ids, verbose=0), first.predict(ids, verbose=0), atol=1e-6)


def test_weights_before_the_first_batch_of_a_subclassed_model(tmp_path):
    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(ROWS, 4, name="table")
            self.scores = keras.layers.Dense(1, name="scores")

        def call(self, ids):
            return self.scores(self.table(ids))

    ids, y = np.arange(ROWS), np.ones(ROWS)
    models = []
    for _ in range(2):
        keras.backend.clear_session()  # another process: the models have one name
        models.append(embed.distributed_model(Scores()))
        models[-1].compile("sgd", "mse")
    models[0].fit(ids, y, verbose=0)
    models[0].save_weights(tmp_path / "weights")
    with pytest.raises(
        RuntimeError, match=r"makes its weights with its first batch: call it once, model\(batch\)"
    ):
        models[1].save_weights(tmp_path / "none")
    models[1].load_weights(tmp_path / "weights")  # which the first batch then takes
    np.testing.assert_array_equal(models[1](ids), models[0](ids))


def test_summary_shows_what_the_servers_hold():
    def layer(rows, dim, *args, name):
        return embed.Embedding(-1 if name == "table_b" else rows, dim, *args, name=name)

    model = embed.distributed_model(two_fields(layer))
    lines = []
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert "Params on the servers: 400" in text
    assert "table table_a: 80 rows × 4, float32" in text
    assert "table table_b: rows created on demand × 4, float32" in text
    assert "320" in next(line for line in text.splitlines() if "table_a (" in line)


@pytest.mark.parametrize("storage", ["pmem_libpmem", "dram_pmem", "dram"])
def test_rows_that_were_brought_over_are_in_checkpoints(storage, tmp_path):
    """On every tier, and on another number of servers."""
    stock, x, _ = trained()
    cache = {"cache_bytes": 1 << 20} if storage == "dram_pmem" else {}
    spec = StorageSpec(storage, str(tmp_path / "pool"), **cache) if storage != "dram" else StorageSpec()
    (tmp_path / "pool").mkdir()
    with Client.in_process(spec, servers=2) as client:
        converted(stock, client).save_weights(tmp_path / "weights")
    again = converted(two_fields(), Client.in_process(servers=3))
    again.load_weights(tmp_path / "weights")
    assert_rows_of(again, stock)
    np.testing.assert_allclose(again.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-6)


def test_rows_on_servers_are_not_overwritten():
    """The servers have rows of an earlier model: which are meant is the user's to say."""
    stock, x, y = trained()
    with Client.in_process() as client:
        first = converted(stock, client)
        first.fit(x, y, verbose=0)
        kept = rows(first, "table_a")
        second = embed.distributed_model(stock, client)
        with pytest.raises(
            ValueError, match=r"table 'table_a' has 80 rows on the servers already, and the model"
        ):
            second.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
        np.testing.assert_array_equal(rows(first, "table_a"), kept)
        converted(stock, client, name_prefix="second/")
        for model in (two_fields(), stock):  # goes on with the servers' rows
            np.testing.assert_array_equal(rows(converted(model, client, fresh=False), "table_a"), kept)
        assert_rows_of(converted(stock, client, fresh=True), stock)


@pytest.mark.parametrize("fresh", [None, True, False])
def test_rows_that_did_not_arrive_come_with_the_next_compile(fresh, monkeypatch):
    """A part of them is there by then, as when a server was lost; no model trains on such tables."""
    stock, x, y = trained()
    assign = Client.assign

    def fails(client, table, keys, rows):
        assign(client, table, keys[:9], rows[:9])
        raise ServerLost("", "gone")

    with Client.in_process() as client:
        model = embed.distributed_model(stock, client, fresh=fresh)
        with monkeypatch.context() as patched:
            patched.setattr(Client, "assign", fails)
            for _ in range(2):
                with pytest.raises(ServerLost):
                    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
                with pytest.raises(RuntimeError, match="compile the model first"):
                    model.fit(x, y, verbose=0)
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
        assert_rows_of(model, stock)
        model.fit(x, y, verbose=0)
        kept = rows(model, "table_a")
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
        np.testing.assert_array_equal(rows(model, "table_a"), kept)


def test_over_servers_checkpoints_and_increments(tmp_path):
    """Rows that a model brings, and rows that are set while it trains, over two server processes."""
    stock, x, y = trained()
    matrix = np.random.default_rng(0).random((ROWS, 4), dtype=np.float32)
    servers = Servers(tmp_path / "servers", 2)
    try:
        with Client(servers.endpoints) as client:
            model = converted(stock, client)
            assert_rows_of(model, stock)
            full, more = tmp_path / "full", tmp_path / "more"
            full.mkdir()
            more.mkdir()
            client.save(full)
            seen = []

            def write(batch, logs):
                if batch == 2:  # the next batch's rows have been pulled already
                    model.get_layer("table_a").set_weights([matrix])
                    seen.append(rows(model, "table_a"))

            writing = keras.callbacks.LambdaCallback(on_train_batch_end=write)
            model.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[writing])
            np.testing.assert_array_equal(seen, [matrix])
            moved = np.abs(rows(model, "table_a") - matrix).max()  # by the one batch after it
            assert 0 < moved < 0.1
            client.save(more, since=full)
            expected = model.predict(x, verbose=0)
            dense = model.get_weights()
    finally:
        servers.end()
    again = converted(two_fields(), Client.in_process(servers=3))
    again.client.restore(full)
    assert_rows_of(again, stock)
    again.client.restore(full, more)
    again.set_weights(dense)
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)
