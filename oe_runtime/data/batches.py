"""Batches from a source of rows: which rows are held out, and where a resumed run continues."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TypeVar

import numpy as np

from oe_runtime.data import stream
from oe_runtime.data.batch import Batch, rebatch
from oe_runtime.data.files import DataFiles
from oe_runtime.data.row_schema import CRITEO, Schema
from oe_runtime.data.rows import BrokenRows
from oe_runtime.data.source import Source
from oe_runtime.data.work_queue import Range
from oe_runtime.errors import DataError

_T = TypeVar("_T")


def open_source(
    name: str,
    max_cardinality: int = 0,
    max_bad_rows: int = 0,
    schema: Schema = CRITEO,
    eval_data: str = "",
    *,
    follow: bool = False,
) -> Source:
    """Open `generate:ROWS[:SEED]`, or a schema's rows at a path. DataError says that there is no such data.

    Up to `max_bad_rows` broken rows per pass are skipped, counted and shown. `eval_data` are separate rows
    for the evaluation, none of which may be in `name`, or a share to hold out. To `follow` a directory is to
    read what arrives in it, too; `-` is standard input. Both are a Stream.
    """
    if follow or name == stream.STDIN:
        return _open_stream(name, max_cardinality, max_bad_rows, schema, eval_data)
    if name.startswith("generate:"):
        from oe_runtime.data import generate  # here, so that `python -m` can run that module

        if schema != CRITEO:
            raise DataError(
                f"{name} makes rows of Criteo's columns, not of another schema; name a file of yours"
            )
        if eval_data and not is_share(eval_data):
            raise DataError(
                f"--eval-data {eval_data}: {name} has a signal of its own, so only its own rows can be held "
                "out; give a share, such as 0.1"
            )
        return generate.parse(name, max_cardinality)
    source = DataFiles(name, max_cardinality, BrokenRows(max_bad_rows), schema)
    if is_share(eval_data):
        if (apart := source.evaluation()) is not None:
            raise DataError(
                f"--eval-data {eval_data}: {name} has rows for the evaluation, {apart.describe()}; leave the "
                "share out, or name train.csv alone with --data"
            )
    elif eval_data:
        source.evaluate_on(DataFiles(eval_data, max_cardinality, schema=schema))
    return source


def _open_stream(
    name: str, max_cardinality: int, max_bad_rows: int, schema: Schema, eval_data: str
) -> stream.Stream:
    if name.startswith("generate:"):
        raise DataError(f"--follow: {name} are rows that are all there; name a directory that grows")
    if is_share(eval_data):
        raise DataError(f"{name}: a stream holds out no rows; name others with --eval-data PATH")
    found: stream.Stream
    if name == stream.STDIN:
        found = stream.StandardInput(max_cardinality, max_bad_rows, schema)
    else:
        found = stream.GrowingDirectory(name, max_cardinality, max_bad_rows, schema)
    if eval_data:
        found.evaluate_on(DataFiles(eval_data, max_cardinality, schema=schema))
    return found


def is_share(eval_data: str) -> bool:
    """Whether --eval-data is a share of the rows to hold out, and no path."""
    try:
        return 0 < float(eval_data) < 1
    except ValueError:
        return False


class Split:
    """Holds out a fixed share of the rows, evenly spread: with 1/10, rows 9, 19, 29, …"""

    def __init__(self, holdout: float) -> None:
        if not 0 <= holdout < 1:
            raise ValueError(f"the share of rows to hold out is {holdout}, expected 0 ≤ share < 1")
        exact = Fraction(holdout)
        # A share that thousandths would round to nothing keeps its value.
        self._share = exact.limit_denominator(1000) or exact.limit_denominator(10**9)

    def held_before(self, row: int) -> int:
        """Return how many of the rows before `row` are held out."""
        return row * self._share.numerator // self._share.denominator

    def training_rows(self, rows: int) -> int:
        """Return how many of the first `rows` rows are trained on."""
        return rows - self.held_before(rows)

    def row_of(self, index: int) -> int:
        """Return a row with `index` training rows before it."""
        high = 2 * index + 2
        while self.training_rows(high) < index:
            high *= 2
        return bisect.bisect_left(range(high), index, lo=index, key=self.training_rows)

    def held(self, start: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return for rows start … start+rows whether they are held out."""
        edges = np.arange(start, start + rows + 1, dtype=np.int64) * self._share.numerator
        counts = edges // self._share.denominator
        held: np.ndarray[tuple[int], np.dtype[np.bool_]] = counts[1:] > counts[:-1]
        return held


def make_split(source: Source, holdout: float) -> Split:
    """Return the split of a source: nothing is held out where separate rows exist for the evaluation."""
    return Split(0.0 if source.evaluation() else holdout)


def training_batches(source: Source, split: Split, batch_size: int, skip: int = 0) -> Iterator[Batch]:
    """Yield one epoch's training rows in order, `batch_size` at a time; the last batch may be shorter.

    `skip` batches are passed over without parsing.
    """
    start = split.row_of(skip * batch_size)
    return _batches(_select(source.blocks(start), split, start, held=False), batch_size)


def range_batches(
    source: Source, split: Split, part: Range, batch_size: int, done: int = 0, *, held: bool = False
) -> Iterator[Batch]:
    """Yield rows of a work queue's range, to train on or `held` out. Each range is split on its own.

    `done` of them are passed over.
    """
    start = 0 if held else split.row_of(done)
    return _batches(_select(source.read(part, start), split, start, held=held), batch_size)


def holdout_batches(source: Source, split: Split, batch_size: int) -> Iterator[Batch]:
    """Yield the rows of the evaluation in order; the last batch may be shorter."""
    if (apart := source.evaluation()) is not None:
        return _batches(apart.blocks(), batch_size)
    return _batches(_select(source.blocks(), split, 0, held=True), batch_size)


def _batches(blocks: Iterator[Batch], batch_size: int) -> Iterator[Batch]:
    return (batch for batch, _ in rebatch(blocks, batch_size) if batch is not None)


def _select(blocks: Iterator[Batch], split: Split, row: int, *, held: bool) -> Iterator[Batch]:
    for block in blocks:
        mask = split.held(row, block.rows)
        row += block.rows
        if not held and not mask.any():
            yield block
        else:
            yield block.take(mask if held else ~mask)


def with_following(items: Iterable[_T], count: int) -> Iterator[tuple[_T, list[_T]]]:
    """Yield each item with the next ones: `count` of them, or all up to the end or to a None.

    A None says that no item is there yet: the items before it do not wait for more. It is yielded if there
    are none.
    """
    window: deque[_T] = deque()
    for item in items:
        if item is not None:
            window.append(item)
        elif not window:
            yield item, []
        while window and (item is None or len(window) > count):
            yield window.popleft(), list(window)
    while window:
        yield window.popleft(), list(window)
