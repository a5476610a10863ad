"""The reader as a library: rows by column for `fit`, for one of several workers, from any batch on."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import pytest

from oe_runtime.data import DataError, Rows, dataset, open_source, row_schema
from oe_runtime.data.batch import concatenate

SCHEMA = row_schema.parse(
    {
        "label": "y",
        "numbers": ["price"],
        "categories": {"site": 30, "tags": {"cardinality": 9, "length": 2}},
        "weight": "w",
    },
    "schema",
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [f"{n % 2},{n},s{n % 7},t{n % 3}|t{n % 5},{1 + n % 2}" for n in range(103)]
    for name, part in (("a.csv", lines[:50]), ("b.csv", lines[50:])):
        (tmp_path / name).write_text("\n".join(["y,price,site,tags,w", *part]) + "\n")
    return tmp_path


def test_batches_by_column(rows: Path) -> None:
    whole = concatenate(list(open_source(str(rows), schema=SCHEMA).blocks()))
    for paths in (rows, str(rows / "*.csv"), [rows / "a.csv", rows / "b.csv"]):
        found = list(Rows(SCHEMA, paths, 10))
        assert [len(labels) for _, labels, _ in found] == [10] * 10 + [3]
        for name, columns in (("price", whole.dense), ("site", whole.ids[:, :1]), ("tags", whole.ids[:, 1:])):
            np.testing.assert_array_equal(np.concatenate([x[name] for x, _, _ in found]), columns)
        np.testing.assert_array_equal(np.concatenate([w for _, _, w in found]), whole.weights)
    grouped = list(Rows(SCHEMA, rows, 10, grouped=True))
    np.testing.assert_array_equal(np.concatenate([x["ids"] for x, _, _ in grouped]), whole.ids)


def test_workers_and_positions(rows: Path) -> None:
    def prices(*, start: int = 0, **options: object) -> list[list[float]]:
        reader = Rows(SCHEMA, rows, 10, **options)  # type: ignore[arg-type]
        return [x["price"][:, 0].tolist() for x, _, _ in reader.batches(start)]

    whole = prices()
    assert prices(start=4) == whole[4:]
    parts = [prices(rank=rank, workers=3) for rank in range(3)]
    assert [a + b + c for a, b, c in zip(*parts, strict=True)] == whole
    assert prices(rank=1, workers=3, start=7) == parts[1][7:]
    held = prices(holdout=0.1, held=True)
    kept = prices(holdout=0.1)
    assert sorted(chain.from_iterable(held + kept)) == sorted(chain.from_iterable(whole))
    assert len(list(chain.from_iterable(held))) == 10
    # A last batch with fewer rows than workers is nobody's.
    assert [len(prices(rank=rank, workers=5)) for rank in (0, 4)] == [10, 10]


def test_fit_takes_it(rows: Path) -> None:
    keras = pytest.importorskip("keras")
    price, site = keras.Input((1,), name="price"), keras.Input((1,), dtype="int64", name="site")
    tags = keras.Input((2,), dtype="int64", name="tags")
    vectors = [keras.layers.Flatten()(keras.layers.Embedding(n, 2)(x)) for n, x in ((31, site), (10, tags))]
    out = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()([price, *vectors]))
    model = keras.Model({"price": price, "site": site, "tags": tags}, out)
    model.compile("adam", "binary_crossentropy")
    data = dataset(SCHEMA, rows, 10)
    seen = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert len(seen) == 2
    assert all(np.isfinite(seen))
    assert sum(1 for _ in data) == 11
    rest = dataset(SCHEMA, rows, 10, start=8)
    assert sum(len(labels) for _, labels, _ in rest) == 23
    assert sum(1 for _ in rest.concatenate(data)) == 14


def test_a_job_reads_it_without_tf_data(rows: Path) -> None:
    pytest.importorskip("tensorflow")
    from oe_runtime.keras.job_data import EpochDataset

    def prices(batches: Iterable[Any]) -> list[list[float]]:
        return [features["price"][:, 0].numpy().tolist() for features, _, _ in batches]

    data = dataset(SCHEMA, rows, 10, start=2)
    epoch = EpochDataset(data)
    epoch.training = True
    assert isinstance(epoch.begin()[0], GeneratorType)
    whole = prices(data)
    assert prices(epoch) == whole
    epoch.pass_batches(4)
    assert prices(epoch) == [whole[4]] * 4 + whole[4:]
    assert prices(epoch) == whole


def test_what_is_wrong_is_said(rows: Path) -> None:
    with pytest.raises(DataError, match="paths is empty"):
        Rows(SCHEMA, [], 10)
    with pytest.raises(DataError, match=r"names the file .*/a.csv twice"):
        Rows(SCHEMA, [rows, rows / "a.csv"], 10)
    with pytest.raises(DataError, match="did you mean avazu"):
        Rows("avazo", rows, 10)
    with pytest.raises(ValueError, match="rank is 2, expected 0 up to 1"):
        Rows(SCHEMA, rows, 10, rank=2, workers=2)
    with pytest.raises(ValueError, match="batch_size is 1, expected at least a row"):
        Rows(SCHEMA, rows, 1, workers=2)
    with pytest.raises(ValueError, match="held=True gives the rows of holdout"):
        Rows(SCHEMA, rows, 10, held=True)
    (rows / "b.csv").write_text("y,price,site,tags,w\n1,x,a,,1\n")
    with pytest.raises(DataError, match=r"b.csv line 2: price is 'x', expected a number or nothing"):
        Rows(SCHEMA, rows, 10)
