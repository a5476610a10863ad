"""Several kept steps side by side, their labels, and one that follows training beside them."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serve_process import Grpc, Serving
from serving_models import Training, batch
from serving_requests import Asked as Client
from serving_requests import inference, inferred

from oe_runtime.errors import CheckpointError, InputError, ServingError
from oe_runtime.serving import Model
from oe_runtime.serving.model import NotServed
from oe_runtime.serving.rest import RestServer
from oe_runtime.serving.versions import Asked, NotFound, Versions
from oe_runtime.spec import StorageSpec

grpc = pytest.importorskip("grpc")
pytest.importorskip("tensorflow_serving.apis")
from oe_runtime.serving.grpc import GrpcServer  # noqa: E402

STEPS = (100, 200, 300)
X, _ = batch(20)
COLUMNS = {name: array.tolist() for name, array in X.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training, its exported model, and what each kept step answers; step 300 is an increment on 200."""
    directory = tmp_path_factory.mktemp("run")
    answers = {}
    with Training(directory) as training:
        for step, base in ((100, None), (200, None), (300, 200)):
            training.fit(seed=step)
            training.publish(step, base=base)
            answers[step] = training.predict(X)
        yield training, training.export(), answers


@pytest.fixture
def versions(run):
    training, export, _ = run
    with Model.load(export, training.checkpoints) as model:
        versions = Versions(model, "m")
        with contextlib.closing(versions):
            yield versions


def reload_request(*steps, **labels):
    from tensorflow_serving.apis import model_management_pb2

    request = model_management_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(name="m")
    config.version_labels.update(labels)
    config.model_version_policy.specific.versions.extend(steps)
    return request


def test_each_version_answers_for_itself(run, versions):
    _, _, answers = run
    versions.serve([None, 100, 200], {"stable": 100, "next": 200, "canary": None})
    assert list(versions.models) == list(STEPS)
    for asked, step in (
        (Asked(), 300),
        (Asked(100), 100),
        (Asked(200), 200),
        (Asked(300), 300),
        (Asked(label="stable"), 100),
        (Asked(label="next"), 200),
        (Asked(label="canary"), 300),
    ):
        outputs, version = versions.predict(asked, X)
        assert version == step
        np.testing.assert_allclose(outputs["output_0"], answers[step], atol=1e-6)
    with pytest.raises(NotFound, match=r"version 250 of m; it is 100 or 200 or 300$"):
        versions.predict(Asked(250), X)
    said = "'none': the served versions, 100, 200 and 300, have the labels canary, next, stable; ask"
    with pytest.raises(InputError, match=said):
        versions.predict(Asked(label="none"), X)
    versions.serve([100, 200])
    assert (list(versions.models), versions.newest.version) == ([100, 200], 200)
    with pytest.raises(NotFound, match=r"version 300 of m; it is 100 or 200$"):
        versions.predict(Asked(300), X)
    versions.serve([None])
    assert (list(versions.models), versions.pinned) == ([300], [])


def test_what_cannot_be_loaded_changes_nothing(run, versions, tmp_path):
    training, export, answers = run
    versions.serve([None, 100], {"stable": 100})
    damaged = tmp_path / "checkpoints"
    shutil.copytree(training.checkpoints, damaged)
    with Model.load(export, damaged) as model, contextlib.closing(Versions(model, "m")) as other:
        (damaged / "step-0000000100" / "dense.npz").write_bytes(b"no")
        for file in (damaged / "step-0000000200").glob("**/*.oet*"):
            file.write_bytes(file.read_bytes()[:-7])
        for step, said in ((100, "step-0000000100"), (200, "step-0000000200"), (250, "step 250 is not kept")):
            with pytest.raises((CheckpointError, ServingError), match=said):
                other.serve([None, step], {"stable": step})
            assert (list(other.models), other.labels, other.loading) == ([300], {}, ())
    for steps, labels, error, said in (
        ([None, 100, 250], {"stable": 250}, CheckpointError, "step 250 is not kept in"),
        (
            [100, 200],
            {"stable": 300},
            NotServed,
            "'stable' is for version 300, which is not served; 100 and 200",
        ),
    ):
        with pytest.raises(error, match=said):
            versions.serve(steps, labels)
        assert (list(versions.models), versions.labels) == ([100, 300], {"stable": 100})
        assert versions.main.step is None, "it follows training as before"
        outputs, version = versions.predict(Asked(label="stable"), X)
        assert version == 100
        np.testing.assert_allclose(outputs["output_0"], answers[100], atol=1e-6)


def test_one_follows_training_beside_a_pinned_one(tmp_path):
    with Training(tmp_path) as training:
        training.fit(seed=1)
        training.publish(1)
        first = training.predict(X)
        with (
            Model.load(training.export(), training.checkpoints) as model,
            contextlib.closing(Versions(model, "m")) as versions,
            Client(versions) as client,
        ):
            versions.serve([None, 1], {"stable": 1})
            base = 1
            for step in (2, 3):
                training.fit(seed=step)
                training.publish(step, base=base)
                base = step
                assert model.refresh()
                assert list(versions.models) == [1, step]
                for path, want in (
                    ("", training.predict(X)),
                    (f"/versions/{step}", training.predict(X)),
                    ("/versions/1", first),
                    ("/labels/stable", first),
                ):
                    reply = client.core({"inputs": COLUMNS}, f"/v1/models/m{path}:predict")
                    np.testing.assert_allclose(reply["outputs"], want, atol=1e-6)
            assert client.either({"inputs": COLUMNS}, "/v1/models/m/versions/2:predict")[0] == 404


def test_the_core_answers_each_version(run, versions):
    _, _, answers = run
    with Client(versions, max_batch_size=8) as client:
        versions.serve([100, 300], {"a/b ü": 100, "new": None})
        for part, step in (
            ("", 300),
            ("/versions/100", 100),
            ("/versions/300", 300),
            ("/labels/a%2Fb%20%C3%BC", 100),
            ("/labels/new", 300),
        ):
            reply = client.core({"inputs": COLUMNS}, f"/v1/models/m{part}:predict")
            np.testing.assert_allclose(reply["outputs"], answers[step], atol=1e-6)
        for step in (100, 300):
            reply = client.core(inference(X), f"/v2/models/m/versions/{step}/infer")
            assert reply["model_version"] == str(step)
            np.testing.assert_allclose(inferred(reply)["output_0"], answers[step], atol=1e-6)
        assert client.either({"inputs": COLUMNS}, "/v1/models/m/versions/200:predict")[0] == 404
        assert client.either(inference(X), "/v2/models/m/versions/200/infer")[0] == 404


def test_rows_of_each_version_have_a_place_of_their_own(run, tmp_path):
    training, export, answers = run
    place = tmp_path / "rows"
    place.mkdir()
    storage = StorageSpec("dram_ssd", str(place), cache_bytes=1 << 20)
    with (
        Model.load(export, training.checkpoints, storage=storage) as model,
        contextlib.closing(Versions(model, "m")) as versions,
    ):
        versions.serve([None, 100, 200])
        for step in STEPS:
            outputs, _ = versions.predict(Asked(step), X)
            np.testing.assert_allclose(outputs["output_0"], answers[step], atol=1e-6)
        assert len([*place.iterdir()]) == 3
        versions.serve([None])
        assert len([*place.iterdir()]) == 1


@pytest.mark.process
def test_a_process_serves_what_its_options_and_its_file_name(run, tmp_path):
    training, export, answers = run
    step_file = tmp_path / "step"
    flags = ("--rows", str(training.directory), "--version", "100", "--version", "newest", "--step-file")
    labels = ("--version-label", "stable=100", "--version-label", "canary")
    with Serving(tmp_path, export, *flags, str(step_file), *labels) as serving, serving.grpc() as stubs:

        def served():
            status, reply = serving.ask()
            assert status == 200
            states = reply["model_version_status"]
            assert {one["state"] for one in states if int(one["version"]) in STEPS} <= {
                "AVAILABLE",
                "LOADING",
            }
            return [int(one["version"]) for one in states if one["state"] == "AVAILABLE"]

        def wait_for(*steps):
            deadline = time.monotonic() + 60
            while served() != list(steps):
                assert time.monotonic() < deadline, served()
                time.sleep(0.02)

        wait_for(100, 300)
        for part, step in (
            ("", 300),
            ("/versions/100", 100),
            ("/labels/stable", 100),
            ("/labels/canary", 300),
        ):
            status, reply = serving.ask(f"{part}:predict", {"inputs": COLUMNS})
            assert status == 200, reply
            np.testing.assert_allclose(reply["outputs"], answers[step], atol=1e-6)
            assert serving.ask(f"{part}/metadata")[1]["model_spec"]["version"] == str(step)
            if part:
                (state,) = serving.ask(part)[1]["model_version_status"]
                assert state["version"] == str(step)
        _, reply = serving.ask("/v2/models/m/versions/100/infer", inference(X))
        assert reply["model_version"] == "100"
        assert serving.ask("/v2/models/m")[1]["versions"] == ["100", "300"]
        for step in (100, 300):
            request = stubs.request(X)
            request.model_spec.version.value = step
            reply = stubs.prediction.Predict(request, timeout=60)
            assert reply.model_spec.version.value == step
            near = np.reshape(reply.outputs["output_0"].float_val, (-1, 1))
            np.testing.assert_allclose(near, answers[step], atol=1e-6)
        mark = training.checkpoints / "step-0000000100" / "pinned-until"
        assert mark.exists()
        step_file.write_text("200 100\n")
        wait_for(100, 200)
        (named,) = (training.checkpoints / "step-0000000200").glob("pinned-*")
        assert named.read_text() == f"{step_file}\n"
        assert serving.ask("/labels/canary:predict", {"inputs": COLUMNS})[0] == 200
        step_file.write_text("")
        wait_for(100, 300)
    mark.unlink()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--version", "new"], "argument --version: 'new' is neither a step, such as 1000, nor newest"),
        (["--version", "250"], "step 250 is not kept in"),
        (
            ["--version-label", "stable=100"],
            "label 'stable' is for version 100, which is not served; 300 would",
        ),
        (["--version", "100", "--servers", "localhost:1"], "--version does not go with --servers"),
    ],
)
def test_bad_options_are_refused(run, capfd, flags, said):
    from oe_runtime import serve

    training, export, _ = run
    with contextlib.suppress(SystemExit):
        assert serve.main([str(export), "--rows", str(training.directory), "--port", "0", *flags]) == 1
    assert said in capfd.readouterr().err


def test_rows_at_servers_have_one_version(run):
    training, export, _ = run
    with Model.load(export, client=training.client) as model:
        versions = Versions(model, "m")
        for steps in ([1, 2], [None, 100], [7]):
            with pytest.raises(NotServed, match="only the rows of checkpoints have versions to choose from"):
                versions.serve(steps)
        versions.serve([None], {"live": None})
        assert versions.predict(Asked(label="live"), X)[1] == model.version


@pytest.mark.process
def test_reloads_move_labels_between_versions_without_losing_a_request(run, versions):
    _, _, answers = run
    body = json.dumps({"inputs": COLUMNS})
    seen, ended = [], threading.Event()
    versions.serve([100, 200], {"stable": 100, "canary": 200})
    with contextlib.ExitStack() as stack:
        rest = RestServer("m", versions, "127.0.0.1", 0)
        over_grpc = GrpcServer("m", versions, "127.0.0.1", 0, max_body_bytes=1 << 20)
        for server in (rest, over_grpc):
            server.start()
            stack.callback(server.stop)
        stubs = Grpc(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{over_grpc.port}")), "m")

        def ask_rest(part):
            connection = http.client.HTTPConnection("127.0.0.1", rest.port, timeout=60)
            while not ended.is_set():
                connection.request("POST", f"/v1/models/m{part}:predict", body)
                reply = connection.getresponse()
                seen.append((reply.status, json.loads(reply.read()).get("outputs")))
            connection.close()

        def ask_grpc(label):
            request = stubs.request(X)
            request.model_spec.version_label = label
            while not ended.is_set():
                reply = stubs.prediction.Predict(request, timeout=60)
                version = reply.model_spec.version.value
                output = np.reshape(reply.outputs["output_0"].float_val, (-1, 1))
                assert np.allclose(output, answers[version], atol=1e-5)
                seen.append((200, output))

        reload = stubs.models.HandleReloadConfigRequest
        asks = [(ask_rest, ""), (ask_rest, "/labels/stable"), (ask_rest, "/labels/canary")]
        asks += [(ask_grpc, "stable"), (ask_grpc, "canary")]
        with ThreadPoolExecutor(len(asks)) as pool:
            asking = [pool.submit(ask, what) for ask, what in asks]
            try:
                for stable, canary in ((200, 300), (100, 300), (300, 100), (200, 200), (100, 200)):
                    reload(reload_request(stable, canary, stable=stable, canary=canary), timeout=60)
                    assert versions.labels == {"stable": stable, "canary": canary}
                    assert list(versions.models) == sorted({stable, canary})
                for request, status, said in (
                    (reload_request(100, 250, stable=250), "NOT_FOUND", "step 250 is not kept in"),
                    (
                        reload_request(100, stable=100, canary=200),
                        "FAILED_PRECONDITION",
                        "which is not served",
                    ),
                    (reload_request(*range(17)), "INVALID_ARGUMENT", "specific names 17 versions"),
                ):
                    found = stubs.refusal(reload, request)
                    assert (found[0], said in found[1]) == (status, True), found
                    assert list(versions.models) == [100, 200]
            finally:
                ended.set()
            for one in asking:
                one.result()
    assert len(seen) > 20
    for status, outputs in seen:
        assert status == 200, outputs
        assert any(np.allclose(outputs, wanted, atol=1e-5) for wanted in answers.values())
