"""No request is lost: with many connections, and while the server ends."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from serve_process import Serving

pytest.importorskip("grpc")
get_model_status_pb2 = pytest.importorskip("tensorflow_serving.apis.get_model_status_pb2")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that answers with its input after about so many milliseconds of work."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, "work")])
    def answer(work):
        def step(i, x):
            return i + 1, tf.matmul(x, x) / 200

        last = tf.while_loop(lambda i, _: i < tf.reduce_max(work), step, [0, tf.ones((200, 200))])
        return {"work": work + tf.cast(last[1][0, 0], tf.int32) * 0}

    path = tmp_path_factory.mktemp("model") / "model"
    tf.saved_model.save(tf.Module(), str(path), {"serving_default": answer})
    return path


def request(serving, work, *, close=False):
    body = json.dumps({"inputs": [work]})
    end = "Connection: close\r\n" if close else ""
    head = f"POST /v1/models/{serving.name}:predict HTTP/1.1\r\nHost: a\r\n{end}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def reply(connection):
    """The parsed reply on a socket, and whether the server ends the connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    body = json.loads(response.read())
    return response.status, body, response.getheader("Connection", "").lower() == "close"


def test_four_hundred_connections_are_served(model, tmp_path):
    """wrk -c 400 had a read error on each connection above 256, whichever had waited longest."""
    with Serving(tmp_path, model) as serving:
        connections = [socket.create_connection(("127.0.0.1", serving.port), 60) for _ in range(400)]
        try:
            for _ in range(3):
                for connection in connections:
                    connection.sendall(request(serving, 1))
                for connection in connections:
                    assert reply(connection) == (200, {"outputs": [1]}, False)
        finally:
            for connection in connections:
                connection.close()


def ask_status(serving, grpc):
    """Wait for an answer, and so for what was sent before on the same connection to have come."""
    asked = get_model_status_pb2.GetModelStatusRequest()
    asked.model_spec.name = serving.name
    assert grpc.models.GetModelStatus(asked, timeout=60).model_version_status


def slow(serving):
    """So much work that it takes a second or more."""
    work = 100
    while True:
        begin = time.monotonic()
        assert serving.predict({"work": [work]})[0] == 200
        if time.monotonic() - begin > 1:
            return work
        work *= 2


def test_requests_that_were_sent_are_answered_before_the_end(model, tmp_path):
    with Serving(tmp_path, model, "--drain-seconds", "110") as serving:  # fifteen of them on a busy machine
        work = slow(serving)
        connections = [socket.create_connection(("127.0.0.1", serving.port), 120) for _ in range(12)]
        idle, late, half, *busy = connections
        idle.sendall(request(serving, 1))
        assert reply(idle)[0] == 200
        for connection in busy:
            connection.sendall(request(serving, work))
        half.sendall(request(serving, 1)[:-3])
        with serving.grpc() as grpc:
            ask_status(serving, grpc)
            sent = grpc.request({"work": np.array([work], np.int32)})
            asked = [grpc.prediction.Predict.future(sent, timeout=120) for _ in range(4)]
            ask_status(serving, grpc)  # they need not have begun: what was sent counts
            serving.process.terminate()
            half.sendall(request(serving, 1)[-3:])
            late.sendall(request(serving, 1))
            for future in asked:
                assert tf.make_ndarray(future.result().outputs["work"]) == [work]
        assert reply(half)[:2] == (200, {"outputs": [1]})
        assert reply(late)[:2] == (200, {"outputs": [1]})
        for connection in busy:
            status, body, ends = reply(connection)
            assert (status, body) == (200, {"outputs": [work]})
            assert ends or connection.recv(1) == b""  # this one was answered before the end
        assert idle.recv(1) == b""  # ended in order
        assert serving.process.wait(60) == 0
        for connection in connections:
            connection.close()
    assert "Traceback" not in serving.errors.read_text()


def test_clients_lose_nothing_while_the_server_ends(model, tmp_path):
    """Each sends one request after the other, and connects again when it is told that its connection ends."""
    lost, answered = [], [0] * 8
    with Serving(tmp_path, model) as serving:
        ready = threading.Barrier(9)

        def ask(number):
            connection = None
            ready.wait(60)
            while True:
                try:
                    connection = connection or socket.create_connection(("127.0.0.1", serving.port), 60)
                except OSError:
                    return  # refused: nothing was sent
                try:
                    connection.sendall(request(serving, 1))
                    status, _, ends = reply(connection)
                    assert status == 200
                    answered[number] += 1
                except (OSError, http.client.HTTPException) as error:
                    lost.append(error)
                    return
                if ends:
                    connection.close()
                    connection = None

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        ready.wait(60)
        while min(answered) < 5:
            time.sleep(0.01)
        serving.process.terminate()
        for thread in threads:
            thread.join(60)
        assert serving.process.wait(60) == 0
    assert lost == []


def test_an_ending_server_is_not_ready(model, tmp_path):
    with Serving(tmp_path, model) as serving:
        work = slow(serving)
        busy = socket.create_connection(("127.0.0.1", serving.port), 120)
        busy.sendall(request(serving, work))
        probe = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        probe.request("GET", "/v2/health/ready")
        found = probe.getresponse()
        assert (found.status, json.loads(found.read())) == (200, {"ready": True})
        serving.process.terminate()
        begin = time.monotonic()
        try:
            while found.status == 200:
                assert time.monotonic() < begin + 30
                probe.request("GET", "/v2/health/ready")
                found = probe.getresponse()
                said = found.read()
            assert (found.status, b"ending" in said) == (503, True)
        except ConnectionRefusedError:
            pass  # it is not ready either
        assert reply(busy)[0] == 200
        busy.close()
        assert serving.process.wait(60) == 0


def test_a_ready_file_that_cannot_be_written_is_one_line(model, tmp_path):
    path = tmp_path / "nowhere" / "ready.json"
    command = [sys.executable, "-m", "oe_runtime.serve", str(model), "--port", "0", "--ready-file", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"error: {path}: No such file or directory\n" in ended.stderr
    assert "Traceback" not in ended.stderr
