"""Scripts for OpenEmbedding, on the shapes of its examples, run after their import is changed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import keras
import numpy as np
import openembedding_processes
import pytest
import tensorflow as tf
from keras_models import random_ids, two_fields
from rendezvous import rendezvous
from server_processes import Servers

import oe_runtime.keras as embed
from oe_runtime.errors import CheckpointError

RNG = np.random.default_rng(0)
FIELDS = {f"C{i}": RNG.integers(0, 2**40, 96) for i in (1, 2)} | {"I1": RNG.random(96).astype("float32")}
LABELS = (FIELDS["C1"] % 2).astype("float32")


@pytest.fixture(autouse=True)
def flags():
    """As they are at the start."""
    yield embed.flags
    vars(embed.flags).update(vars(embed.Flags()))


def _compiled(model):
    optimizer = embed.distributed_optimizer(keras.optimizers.Adagrad(0.3), explicit=True)
    # (an option of Keras 2 that the examples have)
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"], experimental_run_tf_function=False)
    return model


def _network(layer=keras.layers.Embedding, rows=65536):
    inputs = {
        name: keras.Input((1,), dtype="int64" if name[0] == "C" else "float32", name=name) for name in FIELDS
    }
    parts = [inputs["I1"]]
    for name in ("C1", "C2"):
        parts.append(keras.layers.Flatten()(layer(rows, 9, name=f"sparse_{name}")(inputs[name])))
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Concatenate()(parts))
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid", name="click")(hidden))


def test_an_openembedding_script_with_an_ordinary_model(tmp_path):
    """distributed_model of an ordinary model; checkpoints by ModelCheckpoint; load; save; export."""
    inputs = {name: v % 65536 if name[0] == "C" else v for name, v in FIELDS.items()}
    model = _compiled(embed.distributed_model(_network(), sparse_as_dense_size=64, num_shards=-1))
    callbacks = [keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint{epoch}.keras")]
    losses = model.fit(inputs, LABELS, batch_size=8, epochs=2, callbacks=callbacks, verbose=2).history["loss"]
    assert losses[1] < losses[0]
    model.save(tmp_path / "save", include_optimizer=False)
    model.save_as_original_model(tmp_path / "export", include_optimizer=False)
    expected = model.predict(inputs, verbose=0)
    tensors = {name: tf.reshape(tf.convert_to_tensor(v), (-1, 1)) for name, v in inputs.items()}
    exported = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(exported.serve(tensors), expected, atol=1e-5)

    # The next epoch, in the same process and after a restart.
    again = _compiled(embed.distributed_model(_network()))
    again.load_weights(tmp_path / "checkpoint2.keras")
    for m in (model, again):
        m.fit(inputs, LABELS, batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(again.predict(inputs, verbose=0), model.predict(inputs, verbose=0), atol=1e-5)
    serving = _compiled(embed.distributed_model(_network()))
    serving.load_weights(tmp_path / "save")
    np.testing.assert_allclose(serving.predict(inputs, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize("regularizer", [None, keras.regularizers.L2(1e-5)], ids=["plain", "l2"])
def test_an_openembedding_script_that_replaces_a_librarys_embedding(regularizer):
    """embed.Embedding in place of a library's layer, for any 64-bit id, with OpenEmbedding's arguments.

    DeepCTR gives every embedding a regularizer, which the example passes on as one of the activity.
    """

    class HookEmbedding(embed.Embedding):
        def __init__(
            self,
            input_dim=-1,
            output_dim=9,
            embeddings_initializer=None,
            embeddings_regularizer=None,
            **kwargs,
        ):
            super().__init__(
                input_dim,
                output_dim,
                embeddings_initializer=embeddings_initializer or keras.initializers.RandomNormal(0, 0.01),
                activity_regularizer=embeddings_regularizer,
                num_shards=1,
                **kwargs,
            )

    def hooked(rows, dim, **options):
        return HookEmbedding(rows, dim, embeddings_regularizer=regularizer, **options)

    model = _compiled(embed.distributed_model(_network(hooked, rows=-1)))
    assert isinstance(model.get_layer("sparse_C1"), HookEmbedding)
    assert model.get_layer("sparse_C1").activity_regularizer is regularizer
    assert {spec.index for spec in model.tables.values()} == {"hash"}
    losses = model.fit(FIELDS, LABELS, batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


class LogisticRegression(keras.Model):
    def __init__(self):
        super().__init__()
        self.embeddings = embed.Embedding(-1, 1, keras.initializers.Zeros(), num_shards=16)
        self.concatenate = keras.layers.Concatenate()
        self.towers = [keras.layers.Embedding(100, 3), keras.layers.Dense(1, activation="sigmoid")]

    def call(self, inputs):
        fields = [tf.reshape(inputs["I1"], [-1, 1, 1])]
        fields += [tf.reshape(self.embeddings(inputs[name]), [-1, 1, 1]) for name in ("C1", "C2")]
        fields.append(tf.reshape(self.towers[0](inputs["C1"] % 100), [-1, 1, 3]))
        return self.towers[1](self.concatenate(fields)[:, 0])


def test_an_openembedding_script_with_a_subclassed_model(tmp_path):
    """A model without a graph is changed in place, its layers in lists too."""
    model = LogisticRegression()
    assert embed.distributed_model(model) is model
    assert isinstance(model, LogisticRegression)
    _compiled(model)
    assert sorted(spec.dim for spec in model.tables.values()) == [1, 3]
    losses = model.fit(FIELDS, LABELS, batch_size=8, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model.save_weights(tmp_path / "weights")
    expected = model.predict(FIELDS, verbose=0)
    model.fit(FIELDS, LABELS, batch_size=8, verbose=0)
    assert np.abs(model.predict(FIELDS, verbose=0) - expected).max() > 1e-4
    model.load_weights(tmp_path / "weights")
    np.testing.assert_array_equal(model.predict(FIELDS, verbose=0), expected)
    with pytest.raises(ValueError, match="subclassed"):
        model.save_as_original_model(tmp_path / "export")


def test_subclasses_with_steps_of_their_own_are_refused():
    class Own(LogisticRegression):
        def train_step(self, data):
            return {}

    with pytest.raises(ValueError, match="Own overrides train_step"):
        embed.distributed_model(Own())


def test_pulling_and_flags(flags, tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        flags.master_endpoint = ",".join(servers.endpoints)
        flags.wait_num_servers = 3
        with pytest.raises(ValueError, match=r"wait_num_servers is 3, but .* names 2"):
            embed.distributed_model(two_fields())
        flags.wait_num_servers = 2
        model = _compiled(embed.distributed_model(two_fields()))
        assert model.client.servers == 2
        x, y = random_ids(64)
        dataset = tf.data.Dataset.from_tensor_slices((tuple(x), y)).batch(16)
        model.fit(embed.pulling(dataset, model, steps=4).prefetch(4), verbose=0)
        assert model.optimizer.iterations == 4
        model.client.close()
    finally:
        servers.end()
    with pytest.raises(ValueError, match=r"must be a tf\.data\.Dataset"):
        embed.pulling(x, model)
    flags.master_endpoint, flags.num_workers = "", 2
    with pytest.raises(ValueError, match="num_workers is 2, but distributed_model has 1"):
        embed.distributed_model(two_fields())
    flags.num_workers, flags.config = 1, "[1"
    with pytest.raises(ValueError, match=r"flags\.config is not YAML"):
        embed.distributed_model(two_fields())


@pytest.mark.process
def test_several_processes(flags, tmp_path):
    """Started by horovodrun, and each sets flags: the model of one process with the whole batches."""
    server = Servers(tmp_path / "server", 1)
    program = [sys.executable, openembedding_processes.__file__, *server.endpoints, str(tmp_path)]
    try:
        with rendezvous(2) as variables:
            processes = [
                subprocess.Popen(
                    program, env={**os.environ, **mine}, stdout=-1, stderr=subprocess.STDOUT, text=True
                )
                for mine in variables
            ]
            said = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        server.end()
    keras.utils.set_random_seed(0)
    _, expected = openembedding_processes.fit(0, 1)
    for rank in range(2):
        found = np.load(tmp_path / f"predictions-{rank}.npy")
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5)
    again = _compiled(embed.distributed_model(two_fields()))
    for name in ("save", "checkpoint2.keras"):
        again.load_weights(tmp_path / name)
        x, _ = random_ids(openembedding_processes.BATCH * openembedding_processes.STEPS)
        np.testing.assert_allclose(again.predict(x, verbose=0), expected, rtol=2e-4, atol=1e-5)


def test_processes_are_those_that_were_started(flags, monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ValueError, match="num_workers is 3, but 2 processes were started"):
        flags.num_workers = 3
    np.asarray(tf.zeros(1) + 1)
    with pytest.raises(ValueError, match="before TensorFlow computes anything"):
        flags.num_workers = 2
    assert flags.num_workers == 1


def test_server_models_in_files_and_in_persistent_memory(flags, tmp_path):
    flags.config = f'{{"server": {{"pmem_pool_root_path": "{tmp_path / "pool"}", "cache_size": 1}}}}'
    (tmp_path / "pool").mkdir()
    model = _compiled(embed.distributed_model(two_fields()))
    x, y = random_ids(64)
    model.fit(x, y, batch_size=16, verbose=0)
    rows = model.get_layer("table_a").table.rows(np.arange(80))
    embed.save_server_model(model, tmp_path / "files")
    assert not embed.should_persist_server_model(model)
    embed.persist_server_model(model, tmp_path / "mark", persist_pending_window=2)
    for load, path in ((embed.restore_server_model, "mark"), (embed.load_server_model, "files")):
        model.fit(x, y, batch_size=16, verbose=0)
        assert np.abs(model.get_layer("table_a").table.rows(np.arange(80)) - rows).max() > 1e-3
        load(model, tmp_path / path)
        np.testing.assert_array_equal(model.get_layer("table_a").table.rows(np.arange(80)), rows)
    with pytest.raises(FileExistsError, match="files exists already"):
        embed.save_server_model(model, tmp_path / "files")
    with pytest.raises(CheckpointError, match="does not say which checkpoint"):
        embed.restore_server_model(model, tmp_path / "files")
    model.optimizer.iterations.assign(1500)
    assert embed.should_persist_server_model(model)


def test_a_save_marks_a_checkpoint_of_the_pool_where_the_script_says_so(flags, tmp_path, monkeypatch):
    """The user guide of OpenEmbedding for persistent memory: two assignments, then save and load_weights."""

    def save_server_model(model, filepath, include_optimizer=True):
        embed.persist_server_model(model, filepath, 0)

    flags.config = f'{{"server": {{"pmem_pool_root_path": "{tmp_path / "pool"}", "cache_size": 1}}}}'
    (tmp_path / "pool").mkdir()
    model = _compiled(embed.distributed_model(two_fields()))
    x, y = random_ids(64)
    model.fit(x, y, batch_size=16, verbose=0)
    model.save(tmp_path / "rows")
    monkeypatch.setattr(embed.exb, "save_server_model", save_server_model)
    monkeypatch.setattr(embed.exb, "load_server_model", embed.restore_server_model)
    checkpoints = keras.callbacks.ModelCheckpoint(str(tmp_path / "epoch{epoch}.keras"))
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[checkpoints])
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "B")  # of the same batch
    save_server_model(model, "mem://null/1")
    for name in ("epoch1.keras", "B"):
        found = {str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*.*")}
        assert found == {"config.json", "dense.npz", "openembedding/persisted.json"}
    model.fit(x, y, batch_size=16, verbose=0)
    assert np.abs(model.predict(x, verbose=0) - expected).max() > 1e-4
    model.load_weights(tmp_path / "B/variables/variables")
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    monkeypatch.undo()  # a load finds the number without the assignments too
    model.fit(x, y, batch_size=16, verbose=0)
    model.load_weights(tmp_path / "epoch1.keras")
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    model.load_weights(tmp_path / "rows")
    assert np.abs(model.predict(x, verbose=0) - expected).max() > 1e-4


def test_a_subclassed_model_is_loaded_before_its_first_batch(tmp_path):
    model = _compiled(embed.distributed_model(LogisticRegression()))
    model.fit(FIELDS, LABELS, batch_size=8, verbose=0)
    model.save(tmp_path / "save")
    keras.backend.clear_session()  # a fresh process would have the same names of layers
    again = _compiled(embed.distributed_model(LogisticRegression()))
    again.load_weights(tmp_path / "save")
    np.testing.assert_array_equal(again.predict(FIELDS, verbose=0), model.predict(FIELDS, verbose=0))
    for m in (model, again):
        m.fit(FIELDS, LABELS, batch_size=8, shuffle=False, verbose=0)
    np.testing.assert_allclose(again.predict(FIELDS, verbose=0), model.predict(FIELDS, verbose=0), atol=1e-6)


def test_sparse_as_dense_keeps_a_matrix_in_the_worker():
    def small(rows, dim, name):
        return embed.Embedding(np.int64(rows), dim, name=name, sparse_as_dense=name.endswith("C1"))

    inputs = {name: v % 100 if name[0] == "C" else v for name, v in FIELDS.items()}
    model = _compiled(embed.distributed_model(_network(small, rows=100)))
    assert list(model.tables) == ["sparse_C2"]
    assert model.get_layer("sparse_C1").embeddings.shape == (100, 9)
    losses = model.fit(inputs, LABELS, batch_size=8, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


def test_saves_take_the_place_of_their_like_only(tmp_path):
    model = _compiled(embed.distributed_model(two_fields()))
    x, y = random_ids(16)
    model.train_on_batch(x, y)
    (tmp_path / "mine").write_text("precious")
    for save in (model.save, model.save_weights, model.save_as_original_model):
        with pytest.raises(FileExistsError, match="mine"):
            save(tmp_path / "mine", overwrite=True)
    model.save(tmp_path / "w")
    model.save(tmp_path / "w")
    with pytest.raises(FileExistsError, match="w "):
        model.save_weights(tmp_path / "w", overwrite=False)
    with pytest.raises(
        ValueError, match=r"not its layers: make the model .* model\.load_weights\(directory\)"
    ):
        keras.models.load_model(tmp_path / "w")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "w"]
    other = _compiled(embed.distributed_model(_network()))
    with pytest.raises(CheckpointError, match=r"dense\.npz: variable model/.* (is missing|has shape)"):
        other.load_weights(tmp_path / "w")


class Scores(keras.callbacks.Callback):
    """Gives each epoch a score, and remembers what the model predicts at its end."""

    def __init__(self, scores, x):
        super().__init__()
        self.scores, self.x, self.predictions = scores, x, []

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]
        self.predictions.append(self.model.predict(self.x, verbose=0))


def test_the_best_epoch_comes_back_with_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model = _compiled(embed.distributed_model(two_fields()))
    x, y = random_ids(64)
    scores = Scores([1, 3, 5, 4, 2, 9], x)
    best = {"monitor": "score", "mode": "max"}
    stopping = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True, **best)
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True, **best)
    model.fit(x, y, batch_size=16, epochs=6, callbacks=[scores, stopping, saving], verbose=0)
    assert len(scores.predictions) == 5
    assert np.abs(scores.predictions[4] - scores.predictions[2]).max() > 1e-3
    np.testing.assert_array_equal(model.predict(x, verbose=0), scores.predictions[2])
    assert list((tmp_path / "temporary").iterdir()) == []
    model.fit(x, y, batch_size=16, verbose=0)
    model.load_weights(tmp_path / "best.keras")
    np.testing.assert_array_equal(model.predict(x, verbose=0), scores.predictions[2])


def test_constraints_are_left_out_with_a_warning():
    x = keras.Input((1,), dtype="int64")
    stock = keras.Model(x, keras.layers.Embedding(100, 2, embeddings_constraint="non_neg", name="here")(x))
    with pytest.warns(UserWarning, match="embeddings_constraint of layer 'here' is ignored"):
        embed.distributed_model(stock)


def test_mirrored(tmp_path):
    """A strategy over the one device of a host changes nothing."""
    found = []
    for scope in (contextlib.nullcontext(), tf.distribute.MirroredStrategy(["CPU:0"]).scope()):
        keras.utils.set_random_seed(3)
        with scope:
            model = _compiled(embed.distributed_model(two_fields(), seed=5))
        x, y = random_ids(64)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        found.append(model.predict(x, verbose=0))
    np.testing.assert_array_equal(*found)
    model.save_as_original_model(tmp_path / "export")
    exported = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(exported.serve([tf.constant(v) for v in x]), found[0], atol=1e-6)


def test_mirrored_strategies_of_several_devices_are_refused_with_the_way_to_go(monkeypatch):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    monkeypatch.setattr(type(strategy.extended), "_num_replicas_in_sync", 2)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"MirroredStrategy over 2 .* one process per device"),
    ):
        embed.distributed_model(two_fields())
    monkeypatch.undo()
    with (
        tf.distribute.experimental.CentralStorageStrategy(["CPU:0"]).scope(),
        pytest.raises(ValueError, match="one process per device"),
    ):
        embed.distributed_model(two_fields())
