"""Saving, loading, weights and construction, each held to the stock layer's result or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrizations, parametrize, prune  # noqa: E402

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
    model = embed.distributed_model(Net(**options), client or Client.in_process())
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


# `layer.weight`


def pair(kind="Embedding", **options):
    """Return a stock layer and ours of the same rows, which trains."""
    torch.manual_seed(0)
    stock = torch.nn.Sequential(getattr(torch.nn, kind)(ROWS, 4, **options))
    ours = embed.distributed_model(copy.deepcopy(stock), Client.in_process(servers=2))
    trained(ours, steps=0)
    return stock, ours


USES = {
    "shape": lambda w: (tuple(w.shape), w.numel(), len(w), w.dim(), w.stride(), w.is_contiguous()),
    "scores": lambda w: torch.ones(2, 4) @ w.t(),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(2, 4), w),
    "some": lambda w: w[torch.tensor([4, 2, 2])],
    "slice": lambda w: w[5:9] * 2,
    "last": lambda w: w[-1] + 0,
    "steps": lambda w: w[1:60:7, 1:3].sum(0),
    "transposed slice": lambda w: w.T[1:3, 2:5].clone(),
    "each": lambda w: [row.sum().item() for row in w],
    "parts": lambda w: [part.sum() for part in w.split(32)],
    "norm": lambda w: (w.norm(), w.pow(2).sum(), w.abs().max()),
    "topk": lambda w: torch.topk(torch.ones(4) @ w.T, 3).values,
    "cat": lambda w: torch.cat([w, w]),
    "numpy": lambda w: w.detach().cpu().numpy(),
    "asarray": lambda w: np.asarray(w.detach()),
    "list": lambda w: w.tolist(),
    "clone": lambda w: w.clone(),
    "data": lambda w: w.data.float() + 1,
    "double": lambda w: w.double(),
    "equal": lambda w: torch.equal(w, w.clone()),
    "bags": lambda w: torch.nn.functional.embedding_bag(torch.tensor([[1, 2]]), w),
    "in place of another": lambda w: torch.zeros(ROWS, 4).add_(w, alpha=2),
    "moving average": lambda w: torch.ones(ROWS, 4).lerp_(w, 0.25),
    "vector": lambda w: torch.nn.utils.parameters_to_vector([w]),
    "vmap": lambda w: torch.vmap(torch.sum)(w.clone()),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_weight_is_used_as_stock(use, grad):
    stock, ours = pair()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(use(ours[0].weight), use(stock[0].weight), check_stride=True)


@torch.no_grad()
def vector_to(layer):
    torch.nn.utils.vector_to_parameters(torch.arange(ROWS * 4.0), [layer.weight])


def seeded(change):
    def with_seed(layer):
        torch.manual_seed(3)
        change(layer)

    return with_seed


def setattr_data(layer):
    layer.weight.data = torch.ones(ROWS, 4)


def assign_parameter(layer):
    layer.weight = torch.nn.Parameter(torch.arange(ROWS * 4.0).reshape(ROWS, 4))


@torch.no_grad()
def add_in_place(layer):
    layer.weight += 1


@torch.no_grad()
def set_item(layer):
    layer.weight[3] = 7.0


CHANGES = {
    "normal_": seeded(lambda layer: torch.nn.init.normal_(layer.weight)),
    "xavier_uniform_": seeded(lambda layer: torch.nn.init.xavier_uniform_(layer.weight)),
    "data.uniform_": seeded(lambda layer: layer.weight.data.uniform_(-1, 1)),
    "data.copy_": lambda layer: layer.weight.data.copy_(torch.ones(ROWS, 4)),
    "data row": lambda layer: layer.weight.data[5].fill_(0),
    "data last row": lambda layer: layer.weight.data[-1].zero_(),
    "data rows": lambda layer: layer.weight.data[5:9].mul_(2),
    "data column": lambda layer: layer.weight.data[:, 1].zero_(),
    "data steps": lambda layer: layer.weight.data[1:9:3, 2:].zero_(),
    "data transposed": lambda layer: layer.weight.data.t()[1].fill_(2),
    "data item": lambda layer: layer.weight.data.__setitem__(torch.tensor([1, 6]), 3.0),
    "data mask": lambda layer: layer.weight.data.masked_fill_(layer.weight.data > 0, 0.0),
    "clamp": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "set data": setattr_data,
    "set weight": assign_parameter,
    "add": add_in_place,
    "set item": set_item,
    "vector": vector_to,
    "load": lambda layer: layer.load_state_dict({"weight": torch.ones(ROWS, 4)}),
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weight_is_changed_as_stock(change, bound):
    stock, ours = pair()
    if not bound:
        ours = embed.distributed_model(copy.deepcopy(stock))
    for model in (stock, ours):
        change(model[0])
    torch.testing.assert_close(outputs(ours), outputs(stock))
    trained(ours, steps=0)
    torch.testing.assert_close(outputs(ours), outputs(stock))


@pytest.mark.parametrize("use", [lambda w: w, lambda w: w.t(), lambda w: w[3:9], lambda w: w[2]])
def test_weight_is_trained_as_stock(use):
    """A softmax over all items, for example, with lookups beside it."""
    stock, ours = pair()
    for model in (stock, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if model is ours:
            optimizer = embed.distributed_optimizer(optimizer, model)
        for _ in range(3):
            optimizer.zero_grad()
            (use(model[0].weight).square().mean() + model(IDS[:9, None]).square().mean()).backward()
            optimizer.step()
    torch.testing.assert_close(outputs(ours), outputs(stock))


@pytest.mark.parametrize(
    "freeze",
    [
        lambda layer: layer.weight.requires_grad_(False),
        lambda layer: setattr(layer.weight, "requires_grad", False),
        lambda layer: layer.requires_grad_(False),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(ROWS, 4), requires_grad=False)),
    ],
)
def test_weight_is_frozen_as_stock(freeze):
    stock, ours = (torch.nn.Sequential(m, torch.nn.Linear(4, 1)) for m in pair())
    ours[1].load_state_dict(stock[1].state_dict())
    for model in (stock, ours):
        assert model[0][0].weight.requires_grad
        freeze(model[0][0])
        assert not model[0][0].weight.requires_grad
        trained(model)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    torch.testing.assert_close(ours[0][0].weight.clone(), stock[0][0].weight.data)


def test_what_weight_refuses():
    stock, ours = pair()
    weight = ours[0].weight
    for call, message in (
        (lambda: weight.mul_(2), r"rows of table '0' require gradients, .* torch\.no_grad\(\)"),
        (lambda: weight[0].zero_(), r"require gradients, .* torch\.no_grad\(\)"),
        (lambda: weight.grad, "have no dense gradient"),
        (lambda: weight.share_memory_(), "have no memory in this process"),
        (lambda: weight.data_ptr(), "have no memory in this process"),
        (lambda: torch.nn.Parameter(weight), "cannot be trained as a parameter"),
        (lambda: setattr(stock[0], "weight", weight), "cannot assign"),
        (lambda: setattr(ours[0], "weight", None), "weight must be a torch.nn.Parameter, .* not NoneType"),
        (
            lambda: setattr(ours[0], "weight", torch.nn.Parameter(torch.ones(3, 4))),
            r"shape \(3, 4\), but the table's are \(70, 4\)",
        ),
        (lambda: embed.Embedding(-1, 4).weight, r"has no weight, because it has any id"),
        (lambda: ours[0].load_state_dict({"weight": torch.ones(3)}), r"shape \(3,\)"),
    ):
        with pytest.raises((TypeError, RuntimeError, ValueError, AttributeError), match=message):
            call()
    assert not hasattr(embed.Embedding(-1, 4), "weight")
    assert repr(weight) == "Rows(the rows of table '0', shape=(70, 4), dtype=torch.float32)"
    torch.testing.assert_close(outputs(ours), outputs(stock))


# Other functions of PyTorch that take a module or its parameters


REFUSED = {
    "deepcopy": (lambda m: copy.deepcopy(m), r"cannot be copied: .*deepcopy\(model\.state_dict"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), r"cannot be pickled: .* model\.state_dict"),
    "pickle": (lambda m: pickle.dumps(m), "cannot be pickled"),
    "AveragedModel": (lambda m: torch.optim.swa_utils.AveragedModel(m), "cannot be copied"),
    "double": (lambda m: m.double(), "cannot change to torch.float64; convert the model before"),
    "half": (lambda m: m.half(), "cannot change to torch.float16"),
    "to": (lambda m: m.to(torch.bfloat16), "cannot change to torch.bfloat16"),
    "meta": (lambda m: m.to("meta"), "meta device"),
    "share_memory": (lambda m: m.share_memory(), "memory that processes share"),
    "jit.script": (lambda m: torch.jit.script(m), r"torch\.jit\.script cannot take"),
    "jit.trace": (lambda m: torch.jit.trace(m, IDS[:, None]), r"torch\.jit\.trace cannot take"),
    "fx": (lambda m: torch.fx.symbolic_trace(m), r"torch\.fx\.symbolic_trace cannot take"),
    "export": (lambda m: torch.export.export(m, (IDS[:, None],)), r"torch\.export cannot take|cannot use"),
    "weight_norm": (lambda m: torch.nn.utils.weight_norm(m[0]), "is no parameter, so parametrizations"),
    "spectral_norm": (lambda m: torch.nn.utils.spectral_norm(m[0]), "is no parameter, so parametrizations"),
    "new weight_norm": (lambda m: parametrizations.weight_norm(m[0]), "does not have a parameter"),
    "parametrization": (
        lambda m: parametrize.register_parametrization(m[0], "weight", torch.nn.Identity()),
        "does not have a parameter",
    ),
    "prune": (lambda m: prune.l1_unstructured(m[0], "weight", 0.5), "is no parameter, so parametrizations"),
    "register_parameter": (
        lambda m: m[0].register_parameter("weight", torch.nn.Parameter(torch.ones(1))),
        "is no parameter",
    ),
    "functional_call": (
        lambda m: torch.func.functional_call(m, {"0.weight": torch.zeros(ROWS, 4)}, (IDS[:, None],)),
        "weight must be a torch.nn.Parameter",
    ),
    "functional_call of parameters": (
        lambda m: torch.func.functional_call(m, dict(pair()[0].named_parameters()), (IDS[:, None],)),
        "functional_call cannot replace it",
    ),
    "parameters_to_vector": (
        lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
        "cannot use the parameter of table '0'",
    ),
    "vector_to_parameters": (
        lambda m: torch.nn.utils.vector_to_parameters(torch.ones(ROWS * 4), m.parameters()),
        "cannot use the parameter of table '0'",
    ),
    "stack_module_state": (
        lambda m: torch.func.stack_module_state([m, m]),
        "cannot use the parameter of table '0'",
    ),
    "to_empty": (lambda m: m.to_empty(device="meta"), "meta device"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_of_a_model_with_tables(call, message):
    stock, ours = pair()
    with pytest.raises(Exception, match=message):
        call(ours)
    torch.testing.assert_close(outputs(ours), outputs(stock))


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


ALLOWED = {
    "to cpu": lambda m: m.to("cpu"),
    "float": lambda m: m.float(),
    "train": lambda m: m.eval().train(),
    "zero_grad": lambda m: m.zero_grad() or m,
    "apply": lambda m: m.apply(
        lambda layer: torch.nn.init.ones_(layer.weight) if hasattr(layer, "weight") else 0
    ),
    "compile": compiled,
    "functional_call": lambda m: torch.func.functional_call(m, m.state_dict(), (IDS[:, None],)).sum() and m,
}


@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
def test_what_models_with_tables_do_as_stock(call):
    stock, ours = pair()
    stock, ours = call(stock), call(ours)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    for model in (stock, ours):
        trained(model)
    torch.testing.assert_close(outputs(ours), outputs(stock))


@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize(
    "call", [lambda m: m.double(), lambda m: m.half().float(), lambda m: m.to(torch.float64)]
)
def test_a_model_changes_its_dtype_before_there_are_tables(call, looked_up):
    stock, _ = pair()
    ours = embed.distributed_model(copy.deepcopy(stock))
    if looked_up:
        outputs(ours)
    stock, ours = call(stock), call(ours)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    for model in (stock, ours):
        trained(model)
    torch.testing.assert_close(outputs(ours), outputs(stock))
    assert ours[0].table.spec.dtype == str(stock[0].weight.dtype).removeprefix("torch.")


def test_a_tied_layer_is_refused():
    model = torch.nn.Sequential(embed.Embedding(ROWS, 4), torch.nn.Linear(4, ROWS, bias=False))
    model[0].weight = model[1].weight
    with pytest.raises(ValueError, match=r"layer '0': its weight was set to '1\.weight', .* not shared"):
        embed.distributed_model(model)
    model[0].weight = torch.nn.Parameter(model[1].weight.detach().clone())
    embed.distributed_model(model)
    torch.testing.assert_close(model[0].weight.clone(), model[1].weight.data)


def test_a_model_without_a_table_is_copied_and_pickled():
    stock, _ = pair()
    ours = embed.distributed_model(copy.deepcopy(stock))
    for _ in range(2):  # the second has been looked up
        copied = copy.deepcopy(ours)
        with pytest.raises(RuntimeError, match="has no table yet: give its model to distributed_model"):
            outputs(copied)
        copied = embed.distributed_model(copied)
        ours[0].weight.data.zero_()
        torch.testing.assert_close(outputs(copied), outputs(stock))
        ours[0].load_state_dict(stock[0].state_dict())
    fresh = pickle.loads(pickle.dumps(embed.Embedding(ROWS, 4, padding_idx=1)))  # noqa: S301 - our own
    fresh.set_rows(stock[0].weight)
    trained(embed.distributed_model(fresh), steps=0)
    torch.testing.assert_close(fresh.weight.clone(), stock[0].weight.data)


def test_reset_parameters_sets_rows_and_optimizer_state_to_initial_ones():
    model, _ = connected()
    model.items(IDS)
    trained(model)
    before = model.users.weight.clone()
    for layer in (model.users, model.items):
        layer.reset_parameters()
    after = model.users.weight.clone()
    assert (before != after).any()
    assert not after[3].any()
    assert abs(after.mean()) < 0.3
    assert len(model.state_dict()["items.ids"]) == 0


def test_every_process_looks_up_its_rows_without_an_optimizer(monkeypatch):
    stock, _ = pair()
    ours = embed.distributed_model(copy.deepcopy(stock))
    monkeypatch.setattr("oe_runtime.torch.embedding.process", lambda: (1, 2))
    torch.testing.assert_close(outputs(ours), outputs(stock))


def test_an_average_of_a_model_without_a_table_has_no_rows_in_secret():
    ours = embed.distributed_model(torch.nn.Sequential(torch.nn.Embedding(ROWS, 4)))
    average = torch.optim.swa_utils.AveragedModel(ours)
    with pytest.raises(RuntimeError, match="has no table yet: give its model to distributed_model"):
        outputs(average)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_that_does_not_train_the_rows_is_refused(make):
    ours = embed.distributed_model(torch.nn.Sequential(torch.nn.Embedding(ROWS, 4), torch.nn.Linear(4, 1)))
    before = outputs(ours)
    optimizer = make(ours.parameters(), lr=0.1)
    ours(IDS[:, None]).sum().backward()
    with pytest.raises(RuntimeError, match=rf"{make.__name__}\.step\(\) cannot .* distributed_optimizer"):
        optimizer.step()
    assert (outputs(ours) == before).all()
    optimizer.zero_grad()
    embed.distributed_optimizer(optimizer, ours)
    ours(IDS[:, None]).sum().backward()
    optimizer.step()
    assert (outputs(ours) != before).any()


def test_rows_of_servers_are_looked_up_without_an_optimizer():
    client = Client.in_process()
    model, _ = connected(client=client)
    trained(model)
    again = embed.distributed_model(Net(), client)
    with pytest.raises(RuntimeError, match=r"table 'users' is on the servers with 69 rows, .*saved_tables"):
        outputs(again)
    specs = {name: client.spec(client._id(name)) for name in ("users", "items", "bag")}
    again.users, again.items, again.bag = (
        embed.Embedding(spec=specs["users"], padding_idx=3),
        embed.Embedding(spec=specs["items"]),
        embed.EmbeddingBag(spec=specs["bag"], mode="sum"),
    )
    again = embed.distributed_model(again, client, fresh=False)
    again.dense.load_state_dict(model.dense.state_dict())
    assert (outputs(again) == outputs(model)).all()


# The optimizer's state

MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad with decay": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1),
    "RowWiseAdagrad": lambda p: embed.RowWiseAdagrad(p, 0.1),
}


def steps(model, optimizer, number=3):
    for _ in range(number):
        optimizer.zero_grad()
        model(IDS[: ROWS // 2, None]).square().mean().backward()
        optimizer.step()


def with_optimizer(make, seed=0, **options):
    model, _ = connected(seed, optimizer=False, **options)
    return model, embed.distributed_optimizer(make(model.parameters()), model)


@pytest.mark.parametrize("order", [1, -1], ids=["model first", "optimizer first"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_training_goes_on_from_saved_states(tmp_path, make, order):
    model, optimizer = with_optimizer(make)
    steps(model, optimizer)
    saved = file_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    steps(model, optimizer)
    again, other = with_optimizer(make, 5, client=Client.in_process(servers=2))
    for one, state in [(again, saved["model"]), (other, saved["optimizer"])][::order]:
        one.load_state_dict(state)
    steps(again, other)
    torch.testing.assert_close(outputs(again), outputs(model), rtol=1e-6, atol=1e-6)


def test_the_best_states_of_model_and_optimizer_are_kept():
    model, optimizer = with_optimizer(MAKE["Adagrad"])
    steps(model, optimizer)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer)
    expected = outputs(model)
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    optimizer.load_state_dict(optimizer.state_dict())  # which changes nothing
    steps(model, optimizer)
    torch.testing.assert_close(outputs(model), expected, rtol=0, atol=0)


def test_what_an_optimizer_says_of_a_state_that_does_not_fit():
    model, optimizer = with_optimizer(MAKE["Adam"])
    steps(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0].keys() == {"pushes", "momentum", "velocity"}
    assert saved["state"][1].keys() == {"pushes", "ids", "momentum", "velocity"}
    steps(model, optimizer)
    with pytest.warns(UserWarning, match="table 'users': optimizer adam depends on .* was 3 .* is 6 in this"):
        optimizer.load_state_dict(saved)
    less = {**saved, "state": {n: v for n, v in saved["state"].items() if n > 2}}
    with pytest.warns(UserWarning, match="table 'bag': the state given has nothing for its rows"):
        optimizer.load_state_dict(less)
    for wrong, message in (
        ({"exp_avg": torch.zeros(ROWS, 4)}, r"table 'users': .* of a layer in this process \(exp_avg\)"),
        (
            {"pushes": 1, "accumulator": torch.zeros(1)},
            "has accumulator, but optimizer adam needs momentum, vel",
        ),
        (
            {**saved["state"][0], "momentum": torch.zeros(3, 4)},
            r"momentum has shape \(3, 4\); expected \(70, 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: wrong}})
