"""Sixty requests to the surface of TensorFlow Serving, as its documents say it.

Each probe asks a server of the model in test_serving_values.py and asserts what TensorFlow Serving does.
``DIFFERENT`` names those where this server does something else, each with a row of the guide's table that
says so.
"""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Callable
from typing import Any

import numpy as np

PROBES: dict[str, Callable[[Any], None]] = {}
DIFFERENT = {
    "rest nan in a reply": "the same in REST replies",
    "grpc MultiInference": "`MultiInference`",
}
ROW = {"text": "ab", "x": 2.0}
EXAMPLE = {"x": 0.75, "word": "a", "n": 2**62 + 1}


def probe(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Add a function to the probes."""

    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        assert name not in PROBES
        PROBES[name] = function
        return function

    return add


def rest(name: str, path: str, body: Any, status: int, *fields: str) -> None:
    """Add a request, the status of its answer, and fields that the answer must have."""

    def ask(serving: Any) -> None:
        found, reply = serving.ask(path, body)
        assert found == status, reply
        assert all(field in reply for field in fields), reply

    PROBES[f"rest {name}"] = ask


def answers(name: str, path: str, body: Any, wanted: Any) -> None:
    """Add a request and its whole answer."""

    def ask(serving: Any) -> None:
        assert serving.ask(path, body) == (200, wanted)

    PROBES[f"rest {name}"] = ask


_WORD = {"signature_name": "measure"}
_LABEL = {"signature_name": "label"}
_STATE = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}

rest("rows", ":predict", {"instances": [ROW, ROW]}, 200, "predictions")
rest("columns", ":predict", {"inputs": {"text": ["a"], "x": [1.0]}}, 200, "outputs")
answers("rows of the only input", ":predict", {**_WORD, "instances": ["abc", ""]}, {"predictions": [3, 0]})
answers("column of the only input", ":predict", {**_WORD, "inputs": ["abc"]}, {"outputs": [3]})
answers("column by name", ":predict", {**_WORD, "inputs": {"word": ["abc"]}}, {"outputs": [3]})
rest("a version", "/versions/1:predict", {"instances": [ROW]}, 200, "predictions")
rest("an unknown version", "/versions/9:predict", {"instances": [ROW]}, 404, "error")
rest("an unknown signature", ":predict", {"signature_name": "none", "instances": [ROW]}, 400, "error")
rest("a missing input", ":predict", {"instances": [{"x": 1.0}]}, 400, "error")
rest("an unknown input", ":predict", {"instances": [{**ROW, "more": 1}]}, 400, "error")
rest("another shape", ":predict", {"instances": [{"text": ["a"], "x": 1.0}]}, 400, "error")
rest("another type", ":predict", {"instances": [{"text": "a", "x": "b"}]}, 400, "error")
rest("no JSON", ":predict", b"{", 400, "error")
rest("no body", ":predict", b"", 400, "error")
rest(
    "rows and columns", ":predict", {"instances": [ROW], "inputs": {"text": ["a"], "x": [1.0]}}, 400, "error"
)
rest("neither rows nor columns", ":predict", {}, 400, "error")
rest("an integer for a float", ":predict", {"instances": [{"text": "a", "x": 2}]}, 200)
answers("bytes", ":predict", {**_WORD, "instances": [{"b64": "/w=="}]}, {"predictions": [1]})
answers("status", "", None, {"model_version_status": [_STATE]})
answers("status of a version", "/versions/1", None, {"model_version_status": [_STATE]})
rest("status of an unknown version", "/versions/9", None, 404, "error")
rest("metadata", "/metadata", None, 200, "model_spec", "metadata")
rest("metadata of a version", "/versions/1/metadata", None, 200, "model_spec", "metadata")
rest("classify", ":classify", {**_LABEL, "examples": [EXAMPLE]}, 200, "result")
rest("classify of a version", "/versions/1:classify", {**_LABEL, "examples": [EXAMPLE]}, 200, "result")
rest("classify without examples", ":classify", {**_LABEL, "examples": []}, 400, "error")
rest("regress", ":regress", {"signature_name": "value", "examples": [{"x": 0.5}]}, 200, "result")
rest("regress by another signature", ":regress", {**_WORD, "examples": [{"x": 0.5}]}, 400, "error")
rest("version label", "/labels/stable:predict", {"instances": [ROW]}, 200, "predictions")


@probe("rest an unknown model")
def _(serving: Any) -> None:
    assert _send(serving, "/v1/models/none:predict", {"instances": [ROW]})[0] == 404


@probe("rest whole outputs of a row")
def _(serving: Any) -> None:
    wanted = {"text": "ab", "text_bytes": {"b64": "YWI="}, "length": 2, "inverse": 0.5, "known": 1.0}
    assert serving.ask(":predict", {"instances": [ROW]}) == (200, {"predictions": [wanted]})


@probe("rest an integer of 63 bits")
def _(serving: Any) -> None:
    _, reply = serving.ask(":classify", {**_LABEL, "examples": [EXAMPLE]})
    assert reply["result"] == [[["a", 0.75], [str(2**62 + 1), 0.25]]]


@probe("rest context of examples")
def _(serving: Any) -> None:
    body = {**_LABEL, "context": {"word": "c"}, "examples": [{"x": 0.75, "n": 1}]}
    assert serving.ask(":classify", body) == (200, {"result": [[["c", 0.75], ["1", 0.25]]]})


@probe("rest nan in a request")
def _(serving: Any) -> None:
    body = b'{"signature_name": "known", "instances": [NaN, 1.0]}'
    assert serving.ask(":predict", body) == (200, {"predictions": [0.0, 1.0]})


@probe("rest infinity in a request")
def _(serving: Any) -> None:
    status, reply = serving.ask(":predict", b'{"instances": [{"text": "a", "x": -Infinity}]}')
    assert (status, abs(reply["predictions"][0]["inverse"])) == (200, 0.0)


@probe("rest nan in a reply")
def _(serving: Any) -> None:
    assert b"NaN" in _send(serving, _path(serving), b'{"instances": [{"text": "a", "x": NaN}]}')[2]


@probe("rest gzip")
def _(serving: Any) -> None:
    body = gzip.compress(json.dumps({"instances": [ROW]}).encode())
    assert _send(serving, _path(serving), body, {"Content-Encoding": "gzip"})[0] == 200


@probe("rest chunks")
def _(serving: Any) -> None:
    data = json.dumps({"instances": [ROW]}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    connection.request("POST", _path(serving), iter([data[:5], data[5:]]), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


@probe("rest no compressed reply")  # evhttp_request.cc compresses none
def _(serving: Any) -> None:
    body = json.dumps({"instances": [ROW] * 500}).encode()
    _, headers, reply = _send(serving, _path(serving), body, {"Accept-Encoding": "gzip"})
    assert (headers["Content-Encoding"], len(json.loads(reply)["predictions"])) == (None, 500)


@probe("rest one connection for two requests")
def _(serving: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    for _ in range(2):
        connection.request("POST", _path(serving), json.dumps({"instances": [ROW]}))
        reply = connection.getresponse()
        assert (reply.status, reply.getheader("Content-Type")) == (200, "application/json"), reply.read()
        reply.read()
    connection.close()


@probe("rest metrics for Prometheus")
def _(serving: Any) -> None:
    assert b"# TYPE" in _send(serving, "/monitoring/prometheus/metrics", None)[2]


@probe("rest metadata of each signature")
def _(serving: Any) -> None:
    found = serving.ask("/metadata")[1]["metadata"]["signature_def"]["signature_def"]
    assert {"serving_default", "measure", "label", "value"} <= found.keys()
    assert found["measure"]["inputs"]["word"]["dtype"] == "DT_STRING"


def _path(serving: Any) -> str:
    return f"/v1/models/{serving.name}:predict"


def _send(
    serving: Any, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    try:
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request("GET" if data is None else "POST", path, data, headers or {})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


# gRPC: `serving.grpc()` gives stubs and requests.

COLUMNS = {"text": np.array([b"ab"], object), "x": np.array([2], np.float32)}


def grpc_answers(name: str, change: Callable[[Any], None], check: Callable[[Any], object]) -> None:
    """Add a Predict with a change of its request, and what its answer must be."""

    def ask(serving: Any) -> None:
        with serving.grpc() as grpc:
            request = grpc.request(COLUMNS)
            change(request)
            assert check(grpc.prediction.Predict(request, timeout=60))

    PROBES[f"grpc {name}"] = ask


def grpc_refuses(name: str, change: Callable[[Any], None], status: str) -> None:
    """Add a Predict with a change of its request, which is refused."""

    def ask(serving: Any) -> None:
        with serving.grpc() as grpc:
            request = grpc.request(COLUMNS)
            change(request)
            assert grpc.refusal(grpc.prediction.Predict, request)[0] == status

    PROBES[f"grpc {name}"] = ask


def _set(field: str, value: Any) -> Callable[[Any], None]:
    return lambda request: setattr(request.model_spec, field, value)


def _version(number: int) -> Callable[[Any], None]:
    return lambda request: setattr(request.model_spec.version, "value", number)


def _content(request: Any) -> None:
    request.inputs["x"].ClearField("float_val")
    request.inputs["x"].tensor_content = np.array([2], np.float32).tobytes()


grpc_answers("Predict", lambda _: None, lambda answer: answer.outputs["length"].int_val == [2])
grpc_answers("values as bytes", _content, lambda answer: answer.outputs["inverse"].float_val == [0.5])
grpc_answers(
    "names its model", lambda _: None, lambda a: (a.model_spec.name, a.model_spec.version.value) == ("m", 1)
)
grpc_answers(
    "names its signature", lambda _: None, lambda a: a.model_spec.signature_name == "serving_default"
)
grpc_answers(
    "output_filter", lambda r: r.output_filter.append("length"), lambda a: [*a.outputs] == ["length"]
)
grpc_answers("a version", _version(1), lambda answer: answer.model_spec.version.value == 1)
grpc_answers("version label", _set("version_label", "stable"), lambda answer: answer.outputs)
grpc_refuses("an unknown output", lambda r: r.output_filter.append("none"), "INVALID_ARGUMENT")
grpc_refuses("an unknown version", _version(9), "NOT_FOUND")
grpc_refuses("an unknown model", _set("name", "none"), "NOT_FOUND")
grpc_refuses("an unknown signature", _set("signature_name", "none"), "INVALID_ARGUMENT")
grpc_refuses("a missing input", lambda request: request.inputs.pop("x"), "INVALID_ARGUMENT")


@probe("grpc GetModelMetadata")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import get_model_metadata_pb2 as messages

    with serving.grpc() as grpc:
        request = messages.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = serving.name
        signatures = messages.SignatureDefMap()
        found = grpc.prediction.GetModelMetadata(request, timeout=60)
        assert found.metadata["signature_def"].Unpack(signatures)
        assert "measure" in signatures.signature_def


@probe("grpc GetModelStatus")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import get_model_status_pb2 as messages

    with serving.grpc() as grpc:
        request = messages.GetModelStatusRequest()
        request.model_spec.name = serving.name
        (entry,) = grpc.models.GetModelStatus(request, timeout=60).model_version_status
        assert (entry.version, entry.state) == (1, messages.ModelVersionStatus.AVAILABLE)


def _with_example(request: Any, serving: Any, signature: str) -> Any:
    request.model_spec.name, request.model_spec.signature_name = serving.name, signature
    example = request.input.example_list.examples.add()
    example.features.feature["x"].float_list.value.append(0.5)
    return request


@probe("grpc Classify")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import classification_pb2 as messages

    with serving.grpc() as grpc:
        request = _with_example(messages.ClassificationRequest(), serving, "label")
        (found,) = grpc.prediction.Classify(request, timeout=60).result.classifications
        assert [one.score for one in found.classes] == [0.5, 0.5]


@probe("grpc Regress")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import regression_pb2 as messages

    with serving.grpc() as grpc:
        request = _with_example(messages.RegressionRequest(), serving, "value")
        (found,) = grpc.prediction.Regress(request, timeout=60).result.regressions
        assert found.value == 2.0


@probe("grpc MultiInference")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import inference_pb2 as messages

    with serving.grpc() as grpc:
        request = messages.MultiInferenceRequest()
        task = request.tasks.add(method_name="tensorflow/serving/regress")
        task.model_spec.name, task.model_spec.signature_name = serving.name, "value"
        example = request.input.example_list.examples.add()
        example.features.feature["x"].float_list.value.append(0.5)
        assert grpc.prediction.MultiInference(request, timeout=60).results


@probe("grpc HandleReloadConfigRequest")
def _(serving: Any) -> None:
    from tensorflow_serving.apis import model_management_pb2 as messages

    with serving.grpc() as grpc:
        request = messages.ReloadConfigRequest()
        config = request.config.model_config_list.config.add(name=serving.name)
        config.version_labels["stable"] = 1  # those that it does not name are gone
        assert grpc.models.HandleReloadConfigRequest(request, timeout=60).status.error_code == 0
