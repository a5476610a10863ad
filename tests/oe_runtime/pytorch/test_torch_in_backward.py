"""Optimizers that update rows in the backward pass, beside PyTorch's own."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

import oe_runtime.torch as embed
from oe_runtime import Client

ROWS, DIM = 80, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(ROWS, DIM)
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.users(ids[:, 0]), self.items(ids)], 1))

    def tables(self):
        return [*self.users.parameters(), *self.items.parameters()]


def batch(number):
    return torch.from_numpy(np.random.default_rng(number).integers(0, ROWS, (6, 3)))


def dense(model):
    """An optimizer of what has none in backward, as TorchRec's in_backward_optimizer_filter leaves it."""
    return torch.optim.Adam(
        [one for one in model.parameters() if not hasattr(one, "_in_backward_optimizers")]
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-3}),
    ],
    ids=["SGD", "Adagrad", "Adagrad with decay"],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_rows_are_updated_in_backward_as_in_torch(kind, options, servers):
    torch.manual_seed(0)
    stock = Model()
    _apply_optimizer_in_backward(kind, stock.tables(), options)
    torch.manual_seed(0)
    ours = Model()
    _apply_optimizer_in_backward(kind, ours.tables(), options)
    ours = embed.distributed_model(ours, Client.in_process(servers=servers))
    steps = [(stock, dense(stock)), (ours, embed.distributed_optimizer(dense(ours), ours))]
    assert len(_get_in_backward_optimizers(ours)) == 2
    for number in range(12):
        losses = []
        for model, optimizer in steps:
            optimizer.zero_grad()
            for part in range(1 + number % 2):  # twice: two updates
                loss = (model(batch(number + part)) ** 2).mean()
                loss.backward()
            assert all(one.grad is None for one in model.tables())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    for a, b in ((stock.users, ours.users), (stock.items, ours.items)):
        torch.testing.assert_close(b.weight.read(), a.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_step_is_one_push_and_another_optimizer_does_nothing(monkeypatch):
    ours = Model()
    _apply_optimizer_in_backward(torch.optim.SGD, ours.tables(), {"lr": 0.1})
    ours = embed.distributed_model(ours, Client.in_process())
    optimizer = embed.distributed_optimizer(torch.optim.SGD(ours.parameters(), 100.0), ours)
    pushes = []
    push = Client.push
    monkeypatch.setattr(Client, "push", lambda self, *a, **k: pushes.append(1) or push(self, *a, **k))
    ours(batch(0))
    before = ours.users.weight.read()
    ours(batch(0)).sum().backward()
    assert len(pushes) == 1
    after = ours.users.weight.read()
    assert (before - after).abs().max() > 0
    optimizer.step()
    assert len(pushes) == 1
    assert torch.equal(ours.users.weight.read(), after)
    for one in _get_in_backward_optimizers(ours):
        one.param_groups[0]["lr"] = 0.0
    ours(batch(0)).sum().backward()
    assert torch.equal(ours.users.weight.read(), after)
    # Gradients by autograd.grad are of no backward pass that accumulates.
    torch.autograd.grad(ours(batch(0)).sum(), ours.tables())
    assert len(pushes) == 2
    with pytest.raises(ValueError, match="staleness=1 has rows without the last step"):
        embed.TrainPipeline(ours, optimizer, staleness=1)


def test_a_pass_that_fails_does_not_stop_the_next():
    ours = Model()
    _apply_optimizer_in_backward(torch.optim.SGD, ours.tables(), {"lr": 0.1})
    ours = embed.distributed_model(ours, Client.in_process())
    embed.distributed_optimizer(dense(ours), ours)

    def fail(_):
        raise RuntimeError("no")

    found = ours.users(batch(0)[:, 0])
    scaled = found * 1.0
    scaled.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        (scaled.sum() + ours.items(batch(0)).sum()).backward()
    before = ours.users.weight.read()
    ours(batch(0)).sum().backward()
    assert not torch.equal(before, ours.users.weight.read())


def test_what_is_refused():
    def applied(*optimizers):
        model = Model()
        for kind, options in optimizers:
            _apply_optimizer_in_backward(kind, [model.users.weight], options)
        return model

    sgd = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ValueError, match="several optimizers in backward: SGD, SGD"):
        embed.distributed_model(applied(sgd, sgd), Client.in_process())
    model = embed.distributed_model(applied((torch.optim.Rprop, {})), Client.in_process())
    with pytest.raises(ValueError, match="optimizer Rprop: embedding tables"):
        embed.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model)


def test_a_model_of_torchrec_keeps_its_fused_optimizer():
    """With the rule and the defaults that FBGEMM has for TorchRec's class."""
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec")
    from torchrec import optim

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            tables = [
                torchrec.EmbeddingBagConfig(
                    num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name]
                )
                for name in "ab"
            ]
            self.tables = torchrec.EmbeddingBagCollection(tables=tables)
            self.top = nn.Linear(2 * DIM, 1)

        def forward(self, features):
            return self.top(self.tables(features).values())

    stock = Bags()
    plain = embed.distributed_model(copy.deepcopy(stock), Client.in_process())
    step = embed.distributed_optimizer(
        embed.RowWiseAdagrad(plain.tables.parameters(), 0.05, eps=1e-8),
        plain,
    )
    optim.apply_optimizer_in_backward(optim.RowWiseAdagrad, stock.tables.parameters(), {"lr": 0.05})
    fused = embed.distributed_model(stock, Client.in_process())
    keyed = optim.keyed.KeyedOptimizerWrapper(
        dict(optim.optimizers.in_backward_optimizer_filter(fused.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, 0.0),
    )
    assert [*keyed.params] == ["top.weight", "top.bias"]
    assert embed.distributed_optimizer(keyed, fused) is keyed
    for number in range(10):
        values = batch(number).reshape(-1)
        features = torchrec.KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([2, 0, 6, 3, 3, 4]))
        losses = []
        for model, optimizer in ((plain, step), (fused, keyed)):
            optimizer.zero_grad()
            loss = (model(features) ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    model = Bags()
    optim.apply_optimizer_in_backward(optim.LAMB, model.tables.parameters(), {"lr": 0.05})
    with pytest.raises(ValueError, match="LAMB in backward: embedding tables on the parameter servers do"):
        embed.distributed_model(model, Client.in_process())
    model = Bags()
    options = {"learning_rate": 0.05, "beta1": 0.8, "weight_decay": 0.01}
    optim.apply_optimizer_in_backward(optim.Adam, model.tables.parameters(), options)
    model = embed.distributed_model(model, Client.in_process())
    (group,) = model.tables.layers[0].anchor._in_backward_optimizers[0].param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.05, (0.8, 0.999), 1e-8)
    model = Bags()
    optim.apply_optimizer_in_backward(optim.Adam, model.tables.parameters(), {"max_gradient": 1.0})
    with pytest.raises(ValueError, match=r"Adam in backward: .*max_gradient.*; leave this setting out"):
        embed.distributed_model(model, Client.in_process())


def test_fbgemms_words_for_types():
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import SparseType

    for word, dtype in ((SparseType.FP16, torch.float16), ("bf16", torch.bfloat16), ("FP32", torch.float32)):
        table = embed.EmbeddingBagConfig(ROWS, DIM, "x", data_type=word)
        assert embed.EmbeddingBagCollection([table]).layers[0].dtype == dtype
        table = embed.EmbeddingBagConfig(ROWS, DIM, "x", weights_precision=word, stochastic_rounding=True)
        assert embed.EmbeddingBagCollection([table]).layers[0].dtype == dtype
    with pytest.raises(ValueError, match="data_type must be float32, bfloat16 or float16"):
        embed.EmbeddingBagCollection([embed.EmbeddingBagConfig(ROWS, DIM, "x", data_type=SparseType.INT8)])
