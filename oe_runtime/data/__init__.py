"""Training data: files of any columns, a generator, batches."""

from oe_runtime.data.batch import Batch
from oe_runtime.data.batches import (
    Split,
    holdout_batches,
    is_share,
    make_split,
    open_source,
    range_batches,
    training_batches,
)
from oe_runtime.data.criteo import field_cardinalities, field_rows
from oe_runtime.data.library import Rows, dataset, features
from oe_runtime.data.row_schema import Schema
from oe_runtime.data.source import Source
from oe_runtime.data.stream import Stream
from oe_runtime.errors import DataError

__all__ = [
    "Batch",
    "DataError",
    "Rows",
    "Schema",
    "Source",
    "Split",
    "Stream",
    "dataset",
    "features",
    "field_cardinalities",
    "field_rows",
    "holdout_batches",
    "is_share",
    "make_split",
    "open_source",
    "range_batches",
    "training_batches",
]
