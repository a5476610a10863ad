"""Saving, loading, weights and construction, each held to the stock layer's result or refused by name."""

from __future__ import annotations

import copy
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oe_runtime.torch as embed  # noqa: E402
from oe_runtime import Client  # noqa: E402
from oe_runtime.errors import SpecError  # noqa: E402

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


class Net(torch.nn.Module):
    """A table with a number of rows, one of any id, a bag, and a dense layer."""

    def __init__(self, dtype=torch.float32, kind=embed):
        super().__init__()
        self.users = kind.Embedding(ROWS, 4, padding_idx=3, dtype=dtype)
        self.items = embed.Embedding(-1, 2, dtype=dtype)
        self.bag = kind.EmbeddingBag(ROWS, 3, mode="sum", dtype=dtype)
        self.dense = torch.nn.Linear(9, 1, dtype=dtype)

    def forward(self, ids):
        far = ids[:, 0] * 2**50 - 2**60
        return self.dense(torch.cat([self.users(ids[:, 0]), self.items(far), self.bag(ids)], 1))


def connected(seed=0, client=None, optimizer=True, **options):
    torch.manual_seed(seed)
    model = embed.distributed_model(Net(**options), client or Client.in_process(), seed=seed)
    if optimizer:
        optimizer = embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    return model, optimizer


def file_of(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_state_has_the_rows(tmp_path, dtype, with_optimizer):
    model, _ = connected(client=Client.in_process(servers=2), dtype=dtype)
    trained(model)
    expected = outputs(model)
    state = file_of(model.state_dict(), tmp_path)
    assert list(state) == [
        "users.weight",
        "items.ids",
        "items.weight",
        "bag.weight",
        "dense.weight",
        "dense.bias",
    ]
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert state["items.weight"].shape == (ROWS, 2)
    again, _ = connected(5, Client.in_process(servers=3), with_optimizer, dtype=dtype)
    again(IDS[:, None] + 1 - 1)
    assert str(again.load_state_dict(state)) == "<All keys matched successfully>"
    assert (outputs(again) == expected).all()
    if not with_optimizer:  # these come to the servers later
        trained(again, steps=0)
        assert (outputs(again) == expected).all()
    trained(again)
    assert (outputs(again) != expected).all()


def test_a_state_is_loaded_before_there_are_tables_although_servers_have_rows(tmp_path):
    client = Client.in_process()
    model, _ = connected(client=client)
    trained(model)
    state, expected = file_of(model.state_dict(), tmp_path), outputs(model)
    trained(model)
    again = embed.distributed_model(Net(), client)
    again.load_state_dict(state)
    trained(again, steps=0)
    assert (outputs(again) == expected).all()


@pytest.mark.parametrize("keep", [lambda s: {n: v.clone() for n, v in s.items()}, copy.deepcopy])
def test_the_best_state_is_kept_and_loaded(keep):
    model, _ = connected()
    trained(model)
    best, expected = keep(model.state_dict()), outputs(model)
    live = model.state_dict()
    trained(model)
    model(IDS[:, None] + 1000 - 1000)
    model.items.set_rows(torch.ones(ROWS + 9, 2), torch.arange(ROWS + 9) * 7)  # other ids have rows now
    model.load_state_dict(live)  # as in PyTorch, these are the present values
    assert (outputs(model) != expected).any()
    model.load_state_dict(best)
    assert (outputs(model) == expected).all()
    assert len(model.items.table.client.keys("items")) == ROWS


def test_stock_models_and_ours_load_each_others_state(tmp_path):
    stock = torch.nn.Sequential(torch.nn.Embedding(ROWS, 4), torch.nn.Linear(4, 1))
    ours = embed.distributed_model(copy.deepcopy(stock))
    trained(ours)
    assert (outputs(ours) != outputs(stock)).all()
    for state in (ours.state_dict(), file_of(ours.state_dict(), tmp_path)):
        stock.load_state_dict(state)
        assert (outputs(ours) == outputs(stock)).all()
    trained(stock)
    for assign in (False, True):
        ours.load_state_dict(stock.state_dict(), assign=assign)
        assert (outputs(ours) == outputs(stock)).all()


def test_missing_and_unexpected_keys_are_as_in_torch():
    model, _ = connected()
    state = dict(copy.deepcopy(model.state_dict()))
    expected = outputs(model)
    del state["users.weight"], state["items.ids"], state["items.weight"]
    state["more"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"Missing key.*users\.weight.*items\.weight"):
        model.load_state_dict(state)
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["users.weight", "items.weight", "items.ids"]
    assert found.unexpected_keys == ["more"]
    assert (outputs(model) == expected).all()
    old = {"users.anchor": torch.empty(0)}  # of versions whose states had no rows
    assert "users.weight" in model.load_state_dict(old, strict=False).missing_keys


def wrong(**changes):
    model, _ = connected()
    state = copy.deepcopy(model.state_dict()) | {name.replace("_", "."): v for name, v in changes.items()}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    return str(caught.value)


def test_a_wrong_state_is_refused_by_the_name_of_the_key():
    ids = torch.arange(ROWS)
    for changes, message in (
        (
            {"users_weight": torch.zeros(9, 4)},
            r"users\.weight: .* shape \(9, 4\), but the table's are \(70, 4\)",
        ),
        ({"users_weight": torch.zeros(ROWS, 4, dtype=torch.int64)}, r"users\.weight: .* are torch\.int64"),
        ({"users_weight": torch.zeros(ROWS, 4, device="meta")}, r"users\.weight: .* on the meta device"),
        ({"users_weight": torch.full((ROWS, 4), torch.nan)}, r"users\.weight: .*'users'.*not finite"),
        (
            {"items_ids": ids, "items_weight": torch.zeros(3, 2)},
            r"items\.weight: .*but the table's are \(70, 2\)",
        ),
        ({"items_ids": ids * 0, "items_weight": torch.zeros(ROWS, 2)}, "an id is given twice"),
        ({"items_ids": ids.float(), "items_weight": torch.zeros(ROWS, 2)}, "ids must be int64"),
        ({"users_ids": ids}, r"Unexpected key\(s\) in state_dict: \"users\.ids\""),
    ):
        assert re.search(message, wrong(**changes)), (message, wrong(**changes))


def test_rows_that_do_not_fit_memory_are_refused(monkeypatch, tmp_path):
    model, _ = connected()
    monkeypatch.setattr("oe_runtime.torch.rows.available_memory", lambda: 400)
    state = model.state_dict()
    with pytest.raises(SpecError, match=r"rows of table 'users' do not fit .*client\.save"):
        torch.save(state, tmp_path / "state.pt")
    assert model.users.weight[:3].sum() == model.users.weight[:3].clone().sum()  # slices do
    small = {name: value for name, value in state.items() if not isinstance(value, embed.Rows)}
    assert list(file_of(small, tmp_path)) == ["dense.weight", "dense.bias"]


@pytest.mark.parametrize("in_place", [True, False])
def test_torch_distributed_checkpoint(tmp_path, in_place):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model, _ = connected()
    trained(model)
    expected = outputs(model)
    again, _ = connected(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)
        if in_place:  # what tables of any id do not have
            state = {name: v for name, v in again.state_dict().items() if not name.startswith("items.")}
            dcp.load(state, checkpoint_id=tmp_path)
            torch.testing.assert_close(again.users.weight.clone(), model.users.weight.clone())
            with pytest.raises(
                dcp.api.CheckpointException,
                match=r"ids of table 'items' cannot be changed in place|Size mismatch",
            ):
                dcp.load(model.state_dict(), checkpoint_id=tmp_path)
            return
        saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        state = {name: torch.empty(v.size, dtype=v.properties.dtype) for name, v in saved.items()}
        dcp.load(state, checkpoint_id=tmp_path)
    again.load_state_dict(state)
    assert (outputs(again) == expected).all()
