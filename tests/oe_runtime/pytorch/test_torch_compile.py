"""Models that torch.compile makes one program of, beside the same models as they are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client, KeyRangeError
from oe_runtime.torch import operators

ROWS, DIM = 80, 4
BACKENDS = ["eager", "aot_eager"]


class Layers(nn.Module):
    """Plain layers, with padding that has a row, bags by offsets, weights of samples, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM, padding_idx=3)
        with torch.no_grad():
            self.users.weight[3] = 0.5
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=5)
        self.lists = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.fixed = nn.Embedding(ROWS, DIM).requires_grad_(False)
        self.top = nn.Linear(DIM * 4, 1)

    def forward(self, x):
        n = len(x)
        weights = torch.sigmoid(self.top.bias) * torch.ones(n)
        one = self.lists(x[:, 0], torch.arange(n), per_sample_weights=weights)
        both = self.users(x[:, :2]).sum(1) + self.users(x[:, 2])
        return self.top(torch.cat([both, self.bags(x), one, self.fixed(x[:, 1])], 1))


class Collections(nn.Module):
    """Collections whose weights are trained, and one of embeddings."""

    def __init__(self):
        super().__init__()
        tables = [
            embed.EmbeddingBagConfig(ROWS, DIM, "a", feature_names=["f", "g"]),
            embed.EmbeddingBagConfig(-1, 2 * DIM, "b", feature_names=["g"]),
        ]
        self.tables = embed.EmbeddingBagCollection(tables, is_weighted=True)
        self.words = embed.EmbeddingCollection([embed.EmbeddingConfig(ROWS, DIM, "words")])
        self.top = nn.Linear(DIM * 5, 1)

    def forward(self, x):
        n = len(x)
        weights = torch.sigmoid(self.top.bias) * torch.ones(3 * n)
        lengths = torch.ones(3 * n, dtype=torch.int64)
        features = embed.KeyedJaggedTensor(["f", "h", "g"], x.t().reshape(-1), weights, lengths=lengths)
        found = self.tables(features)
        words = self.words(embed.KeyedJaggedTensor(["words"], x[:, 0], lengths=lengths[:n]))["words"]
        return self.top(torch.cat([found.values(), words.values()], 1)) + found["f"].sum() * 1e-3


def batch(size, number):
    return torch.from_numpy(np.random.default_rng(number).integers(0, ROWS, (size, 3)))


def made(make):
    torch.manual_seed(0)
    model = make()
    model = embed.distributed_model(model, Client.in_process(servers=2))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, initial_accumulator_value=0.1)
    return model, embed.distributed_optimizer(optimizer, model)


def train(model, optimizer, run, steps=6):
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = (run(batch((8, 5)[number % 2], number)) ** 2).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, *run(batch(7, 99))[:, 0].tolist()]


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Layers, Collections])
def test_a_whole_graph_trains_as_the_model(make, backend):
    model, optimizer = made(make)
    expected = train(model, optimizer, model)
    model, optimizer = made(make)
    found = train(model, optimizer, compiled(model, backend))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not operators._works, "programs keep no rows of steps that are done"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of C++ is not there")
@pytest.mark.skipif(" " in torch.__file__, reason="PyTorch's own compiler takes no path with a space")
def test_inductor(tmp_path):
    """In a process of its own: it leaves threads and files."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_torch_compile import *
for make in (Small, Twice):
    model, optimizer = made(make)
    expected = train(model, optimizer, model, steps=3)
    model, optimizer = made(make)
    found = train(model, optimizer, compiled(model, "inductor"), steps=3)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
"""
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **cache}, timeout=280)


class Small(nn.Module):
    """For a compiler that takes long."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM)

    def forward(self, x):
        return self.users(x).sum((1, 2))[:, None]


class Twice(Small):
    """One layer for two inputs, which may have the same ids, as a history and its target."""

    def forward(self, x):
        return (self.users(x[:, 0]) + self.users(x[:, 1]) * self.users(x[:, 0])).sum(1)[:, None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_is_called_twice(backend):
    model, optimizer = made(Twice)
    expected = train(model, optimizer, model)
    model, optimizer = made(Twice)
    found = train(model, optimizer, compiled(model, backend))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_for_some_inputs_only():
    """A compiled program leaves rows their gradients where autograd asks for them."""
    model, _ = made(Layers)
    run = compiled(model, "aot_eager")
    loss = (run(batch(4, 0)) ** 2).sum()
    loss.backward(inputs=[model.top.weight])
    assert model.users.anchor.grad is None
    loss = (run(batch(4, 0)) ** 2).sum()
    loss.backward()
    wanted = model.users.anchor.grad.clone()
    model.zero_grad()
    loss = (model(batch(4, 0)) ** 2).sum()
    loss.backward()
    torch.testing.assert_close(torch.Tensor(wanted), torch.Tensor(model.users.anchor.grad))
    with pytest.raises(KeyRangeError, match="key 80 is not"):
        run(batch(4, 0) * 0 + ROWS)


def test_a_collection_of_torchrec_is_compiled():
    torchrec = pytest.importorskip("torchrec")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            tables = [
                torchrec.EmbeddingBagConfig(
                    num_embeddings=100, embedding_dim=8, name=name, feature_names=[name]
                )
                for name in "ab"
            ]
            self.tables = torchrec.EmbeddingBagCollection(tables=tables)
            self.top = nn.Linear(16, 1)

        def forward(self, features):
            return self.top(self.tables(features).values())

    results = []
    for is_compiled in (False, True):
        model, optimizer = made(Model)
        run = compiled(model, "aot_eager") if is_compiled else model
        for number in range(4):
            values = batch(8, number).reshape(-1)
            lengths = torch.tensor([1, 2, 0, 3, 6, 12])
            optimizer.zero_grad()
            loss = (run(torchrec.KeyedJaggedTensor(["a", "b"], values, lengths=lengths)) ** 2).sum()
            loss.backward()
            optimizer.step()
        results.append(loss.item())
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_what_is_no_operator_breaks_the_graph():
    """Of other types and poolings, and several features of embeddings; results are equal."""

    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")
            self.narrow = nn.Embedding(ROWS, DIM, dtype=torch.bfloat16)
            self.words = embed.EmbeddingCollection(
                [embed.EmbeddingConfig(ROWS, DIM, "words", feature_names=["v", "w"])]
            )

        def forward(self, x):
            lengths = torch.ones(2 * len(x), dtype=torch.int64)
            words = self.words(embed.KeyedJaggedTensor(["v", "w"], x[:, :2].t().reshape(-1), lengths=lengths))
            return self.most(x) + self.narrow(x[:, 0]).float() + words["v"].values() * words["w"].values()

    model, _ = made(Others)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    torch.testing.assert_close(run(batch(5, 0)), model(batch(5, 0)))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model, "eager")(batch(5, 0))
