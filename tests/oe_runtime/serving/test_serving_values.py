"""Values of requests and replies, version labels, as clients of REST and gRPC see them."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import tensorflow as tf
from serve_process import Serving

pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """A SavedModel of texts and numbers."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text"), tf.TensorSpec([None], name="x")])
    def answer(text, x):
        return {
            "text": text,
            "text_bytes": text,
            "length": tf.strings.length(text),
            "inverse": 1 / x,
            "known": tf.where(tf.math.is_nan(x), 0.0, 1.0),
        }

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "word")])
    def measure(word):
        return {"bytes": tf.strings.length(word)}

    directory = tmp_path_factory.mktemp("values")
    signatures = {"serving_default": answer, "measure": measure}
    tf.saved_model.save(tf.Module(), str(directory / "model"), signatures)
    with Serving(directory, directory / "model") as serving:
        yield serving


def b64(value: bytes):
    return {"b64": base64.b64encode(value).decode()}


BYTES = [b"\xff\x00a\x00", b"", b"\x00\x00", "é".encode(), b"plain"]


@pytest.mark.parametrize("by_row", [True, False])
def test_bytes_in_base64_come_back_as_they_were(serving, by_row):
    if by_row:
        body = {"instances": [{"text": b64(value), "x": 1.0} for value in BYTES]}
        status, reply = serving.ask(":predict", body)
        assert status == 200, reply
        outputs = {name: [row[name] for row in reply["predictions"]] for name in reply["predictions"][0]}
    else:
        status, reply = serving.predict({"text": [b64(value) for value in BYTES], "x": [1.0] * 5})
        assert status == 200, reply
        outputs = reply["outputs"]
    assert outputs["length"] == [len(value) for value in BYTES]
    # As in TensorFlow Serving, an output whose name ends with _bytes is base64.
    assert outputs["text_bytes"] == [b64(value) for value in BYTES]
    # Of others, only what is no text.
    assert outputs["text"] == [b64(BYTES[0]), "", "\x00\x00", "é", "plain"]


def test_bytes_over_grpc_come_back_as_they_were(serving):
    with serving.grpc() as grpc:
        texts = np.array(BYTES, object)
        outputs = grpc.predict({"text": texts, "x": np.ones(5, np.float32)})
    assert outputs["length"].tolist() == [len(value) for value in BYTES]
    assert outputs["text"].tolist() == BYTES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([1], "input 'text' is string, but the request has"),
        ([["a"]], r"input 'text' has shape \(1, 1\); the model takes \(any\)"),
        ([["a"], "b"], "input 'text' is string, but the request has"),
        ([None], "input 'text' is string, but the request has"),
        ([{"b64": "*"}], "'b64' is not text in base64"),
        ([{"b64": "YQ==", "more": 1}], "input 'text' is string, but the request has"),
        (["\ud800"], "input 'text'.* is not valid Unicode"),
    ],
)
def test_what_is_no_text_is_refused(serving, text, message):
    status, reply = serving.predict({"text": text, "x": [1.0] * len(text)})
    assert status == 400, reply
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reply["error"])
    assert "Traceback" not in serving.errors.read_text()


def test_no_examples_are_answered(serving):
    status, reply = serving.predict({"text": [], "x": []})
    assert (status, reply["outputs"]["length"]) == (200, [])
    with serving.grpc() as grpc:
        assert not grpc.predict({"text": np.empty(0, object), "x": np.empty(0, np.float32)})["text"].size


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_makes_no_number_names_its_input(serving, number):
    body = f'{{"inputs": {{"text": ["a", "b"], "x": [1, {number}]}}}}'.encode()
    status, reply = serving.ask(":predict", body)
    if "999" in number:  # infinity has a word of its own
        assert (status, f"the number {number} is outside of float64" in reply["error"]) == (400, True)
    elif "nfinity" in number:  # 1 / infinity is a number
        assert (status, reply["outputs"]["inverse"]) == (200, [1.0, 0.0])
    else:
        assert (status, "input 'x' of example 1 is nan" in reply["error"]) == (400, True)
        assert "broken" not in reply["error"]


def test_a_model_that_makes_no_number_of_a_number_is_at_fault(serving):
    status, reply = serving.predict({"text": ["a", "b"], "x": [0.0, 1.0]})
    assert status == 500
    assert reply["error"].startswith("output 'inverse' of example 0 is inf, for which JSON has no number")
    with serving.grpc() as grpc:  # which has one
        outputs = grpc.predict({"text": np.array([b"a"], object), "x": np.array([np.nan], np.float32)})
    assert np.isnan(outputs["inverse"]).all()
    assert outputs["known"] == [0.0]


@pytest.mark.parametrize("number", [1e39, -1e300])
def test_a_number_beyond_the_input_s_type_is_refused(serving, number):
    status, reply = serving.predict({"text": ["a", "b"], "x": [1.0, number]})
    assert status == 400, reply
    assert f"input 'x': {number} is outside of float32" in reply["error"]
    with serving.grpc() as grpc:
        request = grpc.request({"text": np.array([b"a"], object), "x": np.array([number])})
        code, message = grpc.refusal(grpc.prediction.Predict, request)
    assert code == "INVALID_ARGUMENT"
    assert f"input 'x': {number} is outside of float32" in message


def test_version_labels_are_refused(serving):
    said = "version label 'stable': this server has no labels"
    columns = {"inputs": {"text": ["a"], "x": [1.0]}}
    for path, body in (("", None), ("/metadata", None), (":predict", columns)):
        status, reply = serving.ask(f"/labels/stable{path}", body)
        assert (status, said in reply["error"]) == (400, True), reply
    from tensorflow_serving.apis import get_model_metadata_pb2, get_model_status_pb2

    with serving.grpc() as grpc:
        for call, request in (
            (grpc.prediction.Predict, grpc.request({"text": np.array([b"a"], object), "x": np.ones(1)})),
            (
                grpc.prediction.GetModelMetadata,
                get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"]),
            ),
            (grpc.models.GetModelStatus, get_model_status_pb2.GetModelStatusRequest()),
        ):
            request.model_spec.name = serving.name
            request.model_spec.version_label = "stable"
            code, message = grpc.refusal(call, request)
            assert (code, said in message) == ("INVALID_ARGUMENT", True), message


def test_each_signature_is_answered_and_described(serving):
    status, reply = serving.ask(":predict", {"signature_name": "measure", "instances": ["abc", b64(b"\xff")]})
    assert (status, reply) == (200, {"predictions": [3, 1]})
    status, reply = serving.ask(":predict", {"signature_name": "measure", "inputs": {"word": ["ab"]}})
    assert (status, reply) == (200, {"outputs": [2]})
    known = "it has 'serving_default', 'measure'"
    for name, said in [("other", known), (3, "no signature 3"), (None, "signature None")]:
        status, reply = serving.ask(":predict", {"signature_name": name, "instances": ["abc"]})
        assert (status, said in reply["error"]) == (400, True), reply
    status, reply = serving.ask(":predict", {"signature_name": "measure", "inputs": {"text": ["a"]}})
    assert (status, reply["error"]) == (400, "the model has no input 'text'; it has word")
    _, reply = serving.ask("/metadata")
    found = reply["metadata"]["signature_def"]["signature_def"]
    assert {name: sorted(one["inputs"]) for name, one in found.items()} == {
        "serving_default": ["text", "x"],
        "measure": ["word"],
    }
    assert found["measure"]["outputs"]["bytes"]["dtype"] == "DT_INT32"
    with serving.grpc() as grpc:
        request = grpc.request({"word": np.array([b"abc", b""], object)})
        request.model_spec.signature_name = "measure"
        answer = grpc.prediction.Predict(request, timeout=60)
        assert list(answer.outputs["bytes"].int_val) == [3, 0]
        assert answer.model_spec.signature_name == "measure"
        request.model_spec.signature_name = "other"
        code, message = grpc.refusal(grpc.prediction.Predict, request)
        assert (code, known in message) == ("INVALID_ARGUMENT", True)
