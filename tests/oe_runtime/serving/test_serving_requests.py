"""TensorFlow Serving's requests over HTTP, and what is wrong with them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime.errors import InputError
from oe_runtime.model_description import Signature, Tensor
from oe_runtime.serving import Model, requests
from oe_runtime.serving.rest import RestServer


def _model(path, kind):
    """A model with its rows inside: ids of a table of any, of one of 9 rows; two outputs, or one of each."""
    ids = keras.Input((2,), dtype="int64", name="ids")
    few = keras.Input((1,), dtype="int32", name="few")
    inputs = [ids] if kind == "one" else [ids, few]
    x = keras.layers.Flatten()(embed.Embedding(-1, 3, name="any")(ids))
    if kind == "two":
        y = keras.layers.Flatten()(keras.layers.Embedding(9, 3, name="nine")(few))
        outputs = {"sum": keras.layers.Dense(1)(keras.layers.Concatenate()([x, y])), "rows": x}
    else:
        outputs = keras.layers.Dense(2)(x)
    model = embed.distributed_model(keras.Model(inputs, outputs), sparse_as_dense_size=5)
    model.compile("sgd", "mse")
    return model, model.save_as_original_model(path / kind)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    servers = {}
    for kind in ("one", "two"):
        model, saved = _model(path, kind)
        server = RestServer(kind, Model.load(saved), "127.0.0.1", 0, max_body_bytes=10_000)
        server.start()
        servers[kind] = model, server
    yield servers
    for _, server in servers.values():
        server.stop()


def _ask(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


IDS = [[-(2**63), 2**63 - 1], [5, -7], [0, 5]]


def test_one_input_and_one_output_need_no_names(served):
    _, server = served["one"]
    path = "/v1/models/one:predict"
    expected = server.versions.main.predict(np.array(IDS))["output_0"]
    for body in (
        {"instances": IDS},
        {"instances": [{"ids": row} for row in IDS], "signature_name": "serving_default"},
    ):
        status, reply = _ask(server, "POST", path, body)
        assert (status, list(reply)) == (200, ["predictions"])
        np.testing.assert_allclose(reply["predictions"], expected, rtol=1e-6)
    for inputs in (IDS, {"ids": IDS}):
        status, reply = _ask(server, "POST", path, {"inputs": inputs})
        assert (status, list(reply)) == (200, ["outputs"])
        np.testing.assert_allclose(reply["outputs"], expected, rtol=1e-6)


def test_several_inputs_and_outputs_by_name(served):
    _, server = served["two"]
    few = [[1], [8], [0]]
    rows = [{"ids": a, "few": b} for a, b in zip(IDS, few, strict=True)]
    # Rows that were never trained are the mean of the initializer in a SavedModel: only 'nine' differs.
    expected = server.versions.main.predict({"ids": np.array(IDS), "few": np.array(few)})
    status, reply = _ask(server, "POST", "/v1/models/two:predict", {"instances": rows})
    assert status == 200
    assert [set(row) for row in reply["predictions"]] == [{"sum", "rows"}] * 3
    for name, array in expected.items():
        np.testing.assert_allclose([row[name] for row in reply["predictions"]], array, rtol=1e-6)
    status, reply = _ask(server, "POST", "/v1/models/two:predict", {"inputs": {"ids": IDS, "few": few}})
    assert status == 200
    np.testing.assert_allclose(reply["outputs"]["sum"], expected["sum"], rtol=1e-6)
    status, reply = _ask(server, "GET", "/v1/models/two/metadata")
    assert reply["model_spec"] == {"name": "two", "signature_name": "", "version": "1"}
    signature = reply["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert {name: info["dtype"] for name, info in signature["inputs"].items()} == {
        "ids": "DT_INT64",
        "few": "DT_INT32",
    }
    assert [d["size"] for d in signature["inputs"]["ids"]["tensor_shape"]["dim"]] == ["-1", "2"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 5000, "not JSON"),
        ([], "not a JSON object"),
        ({}, "one of 'instances' and 'inputs'"),
        ({"instances": [], "inputs": []}, "one of 'instances' and 'inputs'"),
        ({"instances": []}, "at least one example"),
        ({"instances": {"ids": IDS}}, "'instances' must be a list"),
        ({"rows": IDS}, "unknown field 'rows'"),
        ({"inputs": IDS, "signature_name": "other"}, "no signature 'other'"),
        ({"inputs": {"id": IDS}}, "no input 'id'; it has ids"),
        ({"inputs": {}}, "input 'ids' is missing"),
        ({"instances": [{"ids": [1, 2]}, {}]}, "example 1 has other inputs"),
        ({"instances": [{"ids": [1, 2]}, [1, 2]]}, "example 1 has other inputs"),
        ({"inputs": [[1, 2, 3]]}, r"shape \(1, 3\); the model takes \(any, 2\)"),
        ({"inputs": [[1, 2], [3]]}, "input 'ids' is not an array of int64"),
        ({"inputs": [[1.5, 2]]}, "int64, but the request has float64"),
        ({"inputs": [["a", "b"]]}, "int64, but the request has"),
        ({"inputs": [[2**64, 1]]}, "int64"),
        ({"inputs": [[None, 1]]}, "int64"),
    ],
)
def test_bad_requests_say_what_is_wrong(served, body, message):
    _, server = served["one"]
    status, reply = _ask(server, "POST", "/v1/models/one:predict", body)
    assert (status, list(reply)) == (400, ["error"])
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reply["error"])


def test_other_paths_and_methods(served):
    _, server = served["one"]
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1/models/two", 404),
        ("GET", "/v1/models/one/versions/2", 404),
        ("GET", "/v1/models/one/versions/1", 200),
        ("GET", "/v1/models/one:predict", 405),
        ("POST", "/v1/models/one:multi", 404),
        ("POST", "/v1/models/one", 404),
        ("DELETE", "/v1/models/one", 501),
    ):
        got, reply = _ask(server, method, path, b"{}" if method == "POST" else None)
        assert got == status, path
        assert ("error" in reply) == (status != 200)


def test_bodies_are_bounded(served):
    _, server = served["one"]
    path = "/v1/models/one:predict"
    status, reply = _ask(server, "POST", path, b"x" * 10_001)
    assert (status, "this server takes 10000" in reply["error"]) == (413, True)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", path)
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    connection.send(b"2711\r\n" + b"x" * 10_001 + b"\r\n0\r\n\r\n")
    assert connection.getresponse().status == 413
    connection.close()
    # One connection for several requests.
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for body in (b"{", json.dumps({"instances": IDS}).encode()):
        connection.request("POST", path, body)
        reply = connection.getresponse()
        reply.read()
    assert reply.status == 200
    connection.close()


class _Echo:
    """A model that answers with its input, or `answer`, and holds each request until it may go on."""

    version = 1
    inputs = (Tensor("x", "float32", (None,)),)
    outputs = (Tensor("y", "float32", (None,)),)
    signatures = {"serving_default": Signature(inputs, outputs)}  # noqa: RUF012
    platform = "echo"
    answer = None

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.may_go = threading.Event()
        self.may_go.set()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def make_predictor(self, name):
        return None

    def lead(self, call):
        raise AssertionError(call)

    def predict_versioned(self, inputs, *signature):
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.entered.release()
        assert self.may_go.wait(60)
        with self._lock:
            self.at_once -= 1
        return {"y": np.asarray(inputs["x"] if self.answer is None else self.answer, np.float32)}, 1


@pytest.fixture
def echo(request):
    """A server of four connections; parametrize it with other limits."""
    model = _Echo()
    limits = {"max_body_bytes": 1 << 20, "max_connections": 4, **getattr(request, "param", {})}
    server = RestServer("echo", model, "127.0.0.1", 0, **limits)
    server.start()
    yield server, model
    model.may_go.set()
    server.stop()


ECHO = "/v1/models/echo:predict"


@pytest.mark.parametrize(("number", "word"), [("NaN", "nan"), ("-Infinity", "-inf")])
def test_answers_that_are_no_numbers_are_errors_and_valid_json(echo, number, word):
    server, model = echo
    body = f'{{"inputs": [1, {number}]}}'.encode()
    status, reply = _ask(server, "POST", ECHO, body)
    said = f"output 'y' of example 1 is {word}, for which JSON has no number"
    assert status == 400
    assert reply["error"].startswith(f"input 'x' of example 1 is {word}: {said}")
    model.answer = [1, float(number)]
    status, reply = _ask(server, "POST", ECHO, {"inputs": [1.5, 2.5]})
    assert status == 500
    assert reply["error"].startswith(said)
    model.answer = None
    assert _ask(server, "POST", ECHO, {"inputs": [1.5]}) == (200, {"outputs": [1.5]})


def test_long_numbers_are_refused_in_a_sentence(echo, capfd):
    server, _ = echo
    digits = "9" * 5000
    status, reply = _ask(server, "GET", f"/v1/models/echo/versions/{digits}")
    assert (status, "a version of 5000 digits; it is 1" in reply["error"]) == (404, True)
    status, reply = _ask(server, "GET", "/v1/models/echo/versions/%D9%A3")
    assert status == 404
    status, reply = _ask(server, "POST", ECHO, f'{{"inputs": [{digits}]}}'.encode())
    assert (status, "the body is not JSON" in reply["error"]) == (400, True)
    for length, status in ((digits, 413), ("\u0663", 411), ("-1", 411), ("1e3", 411)):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(f"POST {ECHO} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            assert connection.makefile("rb").readline().split()[1] == str(status).encode()
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_with_too_large_a_body_reads_status_413(echo):
    """Clients send all of a body before they read; closed at once, they saw a broken pipe."""
    server, _ = echo
    for _ in range(4):
        status, reply = _ask(server, "POST", ECHO, bytes(8 << 20))
        assert (status, "the body has 8388608 bytes" in reply["error"]) == (413, True)


def test_half_requests_do_not_keep_others_out(echo):
    server, _ = echo
    halves = []
    for i in range(12):
        connection = socket.create_connection(("127.0.0.1", server.port), 60)
        parts = (b"", b"POST ", f"POST {ECHO} HTTP/1.1\r\nX: ".encode())
        full = f"POST {ECHO} HTTP/1.1\r\nContent-Length: 99\r\n\r\n{{".encode()
        connection.sendall((*parts, full)[i % 4])
        halves.append(connection)
    for _ in range(3):
        assert _ask(server, "POST", ECHO, {"inputs": [2.0]}) == (200, {"outputs": [2.0]})
    for connection in halves:
        connection.close()


def test_connections_being_served_are_not_closed_for_new_ones(echo):
    server, model = echo
    model.may_go.clear()
    with ThreadPoolExecutor(4) as pool:
        served = [pool.submit(_ask, server, "POST", ECHO, {"inputs": [float(i)]}) for i in range(4)]
        for _ in served:
            assert model.entered.acquire(timeout=60)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/v1/models/echo")
        assert connection.getresponse().status == 503
        connection.close()
        model.may_go.set()
        assert [one.result(60) for one in served] == [(200, {"outputs": [float(i)]}) for i in range(4)]


@pytest.mark.parametrize("echo", [{"head_seconds": 0.3}], indirect=True)
def test_requests_that_do_not_end_are_ended(echo):
    server, _ = echo
    for start in (f"POST {ECHO} HTTP/1.1\r\n", f"POST {ECHO} HTTP/1.1\r\nContent-Length: 99\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(start.encode())
            assert connection.recv(100) == b"", "closed, though the client is not silent for long"


def test_large_bodies_take_turns(echo):
    server, model = echo
    body = json.dumps({"inputs": [1.0] * 120_000}).encode()
    assert len(body) > server.max_body_bytes // 2
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: _ask(server, "POST", ECHO, body)[0], range(3)))
    assert (replies, model.most_at_once) == ([200] * 3, 1)


@pytest.mark.parametrize("echo", [{"patience_seconds": 0.1}], indirect=True)
def test_large_bodies_do_not_wait_for_long(echo):
    server, model = echo
    body = json.dumps({"inputs": [1.0] * 120_000}).encode()
    model.may_go.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_ask, server, "POST", ECHO, body)
        assert model.entered.acquire(timeout=60)
        status, reply = _ask(server, "POST", ECHO, body)
        assert (status, "busy with" in reply["error"]) == (503, True)
        model.may_go.set()
        assert first.result(60)[0] == 200
    assert _ask(server, "POST", ECHO, {"inputs": [3.0]}) == (200, {"outputs": [3.0]})


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("", "it is empty"),
        (".", "clients take it out of a URL"),
        ("..", "clients take it out of a URL"),
        ("a" * 257, "it has 257 characters, and at most 256 are read"),
        ("\udcff", "it is not valid Unicode"),
    ],
)
def test_labels_that_no_request_can_name_are_refused(label, why):
    with pytest.raises(InputError, match=rf"^no request could name the version label '.*': {why}$"):
        requests.check_new_label(label)


@pytest.mark.parametrize("label", ["stable", "a/b:c?d%2F", "\U0001f600" * 256, "a\nb", "...", " "])
def test_any_other_label_can_be_named(served, label):
    _, server = served["one"]
    requests.check_new_label(label)
    path = f"/v1/models/one/labels/{quote(label, safe='')}"
    assert _ask(server, "GET", path)[0] == 400
    server.versions.labels = {label: None}
    assert _ask(server, "GET", path)[0] == 200
    server.versions.labels = {label: 2}  # a version that is not served
    assert _ask(server, "GET", path)[0] == 404
