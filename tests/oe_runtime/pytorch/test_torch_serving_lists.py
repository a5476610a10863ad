"""Exports of PyTorch models with lists of ids: collections, and bags with offsets."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from serve_process import Serving
from serving_requests import INFER, inference, inferred
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client
from oe_runtime.serving import InputError, Model


class Ads(nn.Module):
    """A DLRM's parts: bags of several tables, a sequence, and a plain layer of one of the features."""

    def __init__(self, mode: str = "sum", last: bool = False) -> None:
        super().__init__()
        bags = [
            embed.EmbeddingBagConfig(100, 4, "a", feature_names=["site", "app"]),
            embed.EmbeddingBagConfig(-1, 8, "b", feature_names=["words"], pooling="MEAN"),
        ]
        self.bags = embed.EmbeddingBagCollection(bags)
        self.items = embed.EmbeddingCollection(
            [embed.EmbeddingConfig(50, 4, "c", feature_names=["last"])], need_indices=True
        )
        self.plain = nn.EmbeddingBag(80, 4, mode=mode, padding_idx=1, include_last_offset=last)
        self.out = nn.Linear(42, 1)

    def forward(self, numbers: torch.Tensor, features: Any) -> dict[str, torch.Tensor]:
        found = self.bags(features)
        last = self.items(features)["last"]
        site = features["site"]
        offsets = site.offsets() if self.plain.include_last_offset else site.offsets()[:-1]
        x = [found.values(), last.to_padded_dense(5).flatten(1), self.plain(site.values(), offsets), numbers]
        sums = torch.segment_reduce(last.weights().double(), "sum", lengths=last.lengths())
        return {"click": self.out(torch.cat(x, 1)), "bags": found["words"], "ids": sums}


class Weighted(nn.Module):
    """A weight for each id, and an argument that is one feature."""

    def __init__(self) -> None:
        super().__init__()
        tables = [embed.EmbeddingBagConfig(100, 4, "a", feature_names=["site"])]
        self.bags = embed.EmbeddingBagCollection(tables, is_weighted=True)
        self.plain = nn.EmbeddingBag(80, 4, mode="sum")

    def forward(self, features: Any, words: Any) -> torch.Tensor:
        plain = self.plain(words.values(), words.offsets()[:-1], per_sample_weights=words.weights())
        return torch.cat([self.bags(features).values(), plain], 1)


def features(examples: int, seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    sizes = {"site": 80, "app": 100, "words": 2**40, "last": 50}
    lengths = torch.randint(0, 7, (len(sizes), examples), generator=random)
    ids = [
        torch.randint(0, size, (int(n),), generator=random)
        for size, n in zip(sizes.values(), lengths.sum(1), strict=True)
    ]
    return embed.KeyedJaggedTensor(list(sizes), torch.cat(ids), lengths=lengths.flatten())


def batch(examples: int, seed: int = 0) -> dict[str, Any]:
    numbers = torch.rand(examples, 2, generator=torch.Generator().manual_seed(seed))
    return {"numbers": numbers, "features": features(examples, seed)}


def trained(model: nn.Module, client: Client, of: Any = batch) -> nn.Module:
    torch.manual_seed(0)
    model = embed.distributed_model(model, client)
    optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
    for seed in range(5):
        optimizer.zero_grad()
        found = model(**of(32, seed))
        (found["click"] if isinstance(found, dict) else found).mean().backward()
        optimizer.step()
    return model


def predict(model: nn.Module, x: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        found = model.eval()(**x)
    return {name: value.numpy() for name, value in found.items()}


def lists(x: dict[str, Any]) -> dict[str, Any]:
    """As REST has them: a list per example."""
    found = {
        name: [one.tolist() for one in part.to_dense()] for name, part in x["features"].to_dict().items()
    }
    return {"numbers": x["numbers"].tolist(), **found}


def flat(x: dict[str, Any]) -> dict[str, Any]:
    """As gRPC has them: the elements of all lists, and their lengths."""
    found = {"numbers": x["numbers"].numpy()}
    for name, part in x["features"].to_dict().items():
        found |= {name: part.values().numpy(), f"{name}.lengths": part.lengths().numpy()}
    return found


def equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """To the bit."""
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(np.array(got[name], values.dtype), values)


@pytest.mark.process
def test_lists_of_any_length_over_rest_and_grpc(tmp_path):
    """The answers are those of the model to the bit, as its collections pool."""
    pytest.importorskip("tensorflow_serving.apis")
    with Client.in_process(servers=2) as client:
        model = trained(Ads(), client)
        path = embed.export(model, tmp_path / "export", batch(1))
        with Serving(tmp_path, path) as serving, serving.grpc() as grpc:
            for examples in (1, 2, 9, 100):
                x = batch(examples, examples)
                want = predict(model, x)
                status, reply = serving.predict(lists(x))
                assert status == 200, reply
                equal(reply["outputs"], want)
                equal(grpc.predict(flat(x)), want)
                status, reply = serving.ask(INFER, inference(flat(x)))
                assert status == 200, reply
                equal(inferred(reply), want)
                rows = [dict(zip(lists(x), row, strict=True)) for row in zip(*lists(x).values(), strict=True)]
                _, reply = serving.ask(":predict", {"instances": rows})
                got = {name: [row[name] for row in reply["predictions"]] for name in want}
                equal(got, want)
            _, reply = serving.ask("/metadata")
            inputs = reply["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
            assert [one["size"] for one in inputs["words"]["tensor_shape"]["dim"]] == ["-1", "-1"]
            assert "words.lengths" not in inputs
            bad = {**lists(x), "site": [[1]] * 99 + [[2, 80]]}
            message = "input 'site' of example 99: id 80 is not in [0, 80)"
            assert serving.predict(bad) == (400, {"error": message})
            inputs = {one["name"]: one["shape"] for one in serving.ask("/v2/models/m")[1]["inputs"]}
            assert inputs["words"] == inputs["words.lengths"] == [-1]


@pytest.mark.parametrize("options", [{"mode": "mean"}, {"mode": "max"}, {"last": True}])
def test_bags_with_offsets(options, tmp_path):
    with Client.in_process() as client:
        model = trained(Ads(**options), client)
        with Model.load(embed.export(model, tmp_path / "export", batch(4))) as served:
            x = batch(9, 3)
            equal(served.predict(lists(x)), predict(model, x))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Client.in_process() as client:
        path = embed.export(trained(Ads(), client), tmp_path_factory.mktemp("lists") / "export", batch(4))
    with Model.load(path) as model:
        yield model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": [1, 2]}, "input 'site' must have a list of int64 for each example"),
        ({"site": [[1, [2]], []]}, "input 'site' is not an array of int64"),
        ({"site": [[[1]], [[2]]]}, "input 'site' has shape (2, 1); the model takes (any)"),
        ({"site": [[1.5], [2]]}, "input 'site' is int64, but the request has float64"),
        ({"site": [["a"], []]}, "input 'site' is int64, but the request has str"),
        ({"site": [[1]]}, "input 'site' has 1 examples, but 'numbers' has 2"),
        ({"site": [[101], []]}, "input 'site' of example 0: id 101 is not in [0, 100)"),
        ({"last": [[1], [2, 50]]}, "input 'last' of example 1: id 50 is not in [0, 50)"),
        ({"site": [1, 2], "site.lengths": [1, 2]}, "'site.lengths' must be the lengths of lists that have 2"),
        (
            {"site": [1, 2], "site.lengths": [3, -1]},
            "'site.lengths' must be the lengths of lists that have 2",
        ),
        ({"site": [1, 2], "site.lengths": [[1, 1]]}, "input 'site.lengths' has shape (1, 2)"),
        ({"sites.lengths": [1, 1]}, "the model has no input 'sites.lengths'"),
    ],
)
def test_bad_lists_are_refused(served, change, message):
    with pytest.raises(InputError, match=re.escape(message)):
        served.predict({**lists(batch(2)), **change})


def test_forms_of_lists(served):
    """Lists and tuples, arrays of one length per example, and no ids at all."""
    x = batch(2)
    same = lists(x)
    same["site"] = [[1, 2], [3, 4]]
    want = served.predict(same)
    equal(served.predict({**same, "site": np.array([[1, 2], [3, 4]], np.int32)}), want)
    equal(served.predict({**same, "site": ((1, 2), np.array([3, 4]))}), want)
    equal(served.predict({**same, "site": np.arange(1, 5), "site.lengths": [2, 2]}), want)
    nothing = {name: [[], []] for name in ("site", "app", "words", "last")}
    assert not served.predict({**same, **nothing})["bags"].any()


def weighted(examples: int, seed: int = 0) -> dict[str, Any]:
    site = features(examples, seed)["site"]
    site._weights = torch.rand(len(site.values()), generator=torch.Generator().manual_seed(seed))
    words = embed.JaggedTensor(site.values().flip(0), site.weights().flip(0), site.lengths().flip(0))
    return {"features": embed.KeyedJaggedTensor.from_jt_dict({"site": site}), "words": words}


def test_weights_of_ids(tmp_path):
    with Client.in_process() as client:
        model = trained(Weighted(), client, weighted)
        with Model.load(embed.export(model, tmp_path / "export", weighted(4))) as served:
            x = weighted(9, 3)
            request = {}
            for name, part in {**x["features"].to_dict(), "words": x["words"]}.items():
                weights = embed.JaggedTensor(part.weights(), lengths=part.lengths()).to_dense()
                request[name] = [one.tolist() for one in part.to_dense()]
                request[f"{name}.weights"] = [one.tolist() for one in weights]
            want = model(**x).detach().numpy()
            np.testing.assert_allclose(served.predict(request)["output_0"], want, atol=1e-6)
            request["site.weights"][0] = [1.0] * 9
            with pytest.raises(InputError, match=r"'site.weights' has lists of other lengths"):
                served.predict(request)


class Target(nn.Module):
    """An item per example: a plain tensor, or a feature of which it takes the values alone."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.rows = embed.EmbeddingCollection([embed.EmbeddingConfig(50, 4, "t", feature_names=names)])
        self.bags = embed.EmbeddingBagCollection(
            [embed.EmbeddingBagConfig(80, 4, "b", feature_names=["one"])]
        )
        self.plain = nn.Embedding(80, 4)
        self.out = nn.Linear(13, 1)

    def forward(self, price: torch.Tensor, features: Any, item: Any = None) -> dict[str, torch.Tensor]:
        found = self.rows(features)
        last, bag = found["last"].to_padded_dense(7).sum(1), self.bags(features).values()
        own = found["item"].values() if item is None else self.plain(item)
        ids = features["item"].values() if item is None else item
        score = self.out(torch.cat([own, last, bag, price[:, None]], 1))[:, 0]
        return {"score": score * price, "ids": ids[:, None]}


def targets(examples: int, seed: int = 0, *, plain: bool) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    one = torch.ones(examples, dtype=torch.int64)
    item, other = torch.randint(0, 50, (2, examples), generator=random)
    parts = {"last": features(examples, seed)["last"], "one": embed.JaggedTensor(other, lengths=one)}
    if not plain:
        parts["item"] = embed.JaggedTensor(item, lengths=one)
    keyed = embed.KeyedJaggedTensor.from_jt_dict(parts)
    return {"price": torch.rand(examples), "features": keyed} | ({"item": item} if plain else {})


@pytest.mark.parametrize("plain", [True, False], ids=["tensor", "feature"])
def test_one_id_per_example(plain, tmp_path):
    """Where a model takes one id it gets a number; lists would give it the ids of other examples."""
    with Client.in_process(servers=2) as client:
        torch.manual_seed(0)
        model = embed.distributed_model(Target(["last"] if plain else ["last", "item"]), client)
        optimizer = embed.distributed_optimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
        model(**targets(8, plain=plain))["score"].mean().backward()
        optimizer.step()
        path = embed.export(model, tmp_path / "export", targets(3, plain=plain))
        with Model.load(path) as served:
            for examples in (1, 2, 9):
                x = targets(examples, examples, plain=plain)
                parts = x["features"].to_dict()
                request = {name: [ids.tolist() for ids in one.to_dense()] for name, one in parts.items()}
                request |= {"price": x["price"].tolist(), "item": (parts | x)["item"]}
                if not plain:
                    request["item"] = request["item"].values()
                request["item"] = request["item"].tolist()
                equal(served.predict(request), predict(model, x))
            found = {one.name: len(one.shape) for one in served.inputs}
            assert found == {"price": 1, "item": 1, "last": 2, "one": 2}
            with pytest.raises(InputError, match="input 'item'"):
                served.predict({**request, "item": [[1], [2, 3], *[[]] * 7]})


class Longest(nn.Module):
    """Its padding depends on the longest list."""

    def __init__(self) -> None:
        super().__init__()
        self.items = embed.EmbeddingCollection([embed.EmbeddingConfig(80, 4, "site")])

    def forward(self, features: Any) -> torch.Tensor:
        return self.items(features)["site"].to_padded_dense().sum(1)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = embed.EmbeddingBagCollection([embed.EmbeddingBagConfig(100, 4, "other")])

    def forward(self, features: Any) -> torch.Tensor:
        return self.bags(features).values()


SHARED = embed.KeyedJaggedTensor(
    ["other"],
    torch.arange(4),
    lengths=torch.tensor([2, 2]),
    stride_per_key_per_rank=[[2]],
    inverse_indices=(["other"], torch.tensor([[0, 1, 1]])),
)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Longest(), {"features": features(3)}, "a model that is exported must give desired_length"),
        (Bag(), {"features": features(3)}, "has no feature 'other', which table 'other' looks up"),
        (Bag(), {"features": SHARED}, "has inverse_indices"),
        (Ads(), {**batch(3), "numbers": torch.rand(2, 2)}, "input 'site' has 3 rows, but 'numbers' has 2"),
    ],
)
def test_what_cannot_be_exported_is_refused(model, inputs, message, tmp_path):
    with Client.in_process() as client:
        model = embed.distributed_model(model, client)
        embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        with pytest.raises(ValueError, match=re.escape(message)):
            embed.export(model, tmp_path / "export", inputs)
        assert not (tmp_path / "export").exists()


def test_torchrecs_dlrm(tmp_path):
    """A model of TorchRec is exported with its own classes, and served without them."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.models.dlrm import DLRM

    tables = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=100, embedding_dim=8, name=f"t_{name}", feature_names=[name]
        )
        for name in ("site", "app")
    ]

    def of(examples: int, seed: int = 0) -> dict[str, Any]:
        x = batch(examples, seed)
        some = {name: x["features"][name] for name in ("site", "app")}
        parts = {
            name: torchrec.JaggedTensor(one.values(), lengths=one.lengths()) for name, one in some.items()
        }
        keyed = torchrec.KeyedJaggedTensor.from_jt_dict(parts)
        return {"dense_features": x["numbers"], "sparse_features": keyed}

    with Client.in_process() as client:
        model = DLRM(torchrec.EmbeddingBagCollection(tables=tables), 2, [8, 8], [8, 1])
        model = trained(model, client, of)
        with Model.load(embed.export(model, tmp_path / "export", of(4))) as served:
            x = of(9, 3)
            request = {"dense_features": x["dense_features"].numpy()}
            for name, part in x["sparse_features"].to_dict().items():
                request[name] = [one.tolist() for one in part.to_dense()]
            with torch.no_grad():
                want = model.eval()(**x).numpy()
            np.testing.assert_allclose(served.predict(request)["output_0"], want, atol=1e-6)
