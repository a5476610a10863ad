"""Criteo-format training data: files, a generator, batches."""

from oe_runtime.data.batches import (
    Source,
    Split,
    holdout_batches,
    open_source,
    range_batches,
    split_of,
    training_batches,
)
from oe_runtime.data.errors import DataError
from oe_runtime.data.schema import Batch, field_cardinalities, field_rows

__all__ = [
    "Batch",
    "DataError",
    "Source",
    "Split",
    "field_cardinalities",
    "field_rows",
    "holdout_batches",
    "open_source",
    "range_batches",
    "split_of",
    "training_batches",
]
