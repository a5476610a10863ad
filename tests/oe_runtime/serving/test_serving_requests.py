"""TensorFlow Serving's requests over HTTP, and what is wrong with them."""

from __future__ import annotations

import http.client
import json

import keras
import numpy as np
import pytest

import oe_runtime.keras as embed
from oe_runtime.serving import Model
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
    expected = server.model.predict(np.array(IDS))["output_0"]
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
    expected = server.model.predict({"ids": np.array(IDS), "few": np.array(few)})
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
        ("POST", "/v1/models/one:classify", 404),
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
    assert connection.getresponse().status == 411
    connection.close()
    # One connection for several requests.
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for body in (b"{", json.dumps({"instances": IDS}).encode()):
        connection.request("POST", path, body)
        reply = connection.getresponse()
        reply.read()
    assert reply.status == 200
    connection.close()
