"""Programs with loops of their own train with three more lines as without: pytorch-fm's DeepFM, SASRec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oe_runtime.torch as embed

STEPS = 40
ITEMS = 200
Loss = Callable[[Any, int], Any]


def deepfm() -> tuple[Any, Loss, Callable[[Any], Any]]:
    """As pytorch-fm's example trains it: ids of all fields in one table, from computed offsets."""
    model = pytest.importorskip("torchfm.model.dfm")
    fields = [150, 90, 120]
    ids = np.random.default_rng(0).integers(0, fields, (STEPS * 32, len(fields)))
    batches = torch.from_numpy(ids).split(32)

    def loss(model: Any, step: int) -> Any:
        x = batches[step]
        return nn.functional.binary_cross_entropy(model(x), (x[:, 0] % 3 == 0).float())

    made = model.DeepFactorizationMachineModel(fields, embed_dim=8, mlp_dims=(16, 8), dropout=0.2)
    return made, loss, lambda parameters: torch.optim.Adagrad(parameters, 0.05)


class SelfAttention(nn.Module):  # type: ignore[misc]
    """SASRec in small: items and places as rows, one block of causal attention, scores as dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS + 1, 8, padding_idx=0)
        self.places = nn.Embedding(11, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 1, 0.2, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, seen: Any, positive: Any, negative: Any) -> tuple[Any, Any]:
        places = torch.arange(1, seen.shape[1] + 1) * (seen != 0)
        rows = self.items(seen) * 8**0.5 + self.places(places)
        mask = ~torch.tril(torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool))
        rows = rows + self.attention(rows, rows, rows, attn_mask=mask)[0]
        rows = rows + self.dense(rows)
        return (rows * self.items(positive)).sum(-1), (rows * self.items(negative)).sum(-1)


def sasrec() -> tuple[Any, Loss, Callable[[Any], Any]]:
    """As SASRec.pytorch trains: Adam, zero_grad between forward and backward, L2 of all items' rows."""
    rng = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        while True:
            seen = rng.integers(1, ITEMS + 1, (16, 10)) * (np.arange(10) >= rng.integers(0, 5, (16, 1)))
            positive = np.where(seen, (seen * 7) % ITEMS + 1, 0)
            yield [torch.from_numpy(one) for one in (seen, positive, rng.integers(1, ITEMS + 1, (16, 10)))]

    drawn = [batch for batch, _ in zip(batches(), range(STEPS), strict=False)]
    criterion = nn.BCEWithLogitsLoss()

    def loss(model: Any, step: int) -> Any:
        seen, positive, negative = drawn[step]
        of_positive, of_negative = model(seen, positive, negative)
        known = np.where(positive.numpy() != 0)
        found = criterion(of_positive[known], torch.ones_like(of_positive[known]))
        found = found + criterion(of_negative[known], torch.zeros_like(of_negative[known]))
        for parameter in model.items.parameters():
            found = found + 0.0 * torch.sum(parameter**2)
        return found

    model = SelfAttention()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter.data)
    model.items.weight.data[0, :] = 0
    model.places.weight.data[0, :] = 0
    return model, loss, lambda parameters: torch.optim.Adam(parameters, 0.01, (0.9, 0.98))


@pytest.mark.parametrize("program", [deepfm, sasrec])
def test_a_program_trains_as_without_us(program: Any) -> None:
    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        model, loss_of, optimizer_of = program()
        if ours:
            model = embed.distributed_model(model)
        optimizer = optimizer_of(model.parameters())
        if ours:
            optimizer = embed.distributed_optimizer(optimizer, model)
        torch.manual_seed(2)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0]
