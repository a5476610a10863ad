"""A served model follows training: full checkpoints, increments, rows that go."""

from __future__ import annotations

import numpy as np
import pytest
from serving_models import Training, batch

from oe_runtime.serving import Model


@pytest.fixture
def training(tmp_path):
    with Training(tmp_path) as training:
        yield training


def test_predictions_follow_training(training):
    x, _ = batch(64)
    training.fit()
    training.publish(10)
    with Model.load(training.export(), training.checkpoints) as model:
        assert model.version == 10
        before = model.predict(x)["output_0"]
        np.testing.assert_allclose(before, training.predict(x), atol=1e-6)
        assert not model.refresh()

        training.fit(seed=1)
        rows = training.rows()
        assert training.evict_all_but(ids=range(20)) > 0
        training.publish(20, base=10)
        assert training.rows() < rows
        assert np.abs(training.predict(x) - before).max() > 1e-3
        np.testing.assert_array_equal(model.predict(x)["output_0"], before)
        assert model.refresh()
        assert (model.version, model.checkpoint.name) == (20, "step-0000000020")
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)

        # Two increments at once, then all rows again.
        for step in (30, 40):
            training.fit(seed=step)
            training.publish(step, base=step - 10)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)
        training.fit(seed=50)
        training.publish(50)
        assert model.refresh()
        np.testing.assert_allclose(model.predict(x)["output_0"], training.predict(x), atol=1e-6)
