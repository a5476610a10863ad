"""Data whose order in an epoch depends on the number of epochs before it, and on nothing else.

A tf.data dataset that shuffles draws new seeds whenever an iterator is made of it. Keras makes some that it
does not read, or of which it reads one batch before the first epoch. The batches of a PyDataset are shuffled
by Python's generator, whose state is in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tensorflow.python.data.ops import dataset_ops  # the base of unary datasets has no public name


class EpochDataset(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """The same dataset; an iterator is made of it where its first batch is read, once per epoch.

    Those of `oe_runtime.data.dataset`, as it is, come without tf.data, and passed batches are not read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._batches_after = getattr(dataset, "batches_after", None)
        self._early: tuple[Any, list[Any]] | None = None  # of before the first epoch
        self._passed = 0  # batches that the next epoch need not read
        self.training = False
        super().__init__(dataset, dataset._variant_tensor)

    def skip_epochs(self, epochs: int) -> None:
        """Draw the seeds of epochs that are not read."""
        if epochs and self._early is not None:  # of the first of them
            self._early = None
            epochs -= 1
        for _ in range(0 if self._batches_after else epochs):
            iter(self._dataset)

    def pass_batches(self, batches: int) -> None:
        """Let the next epoch repeat its first unread batch in place of `batches` that nobody looks at."""
        self._passed = batches if self._batches_after else 0
        if self._passed:
            self._early = None

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
        if self._batches_after is None:
            return iter(self._dataset), []
        iterator = self._batches_after(passed)
        if not passed:
            return iterator, []
        if (batch := next(iterator, None)) is not None:
            return iterator, [batch] * (passed + 1)
        return self._batches_after(0), []


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


def shuffled_batches(library: Any, data: Any) -> Any:
    """Return the PyDataset (of tf-keras: Sequence) `data` with its batches in another order in each epoch."""

    class ShuffledBatches(library.utils.Sequence):  # type: ignore[misc]
        def __init__(self) -> None:
            names = ("workers", "use_multiprocessing", "max_queue_size")
            super().__init__(**{name: getattr(data, name) for name in names if hasattr(data, name)})
            self.seed = 0
            self.training = False
            self._epochs = 0  # that have been read
            self._order: tuple[int, Any] = (-1, None)  # of which epoch

        def __len__(self) -> int:
            return len(data)

        @property
        def num_batches(self) -> Any:
            return _number_of_batches(data)

        def __getitem__(self, index: int) -> Any:
            epoch, order = self._order
            if epoch != self._epochs:
                epoch = self._epochs
                order = np.random.default_rng((self.seed, epoch)).permutation(_number_of_batches(data))
                self._order = epoch, order
            return data[int(order[index])]

        def on_epoch_begin(self) -> None:
            if hasattr(data, "on_epoch_begin"):
                data.on_epoch_begin()

        def on_epoch_end(self) -> None:
            data.on_epoch_end()
            self._epochs += self.training

        def skip_epochs(self, epochs: int) -> None:
            """Go to where the data are after so many more epochs."""
            for _ in range(epochs):
                data.on_epoch_end()
            self._epochs += epochs

    return ShuffledBatches()


def _number_of_batches(data: Any) -> Any:
    found = getattr(data, "num_batches", None)
    return len(data) if found is None else found
