"""Saving, loading, weights and construction, each held to the stock layer's result or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402

ROWS = 70
IDS = torch.arange(ROWS)


def trained(model, make=lambda p: torch.optim.SGD(p, 0.1), steps=3):
    """Train all rows of a model; return its optimizer."""
    optimizer = make(model.parameters())
    if any(isinstance(layer, (embed.Embedding, embed.EmbeddingBag)) for layer in model.modules()):
        optimizer = embed.distributed_optimizer(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS[:, None]).square().mean().backward()
        optimizer.step()
    return optimizer


def outputs(model):
    with torch.no_grad():
        return model(IDS[:, None])


@pytest.mark.parametrize("padding", [0, 5, -1])
@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_padding_has_the_row_of_the_weights_and_is_not_trained(kind, padding):
    weight = torch.randn(ROWS, 4)
    stock, ours = (torch.nn.Sequential(kind(ROWS, 4, padding_idx=padding)) for _ in range(2))
    for model in (stock, ours):
        model[0].weight.data.copy_(weight)
    ours = embed.distributed_model(ours, Client.in_process(servers=2))
    for model in (stock, ours):
        trained(model)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    assert type(ours[0]) is getattr(embed, kind.__name__)


def test_padding_of_weights_that_are_given_later():
    stock = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(torch.randn(ROWS, 4), padding_idx=3))
    ours = torch.nn.Sequential(embed.Embedding(ROWS, 4, padding_idx=3))
    trained(embed.distributed_model(ours))
    assert not outputs(ours)[3].any()  # as a new nn.Embedding has it
    ours[0].set_rows(stock[0].weight)
    torch.testing.assert_close(outputs(ours), outputs(stock))


def test_padding_after_a_restore(tmp_path):
    models = []
    for value in (1.0, 2.0):
        layer = torch.nn.Embedding(ROWS, 4, padding_idx=3)
        torch.nn.init.constant_(layer.weight, value)
        client = Client.in_process()
        models.append((embed.distributed_model(torch.nn.Sequential(layer), client), client))
        trained(models[-1][0])
        assert (outputs(models[-1][0])[3] == value).all()
    models[0][1].save(tmp_path)
    models[1][1].restore(tmp_path)
    assert (outputs(models[1][0])[3] == 1).all()


@pytest.mark.parametrize("number", [np.int64, np.uint32, torch.tensor], ids=lambda kind: kind.__name__)
def test_sizes_of_any_integer_type(number):
    stock = torch.nn.Embedding(int(number(ROWS)), 4)
    stock.num_embeddings, stock.padding_idx = number(ROWS), number(2)  # PyTorch keeps what it was given
    layer = embed.distributed_model(stock)
    assert (layer.num_embeddings, layer.padding_idx) == (ROWS, 2)
    assert type(layer.num_embeddings) is int
    assert embed.Embedding(number(ROWS), number(4)).embedding_dim == 4
    for wrong in (True, 2.0, "2", None, 0, -2):
        with pytest.raises(ValueError, match="num_embeddings must be an integer > 0, or -1"):
            embed.Embedding(wrong, 4)
