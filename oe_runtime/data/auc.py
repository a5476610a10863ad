"""Area under the ROC curve, accuracy and log loss over any number of predictions, in constant memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_BINS = 1 << 16
_REACH = 16.0  # log-odds beyond ±16 share the outermost bins


class StreamingAuc:
    """Counts predictions in 65,536 bins of their log-odds (0.0005 wide); ties in a bin count half."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, _BINS), np.int64)
        self._loss = 0.0

    def update(self, labels: NDArray[np.float32], probabilities: NDArray[np.floating]) -> None:
        """Add predictions; both shaped (n,), labels 0 or 1."""
        p = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
        odds = np.log(p) - np.log1p(-p)
        bins = np.clip((odds + _REACH) * (_BINS / (2 * _REACH)), 0, _BINS - 1).astype(np.int64)
        positive = labels > 0.5
        self._counts[1] += np.bincount(bins[positive], minlength=_BINS)
        self._counts[0] += np.bincount(bins[~positive], minlength=_BINS)
        self._loss -= float(np.log(np.where(positive, p, 1 - p)).sum())

    def gather(self, total: Callable[[NDArray[np.generic]], NDArray[np.generic]]) -> None:
        """Replace the counts by `total` of them: the sum over several processes."""
        self._counts = total(self._counts).astype(np.int64)
        self._loss = float(total(np.array([self._loss]))[0])

    @property
    def rows(self) -> int:
        """The number of predictions added."""
        return int(self._counts.sum())

    def result(self) -> float:
        """Return the AUC; 0.5 while only one class was seen."""
        negatives, positives = self._counts
        pairs = float(negatives.sum()) * float(positives.sum())
        if not pairs:
            return 0.5
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + negatives / 2)).sum() / pairs)

    @property
    def only_label(self) -> int | None:
        """The label of all rows if they have the same one, for which there is no AUC; else None."""
        of_label = [int(counts.sum()) for counts in self._counts]
        return of_label.index(self.rows) if self.rows in of_label and self.rows else None

    def accuracy(self) -> float:
        """Return the share of predictions on the label's side of 0.5; NaN before the first prediction."""
        negatives, positives = self._counts
        right = negatives[: _BINS // 2].sum() + positives[_BINS // 2 :].sum()
        return float(right) / self.rows if self.rows else float("nan")

    def log_loss(self) -> float:
        """Return the mean −log p(label); NaN before the first prediction."""
        return self._loss / self.rows if self.rows else float("nan")
