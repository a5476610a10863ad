"""Histories of items with a planted order, and the measure of models that predict the next item."""

from typing import Any

import torch
from torch.utils.data import TensorDataset

USERS, ITEMS, LENGTH = 2_000, 1_000, 30  # items are 1 to ITEMS; 0 pads
NEGATIVES, HITS = 100, 10  # the hit rate at 10 among 101 items; chance is 0.099


def histories(seed: int = 0) -> torch.Tensor:
    """The items of each user in order, (USERS, LENGTH + 2), padded on the left.

    Each item has three usual successors, and each user follows one kind of them. A user takes that
    successor with a probability of 0.8, and any item otherwise.
    """
    random = torch.Generator().manual_seed(seed)
    successors = torch.stack([torch.randperm(ITEMS, generator=random) + 1 for _ in range(3)])
    kind = torch.randint(3, (USERS,), generator=random)
    items = torch.randint(1, ITEMS + 1, (USERS, LENGTH + 2), generator=random)
    follows = torch.rand(items.shape, generator=random) < 0.8
    for place in range(1, items.shape[1]):
        successor = successors[kind, items[:, place - 1] - 1]
        items[:, place] = torch.where(follows[:, place], successor, items[:, place])
    begins = torch.randint(LENGTH // 2, (USERS, 1), generator=random)
    return items * (torch.arange(items.shape[1]) >= begins)


def training_set(items: torch.Tensor) -> TensorDataset:
    """Pairs of a user's items and the item after each, both (LENGTH,), without the last item."""
    return TensorDataset(items[:, :-2], items[:, 1:-1])


@torch.no_grad()
def hit_rate(model: Any, items: torch.Tensor, seed: int = 0) -> float:
    """The share of users whose last item is among the 10 best of it and 100 items not in their history.

    `model.score(seen, candidates)` gives the scores of (users, 101) candidates after the items seen.
    """
    random = torch.Generator().manual_seed(seed)
    others = torch.rand(len(items), ITEMS + 1, generator=random)
    others.scatter_(1, items, -1)  # not those of the history
    others[:, 0] = -1  # nor the padding
    candidates = torch.cat([items[:, -1:], others.topk(NEGATIVES).indices], 1)
    was_training = model.training
    model.eval()
    scores = model.score(items[:, 1:-1], candidates)
    model.train(was_training)
    return ((scores[:, 1:] >= scores[:, :1]).sum(1) < HITS).float().mean().item()
