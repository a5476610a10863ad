"""EarlyStopping(restore_best_weights=True) with the rows: Keras itself keeps the dense weights only."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras


@contextlib.contextmanager
def kept(callbacks: Any, *, workers: int, library: Any = keras) -> Iterator[Any]:
    """The callbacks, and for each that restores the best weights one that does so with the rows.

    These are saved whenever an epoch is the best so far: one copy of all rows with their state, for a moment
    two, in a directory of `tempfile`'s, which is gone afterwards. `library` is the callbacks', keras or
    tf_keras. ValueError for what cannot be kept.
    """
    made = isinstance(callbacks, library.callbacks.CallbackList)  # then Keras takes it as it is
    found = callbacks.callbacks if made else keras.tree.flatten(callbacks or [])
    restoring = [one for one in found if getattr(one, "restore_best_weights", False)]
    for one in restoring:
        if workers > 1:
            raise ValueError(
                f"{type(one).__name__}(restore_best_weights=True): each of {workers} workers sees metrics of "
                "its own, but all go back together; use ModelCheckpoint(save_best_only=True) in one of them, "
                "and load_weights in all afterwards"
            )
        if made or not isinstance(one, library.callbacks.EarlyStopping):
            raise ValueError(
                f"{type(one).__name__}(restore_best_weights=True) keeps no rows: give Keras's EarlyStopping, "
                "in a list"
            )
    if not restoring:
        yield callbacks
        return
    with tempfile.TemporaryDirectory(prefix="oe-best-rows-") as directory:
        kind = type("BestRows", (_BestRows, library.callbacks.Callback), {})
        yield [*found, *(kind(one, Path(directory)) for one in restoring)]


class _BestRows:
    """A callback. Comes after its EarlyStopping, which has by then said whether the epoch was the best."""

    model: Any

    def __init__(self, stopping: Any, directory: Path) -> None:
        super().__init__()
        self._stopping = stopping
        self._directory = directory
        self._weights: Any = None  # the dense ones that the rows belong to
        self._rows: Path | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        weights = self._stopping.best_weights
        if weights is self._weights:
            return
        before, self._rows = self._rows, Path(tempfile.mkdtemp(dir=self._directory))
        self.model.client.save(self._rows)
        self._weights = weights
        if before is not None:
            shutil.rmtree(before)

    def on_train_end(self, logs: Any = None) -> None:
        """See keras.callbacks.Callback."""
        if self._rows is not None:
            self.model.client.restore(self._rows)
