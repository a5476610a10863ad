"""Exports of PyTorch models, as clients of REST and gRPC see them."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import torch
from serve_process import Serving
from server_processes import Servers
from serving_requests import INFER, inference, inferred
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client, checkpoint
from oe_runtime.published_weights import WeightsPublisher
from oe_runtime.serving import InputError, Model, ServingError
from oe_runtime.serving.versions import Asked, Versions
from oe_runtime.shared_values import connect_first
from oe_runtime.torch.job_state import TorchDense


class Clicks(nn.Module):
    """Tables of any id and of 80 rows, bags, and an embedding that stays in the model."""

    def __init__(self, mode: str = "mean", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.users = embed.Embedding(-1, 4, name="users")
        self.items = nn.Embedding(80, 4, padding_idx=3)
        self.small = nn.Embedding(10, 2)
        self.last = nn.EmbeddingBag(100, 3, mode=mode, padding_idx=0)
        self.coarse = nn.Embedding(80, 2, dtype=dtype)
        self.out = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, items, users, last, numbers):
        embed.pull({self.users: users, self.items: items})
        rows = [self.users(users).flatten(1), self.items(items), self.last(last), self.small(last[:, 1] % 11)]
        x = torch.cat([*rows, self.coarse(items % 80).to(numbers), numbers[:, :1]], 1)
        return {"click": torch.sigmoid(self.out(x)), "rows": x}


def batch(examples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    last = torch.randint(0, 100, (examples, 5), generator=random)
    last[:, 1] = last[:, 1] % 10
    last[0, :4] = 0
    last[1:2] = 0  # an empty bag
    return {
        "numbers": torch.rand(examples, 3, generator=random),
        "last": last,
        "users": torch.randint(0, 50, (examples, 2), generator=random) * 2**50,
        "items": torch.randint(0, 80, (examples,), generator=random),
    }


class Training:
    def __init__(self, client: Client, model: nn.Module | None = None, **options: object) -> None:
        torch.manual_seed(0)
        self.client = client
        self.model = embed.distributed_model(model or Clicks(**options), client)
        adagrad = torch.optim.Adagrad(self.model.parameters(), 0.1)
        self.optimizer = embed.distributed_optimizer(adagrad, self.model)

    def fit(self, steps: int = 5) -> None:
        self.model.train()
        for seed in range(steps):
            self.optimizer.zero_grad()
            self.model(**batch(32, seed))["click"].mean().backward()
            self.optimizer.step()

    def publish(self, directory, step: int) -> None:
        """As a job does."""

        def write(place):
            dense = TorchDense(self.model, [self.optimizer])
            dense.write(dense.values(), place)
            return {"tables": self.client.save(place)}

        directory.mkdir(exist_ok=True)
        checkpoint.publish(directory, step, write)

    def predict(self, x):
        self.model.eval()
        with torch.no_grad():
            return {name: value.numpy() for name, value in self.model(**x).items()}


def equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(np.array(got[name]), values, atol=1e-6)


def arrays(x):
    return {name: value.numpy() for name, value in x.items()}


def columns(x):
    return {name: value.tolist() for name, value in x.items()}


@pytest.fixture
def training():
    with Client.in_process(servers=2) as client:
        training = Training(client)
        training.fit()
        yield training


@pytest.mark.process
def test_served_answers_are_those_of_the_trained_model(training, tmp_path):
    """By REST and gRPC, in a second process too; bad inputs are refused as those of Keras's exports."""
    pytest.importorskip("tensorflow_serving.apis")
    path = embed.export(training.model, tmp_path / "export", batch(1))
    assert training.model.training  # unchanged
    x = batch(9, 3)
    want = training.predict(x)
    for _ in range(2):
        with Serving(tmp_path, path) as serving, serving.grpc() as grpc:
            status, reply = serving.predict(columns(x))
            assert status == 200, reply
            equal(reply["outputs"], want)
            equal(grpc.predict(arrays(x)), want)
            status, reply = serving.ask(INFER, inference(arrays(x)))
            assert status == 200, reply
            equal(inferred(reply), want)
            equal(
                grpc.predict(arrays({name: value[:1] for name, value in x.items()})),
                {name: value[:1] for name, value in want.items()},
            )
    with Serving(tmp_path, path) as serving, serving.grpc() as grpc:
        _, reply = serving.ask("/metadata")
        signature = reply["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert signature["inputs"]["users"]["dtype"] == "DT_INT64"
        assert [one["size"] for one in signature["outputs"]["click"]["tensor_shape"]["dim"]] == ["-1", "1"]
        for name, place, value, message in [
            ("items", (2,), -1, "input 'items' of example 2: id -1 is not in [0, 80)"),
            ("items", (2,), 80, "input 'items' of example 2: id 80 is not in [0, 80)"),
            ("last", (4, 2), 100, "input 'last' of example 4: id 100 is not in [0, 100)"),
        ]:
            bad = arrays(batch(9, 3))
            bad[name][place] = value
            assert serving.predict(columns(bad)) == (400, {"error": message})
            assert serving.ask(INFER, inference(bad)) == (400, {"error": message})
            assert grpc.refusal(grpc.prediction.Predict, grpc.request(bad)) == ("INVALID_ARGUMENT", message)
        for name, value, message in [
            ("users", [[1.5, 2.0]] * 9, "input 'users' is int64, but the request has float64"),
            ("users", [[1]] * 9, "input 'users' has shape (9, 1); the model takes (any, 2)"),
            ("items", [1] * 8, "input 'items' has 8 examples, but 'users' has 9"),
        ]:
            status, reply = serving.predict({**columns(x), name: value})
            assert status == 400
            assert message in reply["error"]


@pytest.mark.process
def test_grpc_needs_no_tensorflow(training, tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_serving.apis")
    path = embed.export(training.model, tmp_path / "export", batch(1))
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    x = batch(9, 3)
    with Serving(tmp_path, path) as serving, serving.grpc() as grpc:
        equal(grpc.predict(arrays(x)), training.predict(x))


@pytest.mark.process
def test_rows_at_servers(tmp_path):
    """Rows are those of the servers at each request, dense weights those of the export, or published ones."""
    pytest.importorskip("tensorflow_serving.apis")
    servers = Servers(tmp_path, 2)
    try:
        with Client(servers.endpoints) as client:
            training = Training(client)
            training.fit()
            path = embed.export(training.model, tmp_path / "export", batch(4))
            x = batch(9, 3)
            with Serving(tmp_path, path, "--servers", ",".join(servers.endpoints)) as serving:
                equal(serving.predict(columns(x))[1]["outputs"], training.predict(x))
                name = training.model.users.bound().number
                keys = np.unique(x["users"].numpy())
                client.assign(name, keys, np.ones((len(keys), 4), np.float32))
                equal(serving.predict(columns(x))[1]["outputs"], training.predict(x))
                training.fit()
                publisher = WeightsPublisher(lambda: connect_first(servers.endpoints), 0.1, print)
                publisher.finish(9, TorchDense(training.model, [training.optimizer]).weights)
                deadline = time.monotonic() + 60
                while "step 9" not in serving.state()[1]:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                equal(serving.predict(columns(x))[1]["outputs"], training.predict(x))
    finally:
        servers.end()


def test_rows_that_follow_checkpoints(training, tmp_path):
    """A run that goes on training brings its rows and dense weights, and its step."""
    path = embed.export(training.model, tmp_path / "export", batch(4))
    training.publish(tmp_path / "checkpoints", 5)
    x = batch(9, 3)
    with Model.load(path, tmp_path / "checkpoints") as served:
        assert served.version == 5
        equal(served.predict(arrays(x)), training.predict(x))
        training.fit()
        training.publish(tmp_path / "checkpoints", 10)
        assert served.refresh()
        assert served.version == 10
        equal(served.predict(arrays(x)), training.predict(x))


def test_versions_side_by_side(training, tmp_path):
    """Each has its rows and dense weights; one follows training beside a pinned one."""
    path = embed.export(training.model, tmp_path / "export", batch(4))
    x, answers = batch(9, 3), {}
    for step in (5, 10):
        training.fit()
        training.publish(tmp_path / "checkpoints", step)
        answers[step] = training.predict(x)
    with (
        Model.load(path, tmp_path / "checkpoints") as served,
        contextlib.closing(Versions(served, "m")) as versions,
    ):
        versions.serve([None, 5], {"stable": 5})
        training.fit()
        training.publish(tmp_path / "checkpoints", 15)
        assert served.refresh()
        answers[15] = training.predict(x)
        for asked, step in ((Asked(), 15), (Asked(15), 15), (Asked(5), 5), (Asked(label="stable"), 5)):
            outputs, version = versions.predict(asked, arrays(x))
            assert version == step
            equal(outputs, answers[step])
        versions.serve([5, 10])
        equal(versions.predict(Asked(), arrays(x))[0], answers[10])
        equal(versions.predict(Asked(5), arrays(x))[0], answers[5])


@pytest.mark.parametrize(
    "options", [{"mode": "sum"}, {"mode": "max"}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}]
)
def test_kinds_of_layers(options, tmp_path):
    with Client.in_process() as client:
        training = Training(client, **options)
        training.fit()
        path = embed.export(training.model, tmp_path / "export", batch(4))
        x = batch(9, 3)
        with Model.load(path) as served:
            equal(served.predict(arrays(x)), training.predict(x))


def test_serving_does_not_import_tensorflow(training, tmp_path):
    path = embed.export(training.model, tmp_path / "export", batch(4))
    program = (
        "import sys, oe_runtime.serve; from oe_runtime.serving import Model, rest;"
        f"Model.load({str(path)!r}).close(); sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class OfRows(nn.Module):
    """Its second look-up is of ids that it computes from rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(100, 4), nn.Embedding(100, 4)

    def forward(self, ids):
        return self.second(self.first(ids).sum(1).long() % 100)


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(100, 4)

    def forward(self, ids):
        return self.rows(ids).sum()


IDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (OfRows(), IDS, "ids are computed from rows of table 'first'"),
        (Total(), IDS, "output 'output_0' is one number"),
        (Total(), {"ids": [1, 2]}, "input 'ids' is list"),
        (Total(), (IDS, IDS), "example_inputs do not fit Total.forward"),
        (Total(), {"ids": torch.tensor(1)}, "input 'ids' of shape () has no example"),
        (Clicks(), {**batch(3), "items": IDS[:2]}, "input 'items' has 2 rows, but 'users' has 3"),
    ],
)
def test_what_cannot_be_exported_is_refused(model, inputs, message, tmp_path):
    with Client.in_process() as client:
        model = embed.distributed_model(model, client)
        with pytest.raises(ValueError, match="has no table on servers: give its model"):
            embed.export(model, tmp_path / "export", inputs)
        embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        with pytest.raises(ValueError, match=re.escape(message)):
            embed.export(model, tmp_path / "export", inputs)
        assert not (tmp_path / "export").exists()


def test_damaged_and_dangerous_programs(training, tmp_path):
    """A program with pickled objects is refused before PyTorch would run them."""
    path = embed.export(training.model, tmp_path / "export", batch(4))
    with pytest.raises(FileExistsError):
        embed.export(training.model, path, batch(4))
    embed.export(training.model, path, batch(4), overwrite=True)
    with zipfile.ZipFile(path / "model.pt2") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / "model.pt2", "w") as archive:
        for name, value in content.items():
            archive.writestr(name, value.replace(b'"use_pickle": false', b'"use_pickle": true'))
    with pytest.raises(ServingError, match="is a pickled object, which is not loaded"):
        Model.load(path)
    (path / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(ServingError, match=r"model\.pt2: cannot be read as a program of PyTorch"):
        Model.load(path)


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def weights_in_one_file(root, content, evil):
    return {f"{root}/data/weights/model.pt": saved(evil)}


def an_opaque_object(root, content, evil):
    weights = json.loads(content[f"{root}/data/weights/model_weights_config.json"])
    name = f"{root}/data/constants/model_constants_config.json"
    constants = json.loads(content[name])
    constants["config"]["x"] = {**next(iter(weights["config"].values())), "path_name": "opaque_obj_0"}
    return {name: json.dumps(constants).encode(), f"{root}/data/constants/opaque_obj_0": pickle.dumps(evil)}


def compiled_code(root, content, evil):
    return {f"{root}/data/aotinductor/model/model.so": b"code"}


def the_form_of_2_7(root, content, evil):
    return {
        "version": b"8.8",
        "serialized_exported_program.json": b"{}",
        "serialized_state_dict.pt": saved(evil),
    }


def saved(one):
    file = io.BytesIO()
    torch.save(one, file)
    return file.getvalue()


@pytest.mark.parametrize("change", [weights_in_one_file, an_opaque_object, compiled_code, the_form_of_2_7])
def test_no_program_runs_code_when_it_is_loaded(training, tmp_path, change):
    path = embed.export(training.model, tmp_path / "export", batch(4))
    with zipfile.ZipFile(path / "model.pt2") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(content)).partition("/")[0]
    content |= change(root, content, Hostile(tmp_path / "evil"))
    with zipfile.ZipFile(path / "model.pt2", "w") as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    with pytest.raises(ServingError, match=r"export does not write|is a pickled object"):
        Model.load(path)
    assert not (tmp_path / "evil").exists()


class Tied(nn.Module):
    """Two of three layers have one weight."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100, 4)
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, ids):
        return {"out": self.c(self.b(self.a(self.rows(ids))))}


def test_weights_that_share_memory_follow_checkpoints(tmp_path):
    with Client.in_process() as client:
        training = Training(client, model=Tied())
        path = embed.export(training.model, tmp_path / "export", IDS)
        with torch.no_grad():
            for number, one in enumerate((training.model.a, training.model.b)):
                one.weight.copy_(torch.arange(16.0).reshape(4, 4) * (number + 1))
        training.publish(tmp_path / "checkpoints", 5)
        with Model.load(path, tmp_path / "checkpoints") as served:
            equal(served.predict(np.arange(5)), training.predict({"ids": torch.arange(5)}))


class Way(nn.Module):
    """One of the ways in which an example's answer is not its own."""

    def __init__(self, way):
        super().__init__()
        self.rows = nn.Embedding(100, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.way = way

    def forward(self, ids):
        return self.way(self, ids, self.rows(ids))


def count_calls(model, ids, rows):
    model.calls += 1
    return rows + model.calls


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (lambda _, ids, rows: rows if ids.shape[0] > 3 else rows * 2, "goes another way for other numbers"),
        (lambda _, ids, rows: rows * 100 if ids.shape[0] == 1 else rows, "depends on the others"),
        (lambda _, ids, rows: rows.sum(1).squeeze(), "one row per example"),
        (lambda _, ids, rows: rows.mean(0), "one row per example"),
        (lambda _, ids, rows: rows - rows.mean(0), "depends on the others"),
        (lambda _, ids, rows: rows + torch.rand(4), "or on chance"),
        (count_calls, "or on chance"),
    ],
    ids=["branch", "one", "squeeze", "mean", "centered", "random", "buffer"],
)
def test_answers_that_are_not_of_an_example_alone_are_refused(tmp_path, way, why):
    with Client.in_process() as client:
        model = embed.distributed_model(Way(way), client)
        embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        with pytest.raises(ValueError, match=why):
            embed.export(model, tmp_path / "export", torch.arange(6))
        assert not (tmp_path / "export").exists()
        assert model.training


def test_a_single_tensor_has_the_name_of_its_argument(tmp_path):
    with Client.in_process() as client:
        model = embed.distributed_model(nn.Sequential(nn.Embedding(100, 4)), client)
        embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        with Model.load(embed.export(model, tmp_path / "export", IDS)) as served:
            equal(served.predict(np.arange(5)), {"output_0": model(torch.arange(5)).detach().numpy()})
            with pytest.raises(InputError, match="input 'input' of example 1: id 100 is not in"):
                served.predict(np.array([0, 100]))


def test_nothing_is_compiled_where_a_path_has_spaces(training, tmp_path):
    """PyTorch's compiler would end in errors of the linker."""
    path = embed.export(training.model, tmp_path / "export", batch(1))
    with pytest.raises(
        ServingError, match=r"PyTorch cannot compile where a path has spaces: .* .*; use another"
    ):
        Model.load(path, compile_to=tmp_path / "a place")
