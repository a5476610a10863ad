"""What training reads rows from: files, a generator, a stream or a table in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from oe_runtime.data.batch import Batch
from oe_runtime.data.identity import InputFile
from oe_runtime.data.work_queue import Range
from oe_runtime.errors import DataError


class Source(ABC):
    """A table of rows in a fixed order."""

    name: str  # of the data on the command line
    indivisible = ""  # why it cannot be divided among workers
    _evaluation: Source | None = None

    def describe(self) -> str:
        """Return the name of the data on the command line."""
        return self.name

    @abstractmethod
    def check(self, *, tensorflow: bool = True) -> None:
        """Raise DataError for unreadable data. Without `tensorflow`, TFRecord files are only opened."""

    def identity(self) -> list[InputFile]:
        """Return what workers on several hosts compare to know whether they have the same rows."""
        return []

    def evaluation(self) -> Source | None:
        """Return separate rows for the evaluation; None: hold rows out of these."""
        return self._evaluation

    def total_rows(self) -> int | None:
        """Return the rows of one epoch as far as they are known."""
        return None

    @abstractmethod
    def blocks(self, start_row: int = 0) -> Iterator[Batch]:
        """Yield all rows from `start_row` on, in order, in blocks of any size."""

    def ranges(self) -> list[Range]:
        """Return parts that together have all rows, for a work queue. Raises DataError if it has none."""
        raise DataError(f"{self.name} {self.indivisible}, so it cannot be divided among workers")

    def read(self, part: Range, start_row: int = 0) -> Iterator[Batch]:
        """Yield the rows of a range from its row `start_row` on, in order."""
        raise DataError(f"{self.name} has no range {part}")
