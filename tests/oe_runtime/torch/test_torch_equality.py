"""Training with rows on the servers is training with nn.Embedding."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402

ROWS = 70


class Net(torch.nn.Module):
    """An embedding and a bag, and layers that stay."""

    def __init__(self, mode="sum", padding=None):
        super().__init__()
        self.users = torch.nn.Embedding(ROWS, 4, padding_idx=padding)
        self.items = torch.nn.EmbeddingBag(ROWS, 3, mode=mode, padding_idx=padding)
        self.dense = torch.nn.Sequential(torch.nn.Linear(7, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, users, *items):
        return self.dense(torch.cat([self.users(users), self.items(*items)], 1))


def pair(make, client=None, **options):
    """A model with its rows on servers and one of torch alone, with the same weights, and their optimizers."""
    torch.manual_seed(5)
    stock = Net(**options)
    torch.manual_seed(5)
    ours = embed.distributed_model(Net(**options), client or Client.in_process(servers=2))
    optimizers = make(stock.parameters()), embed.distributed_optimizer(make(ours.parameters()), ours)
    ours.dense.load_state_dict(stock.dense.state_dict())
    with torch.no_grad():
        for layer, of_stock in ((ours.users, stock.users), (ours.items, stock.items)):
            of_stock.weight.copy_(torch.from_numpy(rows_of(layer)))
            if of_stock.padding_idx is not None:
                of_stock.weight[of_stock.padding_idx] = 0
    return (stock, ours), optimizers


def rows_of(layer):
    table = layer.table
    return table.client.pull_rows(table.number, np.arange(ROWS))


def batches(steps, seed=0):
    """Every batch has every row, as momenta of other rows stay where they are."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        users = torch.from_numpy(rng.permutation(np.arange(ROWS)))
        items = torch.from_numpy(np.stack([rng.permutation(ROWS), rng.integers(0, ROWS, ROWS)], 1))
        yield (users, items), torch.from_numpy(rng.random((ROWS, 1), dtype=np.float32))


def train(model, optimizer, data, reduction="mean"):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(*x), y, reduction=reduction)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_alike(stock, ours, tolerance=2e-4):
    for of_stock, layer in ((stock.users, ours.users), (stock.items, ours.items)):
        want = of_stock.weight.detach().numpy()
        keep = np.arange(ROWS) != of_stock.padding_idx
        np.testing.assert_allclose(rows_of(layer)[keep], want[keep], atol=tolerance, rtol=tolerance)
    for a, b in zip(stock.dense.parameters(), ours.dense.parameters(), strict=True):
        torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adagrad(p, 0.05),
        lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adadelta(p, 1.0),
        lambda p: torch.optim.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.005),
        lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5, centered=True),
    ],
    ids=lambda make: str(make([torch.zeros(1)])).split("\n")[0],
)
def test_hundred_steps(make):
    (stock, ours), (of_stock, of_ours) = pair(make)
    # Gradients of a mean are close to Adam's epsilon, which stands elsewhere in the tables' rule.
    reduction = "mean" if type(of_stock) in (torch.optim.SGD, torch.optim.Adagrad) else "sum"
    losses = train(stock, of_stock, batches(100), reduction)
    np.testing.assert_allclose(train(ours, of_ours, batches(100), reduction), losses, rtol=2e-4)
    assert losses[-1] < losses[0]
    assert_alike(stock, ours)
