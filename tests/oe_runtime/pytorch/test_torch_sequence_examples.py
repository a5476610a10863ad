"""The models of examples/pytorch_sasrec.py and pytorch_hstu.py train on our tables as on stock layers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import oe_runtime.torch as embed
from oe_runtime import Client

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("program", "name", "in_worker"),
    [("pytorch_sasrec", "SASRec", ["positions"]), ("pytorch_hstu", "HSTU", [])],
)
def test_losses_are_those_of_stock_layers(
    program: str, name: str, in_worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module, sequences = (importlib.import_module(one) for one in (program, "sequences"))
    items = sequences.histories()[:200]
    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = getattr(module, name)()
        if ours:
            model = embed.distributed_model(model, Client.in_process(servers=2), in_worker=in_worker)
            assert isinstance(model.items, embed.Embedding)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
        if ours:
            optimizer = embed.distributed_optimizer(optimizer, model)
        torch.manual_seed(2)
        losses = []
        for step in range(10):
            chosen = items[step % 4 :: 4]
            seen, positive = chosen[:, :-2], chosen[:, 1:-1]
            shape = positive.shape if name == "SASRec" else (module.SAMPLED,)
            optimizer.zero_grad()
            loss = model(seen, positive, torch.randint(1, sequences.ITEMS + 1, shape))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append([*losses, sequences.hit_rate(model, items)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-2] < found[0][0]
