"""Values of requests and replies, version labels, as clients of REST and gRPC see them."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from serve_process import Serving
from serving_surface import DIFFERENT, PROBES

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")

pytestmark = pytest.mark.process

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "serving.md"


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

    examples = [tf.TensorSpec([None], tf.string, "inputs")]
    features = {
        "x": tf.io.FixedLenFeature([1], tf.float32, [0.25]),
        "n": tf.io.FixedLenFeature([], tf.int64, 0),
        "word": tf.io.FixedLenFeature([], tf.string, ""),
    }

    @tf.function(input_signature=examples)
    def label(inputs):
        found = tf.io.parse_example(inputs, features)
        words = tf.stack([found["word"], tf.strings.as_string(found["n"])], axis=1)
        return {"classes": words, "scores": tf.concat([found["x"], 1 - found["x"]], 1)}

    @tf.function(input_signature=examples)
    def value(inputs):
        return {"outputs": 1 / tf.io.parse_example(inputs, features)["x"]}

    @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
    def known(x):
        return {"known": tf.where(tf.math.is_nan(x), 0.0, 1.0)}

    directory = tmp_path_factory.mktemp("values")
    signatures = {
        "serving_default": answer,
        "measure": measure,
        "label": label,
        "value": value,
        "known": known,
    }
    tf.saved_model.save(tf.Module(), str(directory / "model"), signatures)
    with Serving(directory, directory / "model", "--version-label", "stable") as serving:
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


def test_other_version_labels_are_refused(serving):
    said = "version label 'canary': the served version, 1, has the labels stable; ask for it by its number"
    columns = {"inputs": {"text": ["a"], "x": [1.0]}}
    for path, body in (("", None), ("/metadata", None), (":predict", columns)):
        status, reply = serving.ask(f"/labels/canary{path}", body)
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
            request.model_spec.version_label = "canary"
            code, message = grpc.refusal(call, request)
            assert (code, said in message) == ("INVALID_ARGUMENT", True), message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.Clear(), "the config must be a model_config_list"),
        (lambda r: r.config.custom_model_config.SetInParent(), "custom_model_config is not read"),
        (lambda r: r.metric_names.append("a"), "metric_names: "),
        (lambda r: r.config.model_config_list.config.add(name="n"), "the model 'n'; only 'm' is"),
        (lambda r: r.config.model_config_list.config.add(name="m"), "has 2 entries; one"),
        (lambda r: r.config.model_config_list.ClearField("config"), "has 0 entries; one"),
        (lambda r: setattr(_config(r), "base_path", "/tmp/other"), "base_path '/tmp/other'"),
        (lambda r: setattr(_config(r), "base_path", "s3://a\0"), "base_path 's3://a"),
        (lambda r: setattr(_config(r), "model_platform", "t"), "model_platform: the model is of tensorflow"),
        (lambda r: setattr(_config(r), "model_type", 2), "model_type: the model is of tensorflow"),
        (lambda r: _config(r).logging_config.SetInParent(), "logging_config: requests"),
        (lambda r: _policy(r).all.SetInParent(), "all would keep earlier steps"),
        (lambda r: setattr(_policy(r).latest, "num_versions", 2), "latest would keep earlier steps"),
        (lambda r: _policy(r).specific.versions.append(2), "version 2: only the rows of checkpoints"),
        (lambda r: _policy(r).specific.ClearField("versions"), "specific names 0 versions; name one"),
        (lambda r: _policy(r).specific.versions.__setitem__(0, 2), "version 2: only the rows of checkpoints"),
        (lambda r: _config(r).version_labels.update({"": 1}), "label '': it is empty"),
        (lambda r: _config(r).version_labels.update({"a": 2}), "label 'a' is for version 2"),
        (lambda r: _config(r).version_labels.update({str(i): 1 for i in range(101)}), "has 102 labels"),
    ],
)
def test_a_reload_of_what_is_not_served_is_refused(serving, change, said):
    from tensorflow_serving.apis import model_management_pb2

    request = model_management_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(name="m", model_platform="tensorflow", model_type=1)
    config.base_path = serving.process.args[3]  # as on its command line
    config.version_labels["stable"] = 1
    _policy(request).specific.versions.append(1)
    with serving.grpc() as grpc:
        assert grpc.models.HandleReloadConfigRequest(request, timeout=60).status.error_code == 0
        change(request)
        found = grpc.refusal(grpc.models.HandleReloadConfigRequest, request)
    code = "FAILED_PRECONDITION" if "version 2" in said else "INVALID_ARGUMENT"
    assert (found[0], said in found[1]) == (code, True), found
    assert serving.ask("/labels/stable")[0] == 200, "the labels stay"


def _config(request):
    return request.config.model_config_list.config[0]


def _policy(request):
    return _config(request).model_version_policy


def test_each_signature_is_answered_and_described(serving):
    status, reply = serving.ask(":predict", {"signature_name": "measure", "instances": ["abc", b64(b"\xff")]})
    assert (status, reply) == (200, {"predictions": [3, 1]})
    status, reply = serving.ask(":predict", {"signature_name": "measure", "inputs": {"word": ["ab"]}})
    assert (status, reply) == (200, {"outputs": [2]})
    known = "it has 'serving_default', "
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
        "label": ["inputs"],
        "value": ["inputs"],
        "known": ["x"],
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


EXAMPLES = [{"x": 0.75, "word": "é", "n": [5]}, {"word": b64(b"b"), "n": -(2**63)}]


def test_examples_are_classified_and_regressed(serving):
    body = {"signature_name": "label", "examples": EXAMPLES}
    wanted = [[["é", 0.75], ["5", 0.25]], [["b", 0.25], [str(-(2**63)), 0.75]]]
    assert serving.ask("/versions/1:classify", body) == (200, {"result": wanted})
    body["context"] = {"x": [0.5], "word": "c"}  # of which an example's own features go before
    wanted[1] = [["b", 0.5], [str(-(2**63)), 0.5]]
    assert serving.ask(":classify", body) == (200, {"result": wanted})
    body["signature_name"] = "value"
    status, reply = serving.ask(":regress", body)
    assert status == 200, reply
    np.testing.assert_allclose(reply["result"], [1 / 0.75, 2])


def test_examples_over_grpc(serving):
    from tensorflow_serving.apis import classification_pb2, regression_pb2

    with serving.grpc() as grpc:
        request = classification_pb2.ClassificationRequest()
        request.model_spec.name, request.model_spec.signature_name = serving.name, "label"
        example = tf.train.Example()
        example.features.feature["x"].float_list.value.append(0.75)
        request.input.example_list.examples.append(example)
        answer = grpc.prediction.Classify(request, timeout=60)
        (found,) = answer.result.classifications
        assert [(one.label, one.score) for one in found.classes] == [("", 0.75), ("0", 0.25)]
        assert (answer.model_spec.signature_name, answer.model_spec.version.value) == ("label", 1)
        request = regression_pb2.RegressionRequest()
        request.model_spec.name, request.model_spec.signature_name = serving.name, "value"
        request.input.example_list_with_context.examples.extend([example, tf.train.Example()])
        request.input.example_list_with_context.context.features.feature["x"].float_list.value.append(0.5)
        answer = grpc.prediction.Regress(request, timeout=60)
        np.testing.assert_allclose([one.value for one in answer.result.regressions], [1 / 0.75, 2])
        request.input.Clear()
        assert grpc.refusal(grpc.prediction.Regress, request) == (
            "INVALID_ARGUMENT",
            "the request has no example",
        )
        request.model_spec.signature_name = "measure"
        code, said = grpc.refusal(grpc.prediction.Regress, request)
        assert (code, said.startswith("signature 'measure' cannot regress")) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"examples": []}, "'examples' must be a list of at least one example"),
        ({"examples": None}, "'examples' must be a list"),
        ({"examples": [5]}, "example 0 is not a JSON object of features"),
        ({"context": [5]}, "context is not a JSON object of features"),
        ({"context": {"word": "x" * 1_000_000}, "examples": [{"n": 1}] * 80}, "80 examples would repeat"),
        ({"examples": [{"\ud800": 1}]}, "example 0: a feature's name"),
        ({"more": 5}, "the request has an unknown field 'more'"),
        ({"examples": [{"x": None}]}, "example 0: feature 'x' must have texts, integers, or numbers"),
        ({"examples": [{"x": [0.5, 1]}]}, "example 0: feature 'x' must have texts, integers, or numbers"),
        ({"examples": [{"x": [[0.5]]}]}, "example 0: feature 'x' must have"),
        ({"examples": [{"x": True}]}, "example 0: feature 'x' must have"),
        ({"examples": [{"x": 1e39}]}, "example 0: feature 'x' has a number outside of float32"),
        ({"examples": [{"n": 2**63}]}, "example 0: feature 'n' has a number outside of int64"),
        ({"examples": [{"word": {"b64": "*"}}]}, "example 0: feature 'word': 'b64' is not text in base64"),
        ({"examples": [{"word": {"c": "*"}}]}, "example 0: feature 'word' is neither a text nor"),
        ({"examples": [{"word": "\ud800"}]}, "example 0: feature 'word'.* is not valid Unicode"),
        ({"examples": [{"x": "text"}]}, "TensorFlow cannot answer it: "),
        ({"examples": [{"x": [0.5, 0.5]}]}, "TensorFlow cannot answer it: "),
        ({"signature_name": "other"}, "no signature 'other'"),
        ({"signature_name": "value"}, "signature 'value' cannot classify, which needs tf.train.Example as"),
        ({"signature_name": ""}, "signature 'serving_default' cannot classify.*; use predict"),
    ],
)
def test_bad_examples_are_refused(serving, change, said):
    status, reply = serving.ask(":classify", {"signature_name": "label", "examples": EXAMPLES, **change})
    assert status == 400, reply
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(reply["error"])
    assert "Traceback" not in serving.errors.read_text()


def test_a_regression_that_is_no_number_is_an_error(serving):
    status, reply = serving.ask(":regress", {"signature_name": "value", "examples": [{"x": 0.5}, {"x": 0.0}]})
    assert (status, reply["error"].startswith("output 'outputs' of example 1 is inf")) == (500, True)


def test_texts_of_an_inference(serving):
    inputs = [
        {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["é", ""]},
        {"name": "x", "shape": [2], "datatype": "FP32", "data": [2, 4]},
    ]
    asked = [{"name": name} for name in ("inverse", "text", "length")]
    path = "/v2/models/m/infer"
    status, reply = serving.ask(path, {"inputs": inputs, "outputs": asked})
    assert (status, reply["outputs"]) == (
        200,
        [
            {"name": "inverse", "datatype": "FP32", "shape": [2], "data": [0.5, 0.25]},
            {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["é", ""]},
            {"name": "length", "datatype": "INT32", "shape": [2], "data": [2, 0]},
        ],
    )
    inputs = [{"name": "word", "shape": [1], "datatype": "BYTES", "data": ["ab"]}]
    body = {"inputs": inputs, "parameters": {"signature_name": "measure"}}
    assert serving.ask(path, body)[1]["outputs"][0]["data"] == [2]


@pytest.mark.parametrize("name", PROBES)
def test_the_surface_of_tensorflow_serving(serving, name):
    """60 probes; what is different is in the guide, and is no crash."""
    if name not in DIFFERENT:
        PROBES[name](serving)
    else:
        with pytest.raises((AssertionError, grpc.RpcError)):
            PROBES[name](serving)
        assert f"| {DIFFERENT[name]} |" in GUIDE.read_text(encoding="utf-8")
    assert serving.state()[0] == "AVAILABLE"
    assert "Traceback" not in serving.errors.read_text()


def test_how_much_of_the_surface_is_the_same():
    assert len(PROBES) == 60
    assert len(PROBES.keys() - DIFFERENT) == 58
