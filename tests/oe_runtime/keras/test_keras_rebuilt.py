"""Weights of a model that is made a second time in a process, and models with layers that no call uses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError

X = np.random.default_rng(0).integers(0, 128, (64, 3))
Y = (X[:, :1] % 2).astype(np.float32)


class Towers(keras.Model):
    """Two towers; an optional third is made and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = [keras.layers.Embedding(128, 4), keras.layers.Embedding(128, 4)]
        self.towers = [keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.3)]) for _ in "ab"]
        self.optional = keras.layers.Dense(3)
        self.score = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return a score."""
        parts = [keras.ops.mean(rows(x), axis=1) for rows in self.rows]
        towers = [tower(part, training=training) for tower, part in zip(self.towers, parts, strict=True)]
        return self.score(keras.ops.concatenate(towers, axis=-1))


def graph() -> Any:
    ids = keras.Input((3,), dtype="int64")
    x = keras.layers.Flatten()(keras.layers.Embedding(128, 4)(ids))
    x = keras.layers.Dropout(0.3)(keras.layers.Dense(4)(x))
    return keras.Model(ids, keras.layers.Dense(1)(x))


def compiled(make: Any, client: Client | None = None) -> Any:
    model = embed.distributed_model(make(), client or Client.in_process())
    model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.05)), "mse")
    return model


@pytest.mark.parametrize("make", [graph, Towers])
def test_a_model_that_is_made_again_goes_on_from_its_weights(make, tmp_path):
    """Keras numbers layers by process: dense, dense_1, … are other names in the second model."""
    first = compiled(make)
    first.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    first.save_weights(tmp_path / "w")
    second = compiled(make)
    second.load_weights(tmp_path / "w")
    everything = np.random.default_rng(1).integers(0, 128, (128, 3))  # untrained rows too
    np.testing.assert_array_equal(second.predict(everything, verbose=0), first.predict(everything, verbose=0))
    # The optimizer's state and the random state of Dropout came too.
    ours, theirs = (m.fit(X, Y, batch_size=16, shuffle=False, verbose=0).history for m in (second, first))
    assert ours == theirs
    second.save_weights(tmp_path / "again")
    third = compiled(make)
    third.load_weights(tmp_path / "again")
    np.testing.assert_array_equal(third.predict(X, verbose=0), second.predict(X, verbose=0))


def test_tables_of_another_model_on_the_servers_are_left_alone(tmp_path):
    client = Client.in_process()
    first = compiled(graph, client)
    first.fit(X, Y, verbose=0)
    first.save_weights(tmp_path / "w")
    before = first.predict(X, verbose=0)
    second = compiled(graph, client)
    with pytest.raises(CheckpointError, match=r"have a table of that name already"):
        second.load_weights(tmp_path / "w")
    np.testing.assert_array_equal(first.predict(X, verbose=0), before)
    second.fit(X, Y, verbose=0)


def test_layers_that_do_not_correspond_are_refused(tmp_path):
    first = compiled(graph)
    first.save_weights(tmp_path / "w")

    def wider() -> Any:
        ids = keras.Input((3,), dtype="int64")
        x = keras.layers.Flatten()(keras.layers.Embedding(128, 4)(ids))
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Dense(5)(x)))

    model = compiled(wider)
    with pytest.raises(CheckpointError, match=r"dense\.npz: variable model/dense"):
        model.load_weights(tmp_path / "w")


def test_a_layer_that_no_call_uses_is_no_obstacle(tmp_path):
    model = compiled(Towers)
    with pytest.raises(RuntimeError, match="call it once"):
        model.save_weights(tmp_path / "early")
    model.fit(X, Y, verbose=0)
    assert not model.optional.built
    model.save_weights(tmp_path / "w")
    again = compiled(Towers)
    again.load_weights(tmp_path / "w")
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


class InnerModels(keras.Model):
    """Query and item towers as models inside the model, which share an embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.layers.Embedding(128, 4, name="shared")
        self.dense = keras.layers.Dense(4, name="dense_of_both")
        ids = keras.Input((3,), dtype="int64")
        self.query = keras.Model(ids, self.dense(keras.layers.GlobalAveragePooling1D()(self.rows(ids))))
        pooled = keras.Sequential([self.rows, keras.layers.GlobalAveragePooling1D()])
        self.item = keras.Sequential([pooled, self.dense])
        self.own = keras.Sequential([keras.layers.Embedding(128, 4, name="own"), keras.layers.Flatten()])
        self.score = keras.layers.Dense(1, name="score")

    def call(self, x: Any) -> Any:
        """Return a score."""
        return self.score(keras.ops.concatenate([self.query(x), self.item(x), self.own(x)], axis=-1))


@pytest.mark.parametrize("built", [False, True])
def test_embeddings_inside_of_inner_models_become_tables(built):
    stock, model = InnerModels(), InnerModels()
    stock(X[:2])
    if built:
        model(X[:2])
    model = embed.distributed_model(model, Client.in_process())
    model.compile(embed.distributed_optimizer(keras.optimizers.SGD(0.5)), "mse")
    stock.compile(keras.optimizers.SGD(0.5), "mse")
    assert set(model.tables) == {"shared", "own"}
    model(X[:2])
    for name, layer in model.served.layers.items():
        of_stock = next(one for one in stock._flatten_layers() if one.name == name)
        of_stock.set_weights(layer.get_weights())
    assert len(stock.weights) == len(model.weights) + 2
    for layer in ("dense_of_both", "score"):
        of_stock, of_model = (
            next(one for one in m._flatten_layers() if one.name == layer) for m in (stock, model)
        )
        of_stock.set_weights(of_model.get_weights())
    ours, theirs = (m.fit(X, Y, epochs=2, shuffle=False, verbose=0).history["loss"] for m in (model, stock))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), stock.predict(X, verbose=0), atol=1e-5)
    assert model.count_params() == stock.count_params()


def test_an_optimizer_that_changes_after_compile_is_refused_by_name():
    model = compiled(graph)
    model.fit(X, Y, verbose=0)
    model.optimizer.learning_rate = 0.01
    model.fit(X, Y, verbose=0)
    model.optimizer.beta_1 = 0.5
    with pytest.raises(ValueError, match=r"optimizer\.beta_1 is 0\.5 now, .* made with 0\.9"):
        model.fit(X, Y, verbose=0)


def test_what_a_second_compile_keeps_and_what_needs_one_are_told():
    model = compiled(graph)
    model.fit(X, Y, verbose=0)
    next(iter(model.served.layers.values())).trainable = False
    with pytest.warns(UserWarning, match="trainable of layer embedding.* compile it again"):
        model.fit(X, Y, verbose=0)
    before = model.predict(X, verbose=0)
    with pytest.warns(UserWarning, match="rows keep their optimizer's state"):
        model.compile(embed.distributed_optimizer(keras.optimizers.Adam(0.05)), "mse")
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


@pytest.mark.parametrize("after", ["adam", "adagrad"])
def test_a_model_goes_on_with_another_optimizer(after):
    """As in Keras: the weights stay, frozen ones too, and the optimizer's state begins anew."""
    stock = graph()
    model = embed.distributed_model(stock, Client.in_process())
    model.compile("sgd", "mse")
    (layer,) = model.served.layers.values()
    stock.get_layer(layer.name).set_weights(layer.get_weights())
    x, y = np.arange(126).reshape(-1, 3), np.ones((42, 1), np.float32)  # an id once in each batch
    stock.compile("sgd", "mse")
    losses = []
    for one in (model, stock):
        one.get_layer(find(one, "dropout")).rate = 0.0
        history = one.fit(x, y, batch_size=42, epochs=3, verbose=0).history["loss"]
        one.get_layer(layer.name).trainable = False
        one.compile(after, "mse")
        history += one.fit(x, y, batch_size=42, epochs=2, verbose=0).history["loss"]
        one.get_layer(layer.name).trainable = True
        one.compile("rmsprop", "mse")
        history += one.fit(x, y, batch_size=42, epochs=2, verbose=0).history["loss"]
        losses.append(history)
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)


def find(model: Any, kind: str) -> str:
    return next(layer.name for layer in model.layers if layer.name.startswith(kind))


def test_rows_that_do_not_come_back_are_kept_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = compiled(graph)
    model.fit(X, Y, verbose=0)
    (layer,) = model.served.layers.values()
    before = layer.get_weights()[0]

    def fail(*_args, **_kwargs):
        raise OSError("no more")

    with monkeypatch.context() as broken:
        broken.setattr(Client, "import_rows", fail)
        with pytest.warns(UserWarning, match="not be brought back"), pytest.raises(OSError, match="no more"):
            model.compile("sgd", "mse")
    (file,) = tmp_path.glob("oe-rows-*/0.parquet")
    model.compile("sgd", "mse")
    model.client.import_rows(layer.table.number, file, slots=False)
    np.testing.assert_array_equal(layer.get_weights()[0], before)
