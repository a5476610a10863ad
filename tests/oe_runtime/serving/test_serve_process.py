"""`python -m oe_runtime.serve` beside training, asked as TensorFlow Serving is."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from serving_models import Training, batch

from oe_runtime import serve

pytestmark = pytest.mark.process


def ask(url, body=None):
    """(status, reply) of a request."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as reply:  # noqa: S310
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_served_model_follows_training(tmp_path):
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tensorflow_serving.apis")
    import tensorflow as tf
    from tensorflow_serving.apis import (
        get_model_metadata_pb2,
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    x, _ = batch(20)
    columns = {name: array.tolist() for name, array in x.items()}
    instances = [{name: column[i] for name, column in columns.items()} for i in range(20)]
    ready = tmp_path / "ready.json"
    with Training(tmp_path) as training:
        training.fit()
        training.publish(100)
        command = [sys.executable, "-m", "oe_runtime.serve", str(training.export())]
        command += ["--rows", str(training.checkpoints), "--name", "ctr", "--refresh-seconds", "0.2"]
        command += ["--port", "0", "--grpc-port", "0", "--ready-file", str(ready)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                while not ready.exists():
                    assert process.poll() is None, process.communicate()
                    time.sleep(0.05)
                ports = json.loads(ready.read_text())
                url = f"http://127.0.0.1:{ports['port']}/v1/models/ctr"
                state = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
                assert ask(url) == (200, {"model_version_status": [{"version": "100", **state}]})
                status, reply = ask(url + ":predict", {"instances": instances})
                assert (status, reply.keys()) == (200, {"predictions"})
                np.testing.assert_allclose(reply["predictions"], training.predict(x), atol=1e-6)

                training.fit(seed=1)
                assert training.evict_all_but(ids=range(20)) > 0
                training.publish(200, base=100)
                while ask(url)[1]["model_version_status"][0]["version"] == "100":
                    time.sleep(0.05)
                wanted = training.predict(x)
                assert np.abs(wanted - np.array(reply["predictions"])).max() > 1e-3
                status, reply = ask(url + "/versions/200:predict", {"inputs": columns})
                assert (status, reply.keys()) == (200, {"outputs"})
                np.testing.assert_allclose(reply["outputs"], wanted, atol=1e-6)
                assert ask(url + "/versions/100:predict", {"inputs": columns})[0] == 404

                with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
                    prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
                    request = predict_pb2.PredictRequest()
                    request.model_spec.name = "ctr"
                    request.model_spec.signature_name = "serving_default"
                    for name, array in x.items():
                        request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
                    answer = prediction.Predict(request, timeout=60)
                    assert answer.model_spec.version.value == 200
                    np.testing.assert_allclose(tf.make_ndarray(answer.outputs["output_0"]), wanted, atol=1e-6)
                    # Clients of TensorFlow Serving read the values here, not tensor_content.
                    values = answer.outputs["output_0"].float_val
                    np.testing.assert_allclose(np.reshape(values, wanted.shape), wanted, atol=1e-6)
                    request.inputs["b"].CopyFrom(tf.make_tensor_proto(x["b"][:3]))
                    with pytest.raises(grpc.RpcError, match="'b' has 3 examples") as error:
                        prediction.Predict(request, timeout=60)
                    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                    request.model_spec.name = "other"
                    with pytest.raises(grpc.RpcError, match="Servable not found") as error:
                        prediction.Predict(request, timeout=60)
                    assert error.value.code() == grpc.StatusCode.NOT_FOUND
                    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
                    request.model_spec.name = "ctr"
                    found = prediction.GetModelMetadata(request, timeout=60)
                    signatures = get_model_metadata_pb2.SignatureDefMap()
                    assert found.metadata["signature_def"].Unpack(signatures)
                    shape = signatures.signature_def["serving_default"].inputs["a"].tensor_shape
                    assert [dim.size for dim in shape.dim] == [-1, 2]
                    status_of = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus
                    request = get_model_status_pb2.GetModelStatusRequest()
                    request.model_spec.name = "ctr"
                    entry = status_of(request, timeout=60).model_version_status[0]
                    assert entry.version == 200
                    assert entry.state == get_model_status_pb2.ModelVersionStatus.AVAILABLE
            finally:
                process.terminate()
            out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"/v1/models/ctr, gRPC on port {ports['grpc_port']}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such directory"),
        (["."], "neither a model to serve nor the directory of a run"),
        ([".", "--servers", "127.0.0.1:1"], "127.0.0.1:1"),
        ([".", "--servers", "127.0.0.1:1", "--token-file", "none"], "cannot read the token file none"),
        (
            [".", "--servers", "127.0.0.1:1", "--row-precision", "int8"],
            "--row-precision does not go with --servers: servers keep rows as trained",
        ),
        ([".", "--batch-timeout-ms", "1"], "--batch-timeout-ms needs --max-batch-size above 1"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    assert serve.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("flag", ["--refresh-seconds", "--drain-seconds"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(flag, value, capsys):
    """A negative number was taken for 0, or for no limit."""
    with pytest.raises(SystemExit):
        serve.main(["model", f"{flag}={value}"])
    assert f"argument {flag}: {value} is not a number from 0" in capsys.readouterr().err
