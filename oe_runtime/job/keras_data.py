"""A tf.data dataset whose order in an epoch depends on the number of epochs before it, and on nothing else.

A dataset that shuffles draws new seeds whenever an iterator is made of it. Keras makes some that it does not
read, or of which it reads one batch before the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorflow.python.data.ops import dataset_ops  # the base of unary datasets has no public name


class EpochDataset(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """The same dataset; an iterator is made of it where its first batch is read, once per epoch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._early: tuple[Any, list[Any]] | None = None  # of before the first epoch
        self._passed = 0  # batches that the next epoch need not read
        self.training = False
        super().__init__(dataset, dataset._variant_tensor)

    def skip_epochs(self, epochs: int) -> None:
        """Draw the seeds of epochs that are not read."""
        for _ in range(epochs):
            iter(self._dataset)

    def pass_batches(self, batches: int) -> None:
        """Let the next epoch repeat its first unread batch in place of `batches` that nobody looks at."""
        self._passed = batches if hasattr(self._dataset, "after") else 0

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def begin(self) -> tuple[Any, list[Any]]:
        """Return an iterator of the next epoch, and batches that were read from it, last first."""
        if self._early is not None:
            iterator, read = self._early
            if self.training:
                self._early = None
            return iterator, list(read)
        iterator, read = self._next()
        if self.training:
            return iterator, read
        self._early = iterator, read or [next(iterator)]
        return iterator, list(self._early[1])

    def _next(self) -> tuple[Any, list[Any]]:
        passed, self._passed = self._passed, 0
        if passed:
            iterator = iter(self._dataset.after(passed))
            if (batch := next(iterator, None)) is not None:
                return iterator, [batch] * (passed + 1)
        return iter(self._dataset), []


class _Batches:
    def __init__(self, data: EpochDataset) -> None:
        self._data = data
        self._iterator: Any = None
        self._read: list[Any] = []

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator, self._read = self._data.begin()
        return self._read.pop() if self._read else next(self._iterator)
