"""Rows that are pulled ahead: the same bits as one step after the other, errors where they belong."""

from __future__ import annotations

import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import ROWS, random_ids, two_fields
from server_processes import Server

import oe_runtime.keras as embed
from oe_runtime.client import Client
from oe_runtime.errors import GradientError, KeyRangeError, ServerLost
from oe_runtime.keras.step_bodies import TRAIN

pytestmark = pytest.mark.usefixtures("deterministic")
BATCH = 16


def _layer_that_evicts(rows, dim, *args, **kwargs):
    eviction = [{"name": "cap", "max_rows": 40, "policy": "lru"}]
    return embed.Embedding(-1, dim, *args, eviction=eviction, **kwargs)


def _model(client=None, stock=None, optimizer=None, **options):
    keras.utils.set_random_seed(3)
    model = embed.distributed_model(
        (stock or two_fields)(), client or Client.in_process(servers=2), **options
    )
    model.compile(optimizer or keras.optimizers.Adagrad(0.5), "binary_crossentropy", metrics=["AUC"])
    return model


def _all_rows(model):
    return {name: model.get_layer(name).table.rows(np.arange(ROWS)) for name in model.tables}


def _assert_equal(one, other):
    for name, rows in _all_rows(one).items():
        np.testing.assert_array_equal(rows, _all_rows(other)[name], err_msg=name)
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def _calls(model, monkeypatch):
    """Which thread did what, as a list that grows."""
    calls = []
    main = threading.current_thread()
    for name in ("plan", "refresh", "push"):
        real = getattr(model.client, name)

        def spy(*args, real=real, name=name, **kwargs):
            calls.append((name, threading.current_thread() is main))
            return real(*args, **kwargs)

        monkeypatch.setattr(model.client, name, spy)
    return calls


@pytest.fixture(params=["one batch ahead", "two batches ahead"])
def batches_ahead(request, monkeypatch):
    """With servers that read ahead, and without; here they have nothing to read."""
    if request.param == "two batches ahead":
        monkeypatch.setattr(Client, "reads_ahead", True)


class _BetweenSteps(keras.callbacks.Callback):
    def __init__(self, at, action):
        super().__init__()
        self._at, self._action, self._step = at, action, 0

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        if self._step == self._at:
            self._action()


@pytest.mark.usefixtures("batches_ahead")
def test_fit_gives_the_same_bits_and_works_ahead(monkeypatch):
    x, y = random_ids(200)
    models = [_model(), _model(pipeline=False)]
    calls = _calls(models[0], monkeypatch)
    losses = [
        m.fit(
            x, y, batch_size=BATCH, epochs=2, validation_data=random_ids(50, seed=1), shuffle=False, verbose=0
        ).history
        for m in models
    ]
    assert losses[0] == losses[1]
    _assert_equal(*models)
    # In each epoch 13 batches and 4 of validation: all but the first ones were prepared in the other thread.
    planned = [on_main for name, on_main in calls if name == "plan"]
    assert planned.count(True) == 2 * 2
    assert planned.count(False) == 2 * (12 + 3)


def test_the_other_thread_pushes_and_pulls_again_where_a_batch_follows(monkeypatch):
    x, y = random_ids(160)
    model = _model()
    calls = []
    main = threading.current_thread()
    core = model.client._core

    class Spy:
        def __getattr__(self, name):
            real = getattr(core, name)

            def call(*args):
                calls.append((name, threading.current_thread() is main))
                return real(*args)

            return call if name in ("push", "refresh") else real

    monkeypatch.setattr(model.client, "_core", Spy())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert [call for call in calls if call[0] == "push"] == [("push", False)] * 10
    last = [max(i for i, call in enumerate(calls) if call == (name, False)) for name in ("push", "refresh")]
    assert last[0] > last[1]  # after the last push nothing is pulled; before, each is followed by a refresh
    after = [calls[i + 1] for i, call in enumerate(calls) if call[0] == "push" and i != last[0]]
    assert after == [("refresh", False)] * 9
    calls.clear()
    model.train_on_batch([v[:BATCH] for v in x], y[:BATCH])  # nothing follows: done when it returns
    assert ("push", True) in calls


def test_the_error_of_a_push_comes_before_the_next_step():
    x, y = random_ids(64)
    y[2 * BATCH] = np.nan
    model = _model()
    with pytest.raises(GradientError):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert model.optimizer.iterations == 3
    y[2 * BATCH], y[-1] = 0, np.nan
    with pytest.raises(GradientError):  # of the last batch
        _model().fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


@pytest.mark.usefixtures("batches_ahead")
@pytest.mark.parametrize("kind", ["repeated", "generator", "steps_per_execution"])
def test_every_way_to_give_data(kind):
    x, y = random_ids(160)
    models = [_model(), _model(pipeline=False)]

    def generator():
        for begin in range(0, 160, BATCH):
            yield tuple(v[begin : begin + BATCH] for v in x), y[begin : begin + BATCH]

    for model in models:
        dataset = tf.data.Dataset.from_tensor_slices((tuple(x), y)).batch(BATCH)
        if kind == "generator":
            model.fit(generator(), verbose=0)
        elif kind == "repeated":
            model.fit(dataset.repeat(), steps_per_epoch=7, epochs=3, validation_data=dataset, verbose=0)
        else:
            if kind == "steps_per_execution":
                model.compile(keras.optimizers.Adagrad(0.5), "binary_crossentropy", steps_per_execution=4)
            model.fit(dataset, epochs=2, verbose=0)
    _assert_equal(*models)
    assert models[0].optimizer.iterations == models[1].optimizer.iterations


@pytest.mark.usefixtures("batches_ahead")
def test_saves_restores_and_other_models_between_steps(tmp_path):
    x, y = random_ids(160)
    models = [_model(), _model(pipeline=False)]
    for number, model in enumerate(models):
        directory = tmp_path / str(number)
        directory.mkdir()
        model.client.save(directory)
        other = _model(model.client)  # on the same tables

        def roll_back(model=model, directory=directory):
            model.client.restore(directory)

        def train_other(other=other):
            other.train_on_batch([v[:BATCH] for v in x], y[:BATCH])

        callbacks = [_BetweenSteps(3, train_other), _BetweenSteps(5, roll_back)]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    _assert_equal(*models)


def test_tables_that_evict_and_frozen_ones():
    def stock():
        model = two_fields(_layer_that_evicts)
        model.get_layer("table_b").trainable = False
        return model

    x, y = random_ids(160)
    models = [_model(stock=stock), _model(stock=stock, pipeline=False)]
    for model in models:
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    _assert_equal(*models)


@pytest.mark.usefixtures("batches_ahead")
def test_train_on_batch_with_prefetch(monkeypatch):
    x, y = random_ids(160)
    batches = [([v[i : i + BATCH] for v in x], y[i : i + BATCH]) for i in range(0, 160, BATCH)]
    models = [_model(), _model(pipeline=False)]
    calls = _calls(models[0], monkeypatch)
    for model in models:
        for number, batch in enumerate(batches):
            if number + 1 < len(batches) and number != 4:
                # (after the seventh comes another one than was announced)
                after = [(*batch, None) for batch in batches[number + 2 :]]
                model.prefetch(*batches[0 if number == 6 else number + 1], after=after[0] if after else None)
            model.train_on_batch(*batch)
    _assert_equal(*models)
    # Of the batches after those, three turn out not to be the next ones.
    dropped = 3 if models[0].client.reads_ahead else 0
    assert [on_main for name, on_main in calls if name == "plan"].count(False) == 8 + dropped


@pytest.mark.usefixtures("batches_ahead")
def test_errors_come_at_their_own_step():
    x, y = random_ids(160)
    x[0][5 * BATCH] = ROWS  # in the sixth batch
    models = [_model(), _model(pipeline=False)]
    for model in models:
        with pytest.raises(KeyRangeError, match="'table_a': key 80"):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert model.optimizer.iterations == 5
    _assert_equal(*models)
    x[0][5 * BATCH] = 0
    for model in models:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    _assert_equal(*models)


def test_a_generator_that_fails_does_so_at_its_own_step(batches_ahead):
    x, y = random_ids(160)

    def generator():
        for begin in range(0, 4 * BATCH, BATCH):
            yield tuple(v[begin : begin + BATCH] for v in x), y[begin : begin + BATCH]
        raise RuntimeError("no more input")

    model = _model()
    with pytest.raises(Exception, match="no more input"):
        model.fit(generator(), verbose=0)
    assert model.optimizer.iterations == 4


@pytest.mark.usefixtures("batches_ahead")
@pytest.mark.parametrize("broken", [2, 3])
def test_a_loop_that_goes_on_after_an_error_loses_no_batch(broken):
    x, y = random_ids(8 * BATCH)
    x[0][broken * BATCH] = ROWS
    model = _model()
    model.make_train_function()
    batches = iter(
        [(tuple(v[i : i + BATCH] for v in x), y[i : i + BATCH]) for i in range(0, 8 * BATCH, BATCH)]
    )
    trained, refused = 0, 0
    while True:
        try:
            model.train_function(batches)
            trained += 1
        except KeyRangeError:
            refused += 1
        except StopIteration:
            break
    assert (trained, refused) == (7, 1)


@pytest.mark.usefixtures("batches_ahead")
def test_announced_arrays_that_are_filled_anew_are_read_anew():
    """Other data came at their step, so that they were free."""
    x, y = random_ids(160)
    batches = [([v[i : i + BATCH] for v in x], y[i : i + BATCH], None) for i in range(0, 160, BATCH)]
    models = [_model(), _model(pipeline=False)]
    for model in models:
        a, b, c = ([v.copy() for v in batches[i][0]] for i in range(3))
        model.prefetch(b, batches[1][1], after=(c, batches[2][1]))
        model.train_on_batch(a, batches[0][1])
        model.train_on_batch(b, batches[1][1])
        model.train_on_batch(batches[5][0], batches[5][1])  # neither announced
        for old, new in zip(c, batches[7][0], strict=True):
            old[:] = new
        model.prefetch(c, batches[7][1])
        model.train_on_batch(batches[6][0], batches[6][1])
        model.train_on_batch(c, batches[7][1])
    _assert_equal(*models)


@pytest.mark.parametrize("after", [np.zeros((2, 3)), (1, 2, 3, 4), ()])
def test_a_batch_after_the_next_that_is_none_is_refused(after):
    x, y = random_ids(BATCH)
    with pytest.raises(ValueError, match="after must be the tuple"):
        _model().prefetch(x, y, after=after)


def test_rows_on_a_drive_are_announced_two_batches_ahead(tmp_path, monkeypatch):
    """All but the first two batches of an epoch, before the batch before them is trained."""
    x, y = random_ids(160)
    drive = Server(
        tmp_path, "--storage", "dram_ssd", "--storage-path", str(tmp_path / "rows"), "--storage-cache", "1M"
    )
    try:
        with Client([drive.endpoint]) as client:
            assert not Client([drive.endpoint], read_ahead=False).reads_ahead
            model = _model(client)
            steps, announced = [0], []
            real = client.read_ahead

            def read_ahead(*pulls):
                announced.append(steps[0])
                real(*pulls)

            monkeypatch.setattr(client, "read_ahead", read_ahead)
            model.fit(
                x,
                y,
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
                callbacks=[_BetweenSteps(step, partial(steps.__setitem__, 0, step)) for step in range(1, 11)],
            )
            assert len(announced) == 8
            assert all(step <= batch + 2 for batch, step in enumerate(announced))
            reference = _model(pipeline=False)
            reference.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            _assert_equal(model, reference)
    finally:
        drive.end()


@pytest.mark.parametrize("storage", ["dram", "dram_ssd"])
def test_a_lost_server_that_comes_back(tmp_path, storage):
    x, y = random_ids(160)
    path = [] if storage == "dram" else ["--storage-path", str(tmp_path / "rows"), "--storage-cache", "1M"]
    server = Server(tmp_path / "first", "--storage", storage, *path)
    try:
        model = _model(Client([server.endpoint]))
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        model.client.save(tmp_path)
        model.save_dense(tmp_path)
        with pytest.raises(ServerLost):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[_BetweenSteps(2, server.end)])
        port = server.endpoint.split(":")[1]
        server = Server(tmp_path / "again", "--port", port, "--storage", storage, *path)
        server.ready()
        model.client.reconnect()
        model.client.restore(tmp_path)
        model.load_dense(tmp_path)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    finally:
        server.end()
        model.client.close()
    reference = _model(pipeline=False)
    reference.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_staleness_is_one_push_always_and_what_it_is_said_to_be():
    """Against steps by hand: pull of batch k + 1 before the push of k."""
    x, y = random_ids(160)
    models = [_model(staleness=1), _model(pipeline=False)]
    models[0].fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    by_hand, client = models[1], models[1].client
    steps, push = by_hand._running(), client.push
    for _ in range(2):
        waiting = []

        def keep(*args, waiting=waiting, **kwargs):
            waiting.append(partial(push, *args, **kwargs))

        client.push = keep
        for begin in range(0, 160, BATCH):
            prepared = steps.prepare(TRAIN, ([v[begin : begin + BATCH] for v in x], y[begin : begin + BATCH]))
            steps.refresh(prepared)
            if waiting:
                waiting.pop()()  # of the batch before, whose rows this one lacks
            steps.finish(prepared)
        waiting.pop()()
    _assert_equal(*models)
    exact = _model(pipeline=False)
    exact.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert np.abs(_all_rows(exact)["table_a"] - _all_rows(by_hand)["table_a"]).max() > 1e-4


def test_saves_wait_for_a_stale_push_and_its_error_is_raised(tmp_path):
    x, y = random_ids(64)
    model = _model(staleness=1)
    steps = []
    model.fit(
        x,
        y,
        batch_size=BATCH,
        verbose=0,
        callbacks=[_BetweenSteps(2, lambda: steps.append(model.client.stats()["servers"]))],
    )
    pushes = [table["version"] for server in steps[0] for table in server["tables"].values()]
    assert pushes == [2] * len(pushes)

    y[BATCH] = np.nan
    with pytest.raises(GradientError):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def test_staleness_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="staleness is 0 or 1"):
        _model(staleness=2)
    with pytest.raises(ValueError, match="needs the pipeline"):
        _model(staleness=1, pipeline=False)
