"""Serving a kept step: `Model.pin`, and `python -m oe_runtime.serve --step-file` while requests go on."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serve_process import Grpc, Serving
from serving_models import Training, batch

from oe_runtime.errors import CheckpointError, ServingError
from oe_runtime.serving import Model
from oe_runtime.serving.rest import RestServer
from oe_runtime.serving.versions import Versions

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")
from oe_runtime.serving.grpc import GrpcServer  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory, exported model, and what each kept step answers; step 300 is an increment on 200."""
    directory = tmp_path_factory.mktemp("run")
    x, _ = batch(20)
    answers = {}
    with Training(directory) as training:
        for step, base in ((100, None), (200, None), (300, 200)):
            training.fit(seed=step)
            training.publish(step, base=base)
            answers[step] = training.predict(x)
        yield directory, training.export(), x, answers


def test_a_pinned_step_is_served_until_it_is_unpinned(run):
    directory, export, x, answers = run
    with Model.load(export, directory / "checkpoints") as model:

        def is_step(step):
            assert model.version == step
            np.testing.assert_allclose(model.predict(x)["output_0"], answers[step], atol=1e-6)

        is_step(300)
        for step in (100, 300, 200, 300, 100):
            assert model.pin(step)
            assert not model.refresh(), "a pinned model follows nothing"
            is_step(step)
        with pytest.raises(CheckpointError, match=r"step 250 is not kept in .*: it has 100, 200, 300"):
            model.pin(250)
        assert not model.refresh(), "the earlier pin stays"
        is_step(100)
        assert model.pin(None)
        is_step(300)
    with Model.load(export, directory / "checkpoints", step=200) as model:
        assert model.version == 200


def test_what_has_no_steps_is_refused(run, tmp_path):
    directory, export, _, _ = run
    with pytest.raises(CheckpointError, match="has no step 7: it is step 300"):
        Model.load(export, directory / "checkpoints" / "step-0000000300", step=7)
    bad = tmp_path / "step"
    bad.write_text("latest")
    command = [sys.executable, "-m", "oe_runtime.serve", str(export), "--step-file", str(bad)]
    for more, said in (
        ([], "found 'latest'; it must have one step, such as 1000, or several, or newest"),
        (["--servers", "localhost:1"], "--step-file does not go with --servers"),
        (["--version-label", ""], "no request could name the version label '': it is empty"),
    ):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
    with contextlib.closing(Model(None, None, None, None)) as model, pytest.raises(ServingError):
        model.pin(1)


@pytest.mark.process
def test_a_step_file_changes_the_step_without_losing_a_request(run, tmp_path):
    directory, export, x, answers = run
    inputs = {name: array.tolist() for name, array in x.items()}
    step_file = tmp_path / "step"
    step_file.write_text("200\n")
    flags = ("--rows", str(directory), "--step-file", str(step_file), "--refresh-seconds", "0.2")
    with Serving(tmp_path, export, *flags) as serving:

        def facts():
            return json.loads(serving._ready.read_text())

        def wait_for(**wanted):
            deadline = time.monotonic() + 60
            while not wanted.items() <= facts().items():
                assert time.monotonic() < deadline, facts()
                time.sleep(0.01)

        ended, seen = threading.Event(), []

        def ask():
            while not ended.is_set():
                seen.append(serving.predict(inputs))

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        try:
            wait_for(version=200, step=200, problem="")
            for text, version in (("100", 100), ("", 300), ("200", 200)):
                step_file.write_text(text)
                wait_for(version=version, step=int(text or 0) or None)
            marks = {path.parent.name: path.read_text() for path in directory.glob("checkpoints/*/pinned-*")}
            assert marks == dict.fromkeys(["step-0000000100", "step-0000000200"], f"{step_file}\n")
            step_file.write_text("9")
            wait_for(version=200, step=9)
            assert "step 9 is not kept" in facts()["problem"]
            with serving.grpc() as over_grpc:
                reload = over_grpc.models.HandleReloadConfigRequest
                reload(reload_request(None, stable=200), timeout=60)
                assert serving.ask("/labels/stable")[0] == 200
                found = over_grpc.refusal(reload, reload_request(100))
            assert (found[0], f"--step-file {step_file} chooses" in found[1]) == ("FAILED_PRECONDITION", True)
        finally:
            ended.set()
            for thread in asking:
                thread.join()
    assert {status for status, _ in seen} == {200}
    for _, reply in seen:
        near = [np.allclose(reply["outputs"], wanted, atol=1e-5) for wanted in answers.values()]
        assert any(near), "an answer is of one step"


def reload_request(step, **labels):
    from tensorflow_serving.apis import model_management_pb2

    request = model_management_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(name="m")
    config.version_labels.update(labels)
    if step is not None:
        config.model_version_policy.specific.versions.append(step)
    return request


@pytest.mark.process
def test_a_reload_changes_the_step_and_its_label_without_losing_a_request(run):
    directory, export, x, answers = run
    body = json.dumps({"inputs": {name: array.tolist() for name, array in x.items()}})
    seen, ended = [], threading.Event()
    with Model.load(export, directory) as model, contextlib.ExitStack() as stack:
        versions = Versions(model, "m")
        versions.serve([None], {"stable": 300})
        rest = RestServer("m", versions, "127.0.0.1", 0)
        over_grpc = GrpcServer("m", versions, "127.0.0.1", 0, max_body_bytes=1 << 20)
        for server in (rest, over_grpc):
            server.start()
            stack.callback(server.stop)
        stubs = Grpc(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{over_grpc.port}")), "m")

        def ask_rest():
            connection = http.client.HTTPConnection("127.0.0.1", rest.port, timeout=60)
            while not ended.is_set():
                connection.request("POST", "/v1/models/m/labels/stable:predict", body)
                reply = connection.getresponse()
                seen.append((reply.status, json.loads(reply.read()).get("outputs")))
            connection.close()

        def ask_grpc():
            request = stubs.request(x)
            request.model_spec.version_label = "stable"
            while not ended.is_set():
                reply = stubs.prediction.Predict(request, timeout=60)
                version, output = reply.model_spec.version.value, reply.outputs["output_0"]
                near = np.allclose(output.float_val, answers[version].ravel(), atol=1e-5)
                seen.append((200 if near else version, answers[version]))

        reload = stubs.models.HandleReloadConfigRequest
        with ThreadPoolExecutor() as pool:
            asking = [pool.submit(ask) for ask in (ask_rest, ask_rest, ask_grpc)]
            try:
                for step in (100, 300, 200, 100, 200):
                    reload(reload_request(step, stable=step), timeout=60)
                    assert (model.version, versions.labels) == (step, {"stable": step})
                for request, status, said in (
                    (reload_request(250), "NOT_FOUND", "step 250 is not kept in"),
                    (reload_request(-1), "NOT_FOUND", "step -1 is not kept in"),
                    (reload_request(300, stable=200), "FAILED_PRECONDITION", "not served; 300 would be"),
                    (reload_request(None, stable=200), "FAILED_PRECONDITION", "not served; 300 would be"),
                ):
                    found = stubs.refusal(reload, request)
                    assert (found[0], said in found[1]) == (status, True), found
                    assert not model.refresh(), "the earlier choice stays"
                    assert (model.version, versions.labels) == (200, {"stable": 200})
                reload(reload_request(None, stable=300), timeout=60)
                assert model.version == 300
            finally:
                ended.set()
            for one in asking:
                one.result()
    assert len(seen) > 20
    for status, outputs in seen:
        assert status == 200, outputs
        assert any(np.allclose(outputs, wanted, atol=1e-5) for wanted in answers.values())


@pytest.mark.process
def test_it_ends_with_its_parent(run):
    directory, export, _, _ = run
    command = [sys.executable, "-m", "oe_runtime.serve", str(export), "--rows", str(directory)]
    command += ["--port", "0", "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert "serving" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 0
