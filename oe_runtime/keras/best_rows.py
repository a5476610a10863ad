"""EarlyStopping(restore_best_weights=True) for rows; Keras itself keeps only the dense weights."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from oe_runtime.keras.table_variable import listing_tables


@contextlib.contextmanager
def keeping_best_rows(callbacks: Any, *, workers: int, library: Any = keras) -> Iterator[Any]:
    """Yield the callbacks, plus one that restores the rows for each that restores the best weights.

    Saves the rows whenever an epoch is the best so far: one copy of all rows with their state, for a moment
    two, in a temporary directory. `library` is that of the callbacks, keras or tf_keras. Raises ValueError
    for callbacks whose rows cannot be kept.
    """
    made = isinstance(callbacks, library.callbacks.CallbackList)  # Keras uses such a list unchanged
    found = callbacks.callbacks if made else keras.tree.flatten(callbacks or [])
    restoring = [one for one in found if getattr(one, "restore_best_weights", False)]
    for one in restoring:
        if workers > 1:
            raise ValueError(
                f"{type(one).__name__}(restore_best_weights=True): each of {workers} workers has its own "
                "metrics, but all must go back together; use ModelCheckpoint(save_best_only=True) in one of "
                "them, and load_weights in all afterwards"
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
        for one in restoring:
            _keep_dense_weights(one)
        try:
            yield [*found, *(kind(one, Path(directory)) for one in restoring)]
        finally:
            for one in restoring:
                for name in _METHODS:
                    vars(one).pop(name)


_METHODS = ("on_train_begin", "on_epoch_end", "on_train_end")  # in which EarlyStopping uses the weights


def _keep_dense_weights(stopping: Any) -> None:
    """Let the callback get and set the dense weights only, meanwhile: the rows are those in a directory."""

    def with_dense_weights(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with listing_tables(False):
                return method(*args, **kwargs)

        return call

    for name in _METHODS:
        vars(stopping)[name] = with_dense_weights(getattr(stopping, name))


class _BestRows:
    """A callback. Runs after its EarlyStopping, which has then decided whether the epoch is the best."""

    model: Any

    def __init__(self, stopping: Any, directory: Path) -> None:
        super().__init__()
        self._stopping = stopping
        self._directory = directory
        self._weights: Any = None  # the dense weights that belong to the rows
        self._rows: Path | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self._stopping.best_weights
        if weights is self._weights:
            return
        before, self._rows = self._rows, Path(tempfile.mkdtemp(dir=self._directory))
        self.model.client.save(self._rows)
        self._weights = weights
        if before is not None:
            shutil.rmtree(before)

    def on_train_end(self, logs: Any = None) -> None:
        if self._rows is not None:
            client = self.model.client
            client.fixed = ""  # of a job: no checkpoint is taken before fit has returned
            client.restore(self._rows)
