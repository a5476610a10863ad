"""What tests of warm starts share for Keras 3 and tf-keras."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oe_runtime.client import Client
from oe_runtime.errors import CheckpointError

ROWS = 80
TABLES = ("table_a", "table_b", "linear_a")


@dataclass(frozen=True)
class WarmStarts:
    """A library, our package for it, and its tests' models and data."""

    keras: Any
    embed: Any
    two_fields: Any
    permutations: Any
    random_ids: Any

    def compile(self, model: Any) -> Any:
        model.compile(self.keras.optimizers.SGD(0.5), "binary_crossentropy")
        return model

    def trained(self) -> tuple[Any, Any, Any]:
        """A stock model after some steps, and data."""
        x, y = self.permutations(batches=4)
        stock = self.compile(self.two_fields())
        stock.fit(x, y, batch_size=ROWS, epochs=3, verbose=0)
        return stock, x, y

    def converted(self, stock: Any, client: Any = None, **options: Any) -> Any:
        return self.compile(self.embed.distributed_model(stock, client, **options))

    def assert_rows_of(self, model: Any, stock: Any) -> None:
        for name in TABLES:
            found = model.get_layer(name).table.rows(np.arange(ROWS))
            np.testing.assert_allclose(found, stock.get_layer(name).get_weights()[0], atol=1e-7)

    def assert_equal_training(self, models: list[Any], stock: Any, x: Any, y: Any) -> None:
        """Training goes on from the rows, as in the stock model."""
        for one in (*models, self.compile(stock)):
            one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        for model in models:
            np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-5)

    def loaded(self, path: Path, stock: Any, x: Any) -> list[Any]:
        """Models that have loaded the stock model's file after and before compile."""
        late, early = self.converted(self.two_fields()), self.embed.distributed_model(self.two_fields())
        late.load_weights(path)
        early.load_weights(path)
        self.compile(early)
        for model in (late, early):
            self.assert_rows_of(model, stock)
            assert [getattr(w, "path", w.name).removesuffix(":0") for w in model.weights] == [
                f"{layer}/{part}" for layer in ("hidden", "logit") for part in ("kernel", "bias")
            ]
            np.testing.assert_allclose(model.predict(x, verbose=0), stock.predict(x, verbose=0), atol=1e-6)
        return [late, early]

    def refusing(self, path: Path, match: str) -> Any:
        """A model that has refused another model's file, and is as it was."""
        model = self.converted(self.two_fields())
        x, y = self.random_ids(64)
        model.fit(x, y, verbose=0)
        before = model.predict(x, verbose=0)
        with pytest.raises(CheckpointError, match=match):
            model.load_weights(path)
        np.testing.assert_array_equal(model.predict(x, verbose=0), before)
        return model

    def assert_predicts_before_compile(self) -> None:
        """As the stock model does: with the rows that it brings, later with others, and then trained."""
        stock, x, y = self.trained()
        to_numpy = np.asarray if self.keras.__version__.startswith("2") else self.keras.ops.convert_to_numpy
        with Client.in_process() as client:
            model = self.embed.distributed_model(stock, client)
            expected = stock.predict(x, verbose=0)
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
            np.testing.assert_allclose(model.predict_on_batch(x), expected, atol=1e-6)
            few = [part[:9] for part in x]
            np.testing.assert_allclose(to_numpy(model(few)), expected[:9], atol=1e-6)
            matrix = np.random.default_rng(0).random((ROWS, 4), dtype=np.float32)
            for one in (model, stock):
                one.get_layer("table_a").set_weights([matrix])
            expected = stock.predict(x, verbose=0)
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
            assert not client.stats()["servers"][0]["tables"]
            with pytest.raises(RuntimeError, match="compile the model first"):
                _ = model.tables
            self.compile(model)
            self.assert_rows_of(model, stock)
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
            self.assert_equal_training([model], stock, x, y)

            again = self.embed.distributed_model(self.two_fields(), client, fresh=False)
            with pytest.warns(UserWarning, match="table table_a has 80 rows on the servers, which .* before"):
                before = again.predict(x, verbose=0)
            self.compile(again)
            assert np.abs(again.predict(x, verbose=0) - before).max() > 0.01
