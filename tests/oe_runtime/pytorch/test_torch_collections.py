"""Collections of tables beside stock layers, and beside TorchRec's own where it is installed."""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import oe_runtime.torch as embed
from oe_runtime import Client, KeyRangeError
from oe_runtime.torch import pooling

TABLES = {"t0": (100, 8, ["a", "b"]), "t1": (50, 16, ["c"]), "t2": (500, 8, ["d", "a"])}
FEATURES = {"a": 100, "b": 100, "c": 50, "d": 500}
NAMES = ["a@t0", "b", "c", "d", "a@t2"]
BATCHES = (37, 1, 5, 64)


def configs(pooling="SUM", kind=embed.EmbeddingBagConfig, dim=None):
    more = {"pooling": pooling} if kind is embed.EmbeddingBagConfig else {}
    return [
        kind(num_embeddings=rows, embedding_dim=dim or own, name=name, feature_names=list(names), **more)
        for name, (rows, own, names) in TABLES.items()
    ]


def lists(batch, seed, most=5):
    """(values, lengths, weights) of the features, feature by feature; some lists are empty."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, most, len(FEATURES) * batch)
    parts = lengths.reshape(len(FEATURES), batch).sum(1)
    values = [random.integers(0, rows, n) for rows, n in zip(FEATURES.values(), parts, strict=True)]
    weights = random.random(int(lengths.sum()), dtype=np.float32)
    return tuple(torch.from_numpy(one) for one in (np.concatenate(values), lengths, weights))


class StockBags(nn.Module):
    """The same of torch.nn's layers."""

    def __init__(self, mode, dim=None):
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(rows, dim or own, mode=mode, include_last_offset=True)
                for name, (rows, own, _) in TABLES.items()
            }
        )

    def forward(self, values, lengths, weights):
        batch = len(lengths) // len(FEATURES)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found = []
        for name, (_, _, names) in TABLES.items():
            for feature in names:
                at = list(FEATURES).index(feature) * batch
                begin, end = int(offsets[at]), int(offsets[at + batch])
                weight = None if weights is None else weights[begin:end]
                bags = offsets[at : at + batch + 1] - begin
                found.append(self.tables[name](values[begin:end], bags, weight))
        return torch.cat(found, 1)


class Model(nn.Module):
    def __init__(self, tables, width):
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(width, 1)


def keyed(values, lengths, weights, kind=embed.KeyedJaggedTensor):
    return kind(list(FEATURES), values, weights, lengths=lengths)


def make(optimizer, *, weighted=False, mode="sum", servers=1, kind=torch.optim.Adagrad):
    """(stock model, its optimizer, ours, its optimizer, client) with equal weights."""
    torch.manual_seed(0)
    width = 8 * 4 + 16
    stock = Model(StockBags(mode), width)
    ours = Model(embed.EmbeddingBagCollection(configs(mode.upper()), is_weighted=weighted), width)
    ours.top.load_state_dict(stock.top.state_dict())
    for name, layer in ours.tables.embedding_bags.items():
        layer.set_rows(stock.tables.tables[name].weight)
    client = Client.in_process(servers=servers)
    ours = embed.distributed_model(ours, client)
    return (
        stock,
        kind(stock.parameters(), **optimizer),
        ours,
        embed.distributed_optimizer(kind(ours.parameters(), **optimizer), ours),
        client,
    )


def rows_of(ours, name):
    table = ours.tables.embedding_bags[name].table
    return table.client.pull_rows(table.number, np.arange(TABLES[name][0]))


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("mean", False), ("sum", True)])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_collection_trains_as_stock_layers(mode, weighted, servers, clip):
    options = {"lr": 0.05, "initial_accumulator_value": 0.1}
    stock, stock_step, ours, step, _ = make(options, weighted=weighted, mode=mode, servers=servers)
    for number in range(40):
        values, lengths, weights = lists(BATCHES[number % 4], number)
        losses, of_weights = [], []
        for model, optimizer in ((stock, stock_step), (ours, step)):
            own = weights.clone().requires_grad_() if weighted else None
            optimizer.zero_grad()
            if model is stock:
                found = model.tables(values, lengths, own)
            else:
                result = model.tables(keyed(values, lengths, own))
                found = result.values()
            loss = (model.top(found) ** 2).mean() + found[:, 3].sum() * 1e-3
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
            of_weights.append(own.grad if weighted else None)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
        if weighted:
            torch.testing.assert_close(of_weights[0], of_weights[1], rtol=1e-4, atol=1e-6)
        assert result.keys() == NAMES
    for name in TABLES:
        expected = stock.tables.tables[name].weight.detach().numpy()
        np.testing.assert_allclose(rows_of(ours, name), expected, rtol=1e-4, atol=1e-6)


def test_all_tables_take_one_request_per_step(monkeypatch):
    *_, ours, step, client = make({"lr": 0.1}, kind=torch.optim.SGD)
    asked = []
    for name in ("pull", "push", "refresh"):
        method = getattr(client, name)
        monkeypatch.setattr(
            client, name, lambda *a, _m=method, _n=name, **k: (asked.append(_n), _m(*a, **k))[1]
        )
    for number in range(3):
        step.zero_grad()
        ours.tables(keyed(*lists(20, number))).values().sum().backward()
        step.step()
    assert asked == ["refresh", "push"] * 3


def test_a_sequence_collection_trains_as_stock_layers():
    torch.manual_seed(0)
    stock = nn.ModuleDict({name: nn.Embedding(rows, 8) for name, (rows, _, _) in TABLES.items()})
    tables = configs(kind=embed.EmbeddingConfig, dim=8)
    ours = Model(embed.EmbeddingCollection(tables, need_indices=True), 8)
    for name, layer in ours.tables.embeddings.items():
        layer.set_rows(stock[name].weight)
    top = copy.deepcopy(ours.top)
    ours = embed.distributed_model(ours, Client.in_process())
    step = embed.distributed_optimizer(
        torch.optim.Adagrad(ours.parameters(), 0.05, initial_accumulator_value=0.1), ours
    )
    stock_step = torch.optim.Adagrad(
        [*stock.parameters(), *top.parameters()], 0.05, initial_accumulator_value=0.1
    )
    for number in range(20):
        values, lengths, _ = lists(BATCHES[number % 4], number)
        batch = keyed(values, lengths, None)
        step.zero_grad()
        found = ours.tables(batch)
        assert list(found) == NAMES
        for name, one in found.items():
            part = batch[name.partition("@")[0]]
            assert torch.equal(one.lengths(), part.lengths())
            assert torch.equal(one.weights(), part.values())
        loss = sum((ours.top(one.values()) ** 2).sum() for one in found.values())
        loss.backward()
        step.step()

        stock_step.zero_grad()
        parts = [
            stock[name](batch[feature].values())
            for name, (_, _, names) in TABLES.items()
            for feature in names
        ]
        expected = sum((top(one) ** 2).sum() for one in parts)
        expected.backward()
        stock_step.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, layer in ours.tables.embeddings.items():
        rows = layer.table.client.pull_rows(layer.table.number, np.arange(TABLES[name][0]))
        np.testing.assert_allclose(rows, stock[name].weight.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_any_id_frozen_tables_and_no_gradients():
    model = Model(
        embed.EmbeddingBagCollection(
            [
                embed.EmbeddingBagConfig(-1, 4, "any", feature_names=["a"]),
                embed.EmbeddingBagConfig(50, 4, "frozen", feature_names=["b"]),
            ]
        ),
        8,
    )
    model.tables.embedding_bags["frozen"].frozen = True
    client = Client.in_process()
    model = embed.distributed_model(model, client)
    step = embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.5), model)
    ids = torch.tensor([-(2**62), 7, 2**62, 3, 4])
    batch = embed.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([2, 1, 0, 2]))
    with torch.no_grad():
        before = model.tables(batch).values()
    assert not before.requires_grad
    assert 0 < before[:, :4].abs().max() <= 0.02
    model.tables(batch).values().sum().backward()
    step.step()
    after = model.tables(batch).values().detach()
    torch.testing.assert_close(after[:, :4], before[:, :4] - torch.tensor([[1.0], [0.5]]))
    assert torch.equal(after[:, 4:], before[:, 4:])


def test_batches_that_do_not_fit_are_refused_by_name():
    *_, ours, _, _ = make({"lr": 0.1}, kind=torch.optim.SGD)
    ids, four = torch.arange(4), torch.ones(4, dtype=torch.int64)
    kjt = embed.KeyedJaggedTensor

    def refused(batch, words, error=ValueError):
        with pytest.raises(error, match=words):
            ours.tables(batch)

    refused(
        kjt(["a", "b", "c"], ids[:3], lengths=four[:3]),
        "no feature 'd', which table 't2' looks up; it has a, b",
    )
    refused(kjt(list(FEATURES), ids.float(), lengths=four), "int64 or int32, not torch.float32", TypeError)
    refused(kjt(list(FEATURES), ids, lengths=torch.tensor([1, 1, 1, 2])), "sum to 5, but it has 4 ids")
    refused(
        kjt(list(FEATURES), ids, lengths=torch.tensor([1, -1, 3, 1])), "feature 'b': list 0 has the length -1"
    )
    refused(
        kjt(list(FEATURES), ids, offsets=torch.tensor([0, 2, 1, 3, 4])),
        "feature 'b': list 0 has the length -1",
    )
    refused(kjt(["a", "a", "c", "d"], ids, lengths=four), "two features of the name 'a'")
    refused(kjt(list(FEATURES), ids - 1, lengths=four), r"'t0': key -1 is not in \[0, 100\)", KeyRangeError)
    refused(torch.arange(4), "takes a KeyedJaggedTensor .* not Tensor", TypeError)
    uneven = kjt(
        list(FEATURES), ids, lengths=four[:4].repeat(1), stride_per_key_per_rank=[[2], [1], [1], [0]]
    )
    refused(uneven, "different numbers of examples")
    with pytest.raises(ValueError, match="4 lists of ids cannot be shared out among 3 features"):
        kjt(["a", "b", "c"], ids, lengths=four)
    with pytest.raises(ValueError, match="give lengths or offsets"):
        kjt(["a"], ids)
    *_, ours, _, _ = make({"lr": 0.1}, kind=torch.optim.SGD, weighted=True)
    refused(kjt(list(FEATURES), ids, lengths=four), "is weighted .* but the batch has no weights")
    refused(kjt(list(FEATURES), ids, torch.ones(3), lengths=four), r"4 ids, but weights of shape \(3,\)")


def test_tables_that_do_not_fit_are_refused_by_name():
    bags, config = embed.EmbeddingBagCollection, embed.EmbeddingBagConfig

    def refused(tables, words, kind=bags, **more):
        with pytest.raises(ValueError, match=words):
            kind(tables, **more)

    refused([config(9, 4, "t"), config(9, 4, "t")], "two tables of the collection have the name 't'")
    refused([config(9, 4, "items")], "'items': PyTorch does not take this name for a layer")
    refused([config(9, 4, "a.b")], "'a.b': PyTorch does not take this name for a layer")
    refused([config(9, 4)], "each table of a collection has a name")
    refused([config(9, 4, "t", pooling="MAX")], "table 't': pooling must be SUM or MEAN, not MAX")
    refused(
        [config(9, 4, "t", pooling="MEAN")],
        "'t': pooling MEAN does not go with is_weighted",
        is_weighted=True,
    )
    refused(
        [config(9, 4, "t", data_type="INT8")], "'t': data_type must be float32, bfloat16 or float16, not INT8"
    )
    refused(
        [config(9, 4, "t", weights_precision="int8")],
        "'t': weights_precision must be float32, bfloat16 or float16, not int8",
    )
    refused(
        [config(9, 4, "t", data_type="FP16", weights_precision="bf16")],
        "'t': data_type is FP16, but weights_precision bf16; set one of them",
    )
    refused(
        [config(9, 4, "t", weights_precision="fp16", stochastic_rounding=False)],
        "'t': stochastic_rounding=False is not offered, .* keep rows in float32",
    )
    bags([config(9, 4, "t", stochastic_rounding=False)])  # float32 is not rounded
    refused([config(-1, 4, "t", init_fn=nn.init.ones_)], "'t': init_fn fills all rows at once")
    of_ids = embed.EmbeddingConfig
    refused([of_ids(9, 4, "t"), of_ids(9, 8, "u")], "'t' has 4, 'u' 8", embed.EmbeddingCollection)
    layer = bags([config(9, 4, "t", init_fn=nn.init.ones_)]).embedding_bags["t"]
    assert (layer.first_rows == 1).all()


def test_lists_by_example_and_the_small_classes():
    """inverse_indices let examples share lists; jagged and keyed tensors give what they were made of."""
    *_, ours, _, _ = make({"lr": 0.1}, kind=torch.optim.SGD)
    values, lengths, _ = lists(3, 5)
    inverse = torch.tensor([[0, 1, 2, 2], [2, 2, 0, 1], [1, 1, 1, 1], [0, 2, 0, 2]])
    shared = embed.KeyedJaggedTensor(
        list(FEATURES),
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[3]] * 4,
        inverse_indices=(list(FEATURES), inverse),
    )
    assert shared.stride() == 4
    plain, found = ours.tables(keyed(values, lengths, None)).to_dict(), ours.tables(shared).to_dict()
    for name in NAMES:
        rows = inverse[list(FEATURES).index(name.partition("@")[0])]
        assert torch.equal(found[name], plain[name][rows])

    parts = keyed(values, lengths, None).to_dict()
    parts["a"] = embed.JaggedTensor(parts["a"].values(), torch.ones(len(parts["a"].values())), lengths[:3])
    with pytest.raises(ValueError, match="only a of the features have weights"):
        embed.KeyedJaggedTensor.from_jt_dict(parts)
    parts = keyed(values, lengths, None).to_dict()
    again = embed.KeyedJaggedTensor.from_jt_dict(parts)
    assert torch.equal(again.values(), values)
    assert torch.equal(again.lengths(), lengths)
    dense = parts["a"].to_dense()
    assert [len(one) for one in dense] == lengths[:3].tolist()
    back = embed.JaggedTensor.from_dense(dense)
    assert torch.equal(back.offsets(), parts["a"].offsets())
    padded = back.to_padded_dense(2, -1)
    for row, one in zip(padded, dense, strict=True):
        assert row.tolist() == [*one.tolist(), -1, -1][:2]
    (together,) = embed.KeyedTensor.regroup([ours.tables(keyed(values, lengths, None))], [["c", "b"]])
    assert torch.equal(together, torch.cat([plain["c"], plain["b"]], 1))


def test_a_graph_that_is_kept_frees_its_rows_and_is_not_used_twice():
    *_, ours, step, _ = make({"lr": 0.1}, kind=torch.optim.SGD)
    with torch.inference_mode():
        made = keyed(*lists(3, 1)[:2], None)
        assert ours.tables(made).values().shape == (3, 48)
    losses = []
    for number in range(3):
        step.zero_grad()
        loss = ours.tables(keyed(*lists(3, number)[:2], None)).values().sum()
        loss.backward()
        step.step()
        losses.append(loss)
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is pooling._Work]
    assert not alive, "autograd has freed what a backward pass needed"
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


def torchrec_model(weighted, mode):
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec")
    tables = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=dim,
            name=name,
            feature_names=list(names),
            pooling=getattr(torchrec.PoolingType, mode),
        )
        for name, (rows, dim, names) in TABLES.items()
    ]
    return torchrec, Model(torchrec.EmbeddingBagCollection(tables=tables, is_weighted=weighted), 8 * 4 + 16)


@pytest.mark.parametrize(("mode", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)])
@pytest.mark.parametrize("shared_lists", [False, True])
def test_a_model_of_torchrec_is_moved_over_by_distributed_model(mode, weighted, shared_lists):
    torch.manual_seed(0)
    torchrec, stock = torchrec_model(weighted, mode)
    ours = embed.distributed_model(copy.deepcopy(stock), Client.in_process(servers=2))
    assert type(ours.tables) is embed.EmbeddingBagCollection
    stock_step = torch.optim.Adagrad(stock.parameters(), 0.05, initial_accumulator_value=0.1)
    step = embed.distributed_optimizer(
        torch.optim.Adagrad(ours.parameters(), 0.05, initial_accumulator_value=0.1), ours
    )
    for number in range(100):
        batch = BATCHES[number % 4]
        values, lengths, weights = lists(batch, number)
        more = {}
        if shared_lists:
            inverse = torch.randint(0, batch, (4, 9))
            more = {"stride_per_key_per_rank": [[batch]] * 4, "inverse_indices": (list(FEATURES), inverse)}
        losses = []
        for model, optimizer in ((stock, stock_step), (ours, step)):
            made = torchrec.KeyedJaggedTensor(
                list(FEATURES), values, weights if weighted else None, lengths=lengths, **more
            )
            optimizer.zero_grad()
            found = model.tables(made)
            assert type(found) is torchrec.KeyedTensor
            assert list(found.keys()) == NAMES
            loss = (model.top(found.values()) ** 2).mean() + found["b"].sum() * 1e-3
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    for name in TABLES:
        expected = stock.tables.embedding_bags[name].weight.detach().numpy()
        np.testing.assert_allclose(rows_of(ours, name), expected, rtol=1e-4, atol=1e-5)


def test_a_sequence_collection_of_torchrec_is_moved_over():
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec")
    tables = [
        torchrec.EmbeddingConfig(num_embeddings=rows, embedding_dim=8, name=name, feature_names=list(names))
        for name, (rows, _, names) in TABLES.items()
    ]
    stock = Model(torchrec.EmbeddingCollection(tables=tables), 8)
    ours = embed.distributed_model(copy.deepcopy(stock), Client.in_process())
    assert type(ours.tables) is embed.EmbeddingCollection
    embed.distributed_optimizer(torch.optim.SGD(ours.parameters(), 0.05), ours)
    values, lengths, _ = lists(20, 1)
    batch = torchrec.KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)
    found, expected = ours.tables(batch), stock.tables(batch)
    assert list(found) == list(expected)
    for name in NAMES:
        assert type(found[name]) is torchrec.JaggedTensor
        assert torch.equal(found[name].values(), expected[name].values())
        assert torch.equal(found[name].lengths(), expected[name].lengths())
    small = embed.distributed_model(copy.deepcopy(stock), Client.in_process(), sparse_as_dense_size=501)
    assert type(small.tables) is torchrec.EmbeddingCollection
    with pytest.raises(ValueError, match="table 'x': use_virtual_table is not offered"):
        embed.distributed_model(
            nn.Sequential(
                torchrec.EmbeddingCollection(
                    tables=[torchrec.EmbeddingConfig(100, 4, "x", use_virtual_table=True)]
                )
            ),
            Client.in_process(),
        )


def test_compiled_models_and_hooks_of_saved_tensors():
    """A graph breaks at a collection, and what autograd keeps for it may be copied."""
    stock, _, ours, step, _ = make({"lr": 0.1}, kind=torch.optim.SGD)
    batch = lists(5, 3)
    run = torch.compile(lambda made: ours.top(ours.tables(made).values()).sum(), backend="eager")
    for wrapped in (False, True):
        step.zero_grad()
        if wrapped:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
                loss = run(keyed(*batch[:2], None))
            loss.backward()
        else:
            run(keyed(*batch[:2], None)).backward()
        expected = stock.top(stock.tables(*batch[:2], None)).sum()
        stock.zero_grad()
        expected.backward()
        gradient = ours.tables.embedding_bags["t1"].anchor.grad
        dense = stock.tables.tables["t1"].weight.grad
        keys = ours.tables.embedding_bags["t1"].anchor.grad_keys
        torch.testing.assert_close(torch.Tensor(gradient), dense[torch.from_numpy(keys)])


def test_gradients_of_gradients_and_changed_weights_are_refused():
    *_, ours, _, _ = make({"lr": 0.1}, kind=torch.optim.SGD, weighted=True)
    values, lengths, weights = lists(4, 2)
    found = ours.tables(keyed(values, lengths, weights)).values()
    with pytest.raises(NotImplementedError, match="a collection has no gradients of gradients"):
        torch.autograd.grad(found.sum(), list(ours.tables.parameters()), create_graph=True)
    found = ours.tables(keyed(values, lengths, weights)).values()
    weights.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_batches_without_examples_and_without_ids():
    *_, ours, step, _ = make({"lr": 0.1}, kind=torch.optim.SGD)
    none = torch.empty(0, dtype=torch.int64)
    found = ours.tables(keyed(none, none, None)).values()
    assert found.shape == (0, 48)
    assert (ours.tables(keyed(none, torch.zeros(8, dtype=torch.int64), None)).values() == 0).all()
    found.sum().backward()
    step.step()
    sequence = embed.distributed_model(
        embed.EmbeddingCollection(configs(kind=embed.EmbeddingConfig, dim=8)), Client.in_process()
    )
    assert sequence(keyed(none, none, None))["b"].values().shape == (0, 8)
    with pytest.raises(ValueError, match="a collection has at least one table"):
        embed.EmbeddingBagCollection([])


def test_padded_embeddings_have_gradients():
    values = torch.randn(5, 2, requires_grad=True)
    one = embed.JaggedTensor(values, lengths=torch.tensor([2, 0, 3]))
    padded = one.to_padded_dense(2, 7.0)
    assert padded.tolist()[1] == [[7, 7], [7, 7]]
    assert torch.equal(padded[2], values[2:4])
    padded.sum().backward()
    assert values.grad.sum(1).tolist() == [2, 2, 2, 2, 0]
