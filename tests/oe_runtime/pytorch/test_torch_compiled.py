"""Exports of PyTorch models that the serving process compiles: the same answers, without Python."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import test_torch_serving_lists as lists
import torch
from serve_process import Serving
from serving_requests import INFER, Asked, inference, inferred
from test_torch_serving import Training, arrays, batch, columns, equal
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client
from oe_runtime.serving import Model, ServingError, compiled

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of C++ is not there"),
    pytest.mark.skipif(" " in torch.__file__, reason="PyTorch's own compiler takes no path with a space"),
]


@pytest.fixture(scope="module")
def trained():
    with Client.in_process(servers=2) as client:
        training = Training(client)
        training.fit()
        yield training


@pytest.fixture(scope="module")
def export(trained, tmp_path_factory):
    return embed.export(trained.model, tmp_path_factory.mktemp("model") / "export", batch(1))


@pytest.fixture(scope="module")
def directory(export, tmp_path_factory):
    """Where the model was compiled, for the next start."""
    directory = tmp_path_factory.mktemp("compiled")
    Model.load(export, compile_to=directory).close()
    return directory


@pytest.fixture
def once(directory, monkeypatch):
    """The same, for tests that compile nothing."""

    def write(*_):
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(compiled.Compiler, "_write", write)
    return directory


def test_the_core_answers_as_the_trained_model_does(trained, export, once):
    with Model.load(export, compile_to=once) as model, Asked(model) as asked:
        for size in (1, 2, 33):
            x = batch(size, seed=size)
            want = trained.predict(x)
            equal(asked.core({"inputs": columns(x)})["outputs"], want)
            equal(inferred(asked.core(inference(arrays(x)), INFER)), want)
            equal(model.predict(arrays(x)), want)


@pytest.mark.parametrize(("name", "id_", "rows"), [("items", 80, 80), ("items", -1, 80), ("last", 100, 100)])
def test_ids_outside_of_a_table_are_refused_as_without(export, once, name, id_, rows):
    with Model.load(export, compile_to=once) as model, Asked(model) as asked:
        x = columns(batch(3))
        x[name][2] = [id_] * 5 if name == "last" else id_
        status, reply = asked.either({"inputs": x})
        assert status == 400, reply
        assert reply["error"] == f"input '{name}' of example 2: id {id_} is not in [0, {rows})"


def test_an_id_outside_of_a_weight_is_refused_as_without(export, once):
    """The smaller embedding, which is a weight of the model, has ten rows; 10 % 11 is not one of them."""
    with Model.load(export, compile_to=once) as model, Asked(model) as asked:
        x = columns(batch(3))
        x["last"][1][1] = 10
        status, reply = asked.either({"inputs": x})
        assert (status, "id 10 is not in [0, 10)" in reply["error"]) == (400, True)


class TwoIds(nn.Module):
    """Ids of a table and of a smaller embedding, both inputs as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(80, 4)
        self.days = nn.Embedding(7, 2)
        self.out = nn.Linear(6, 1)

    def forward(self, item, day):
        return self.out(torch.cat([self.items(item), self.days(day)], 1))


def test_a_negative_id_of_a_weight_is_refused(tmp_path):
    """Compiled code finds it: no program for ids checks those that are inputs as they are."""
    with Client.in_process() as client:
        training = Training(client, TwoIds())
        x = {"item": torch.tensor([1, 2]), "day": torch.tensor([3, 6])}
        training.model(**x).sum().backward()
        training.optimizer.step()
        path = embed.export(training.model, tmp_path / "export", x)
    with Model.load(path, compile_to=tmp_path / "compiled") as model, Asked(model) as asked:
        np.testing.assert_allclose(
            asked.core({"inputs": columns(x)})["outputs"], asked.python({"inputs": columns(x)})[1]["outputs"]
        )
        for day in (-1, 7):
            status, reply = asked.either({"inputs": {"item": [1], "day": [day]}})
            assert (status, reply["error"]) == (400, f"input 'day' of example 0: id {day} is not in [0, 7)")


def test_requests_are_computed_together(trained, export, once):
    with Model.load(export, compile_to=once) as model, Asked(model, max_batch_size=8) as asked:
        x = batch(64)
        want = trained.predict(x)
        with ThreadPoolExecutor(16) as pool:
            bodies = [{"inputs": columns({k: v[i : i + 1] for k, v in x.items()})} for i in range(64)]
            replies = list(pool.map(asked.core, bodies))
        for i, reply in enumerate(replies):
            equal(reply["outputs"], {name: values[i : i + 1] for name, values in want.items()})


def test_it_follows_checkpoints(export, once, tmp_path):
    """Compiled programs read the weights that are exchanged."""
    with Client.in_process(servers=2) as client:
        training = Training(client)
        training.publish(tmp_path / "run", 1)
        with Model.load(export, tmp_path / "run", compile_to=once) as model, Asked(model) as asked:
            for step in (2, 3):
                training.fit()
                training.publish(tmp_path / "run", step)
                assert model.refresh()
                equal(asked.core({"inputs": columns(batch(5))})["outputs"], training.predict(batch(5)))


@pytest.mark.process
def test_the_command_and_grpc(trained, export, directory, tmp_path):
    pytest.importorskip("tensorflow_serving.apis")
    with Serving(tmp_path, export, "--compile-to", directory) as serving, serving.grpc() as grpc:
        x = batch(4)
        equal(serving.predict(columns(x))[1]["outputs"], trained.predict(x))
        equal(grpc.predict(arrays(x)), trained.predict(x))


def test_lists_are_computed_by_the_compiled_program(tmp_path):
    with Client.in_process(servers=2) as client:
        model = lists.trained(Pooled(), client)
        path = embed.export(model, tmp_path / "export", lists.batch(3))
        with Model.load(path, compile_to=tmp_path / "compiled") as served:
            assert served.make_predictor("/") is None  # JSON of lists is read by Python
            for examples in (1, 2, 33):
                x = lists.batch(examples, examples)
                got, want = served.predict(lists.flat(x)), lists.predict(model, x)
                np.testing.assert_allclose(got["click"], want["click"], atol=1e-6)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            embed.EmbeddingBagConfig(100, 4, "a", feature_names=["site", "app"]),
            embed.EmbeddingBagConfig(-1, 8, "b", feature_names=["words"], pooling="MEAN"),
        ]
        self.bags = embed.EmbeddingBagCollection(tables)
        self.out = nn.Linear(18, 1)

    def forward(self, numbers, features):
        return {"click": self.out(torch.cat([self.bags(features).values(), numbers], 1))}


def test_what_cannot_be_compiled_is_refused_by_name(export, directory, tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.export(tmp_path / "keras", verbose=False)
    with pytest.raises(ServingError, match="--compile-to is for exports of PyTorch"):
        Model.load(tmp_path / "keras", compile_to=directory)
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match=f"{tmp_path}/file.*: File exists"):
        Model.load(export, compile_to=tmp_path / "file")
    with Client.in_process() as client:
        ads = lists.trained(lists.Ads(), client)
        path = embed.export(ads, tmp_path / "ads", lists.batch(3))
    with pytest.raises(ServingError, match="serve it without --compile-to"):
        Model.load(path, compile_to=directory)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServingError, match=r"needs a C\+\+ compiler to compile: install g\+\+"):
        Model.load(export, compile_to=tmp_path / "new")


def test_a_damaged_library_is_named(export, directory, tmp_path):
    for file in directory.glob("*.so"):
        (tmp_path / file.name).write_bytes(b"no library")
    with pytest.raises(ServingError, match=r"\.so: .*remove it to compile it again"):
        Model.load(export, compile_to=tmp_path)
