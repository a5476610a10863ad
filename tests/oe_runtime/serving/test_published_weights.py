"""Dense weights that training publishes on the servers, as a process that serves the model has them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from server_processes import Server, Servers
from serving_models import Training, batch
from training_runs import DATA, SMALL

from oe_runtime import Client, train
from oe_runtime.errors import ServingError
from oe_runtime.keras import dense
from oe_runtime.published_weights import WeightsPublisher, decode, encode, read
from oe_runtime.serving import Model
from oe_runtime.shared_values import connect_first

pytestmark = pytest.mark.process


@pytest.fixture
def training(tmp_path):
    servers = Servers(tmp_path, 2)
    try:
        with Client(servers.endpoints) as client:
            training = Training(tmp_path, client)
            training.endpoints = servers.endpoints
            training.fit()
            yield training
    finally:
        servers.end()


@pytest.fixture
def said():
    return []


@pytest.fixture
def publisher(training, said):
    return WeightsPublisher(lambda: connect_first(training.endpoints), 0.001, said.append)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_answers_follow_training_and_each_is_of_one_step(training, publisher, said):
    x, _ = batch(16)
    export = training.export()
    expected = {}

    def publish(step):
        for layer, value in (("hidden", step / 100), ("click", -step / 70)):
            found = training.model.get_layer(layer)
            found.set_weights([np.full_like(one, value) for one in found.get_weights()])
        expected[step] = training.predict(x)
        publisher.finish(step, lambda: dense.weights(training.model))

    def ask():
        seen = set()
        while 9 not in seen:
            outputs, version = model.predict_versioned(x)
            np.testing.assert_allclose(outputs["output_0"], expected[version], atol=1e-6)
            seen.add(version)
        return seen

    publish(4)
    with Client(training.endpoints, read_only=True) as reader, Model.load(export, client=reader) as model:
        assert model.version == 4, "what was published before is there at the start"
        assert model.sources.endswith("those of step 4, as training publishes them there")
        model.watch(0)
        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            for step in range(5, 10):
                publish(step)
                wait_for(lambda: model.version == step)  # noqa: B023 - it has ended before the next
        assert {9} <= set.union(*(one.result() for one in asking))
        assert (model.problem, said) == ("", [])


def test_the_newer_of_published_weights_and_checkpoints_is_served(training, publisher):
    x, _ = batch(16)
    export = training.export()
    training.publish(7)
    with (
        Client(training.endpoints, read_only=True) as reader,
        Model.load(export, training.checkpoints, client=reader) as model,
    ):
        assert (model.version, "step 7" in model.sources) == (7, True)
        training.fit(seed=1)
        publisher.finish(11, lambda: dense.weights(training.model))
        assert model.refresh()
        assert (model.version, model.refresh()) == (11, False)
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)
        training.publish(10)
        assert model.refresh()
        assert model.version == 11
        training.publish(12)
        assert model.refresh()
        assert (model.version, "publishes" in model.sources) == (12, False)
        publisher.finish(3, lambda: dense.weights(training.model))  # training went back
        assert model.refresh()
        assert model.version == 3


def test_weights_of_another_model_leave_those_in_use(training, publisher):
    export = training.export()
    publisher.finish(5, lambda: dense.weights(training.model))
    with Client(training.endpoints, read_only=True) as reader, Model.load(export, client=reader) as model:
        model.watch(0)
        publisher.finish(6, lambda: {"model/other": np.zeros(3, np.float32)})
        wait_for(lambda: model.problem)
        assert model.problem.startswith("the dense weights of step 6 at the servers: variable model/")
        assert (model.version, model.unavailable) == (5, "")
        publisher.finish(7, lambda: dense.weights(training.model))
        wait_for(lambda: model.version == 7)
        wait_for(lambda: not model.problem)
        publisher.finish(8, lambda: {"model/other": np.zeros(3, np.float32)})
        with pytest.raises(ServingError, match="step 8 at the servers"):
            Model.load(export, client=reader)


def test_training_does_not_wait_for_the_servers(training, said):
    began, may_connect = threading.Event(), threading.Event()

    def connect():
        began.set()
        may_connect.wait(60)
        return connect_first(training.endpoints)

    publisher = WeightsPublisher(connect, 0.0, said.append)
    calls = []

    def weights():
        calls.append(len(calls))
        return {"a": np.float32([calls[-1]])}

    publisher.offer(1, weights)
    assert began.wait(60)
    publisher.offer(2, weights)
    publisher.offer(3, weights)
    assert calls == [0], "no copies are made while a publication is under way"
    may_connect.set()
    publisher.finish(4, weights)
    assert calls == [0, 1]


def test_the_time_that_a_connection_takes_delays_no_publication(training, said):
    def connect():
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        return connect_first(training.endpoints)

    publisher = WeightsPublisher(connect, 0.001, said.append)
    weights = dense.weights(training.model)
    began = time.monotonic()
    with Client(training.endpoints, read_only=True) as reader:

        def newest(step):
            publisher.offer(step, lambda: weights)
            found = read(reader.core, 0)
            return 0 if found is None else found[1]

        wait_for(lambda: newest(1) == 1)
        wait_for(lambda: newest(2) == 2)
    assert time.monotonic() - began < 8, "as a part of its cost it would have been 10 seconds"


def test_too_large_weights_leave_the_names_to_the_workers(training, publisher, said, monkeypatch):
    monkeypatch.setattr("oe_runtime.shared_values._MOST", 100)
    monkeypatch.setattr("oe_runtime.published_weights._MOST_BYTES", 512 * 100)
    for step in (1, 2):
        publisher.finish(step, lambda: {"a": np.zeros(120_000, np.uint8)})
    assert said == [
        "warning: the dense weights of step 1 are not published: they have 120000 bytes, of which the "
        "servers take 51200"
    ]
    worker = connect_first(training.endpoints)
    assert worker.exchange_shared("queue", 0, b"x")[1], "all names of the job were taken"
    worker.close()


def test_weights_of_any_size_and_type():
    arrays = {
        "large": np.arange(1 << 20, dtype=np.float32).reshape(1024, -1),
        "scalar": np.float64(3),
        "none": np.zeros((0, 4), np.int32),
        "flags": np.array([True, False]),
    }
    step, found, taken = decode(encode(5, arrays, 7.5))
    assert taken == 7.5
    assert step == 5
    assert {name: one.dtype for name, one in found.items()} == {n: a.dtype for n, a in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with pytest.raises((TypeError, ValueError)):
        decode(encode(5, arrays)[:-1])
    with pytest.raises(ValueError, match="has objects"):
        decode(b'{"step": 1, "arrays": [["a", "object", [1]]]}\n12345678')


@pytest.mark.parametrize("flags", [[], ["--publish-seconds", "0"]])
def test_a_run_publishes_its_last_step(tmp_path, flags):
    server, run = Server(tmp_path / "server"), tmp_path / "run"
    try:
        given = [*DATA, *SMALL, "--servers", server.endpoint, "--run-dir", str(run), "--steps", "3", *flags]
        assert train.main(given) == 0
        with (
            Client([server.endpoint], read_only=True) as reader,
            Model.load(run, client=reader) as live,
            Model.load(run) as saved,
        ):
            assert live.version == (1 if flags else 3)
            x = {tensor.name: np.ones((4, tensor.shape[1]), tensor.dtype) for tensor in live.inputs}
            same = np.array_equal(live.predict(x)["output_0"], saved.predict(x)["output_0"])
            assert same == (not flags)
    finally:
        server.end()
