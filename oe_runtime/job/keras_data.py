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
        self._early: tuple[Any, Any] | None = None  # of before the first epoch, with its first batch
        self.training = False
        super().__init__(dataset, dataset._variant_tensor)

    def skip_epochs(self, epochs: int) -> None:
        """Draw the seeds of epochs that are not read."""
        for _ in range(epochs):
            iter(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    def begin(self) -> tuple[Any, list[Any]]:
        """Return an iterator of the next epoch, and batches that were read from it."""
        if self._early is not None:
            iterator, batch = self._early
            if self.training:
                self._early = None
            return iterator, [batch]
        iterator = iter(self._dataset)
        if self.training:
            return iterator, []
        self._early = iterator, next(iterator)
        return iterator, [self._early[1]]


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
