"""The rows of a run: in which batches it trains on them, and which it evaluates on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oe_runtime.data import Batch, Source, Stream, holdout_batches, make_split, training_batches
from oe_runtime.run.options import RunOptions
from oe_runtime.run.position import Position
from oe_runtime.run.ranks import Ranks
from oe_runtime.run.run_directory import RunError
from oe_runtime.run.shared_input import SharedInput

_BEGIN = Position()


def columns_fixed(options: RunOptions) -> dict[str, Any]:
    """Return the settings of the columns alone, for a program that reads rows of them by itself."""
    return {"schema": options.schema.describe(), "max_cardinality": options.max_cardinality}


class RunInput:
    """A source as the flags say: --batch-size, --epochs, --steps, --holdout, --eval-data."""

    def __init__(self, options: RunOptions, source: Source) -> None:
        self.source = source
        self.split = make_split(source, options.holdout)
        self.shared: SharedInput | None = None  # the work queue of asynchronous workers
        self._options = options
        # Rows without which a batch is left out: a program's step has some in each worker.
        self._least = options.size if options.program else 1

    def fixed(self) -> dict[str, Any]:
        """Return the settings of the rows that a resumed run must share with the run it goes on from."""
        options = self._options
        return {
            "data": options.data,
            "eval_data": options.eval_path,
            "batch_size": options.batch_size,
            "holdout": options.holdout,
            "follow": options.follow,
            **columns_fixed(options),
        }

    @property
    def batch_size(self) -> int:
        """The rows of a batch of all workers."""
        return self._options.batch_size

    @property
    def stream(self) -> Stream | None:
        """The source, if it is a stream."""
        return self.source if isinstance(self.source, Stream) else None

    def evaluates(self) -> bool:
        """Return whether there is anything to evaluate on: held-out rows, or rows of their own."""
        return self._options.eval and bool(self._options.holdout or self.source.evaluation())

    def read_epoch(self, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch `start` on."""
        batches = training_batches(self.source, self.split, self.batch_size, start)
        return (batch for batch in batches if batch.rows >= self._least)

    def read_held_out(self, ranks: Ranks) -> Iterator[Batch]:
        """Yield this worker's part, which may be empty, of each batch to evaluate on."""
        if self.shared is not None:  # of which worker 0 evaluates alone
            yield from self.shared.read_held_out()
            return
        for batch in holdout_batches(self.source, self.split, self.batch_size):
            yield batch.part(ranks.rank, ranks.count)

    @property
    def held_out(self) -> str:
        """The rows to evaluate on, in words."""
        apart = self.source.evaluation()
        return apart.describe() if apart else "the held-out rows"

    def steps(self, at: Position = _BEGIN) -> int | None:
        """Return the run's steps as far as known; estimated from bytes while a file is read.

        The epochs of these rows are counted from `at`.
        """
        limits = [] if self._options.steps is None else [self._options.steps]
        rows = self.source.total_rows()
        if self._options.epochs is not None:
            if rows is None:
                return None
            whole, rest = divmod(self.split.training_rows(rows), self.batch_size)
            per_epoch = whole + (rest >= self._least)
            limits.append(at.step - at.batch + per_epoch * (self._options.epochs - at.epoch))
        return min(limits, default=None)

    def has_ended(self, position: Position) -> bool:
        """Whether a run at `position` has no more steps, by --steps or --epochs."""
        if self._options.steps is not None and position.step >= self._options.steps:
            return True
        return self._options.epochs is not None and position.epoch >= self._options.epochs

    def no_rows(self) -> RunError:
        """Return the error of an epoch without a batch."""
        if self.stream is not None:
            return RunError(f"{self.source.describe()} ended without a row to train on")
        return RunError(f"{self.source.describe()} has no rows to train on (holdout {self._options.holdout})")
