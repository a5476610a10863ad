"""Clicks that the examples train on: users, items, and whether the user clicked, from a planted model."""

import numpy as np

USERS, ITEMS = 2_000, 500


def clicks(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs by name, each (rows, 1), and labels; popular users and items come more often."""
    rng = np.random.default_rng(seed)
    user = (USERS * rng.random((rows, 1)) ** 3).astype("int64")
    item = (ITEMS * rng.random((rows, 1)) ** 3).astype("int64")
    taste = np.sin(user * 12.9898) + np.sin(item * 78.233)
    label = rng.random((rows, 1)) < 1 / (1 + np.exp(-2 * taste))
    return {"user": user, "item": item}, label.astype("float32")
