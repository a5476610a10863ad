"""Rows at running servers that stall, die and come back, as clients of REST and gRPC see it."""

from __future__ import annotations

import http.client
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
from serve_process import Serving
from server_processes import Relay, Server, Servers
from serving_models import Training, batch

from oe_runtime import Client

pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")

pytestmark = pytest.mark.process

LIMIT = 3  # seconds of a request
PULL = 3  # the operation of the wire
SLACK = 10  # seconds that a busy machine may add


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    keras.backend.clear_session()
    path = tmp_path_factory.mktemp("training")
    servers = Servers(path, 2)
    try:
        with Client(servers.endpoints) as client:
            training = Training(path, client)
            training.servers = servers
            training.exported = training.export()
            training.fit()
            training.publish(7)
            yield training
    finally:
        servers.end()


@pytest.fixture
def serving(training, tmp_path):
    """It never looks for checkpoints."""
    flags = ["--servers", ",".join(training.servers.endpoints), "--refresh-seconds", "0"]
    flags += ["--request-seconds", str(LIMIT), "--rows", str(training.checkpoints)]
    with Serving(tmp_path, training.exported, *flags) as serving:
        yield serving


X, _ = batch(8)
COLUMNS = {name: column.tolist() for name, column in X.items()}


def wait_for(serving, state):
    """Wait until the status says so; return the seconds and what it says."""
    begin = time.monotonic()
    while (found := serving.state())[0] != state:
        assert time.monotonic() < begin + 60, found
        time.sleep(0.02)
    return time.monotonic() - begin, found[1]


def is_ready(serving):
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    connection.request("GET", "/v2/health/ready")
    status = connection.getresponse().status
    connection.close()
    assert status in (200, 503)
    return status == 200


def grpc_status(serving):
    from tensorflow_serving.apis import get_model_status_pb2

    with serving.grpc() as grpc:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = serving.name
        (entry,) = grpc.models.GetModelStatus(request, timeout=60).model_version_status
    return entry.State.Name(entry.state), entry.status.error_code, entry.status.error_message


def check_answers(serving, training):
    status, reply = serving.predict(COLUMNS)
    assert status == 200, reply
    np.testing.assert_allclose(reply["outputs"], training.predict(X), atol=1e-5)


def test_the_status_says_what_is_live_and_what_is_of_a_step(serving, training):
    said = "rows are read from the servers at each request; the dense weights are those of step 7"
    assert serving.state() == ("AVAILABLE", said)
    assert grpc_status(serving) == ("AVAILABLE", 0, said)
    assert is_ready(serving)
    check_answers(serving, training)


def test_a_stalled_server_refuses_requests_in_time_and_comes_back(serving, training):
    check_answers(serving, training)
    pid = training.servers.servers[1].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        while any(" T " not in stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
            time.sleep(0.01)
        begin = time.monotonic()
        with ThreadPoolExecutor(13) as pool:
            asked = [pool.submit(serving.predict, COLUMNS) for _ in range(12)]
            seconds, said = wait_for(serving, "LOADING")
            assert seconds < 1 + SLACK / 4
            assert not is_ready(serving)
            assert "127.0.0.1:" in said
            assert grpc_status(serving)[:2] == ("LOADING", 14)
            for future in asked:
                status, reply = future.result()
                assert (status, list(reply)) == (503, ["error"])
        assert time.monotonic() - begin < LIMIT + SLACK
        with serving.grpc() as grpc:
            for _ in range(5):  # no more waits for it
                begin = time.monotonic()
                assert serving.predict(COLUMNS)[0] == 503
                assert time.monotonic() - begin < LIMIT
            begin = time.monotonic()
            assert grpc.refusal(grpc.prediction.Predict, grpc.request(X))[0] == "UNAVAILABLE"
            assert time.monotonic() - begin < LIMIT
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(serving, "AVAILABLE")
    begin = time.monotonic()
    while serving.predict(COLUMNS)[0] != 200:
        assert time.monotonic() < begin + 60
        time.sleep(0.05)
    check_answers(serving, training)
    assert "Traceback" not in serving.errors.read_text()


@pytest.mark.parametrize("asked_meanwhile", [True, False])
def test_a_restarted_server_is_found_again(serving, training, asked_meanwhile):
    check_answers(serving, training)
    server = training.servers.servers[0]
    port = server.endpoint.split(":")[1]
    server.end()
    server.ready_file.unlink()
    assert wait_for(serving, "LOADING")[0] < 1 + SLACK / 4
    if asked_meanwhile:
        status, reply = serving.predict(COLUMNS)
        assert (status, list(reply)) == (503, ["error"])
        assert serving.predict(COLUMNS)[0] == 503
    directory = server.ready_file.parent
    training.servers.servers[0] = Server(directory, "--port", port, index=0, count=2)
    training.servers.endpoints  # noqa: B018 - wait for it
    training.client.reconnect()
    training.client.restore(training.checkpoints / "step-0000000007")
    wait_for(serving, "AVAILABLE")
    check_answers(serving, training)  # the first request already


def test_lookups_do_not_wait_for_each_other(training, tmp_path):
    delay = 0.0

    def hold(op):
        if op == PULL:
            time.sleep(delay)

    relays = [Relay(endpoint, hold) for endpoint in training.servers.endpoints]
    flags = ["--servers", ",".join(relay.endpoint for relay in relays)]
    try:
        with Serving(tmp_path, training.exported, *flags) as serving, ThreadPoolExecutor(4) as pool:
            assert [serving.predict(COLUMNS)[0] for _ in range(2)] == [200, 200]
            delay = 2.0
            begin = time.monotonic()
            replies = list(pool.map(lambda _: serving.predict(COLUMNS)[0], range(4)))
            assert (replies, time.monotonic() - begin < 4 * delay - 1) == ([200] * 4, True)
            delay = 0.0
    finally:
        for relay in relays:
            relay.close()
