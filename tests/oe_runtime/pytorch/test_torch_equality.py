"""Training with rows on the servers is training with nn.Embedding."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402
from oe_runtime.torch.optimizer import _OPTIMIZERS  # noqa: E402

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


def pair(make, dtype=torch.float32, **options):
    """A model of torch alone and one with its rows on servers, of the same weights; their optimizers."""
    torch.manual_seed(5)
    stock = Net(**options).to(dtype)
    torch.manual_seed(5)
    ours = embed.distributed_model(Net(**options).to(dtype), Client.in_process(servers=2))
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
        loss = torch.nn.functional.mse_loss(model(*x), y.to(model.dense[0].weight.dtype), reduction=reduction)
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


MAKE = [
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
    lambda p: torch.optim.RMSprop(p, 0.005, eps=1e-12),
    lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5, centered=True),
]


def test_every_optimizer_of_torch_is_compared():
    assert {type(make([torch.zeros(1)])) for make in MAKE} == set(_OPTIMIZERS)


@pytest.mark.parametrize(
    "make",
    MAKE,
    ids=lambda make: str(make([torch.zeros(1)])).split("\n")[0],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hundred_steps(make, dtype):
    (stock, ours), (of_stock, of_ours) = pair(make, dtype)
    if dtype is torch.float32 and type(of_stock) in (torch.optim.RMSprop, torch.optim.Adadelta):
        pytest.skip("rounding decides the sign of gradients close to 0, whose size they ignore")
    # Gradients of a mean are close to Adam's epsilon, which stands elsewhere in the tables' rule.
    reduction = "mean" if type(of_stock) in (torch.optim.SGD, torch.optim.Adagrad) else "sum"
    losses = train(stock, of_stock, batches(100), reduction)
    np.testing.assert_allclose(train(ours, of_ours, batches(100), reduction), losses, rtol=2e-4)
    assert losses[-1] < losses[0]
    assert_alike(stock, ours)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3, -1])
def test_bags_and_padding(mode, padding):
    (stock, ours), (of_stock, of_ours) = pair(
        lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1), mode=mode, padding=padding
    )
    data = list(batches(10))
    np.testing.assert_allclose(train(ours, of_ours, data), train(stock, of_stock, data), rtol=1e-4)
    assert_alike(stock, ours)


@pytest.mark.parametrize("last", [False, True])
def test_offsets_and_weights_of_samples(last):
    stock = torch.nn.EmbeddingBag(ROWS, 3, mode="sum", include_last_offset=last)
    ours = embed.distributed_model(
        torch.nn.EmbeddingBag(ROWS, 3, mode="sum", include_last_offset=last), name_prefix="bag."
    )
    optimizer = embed.distributed_optimizer(torch.optim.SGD(ours.parameters(), 0.1), ours)
    of_stock = torch.optim.SGD(stock.parameters(), 0.1)
    assert ours.table.spec.name == "bag.embedding"
    with torch.no_grad():
        stock.weight.copy_(torch.from_numpy(rows_of(ours)))
    ids = torch.tensor([4, 4, 69, 0, 4, 7], dtype=torch.int32)
    offsets = torch.tensor([0, 2, 2, 5, 6] if last else [0, 2, 2, 5], dtype=torch.int32)
    weights = [torch.linspace(-1, 1, 6, requires_grad=True) for _ in range(2)]
    outputs = [bag(ids, offsets, per_sample_weights=w) for bag, w in zip((stock, ours), weights, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(weights[1].grad, weights[0].grad)
    of_stock.step()
    optimizer.step()
    np.testing.assert_allclose(rows_of(ours), stock.weight.detach().numpy(), atol=1e-6)


def test_several_backward_passes_are_one_batch():
    def make(parameters):
        return torch.optim.Adagrad(parameters, 0.05, initial_accumulator_value=0.1)

    (stock, ours), (of_stock, of_ours) = pair(make)
    for model, optimizer in ((stock, of_stock), (ours, of_ours)):
        for parts in (list(batches(2, seed)) for seed in range(4)):
            optimizer.zero_grad()
            for (users, items), y in parts:
                torch.nn.functional.mse_loss(model(users[:40], items[:40]), y[:40]).backward()
            optimizer.step()
        # What zero_grad forgets, and what nobody asks the gradients of, is not pushed.
        (users, items), y = next(iter(batches(1)))
        torch.nn.functional.mse_loss(model(users, items), y).backward()
        optimizer.zero_grad()
        with torch.no_grad():
            model(users, items)
        model.eval()(users, items).sum()
        model.train()
        optimizer.step()
    assert_alike(stock, ours)
    assert [
        table["version"] for s in ours.users.table.client.stats()["servers"] for table in s["tables"].values()
    ] == [4] * 4


def test_learning_rates_of_groups_and_schedules():
    def make(parameters):
        users, *rest = parameters
        return torch.optim.SGD([{"params": [users], "lr": 0.5}, {"params": rest}], 0.1)

    (stock, ours), optimizers = pair(make)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for step in range(4):
        for model, optimizer, schedule in zip((stock, ours), optimizers, schedules, strict=True):
            train(model, optimizer, batches(1, step))
            schedule.step()
    assert_alike(stock, ours)
