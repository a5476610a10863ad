"""The Open Inference Protocol (KServe's v2) over HTTP and gRPC: what it answers, and what it refuses how."""

from __future__ import annotations

import http.client
import json
import threading
import time

import numpy as np
import pytest

from oe_runtime.errors import InputError
from oe_runtime.model_description import Signature, Tensor
from oe_runtime.serving import Model
from oe_runtime.serving.access import Access
from oe_runtime.serving.model import _lists
from oe_runtime.serving.rest import RestServer

grpc = pytest.importorskip("grpc")

from oe_runtime.serving import messages  # noqa: E402
from oe_runtime.serving.grpc import GrpcServer  # noqa: E402
from oe_runtime.serving.messages import message  # noqa: E402


class _Typed:
    """What Model loads: it gives its inputs back, and half of the prices as float16."""

    platform = "test_typed"
    inputs = (
        Tensor("ids", "int64", (None, 2)),
        Tensor("price", "float32", (None,)),
        Tensor("tag", "string", (None,)),
        Tensor("flag", "bool", (None,)),
    )
    outputs = (*inputs, Tensor("half", "float16", (None,)))
    others = {"ids_only": Signature(inputs[:1], inputs[:1])}  # noqa: RUF012

    def make_predictor(self, name):
        return None

    def predict(self, arrays, signature):
        found = dict(arrays)
        if "price" in found:
            found["half"] = (found["price"] / 2).astype("float16")
        if (found["ids"] >= 100).any():
            raise InputError("input 'ids' of example 0: id 100 is not in [0, 100)")
        return found


ARRAYS = {
    "ids": np.array([[1, 2], [3, 4]]),
    "price": np.array([0.5, -2], np.float32),
    "tag": np.array([b"a", "ä".encode()], object),
    "flag": np.array([True, False]),
}
TYPES = {"ids": "INT64", "price": "FP32", "tag": "BYTES", "flag": "BOOL"}


@pytest.fixture(scope="module")
def model():
    with Model(_Typed(), None, None, None) as model:
        yield model


@pytest.fixture(scope="module")
def rest(model):
    server = RestServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def over_grpc(model):
    server = GrpcServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    yield server
    server.stop()


def ask(server, method, path, body=None, **headers):
    """(status, JSON, bytes behind it)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        size = reply.headers["Inference-Header-Content-Length"]
        said = reply.read()
        size = len(said) if size is None else int(size)
        return reply.status, json.loads(said[:size]), said[size:]
    finally:
        connection.close()


def tensors():
    """The inputs of a request as JSON."""
    data = {name: array.reshape(-1).tolist() for name, array in ARRAYS.items()}
    data["tag"] = ["a", "ä"]
    return [
        {"name": name, "shape": list(array.shape), "datatype": TYPES[name], "data": data[name]}
        for name, array in ARRAYS.items()
    ]


def changed(place, **changes):
    """The same with one input changed; None removes a field."""
    found = tensors()
    found[place] = {key: value for key, value in (found[place] | changes).items() if value is not None}
    return found


INFER = "/v2/models/m/infer"


def test_a_server_and_its_model_describe_themselves(rest):
    status, found, _ = ask(rest, "GET", "/v2")
    assert (status, found["name"], found["extensions"]) == (200, "oe_runtime", ["binary_tensor_data"])
    assert ask(rest, "GET", "/v2/health/live")[:2] == (200, {"live": True})
    for path in ("/v2/models/m", "/v2/models/m/versions/1"):
        status, found, _ = ask(rest, "GET", path)
        assert (status, found["versions"], found["platform"]) == (200, ["1"], "test_typed")
        assert [one["datatype"] for one in found["inputs"]] == list(TYPES.values())
        assert found["inputs"][0] == {"name": "ids", "datatype": "INT64", "shape": [-1, 2]}
        assert found["outputs"][-1] == {"name": "half", "datatype": "FP16", "shape": [-1]}
        assert ask(rest, "GET", path + "/ready")[:2] == (200, {"name": "m", "ready": True})


def test_lists_are_described_by_two_inputs():
    from oe_runtime.serving.open_inference import model_metadata
    from oe_runtime.serving.versions import Versions

    class Lists(_Typed):
        inputs = (Tensor("words", "int64", (None,), "words.lengths"),)

    found = model_metadata(Versions(Model(Lists(), None, None, None), "m"))["inputs"]
    assert [(one["name"], one["datatype"]) for one in found] == [
        ("words", "INT64"),
        ("words.lengths", "INT64"),
    ]


@pytest.mark.parametrize("path", [INFER, "/v2/models/m/versions/1/infer"])
def test_inferences_over_http(rest, path):
    for inputs in (tensors(), changed(0, data=ARRAYS["ids"].tolist()), tensors()[::-1]):
        status, found, _ = ask(rest, "POST", path, {"id": 'a"ä', "inputs": inputs})
        assert (status, found["model_name"], found["model_version"]) == (200, "m", "1")
        assert found["id"] == 'a"ä'
        assert found["outputs"] == [
            *tensors(),
            {"name": "half", "shape": [2], "datatype": "FP16", "data": [0.25, -1.0]},
        ]
    asked = [{"name": "flag"}, {"name": "ids", "parameters": {}}]
    status, found, _ = ask(rest, "POST", path, {"inputs": tensors(), "outputs": asked})
    assert [one["name"] for one in found["outputs"]] == ["flag", "ids"]
    assert "id" not in found
    body = {"inputs": tensors()[:1], "parameters": {"signature_name": "ids_only"}}
    assert [one["name"] for one in ask(rest, "POST", path, body)[1]["outputs"]] == ["ids"]


def binary(**changes):
    """A request with all values as bytes behind it, its parts, and its headers."""
    found, tail = [], b""
    for one in tensors():
        array = ARRAYS[one["name"]]
        raw = array.tobytes()
        if one["datatype"] == "BYTES":
            raw = b"".join(len(text).to_bytes(4, "little") + text for text in array)
        del one["data"]
        found.append({**one, "parameters": {"binary_data_size": len(raw)}})
        tail += raw
    head = json.dumps({"inputs": found, **changes}).encode()
    return head, tail, {"Inference-Header-Content-Length": str(len(head))}


def test_values_as_bytes_over_http(rest):
    head, tail, headers = binary(parameters={"binary_data_output": True})
    status, found, values = ask(rest, "POST", INFER, head + tail, **headers)
    assert status == 200
    sizes = [one["parameters"]["binary_data_size"] for one in found["outputs"]]
    assert values == tail + np.array([0.25, -1], np.float16).tobytes()
    assert sum(sizes) == len(values)
    outputs = [{"name": "price", "parameters": {"binary_data": True}}, {"name": "half"}]
    head, tail, headers = binary(outputs=outputs)
    status, found, values = ask(rest, "POST", INFER, head + tail, **headers)
    assert values == ARRAYS["price"].tobytes()
    assert found["outputs"][1]["data"] == [0.25, -1.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h, t, n: (h + t, n - 1), "the body is not JSON"),
        (lambda h, t, n: (h + t, "x"), "Inference-Header-Content-Length is 'x'"),
        (lambda h, t, n: (h + t, -1), "Inference-Header-Content-Length is '-1'"),
        (lambda h, t, n: (h + t, 10**30), "Inference-Header-Content-Length is '1000"),
        (lambda h, t, n: (h + t, 10**6), "Inference-Header-Content-Length is '1000000'; the body has"),
        (lambda h, t, n: (h + t + b"x", n), "the body has 1 bytes more than"),
        (lambda h, t, n: (h + t[:-1], n), "input 'flag': its binary_data_size is 2; 1 bytes are left"),
        (lambda h, t, n: (h + t.replace(b"\x02\0\0\0", b"\x03\0\0\0"), n), "input 'tag': a text has fewer"),
        (lambda h, t, n: (h + t.replace(b"\x02\0\0\0", b"\xff\xff\xff\xff"), n), "input 'tag': a text has"),
        (lambda h, t, n: (h + t[:-1] + b"\x02", n), "input 'flag': a byte of BOOL is neither 0 nor 1"),
        (
            lambda h, t, n: ((c := h.replace(b'"shape": [2, 2]', b'"shape": [3, 2]')) + t, len(c)),
            r"input 'ids' has 32 bytes; INT64 of the shape \[3, 2\] has 48",
        ),
    ],
    ids=range(11),
)
def test_bad_bytes_are_refused(rest, change, said):
    head, tail, _ = binary()
    body, size = change(head, tail, len(head))
    status, found, _ = ask(rest, "POST", INFER, body, **{"Inference-Header-Content-Length": str(size)})
    assert status == 400
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found["error"])


REFUSED = [
    ([], "the request is not a JSON object"),
    ({}, "'inputs' must be a list of tensors"),
    ({"inputs": {}}, "'inputs' must be a list of tensors"),
    ({"inputs": []}, "input 'ids' is missing"),
    ({"inputs": [5]}, r"inputs\[0\] is not a JSON object"),
    ({"inputs": tensors(), "more": 1}, "the request has an unknown field 'more'"),
    ({"inputs": changed(0, more=1)}, r"inputs\[0\] has an unknown field 'more'"),
    ({"inputs": changed(0, name=None)}, r"inputs\[0\] has no name"),
    ({"inputs": changed(0, name="idz")}, "no input 'idz'; it has ids, price"),
    ({"inputs": [*tensors(), tensors()[0]]}, "the request has input 'ids' twice"),
    ({"inputs": changed(0, datatype="INT65")}, "input 'ids': there is no datatype 'INT65'; there are BOOL,"),
    ({"inputs": changed(0, datatype=None)}, "input 'ids': there is no datatype None"),
    ({"inputs": changed(0, datatype=["INT64"])}, "input 'ids': there is no datatype"),
    (
        {"inputs": changed(0, datatype="INT8", data=[1, 2, 3, 300])},
        "input 'ids': a number is outside of int8",
    ),
    ({"inputs": changed(0, datatype="FP32")}, "input 'ids' is int64, but the request has float32"),
    ({"inputs": changed(0, data=[1.5, 2, 3, 4])}, "input 'ids' is int64, but the request has float64"),
    (
        {"inputs": changed(0, data=[True, False, True, True])},
        "input 'ids' is int64, but the request has bool",
    ),
    ({"inputs": changed(0, data=["1", "2", "3", "4"])}, "input 'ids' is int64, but the request has str"),
    ({"inputs": changed(0, data=["1" * 50_000, 2, 3, 4])}, "input 'ids' is int64, but the request has str"),
    ({"inputs": changed(0, shape=[0, 2**62], data=[])}, "input 'ids': its shape is"),
    ({"inputs": changed(0, data=json.loads("[" * 40 + "1.5" + "]" * 40))}, "input 'ids' is not an array"),
    ({"inputs": changed(2, data=json.loads("[" * 40 + '"a"' + "]" * 40))}, "input 'tag' is not an array"),
    ({"inputs": changed(0, data=[2**63, 2, 3, 4])}, "input 'ids': a number is outside of int64"),
    ({"inputs": changed(0, data=[1, 2, 3, 100])}, r"id 100 is not in \[0, 100\)"),
    ({"inputs": changed(0, data=None)}, "input 'ids': its data must be a list"),
    ({"inputs": changed(0, data="1234")}, "input 'ids': its data must be a list"),
    (
        {"inputs": changed(0, data=[1, 2, 3])},
        r"input 'ids' has data of the shape \[3\]; its shape is \[2, 2\]",
    ),
    ({"inputs": changed(0, data=[[1, 2, 3, 4]])}, r"has data of the shape \[1, 4\]; its shape is \[2, 2\]"),
    ({"inputs": changed(0, data=[[1, 2], [3]])}, "input 'ids' is not an array of int64"),
    ({"inputs": changed(0, data=json.loads("[" * 90 + "1" + "]" * 90))}, "input 'ids' "),
    ({"inputs": changed(0, shape=None)}, "input 'ids': its shape must be a list of at most 32 sizes"),
    ({"inputs": changed(0, shape=[-2, -2])}, "input 'ids': its shape must be a list of at most 32 sizes"),
    ({"inputs": changed(0, shape=[-1, 2])}, "input 'ids': its shape must be a list of at most 32 sizes"),
    ({"inputs": changed(0, shape=[2.0, 2])}, "input 'ids': its shape must be a list of at most 32 sizes"),
    ({"inputs": changed(0, shape=[True, 4])}, "input 'ids': its shape must be a list of at most 32 sizes"),
    (
        {"inputs": changed(0, shape=[10**4000] * 9)},
        "input 'ids': its shape must be a list of at most 32 sizes",
    ),
    ({"inputs": changed(0, shape=[10**18] * 40_000)}, "input 'ids': its shape must be a list of at most 32"),
    ({"inputs": changed(0, shape=[2**62] * 32)}, r"has data of the shape \[4\]; its shape is \[4611686018"),
    ({"inputs": changed(0, shape=[2**32, 2**32])}, r"has data of the shape \[4\]; its shape is \[4294967296"),
    ({"inputs": changed(0, shape=[4])}, r"input 'ids' has shape \(4,\); the model takes \(any, 2\)"),
    ({"inputs": changed(0, shape=[4, 1])}, r"input 'ids' has shape \(4, 1\); the model takes \(any, 2\)"),
    ({"inputs": changed(0, shape=[], data=[1])}, r"input 'ids' has shape \(\); the model takes"),
    ({"inputs": changed(1, shape=[3], data=[1, 2, 3])}, "input 'price' has 3 examples, but 'ids' has 2"),
    ({"inputs": changed(1, data=[1, 1e39])}, "input 'price': 1e\\+39 is outside of float32"),
    ({"inputs": changed(2, data=["a", 5])}, "input 'tag' is string, but the request has int"),
    ({"inputs": changed(2, data=["a", "\ud800"])}, "input 'tag' is not an array of string"),
    ({"inputs": changed(3, data=[1, 0])}, "input 'flag' is bool, but the request has int64"),
    ({"inputs": tensors(), "id": 5}, "the request's id must be a text"),
    ({"inputs": tensors(), "outputs": "ids"}, "'outputs' must be a list of tensors"),
    ({"inputs": tensors(), "outputs": [{"name": "x"}]}, "no output 'x'; it has ids, price, tag, flag, half"),
    ({"inputs": tensors(), "outputs": [{"name": "ids"}] * 2}, "the request has output 'ids' twice"),
    ({"inputs": tensors(), "parameters": {"sequence_id": 5}}, "the request has the parameter 'sequence_id'"),
    ({"inputs": tensors(), "parameters": 5}, "the request: its parameters are not a JSON object"),
    ({"inputs": tensors(), "parameters": {"signature_name": "x"}}, "no signature 'x'"),
    ({"inputs": tensors(), "parameters": {"binary_data_output": 1}}, "'binary_data_output' must be bool"),
    (
        {"inputs": changed(0, parameters={"shared_memory_region": "x"})},
        "input 'ids' has the parameter 'shared",
    ),
    ({"inputs": changed(0, parameters={"binary_data_size": 5})}, "input 'ids' has data and binary_data_size"),
    ({"inputs": changed(0, data=None, parameters={"binary_data_size": 5})}, "is 5; 0 bytes are left"),
    ({"inputs": changed(0, data=None, parameters={"binary_data_size": -5})}, "is -5; 0 bytes are left"),
    (
        {"inputs": tensors(), "outputs": [{"name": "ids", "parameters": {"classification": 3}}]},
        "output 'ids' has the parameter 'classification'",
    ),
]


@pytest.mark.parametrize(("body", "said"), REFUSED, ids=range(len(REFUSED)))
def test_bad_requests_are_refused_by_name(rest, capfd, body, said):
    status, found, _ = ask(rest, "POST", INFER, body)
    assert (status, list(found)) == (400, ["error"])
    assert "\n" not in found["error"]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found["error"])
    assert "Traceback" not in capfd.readouterr().err


def test_numbers_without_json_are_named_or_answered_as_bytes(rest):
    body = {"inputs": changed(1, data=[0.5, float("nan")]), "outputs": [{"name": "price"}]}
    status, found, _ = ask(rest, "POST", INFER, body)
    assert (status, found["error"].startswith("input 'price' of example 1 is nan")) == (400, True)
    body["outputs"] = [{"name": "price", "parameters": {"binary_data": True}}]
    status, _, values = ask(rest, "POST", INFER, body)
    np.testing.assert_array_equal(np.frombuffer(values, np.float32), [0.5, np.nan])


def test_texts_that_are_none_are_answered_as_bytes(rest):
    head, tail, headers = binary(outputs=[{"name": "tag"}])
    tail = tail.replace("ä".encode(), b"\xff\xfe")
    status, found, _ = ask(rest, "POST", INFER, head + tail, **headers)
    assert (status, "output 'tag' has bytes that are no text" in found["error"]) == (500, True)


def test_other_paths_and_methods(rest):
    for method, path, status in (
        ("GET", "/v2/", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/other/ready", 404),
        ("GET", "/v2/models/m/versions/2", 404),
        ("GET", "/v2/models/m/versions/v1/ready", 404),
        ("GET", "/v2/models/m/versions/" + "1" * 5000, 404),
        ("GET", INFER, 405),
        ("GET", "/v2/health/live?x=1", 200),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/m/versions/2/infer", 404),
        ("POST", "/v2/models/m", 404),
        ("POST", "/v2/health/live", 404),
        ("POST", "/v2/repository/index", 404),
        ("POST", "/v2", 404),
    ):
        found, reply, _ = ask(rest, method, path, b"{}" if method == "POST" else None)
        assert (found, "error" in reply) == (status, status != 200), path


def test_a_model_that_cannot_answer_is_not_ready(rest, over_grpc, model, monkeypatch):
    with grpc.insecure_channel(f"127.0.0.1:{over_grpc.port}") as channel:
        watched = method(channel, "grpc.health.v1.Health/Watch", "HealthCheck")(
            message("HealthCheckRequest")(service="m"), timeout=60
        )
        assert next(watched).status == 1
        monkeypatch.setattr(Model, "unavailable", "the servers are gone")
        assert next(watched).status == 2
        assert unary(channel, "inference.GRPCInferenceService/ServerLive", "ServerLive").live
        assert not unary(channel, "inference.GRPCInferenceService/ServerReady", "ServerReady").ready
        assert not unary(channel, "inference.GRPCInferenceService/ModelReady", "ModelReady", name="m").ready
        for service in ("", "m", "inference.GRPCInferenceService"):
            check = unary(channel, "grpc.health.v1.Health/Check", "HealthCheck", service=service)
            assert check.status == 2
        for path in ("/v2/health/ready", "/v2/models/m/ready"):
            assert ask(rest, "GET", path)[:2] == (503, {"error": "the servers are gone"})
        assert ask(rest, "GET", "/v2/health/live")[0] == 200
        monkeypatch.undo()
        assert next(watched).status == 1
        watched.cancel()


def method(channel, path, messages):
    """A method of a service, as a client's stub has it."""
    kind = channel.unary_stream if path.endswith("Watch") else channel.unary_unary  # as published stubs
    return kind(
        f"/{path}",
        request_serializer=lambda one: one.SerializeToString(),
        response_deserializer=message(f"{messages}Response").FromString,
    )


def unary(channel, path, messages, **fields):
    return method(channel, path, messages)(message(f"{messages}Request")(**fields), timeout=60)


FIELDS = {"ids": "int64_contents", "price": "fp32_contents", "tag": "bytes_contents", "flag": "bool_contents"}


def request(raw=False, **fields):
    found = message("ModelInferRequest")(model_name="m", **fields)
    for name, array in ARRAYS.items():
        one = found.inputs.add(name=name, datatype=TYPES[name], shape=array.shape)
        if not raw:
            getattr(one.contents, FIELDS[name]).extend(array.reshape(-1).tolist())
        elif name == "tag":
            found.raw_input_contents.append(
                b"".join(len(text).to_bytes(4, "little") + text for text in array)
            )
        else:
            found.raw_input_contents.append(array.tobytes())
    return found


@pytest.fixture(scope="module")
def channel(over_grpc):
    with grpc.insecure_channel(f"127.0.0.1:{over_grpc.port}") as channel:
        yield channel


def infer(channel, sent):
    return method(channel, "inference.GRPCInferenceService/ModelInfer", "ModelInfer")(sent, timeout=60)


def test_inferences_over_grpc(channel):
    found = infer(channel, request(raw=True, id="7", model_version="1"))
    assert (found.model_name, found.model_version, found.id) == ("m", "1", "7")
    assert [(one.name, one.datatype, list(one.shape)) for one in found.outputs] == [
        *((name, TYPES[name], list(array.shape)) for name, array in ARRAYS.items()),
        ("half", "FP16", [2]),
    ]
    sent = request(raw=True)
    assert list(found.raw_output_contents[:4]) == list(sent.raw_input_contents)
    assert np.frombuffer(found.raw_output_contents[4], np.float16).tolist() == [0.25, -1]
    sent = request()
    for name in ARRAYS:
        sent.outputs.add(name=name)
    found = infer(channel, sent)
    assert not found.raw_output_contents
    assert [one.contents for one in found.outputs] == [one.contents for one in sent.inputs]
    del sent.outputs[:]
    assert len(infer(channel, sent).raw_output_contents) == 5, "half has no field"
    sent = message("ModelInferRequest")(model_name="m")
    sent.parameters["signature_name"].string_param = "ids_only"
    sent.inputs.add().CopyFrom(request().inputs[0])
    assert [one.name for one in infer(channel, sent).outputs] == ["ids"]


def test_bfloat16_is_read_as_its_float32(channel):
    sent = request(raw=True)
    sent.inputs[1].datatype = "BF16"
    sent.raw_input_contents[1] = (
        (np.array([0.5, -2], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    )
    sent.outputs.add(name="price")
    assert list(infer(channel, sent).raw_output_contents) == [ARRAYS["price"].tobytes()]


def test_a_model_describes_itself_over_grpc(channel):
    service = "inference.GRPCInferenceService"
    assert unary(channel, f"{service}/ServerMetadata", "ServerMetadata").name == "oe_runtime"
    found = unary(channel, f"{service}/ModelMetadata", "ModelMetadata", name="m", version="1")
    assert (found.platform, list(found.versions)) == ("test_typed", ["1"])
    assert list(found.inputs[0].shape) == [-1, 2]


GRPC_REFUSED = [
    (lambda one: setattr(one, "model_name", "x"), "NOT_FOUND", "model 'x'; this is 'm'"),
    (lambda one: setattr(one, "model_version", "2"), "NOT_FOUND", "version 2 of m; it is 1"),
    (lambda one: setattr(one, "model_version", "v1"), "NOT_FOUND", "version 'v1' of m; it is 1"),
    (lambda one: one.raw_input_contents.append(b"x"), "", "raw_input_contents has 1 tensors for 4 inputs"),
    (lambda one: one.raw_input_contents.extend([b"x"] * 4), "", "input 'ids' has contents beside raw_input"),
    (lambda one: one.inputs.pop(), "", "input 'flag' is missing"),
    (lambda one: one.inputs.add(name="x", datatype="FP32"), "", "input 'x' has data of the shape"),
    (lambda one: one.outputs.add(name="x"), "", "the model has no output 'x'"),
    (lambda one: one.inputs.extend([one.inputs[0]] * 10_000), "", "has 10004 inputs; at most 10000 are read"),
    (lambda one: setattr(one, "model_name", "x" * 30_000), "NOT_FOUND", "model 'xxx"),
    (lambda one: setattr(one.inputs[0], "datatype", "INT65"), "", "there is no datatype 'INT65'"),
    (lambda one: setattr(one.inputs[0], "datatype", "FP32"), "", "has int64_contents; FP32 belongs in fp32_"),
    (lambda one: setattr(one.inputs[1], "datatype", "FP16"), "", "FP16 belongs in raw_input_contents"),
    (lambda one: one.inputs[0].contents.fp32_contents.append(1), "", "has fp32_contents; INT64 belongs in"),
    (lambda one: one.inputs[0].contents.int64_contents.append(1), "", r"of the shape \[5\]; its shape is"),
    (lambda one: one.inputs[0].contents.Clear(), "", r"of the shape \[0\]; its shape is \[2, 2\]"),
    (lambda one: one.inputs[0].shape.append(-1), "", "its shape must be a list of at most 32 sizes"),
    (lambda one: one.inputs[0].shape.extend([2**62] * 4), "", r"has data of the shape \[4\]; its shape is"),
    (lambda one: one.inputs[0].shape.extend([2**62] * 90_000), "", "must be a list of at most 32 sizes"),
    (lambda one: one.inputs[0].contents.int64_contents.__setitem__(0, 100), "", "id 100 is not in"),
    (lambda one: one.parameters["timeout"].SetInParent(), "", "the request has the parameter 'timeout'"),
    (
        lambda one: (
            one.inputs[0].parameters["binary_data_size"].MergeFrom(message("InferParameter")(int64_param=3))
        ),
        "",
        "input 'ids' has the parameter 'binary_data_size'",
    ),
]


@pytest.mark.parametrize(("change", "status", "said"), GRPC_REFUSED, ids=range(len(GRPC_REFUSED)))
def test_bad_requests_over_grpc_are_refused_by_name(channel, capfd, change, status, said):
    sent = request()
    change(sent)
    with pytest.raises(grpc.RpcError, match=said) as error:
        infer(channel, sent)
    assert error.value.code().name == (status or "INVALID_ARGUMENT")
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_no_message_is_refused(channel, capfd):
    for path in (
        "inference.GRPCInferenceService/ModelInfer",
        "inference.GRPCInferenceService/ServerLive",
        "tensorflow.serving.PredictionService/Classify",
        "grpc.health.v1.Health/Check",
    ):
        with pytest.raises(grpc.RpcError, match="the request is not a") as error:
            channel.unary_unary(f"/{path}")(b"\xff", timeout=60)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="the request is not a HealthCheckRequest") as error:
        next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff", timeout=60))
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError, match="the request is not a ServerReflectionRequest"):
        next(
            channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
                iter([b"\xff"])
            )
        )
    assert "Traceback" not in capfd.readouterr().err


def test_health_of_other_services(channel):
    with pytest.raises(grpc.RpcError, match="service 'x'") as error:
        unary(channel, "grpc.health.v1.Health/Check", "HealthCheck", service="x")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    watched = method(channel, "grpc.health.v1.Health/Watch", "HealthCheck")(
        message("HealthCheckRequest")(service="x"), timeout=60
    )
    assert next(watched).status == 3
    watched.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_clients_find_the_services_by_reflection(channel, version):
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    def ask_for(**fields):
        reflection = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=message("ServerReflectionResponse").FromString,
        )
        asked = message("ServerReflectionRequest")(**fields)
        return next(reflection(iter([asked]), timeout=60))

    services = {one.name for one in ask_for(list_services="*").list_services_response.service}
    assert services == set(messages.METHODS)
    for service in services:
        pool = DescriptorPool()
        for file in ask_for(file_containing_symbol=service).file_descriptor_response.file_descriptor_proto[
            ::-1
        ]:
            pool.Add(FileDescriptorProto.FromString(file))
        assert pool.FindServiceByName(service).methods
    name = "oe_runtime/inference.proto"
    assert ask_for(file_by_filename=name).file_descriptor_response.file_descriptor_proto
    for fields in ({"file_by_filename": "x"}, {"file_containing_symbol": "x.y"}, {}):
        assert ask_for(**fields).error_response.error_code == 5
    asked = ask_for(all_extension_numbers_of_type="inference.ModelInferRequest")
    assert asked.error_response.error_code == 5


def test_a_server_that_is_watched_ends_at_once(model):
    server = GrpcServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watched = method(channel, "grpc.health.v1.Health/Watch", "HealthCheck")(
            message("HealthCheckRequest")(), timeout=60
        )
        assert next(watched).status == 1
        reflection = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        go_on = iter(lambda: time.sleep(0.01) or b"", None)
        assert next(reflection(go_on, timeout=60))
        began = time.monotonic()
        server.stop(30)
        assert time.monotonic() - began < 10
        assert [one.status for one in watched] == [2]


def test_streams_hold_no_thread_of_requests(model, monkeypatch):
    from oe_runtime.serving import grpc as served

    monkeypatch.setattr(served, "_STREAMS", 3)
    monkeypatch.setattr(served, "_THREADS", 1)
    server = GrpcServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            watch = method(channel, "grpc.health.v1.Health/Watch", "HealthCheck")
            streams = [watch(message("HealthCheckRequest")(), timeout=60) for _ in range(3)]
            assert [next(one).status for one in streams] == [1] * 3
            with pytest.raises(grpc.RpcError, match="there are 3 streams already") as error:
                next(watch(message("HealthCheckRequest")(), timeout=60))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert infer(channel, request()).model_name == "m"
            for one in streams:
                one.cancel()
        counted = server.calls.stats()["requests"]
        assert counted["Watch"] == {"OK": 3, "RESOURCE_EXHAUSTED": 1}
        assert counted["ModelInfer"] == {"OK": 1}
        assert server.calls.stats()["examples"] == 2
    finally:
        server.stop()


def test_callers_without_a_token_or_a_request_hold_no_thread_of_requests(model, monkeypatch):
    from oe_runtime.serving import grpc as served

    monkeypatch.setattr(served, "_STREAMS", 3)
    monkeypatch.setattr(served, "_THREADS", 2)
    server = GrpcServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20, access=Access(token="secret"))
    server.start()
    came = threading.Event()
    silence = iter(lambda: came.wait(30) and b"", None)
    secret = [("authorization", "Bearer secret")]
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            predict = channel.stream_unary("/tensorflow.serving.PredictionService/Predict")
            refused = [predict.future(silence, timeout=60) for _ in range(4)]
            assert {one.exception().code() for one in refused} == {grpc.StatusCode.UNAUTHENTICATED}
            watch = channel.stream_stream("/grpc.health.v1.Health/Watch")
            waiting = [watch(silence, timeout=60, metadata=secret) for _ in range(3)]
            stub = method(channel, "inference.GRPCInferenceService/ModelInfer", "ModelInfer")
            assert stub(request(), metadata=secret, timeout=60).model_name == "m"
            with pytest.raises(grpc.RpcError, match="there are 3 streams already"):
                next(watch(silence, timeout=60, metadata=secret))
            began = time.monotonic()
            server.stop(30)
            assert time.monotonic() - began < 10
            for one in waiting:
                with pytest.raises(grpc.RpcError):
                    next(one)
    finally:
        came.set()
        server.stop()


@pytest.mark.parametrize("lengths", [[2**62] * 4 + [5], [-1, 6], [6], [2, 2]])
def test_lengths_that_do_not_sum_are_refused(lengths):
    """Beyond int64 a sum begins again: PyTorch then read outside of its memory."""
    tensor = Tensor("words", "int64", (None,), "words.lengths")
    with pytest.raises(InputError, match="must be the lengths of lists that have 5 elements"):
        _lists(tensor, [1, 2, 3, 4, 5], lengths)


def test_only_health_needs_no_token(model):
    server = GrpcServer("m", model, "127.0.0.1", 0, max_body_bytes=1 << 20, access=Access(token="secret"))
    server.start()
    rest = RestServer("m", model, "127.0.0.1", 0)
    rest.use_access(Access(token="secret"))
    rest.start()
    try:
        for path in ("/v2", "/v2/models/m", "/v2/models/m/ready"):
            assert ask(rest, "GET", path)[0] == 401
            assert ask(rest, "GET", path, Authorization="Bearer secret")[0] == 200
        assert ask(rest, "POST", INFER, {"inputs": tensors()})[0] == 401
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            codes = {}
            for service, methods in messages.METHODS.items():
                for name in (text.split()[0] for text in methods.split(", ")):
                    try:
                        channel.unary_unary(f"/{service}/{name}")(b"", timeout=60)
                        codes[name] = "OK"
                    except grpc.RpcError as error:
                        codes[name] = error.code().name
            opened = {name for name, code in codes.items() if code != "UNAUTHENTICATED"}
            assert opened == {"Check", "ServerLive", "ServerReady"}
            metadata = [("authorization", "Bearer secret")]
            infer_with = method(channel, "inference.GRPCInferenceService/ModelInfer", "ModelInfer")
            assert infer_with(request(), metadata=metadata, timeout=60).model_name == "m"
    finally:
        server.stop()
        rest.stop()


# Of open_inference_grpc.proto and health.proto, as published.
PUBLISHED = {
    "ModelInferRequest": (
        "model_name=1 model_version=2 id=3 parameters=4 inputs=5 outputs=6 raw_input_contents=7"
    ),
    "ModelInferRequest.InferInputTensor": "name=1 datatype=2 shape=3 parameters=4 contents=5",
    "ModelInferRequest.InferRequestedOutputTensor": "name=1 parameters=2",
    "ModelInferResponse": "model_name=1 model_version=2 id=3 parameters=4 outputs=5 raw_output_contents=6",
    "ModelInferResponse.InferOutputTensor": "name=1 datatype=2 shape=3 parameters=4 contents=5",
    "InferTensorContents": (
        "bool_contents=1 int_contents=2 int64_contents=3 uint_contents=4 uint64_contents=5 fp32_contents=6 "
        "fp64_contents=7 bytes_contents=8"
    ),
    "InferParameter": "bool_param=1 int64_param=2 string_param=3 double_param=4 uint64_param=5",
    "ModelMetadataResponse": "name=1 versions=2 platform=3 inputs=4 outputs=5",
    "ModelReadyRequest": "name=1 version=2",
    "HealthCheckRequest": "service=1",
    "HealthCheckResponse": "status=1",
}


def test_messages_have_the_numbers_of_the_published_ones():
    ours = messages._INFERENCE | messages._HEALTH
    for name, numbers in PUBLISHED.items():
        texts = (text.split() for text in ours[name].split(", "))
        assert " ".join(f"{field}={number}" for number, field, _ in texts) == numbers
    published = pytest.importorskip("tritonclient.grpc.service_pb2")
    theirs = published.DESCRIPTOR.message_types_by_name
    for name, fields in messages._INFERENCE.items():
        outer, _, inner = name.rpartition(".")
        other = theirs[outer].nested_types_by_name[inner] if outer else theirs[name]
        for text in fields.split(", ") if fields else ():
            number, field, _ = text.split()
            assert other.fields_by_number[int(number)].name == field


def test_a_client_of_triton_is_answered(over_grpc, rest):
    client = pytest.importorskip("tritonclient.grpc")
    over_http = pytest.importorskip("tritonclient.http")
    for library, server in ((client, over_grpc), (over_http, rest)):
        found = library.InferenceServerClient(f"127.0.0.1:{server.port}")
        assert found.is_server_live()
        assert found.is_model_ready("m", "1")
        inputs = []
        for name, array in ARRAYS.items():
            inputs.append(library.InferInput(name, array.shape, TYPES[name]))
            inputs[-1].set_data_from_numpy(array)
        answer = found.infer("m", inputs, request_id="5")
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(answer.as_numpy(name), array)
        found.close()
