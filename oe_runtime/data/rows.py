"""The common part of the readers: pieces of a file, broken rows, reading ahead."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import oe_runtime._core as _core
from oe_runtime.data.batch import Batch
from oe_runtime.data.row_schema import Number
from oe_runtime.errors import DataError
from oe_runtime.support import remote_files

T = TypeVar("T")
_SHOWN = 10  # broken rows shown in full


class Piece(NamedTuple):
    """Consecutive rows of a file, without the broken ones."""

    batch: Batch
    broken: list[tuple[int, str]]  # row of the piece, from 0; what is wrong with it
    read: int  # bytes of the file up to the end of the piece


class RowFile(ABC):
    """An open file of rows."""

    unit: str  # what a row is called in messages
    first = 1  # the number of the first row in messages
    is_pipe = False  # rows come when they are sent: they are read neither ahead nor by skipping

    @abstractmethod
    def parts(self, target_bytes: int) -> list[tuple[int, int]]:
        """Return starts and stops for `narrow`, about `target_bytes` apart, that together have all rows."""

    def doubts(self) -> dict[str, str]:
        """Return sentences on values of the first rows that other formats have otherwise; call it first.

        They are by category, and "" for the whole file. Files whose values have types leave none.
        """
        return {}

    @abstractmethod
    def narrow(self, start: int, stop: int) -> None:
        """Read only this part; call it before reading or skipping."""

    @abstractmethod
    def skip(self, count: int) -> int:
        """Skip `count` rows without parsing them; return how many there were."""

    @abstractmethod
    def pieces(self) -> Iterator[Callable[[], Piece]]:
        """Yield the rest, in order: pieces to be parsed on any thread."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class BrokenRows:
    """Counts the broken rows of passes over some files; more than `limit` per pass are an error.

    Each is shown once, the first ones in full.
    """

    def __init__(self, limit: int = 0, say: Callable[[str], None] | None = None) -> None:
        self.limit = limit
        self.count = 0  # in this pass
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._most = 0  # of all passes so far

    def start(self) -> None:
        """Start a new pass."""
        self.count = 0

    def add(self, path: Path, place: str, problem: str) -> None:
        """Count a broken row. Raises DataError above the limit."""
        self.count += 1
        message = f"{path} {place}: {problem}"
        if self.count > self.limit:
            if self.limit:
                message += f"; this is broken row {self.count}, --max-bad-rows allows {self.limit}"
            raise DataError(message)
        if self.count > self._most:
            self._most = self.count
            if self.count <= _SHOWN:
                self._say(f"skipped: {message}")
            elif self.count == _SHOWN + 1:
                self._say("skipped: further broken rows, which are only counted")


def read_ahead(tasks: Iterator[Callable[[], T]], threads: int = 2) -> Generator[T, None, None]:
    """Yield the results of `tasks` in order: one thread draws them, `threads` run them, a few ahead."""
    makers, runners = ThreadPoolExecutor(1, "read"), ThreadPoolExecutor(threads, "parse")

    def make() -> Future[T] | None:
        task = next(tasks, None)
        return None if task is None else runners.submit(task)

    try:
        made = deque(makers.submit(make) for _ in range(threads + 1))
        while (result := made.popleft().result()) is not None:
            made.append(makers.submit(make))
            yield result.result()
    finally:
        makers.shutdown(cancel_futures=True)
        runners.shutdown(cancel_futures=True)


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn errors of files and stores in the block into a DataError; `what` is being read."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read {what}: {remote_files.reason(error)}") from error


def scaled(values: NDArray[np.float64], number: Number) -> NDArray[np.float32]:
    """Return numbers as models take them."""
    return _core.scale_numbers(np.asarray(values, np.float64), *number.factors)
