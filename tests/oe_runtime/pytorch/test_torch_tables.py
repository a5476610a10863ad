"""Tables of any ids, what is refused, and one table in Keras and PyTorch."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
from server_processes import Server

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client, StorageSpec, TableSpec  # noqa: E402
from oe_runtime.errors import CheckpointError, KeyRangeError, SpecError, SpecMismatch  # noqa: E402


def bound(layer, make=lambda p: torch.optim.SGD(p, 0.1), client=None):
    layer = embed.distributed_model(layer, client)
    return layer, embed.distributed_optimizer(make(layer.parameters()), layer)


def test_any_id_and_every_dtype():
    ids = torch.tensor([[-(2**63), 2**63 - 1], [5, 5]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        layer, optimizer = bound(embed.Embedding(-1, 4, dtype=dtype, name="any"))
        before = layer(ids)
        assert (before.shape, before.dtype) == ((2, 2, 4), dtype)
        before.sum().backward()
        optimizer.step()
        after = layer(ids)
        step = torch.tensor([[0.1, 0.1], [0.2, 0.2]], dtype=dtype)[..., None].expand(2, 2, 4)
        torch.testing.assert_close(
            after, before - step, atol=0.02 if dtype.itemsize == 2 else 1e-6, rtol=0.01
        )
        assert sum(s["tables"]["any"]["rows"] for s in layer.client.stats()["servers"]) == 3
    assert layer(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 4)


def test_a_state_and_gradients_in_two_bytes():
    """Those of the model, unless a layer or a configuration says otherwise."""
    dtypes = {"state_dtype": "bfloat16", "exchange_dtype": "bfloat16"}
    config = embed.EmbeddingBagConfig(9, 4, "bags", feature_names=["x"], **dtypes)
    model = torch.nn.ModuleDict(
        {
            "rows": torch.nn.Embedding(99, 4, dtype=torch.bfloat16),
            "own": embed.Embedding(99, 4, **dict.fromkeys(dtypes, "float32")),
            "tables": embed.EmbeddingBagCollection([config]),
        }
    )
    model = embed.distributed_model(model, **dtypes)
    optimizer = embed.distributed_optimizer(torch.optim.Adam(model.parameters(), 0.1), model)
    for field in dtypes:
        assert [getattr(model[name].table.spec, field) for name in ("rows", "own")] == ["bfloat16", None]
        assert getattr(model["tables"].layers[0].table.spec, field) == "bfloat16"
    for _ in range(3):
        model["rows"](torch.arange(99)).sum().backward()
        optimizer.step()
    read = model["rows"].client.read_rows("rows", np.arange(99))
    for values in read.slots.values():
        assert not (values.view(np.uint32) & 0xFFFF).any()
        assert values.any()


def test_frozen_rows_stay():
    stock = torch.nn.Embedding(9, 2).requires_grad_(False)
    layer, optimizer = bound(embed.Embedding(9, 2))
    layer.frozen = True
    before = layer(torch.arange(9))
    factor = torch.ones(1, requires_grad=True)
    (before.sum() * factor).backward()
    optimizer.step()
    torch.testing.assert_close(layer(torch.arange(9)), before)
    for one in (stock, layer):  # nothing here requires gradients
        with pytest.raises(RuntimeError, match="does not require grad"):
            one(torch.arange(9)).sum().backward()
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    layer.requires_grad_(True)
    assert not layer.frozen
    layer(torch.arange(9)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer(torch.arange(9)), before - 0.1)


class Fields(torch.nn.Module):
    """Twelve tables, one of them looked up twice and with padding, which a forward pass asks for at once."""

    def __init__(self, together):
        super().__init__()
        self.together = together
        self.fields = torch.nn.ModuleList(
            embed.Embedding(-1, 2 + i % 2, padding_idx=3 if i == 0 else None, name=f"C{i}") for i in range(12)
        )
        self.bag = embed.EmbeddingBag(50, 3, mode="sum", name="bag")

    def forward(self, ids):
        last = ids.flip(0)
        if self.together:
            columns = {layer: ids[:, i] for i, layer in enumerate(self.fields)}
            columns[self.fields[0]] = [ids[:, 0], last[:, 0]]
            embed.pull({**columns, self.bag: ids})
        rows = [layer(ids[:, i]) for i, layer in enumerate(self.fields)]
        return torch.cat([*rows, self.fields[0](last[:, 0]) ** 2, self.bag(ids)], 1)


def messages(client):
    (server,) = client.stats()["servers"]
    return server["pulls"]["requests"], server["pushes"]["requests"]


def test_layers_that_are_pulled_together_take_one_message():
    """Once a forward pass knows its calls, it does without `pull`."""
    rng = np.random.default_rng(0)
    rows, counts = {}, {False: [], True: []}
    for together in (False, True):
        model, optimizer = bound(Fields(together), lambda p: torch.optim.Adagrad(p, 0.1))
        client = model.bag.table.client
        rng = np.random.default_rng(0)
        for _ in range(3):
            before = messages(client)
            optimizer.zero_grad()
            ids = torch.from_numpy(rng.integers(0, 50, (20, 12)))
            model(ids).square().sum().backward()
            optimizer.step()
            after = messages(client)
            counts[together].append((after[0] - before[0], after[1] - before[1]))
        rows[together] = [
            client.pull_rows(layer.table.number, np.arange(50)) for layer in (*model.fields, model.bag)
        ]
    assert counts[True] == [(1, 1)] * 3
    assert counts[False][0][0] >= 14
    assert counts[False][0][1] == 1
    for a, b in zip(rows[False], rows[True], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # Evaluation too, and other ids than those announced.
    model.eval()
    before = messages(client)
    expected = model(ids)
    assert messages(client) == (before[0] + 1, before[1])
    model.together = False
    torch.testing.assert_close(model(ids), expected)
    embed.pull({model.bag: ids})
    torch.testing.assert_close(model.bag(ids + 1 - 1), model.bag(ids))
    embed.pull({model.bag: [ids, ids]})
    embed.pull({model.bag: []})
    assert not model.bag.ahead  # rows of an earlier pull are not used later
    with pytest.raises(TypeError, match=r"pull\(\) takes layers of oe_runtime\.torch, not Linear"):
        embed.pull({torch.nn.Linear(1, 1): ids})


def test_announced_rows_are_read_from_the_drive_before_their_pull(tmp_path):
    rows = ["--storage", "dram_ssd", "--storage-path", str(tmp_path / "rows"), "--storage-cache", "128K"]
    drive = Server(tmp_path, *rows)
    try:
        with Client([drive.endpoint]) as client:
            model, optimizer = bound(Fields(True), client=client)
            for begin in range(0, 100_000, 1000):  # far more rows than the cache holds
                optimizer.zero_grad()
                model.fields[1](torch.arange(begin, begin + 1000)).sum().backward()
                optimizer.step()
            layer, later = model.fields[1], torch.arange(64) * 7 + 30_000

            def reads():
                return client.stats()["servers"][0]["tables"]["C1"]["drive"]["reads"]

            client.pull_rows(layer.table.number, np.arange(50_000, 51_000))
            before = reads()
            embed.read_ahead({layer: later, model.bag: later % 50})
            deadline = time.monotonic() + 30
            while reads() - before < 64:
                assert time.monotonic() < deadline
            client.pull_rows(layer.table.number, later.numpy())
            assert reads() - before == 64  # not read again
            assert not layer.ahead
            with pytest.raises(KeyRangeError, match="'bag': key 30000 is not"):
                embed.read_ahead({layer: later, model.bag: later})
            with pytest.raises(
                TypeError, match=r"read_ahead\(\) takes layers of oe_runtime\.torch, not Linear"
            ):
                embed.read_ahead({torch.nn.Linear(1, 1): later})
            torch.testing.assert_close(layer(later), layer(later))
    finally:
        drive.end()


def test_a_layer_with_a_rate_of_its_own_is_pushed_by_itself():
    layers = torch.nn.ModuleList(embed.Embedding(9, 2, name=name) for name in "ab")
    embed.distributed_model(layers)
    groups = [{"params": list(layers[0].parameters()), "lr": 1.0}, {"params": list(layers[1].parameters())}]
    optimizer = embed.distributed_optimizer(torch.optim.SGD(groups, 0.25), layers)
    ids = torch.tensor([2, 2, 5])
    embed.pull(dict.fromkeys(layers, ids))
    before = [layer.table.client.pull_rows(layer.table.number, np.arange(9)) for layer in layers]
    sum(layer(ids).sum() for layer in layers).backward()
    optimizer.step()
    for layer, old, rate in zip(layers, before, (1.0, 0.25), strict=True):
        old[2] -= 2 * rate
        old[5] -= rate
        np.testing.assert_allclose(
            layer.table.client.pull_rows(layer.table.number, np.arange(9)), old, atol=1e-6
        )


def test_what_is_refused():
    for arguments, message in (
        ({"num_embeddings": 0}, "num_embeddings must be an integer > 0, or -1"),
        ({"embedding_dim": -1}, "embedding_dim must be an integer > 0, not -1"),
        ({"padding_idx": 9}, "padding_idx 9 is not in the 9 rows"),
        ({"dtype": torch.int64}, r"dtype must be one of .*, not torch\.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            embed.Embedding(**{"num_embeddings": 9, "embedding_dim": 2} | arguments)
    with pytest.raises(ValueError, match="mode must be sum, mean or max, not 'min'"):
        embed.EmbeddingBag(9, 2, mode="min")
    for stock, message in (
        (torch.nn.Embedding(99, 2, max_norm=1.0), "layer '0': max_norm is not supported"),
        (torch.nn.Embedding(99, 2, scale_grad_by_freq=True), "layer '0': scale_grad_by_freq is not"),
    ):
        with pytest.raises(ValueError, match=message):
            embed.distributed_model(torch.nn.Sequential(stock))


EARLIER = [  # optimizers, and how 0.2.0 described them to the servers
    (lambda p: torch.optim.Adam(p, 0.1), {"name": "adam", "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}),
    (
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.2, amsgrad=True),
        {"name": "adamw", "epsilon": 1e-8, "amsgrad": True, "weight_decay": 0.2},
    ),
    (
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-5),
        {"name": "adagrad", "initial_accumulator_value": 0.0, "epsilon": 1e-5**2},
    ),
    (
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
        {"name": "rmsprop", "rho": 0.99, "momentum": 0.5, "epsilon": 1e-8**2},
    ),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"name": "sgd", "momentum": 0.9}),
]


@pytest.mark.parametrize("storage", ["dram", "pmem_libpmem"])
@pytest.mark.parametrize(
    ("make", "rule"), EARLIER, ids=lambda value: value.get("name") if isinstance(value, dict) else ""
)
@pytest.mark.filterwarnings("ignore:.*(is not persistent memory|which are kept)")
def test_rows_that_0_2_0_made_keep_its_form_of_the_optimizer(tmp_path, storage, make, rule):
    kept = "keeps the optimizer .* in the form of oeprov 0.2.0"
    spec = embed.Embedding(9, 2, name="embedding").table_spec(rule)
    place = "" if storage == "dram" else tmp_path / "pool"

    def opened(**options):
        return Client.in_process(storage=StorageSpec(storage, place, **options))

    (tmp_path / "saved").mkdir()
    with opened() as client:
        table = client.create_table(spec)
        client.push(client.pull([np.arange(9)], [(table, 0)]), [np.ones((9, 2), np.float32)], 0.1)
        rows = client.pull_rows(table, np.arange(9))
        client.save(tmp_path / "saved")
        if place:
            client.checkpoint(1, wait=True)
        # Servers that still run.
        with pytest.warns(UserWarning, match=kept):
            layer, _ = bound(embed.Embedding(9, 2, name="embedding"), make, client=client)
        assert layer.table.spec.optimizer.items() >= rule.items()
        # Another optimizer is refused as before.
        with pytest.raises(SpecMismatch, match=r"optimizer\."):
            bound(
                embed.Embedding(9, 2, name="embedding"),
                lambda p: torch.optim.Adam(p, 0.1, betas=(0.0, 0.0)),
                client=client,
            )
    # The files of a job's checkpoint, which the session names; and a pool.
    for options in [{}] if storage == "dram" else [{"recover": True}]:
        with opened(**options) as client:
            if not options:
                client.restores, client.saved_optimizers = True, {"embedding": rule}
            with pytest.warns(UserWarning, match=kept):
                layer, optimizer = bound(embed.Embedding(9, 2, name="embedding"), make, client=client)
            client.recover() if options else client.restore(tmp_path / "saved")
            assert np.array_equal(client.pull_rows(layer.table.number, np.arange(9)), rows)
            layer(torch.arange(9)).sum().backward()
            optimizer.step()
            assert not np.array_equal(client.pull_rows(layer.table.number, np.arange(9)), rows)
    # The same files, restored by the user's own call.
    with Client.in_process() as client:
        layer, optimizer = bound(embed.Embedding(9, 2, name="embedding"), make, client=client)
        assert layer.table.spec.optimizer["torch"] == 1
        if rule.get("momentum"):
            with pytest.raises(CheckpointError, match=r"'optimizer\.(torch|epsilon)' was "):
                client.restore(tmp_path / "saved")
        else:
            client.restore(tmp_path / "saved")
            assert np.array_equal(client.pull_rows(layer.table.number, np.arange(9)), rows)


def test_a_server_of_0_2_0_gets_its_form_of_the_optimizer(monkeypatch):
    create = Client.create_table

    def of_0_2(self, spec):
        if "torch" in spec.optimizer or spec.optimizer["name"] == "radam":
            raise SpecError(
                f"table '{spec.name}': optimizer '{spec.optimizer['name']}' does not support 'torch'"
            )
        return create(self, spec)

    monkeypatch.setattr(Client, "create_table", of_0_2)
    with Client.in_process() as client, pytest.warns(UserWarning, match=r"in the form of oeprov 0\.2\.0"):
        bound(embed.Embedding(9, 2), lambda p: torch.optim.Adam(p, 0.1), client=client)
    for make in (
        lambda p: torch.optim.Adam(p, 0.1, maximize=True),
        lambda p: torch.optim.NAdam(p, 0.1),
        lambda p: torch.optim.RAdam(p, 0.1),
    ):
        with Client.in_process() as client, pytest.raises(SpecError, match="does not support 'torch'"):
            bound(embed.Embedding(9, 2), make, client=client)


class Lion(torch.optim.SGD):
    """As of a package beside PyTorch."""


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 100


def test_what_stays_is_named():
    for layer, message in (
        (Scaled(99, 2), r"layer '0' \(Scaled\): weight \(99, 2\) stays in .*a subclass may look rows up"),
        (torch.nn.Linear(2, 100_000), r"layer '0' \(Linear\): weight \(100000, 2\) stays in this process"),
    ):
        stock = torch.nn.Sequential(layer)
        with pytest.warns(UserWarning, match=message):
            assert embed.distributed_model(stock)[0] is layer
    small = embed.distributed_model(torch.nn.Sequential(torch.nn.Embedding(63, 2)))
    assert type(small[0]) is torch.nn.Embedding

    for make, message in (
        (lambda p: torch.optim.LBFGS(p), "optimizer LBFGS: .* use one of SGD"),
        (lambda p: torch.optim.ASGD(p), "optimizer ASGD: .* use one of SGD, .*, RowWiseAdagrad$"),
        (lambda p: torch.optim.Rprop(p), "optimizer Rprop: .* use one of SGD"),
        (lambda p: torch.optim.Adafactor(p), "optimizer Adafactor: .* use one of SGD"),
        (lambda p: Lion(p), "optimizer Lion: .* use one of SGD"),
        (lambda p: type("RowWiseAdagrad", (torch.optim.SGD,), {})(p, 0.1), "use oe_runtime.torch.RowWise"),
        (lambda p: torch.optim.Adam(p, 0.1, differentiable=True), r"Adam\(differentiable=True\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bound(embed.Embedding(9, 2), make)
    layer = embed.Embedding(9, 2)
    with pytest.raises(RuntimeError, match="has no table yet"):
        layer(torch.arange(2))
    with pytest.raises(ValueError, match="has no servers: give the model to distributed_model first"):
        embed.distributed_optimizer(torch.optim.SGD(layer.parameters(), 0.1), layer)
    embed.distributed_model(layer)
    with pytest.raises(ValueError, match="is not in the optimizer"):
        embed.distributed_optimizer(torch.optim.SGD([torch.zeros(1)], 0.1), layer)
    twice = torch.nn.Sequential(embed.Embedding(9, 2, name="a"), embed.Embedding(9, 2, name="a"))
    with pytest.raises(ValueError, match="two layers have tables of the name 'a'"):
        bound(twice)
    layer, optimizer = bound(embed.Embedding(9, 2))
    with pytest.raises(KeyRangeError, match=r"9 is not in \[0, 9\)"):
        layer(torch.tensor([9]))
    with pytest.raises(TypeError, match=r"ids must be int64 or int32, not torch\.float32"):
        layer(torch.zeros(1))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="settings for table 'embedding' have changed"):
        optimizer.step()
    with Client.in_process() as client:
        client.create_table(TableSpec("embedding", 2))
        with pytest.raises(SpecMismatch, match=r"optimizer\.name"):
            bound(embed.Embedding(9, 2), client=client)


def test_a_table_goes_on_from_keras_to_torch_and_back(tmp_path):
    keras = pytest.importorskip("keras")
    import oe_runtime.keras as keras_embed

    rng = np.random.default_rng(0)
    ids = rng.integers(-50, 50, (6, 64, 1)) * 2**50
    y = rng.random((6, 64, 1)).astype(np.float32)

    def keras_model(client):
        inputs = keras.Input((1,), dtype="int64")
        rows = keras_embed.Embedding(-1, 1, "uniform", name="ids")(inputs)
        model = keras_embed.distributed_model(keras.Model(inputs, keras.layers.Flatten()(rows)), client)
        model.compile(keras_embed.distributed_optimizer(keras.optimizers.Adagrad(0.3)), "mse")
        return model

    def rows(client):
        keys, values = client.export_rows(0)
        return values[np.argsort(keys)]

    whole = Client.in_process()
    model = keras_model(whole)
    for step in range(6):
        model.train_on_batch(ids[step], y[step])

    first = Client.in_process()
    model = keras_model(first)
    for step in range(2):
        model.train_on_batch(ids[step], y[step])
    (tmp_path / "keras").mkdir()
    first.save(tmp_path / "keras")

    second = Client.in_process(servers=3)
    layer = embed.Embedding(spec=embed.saved_tables(tmp_path / "keras")["ids"])
    layer, optimizer = bound(layer, lambda p: torch.optim.Adagrad(p, 0.3), second)
    second.restore(tmp_path / "keras")
    for step in range(2, 4):
        optimizer.zero_grad()
        output = layer(torch.from_numpy(ids[step]))[:, 0]
        torch.nn.functional.mse_loss(output, torch.from_numpy(y[step])).backward()
        optimizer.step()
    (tmp_path / "torch").mkdir()
    second.save(tmp_path / "torch")

    third = Client.in_process()
    model = keras_model(third)
    third.restore(tmp_path / "torch")
    for step in range(4, 6):
        model.train_on_batch(ids[step], y[step])
    np.testing.assert_allclose(rows(third), rows(whole), atol=1e-6)


def test_a_second_run_says_that_rows_are_there():
    client = Client.in_process()

    def run(fresh=None):
        layer = embed.distributed_model(embed.Embedding(-1, 4, name="e"), client, fresh=fresh)
        optimizer = embed.distributed_optimizer(torch.optim.SGD(layer.parameters(), 0.1), layer)
        layer(torch.arange(5)).sum().backward()
        optimizer.step()
        return len(client.keys("e"))

    assert run() == 5
    with pytest.warns(UserWarning, match="table e exists with 5 rows, which are kept") as said:
        run()
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(fresh=False)
        client.assign("e", np.arange(100, 110), np.ones((10, 4), np.float32))
        assert run(fresh=True) == 5


def test_tables_learn_at_the_rate_that_a_loaded_optimizer_has() -> None:
    """load_state_dict gives the optimizer new groups."""
    model = embed.distributed_model(torch.nn.Sequential(torch.nn.Embedding(100, 2)))
    optimizer = embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 1.0), model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    ids = torch.arange(4)
    before = model(ids).detach().clone()
    model(ids).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(ids).detach(), before, rtol=0, atol=0)
