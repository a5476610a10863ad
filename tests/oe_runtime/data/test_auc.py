import numpy as np
import pytest

from oe_runtime.data.auc import StreamingAuc


def by_pairs(labels: np.ndarray, scores: np.ndarray) -> float:
    differences = scores[labels > 0.5][:, None] - scores[labels <= 0.5][None, :]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_equals_the_definition(scale: float) -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(2000) < 0.3).astype(np.float32)
    scores = np.clip((rng.random(2000) * 0.7 + labels * 0.2) * scale, 0, 1).astype(np.float32)
    auc = StreamingAuc()
    for part in np.array_split(np.arange(2000), 7):
        auc.update(labels[part], scores[part])
    assert auc.rows == 2000
    assert auc.result() == pytest.approx(by_pairs(labels, scores), abs=1e-3)
    p = scores.astype(np.float64)
    loss = -np.where(labels > 0.5, np.log(p), np.log1p(-p)).mean()
    assert auc.log_loss() == pytest.approx(loss, rel=1e-5)


def test_ties_and_single_classes() -> None:
    auc = StreamingAuc()
    assert auc.only_label is None
    auc.update(np.array([1, 1], np.float32), np.array([0.3, 1.0], np.float32))
    assert auc.result() == 0.5
    assert auc.only_label == 1
    auc.update(np.array([0], np.float32), np.array([0.3], np.float32))
    assert auc.only_label is None
    assert auc.result() == 0.75
    assert np.isfinite(auc.log_loss())


def test_accuracy_counts_the_right_side_of_a_half() -> None:
    auc = StreamingAuc()
    assert np.isnan(auc.accuracy())
    rng = np.random.default_rng(1)
    labels, probabilities = rng.integers(0, 2, 1000).astype(np.float32), rng.random(1000)
    for part in (slice(0, 400), slice(400, 1000)):
        auc.update(labels[part], probabilities[part])
    assert auc.accuracy() == np.mean((probabilities >= 0.5) == (labels > 0.5))
