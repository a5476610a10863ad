"""The models of examples/ train on the servers' tables as on stock layers, to 1e-5."""

import copy
import importlib
from pathlib import Path

import pytest
import torch

import oe_runtime.torch as embed
from oe_runtime import Client

EXAMPLES = Path(__file__).parents[3] / "examples"


def two_tower(example):
    pairs = torch.stack([torch.randint(example.USERS, (64,)), torch.randint(example.ITEMS, (64,))])
    log_q = torch.rand(64).log()
    return example.TwoTower(), lambda model: model(*pairs, log_q)


def multi_task(example):
    user, item, labels = (each[:64] for each in example.examples(64))
    return example.MultiTask(), lambda model: example.loss_of(model(user, item), labels)


@pytest.mark.parametrize("make", [two_tower, multi_task])
def test_examples_equal_stock(make, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    stock, loss_of = make(importlib.import_module(f"pytorch_{make.__name__}"))
    model = copy.deepcopy(stock)
    losses = []
    with Client.in_process() as client:
        for each in (stock, embed.distributed_model(model, client)):
            optimizer = torch.optim.Adagrad(each.parameters(), 0.1)
            if each is not stock:
                optimizer = embed.distributed_optimizer(optimizer, each)
            of_each = []
            for _ in range(10):
                optimizer.zero_grad()
                loss = loss_of(each)
                loss.backward()
                optimizer.step()
                of_each.append(loss.item())
            losses.append(of_each)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
