"""Rows begin with the weights of the layers that tables replace."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402
from oe_runtime.errors import ServerLost  # noqa: E402

ROWS = 70


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.users = torch.nn.Embedding(ROWS, 4, padding_idx=3, dtype=dtype)
        self.items = torch.nn.EmbeddingBag(ROWS, 3, mode="sum", dtype=dtype)
        self.dense = torch.nn.Linear(7, 1, dtype=dtype)

    def forward(self, users, items):
        return self.dense(torch.cat([self.users(users), self.items(items)], 1))


def train(model, optimizer, steps=5):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        users = torch.from_numpy(rng.permutation(ROWS))
        items = torch.from_numpy(rng.permutation(ROWS)[:, None])
        optimizer.zero_grad()
        model(users, items).square().mean().backward()
        optimizer.step()
    return model(users, items).detach()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_trained_model_goes_on_from_its_rows(dtype):
    stock, model = Net(dtype), Net(dtype)
    train(stock, sgd(stock))
    model.load_state_dict(stock.state_dict())
    model.users.weight.data[5].mul_(2)  # no counter of PyTorch's sees that
    stock.users.weight.data[5].mul_(2)
    model = embed.distributed_model(model, Client.in_process(servers=2))
    optimizer = embed.distributed_optimizer(sgd(model), model)
    users, items = torch.arange(ROWS), torch.arange(ROWS)[:, None]
    torch.testing.assert_close(model(users, items), stock(users, items), atol=1e-6, rtol=1e-5)
    assert model.users.first_rows is None  # freed
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        train(model, optimizer), train(stock, sgd(stock)), atol=tolerance, rtol=tolerance
    )


def test_weights_that_are_frozen_stay():
    matrix = torch.randn(99, 4)
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(matrix), torch.nn.Linear(4, 1))
    model = embed.distributed_model(model)
    optimizer = embed.distributed_optimizer(sgd(model), model)
    before = model(torch.arange(99)).detach()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(99)).square().sum().backward()
        optimizer.step()
    assert (model(torch.arange(99)) != before).any()
    torch.testing.assert_close(model[0](torch.arange(99)).detach(), matrix)


def test_rows_are_set_before_and_after_there_is_a_table():
    layer = embed.distributed_model(embed.Embedding(ROWS, 4))
    for matrix in (torch.randn(ROWS, 4), torch.randn(ROWS, 4)):
        layer.set_rows(matrix)
        if layer.table is None:
            embed.distributed_optimizer(sgd(layer), layer)
        torch.testing.assert_close(layer(torch.arange(ROWS)).detach(), matrix)
    with pytest.raises(ValueError, match=r"rows given have shape \(69, 4\), but the table's are \(70, 4\)"):
        layer.set_rows(matrix[1:])
    with pytest.raises(ValueError, match="have any id: assign them by key"):
        embed.Embedding(-1, 4).set_rows(matrix)


def test_state_of_a_stock_model_is_loaded():
    """Before and after there are tables."""
    stock = Net()
    early, late = (embed.distributed_model(Net()) for _ in range(2))
    embed.distributed_optimizer(sgd(late), late)
    for model in (early, late):
        model.load_state_dict(stock.state_dict())
    embed.distributed_optimizer(sgd(early), early)
    users, items = torch.arange(ROWS), torch.arange(ROWS)[:, None]
    for model in (early, late):
        torch.testing.assert_close(model(users, items), stock(users, items))
        model.load_state_dict(model.state_dict())  # in which there are no rows
        torch.testing.assert_close(model(users, items), stock(users, items))
    wrong = {**stock.state_dict(), "users.weight": torch.zeros(ROWS, 5)}
    with pytest.raises(RuntimeError, match=r"users\.weight: .* rows given have shape \(70, 5\)"):
        late.load_state_dict(wrong)


def tied_by_parameter(embedding: torch.nn.Embedding, decoder: torch.nn.Linear) -> None:
    decoder.weight = embedding.weight


def tied_by_memory(embedding: torch.nn.Embedding, decoder: torch.nn.Linear) -> None:
    decoder.weight.data = embedding.weight.data


@pytest.mark.parametrize("tie", [tied_by_parameter, tied_by_memory])
def test_tied_weights_are_refused_unless_they_stay(tie):
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 4), torch.nn.Linear(4, ROWS, bias=False))
    model.append(torch.nn.Embedding(ROWS, 4))
    tie(model[0], model[1])
    with pytest.raises(ValueError, match=r"layer '0': its weights are also '1\.weight'.*in_worker=\['0'\]"):
        embed.distributed_model(model)
    assert type(model[0]) is torch.nn.Embedding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embed.distributed_model(model, in_worker=["0"])
    assert type(model[2]) is embed.Embedding
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()


def test_layers_that_stay_must_exist():
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 4))
    with pytest.raises(ValueError, match="in_worker: the model has no layer 'users'; it has 0"):
        embed.distributed_model(model, in_worker=["users"])
    with pytest.raises(ValueError, match=r"in_worker is a list of layers' paths: in_worker=\['0'\]"):
        embed.distributed_model(model, in_worker="0")


def test_rows_on_servers_stay():
    """Of a script that is run again, for example: it cannot be told whether its weights were trained."""
    with Client.in_process() as client:
        first = embed.distributed_model(Net(), client)
        train(first, embed.distributed_optimizer(sgd(first), first))
        kept = client.pull_rows(first.users.table.number, np.arange(ROWS))
        again = Net()
        again = embed.distributed_model(again, client)
        with pytest.warns(UserWarning, match="table users exists with 70 rows, which are kept"):
            embed.distributed_optimizer(sgd(again), again)
        np.testing.assert_array_equal(client.pull_rows(again.users.table.number, np.arange(ROWS)), kept)
        anew = Net()
        matrix = anew.users.weight.detach()
        anew = embed.distributed_model(anew, client, fresh=True)
        embed.distributed_optimizer(sgd(anew), anew)
        found = client.pull_rows(anew.users.table.number, np.arange(ROWS))
        np.testing.assert_array_equal(found, matrix.numpy())


def test_rows_that_did_not_arrive_come_with_the_next_optimizer(monkeypatch):
    """A part of them is there by then, as when a server was lost."""
    assign = Client.assign

    def fails(client, table, keys, rows):
        assign(client, table, keys[:9], rows[:9])
        raise ServerLost("", "gone")

    stock = Net()
    matrix = stock.users.weight.detach().clone()
    with Client.in_process() as client:
        model = embed.distributed_model(stock, client)
        with monkeypatch.context() as patched:
            patched.setattr(Client, "assign", fails)
            with pytest.raises(ServerLost):
                embed.distributed_optimizer(sgd(model), model)
        embed.distributed_optimizer(sgd(model), model)
        found = client.pull_rows(model.users.table.number, np.arange(ROWS))
        np.testing.assert_array_equal(found, matrix.numpy())
