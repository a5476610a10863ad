"""Plain layers whose forward passes pull all rows in one request, beside the stock layers."""

import collections
import copy
import io
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client, KeyRangeError  # noqa: E402

ROWS = 70
DIM = 4


class Fields(nn.Module):
    """Layers that are called with what `read` makes of the model's arguments."""

    def __init__(self, read, kinds="eebbe", **options):
        super().__init__()
        self.read = read
        made = []
        for kind in kinds:
            made.append(
                nn.Embedding(ROWS, DIM, **options) if kind == "e" else nn.EmbeddingBag(ROWS, DIM, **options)
            )
        self.layers = nn.ModuleList(made)
        self.top = nn.Linear(DIM * len(kinds), 1)

    def forward(self, *arguments, **named):
        asked = self.read(*arguments, **named)
        found = [
            layer(*(ids if isinstance(ids, tuple) else (ids,)))
            for layer, ids in zip(self.layers, asked[: len(self.layers)], strict=True)
        ]
        return self.top(torch.cat([one.reshape(-1, DIM) for one in found], 1))


def columns(x):
    return [x[:, 0], x[:, 1], x[:, 2:4], x[:, 4:5], x[:, 3:4]]


def bags(x):
    return [one.reshape(len(x), -1) for one in columns(x)]


def of_floats(x):
    return [x[:, 0].long(), x[:, 1:2].long(), x[:, 2:4].int(), x[:, 4:5].long(), x[:, 3].long()]


def lists(parts, more):
    return [parts[0], parts[1], (parts[2], parts[3]), more["b"], more["e"]]


def matrix(size, seed=0, dtype=torch.int64):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, (size, 5))).to(dtype)


def as_lists(size, seed=0):
    x = matrix(size, seed)
    random = np.random.default_rng(seed)
    lengths = torch.from_numpy(random.integers(0, 4, size))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    bags = torch.from_numpy(random.integers(0, ROWS, int(lengths.sum())))
    return [x[:, 0].clone(), x[:, 1].clone(), bags, offsets], {"b": x[:, 2:4].clone(), "e": x[:, 4].clone()}


PROGRAMS = {
    "columns": (columns, lambda n, seed: (matrix(n, seed),), {}, "eebbe"),
    "rows": (lambda x: list(x), lambda n, seed: (matrix(n, seed).t().contiguous(),), {}, "eeeee"),
    "a column of a column": (
        lambda x: list(x.unbind(1)),
        lambda n, seed: (matrix(n, seed)[:, None, :],),
        {},
        "e",
    ),
    "floats": (of_floats, lambda n, seed: (matrix(n, seed, torch.float32),), {}, "eebbe"),
    "lists": (lists, as_lists, {}, "eebbe"),
    "padding": (columns, lambda n, seed: (matrix(n, seed),), {"padding_idx": 3}, "eebbe"),
    "other modes": (bags, lambda n, seed: (matrix(n, seed),), {"mode": "max"}, "bbbbb"),
    "sums": (bags, lambda n, seed: (matrix(n, seed),), {"mode": "sum"}, "bbbbb"),
    "doubles": (columns, lambda n, seed: (matrix(n, seed),), {"dtype": torch.float64}, "eebbe"),
    "computed": (
        lambda x: [x[:, i] * 3 % ROWS for i in range(5)],
        lambda n, seed: (matrix(n, seed),),
        {},
        "eeeee",
    ),
}


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.1)


def both(make, client=None, optimizer=adagrad):
    """(stock model, its optimizer), and ours."""
    torch.manual_seed(0)
    stock = make()
    ours = embed.distributed_model(copy.deepcopy(stock), client or Client.in_process())
    step = optimizer(ours.parameters())
    return (stock, optimizer(stock.parameters())), (ours, embed.distributed_optimizer(step, ours))


def requests(client, monkeypatch):
    """Count the client's pulls and pushes from now on."""
    counts = {"pull": 0, "push": 0}
    refresh, push = Client.refresh, Client.push

    def pulled(self, *arguments, **options):
        counts["pull"] += 1
        return refresh(self, *arguments, **options)

    def pushed(self, *arguments, **options):
        counts["push"] += 1
        return push(self, *arguments, **options)

    monkeypatch.setattr(Client, "refresh", pulled)
    monkeypatch.setattr(Client, "push", pushed)
    return counts


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_trains_as_stock_with_one_request_and_one_push(name, monkeypatch):
    read, batch, options, kinds = PROGRAMS[name]

    def make():
        model = Fields(read, kinds, **{k: v for k, v in options.items() if k != "dtype"})
        return model.to(options.get("dtype", torch.float32))

    pair = both(make)
    counts = requests(pair[1][0], monkeypatch)
    for number, size in enumerate(
        (9, 9, 4, 1, 33, 9, 0 if name in ("columns", "floats", "padding") else 9, 7)
    ):
        counts.update(pull=0, push=0)
        losses = []
        for model, optimizer in pair:
            optimizer.zero_grad()
            loss = (model(*batch(size, number)) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
        if number in (2, 4, 5) and name != "computed":
            assert counts == {"pull": 1, "push": 1}
    stock, ours = (model for model, _ in pair)
    for a, b in zip(stock.layers, ours.layers, strict=True):
        torch.testing.assert_close(b.weight.read(), a.weight.detach(), rtol=1e-4, atol=1e-6)
    ours.eval(), stock.eval()
    with torch.no_grad():
        for number in range(3):
            torch.testing.assert_close(ours(*batch(5, number)), stock(*batch(5, number)))


class Ways(nn.Module):
    """What programs do between the beginning of a forward pass and a layer, and with its output."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.users = nn.Embedding(ROWS, DIM)
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.top = nn.Linear(DIM * 2, 1)

    def forward(self, x, number=0):
        return self.way(self, x, number)


def in_place(self, x, number):
    a, b = self.users(x[:, 0]), self.items(x)
    a *= 3
    a[:, 1] = 0
    b.mul_(2).add_(1)
    return self.top(torch.cat([a, b], 1))


def changed_ids(self, x, number):
    x = x.add_(1).remainder_(ROWS)
    return self.top(torch.cat([self.users(x[:, 0]), self.items(x)], 1))


def changed_rows(self, x, number):
    with torch.no_grad():
        self.users.weight.data = self.users.weight.data * 0.5
    return self.top(torch.cat([self.users(x[:, 0]), self.items(x)], 1))


def unused_output(self, x, number):
    a, b = self.users(x[:, 0]), self.items(x)
    return self.top(torch.cat([a, b if number % 2 else b.detach()], 1))


def unused_half(self, x, number):
    a, other, b = self.users(x[:, 0]), self.users(x[:, 1]), self.items(x)
    return self.top(torch.cat([a if number % 2 else other, b], 1))


def left_out(self, x, number):
    return self.top(
        torch.cat([self.users(x[:, number % 2]), self.items(x) if number % 3 else x[:, :DIM] * 0.1], 1)
    )


def twice(self, x, number):
    a = self.users(x[:, 0]) * self.users(x[:, 1]) + self.users(x[:, 0])
    return self.top(torch.cat([a, self.items(x)], 1))


def recomputed(self, x, number, reentrant=False):
    def part(one):
        return torch.cat([self.users(x[:, 0]) * one, self.items(x)], 1)

    one = torch.ones((), requires_grad=True)
    return self.top(checkpoint(part, one, use_reentrant=reentrant))


def recomputed_reentrant(self, x, number):
    return recomputed(self, x, number, reentrant=True)


def frozen_in_turns(self, x, number):
    self.users.requires_grad_(number % 2 == 0)
    return self.top(torch.cat([self.users(x[:, 0]), self.items(x)], 1))


def without_gradients(self, x, number):
    with torch.no_grad():
        a = self.users(x[:, 0])
    return self.top(torch.cat([a, self.items(x)], 1))


def weighted(self, x, number):
    weights = torch.sigmoid(self.top.weight[0, 0]) * torch.ones(x.shape)
    return self.top(torch.cat([self.users(x[:, 0]), self.items(x, None, weights)], 1))


def of_penalties(self, x, number):
    a, b = self.users(x[:, 0]), self.items(x)
    y = (self.top(torch.cat([a, b], 1)) ** 2).sum()
    by_output = torch.autograd.grad(y, [a, b], create_graph=True)
    return y + sum((one**2).sum() for one in by_output)


@pytest.mark.parametrize(
    "way",
    [
        in_place,
        changed_ids,
        changed_rows,
        unused_output,
        unused_half,
        left_out,
        twice,
        recomputed,
        recomputed_reentrant,
        frozen_in_turns,
        without_gradients,
        weighted,
        of_penalties,
    ],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("servers", [1, 2])
def test_ways_of_forward_passes(way, servers):
    pair = both(lambda: Ways(way), Client.in_process(servers=servers))
    for number in range(8):
        losses = []
        for model, optimizer in pair:
            optimizer.zero_grad()
            loss = (model(matrix(6, number), number) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    (stock, _), (ours, _) = pair
    for name in ("users", "items"):
        mine, theirs = getattr(ours, name).weight.read(), getattr(stock, name).weight.detach()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class Towers(nn.Module):
    """Two layers, whose ids are arguments or buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.register_buffer("ids", torch.arange(3))

    def forward(self, x):
        return (self.a(x[:, 0]) ** 2).sum(), (self.b(x[:, 1]) ** 2).sum()


def losses_apart(model, optimizer, x):
    for loss in model(x):
        loss.backward()
    optimizer.step()


def ids_that_change(model, optimizer, x):
    x = x.clone()
    (model.a(model.ids) * x.sum() + model.b(x[:3, 0])).sum().backward()
    model.ids.add_(1)
    x.fill_(0)
    optimizer.step()


def a_step_within(model, optimizer, x):
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            (model.a(x[:, 0]) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return (model.a(x[:, 1]) ** 2).sum()

    model.trainer = model.__dict__.get("trainer") or [Trainer()]
    (trainer,) = model.trainer
    trainer(x).backward()
    optimizer.step()


@pytest.mark.parametrize("loop", [losses_apart, ids_that_change, a_step_within])
def test_loops_around_forward_passes(loop):
    (stock, of_stock), (ours, of_ours) = both(Towers)
    for number in range(4):
        for model, optimizer in ((stock, of_stock), (ours, of_ours)):
            optimizer.zero_grad()
            loop(model, optimizer, matrix(6, number))
    every = torch.stack([torch.arange(ROWS)] * 2, 1)
    for want, found in zip(stock(every), ours(every), strict=True):
        torch.testing.assert_close(found, want)
    torch.testing.assert_close(ours.a(torch.arange(ROWS)), stock.a(torch.arange(ROWS)))


def test_a_loss_has_one_backward_pass_as_in_torch():
    _, (model, _) = both(Towers)
    for _ in range(3):
        one, other = model(matrix(6))
        other.backward(retain_graph=True)
        other.backward()
        one.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            one.backward()


class Raising:
    """An argument that raises at each look."""

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: {"more": Raising()},
        lambda: {"more": np.zeros(3, [("id", np.int64), ("flag", np.int8)])["id"]},
        lambda: {"more": np.zeros(3, np.longdouble)},
    ],
    ids=["raising", "structured", "longdouble"],
)
def test_arguments_that_cannot_be_looked_at(arguments):
    _, (model, _) = both(lambda: Fields(lambda x, more: [(one + 1) % ROWS for one in columns(x)]))
    for number in range(3):
        model(matrix(6, number), **arguments())


def test_a_batch_is_not_changed_and_ids_may_change_their_type():
    (stock, _), (ours, _) = both(
        lambda: Fields(lambda x, y: [(y["item"] if "item" in y else x).long()], "e")  # noqa: SIM401 - stock
    )
    for number, kind in enumerate((torch.int64, torch.int64, torch.float32, torch.int64)):
        x = matrix(6, number)[:, 0].to(kind)
        given = collections.defaultdict(list, {"item": x} if number < 2 else {})
        torch.testing.assert_close(ours(x, given), stock(x, given))
        assert list(given) == (["item"] if number < 2 else [])


def test_rows_without_a_gradient_are_not_updated():
    """Adam moves a row with a gradient of zeros; a layer whose output is not used has none."""

    def adam(parameters):
        return torch.optim.Adam(parameters, 0.1)

    (_, (ours, optimizer)) = both(lambda: Ways(unused_half), optimizer=adam)
    x = torch.stack([torch.arange(6), torch.arange(10, 16)], 1)
    for number in range(4):
        optimizer.zero_grad()
        ours(x, number).sum().backward()
        if number == 3:
            keys = ours.users.anchor.grad_keys
            before = ours.users.weight.read()
        optimizer.step()
    assert sorted(keys) == list(range(6))
    after = ours.users.weight.read()
    assert (after[10:16] == before[10:16]).all()
    assert (after[:6] != before[:6]).any()


def test_a_plain_layer_beside_a_collection_takes_two_pushes(monkeypatch):
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = embed.EmbeddingBagCollection(
                [embed.EmbeddingBagConfig(ROWS, DIM, name) for name in ("a", "b", "c")]
            )
            self.user = nn.Embedding(ROWS, DIM)

        def forward(self, features, users):
            return torch.cat([self.tables(features).values(), self.user(users)], 1)

    model = embed.distributed_model(Beside(), Client.in_process())
    optimizer = embed.distributed_optimizer(adagrad(model.parameters()), model)
    counts = requests(model, monkeypatch)
    for _ in range(3):
        counts.update(pull=0, push=0)
        features = embed.KeyedJaggedTensor(
            ["a", "b", "c"], torch.arange(12), lengths=torch.ones(12, dtype=torch.int64)
        )
        optimizer.zero_grad()
        model(features, torch.arange(4)).sum().backward()
        optimizer.step()
        assert counts == {"pull": 2, "push": 2}


def test_a_model_in_a_model_and_one_that_is_called_for_itself(monkeypatch):
    """The outermost module that has the ids pulls them."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Fields(lambda x: list(x.unbind(1)), "eeeee")

        def forward(self, batch):
            return self.inner(batch if isinstance(batch, torch.Tensor) else torch.from_numpy(batch))

    model = embed.distributed_model(Outer(), Client.in_process())
    embed.distributed_optimizer(adagrad(model.parameters()), model)
    counts = requests(model, monkeypatch)
    for batch in (matrix(3), matrix(3).numpy()):
        for call in (model, model.inner) if isinstance(batch, torch.Tensor) else (model,):
            for number in range(3):
                counts["pull"] = 0
                call(batch)
                assert counts["pull"] == 1 or number == 0
    assert not embed.embedding.forwards()


def test_errors_in_forward_leave_nothing():
    pair = both(lambda: Fields(columns))
    model, _ = pair[1]
    model(matrix(3))
    bad = matrix(3)
    bad[0, 1] = ROWS
    with pytest.raises(KeyRangeError):
        model(bad)
    assert not embed.embedding.forwards()
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, 2, dtype=torch.int64))
    assert not embed.embedding.forwards()
    torch.testing.assert_close(model(matrix(3)), pair[0][0](matrix(3)))
    assert not any(layer.ahead for layer in model.layers)


def test_threads_look_up_side_by_side():
    (stock, _), (ours, _) = both(lambda: Fields(columns))
    ours.eval()
    wrong = []

    def look_up(seed):
        with torch.no_grad():
            for number in range(30):
                x = matrix(5, seed + number % 3)
                if not torch.allclose(ours(x), stock(x), atol=1e-6):
                    wrong.append(seed)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_a_model_is_copied_and_pickled_with_what_it_has_learned():
    model = embed.distributed_model(Fields(columns), Client.in_process())
    model(matrix(4))
    copied = embed.distributed_model(copy.deepcopy(model), Client.in_process())
    torch.testing.assert_close(copied(matrix(4)), model(matrix(4)))
    torch.save(Fields(columns).state_dict(), io.BytesIO())
    before = [len(one._forward_pre_hooks) for one in model.modules()]
    embed.distributed_model(model, Client.in_process())
    assert [len(one._forward_pre_hooks) for one in model.modules()] == before
