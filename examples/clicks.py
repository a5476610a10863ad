"""Clicks and histories that the examples train on, from planted models: what is learned is in the data."""

import numpy as np

USERS, ITEMS = 2_000, 500
SIZES = {"site": 100, "app": 200, "words": 500, "pages": 300}  # ids of each feature of `impressions`


def clicks(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs by name, each (rows, 1), and labels; popular users and items come more often."""
    rng = np.random.default_rng(seed)
    user = (USERS * rng.random((rows, 1)) ** 3).astype("int64")
    item = (ITEMS * rng.random((rows, 1)) ** 3).astype("int64")
    taste = np.sin(user * 12.9898) + np.sin(item * 78.233)
    label = rng.random((rows, 1)) < 1 / (1 + np.exp(-2 * taste))
    return {"user": user, "item": item}, label.astype("float32")


def impressions(rows: int, seed: int = 0) -> tuple[np.ndarray, dict[str, list[np.ndarray]], np.ndarray]:
    """Four numbers, lists of one to five ids by feature, and labels, as of advertisements."""
    rng = np.random.default_rng(seed)
    numbers = rng.random((rows, 4), "float32")
    score = numbers[:, 0] - numbers[:, 1]
    lists = {}
    for feature, size in SIZES.items():
        lengths = rng.integers(1, 6, rows)
        ids = (size * rng.random(lengths.sum()) ** 3).astype("int64")
        lists[feature] = np.split(ids, lengths.cumsum()[:-1])
        score = score + np.add.reduceat(np.sin(ids * 12.9898), lengths.cumsum() - lengths) / np.sqrt(lengths)
    label = rng.random(rows) < 1 / (1 + np.exp(-2 * score))
    return numbers, lists, label.astype("float32")
