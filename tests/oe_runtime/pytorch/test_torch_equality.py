"""Training with rows on the servers is training with nn.Embedding."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402
from oe_runtime.torch.translate import _OPTIMIZERS  # noqa: E402

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


def train(model, optimizer, data):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(*x), y.to(model.dense[0].weight.dtype))
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
    lambda p: torch.optim.RMSprop(p, 0.005),
    lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
    lambda p: torch.optim.Adamax(p, 0.01),
    lambda p: torch.optim.NAdam(p, 0.01),
    lambda p: torch.optim.RAdam(p, 0.01),
    lambda p: embed.RowWiseAdagrad(p, 0.05),
    lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5, centered=True),
]
# Every optimizer that tables take, with its options, one after the other and several together.
BETAS = {"betas": (0.8, 0.95)}
EXACT = [
    (kind, {"lr": rate, **options, **others})
    for kind, rate, several in (
        (
            torch.optim.SGD,
            0.1,
            [
                {},
                {"momentum": 0.9},
                {"momentum": 0.9, "nesterov": True},
                {"momentum": 0.9, "dampening": 0.3},
                {"momentum": 0.5, "dampening": 1.0},
            ],
        ),
        (
            torch.optim.Adagrad,
            0.05,
            [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}, {"eps": 0.1, "lr_decay": 0.5}],
        ),
        (torch.optim.Adadelta, 1.0, [{}, {"rho": 0.5, "eps": 1e-3}]),
        (torch.optim.Adam, 0.01, [{}, {"amsgrad": True}, {"eps": 1e-3, **BETAS}]),
        (torch.optim.Adam, 0.01, [{"decoupled_weight_decay": True, "weight_decay": 0.1}]),
        (torch.optim.AdamW, 0.01, [{}, {"amsgrad": True}, {"eps": 1e-3, **BETAS}]),
        (torch.optim.Adamax, 0.01, [{}, {"eps": 1e-3, **BETAS}]),
        (torch.optim.NAdam, 0.01, [{}, {"momentum_decay": 0.5, **BETAS}, {"momentum_decay": 0.0}]),
        (torch.optim.NAdam, 0.01, [{"decoupled_weight_decay": True, "weight_decay": 0.1}]),
        (torch.optim.RAdam, 0.01, [{}, BETAS, {"betas": (0.9, 0.6)}, {"eps": 1e-3}]),
        (torch.optim.RAdam, 0.01, [{"decoupled_weight_decay": True, "weight_decay": 0.1}]),
        (
            torch.optim.RMSprop,
            0.005,
            [{}, {"centered": True}, {"momentum": 0.9}, {"momentum": 0.5, "centered": True, "eps": 1e-3}],
        ),
        (embed.RowWiseAdagrad, 0.05, [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3}]),
    )
    for options in several
    for others in ({}, {"weight_decay": 0.05}, {"maximize": True, "weight_decay": 0.02}, {"foreach": False})
    if not (others.keys() & options.keys() or (kind is embed.RowWiseAdagrad and "foreach" in others))
] + [
    (torch.optim.SparseAdam, {"lr": 0.01, **options})
    for options in ({}, {"eps": 1e-3, **BETAS}, {"maximize": True})
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), EXACT, ids=lambda value: getattr(value, "__name__", str(value)))
def test_fifty_steps_equal_torchs(kind, options, dtype):
    """Rows by the same gradients, large, as small as ε and zero, with a learning rate that falls: to 1e-6."""
    rng = np.random.default_rng(7)
    # Away from 0, where a decay that is the whole gradient changes its sign and every rounding is enlarged.
    first = torch.from_numpy(rng.uniform(0.5, 1, (ROWS, 5)) * rng.choice([-1, 1], (ROWS, 5))).to(dtype)
    size = torch.tensor([1.0, 1e-4, 1e-8, 1e-10, 0.0], dtype=dtype).repeat(ROWS // 5)[:, None]
    if kind is torch.optim.RMSprop and options.get("centered"):
        size[:] = 1  # of gradients next to 0 the variance is rounding alone
    stock = torch.nn.Embedding(ROWS, 5, sparse=kind is torch.optim.SparseAdam, dtype=dtype)
    ours = embed.Embedding(ROWS, 5, dtype=dtype)
    with torch.no_grad():
        stock.weight.copy_(first)
    ours.set_rows(first)
    embed.distributed_model(ours, Client.in_process(servers=2))
    of_stock = kind(stock.parameters(), **options)
    of_ours = embed.distributed_optimizer(kind(ours.parameters(), **options), ours)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.97) for one in (of_stock, of_ours)]
    for _ in range(50):
        gradient = torch.from_numpy(rng.normal(size=(ROWS, 5))).to(dtype) * size
        ids = torch.from_numpy(rng.permutation(ROWS))
        for layer, optimizer in ((stock, of_stock), (ours, of_ours)):
            optimizer.zero_grad()
            (layer(ids) * gradient[ids]).sum().backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    tolerance = 1e-6 if dtype is torch.float32 else 1e-12
    if dtype is torch.float64 and kind is torch.optim.NAdam:
        tolerance = 1e-6  # PyTorch keeps the product of the momenta in float32
    np.testing.assert_allclose(rows_of(ours), stock.weight.detach().numpy(), tolerance, tolerance)
    assert not np.allclose(rows_of(ours)[0], first[0])


def test_every_optimizer_of_torch_is_compared():
    assert {type(make([torch.zeros(1)])) for make in MAKE} <= set(_OPTIMIZERS)
    assert {kind for kind, _ in EXACT} == set(_OPTIMIZERS)


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("dim", [4, 16, 64])
def test_rowwise_adagrad_is_fbgemms(dim, eps):
    """EXACT_ROWWISE_ADAGRAD of FBGEMM itself; without weight_decay, which its kernel for CPUs ignores."""
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, dim, EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
        optimizer=tbe.OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.05,
        eps=eps,
    )
    ours = embed.Embedding(ROWS, dim)
    rng = np.random.default_rng(8)
    first = torch.from_numpy(rng.normal(size=(ROWS, dim)).astype(np.float32))
    theirs.split_embedding_weights()[0].data.copy_(first)
    ours.set_rows(first)
    embed.distributed_model(ours, Client.in_process(servers=2))
    optimizer = embed.distributed_optimizer(embed.RowWiseAdagrad(ours.parameters(), 0.05, eps=eps), ours)
    for _ in range(50):
        ids = torch.from_numpy(np.unique(rng.integers(0, ROWS, 50)))
        gradient = torch.from_numpy(rng.normal(size=(len(ids), dim)).astype(np.float32))
        theirs(ids, torch.arange(len(ids) + 1)).backward(gradient)
        optimizer.zero_grad()
        ours(ids).backward(gradient)
        optimizer.step()
    np.testing.assert_allclose(rows_of(ours), theirs.split_embedding_weights()[0].numpy(), rtol=0, atol=1e-6)


def test_rowwise_adagrad_of_dense_weights():
    """A matrix has an accumulator per row, a vector one per weight."""
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = embed.RowWiseAdagrad([matrix, vector], 0.5)
    matrix.grad, vector.grad = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([3.0, 4.0])
    assert optimizer.step(lambda: torch.tensor(1.0)) == 1
    torch.testing.assert_close(matrix.data, -0.5 * matrix.grad / torch.tensor([[12.5], [2.0]]).sqrt())
    torch.testing.assert_close(vector.data, torch.tensor([-0.5, -0.5]))
    again = embed.RowWiseAdagrad([matrix, vector])
    again.load_state_dict(optimizer.state_dict())
    assert again.state[matrix]["sum"].shape == (2, 1)
    for wrong in ({"lr": -1.0}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="RowWiseAdagrad: "):
            embed.RowWiseAdagrad([matrix], **wrong)


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
    losses = train(stock, of_stock, batches(100))
    np.testing.assert_allclose(train(ours, of_ours, batches(100)), losses, rtol=2e-4)
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
