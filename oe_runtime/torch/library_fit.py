"""Training by a loop that a library holds.

Steps are counted, checkpoints taken and stop requests answered from within the DataLoader that it reads.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from oe_runtime.data.batches import with_following
from oe_runtime.run.course import Course
from oe_runtime.run.loops import Loop, count_rows, length
from oe_runtime.run.session import JobError


class LibraryFit:
    """One call of a library's function, whose batches the job follows.

    A step is counted when the library asks for the next batch: then the library has noted the last one. The
    last of an epoch is counted when the next epoch begins, after the library's evaluation.
    """

    def __init__(self, loop: Loop, course: Course, state: Any, epochs: int) -> None:
        self._loop, self._course, self._state, self._epochs = loop, course, state, epochs
        self._thread = threading.get_ident()
        self._handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
        self._loader: Any = None  # of the present epoch
        self._reads = False  # the library is in an epoch, whose data have not ended
        self._length: int | None = None  # batches of the present epoch
        self._drawn = 0  # batches of it that the library has, those before the checkpoint included
        self._ahead: int | None = None  # batches that the library reads before it trains on them
        self._counted = 0  # batches of it that are in the position
        self._rows: deque[int] = deque()  # of batches that were drawn and not counted
        self._losses: list[Any] = []  # since the last step

    def run(self, fit: Callable[[int], Any]) -> Any:
        """Call `fit` with the first epoch that is left; return its result."""
        read, backward = DataLoader.__iter__, torch.Tensor.backward

        def read_followed(loader: Any) -> Any:
            if torch.is_grad_enabled() and threading.get_ident() == self._thread:
                return _Epoch(self, loader, read)
            return read(loader)  # an evaluation

        def backward_noted(loss: Any, *args: Any, **named: Any) -> Any:
            self._note(loss)
            return backward(loss, *args, **named)

        self._state.has_stepped()
        with (
            _replaced(DataLoader, "__iter__", read_followed),
            _replaced(torch.Tensor, "backward", backward_noted),
        ):
            result = fit(self._course.position.epoch)
            self._end_epoch()
        return result

    def _note(self, loss: Any) -> None:
        """Before a backward pass of a loss."""
        if self._loader is None:
            raise JobError(
                "fit trains on batches that no DataLoader of PyTorch reads, so the job cannot count them: "
                "write the loop with loop.epochs and loop.batches"
            )
        if self._ahead is None and self._drawn:
            self._ahead = self._drawn - self._course.position.batch - 1
        self._losses.append(loss.detach())

    def begin_epoch(self, loader: Any, read: Callable[[Any], Any]) -> Iterator[Any]:
        """Begin a pass of the library over its data; return the batches that are left, with the next."""
        if self._reads and loader is not self._loader:
            raise JobError(
                "fit reads two DataLoaders at once, and the job can follow one: read the other one's data in "
                "its Dataset or collate_fn"
            )
        self._end_epoch()
        at = self._course.position
        if at.epoch >= self._epochs:
            raise JobError(
                f"fit begins epoch {at.epoch + 1} of {self._epochs}: let it train from the epoch that it is "
                "given, as in loop.fit(lambda first: model.fit(…, initial_epoch=first), epochs=…), or give "
                "loop.fit all epochs"
            )
        self._keep_stop_requests()
        self._course.begin_epoch(at.epoch)
        self._loader, self._reads, self._length = loader, True, length(loader)
        self._course.agree_on_batches(at.epoch, self._length)
        self._drawn = self._counted = at.batch
        resumed = self._course.goes_on()
        self._state.begin_epoch(loader, at.batch if resumed else None)
        batches = read(loader)
        for _ in range(at.batch):
            next(batches, None)
        if at.batch:
            self._state.skipped()
        self._state.begin_library_epoch(resumed=resumed)
        return with_following(batches, int(self._state.reads_ahead(loader)))

    def _keep_stop_requests(self) -> None:
        """Answer signals again as before `fit`: Lightning would end the program without a checkpoint."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._handlers.items():
            if callable(before) and signal.getsignal(number) is not before:
                signal.signal(number, before)

    def draw(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, after counting the steps of those before. Raises StopIteration."""
        trained = self._drawn - (self._ahead or 0)
        if self._ahead is not None and trained != self._length:
            self._count(trained)
        try:
            batch, following = next(batches)
        except StopIteration:
            self._reads = False
            raise
        self._drawn += 1
        self._rows.append(count_rows(batch))
        if not self._ahead:
            self._state.announce(batch, following)
        return batch

    def _end_epoch(self) -> None:
        """Count the last step of an epoch that has ended, and the epoch. One without a step was none."""
        if self._loader is None:
            return
        epoch = self._course.position.epoch
        trained = self._count(self._drawn, ends_epoch=True)
        if trained or self._counted:
            self._course.end_epoch(epoch, {})
            self._loop.warn_of_callbacks(self._state.unsaved_attributes())
        self._rows.clear()
        self._loader, self._reads = None, False

    def _count(self, trained: int, *, ends_epoch: bool = False) -> bool:
        """Count a step if there was one; with it, so many batches of the epoch are done."""
        batches = trained - self._counted
        if not batches or not self._state.has_stepped():
            return False
        rows = sum(self._rows.popleft() for _ in range(batches))
        self._counted = trained
        losses, self._losses = self._losses, []
        self._loop.note(sum(float(one.sum()) for one in losses), rows)
        self._course.own_step(rows, batches, ends_epoch=ends_epoch)
        return True


class _Epoch:
    """What a library reads in place of a DataLoader's iterator."""

    def __init__(self, fit: LibraryFit, loader: Any, read: Callable[[Any], Any]) -> None:
        self._fit = fit
        self._batches = fit.begin_epoch(loader, read)

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        return self._fit.draw(self._batches)


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of a class's method in the block."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)
